"""deploy/kuberay: every overlay with every component keeps the schemas and the rules, and each rule can fail."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import rules
from manifests import COMPONENTS, KUBERAY, OVERLAYS, ROOT, kustomize, needs_kubectl, of_kind, rendered, schema_problems

Tree = dict[str, Any]
ALL = ("s3", "spot", "kueue", "model-cache", "monitoring")
CASES = [*((overlay, parts) for overlay in OVERLAYS for parts in [(), *((name,) for name in COMPONENTS)]),
         ("gpu-8", ALL), ("gpu-8", (*ALL, "interactive"))]


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("kustomize")


@needs_kubectl
@pytest.mark.parametrize(("overlay", "components"), CASES,
                         ids=lambda value: value if isinstance(value, str) else "+".join(value))
def test_overlays_with_components_keep_schemas_and_rules(overlay, components, scratch) -> None:
    docs = rendered(overlay, components, scratch)
    assert schema_problems(docs) == []
    assert rules.problems(docs) == []
    wanted = "RayCluster" if "interactive" in components else "RayJob"
    assert [tree["kind"] for tree in docs if tree["kind"].startswith("Ray")] == [wanted]


@needs_kubectl
def test_interactive_cluster_leaves_the_name_of_its_secrets_to_them(scratch) -> None:
    """KubeRay keeps the token in a Secret that is named like the cluster."""
    [cluster] = of_kind(rendered("gpu-8", (*ALL, "interactive"), scratch), "RayCluster")
    secrets = set(re.findall(r"'secretRef': \{[^}]*'name': '([^']+)'", str(cluster)))
    assert "flowgrpo" in secrets and cluster["metadata"]["name"] not in secrets


@needs_kubectl
def test_interactive_cluster_has_the_groups_of_the_job(scratch) -> None:
    job, cluster = rendered("gpu-8", ALL, scratch), rendered("gpu-8", (*ALL, "interactive"), scratch)
    assert of_kind(cluster, "RayCluster")[0]["spec"] == of_kind(job, "RayJob")[0]["spec"]["rayClusterSpec"]


@needs_kubectl
def test_spot_moves_rollout_and_rewards_and_nothing_else(scratch) -> None:
    spec = of_kind(rendered("gpu-8", ("spot",), scratch), "RayJob")[0]["spec"]["rayClusterSpec"]
    pods = {"head": spec["headGroupSpec"]["template"]["spec"],
            **{g["groupName"]: g["template"]["spec"] for g in spec["workerGroupSpecs"]}}
    for name, pod in pods.items():
        preemptible = name in ("rollout", "reward-cpu", "reward-gpu")
        assert (pod.get("nodeSelector") == {"flowgrpo-ray/capacity": "spot"}) == preemptible, name
        assert (pod["terminationGracePeriodSeconds"] == 90) == preemptible, name
        assert ("affinity" in pod) == (not preemptible), name
        assert any(t.get("value") == "spot" for t in pod.get("tolerations", [])) == preemptible, name


@needs_kubectl
def test_kueue_labels_and_suspends_the_job(scratch) -> None:
    job = of_kind(rendered("gpu-8", ("kueue",), scratch), "RayJob")[0]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "flowgrpo"
    assert job["metadata"]["annotations"]["kueue.x-k8s.io/elastic-job"] == "true"
    assert job["spec"]["suspend"] is True


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_model_cache_fetches_the_configuration_of_the_run_on_the_node(overlay, scratch) -> None:
    job = of_kind(rendered(overlay, ("model-cache",), scratch), "RayJob")[0]
    for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        pod, main = group["template"]["spec"], rules.ray_container(group)
        owner, fetch = pod["initContainers"]
        assert owner["command"] == ["chown", "1000:1000", "/cache"]
        assert fetch["command"][:3] == ["flowgrpo-ray", "fetch", job["metadata"]["annotations"]["flowgrpo-ray/config"]]
        assert fetch["command"][-1] == ("rewards" if group["groupName"].startswith("reward") else "model")
        env, fetch_env = ({e["name"]: e.get("value") for e in c["env"]} for c in (main, fetch))
        assert env["HF_HOME"] == fetch_env["HF_HOME"] and env["HF_HUB_OFFLINE"] == "1"
        assert "HF_HUB_OFFLINE" not in fetch_env
        assert next(v for v in pod["volumes"] if v["name"] == "cache")["hostPath"]["type"] == "DirectoryOrCreate"


@needs_kubectl
def test_image_of_a_users_kustomization_reaches_every_container(tmp_path) -> None:
    (tmp_path / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        f"resources: [{os.path.relpath(KUBERAY, tmp_path.resolve())}/overlays/gpu-8]\n"
        f"components: [{os.path.relpath(KUBERAY, tmp_path.resolve())}/components/model-cache]\n"
        "images: [{name: flowgrpo-ray, newName: registry.example.com/me/flowgrpo-ray, newTag: mine}]\n")
    images = set(re.findall(r"\bimage: .*", kustomize(tmp_path)))
    assert images == {"image: registry.example.com/me/flowgrpo-ray:mine"}


@needs_kubectl
def test_patch_fails_if_the_worker_groups_are_in_another_order(tmp_path) -> None:
    tree = tmp_path / "kuberay"
    shutil.copytree(KUBERAY, tree)
    file = tree / "base" / "rayjob.yaml"
    file.write_text(file.read_text().replace("groupName: rollout", "groupName: other"))
    done = subprocess.run(["kubectl", "kustomize", str(tree / "overlays" / "cpu-demo")], capture_output=True, text=True)
    assert done.returncode != 0 and "test" in done.stderr


def test_yaml_is_clean() -> None:
    done = subprocess.run([sys.executable, "-m", "yamllint", "--strict", "-c", str(KUBERAY / ".yamllint"), str(KUBERAY)],
                          capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


# Each rule is seen failing --------------------------------------------------------------------------------------------

def _spec(docs: list[Tree]) -> Tree:
    return of_kind(docs, "RayJob")[0]["spec"]


def _cluster(docs: list[Tree]) -> Tree:
    return _spec(docs)["rayClusterSpec"]


def _head(docs: list[Tree]) -> Tree:
    return _cluster(docs)["headGroupSpec"]


def _group(docs: list[Tree], i: int = 0) -> Tree:
    return _cluster(docs)["workerGroupSpecs"][i]


def _pod(docs: list[Tree], i: int = 0) -> Tree:
    return _group(docs, i)["template"]["spec"]


def _container(docs: list[Tree], i: int = 0) -> Tree:
    return _pod(docs, i)["containers"][0]


def _in_entrypoint(old: str, new: str) -> Callable[[list[Tree]], None]:
    def change(docs: list[Tree]) -> None:
        assert old in _spec(docs)["entrypoint"]
        _spec(docs)["entrypoint"] = _spec(docs)["entrypoint"].replace(old, new)

    return change


BROKEN: dict[str, Callable[[list[Tree]], object]] = {
    "must be a DNS-1035 label": lambda d: of_kind(d, "RayJob")[0]["metadata"].update(name="a" * 48),
    "submissionMode is not HTTPMode": lambda d: _spec(d).update(submissionMode="K8sJobMode"),
    "no submitter pod": lambda d: _spec(d).update(submitterConfig={"backoffLimit": 1}),
    "backoffLimit is not 3": lambda d: _spec(d).update(backoffLimit=0),
    "need shutdownAfterJobFinishes": lambda d: _spec(d).update(shutdownAfterJobFinishes=False),
    "exclude each other": lambda d: _spec(d).update(deletionStrategy={"deletionRules": []}),
    "the entrypoint must ask for nothing": lambda d: _spec(d).update(entrypointNumCpus=1),
    "rayVersion is": lambda d: _cluster(d).update(rayVersion="2.40.0"),
    "authOptions.mode is not token": lambda d: _cluster(d).pop("authOptions"),
    "the autoscaler is not v2": lambda d: _cluster(d)["autoscalerOptions"].update(version="v1"),
    'resources.CPU is not "0"': lambda d: _head(d).pop("resources"),
    "labels in rayStartParams": lambda d: _group(d)["rayStartParams"].update(labels="pool=learner"),
    "both at the top and in rayStartParams": lambda d: _head(d)["rayStartParams"].update({"num-cpus": "0"}),
    "is not valid in Kubernetes": lambda d: _group(d)["labels"].update(pool="a b"),
    "needs restartPolicy Never": lambda d: _pod(d).update(restartPolicy="Always"),
    "the head's ports are": lambda d: _head(d)["template"]["spec"]["containers"][0]["ports"].pop(),
    "the worker groups are not": lambda d: _cluster(d)["workerGroupSpecs"].reverse(),
    "labels are not {pool: learner}": lambda d: _group(d)["labels"].update(pool="x"),
    "is not between": lambda d: _group(d, 2).update(replicas=99),
    "minReplicas and maxReplicas differ": lambda d: _group(d).update(maxReplicas=2),
    "autoscaler: it needs /tmp": lambda d: _cluster(d)["autoscalerOptions"].pop("volumeMounts"),
    "may run as root": lambda d: _pod(d)["securityContext"].update(runAsNonRoot=False),
    "seccomp is not RuntimeDefault": lambda d: _pod(d)["securityContext"].pop("seccompProfile"),
    "containers get a token of Kubernetes": lambda d: _pod(d).pop("automountServiceAccountToken"),
    "bind the autoscaler's role": lambda d: _head(d)["template"]["spec"].update(serviceAccountName="flowgrpo"),
    "the autoscaler has no token": lambda d: _head(d)["template"]["spec"]["volumes"].pop(),
    "there is no ServiceAccount": lambda d: _pod(d).update(serviceAccountName="other"),
    "is given twice": lambda d: _container(d)["env"].append({"name": "HOME", "value": "/"}),
    "mounts without a volume": lambda d: _pod(d)["volumes"].pop(),
    "sees the token of Kubernetes": lambda d: _head(d)["template"]["spec"]["containers"][0]["volumeMounts"].append(
        {"name": "kubernetes", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}),
    "containers of several images": lambda d: _pod(d)["initContainers"].append({**_container(d), "image": "other"}),
    "is on the read-only root": lambda d: _container(d)["env"][0].update(value="/root"),
    "not spilled to a volume of their own": lambda d: _group(d)["rayStartParams"].update({"object-spilling-directory": "/tmp"}),
    "/dev/shm is KubeRay's": lambda d: _container(d)["volumeMounts"].append({"name": "tmp", "mountPath": "/dev/shm"}),
    "is not a number of bytes": lambda d: _group(d)["rayStartParams"].update({"object-store-memory": "8Gi"}),
    "more than 40 %": lambda d: _group(d)["rayStartParams"].update({"object-store-memory": str(200 << 30)}),
    "requests are not limits": lambda d: _container(d)["resources"]["requests"].update(memory="1Gi"),
    "the root is writable": lambda d: _container(d)["securityContext"].update(readOnlyRootFilesystem=False),
    "capabilities are": lambda d: _container(d)["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]),
    "runs as root": lambda d: _container(d)["securityContext"].update(runAsUser=0),
    "no NetworkPolicy is for all pods": lambda d: [d.remove(p) for p in of_kind(d, "NetworkPolicy")],
    "no pod has a port": lambda d: of_kind(d, "NetworkPolicy")[0]["spec"]["ingress"][1]["ports"][0].update(port=9999),
    "no port gone": lambda d: of_kind(d, "PodMonitor")[1]["spec"]["podMetricsEndpoints"].append({"port": "gone"}),
    "selects no pod": lambda d: of_kind(d, "PodMonitor")[0]["spec"]["selector"]["matchLabels"].update(x="y"),
    "a Secret is written down": lambda d: d.append({"kind": "Secret", "metadata": {"name": "s"}}),
    "rights are given": lambda d: d.append({"kind": "RoleBinding", "metadata": {"name": "s"}}),
    "has its value in a manifest": lambda d: _container(d)["env"].append({"name": "HF_TOKEN", "value": "hf_x"}),
    "names configs/sd35_medium_ocr.yaml, and the entrypoint another": _in_entrypoint("sd35_medium_ocr", "sd35_medium_ocr_1gpu"),
    "pools.autoscaling is false": _in_entrypoint("pools.autoscaling=true", ""),
    "no volume that outlives the pods": _in_entrypoint("$FLOWGRPO_RUNS", "/tmp/runs"),
    "is met by 0 groups": _in_entrypoint("selector.pool=reward-cpu", "selector.pool=reward"),
    "reward-cpu: maxReplicas 0": lambda d: _group(d, 2).update(replicas=0, minReplicas=0, maxReplicas=0),
    "rollout: maxReplicas 4": lambda d: _group(d, 1).update(maxReplicas=4),
    "do not hold the pools": _in_entrypoint("pools.autoscaling", "pools.learner.replicas=9 pools.autoscaling"),
    "object-store-memory is less than": lambda d: _group(d)["rayStartParams"].update({"object-store-memory": str(2 << 30)}),
    "do not tolerate the taint": lambda d: _pod(d).update(tolerations=[]),
}


@needs_kubectl
@pytest.mark.parametrize("text", BROKEN)
def test_broken_rule_is_found(text, scratch) -> None:
    docs = copy.deepcopy(rendered("gpu-8", ("monitoring",), scratch))
    assert rules.problems(docs) == []
    BROKEN[text](docs)
    assert any(text in problem for problem in rules.problems(docs)), rules.problems(docs)


@needs_kubectl
@pytest.mark.parametrize("path", [
    ("spec", "entrypont"), ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "volume")])
def test_unknown_key_breaks_the_schema(path, scratch) -> None:
    docs = rendered("gpu-8", (), scratch)
    tree = of_kind(docs, "RayJob")[0]
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = "x"
    assert any(path[-1] in problem for problem in schema_problems(docs))
    of_kind(docs, "NetworkPolicy")[0]["spec"]["ingres"] = []
    assert any("ingres" in problem for problem in schema_problems(docs))
