"""`flowgrpo-ray manifest`: what it prints keeps every schema and rule, and holds the configuration's pools."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import rules
import yaml
from manifests import KUBERAY, ROOT, documents, needs_kubectl, of_kind, schema_problems

from flowgrpo_ray.cluster.manifest import CONFIG_MAP_BYTES, Manifest, build, job_name, overlay_names
from flowgrpo_ray.config import load
from flowgrpo_ray.errors import ConfigError

PROMPTS = ["data.train_prompts=/data/prompts/train.txt", "data.eval_prompts=s3://bucket/test.txt"]
SPLIT = ["pools.placement=split", "pools.rollout.replicas=3", "pools.rollout.num_gpus=1", "pools.rollout.num_cpus=4"]
CASES = {
    "demo": ("tiny_ocr", [], "cpu-demo"),
    "split demo": ("tiny_ocr", ["pools.placement=split", "pools.rollout.replicas=5"], "cpu-demo"),
    "three rewards": ("tiny_three_rewards", [], "cpu-demo"),
    "one GPU": ("sd35_medium_ocr_1gpu", PROMPTS, "gpu-1"),
    "eight GPUs": ("sd35_medium_ocr", PROMPTS, "gpu-8"),
    "eight GPUs one by one": ("sd35_medium_ocr", PROMPTS, "gpu-1"),
    "flux": ("flux_fast_ocr", PROMPTS, "gpu-8"),
    "64 GPUs": ("sd35_medium_ocr", [*PROMPTS, "pools.learner.replicas=64"], "gpu-64"),
    "uneven": ("sd35_medium_ocr", [*PROMPTS, "pools.learner.replicas=12"], "gpu-8"),
    "split": ("sd35_medium_ocr", [*PROMPTS, *SPLIT, "pools.learner.replicas=2"], "gpu-8"),
    "fractions": ("sd35_medium_ocr", [*PROMPTS, "rewards.pickscore={weight: 1.0}",
                                      "pools.reward.pickscore={replicas: 6, num_gpus: 0.25, num_cpus: 1.5}"], "gpu-8"),
    "large actors": ("tiny_ocr", ["pools.reward.ocr.num_cpus=12", "pools.reward.ocr.replicas=3"], "cpu-demo"),
    "half CPUs": ("tiny_ocr", ["pools.reward.ocr.num_cpus=0.5", "pools.reward.ocr.replicas=9"], "cpu-demo"),
    "no CPUs": ("tiny_ocr", ["pools.reward.ocr.num_cpus=0"], "cpu-demo"),
}


def made(name: str, overrides: list[str], overlay: str, **options: str) -> Manifest:
    return build(load(ROOT / "configs" / f"{name}.yaml", overrides), overlay, **options)


def groups_of(manifest: Manifest) -> dict:
    job = of_kind(manifest.documents, "RayJob")[0]
    return {group["groupName"]: group for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]}


@pytest.mark.parametrize("case", CASES)
def test_manifest_keeps_schemas_and_rules(case) -> None:
    docs = documents(made(*CASES[case]).to_yaml())
    assert schema_problems(docs) == []
    assert rules.problems(docs) == []


@needs_kubectl
def test_packaged_overlays_are_those_of_deploy() -> None:
    done = subprocess.run([sys.executable, str(KUBERAY / "render.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert overlay_names() == sorted(folder.name for folder in (KUBERAY / "overlays").iterdir())


def test_split_pools_get_groups_of_their_own() -> None:
    groups = groups_of(made(*CASES["split"]))
    shape = {name: (g["replicas"], g["minReplicas"], g["maxReplicas"], rules.ray_container(g)["resources"]["limits"])
             for name, g in groups.items()}
    assert shape["learner"][:3] == (1, 1, 1) and shape["learner"][3]["nvidia.com/gpu"] == "2"
    assert shape["rollout"][:3] == (3, 1, 6)
    assert (shape["rollout"][3]["cpu"], shape["rollout"][3]["nvidia.com/gpu"]) == ("4", "1")
    assert shape["reward-cpu"][:3] == (2, 1, 4) and shape["reward-cpu"][3]["cpu"] == "8"
    assert shape["reward-gpu"][:3] == (0, 0, 0)


def test_uneven_ranks_are_spread_evenly() -> None:
    learner = groups_of(made(*CASES["uneven"]))["learner"]
    assert (learner["replicas"], rules.ray_container(learner)["resources"]["limits"]["nvidia.com/gpu"]) == (2, "6")


def test_configuration_travels_resolved_and_names_its_groups() -> None:
    docs = documents(made("tiny_ocr", ["run.name=My.Run_1", "train.seed=7"], "cpu-demo", image="r.io/me:1").to_yaml())
    job, cards = of_kind(docs, "RayJob")[0], of_kind(docs, "ConfigMap")
    assert job["metadata"]["name"] == "my-run-1"
    assert job["spec"]["entrypoint"] == "flowgrpo-ray train /etc/flowgrpo-ray/config.yaml"
    assert job["spec"]["metadata"] == {"run": "My.Run_1", "run_dir": "/data/runs/My.Run_1"}
    config = rules.run_config(job, docs)
    assert (config.run.name, config.run.dir, config.train.seed) == ("My.Run_1", "/data/runs", 7)
    assert config.pools.learner.label_selector == {"pool": "learner"}
    assert config.pools.reward["ocr"].label_selector == {"pool": "reward-cpu"}
    assert docs.index(cards[0]) < docs.index(job)  # applied first
    for group in [job["spec"]["rayClusterSpec"]["headGroupSpec"], *job["spec"]["rayClusterSpec"]["workerGroupSpecs"]]:
        volume = next(v for v in group["template"]["spec"]["volumes"] if v["name"] == "config")
        assert volume["configMap"] == {"name": cards[0]["metadata"]["name"]}
        assert rules.ray_container(group)["image"] == "r.io/me:1"


def test_local_prompts_travel_along(tmp_path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "words.txt").write_text('the word "ONE"\n')
    (tmp_path / "a" / "words.txt").write_text('the word "TWO"\n')
    docs = made("tiny_ocr", [f"data.train_prompts={tmp_path}/words.txt", f"data.eval_prompts={tmp_path}/a/words.txt"],
                "cpu-demo").documents
    config = rules.run_config(of_kind(docs, "RayJob")[0], docs)
    data = of_kind(docs, "ConfigMap")[0]["data"]
    for path, text in ((config.data.train_prompts, "ONE"), (config.data.eval_prompts, "TWO")):
        assert text in data[path.removeprefix("/etc/flowgrpo-ray/")]


def test_binary_prompts_travel_as_binary(tmp_path) -> None:
    (tmp_path / "p.parquet").write_bytes(b"PAR1\xff\xfe")
    docs = made("tiny_ocr", [f"data.train_prompts={tmp_path}/p.parquet", "data.eval_prompts=null"], "cpu-demo").documents
    assert of_kind(docs, "ConfigMap")[0]["binaryData"] == {"p.parquet": "UEFSMf/+"}
    assert schema_problems(docs) == []


def test_prompts_too_large_for_a_config_map_are_named_with_the_ways_out(tmp_path) -> None:
    file = tmp_path / "train.txt"
    file.write_text("x" * (CONFIG_MAP_BYTES + 1))
    with pytest.raises(ConfigError, match=r"train\.txt has 1,000,001 bytes.*volume of the pods.*/data/.*s3://"):
        made("tiny_ocr", [f"data.train_prompts={file}"], "cpu-demo")


def test_paths_that_the_pods_do_not_see_are_named_together(tmp_path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError) as error:
        made("sd35_medium_ocr", [f"model.path={tmp_path}/model", f"lora.init_from={tmp_path}/adapter",
                                 f"rewards.ocr.options.rec_model_dir={tmp_path}"], "gpu-8")
    lines = str(error.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "data.train_prompts", "data.eval_prompts", "model.path", "lora.init_from", "rewards.ocr.options.rec_model_dir"]
    assert "no file" in lines[0] and "name of the Hugging Face Hub" in lines[2]


@pytest.mark.parametrize(("case", "options", "text"), [
    (("sd35_medium_ocr", PROMPTS, "cpu-demo"), {}, "cpu-demo has no GPUs.*learner.num_gpus is 1.*gpu-8"),
    (("tiny_ocr", [], "gpu-9"), {}, "gpu-9.*did you mean gpu-"),
    (("tiny_ocr", [], "cpu-demo"), {"run_dir": "/mnt/runs"}, "/mnt/runs is on no volume.*s3://.*below /data"),
    (("tiny_ocr", ["pools.learner.label_selector.pool=mine"], "cpu-demo"), {}, "pools.learner.label_selector.pool is mine"),
])
def test_what_does_not_fit_is_named(case, options, text) -> None:
    with pytest.raises(ConfigError, match=f"(?s){text}"):
        made(*case, **options)


def test_object_store_as_run_directory_needs_no_volume() -> None:
    manifest = made("tiny_ocr", [], "cpu-demo", run_dir="s3://bucket/runs")
    docs = documents(manifest.to_yaml())
    assert rules.problems(docs) == [] and of_kind(docs, "PersistentVolumeClaim") == []
    assert "flowgrpo-s3" in " ".join(manifest.notes)
    for group in groups_of(manifest).values():
        assert {"name": "data", "emptyDir": {}} in group["template"]["spec"]["volumes"]
        assert rules.ray_container(group)["envFrom"][-1]["secretRef"]["name"] == "flowgrpo-s3"


def test_own_code_is_noted() -> None:
    assert any("own_reward must be importable in the image" in note for note in made(*CASES["three rewards"]).notes)


@pytest.mark.parametrize(("run", "name"), [("tiny-ocr", "tiny-ocr"), ("7B.x", "run-7b-x"), ("a" * 60, "a" * 40), ("-A-", "a")])
def test_run_names_become_names_of_kubernetes(run, name) -> None:
    assert job_name(run) == name


@needs_kubectl
def test_components_go_on_top_of_a_printed_manifest(tmp_path) -> None:
    (tmp_path / "job.yaml").write_text(made(*CASES["eight GPUs"]).to_yaml())
    there = os.path.relpath(KUBERAY, tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump({
        "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": ["job.yaml"],
        "components": [f"{there}/components/{name}" for name in ("spot", "kueue", "model-cache", "monitoring")]}))
    done = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    docs = documents(done.stdout)
    assert schema_problems(docs) == [] and rules.problems(docs) == []
    fetch = of_kind(docs, "RayJob")[0]["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["initContainers"][1]
    assert fetch["command"][2] == "/etc/flowgrpo-ray/config.yaml"


def test_command_prints_yaml_and_notes_apart() -> None:
    done = subprocess.run([sys.executable, "-m", "flowgrpo_ray.cli", "manifest", "configs/tiny_ocr.yaml", "run.name=x",
                           "--overlay", "cpu-demo"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "note: run.dir" in done.stderr
    assert of_kind(documents(done.stdout), "RayJob")[0]["metadata"]["name"] == "x"
