"""The run directory, seen from the driver: metrics, samples, grids, trackers, and the commit of checkpoints."""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from flowgrpo_ray import storage
from flowgrpo_ray.config import paths
from flowgrpo_ray.config.load import Config, to_yaml
from flowgrpo_ray.data.plan import StepPlan, initial_seeds
from flowgrpo_ray.data.trajectory import GroupScores
from flowgrpo_ray.errors import CheckpointError, ResumeError
from flowgrpo_ray.provenance import stamp
from flowgrpo_ray.run_dir import checkpoint, resume
from flowgrpo_ray.run_dir.checkpoint import CheckpointInfo, FileEntry
from flowgrpo_ray.run_dir.lock import Claim
from flowgrpo_ray.run_dir.metrics import MetricsWriter, Row, read_metrics
from flowgrpo_ray.run_dir.sample_table import GridImage, SampleWriter, png_grid, write_grid
from flowgrpo_ray.run_dir.trackers import TensorBoardLogger, Trackers, WandbLogger
from flowgrpo_ray.run_dir.watch import Watch

if TYPE_CHECKING:
    from flowgrpo_ray.run_dir.inputs import Identity

log = logging.getLogger(__name__)


class Recorder:
    """A run directory (new, or to be resumed), and all that the driver writes into it after `open`.

    Attributes:
        run_dir: URI of the run's folder.
        run_id: names the run on the wire and in its checkpoints; kept over resumes.
        start_id: names the run and this start of its driver: what two drivers must not share, such as names of actors.
        resume_from: the checkpoint to resume from, or None.
        notes: what a person should know of the resume, a sentence each.
        last_row: the row that the run resumes after; empty for a new run. Known once it is open.

    Args:
        identities: of the inputs, by key (`inputs.identify`); a resume compares them with the checkpoint's.

    Raises:
        ConfigError: the folder is, or lies in, a file; or it is a relative path in a Ray job.
        ResumeError: the run has other settings or inputs (see `resume.check`), `run.resume` forbids it, or another process
            of this machine is writing it.
        CheckpointError: its checkpoints are damaged, or another run's.
        FlowGrpoError: rows of the run are damaged.
    """

    def __init__(self, config: Config, identities: Mapping[str, Identity] | None = None) -> None:
        self.config, self._identities = config, dict(identities or {})
        paths.check_run_dir(config.run.dir)
        self.run_dir = storage.join(config.run.dir, config.run.name)
        storage.check_folder(self.run_dir)
        self._opened = False
        self._starts: list[dict[str, Any]] = []  # who drove this run before, under which versions
        self._claim = Claim(self.run_dir, self._opened_by)  # before anything is read: what is read stays as it is
        try:
            known, accepted = self._identity()
            # What is damaged is better known now than in the report at the end.
            has_rows = bool(known and any("stopped" not in row for row in read_metrics(self.run_dir)))
            self.resume_from = self._checkpoint(known, has_rows)
            found = resume.check(self.resume_from, config, self._identities) if self.resume_from else resume.Resume()
        except BaseException:
            self._claim.release()
            raise
        self.run_id = known or uuid.uuid4().hex[:12]
        self.start_id = f"{self.run_id}-{self._claim.id[:6]}"
        self.start_step = self.resume_from.step if self.resume_from else 0
        self._accepted = resume.record(accepted, self.start_step, found)
        self.notes = [*found.notes, *(f"accepted: {change}" for change in found.accepted)]
        state = self.resume_from.state if self.resume_from else {}
        self.totals: dict[str, float] = dict(state.get("totals", {}))
        self._wandb_run_id: str | None = state.get("wandb_run_id")
        self.trackers = Trackers(config.logging.tracker_timeout_s)

    def open(self) -> None:
        """Write the run's identity and cut rows beyond the checkpoint. Called once the actors are up: a run that could not
        start leaves its folder as it was."""
        config, cut = self.config, self.start_step if self.resume_from else -1
        taken_over = self._claim.takes_over
        self._claim.confirm()
        if taken_over:
            self._refuse_progress()
        run = {"run_id": self.run_id, "driver": self._claim.id, "accepted_changes": self._accepted,
               "starts": [*self._starts, stamp(self.start_step)]}
        storage.write_bytes(storage.join(self.run_dir, "run.json"), json.dumps(run, indent=1).encode())
        once = config.model_copy(deep=True)  # what a resume accepts, it accepts once
        once.run.accept_changes, once.run.accept_changed_inputs = [], False
        storage.write_bytes(storage.join(self.run_dir, "config.yaml"), to_yaml(once).encode())
        self._metrics = MetricsWriter(self.run_dir, config.logging.flush_every_steps, self._claim.check)
        self._metrics.truncate(cut)
        self._samples = SampleWriter(self.run_dir, config.logging.flush_every_steps, self._claim.check)
        self._samples.truncate(cut)
        rows = read_metrics(self.run_dir)
        self.last_row = rows[-1] if rows else {}
        self._watch = Watch(config.model_dump(mode="json"), rows)
        self._opened = True
        self._start_trackers()

    def _start_trackers(self) -> None:
        run, logging = self.config.run, self.config.logging
        if logging.tensorboard:
            resumed = self.start_step if self.resume_from else None
            self.trackers.start("TensorBoard", lambda: TensorBoardLogger(self.run_dir, resumed))
        if project := logging.wandb_project:
            self._wandb_run_id = run_id = self._wandb_run_id or uuid.uuid4().hex[:8]
            local = None if os.environ.get("WANDB_DIR") else storage.local_path(self.run_dir)
            tree = self.config.model_dump(mode="json")
            self.trackers.start("W&B", lambda: WandbLogger(
                project, run.name, tree, run_id, directory=str(local) if local is not None else None))

    def _opened_by(self) -> str | None:
        """Claim of the last driver that has opened the run."""
        uri = storage.join(self.run_dir, "run.json")
        with suppress(ValueError, AttributeError):
            return json.loads(storage.read_bytes(uri)).get("driver") if storage.size(uri) is not None else None
        return None

    def _refuse_progress(self) -> None:
        """The one that the run was taken over from may have gone on since its checkpoint was looked up."""
        info = checkpoint.latest(self.run_dir, self.run_id)
        if info is not None and info.step != self.start_step:
            raise CheckpointError(f"{storage.display(self.run_dir)} went on to step {info.step} while this command started "
                                  f"from step {self.start_step}; start it again")

    def _identity(self) -> tuple[str | None, list[dict[str, Any]]]:
        """Run id of the folder (None if it holds no run), and the changes that were accepted at earlier resumes."""
        uri = storage.join(self.run_dir, "run.json")
        if storage.size(uri) is None:
            return None, []
        if self.config.run.resume == "never":
            raise ResumeError(f"{storage.display(self.run_dir)} already holds a run, and run.resume is never; choose "
                                  "another run.name, or run.resume=auto to resume it")
        try:
            run = json.loads(storage.read_bytes(uri))
            self._starts = list(run.get("starts", []))
            return str(run["run_id"]), list(run.get("accepted_changes", []))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{storage.display(uri)} is damaged ({error}); choose another run.name") from None

    def _checkpoint(self, known: str | None, has_rows: bool) -> CheckpointInfo | None:
        info = checkpoint.latest(self.run_dir, known) if known else None
        if info is None and self.config.run.resume == "must":
            raise ResumeError(f"run.resume is must, and {storage.display(self.run_dir)} holds no complete checkpoint")
        if info is None and known:
            self._refuse_damaged(known)
            if has_rows:  # without, it ended before its first step did
                resume.refuse_other_settings(self.run_dir, self.config)
        return info

    def _refuse_damaged(self, known: str) -> None:
        """Starting over would write over a run whose checkpoints are damaged or another run's: that is for a person to
        decide. (A folder that was never committed is no checkpoint and does not count.)"""
        folder = storage.join(self.run_dir, "checkpoints")
        for name in storage.list_dir(folder):
            uri = storage.join(folder, name)
            if storage.size(storage.join(uri, checkpoint.TOKEN)) is not None:
                checkpoint.check_run(checkpoint.open_checkpoint(uri), known)

    def row(self, row: Row) -> Row:
        """Record a row of metrics. Raises CheckpointError if another driver has taken the run over."""
        clean = self._metrics.append(row)
        self._watch.add(clean)
        self.trackers.log(clean)
        return clean

    def traceback(self, text: str) -> str | None:
        """Keep the traceback of what ended the run, and return where; None for a run that has not started."""
        if not self._opened:
            return None
        return storage.display(storage.write_bytes(storage.join(self.run_dir, "traceback.txt"), text.encode()))

    def samples(self, step: int, plan: StepPlan, scores: dict[int, GroupScores], advantages: dict[int, np.ndarray]) -> None:
        """Record the scores and advantages of every sample of a step."""
        if not self.config.logging.samples:
            return
        for group in plan.groups:
            found = scores[group.group]
            self._samples.append_group(
                step, group.group, group.record.prompt, rewards=found.rewards, valid=found.valid,
                advantages=advantages[group.group], total=weighted_total(self.config, found),
                seeds=initial_seeds(self.config, group))

    def grid(self, weights: str, step: int, images: Sequence[GridImage]) -> str | None:
        """Record a grid of images at fixed seeds; returns its URI."""
        if not images:
            return None
        png = png_grid(images)
        self._claim.check()
        uri = write_grid(self.run_dir, weights, step, png)
        self.trackers.log_image(f"samples/{weights}", png, step)
        return uri

    def checkpoint_uri(self, step: int) -> str:
        return checkpoint.step_dir(self.run_dir, step)

    def commit(self, step: int, entries: list[FileEntry], totals: dict[str, float]) -> None:
        """Make a written checkpoint one, after everything that belongs before it is on disk."""
        self.flush()
        state = {"totals": totals, "wandb_run_id": self._wandb_run_id,
                 **resume.state_of(self.config, self._identities)}
        checkpoint.commit(self.checkpoint_uri(step), entries, state, run_id=self.run_id, step=step,
                          result_hash=self.config.result_hash(self._identities))
        if self.config.checkpoint.keep:
            checkpoint.prune(self.run_dir, self.config.checkpoint.keep)

    def flush(self) -> None:
        """Write what is pending. Raises CheckpointError where another driver has taken the run over meanwhile."""
        self._claim.check()
        self._metrics.flush()
        self._samples.flush()
        self.trackers.flush()

    def close(self) -> None:
        if not self._opened:
            self._claim.release()
            return
        try:
            self.flush()
            self._claim.release()
        finally:
            self.trackers.close()


def weighted_total(config: Config, scores: GroupScores) -> np.ndarray:
    """Weighted sum of the optimised scores of a group: float64 [k], NaN where a sample is masked."""
    weighted = [reward.weight * scores.rewards[name] for name, reward in config.rewards.items()
                if reward.weight and name in scores.rewards]
    return np.where(scores.valid, sum(weighted, np.zeros(len(scores.valid))), np.nan)


def step_row(
    config: Config, plan: StepPlan, scores: dict[int, GroupScores], advantages: dict[int, np.ndarray]
) -> Row:
    """What the scores of a step say: means, spreads, and how many groups carry no signal."""
    order = [scores[g.group] for g in plan.groups]
    row: Row = {"images": float(sum(len(s.valid) for s in order)), "staleness": float(plan.step - plan.version)}
    for key in dict.fromkeys(key for s in order for key in s.rewards):
        groups = [s.rewards[key][s.valid & np.isfinite(s.rewards[key])] for s in order if key in s.rewards]
        values = np.concatenate(groups)
        if len(values):
            row[f"reward_mean/{key}"] = float(values.mean())
            row[f"reward_std/{key}"] = float(values.std())
            row[f"reward_group_std/{key}"] = float(np.mean([g.std() for g in groups if len(g)]))
    totals = np.concatenate([weighted_total(config, s)[s.valid] for s in order])
    if len(totals):
        row |= {"reward_total": float(totals.mean()), "reward_total_std": float(totals.std())}
    row["zero_std_group_fraction"] = float(np.mean([not advantages[g.group].any() for g in plan.groups]))
    return row


def updates_row(updates: list[Row]) -> Row:
    """One row from the updates of a step: counts add up, totals are the last, the gate is the first's, the rest means."""
    summed = {"valid_samples", "masked_samples", "nonzero_advantages"}
    last = {"updates", "skipped_updates", "idle_updates", "ema_decay", "loss_scale"}
    first = {"first_update_log_ratio_max"}
    row: Row = {}
    for key in updates[0].keys() - {"seconds", "cpu_seconds"}:
        values = [update[key] for update in updates]
        if key in summed:
            row[key] = sum(values)
        elif key in first | last:
            row[key] = values[0 if key in first else -1]
        else:
            row[key] = sum(values) / len(values)
    return row
