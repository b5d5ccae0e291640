"""The table of panels: what Grafana shows of one run, and of all runs of a cluster.

Ray labels every series with the process that it came from (WorkerId), and a counter outlives its process. So each
expression aggregates by labels of the run: `max by` for gauges, `sum by` over increases for counters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_RUN = 'run=~"$run", run_id=~"$run_id"'
_NODES = 'ray_io_cluster=~"$cluster"'
_PER_RUN = ("run", "run_id")


@dataclass(frozen=True)
class Query:
    """A PromQL expression and the legend of its series; `{{label}}` stands for a label's value."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """A panel: title, unit (Grafana's id of it), queries.

    `gpu`: without data where nothing runs on a GPU. `width` is in 24ths of the screen.
    """

    title: str
    unit: str
    queries: tuple[Query, ...]
    description: str = ""
    kind: Literal["timeseries", "stat", "table"] = "timeseries"
    stacked: bool = False
    gpu: bool = False
    width: int = 8


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A choice at the head of a dashboard: the values of a label of a metric."""

    name: str
    label: str
    metric: str


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]


def _matching(*labels: str) -> str:
    return ", ".join([_RUN, *labels])


def gauge(name: str, legend: str = "{{run}}", *by: str, where: str = "") -> Query:
    """A gauge of ours, per run and the labels `by`."""
    selector = _matching(*filter(None, [where]))
    return Query(f"max by ({', '.join([*_PER_RUN, *by])}) (ray_flowgrpo_{name}{{{selector}}})", legend)


def rate(name: str, legend: str = "{{run}}", *by: str) -> Query:
    """Events per second of a counter of ours."""
    return Query(f"sum by ({', '.join([*_PER_RUN, *by])}) "
                 f"(rate(ray_flowgrpo_{name}_total{{{_matching()}}}[$__rate_interval]))", legend)


def total(name: str, legend: str = "{{run}}", *by: str) -> Query:
    """Events of a counter of ours in the time that is shown, over all drivers of the run."""
    return Query(f"sum by ({', '.join([*_PER_RUN, *by])}) "
                 f"(increase(ray_flowgrpo_{name}_total{{{_matching()}}}[$__range]))", legend)


def node(expr: str, legend: str = "{{ip}}") -> Query:
    """An expression over Ray's own metrics; `SELECTOR` stands for the choice of clusters."""
    return Query(expr.replace("SELECTOR", _NODES), legend)


def stat(title: str, unit: str, query: Query, description: str = "") -> Panel:
    return Panel(title, unit, (query,), description, kind="stat", width=4)


def since_last_step() -> Query:
    return Query(f"time() - {gauge('last_step_timestamp').expr}", "{{run}}")


def phase(legend: str) -> Query:
    """The phase that the driver is in, by its label."""
    return Query(f"{gauge('phase', '', 'phase').expr} == 1", legend)


_NOW = Row("Now", (
    stat("Step", "none", gauge("step"), "Committed training steps."),
    stat("Of", "none", gauge("steps"), "run.steps"),
    Panel("Phase", "none", (phase("{{phase}}"),), "What the driver is doing.", kind="stat", width=4),
    stat("Images per second", "none", gauge("images_per_s")),
    stat("Time left", "s", gauge("seconds_left")),
    stat("Since the last step", "s", since_last_step()),
))

_LEARNING = Row("Learning", (
    Panel("Reward", "none", (gauge("reward_mean", "{{run}} {{reward}}", "reward"),), "Mean score of the step's images."),
    Panel("Evaluation", "none", (gauge("eval", "{{run}} {{reward}} {{weights}}", "reward", "weights"),),
          "Mean score of the evaluation images, at fixed seeds."),
    Panel("Spread inside a group", "none", (gauge("reward_group_std", "{{run}} {{reward}}", "reward"),),
          "What advantages are made of. It shrinks as a reward is solved, or collapses."),
    Panel("Groups without spread", "percentunit", (gauge("zero_std_group_fraction"),),
          "All images of the group have one score: it teaches nothing."),
    Panel("KL to the reference", "none", (gauge("kl", "{{run}} KL"), gauge("approx_kl", "{{run}} since sampling")),
          "KL is absent where loss.beta is 0."),
    Panel("Clip fraction", "percentunit", (gauge("clip_fraction_low", "{{run}} low"),
                                           gauge("clip_fraction_high", "{{run}} high"))),
    Panel("Ratio", "none", (gauge("ratio_mean", "{{run}} step {{window_step}}", "window_step"),),
          "Mean ratio of new and old probability, by step of the window."),
    Panel("On-policy check", "none", (gauge("first_update_log_ratio_max", "{{run}} largest |log ratio|"),
                                      gauge("ratio_tolerance", "{{run}} tolerance")),
          "Sampler and learner must compute the same policy: 0 on CPU in float32, rounding elsewhere."),
    Panel("Loss", "none", (gauge("loss", "{{run}} loss"), gauge("policy_loss", "{{run}} policy"))),
    Panel("Gradient norm", "none", (gauge("grad_norm"),), "Before clipping."),
    Panel("Gradient RMS over AdamW's eps", "none", (gauge("grad_rms_over_adam_eps"),), "Near 1, eps shrinks the step."),
    Panel("Adapter", "none", (gauge("adapter_norm", "{{run}} norm"),
                              gauge("adapter_delta_norm", "{{run}} change in the step"))),
))

_SPEED = Row("Speed", (
    Panel("Images per second", "none", (gauge("images_per_s"),)),
    Panel("Images per second and GPU", "none", (gauge("images_per_gpu_s"),), gpu=True),
    Panel("Steps per hour", "none", (Query(f"3600 * {rate('steps_committed').expr}", "{{run}}"),)),
    Panel("Busy share", "percentunit", (gauge("busy_share", "{{run}} {{role}}", "role"),),
          "Share of the step in which the actors of a role worked."),
    Panel("Step", "s", (gauge("time_step", "{{run}} step"), gauge("time_learn", "{{run}} learner"),
                        gauge("time_encode", "{{run}} text encoding"), gauge("time_sync", "{{run}} sync"),
                        gauge("time_eval", "{{run}} evaluation")),
          "Roles work at the same time: the parts do not add up to the step."),
    Panel("Calls", "s", (gauge("time_sample_call", "{{run}} sampling"), gauge("time_reward_call", "{{run}} scoring"),
                         gauge("time_score_image", "{{run}} {{reward}} per image", "reward")), "Mean time of one call."),
))

_POOLS = Row("Pools", (
    Panel("Actors ready", "none", (gauge("pool_ready", "{{run}} {{pool}}", "pool"),
                                   gauge("pool_target", "{{run}} {{pool}} target", "pool"))),
    Panel("Actors starting and draining", "none", (gauge("pool_starting", "{{run}} {{pool}} starting", "pool"),
                                                   gauge("pool_draining", "{{run}} {{pool}} draining", "pool"))),
    Panel("Actors busy", "none", (gauge("pool_busy", "{{run}} {{pool}}", "pool"),)),
    Panel("Actors replaced", "none", (total("actors_replaced", "{{run}} {{pool}} {{cause}}", "pool", "cause"),),
          "In the time that is shown."),
    Panel("Calls that wait for an actor", "none", (gauge("pool_queue", "{{run}} {{pool}}", "pool"),)),
    Panel("Timeouts and repeated calls", "none", (total("timeouts", "{{run}} {{pool}} timeouts", "pool"),
                                                  total("calls_repeated", "{{run}} {{pool}} repeated", "pool")),
          "In the time that is shown."),
))

_QUEUE = Row("Queue and waiting", (
    Panel("Groups by stage", "none", (gauge("queue_groups", "{{run}} {{stage}}", "stage"),), stacked=True),
    Panel("What the driver waits for", "percentunit", (rate("waiting_seconds", "{{run}} {{reason}}", "reason"),),
          "Share of the time.", stacked=True),
    Panel("Phase", "none", (gauge("phase", "{{run}} {{phase}}", "phase"),), stacked=True),
    Panel("Images without a score", "percentunit", (Query(
        f"sum by (run, run_id) (increase(ray_flowgrpo_images_without_score_total{{{_matching()}}}[1h])) / "
        f"sum by (run, run_id) (increase(ray_flowgrpo_images_made_total{{{_matching()}}}[1h]))", "{{run}}"),),
          "Of the last hour. They take no part in the update; they are not scored 0."),
    Panel("Scoring", "none", (total("scoring_failures", "{{run}} {{reward}} failures", "reward"),
                              total("scoring_retries", "{{run}} {{reward}} retries", "reward")),
          "In the time that is shown."),
    Panel("Updates left out", "none", (total("skipped_updates", "{{run}} not finite"), total("idle_updates", "{{run}} idle")),
          "In the time that is shown."),
))

_SYNC = Row("Sync and checkpoint", (
    Panel("Weight sync", "s", (gauge("time_sync"),), "Publishing the adapter to all actors, with its proof."),
    Panel("Share of the time spent in syncs", "percentunit", (rate("sync_seconds"),)),
    Panel("Failed syncs and rebuilds", "none", (total("sync_failures", "{{run}} failed syncs"),
                                                total("rebuilds", "{{run}} rebuilds")), "In the time that is shown."),
    Panel("Age of the newest checkpoint", "s", (gauge("checkpoint_age"),)),
    Panel("Steps since the newest checkpoint", "none", (
        Query(f"{gauge('step').expr} - {gauge('checkpoint_step').expr}", "{{run}}"),
        gauge("checkpoint_interval", "{{run}} interval"))),
    Panel("Size of a checkpoint and of a sync", "bytes", (gauge("checkpoint_bytes", "{{run}} checkpoint"),
                                                         gauge("adapter_bytes", "{{run}} adapter"))),
))

_NODE_PANELS = (
    Panel("Object store", "bytes", (node("sum by (ray_io_cluster, NodeAddress) "
                                         '(ray_object_store_memory{Location=~"MMAP_SHM|MMAP_DISK", SELECTOR})',
                                         "{{NodeAddress}}"),)),
    Panel("Spilled", "bytes", (node("sum by (ray_io_cluster, NodeAddress) "
                                    '(ray_object_store_memory{Location="SPILLED", SELECTOR})', "{{NodeAddress}}"),),
          "Objects on disk because the object store is full. A run should never spill."),
    Panel("Node memory", "percentunit", (node("max by (ray_io_cluster, ip) (ray_node_mem_used{SELECTOR}) / "
                                              "max by (ray_io_cluster, ip) (ray_node_mem_total{SELECTOR})"),)),
    Panel("Node disk", "percent", (node("max by (ray_io_cluster, ip) (ray_node_disk_utilization_percentage{SELECTOR})"),),
          "The disk of /. In a pod it needs RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE=1; Ray reports 0 otherwise."),
    Panel("Node CPU", "percent", (node("max by (ray_io_cluster, ip) (ray_node_cpu_utilization{SELECTOR})"),)),
    Panel("GPU use", "percent", (node("max by (ray_io_cluster, ip, GpuIndex) (ray_node_gpus_utilization{SELECTOR})",
                                      "{{ip}} GPU {{GpuIndex}}"),), gpu=True),
)

_MEMORY = Row("Memory and nodes", (
    Panel("Trajectories held", "bytes", (gauge("object_store_held", "{{run}} held"),
                                         gauge("trajectory_bytes", "{{run}} of a step")),
          "What the driver holds in Ray's object store for the step in progress, and what a whole step makes."),
    Panel("Peak accelerator memory", "bytes", (gauge("peak_memory", "{{run}} {{role}}", "role"),), gpu=True),
    *_NODE_PANELS,
))

_RUNS = Row("Runs", (
    Panel("Runs", "none", (gauge("step", "{{run}}"),), "Committed steps of the runs that are alive.", kind="table", width=12),
    Panel("Phase", "none", (phase("{{run}} {{phase}}"),), kind="table", width=12),
    Panel("Progress", "percentunit", (Query(f"{gauge('step').expr} / {gauge('steps').expr}", "{{run}}"),)),
    Panel("Time left", "s", (gauge("seconds_left"),)),
    Panel("Since the last step", "s", (since_last_step(),)),
    Panel("Weighted reward", "none", (gauge("reward_total"),)),
    Panel("Images per second", "none", (gauge("images_per_s"),)),
    Panel("Learner busy", "percentunit", (gauge("busy_share", "{{run}}", where='role="learner"'),)),
    Panel("Actors short of their target", "none", (Query(
        f"sum by (run, run_id) (ray_flowgrpo_pool_target{{{_matching()}}}) - "
        f"sum by (run, run_id) (ray_flowgrpo_pool_ready{{{_matching()}}})", "{{run}}"),)),
    Panel("Actors replaced", "none", (total("actors_replaced"),), "In the time that is shown."),
    Panel("Alerts", "none", (Query('count by (alertname, run) (ALERTS{alertstate="firing", alertname=~"FlowGrpo.+"}) '
                                   "or vector(0)", "{{alertname}} {{run}}"),), "Firing now."),
))

_CLUSTER = Row("Cluster", (
    Panel("CPUs", "none", (node('sum by (ray_io_cluster, State) (ray_resources{Name="CPU", SELECTOR})', "{{State}}"),),
          stacked=True),
    Panel("GPUs", "none", (node('sum by (ray_io_cluster, State) (ray_resources{Name="GPU", SELECTOR})', "{{State}}"),),
          stacked=True, gpu=True),
    *_NODE_PANELS,
))

_RUN_CHOICE = (
    Variable("run", "run", "ray_flowgrpo_step"),
    Variable("run_id", "run_id", 'ray_flowgrpo_step{run=~"$run"}'),
    Variable("cluster", "ray_io_cluster", "ray_node_cpu_count"),
)

DASHBOARDS = {
    "run": Dashboard("flowgrpo-run", "flowgrpo: run", "One run, or a few side by side.", _RUN_CHOICE,
                     (_NOW, _LEARNING, _SPEED, _POOLS, _QUEUE, _SYNC, _MEMORY)),
    "fleet": Dashboard("flowgrpo-fleet", "flowgrpo: all runs", "All runs and the clusters that they are on.", _RUN_CHOICE,
                       (_RUNS, _CLUSTER)),
}

# What expressions take from Ray and from Prometheus itself; all else is of flowgrpo_ray.run_dir.metrics.
RAY_METRICS = ("ray_object_store_memory", "ray_node_mem_used", "ray_node_mem_total", "ray_node_disk_utilization_percentage",
               "ray_node_cpu_utilization", "ray_node_cpu_count", "ray_resources")
RAY_GPU_METRICS = ("ray_node_gpus_utilization",)
PROMETHEUS_METRICS = ("ALERTS",)
