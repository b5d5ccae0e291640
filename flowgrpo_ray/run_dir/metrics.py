"""What is measured: the table of metrics (stable names, units), and the rows of a run in part files.

A row is flat: {"step": n, key: number}. `step` = committed training steps after it, the policy_version that the step
made; what is measured of the starting adapter (the evaluation at the start) is row 0, and an evaluation's keys stand in
the row of the step that it follows. Keys with a variable part put it behind a slash, `reward_mean/ocr`. Prometheus sees
`flowgrpo_<name>` with the variable parts as labels: `flowgrpo_reward_mean{reward="ocr"}` (see `exporter`). What describes
the run at a moment (`recorded=False`: pools, phase, queue, checkpoint) leaves the driver that way alone.

Gauges are of their step alone; counters are totals since the start of the run, stops and resumes included.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from flowgrpo_ray import storage
from flowgrpo_ray.errors import FlowGrpoError, nearest

Row = dict[str, float]


@dataclass(frozen=True)
class Metric:
    """One line of the table.

    `labels` name the variable parts that follow the name, each behind a slash. `machine`: the value is a matter of the
    machines and of the clock; all other metrics depend on configuration and seed alone. `recorded`: rows hold it; the
    others are only exported.
    """

    name: str
    unit: str
    description: str
    kind: Literal["gauge", "counter"] = "gauge"
    labels: tuple[str, ...] = ()
    machine: bool = False
    recorded: bool = True

    @property
    def pattern(self) -> str:
        """The key as documentation shows it: `reward_mean/<reward>`."""
        return "/".join([self.name, *(f"<{label}>" for label in self.labels)])

    @property
    def prometheus(self) -> str:
        return f"flowgrpo_{self.name}"

    @property
    def help(self) -> str:
        """Description and unit in a line."""
        return self.description if self.unit == "1" else f"{self.description} [{self.unit}]"


def _g(name: str, unit: str, description: str, *labels: str, machine: bool = False) -> Metric:
    return Metric(name, unit, description, "gauge", labels, machine)


def _c(name: str, unit: str, description: str, *labels: str, machine: bool = False) -> Metric:
    return Metric(name, unit, description, "counter", labels, machine)


def _now(name: str, unit: str, description: str, *labels: str) -> Metric:
    return Metric(name, unit, description, "gauge", labels, machine=True, recorded=False)


def _count(name: str, unit: str, description: str, *labels: str) -> Metric:
    return Metric(name, unit, description, "counter", labels, machine=True, recorded=False)


METRICS: tuple[Metric, ...] = (
    # rewards and advantages
    _g("reward_mean", "score", "Mean score of the step's valid samples", "reward"),
    _g("reward_std", "score", "Standard deviation of the step's valid samples", "reward"),
    _g("reward_group_std", "score", "Mean over groups of the standard deviation inside the group", "reward"),
    _g("reward_total", "score", "Mean over the step's valid samples of the weighted sum of the optimised scores"),
    _g("reward_total_std", "score", "Standard deviation of that sum"),
    _g("abs_advantage_mean", "1", "Mean |advantage| of the valid samples"),
    _g("nonzero_advantages", "samples", "Valid samples whose advantage is not 0"),
    _g("zero_std_group_fraction", "1", "Groups whose scores have no spread, so that they carry no reward signal"),
    _g("masked_samples", "samples", "Samples of the step without a score; they take no part in advantages and loss"),
    _g("valid_samples", "samples", "Samples of the step that took part"),
    _g("dropped_groups", "groups", "Groups of the step that a failed sample took out as a whole"),
    _g("images", "images", "Images sampled for the step"),
    # the update
    _g("loss", "1", "Clipped surrogate plus beta times KL, mean over updates"),
    _g("policy_loss", "1", "Clipped surrogate, mean over updates"),
    _g("kl", "1", "KL to the reference (adapter off), in the measure of loss.kl, before beta"),
    _g("approx_kl", "1", "Half the mean squared change of the log-prob since sampling"),
    _g("clip_fraction", "1", "Ratios outside the clip range"),
    _g("clip_fraction_low", "1", "Ratios under 1 - clip_low"),
    _g("clip_fraction_high", "1", "Ratios over 1 + clip_high"),
    _g("ratio_mean", "1", "Mean ratio at one step of the window", "window_step"),
    _g("ratio_std", "1", "Standard deviation of the ratio at one step of the window", "window_step"),
    _g("first_update_log_ratio_max", "1", "Largest |log ratio| before the first update; 0 = the sampler's own policy"),
    _g("grad_norm", "1", "Gradient norm before clipping, mean over updates"),
    _g("grad_rms_over_adam_eps", "1", "Root mean square of the gradient over AdamW's eps; near 1 eps shrinks the step"),
    _g("loss_scale", "1", "What the loss of the last update was multiplied by; 1 unless model.dtype is float16"),
    _g("adapter_delta_norm", "1", "Norm of the change that the step made to the adapter"),
    _g("adapter_norm", "1", "Norm of the adapter"),
    _g("learning_rate", "1", "AdamW learning rate"),
    _g("ema_decay", "1", "Decay of the last EMA update"),
    _g("staleness", "steps", "Training steps between the weights that sampled and the weights that learn"),
    _c("updates", "updates", "Optimizer updates made"),
    _c("skipped_updates", "updates", "Updates skipped because the gradient was not finite"),
    _c("idle_updates", "updates", "Updates skipped because no sample had an advantage and beta is 0"),
    # evaluation
    _g("eval", "score", "Mean score over the evaluation images", "weights", "reward"),
    _g("eval_std", "score", "Standard deviation over the evaluation images", "weights", "reward"),
    _g("eval_images", "images", "Evaluation images that have a score", "weights"),
    _g("eval_masked", "images", "Evaluation images without a score", "weights"),
    # what went wrong
    _g("stopped", "1", "1: the run stopped in this step, and the row holds counts alone", machine=True),
    _c("scoring_failures", "samples", "Samples that have no score after all retries", "reward", machine=True),
    _c("scoring_retries", "batches", "Failed batches that were scored again one by one", "reward", machine=True),
    _c("trackers_dropped", "trackers", "Trackers that failed and were left out", machine=True),
    _c("late_answers_dropped", "answers", "Answers that came after their deadline", machine=True),
    _c("timeouts", "calls", "Calls that passed their deadline", "pool", machine=True),
    _c("failed_starts", "actors", "Replaced actors that could not start and were tried again", "pool", machine=True),
    _c("actors_taken_out", "actors", "Actors that were replaced because they failed at what other actors then did", "pool",
       machine=True),
    _c("calls_repeated", "calls", "Failed calls that were given to an actor once more as they were", "pool", machine=True),
    _c("actor_deaths", "actors", "Actors that died and were replaced", "pool", machine=True),
    # speed
    _g("images_per_s", "images/s", "Training images per second of the step", machine=True),
    _g("images_per_gpu_s", "images/s", "The same, per GPU of all pools", machine=True),
    _g("time_score_image", "s", "Wall time of scoring calls per image", "reward", machine=True),
    _g("busy_share", "1", "Share of the step in which the actors of a role worked (rollout, reward, learner)", "role",
       machine=True),
    _g("pool_actors", "actors", "Actors alive in a pool", "pool", machine=True),
    _g("peak_memory", "bytes", "Largest accelerator memory in the step of a sampling call (rollout) or a "
       "forward and backward pass (learner), the model included; absent on CPU", "role", machine=True),
    _g("trajectory_bytes", "bytes", "Bytes of the step's trajectories on the wire"),
    _g("adapter_bytes", "bytes", "Bytes of one weight sync to one actor"),
    *(_g(f"time_{phase}", "s", text, machine=True) for phase, text in {
        "total": "Wall time since the start of the run, stops left out",
        "step": "Wall time of the step, an evaluation after it included, the checkpoint not",
        "sample_call": "Mean wall time of one sampling call",
        "reward_call": "Mean wall time of one scoring call",
        "learn": "Learner: forward, backward and updates",
        "encode": "Text encoding",
        "sync": "Publishing the adapter to all actors, with its proof",
        "eval": "Evaluation",
    }.items()),
    # the run at a moment: exported, in no row
    _now("step", "steps", "Committed training steps"),
    _now("steps", "steps", "Training steps of the run in all (run.steps)"),
    _now("policy_version", "steps", "Policy version that the rollout actors hold"),
    _now("phase", "1", "1 for what the driver is doing, 0 for all else", "phase"),
    _now("seconds_left", "s", "Estimated time to the last step"),
    _now("last_step_timestamp", "s", "When the last step was committed, or training began; seconds since the epoch"),
    _now("ratio_tolerance", "1", "Tolerance of first_update_log_ratio_max (train.ratio_tolerance, resolved)"),
    _now("pool_target", "actors", "Actors that a pool should have", "pool"),
    _now("pool_ready", "actors", "Actors of a pool that take work", "pool"),
    _now("pool_starting", "actors", "Actors of a pool that are being placed, load a model or take new weights", "pool"),
    _now("pool_busy", "actors", "Actors of a pool with a call in progress", "pool"),
    _now("pool_draining", "actors", "Actors of a pool that finish their last call before they end", "pool"),
    _now("pool_queue", "calls", "Calls that wait for an actor of the pool", "pool"),
    _now("queue_groups", "groups", "Groups of the step that are in a stage", "stage"),
    _now("object_store_held", "bytes", "Trajectories of the step that the driver holds in Ray's object store"),
    _now("checkpoint_step", "steps", "Step of the newest checkpoint; 0 without one"),
    _now("checkpoint_age", "s", "Seconds since the newest checkpoint was committed; absent without one"),
    _now("checkpoint_bytes", "bytes", "Size of the newest checkpoint"),
    _now("checkpoint_interval", "steps", "Steps between checkpoints (checkpoint.every_steps); 0 = only after the last step"),
    _count("steps_committed", "steps", "Training steps committed"),
    _count("images_made", "images", "Images sampled for training"),
    _count("images_without_score", "images", "Of these, the ones without a score; they take no part in the update"),
    _count("sync_seconds", "s", "Time spent publishing the adapter to all actors, with its proof"),
    _count("sync_failures", "syncs", "Weight syncs whose proof failed; the first one ends the run"),
    _count("rebuilds", "rebuilds", "Learner groups built again after a rank was lost"),
    _count("waiting_seconds", "s", "Time the driver has waited, by what for", "reason"),
    _count("actors_replaced", "actors", "Actors of a pool that were replaced, by cause", "pool", "cause"),
)
_BY_NAME = {metric.name: metric for metric in METRICS}
_IN_ROWS = [metric.name for metric in METRICS if metric.recorded]


@lru_cache(maxsize=4096)
def find(key: str) -> tuple[Metric, dict[str, str]]:
    """The metric of a row's key, and the values of its labels.

    Raises:
        FlowGrpoError: no metric has this name, or the variable parts do not fit; the nearest one is named.
    """
    name, *rest = key.split("/")
    metric = _BY_NAME.get(name)
    if metric is None or not metric.recorded:
        raise FlowGrpoError(f"no metric is named {key!r}{nearest(name, _IN_ROWS)}")
    values = "/".join(rest).split("/", len(metric.labels) - 1) if rest and metric.labels else rest
    if len(values) != len(metric.labels) or not all(values):
        raise FlowGrpoError(f"metric {key!r} must have the form {metric.pattern}")
    return metric, dict(zip(metric.labels, values, strict=True))


def deterministic(row: Mapping[str, float]) -> Row:
    """The part of a row that depends on configuration and seed alone: equal for equal runs, bit for bit."""
    return {key: value for key, value in row.items() if key == "step" or not find(key)[0].machine}


def table() -> str:
    """The table of metrics as Markdown, for the documentation."""
    lines = []
    for title, recorded in (("key of a row", True), ("exported only", False)):
        lines += [f"| {title} | kind | unit | meaning |", "|---|---|---|---|"]
        lines += [f"| `{m.pattern}` | {m.kind} | {m.unit} | {m.description} |" for m in METRICS if m.recorded == recorded]
        lines.append("")
    return "\n".join(lines)


def named(name: str) -> Metric:
    """The metric of a name, whether rows hold it or not."""
    return _BY_NAME[name]


_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode_rows(rows: Iterable[Mapping[str, float]]) -> bytes:
    """Rows as JSON lines. Floats keep every bit; NaN and infinities, which JSON lacks, are strings."""
    plain = ({key: _to_json(value) for key, value in row.items()} for row in rows)
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in plain).encode()


def decode_rows(data: bytes, source: str) -> list[Row]:
    """Rows of JSON lines; raises FlowGrpoError naming `source` and the line that is damaged."""
    rows = []
    for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        try:
            tree = json.loads(line)
            rows.append({"step": int(tree.pop("step")), **{k: float(_NOT_FINITE.get(v, v)) for k, v in tree.items()}})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise FlowGrpoError(f"{source}, line {number} is damaged: {type(error).__name__}: {error}") from None
    return rows


def _to_json(value: float) -> float | str:
    if isinstance(value, int) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _parts(run_dir: str) -> storage.PartFiles:
    return storage.PartFiles(storage.join(run_dir, "metrics"), ".jsonl")


class MetricsWriter:
    """Appends rows to `metrics/part-<first step>-<last step>.jsonl`; a part is written whole and never changed.

    Args:
        before_write: called before each part is written; what it raises keeps the part from being written.

    Raises:
        FlowGrpoError: (append) an unknown key, or a step that does not follow the last one: rows of an earlier life of
            the run are cut off with `truncate` before it goes on.
    """

    def __init__(
        self, run_dir: str, flush_every: int = 10, before_write: Callable[[], None] = lambda: None
    ):
        self.flush_every, self._before_write = flush_every, before_write
        self._parts = _parts(run_dir)
        self._pending: list[Row] = []
        self._last = self._parts.last_step()

    def append(self, row: Mapping[str, float]) -> Row:
        """Take a row with "step" and known keys; returns it as plain numbers. Writes a part when enough are there."""
        step = int(row["step"])
        clean: Row = {"step": step}
        for key in sorted(row):
            if key != "step":
                find(key)
                clean[key] = float(row[key])
        if step <= self._last:
            raise FlowGrpoError(f"metrics: a row of step {step} after one of step {self._last}")
        self._pending.append(clean)
        self._last = step
        if len(self._pending) >= self.flush_every:
            self.flush()
        return clean

    def flush(self) -> None:
        """Write what is pending; a checkpoint calls this before its token."""
        if self._pending:
            self._before_write()
            self._parts.write(int(self._pending[0]["step"]), int(self._pending[-1]["step"]), encode_rows(self._pending))
            self._pending = []

    def truncate(self, after_step: int) -> None:
        """Cut off all rows beyond `after_step` (-1 = all rows)."""

        def cut(data: bytes, uri: str) -> tuple[int, bytes]:
            rows = [row for row in decode_rows(data, storage.display(uri)) if row["step"] <= after_step]
            return int(rows[-1]["step"]), encode_rows(rows)

        self._parts.truncate(after_step, cut)
        self._pending = [row for row in self._pending if row["step"] <= after_step]
        self._last = max(self._parts.last_step(), *(int(row["step"]) for row in self._pending), -1)


def read_metrics(run_dir: str) -> list[Row]:
    """All rows on file, in step order; empty where there are none. Raises FlowGrpoError where a part is damaged."""
    rows: dict[float, Row] = {}
    for _, _, uri in _parts(run_dir).list():
        # a truncation that was cut short leaves the same row in two parts
        rows.update((row["step"], row) for row in decode_rows(storage.read_bytes(uri), storage.display(uri)))
    return [rows[step] for step in sorted(rows)]
