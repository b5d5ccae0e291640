"""Rules that no schema says: those of KubeRay's operator (which rejects such a resource, or lets it hang), and our own.

`problems(docs)` is a list of sentences; an empty one is a set of manifests that keeps them all.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manifests import ROOT, of_kind

from flowgrpo_ray.cluster.sizes import object_store, step_bytes
from flowgrpo_ray.cluster.versions import RAY_VERSION
from flowgrpo_ray.config import Config, load
from flowgrpo_ray.config.schema import PoolConfig

Tree = dict[str, Any]
HEAD_PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080, "as-metrics": 44217, "dash-metrics": 44227}
DNS_1035, LABEL_VALUE = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?"), re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
UNITS = {"": 1, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 1e3, "M": 1e6, "G": 1e9}
SECRET_NAME = re.compile(r"TOKEN|PASSWORD|SECRET|KEY", re.IGNORECASE)


def problems(docs: list[Tree]) -> list[str]:
    found: list[str] = []
    for job in of_kind(docs, "RayJob"):
        found += list(_job(job))
        found += list(_cluster(job["spec"]["rayClusterSpec"], docs))
        found += list(_run(job, docs))
    for cluster in of_kind(docs, "RayCluster"):
        found += list(_name(cluster["metadata"]["name"], 63 - len("-headgroup")))
        found += list(_cluster(cluster["spec"], docs))
    if not of_kind(docs, "RayJob") and not of_kind(docs, "RayCluster"):
        found.append("there is neither a RayJob nor a RayCluster")
    found += list(_network(docs))
    found += list(_secrets(docs))
    return found


# KubeRay --------------------------------------------------------------------------------------------------------------

def _name(name: str, longest: int) -> Iterator[str]:
    if not DNS_1035.fullmatch(name) or len(name) > longest:
        yield f"name {name!r} must be a DNS-1035 label of at most {longest} characters"


def _job(job: Tree) -> Iterator[str]:
    spec = job["spec"]
    yield from _name(job["metadata"]["name"], 47)
    if spec.get("submissionMode") != "HTTPMode":
        yield "submissionMode is not HTTPMode"
    if {"submitterPodTemplate", "submitterConfig"} & spec.keys():
        yield "HTTPMode has no submitter pod"
    if spec.get("backoffLimit") != 3:
        yield "backoffLimit is not 3"
    ends = spec.get("shutdownAfterJobFinishes")
    if not ends and (spec.get("suspend") or spec.get("ttlSecondsAfterFinished")):
        yield "suspend and ttlSecondsAfterFinished need shutdownAfterJobFinishes"
    if ends and "deletionStrategy" in spec:
        yield "shutdownAfterJobFinishes and deletionStrategy exclude each other"
    if {"clusterSelector", "entrypointNumCpus", "entrypointNumGpus", "entrypointResources"} & spec.keys():
        yield "the entrypoint must ask for nothing: the head has 0 CPUs, so it would wait for ever"
    if not spec.get("entrypoint"):
        yield "there is no entrypoint"


def _cluster(spec: Tree, docs: list[Tree]) -> Iterator[str]:
    if spec.get("rayVersion") != RAY_VERSION:
        yield f"rayVersion is {spec.get('rayVersion')}, and the images carry {RAY_VERSION}"
    if spec.get("authOptions") != {"mode": "token"}:
        yield "authOptions.mode is not token"
    options = spec.get("autoscalerOptions", {})
    if not spec.get("enableInTreeAutoscaling") or (options.get("version"), options.get("idleTimeoutSeconds")) != ("v2", 300):
        yield "the autoscaler is not v2 with an idle time of 300 s"
    head, groups = spec["headGroupSpec"], spec["workerGroupSpecs"]
    if head.get("resources", {}).get("CPU") != "0":
        yield "the head's resources.CPU is not \"0\""
    for name, group in [("head", head), *((g["groupName"], g) for g in groups)]:
        params = group.get("rayStartParams", {})
        if "labels" in params:
            yield f"{name}: labels in rayStartParams"
        if group.get("resources") and params.keys() & {"num-cpus", "num-gpus", "memory", "resources"}:
            yield f"{name}: resources both at the top and in rayStartParams"
        for key, value in group.get("labels", {}).items():
            if not LABEL_VALUE.fullmatch(value) or len(value) > 63:
                yield f"{name}: label {key}={value!r} is not valid in Kubernetes"
        if group["template"]["spec"].get("restartPolicy", "Never") != "Never":
            yield f"{name}: autoscaler v2 needs restartPolicy Never, or none"
        yield from _pod(name, group, docs)
    ports = {port["name"]: port["containerPort"] for port in ray_container(head).get("ports", [])}
    if ports != HEAD_PORTS:
        yield f"the head's ports are {ports}"
    if [g["groupName"] for g in groups] != ["learner", "rollout", "reward-cpu", "reward-gpu"]:
        yield "the worker groups are not learner, rollout, reward-cpu, reward-gpu"
    for group in groups:
        name, low, high = group["groupName"], group["minReplicas"], group["maxReplicas"]
        if group.get("labels") != {"pool": name}:
            yield f"{name}: labels are not {{pool: {name}}}"
        if not low <= group["replicas"] <= high:
            yield f"{name}: replicas {group['replicas']} is not between {low} and {high}"
        if name == "learner" and low != high:
            yield "learner: minReplicas and maxReplicas differ"
    yield from _autoscaler(options)


def _autoscaler(options: Tree) -> Iterator[str]:
    yield from _restricted("autoscaler", {"name": "autoscaler", **options})
    if {mount["name"] for mount in options.get("volumeMounts", [])} != {"tmp", "kubernetes"}:
        yield "autoscaler: it needs /tmp and the Kubernetes token"


# Pods -----------------------------------------------------------------------------------------------------------------

def ray_container(group: Tree) -> Tree:
    return group["template"]["spec"]["containers"][0]


def _pod(name: str, group: Tree, docs: list[Tree]) -> Iterator[str]:
    pod, params, main = group["template"]["spec"], group["rayStartParams"], ray_container(group)
    security = pod.get("securityContext", {})
    if not security.get("runAsNonRoot") or not security.get("runAsUser") or not security.get("fsGroup"):
        yield f"{name}: the pod may run as root"
    if security.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield f"{name}: seccomp is not RuntimeDefault"
    if pod.get("automountServiceAccountToken") is not False:
        yield f"{name}: the pod's containers get a token of Kubernetes"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    if name == "head":
        if "serviceAccountName" in pod:
            yield "head: KubeRay would bind the autoscaler's role to the account that serviceAccountName names"
        if "projected" not in volumes.get("kubernetes", {}):
            yield "head: the autoscaler has no token"
    elif pod.get("serviceAccountName") not in {tree["metadata"]["name"] for tree in of_kind(docs, "ServiceAccount")}:
        yield f"{name}: there is no ServiceAccount {pod.get('serviceAccountName')}"
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        yield from _restricted(f"{name}/{container['name']}", container)
        names = [entry["name"] for entry in container.get("env", [])]
        if len(names) != len(set(names)):
            yield f"{name}/{container['name']}: a variable is given twice"
        if unknown := {mount["name"] for mount in container["volumeMounts"]} - volumes.keys():
            yield f"{name}/{container['name']}: mounts without a volume: {sorted(unknown)}"
        if "kubernetes" in {mount["name"] for mount in container["volumeMounts"]}:
            yield f"{name}/{container['name']}: sees the token of Kubernetes"
    if len({c["image"] for c in [*pod.get("initContainers", []), *pod["containers"]]}) > 1:
        yield f"{name}: containers of several images"
    env = {entry["name"]: entry.get("value") for entry in main["env"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in main["volumeMounts"]}
    spill = params.get("object-spilling-directory")
    for what, path in (("/tmp", "/tmp"), ("HOME", env.get("HOME")), ("HF_HOME", env.get("HF_HOME")), ("spilling", spill)):
        if not any(str(path) == mount or str(path).startswith(mount + "/") for mount in mounts):
            yield f"{name}: {what} ({path}) is on the read-only root"
    if list(mounts.values()).count(mounts.get(spill)) != 1 or mounts.get(spill) in ("tmp", "home"):
        yield f"{name}: objects are not spilled to a volume of their own"
    if "/dev/shm" in mounts:
        yield f"{name}: /dev/shm is KubeRay's to mount, as large as the memory limit"
    store = params.get("object-store-memory", "")
    if not store.isdecimal():
        yield f"{name}: object-store-memory is not a number of bytes"
    elif int(store) > 0.4 * quantity(main["resources"]["limits"]["memory"]):
        yield f"{name}: object-store-memory is more than 40 % of the memory limit, which it counts against"


def _restricted(where: str, container: Tree) -> Iterator[str]:
    resources, context = container.get("resources", {}), container.get("securityContext", {})
    if not resources.get("limits") or resources.get("limits") != resources.get("requests"):
        yield f"{where}: requests are not limits"
    if not {"cpu", "memory"} <= resources.get("limits", {}).keys():
        yield f"{where}: limits lack cpu or memory"
    if context.get("readOnlyRootFilesystem") is not True or context.get("allowPrivilegeEscalation") is not False:
        yield f"{where}: the root is writable, or privileges may rise"
    allowed = {"drop": ["ALL"], "add": ["CHOWN"]} if container["name"] == "cache-owner" else {"drop": ["ALL"]}
    if context.get("capabilities") != allowed:
        yield f"{where}: capabilities are {context.get('capabilities')}"
    if context.get("runAsUser") == 0 and container["name"] != "cache-owner":
        yield f"{where}: runs as root"


# Network and secrets --------------------------------------------------------------------------------------------------

def _pods(docs: list[Tree]) -> list[tuple[dict[str, str], set[str]]]:
    """(labels as KubeRay makes them, names of ports) of each kind of pod."""
    out = []
    for tree in [job["spec"]["rayClusterSpec"] for job in of_kind(docs, "RayJob")] + [
            cluster["spec"] for cluster in of_kind(docs, "RayCluster")]:
        for kind, group in [("head", tree["headGroupSpec"]), *(("worker", g) for g in tree["workerGroupSpecs"])]:
            labels = {**group["template"]["metadata"]["labels"], "ray.io/node-type": kind}
            out.append((labels, {port["name"] for port in ray_container(group).get("ports", [])}))
    return out


def _network(docs: list[Tree]) -> Iterator[str]:
    pods = _pods(docs)

    def selected(selector: Tree) -> list[set[str]]:
        return [ports for labels, ports in pods if selector["matchLabels"].items() <= labels.items()]

    if not any(len(selected(policy["spec"]["podSelector"])) == len(pods) for policy in of_kind(docs, "NetworkPolicy")):
        yield "no NetworkPolicy is for all pods"
    for policy in of_kind(docs, "NetworkPolicy"):
        for rule in policy["spec"]["ingress"]:
            for port in rule.get("ports", []):
                number = port["port"]
                known = set().union(*selected(policy["spec"]["podSelector"])) | set(HEAD_PORTS.values())
                if number not in known:
                    yield f"NetworkPolicy {policy['metadata']['name']}: no pod has a port {number}"
    for monitor in of_kind(docs, "PodMonitor"):
        chosen = selected(monitor["spec"]["selector"])
        if not chosen:
            yield f"PodMonitor {monitor['metadata']['name']}: selects no pod"
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            if not all(endpoint["port"] in ports for ports in chosen):
                yield f"PodMonitor {monitor['metadata']['name']}: no port {endpoint['port']}"


def _secrets(docs: list[Tree]) -> Iterator[str]:
    if of_kind(docs, "Secret"):
        yield "a Secret is written down in a manifest"
    if of_kind(docs, "Role") + of_kind(docs, "RoleBinding") + of_kind(docs, "ClusterRoleBinding"):
        yield "rights are given to an account"

    def walk(tree: Any) -> Iterator[str]:
        if isinstance(tree, dict):
            if SECRET_NAME.search(str(tree.get("name", ""))) and tree.get("value"):
                yield f"{tree['name']} has its value in a manifest"
            for child in tree.values():
                yield from walk(child)
        elif isinstance(tree, list):
            for child in tree:
                yield from walk(child)

    yield from walk(docs)


# The run that they hold -----------------------------------------------------------------------------------------------

def quantity(text: str) -> float:
    """A quantity of Kubernetes ("16Gi", "500m") as a number."""
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text)).groups()
    return float(number) * UNITS[unit]


def run_config(job: Tree, docs: list[Tree]) -> Config:
    """The configuration that the entrypoint runs, as the shell on the head would read it."""
    env = {entry["name"]: entry.get("value") or "" for entry in
           ray_container(job["spec"]["rayClusterSpec"]["headGroupSpec"])["env"]}
    for tree in of_kind(docs, "ConfigMap"):
        env |= tree.get("data", {})
    entrypoint = re.sub(r"\$(\w+)", lambda match: env[match[1]], job["spec"]["entrypoint"])
    command, verb, path, *overrides = shlex.split(entrypoint)
    assert (command, verb) == ("flowgrpo-ray", "train"), entrypoint
    mounted = {f"/etc/flowgrpo-ray/{name}": text for tree in of_kind(docs, "ConfigMap")
               for name, text in tree.get("data", {}).items()}
    if path in mounted:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            Path(file.name).write_text(mounted[path])
            return load(file.name, overrides)
    return load(ROOT / path, overrides)


def pools_of(config: Config) -> dict[str, PoolConfig]:
    pools = {"learner": config.pools.learner}
    if config.pools.placement == "split":
        pools["rollout"] = config.pools.rollout
    return pools | {f"reward.{name}": config.reward_pool(name) for name in config.rewards}


def _run(job: Tree, docs: list[Tree]) -> Iterator[str]:
    config = run_config(job, docs)
    annotation = job["metadata"]["annotations"]["flowgrpo-ray/config"]
    if annotation != shlex.split(job["spec"]["entrypoint"])[2]:
        yield f"the annotation flowgrpo-ray/config names {annotation}, and the entrypoint another configuration"
    if not config.pools.autoscaling:
        yield "pools.autoscaling is false, and the cluster grows"
    if "://" not in config.run.dir:
        volumes = {v["name"]: v for v in job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["volumes"]}
        if not config.run.dir.startswith("/data") or "persistentVolumeClaim" not in volumes["data"]:
            yield f"run.dir {config.run.dir} is on no volume that outlives the pods"
    groups = {g["groupName"]: g for g in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]}
    used: dict[str, list[PoolConfig]] = {}
    for name, pool in pools_of(config).items():
        fitting = [g for g in groups.values() if pool.label_selector
                   and pool.label_selector.items() <= g["labels"].items()]
        if len(fitting) != 1:
            yield f"pools.{name}.label_selector {pool.label_selector} is met by {len(fitting)} groups"
            continue
        used.setdefault(fitting[0]["groupName"], []).append(pool)
    sizes = step_bytes(config)
    for name, group in groups.items():
        if (group["maxReplicas"] > 0) != (name in used):
            yield f"{name}: maxReplicas {group['maxReplicas']}, and the pools there are {len(used.get(name, []))}"
        elif name in used:
            pods = group["minReplicas"] if name == "learner" else group["maxReplicas"]
            limits = ray_container(group)["resources"]["limits"]
            if pods < _pods_needed(used[name], quantity(limits["cpu"]), quantity(limits.get("nvidia.com/gpu", "0"))):
                yield f"{name}: {pods} pods of {limits} do not hold the pools"
            part = sizes.images if name.startswith("reward") else sizes.total
            least = object_store(part, max(group["replicas"], 1))
            store = group["rayStartParams"]["object-store-memory"]
            if store.isdecimal() and int(store) < least:
                yield f"{name}: object-store-memory is less than {least}, for {part} bytes a step"
            gpu = any(pool.num_gpus for pool in used[name])
            tolerations = group["template"]["spec"]["tolerations"]
            if gpu and not any(t.get("key") == "nvidia.com/gpu" for t in tolerations):
                yield f"{name}: its pods do not tolerate the taint of GPU nodes"


def _pods_needed(pools: list[PoolConfig], cpus: float, gpus: float) -> int:
    """Pods that hold every actor of the pools, filled one after the other as Ray packs them."""
    pods: list[list[float]] = []
    for pool in pools:
        for _ in range(pool.replicas):
            if pool.num_cpus > cpus or pool.num_gpus > gpus:
                return 10**9
            for pod in pods:
                if pod[0] >= pool.num_cpus - 1e-9 and pod[1] >= pool.num_gpus - 1e-9:
                    break
            else:
                pod = [cpus, gpus]
                pods.append(pod)
            pod[0] -= pool.num_cpus
            pod[1] -= pool.num_gpus
    return len(pods)
