"""Rewards in environments of their own: another Python, or one that Ray makes with pip."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import foreign_python
import numpy as np
import pytest
import ray
import runs
from silent_server import SilentServer

from actors import environments
from actors.dispatch import Task
from actors.environments import check_environments, start_hint
from actors.events import drive
from actors.placement import actor_options
from actors.pool import ActorPool
from actors.reward import RewardActor
from flowgrpo_ray.config import load
from flowgrpo_ray.config.schema import EnvironmentConfig, PoolConfig
from flowgrpo_ray.errors import ConfigError, FlowGrpoError, ResourceError

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", autouse=True)
def as_the_command_has_it(tmp_path_factory):
    """One try at an environment, as where the command starts Ray, and another folder than the sources': Ray's processes
    look for modules in the folder that the driver was started in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNTIME_ENV_RETRY_TIMES", "1")
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        yield


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return str(foreign_python.linked(tmp_path_factory.mktemp("linked") / "venv"))


@dataclass
class Pool:
    """A pool of one reward actor in an environment, and the loop around it."""

    environment: dict[str, Any]
    spec: str
    options: dict[str, Any] = field(default_factory=dict)
    start_timeout_s: float = 60.0
    env: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Pool:
        environment = EnvironmentConfig(**self.environment)

        def spawn(index, incarnation):
            options = actor_options(PoolConfig(num_cpus=0.1, env=self.env), f"{id(self)}-{index}-{incarnation}",
                                    environment=environment, start_timeout_s=self.start_timeout_s)
            return ray.remote(RewardActor).options(**options).remote("mine", self.spec, self.options)

        self.pool = ActorPool(
            "reward.mine", 1, spawn,
            start_timeout_s=self.start_timeout_s, max_deaths=0, start_hint=start_hint("mine", environment))
        try:
            self._drive(lambda: self.pool.all_ready)
        except BaseException:
            self.pool.shutdown()
            raise
        return self

    def __exit__(self, *exc):
        self.pool.shutdown()

    def _drive(self, done):
        drive([self.pool], done, "the test")

    def score(self, images) -> list[float] | Exception:
        ends: list[Any] = []
        n = len(images)
        self.pool.submit(Task(
            what="score", method="score", args=(["p"] * n, [{}] * n, None, None, ray.put(images)), order=(0,), timeout_s=60,
            on_done=lambda answer, _: ends.append(answer["scores"]["mine"].tolist()), on_failed=ends.append))
        self._drive(lambda: ends)
        return ends[0]


def images(n=3):
    return np.random.default_rng(0).integers(0, 256, (n, 16, 24, 3), np.uint8)


# Another Python -------------------------------------------------------------------------------------------------------

def test_a_reward_runs_in_another_python(ray_cluster, python):
    assert python != sys.executable
    with Pool({"py_executable": python}, "only_there:where", {"executable": python}) as pool:
        assert pool.score(images()) == [1.0] * 3


def test_scores_there_are_those_here(ray_cluster, python):
    with Pool({"py_executable": python}, "jpeg_compressibility") as there, Pool({}, "jpeg_compressibility") as here:
        assert there.score(images()) == here.score(images())


def test_an_error_that_only_the_other_python_knows(ray_cluster, python):
    with Pool({"py_executable": python}, "only_there:fails") as pool:
        error = pool.score(images())
        assert isinstance(error, Exception) and "not today" in str(error)


def test_modules_of_ones_own_can_be_put_on_its_path(ray_cluster, python):
    own = str(Path(__file__).parents[1] / "support")
    with Pool({"py_executable": python}, "own_rewards:brightness", env={"PYTHONPATH": own}) as pool:
        assert len(pool.score(images())) == 3


def test_a_path_with_a_space_and_a_quote(ray_cluster, python, tmp_path):
    odd = tmp_path / "it's a folder"
    odd.symlink_to(Path(python).parents[1])
    with Pool({"py_executable": str(odd / "bin" / "python")}, "jpeg_compressibility") as pool:
        assert len(pool.score(images())) == 3


@pytest.mark.slow
def test_training_with_a_reward_of_another_python(ray_cluster, python, tmp_path):
    config = runs.small_config(tmp_path, "foreign", 1, {
        "rewards.mine.python": "only_there:where", "rewards.mine.options": {"executable": python},
        "rewards.mine.environment.py_executable": python, "pools.reward.mine.num_cpus": 0.1})
    finished = runs.run(config)
    (row,) = finished.rows
    assert row["reward_mean/mine"] == 1.0 and row["scoring_failures/mine"] == 0


def config_with(path, **pool):
    return load(None, {"rewards": {"mine": {"type": "jpeg_compressibility", "environment": {"py_executable": str(path)}}},
                       "pools.reward": {"mine": {"num_cpus": 0.1, **pool}}})


def wrong_python(kind: str, folder: Path) -> str:
    path = folder / "venv"
    if kind == "missing":
        return str(path / "bin" / "python")
    if kind == "folder":
        return str(folder)
    if kind == "foreign":
        return "/bin/ls"
    if kind.startswith("prints "):
        path.write_text(f"#!/bin/sh\nprintf '%b\\n' '{kind.removeprefix('prints ')}'\n")
        path.chmod(0o700)
        return str(path)
    if kind in ("not executable", "no python", "other python"):
        path.write_text({"not executable": "", "no python": "#!/bin/sh\necho what >&2\nexit 3\n", "other python":
                         f"""#!/bin/sh\necho '{{"python": "3.9.1", "ray": "{ray.__version__}", "numpy": "2.0"}}'\n"""}[kind])
        path.chmod(0o600 if kind == "not executable" else 0o700)
        return str(path)
    records = {"no ray": (), "other ray": (("ray", "2.9.3"),), "no numpy": (("ray", ray.__version__),)}[kind]
    return str(foreign_python.pretend(path, *records))


OURS = f"the run has Python {sys.version.split()[0]} with Ray {ray.__version__}"


@pytest.mark.parametrize(("kind", "message"), [
    ("missing", "does not exist"),
    ("folder", "is no file, but a folder"),
    ("foreign", "does not run as a Python does: "),
    ("not executable", "is not executable"),
    ("no python", "does not run as a Python does: what"),
    ("prints [1]", "does not run as a Python does: it printed '[1]'"),
    ("prints {}", "does not run as a Python does: it printed '{}'"),
    ("prints " + '{"python": 3, "ray": null, "numpy": null}', "does not run as a Python does: it printed"),
    ("prints \\0377", "does not run as a Python does: it printed"),
    ("prints ", "does not run as a Python does: exit code 0"),
    ("other python", f"is Python 3.9.1 with Ray {ray.__version__}, and {OURS}"),
    ("no ray", f"is Python {sys.version.split()[0]} with Ray (none), and {OURS}"),
    ("other ray", f"is Python {sys.version.split()[0]} with Ray 2.9.3, and {OURS}"),
    ("no numpy", "has no numpy"),
])
def test_a_wrong_python_is_an_error_before_any_actor_starts(ray_cluster, tmp_path, kind, message):
    path = wrong_python(kind, tmp_path)
    with pytest.raises(ConfigError) as error:
        check_environments(config_with(path))
    assert f"rewards.mine.environment.py_executable {path!r}" in str(error.value) and message in str(error.value)
    assert "import" not in str(error.value), "how it was asked says nothing to people"


def test_a_right_python_passes(ray_cluster, python):
    check_environments(config_with(python))


def test_a_wrong_python_ends_a_run_that_has_not_begun(ray_cluster, tmp_path):
    config = runs.small_config(tmp_path, "wrong", 1, {
        "rewards.mine.type": "jpeg_incompressibility", "pools.reward.mine.num_cpus": 0.1,
        "rewards.mine.environment.py_executable": str(tmp_path / "nowhere")})
    watcher = runs.Watcher()
    with pytest.raises(ConfigError, match="nowhere' on .* does not exist"):
        runs.run(config, watcher)
    assert not any("actors" in text for text in watcher.said)
    assert not (tmp_path / "wrong" / "metrics").exists()


def test_on_a_cluster_a_task_looks_where_the_actors_would_be(ray_cluster, python, monkeypatch):
    monkeypatch.setattr(environments, "_all_here", lambda: False)
    check_environments(config_with(python))
    with pytest.raises(ConfigError, match="does not exist"):
        check_environments(config_with("/nowhere/python"))


def test_a_cluster_without_such_a_node_yet_is_not_held_up(ray_cluster, caplog):
    pool = PoolConfig(num_cpus=0.1, label_selector={"pool": "later"})
    assert environments._examine_there("rewards.mine", "/nowhere/python", pool, wait_s=1) is None
    assert "no node could take the task" in caplog.text


def test_a_python_that_is_nowhere_on_the_node_ends_at_the_deadline_with_a_hint(ray_cluster, tmp_path):
    path = str(tmp_path / "gone")  # Ray itself would try for ever, and say nothing
    with pytest.raises(ResourceError, match=rf"not ready within 2 s .*does {path} .* exist, with Ray"):
        Pool({"py_executable": path}, "jpeg_compressibility", start_timeout_s=2).__enter__()


@pytest.mark.slow
def test_other_versions_of_packages(ray_cluster, tmp_path):
    python = str(foreign_python.installed(tmp_path / "venv", f"ray=={ray.__version__}", "numpy==2.1.3", "pillow"))
    module = tmp_path / "versions.py"
    module.write_text("import numpy\n\n\ndef version(images, prompts, metadata):\n"
                      "    return [float(numpy.__version__.rpartition('.')[0])] * len(images)\n")
    check_environments(config_with(python))
    with Pool({"py_executable": python}, "versions:version", env={"PYTHONPATH": str(tmp_path)}) as pool:
        assert pool.score(images()) == [2.1] * 3
    assert not np.__version__.startswith("2.1.")


# pip ------------------------------------------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_environment_that_ray_makes_with_pip(ray_cluster, tmp_path):
    source = "def one(images, prompts, metadata):\n    import torch\n    return [float(torch.ones(1))] * len(images)\n"
    wheel = foreign_python.wheel(tmp_path, "made_with_pip", source)
    with pytest.raises(ImportError):
        import made_with_pip  # noqa: F401
    with Pool({"pip": [str(wheel)]}, "made_with_pip:one", start_timeout_s=400) as pool:
        assert pool.score(images()) == [1.0] * 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_pip_says_ends_the_run(ray_cluster, tmp_path):
    missing = str(tmp_path / "missing-1-py3-none-any.whl")
    with pytest.raises(FlowGrpoError) as error:
        Pool({"pip": [missing]}, "jpeg_compressibility", start_timeout_s=400).__enter__()
    text = str(error.value)
    assert text.startswith("pool reward.mine: the environment of actor 0 could not be made: ERROR:")
    assert missing in text and "Traceback" not in text


def test_an_environment_that_takes_too_long_ends_the_run(ray_cluster):
    with closing(SilentServer()) as server, pytest.raises(FlowGrpoError) as error:
        wheel = f"slow @ http://127.0.0.1:{server.port}/slow-1-py3-none-any.whl"
        Pool({"pip": [wheel]}, "jpeg_compressibility", start_timeout_s=2).__enter__()
    assert "rewards.mine.environment.pip" in str(error.value) or "within the timeout of 2 seconds" in str(error.value)


def test_variables_of_the_pool_reach_a_foreign_python(monkeypatch):
    made = environments.runtime_env(EnvironmentConfig(py_executable="/p"), {"A": "1", "PYTHONPATH": "/own"}, 60)
    assert made == {"py_executable": "/p", "env_vars": {"A": "1", "PYTHONPATH": f"{environments.FOREIGN}{os.pathsep}/own"}}
    assert environments.runtime_env(EnvironmentConfig(), {"A": "1"}, 60) == {"env_vars": {"A": "1"}}
    assert {path.name for path in environments.FOREIGN.iterdir()} - {"__pycache__"} == {"actors.py", "flowgrpo_ray.py"}
