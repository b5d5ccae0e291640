"""`flowgrpo-ray manifest`: a configuration as a RayJob of KubeRay, with the worker groups that its pools need.

The pods' shape (security, volumes, memory for each actor) is that of an overlay of deploy/kuberay; replicas, CPUs, GPUs, object
store, labels and entrypoint follow from the configuration. It travels in a ConfigMap, and small prompt files with it.
"""

from __future__ import annotations

import base64
import math
import re
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from flowgrpo_ray import storage
from flowgrpo_ray.cluster.sizes import object_store, step_bytes
from flowgrpo_ray.config.load import Config, to_yaml
from flowgrpo_ray.config.paths import paths_of
from flowgrpo_ray.config.schema import PoolConfig
from flowgrpo_ray.errors import ConfigError, counted, nearest

Tree = dict[str, Any]
GPU = "nvidia.com/gpu"
CONFIG_DIR, DATA_DIR = "/etc/flowgrpo-ray", "/data"
LONGEST_NAME = 47  # of a RayJob
CONFIG_MAP_BYTES = 1_000_000  # of 1 MiB that Kubernetes takes, names and metadata included
GIB = 1 << 30
CPU_ACTOR_GIB = 1.5  # of memory that an actor without a GPU needs at least, its libraries included
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass
class Manifest:
    """The resources as plain trees, and what whoever applies them should know."""

    documents: list[Tree]
    notes: list[str] = field(default_factory=list)

    def to_yaml(self) -> str:
        return yaml.safe_dump_all(self.documents, sort_keys=False, width=120)


@dataclass(frozen=True)
class Pods:
    """How a worker group holds its pools: `count` pods alike."""

    count: int
    cpus: int
    gpus: int
    actors: int  # in one pod


def overlay_names() -> list[str]:
    return sorted(file.name.removesuffix(".yaml") for file in (resources.files(__package__) / "overlays").iterdir())


def build(config: Config, overlay: str, *, image: str | None = None, run_dir: str | None = None) -> Manifest:
    """The manifest of a run.

    Args:
        config: as loaded; it is not changed.
        overlay: whose pods are taken (`overlay_names`).
        image: instead of the overlay's.
        run_dir: instead of `run.dir`: a URI, or a path below /data, where the overlay's volume is mounted. Without it a local
            `run.dir` becomes /data/runs.

    Raises:
        ConfigError: names what does not fit or cannot travel, and the ways out.
    """
    if overlay not in overlay_names():
        raise ConfigError(f"--overlay {overlay}: there is none of that name{nearest(overlay, overlay_names())}")
    docs = list(yaml.safe_load_all((resources.files(__package__) / "overlays" / f"{overlay}.yaml").read_text()))
    job = next(tree for tree in docs if tree["kind"] == "RayJob")
    config, out = config.model_copy(deep=True), Manifest(docs)
    _place_run(config, out, job, run_dir)
    files = _travel(config)
    _fill_groups(config, overlay, job["spec"]["rayClusterSpec"], out)
    _note_code(config, out)
    name = job_name(config.run.name)
    job["metadata"]["name"] = name
    job["metadata"]["annotations"]["flowgrpo-ray/config"] = f"{CONFIG_DIR}/config.yaml"
    job["spec"]["entrypoint"] = f"flowgrpo-ray train {CONFIG_DIR}/config.yaml"
    run_folder = storage.redact(storage.join(config.run.dir, config.run.name))
    job["spec"]["metadata"] = {"run": config.run.name, "run_dir": run_folder}  # in Ray's list of jobs
    text = to_yaml(config)
    docs.insert(docs.index(job), _config_map(f"{name}-config", text, files, job["metadata"]["labels"]))
    for group in _groups(job):
        pod = group["template"]["spec"]
        for volume in pod["volumes"]:
            if volume["name"] == "config":
                volume["configMap"] = {"name": f"{name}-config"}
        if image is not None:
            for container in [*pod.get("initContainers", []), *pod["containers"]]:
                container["image"] = image
    return out


def job_name(run: str) -> str:
    """A run's name as a DNS-1035 label, as KubeRay wants it of a RayJob."""
    name = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"
    return name[:LONGEST_NAME - len("-config")].rstrip("-")


def _groups(job: Tree) -> list[Tree]:
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


# Where the run goes ---------------------------------------------------------------------------------------------------

def _place_run(config: Config, out: Manifest, job: Tree, run_dir: str | None) -> None:
    given = run_dir if run_dir is not None else config.run.dir
    if "://" not in given:
        inside = given == DATA_DIR or given.startswith(DATA_DIR + "/")
        if run_dir is not None and not inside:
            raise ConfigError(f"--run-dir {run_dir} is on no volume of the manifest: give a URI (s3://BUCKET/runs, "
                              f"gs://BUCKET/runs), or a path below {DATA_DIR}, where the PersistentVolumeClaim is mounted")
        config.run.dir = given if inside else f"{DATA_DIR}/runs"
        if not inside:
            out.notes.append(f"run.dir {given} is a path of this machine: the run goes to {config.run.dir}, on the "
                             "PersistentVolumeClaim flowgrpo (--run-dir s3://BUCKET/runs for an object store)")
        return
    config.run.dir = given
    out.documents[:] = [tree for tree in out.documents if tree["kind"] != "PersistentVolumeClaim"]
    for group in _groups(job):
        pod = group["template"]["spec"]
        pod["volumes"] = [{"name": "data", "emptyDir": {}} if volume["name"] == "data" else volume
                          for volume in pod["volumes"]]
        if given.startswith("s3://"):
            pod["containers"][0]["envFrom"].append({"secretRef": {"name": "flowgrpo-s3", "optional": True}})
    if given.startswith("s3://"):
        out.notes.append("keys of the bucket come from a Secret flowgrpo-s3 (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), if "
                         "there is one, else from the role of the nodes")


# What travels ---------------------------------------------------------------------------------------------------------

def _in_cluster(path: str) -> bool:
    """Whether a path is not of this machine: a URI, a shipped file, or on the volume of the pods."""
    return "://" in path or path.startswith(("builtin:", DATA_DIR + "/"))


def _travel(config: Config) -> dict[str, bytes]:
    """Files for the ConfigMap by name; the configuration is changed to where they are mounted. Raises ConfigError."""
    ways = f"put it on the volume of the pods and give that path ({DATA_DIR}/...), or on an object store (s3://BUCKET/...)"
    files, problems = {}, []
    for key in ("train_prompts", "eval_prompts"):
        path = getattr(config.data, key)
        if path is None or _in_cluster(path):
            continue
        file = Path(path)
        if not file.is_file():
            problems.append(f"data.{key}: there is no file {path} here to take along; {ways}")
            continue
        name = file.name if file.name not in files or key == "train_prompts" else f"eval-{file.name}"
        if config.data.eval_prompts == config.data.train_prompts:
            name = file.name
        files[name] = file.read_bytes()
        size = sum(map(len, files.values()))
        if size > CONFIG_MAP_BYTES:
            problems.append(f"data.{key}: {path} has {len(files.pop(name)):,} bytes, which makes {size:,} bytes of prompts; a "
                            f"ConfigMap holds {CONFIG_MAP_BYTES:,}: {ways}")
            continue
        setattr(config.data, key, f"{CONFIG_DIR}/{name}")
    named = {path.key: path.value for path in paths_of(config) if not path.key.startswith(("run.", "data."))}
    for key, path in named.items():
        if path and not _in_cluster(path) and (Path(path).exists() or path.startswith("/")):
            hub = "" if key == "lora.init_from" else ", or give a name of the Hugging Face Hub"
            problems.append(f"{key}: {path} is a path of this machine, which the pods do not see: put it on their volume and "
                            f"give that path ({DATA_DIR}/...){hub}")
    if problems:
        raise ConfigError("\n".join(problems))
    return files


def _note_code(config: Config, out: Manifest) -> None:
    for name, reward in config.rewards.items():
        if reward.python:
            out.notes.append(f"rewards.{name}: the module {reward.python.partition(':')[0]} must be importable in the image")
        if reward.environment.py_executable:
            out.notes.append(f"rewards.{name}: {reward.environment.py_executable} must exist in the image")


def _config_map(name: str, text: str, files: dict[str, bytes], labels: Tree) -> Tree:
    tree: Tree = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": dict(labels)},
                  "data": {"config.yaml": text}}
    for file, data in files.items():
        try:
            tree["data"][file] = data.decode()
        except UnicodeDecodeError:  # Parquet
            tree.setdefault("binaryData", {})[file] = base64.b64encode(data).decode()
    return tree


# Worker groups --------------------------------------------------------------------------------------------------------

def pools_by_group(config: Config) -> dict[str, dict[str, PoolConfig]]:
    """The pools that have actors of their own, by the worker group that holds them."""
    groups: dict[str, dict[str, PoolConfig]] = {"learner": {"learner": config.pools.learner}}
    if config.pools.placement == "split":
        groups["rollout"] = {"rollout": config.pools.rollout}
    for name in config.rewards:
        pool = config.pools.reward.setdefault(name, PoolConfig())
        groups.setdefault("reward-gpu" if pool.num_gpus else "reward-cpu", {})[f"reward.{name}"] = pool
    return groups


def _fill_groups(config: Config, overlay: str, cluster: Tree, out: Manifest) -> None:
    """Set replicas, resources and labels; the configuration's pools get the selectors of their groups."""
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    learner = _limits(groups["learner"])
    gpu_pods = int(learner.get(GPU, 0))
    used, sizes = pools_by_group(config), step_bytes(config)
    config.pools.autoscaling = True
    if gpu_pods:  # machines with GPUs take a while to come, and their images to load
        config.pools.start_timeout_s = max(config.pools.start_timeout_s, 1800.0)
    gib_per_gpu = (_bytes(learner["memory"]) - _store(groups["learner"])) / max(gpu_pods, 1) / GIB
    shape = _limits(groups["reward-cpu"])
    for name, group in groups.items():
        pools = used.get(name, {})
        for key, pool in pools.items():
            _select(pool, key, name)
        if not pools:
            group.update(replicas=0, minReplicas=0, maxReplicas=0)
            continue
        if any(pool.num_gpus for pool in pools.values()):
            if not gpu_pods:
                key = next(key for key, pool in pools.items() if pool.num_gpus)
                raise ConfigError(f"--overlay {overlay} has no GPUs, and pools.{key}.num_gpus is {pools[key].num_gpus:g}: use "
                                  "--overlay gpu-1, gpu-8 or gpu-64")
            pods = _gpu_pods(name, pools, gpu_pods if name == "learner" else 1)
            gib = gib_per_gpu * pods.gpus
            if not any(t.get("key") == GPU for t in group["template"]["spec"]["tolerations"]):
                group["template"]["spec"]["tolerations"].append(
                    {"key": GPU, "operator": "Exists", "effect": "NoSchedule"})
        else:
            pods = _cpu_pods(list(pools.values()), max(int(shape["cpu"]), 2))
            gib = max(3.0, 1.0 + CPU_ACTOR_GIB * pods.actors)
            group["template"]["spec"]["tolerations"] = []
        store = object_store(sizes.images if name.startswith("reward") else sizes.total, pods.count)
        group["rayStartParams"]["object-store-memory"] = str(store)
        # /dev/shm counts, and Ray wants the store to be the smaller part.
        memory = math.ceil(max(gib + store / GIB, store / GIB / 0.4))
        limits = {"cpu": str(pods.cpus), "memory": f"{memory}Gi"} | ({GPU: str(pods.gpus)} if pods.gpus else {})
        group["template"]["spec"]["containers"][0]["resources"] = {"limits": limits, "requests": dict(limits)}
        fixed = name == "learner"
        group.update(replicas=pods.count, minReplicas=pods.count if fixed else 1,
                     maxReplicas=pods.count if fixed else 2 * pods.count)
        if pods.gpus:
            each = f"{counted(pods.gpus, 'GPU')}, {counted(pods.cpus, 'CPU')} and {memory} GiB"
            out.notes.append(f"{name}: {counted(pods.count, 'pod')} of {each} ({gib_per_gpu:.0f} GiB a GPU besides the object "
                             "store: a model that is larger on its way to the GPU needs more, and resources of the pods can be "
                             "patched)")


def _select(pool: PoolConfig, key: str, group: str) -> None:
    given = pool.label_selector.get("pool", group)
    if given != group:
        raise ConfigError(f"pools.{key}.label_selector.pool is {given}, and its pods have pool: {group}; leave it out, or set "
                          f"it to {group}")
    pool.label_selector = {**pool.label_selector, "pool": group}


def _gpu_pods(group: str, pools: dict[str, PoolConfig], most: int) -> Pods:
    """Pods of up to `most` GPUs (more if one actor needs them), each pool in pods of its own."""
    largest = max(math.ceil(pool.num_gpus) for pool in pools.values())
    wanted = sum(pool.replicas * pool.num_gpus for pool in pools.values())
    gpus = max(largest, min(most, math.ceil(wanted)))
    count = cpus = actors = 0
    for pool in pools.values():
        fit = max(1, math.floor(gpus / pool.num_gpus + 1e-9))
        pods = math.ceil(pool.replicas / fit)
        each = math.ceil(pool.replicas / pods)
        count, actors = count + pods, max(actors, each)
        cpus = max(cpus, math.ceil(each * pool.num_cpus))
    if group == "learner":  # evenly filled: no GPU that nobody asked for
        gpus = math.ceil(actors * next(iter(pools.values())).num_gpus)
    return Pods(count, max(1, cpus), gpus, actors)


def _cpu_pods(pools: list[PoolConfig], most: int) -> Pods:
    """Pods of up to `most` CPUs (more if one actor needs them), filled one after the other."""
    total = sum(pool.replicas * pool.num_cpus for pool in pools)
    largest = max(pool.num_cpus for pool in pools)
    cpus = max(1, math.ceil(largest), min(most, math.ceil(total)))
    free: list[float] = []
    for pool in sorted(pools, key=lambda pool: -pool.num_cpus):
        for _ in range(pool.replicas):
            place = next((i for i, left in enumerate(free) if left >= pool.num_cpus - 1e-9), None)
            if place is None:
                free.append(cpus)
                place = len(free) - 1
            free[place] -= pool.num_cpus
    count = len(free)
    return Pods(count, cpus, 0, math.ceil(sum(pool.replicas for pool in pools) / count))


def _limits(group: Tree) -> dict[str, str]:
    return group["template"]["spec"]["containers"][0]["resources"]["limits"]


def _store(group: Tree) -> int:
    return int(group["rayStartParams"]["object-store-memory"])


def _bytes(quantity: str) -> float:
    return float(quantity[:-2]) * _UNITS[quantity[-2:]]
