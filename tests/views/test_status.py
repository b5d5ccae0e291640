import json

from flowgrpo_ray.views.status import PoolStatus, RunStatus


def test_a_status_survives_json() -> None:
    status = RunStatus(run="demo", run_id="1a2b", run_dir="/runs/demo", phase="sampling", step=3, steps=30, version=3,
                       queue={"scoring": 2}, pools={"rollout": PoolStatus(target=2, ready=1, nodes={"10.0.0.1": 1})})
    assert RunStatus.from_json(json.loads(json.dumps(status.to_json()))) == status
