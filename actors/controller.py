"""The controller: a plain `ray.wait` loop in the driver that moves refs, never tensors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, Self

import ray

from actors import head, nodes, scaling
from actors.colocated import ColocatedActor
from actors.commands import Commands
from actors.dispatch import Checked
from actors.environments import check_environments, start_hint
from actors.evaluation import KEPT_SHARE, KeptConditionings, start_evaluation
from actors.events import wait_for_events
from actors.last_step import LastStep
from actors.learner import LearnerActor, LearnerGroup
from actors.names import ActorNames
from actors.placement import actor_options, check_resources, named_pools
from actors.pool import ActorPool
from actors.reward import FirstCall, RewardActor
from actors.rollout import RolloutActor
from actors.sampling import Sampling
from actors.scoring import Scoring
from actors.status import Activity, during, run_status, waiting_reason
from actors.step import StepBoard
from actors.sync import Published, agreed, verify
from flowgrpo_ray import startup, storage
from flowgrpo_ray.config import Config
from flowgrpo_ray.config.schema import EnvironmentConfig
from flowgrpo_ray.data.plan import GroupPlan, MicroBatch, StepPlan, plan_evaluation, plan_step, training_negative
from flowgrpo_ray.data.trajectory import SampleMeta
from flowgrpo_ray.errors import FlowGrpoError, SyncError
from flowgrpo_ray.preflight import Inputs, scope_of
from flowgrpo_ray.run_dir.metrics import Row
from flowgrpo_ray.run_dir.recorder import Recorder, step_row, updates_row
from flowgrpo_ray.sampling.requests import evaluation_negative, sample_request
from flowgrpo_ray.signals import StopRequested
from flowgrpo_ray.views import log_lines
from flowgrpo_ray.views.exporter import Exporter, Sink

log = logging.getLogger(__name__)


class Observer(Protocol):
    """Somebody who watches a run: the live view, or nobody."""

    def activity(self, doing: dict[str, list[str]]) -> None:
        """What every actor is doing, by pool; called several times a second."""

    def row(self, row: Row) -> None:
        """A row of metrics was recorded."""

    def resumes(self, step: int) -> None:
        """The run resumes from the checkpoint of this step; called before anything else of a resumed run."""

    def say(self, text: str) -> None:
        """Something a person may want to know."""


class Controller:
    """Runs the training of one configuration on a connected Ray.

    Use as a context manager: actors end with it, whatever happens.
    """

    rollout_class: type = RolloutActor
    reward_class: type = RewardActor
    learner_class: type = LearnerActor
    colocated_class: type = ColocatedActor
    group_class: type = LearnerGroup
    reachable = True  # by commands

    def __init__(
        self, config: Config, inputs: Inputs, recorder: Recorder, observer: Observer, sinks: Sequence[Sink] = (),
    ) -> None:
        self.exporter = Exporter(config, recorder.run_id, sinks, step=recorder.start_step)
        self.config, self.inputs, self.recorder, self.observer = config, inputs, recorder, observer
        self.colocated = config.pools.placement == "colocated"
        self.published: dict[str, Published] = {}
        self._ema: Published
        self._learner_events: dict[ray.ObjectRef, Callable[[Any], None]] = {}
        self._conditionings: dict[tuple[int, int], ray.ObjectRef] = {}  # encoded ahead: (step, group)
        self._learner_seconds = self._learner_peak = 0.0
        self.pools: list[ActorPool] = []
        self.group: LearnerGroup | None = None
        self.names = ActorNames(config.run.name, recorder.start_id)
        self._started = time.perf_counter()
        self._step: int | None = None  # the one that has no row yet
        self.last = LastStep(recorder.start_step, config.run.grace_s, recorder.resume_from)
        self.activity = Activity()
        self.version = recorder.start_step  # that the rollout actors hold
        self.board: StepBoard | None = None  # of the step in progress
        self.commands = Commands(self, reachable=self.reachable)

    # Life -------------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if head.gone():
            return  # the actors went with it
        self.commands.close(error)
        for pool in self.pools:
            pool.shutdown()
        if self.group is not None:
            self.group.shutdown()

    def _start(self) -> None:
        config, p = self.config, self.config.pools
        nodes.begin()
        if log_lines.on():
            self.observer.say(nodes.cluster())
        check_resources(config, self._tick)
        check_environments(config)
        tree = config.model_dump(mode="json")
        common: dict[str, Any] = {"start_timeout_s": p.start_timeout_s, "max_deaths": p.max_actor_deaths,
                                  "max_failures_in_a_row": p.max_failures_in_a_row}
        rewards = {}
        for name, reward in config.rewards.items():
            pool = config.reward_pool(name)
            args = (name, reward.spec(name), reward.options, reward.self_test, pool.nice, scope_of(name, reward),
                    config.sampling.group_size, pool.num_gpus > 0, config.model.cpu_threads, self._first_call(name))
            rewards[name] = ActorPool(
                f"reward.{name}", pool.replicas, self._spawner(
                    self.reward_class, pool, f"reward.{name}", args, reward.environment),
                asks=scaling.asks(pool), start_hint=start_hint(name, reward.environment), rest_s=5.0, **common)
            self.pools.append(rewards[name])
        if not self.colocated:
            self.rollouts = ActorPool(
                "rollout", p.rollout.replicas, self._spawner(self.rollout_class, p.rollout, "rollout",
                                                             (tree, p.rollout.num_gpus > 0, p.rollout.nice)),
                prepare=self._prepare, asks=scaling.asks(p.rollout), rest_s=5.0, needed=True, **common)
            self.pools.append(self.rollouts)
        self.group = self.group_class(config, self.recorder.run_id, self.names,
                                      self.colocated_class if self.colocated else self.learner_class)
        self.learners.watch = self._tick
        self.observer.say(f"starting {sum(len(pool.members) for pool in self.pools) + self.learners.world_size} actors")
        run_dir = self.recorder.run_dir
        if run_dir and (not storage.local_path(run_dir) or sum(node["Alive"] for node in ray.nodes()) > 1):
            self.learners.check_run_dir(run_dir, p.start_timeout_s)
        self.learners.start(p.start_timeout_s)
        if self.colocated:
            self.rollouts = ActorPool("colocated", self.learners.world_size, lambda index, _: self.learners.actors[index],
                                      prepare=self._prepare, respawns=False, **common)
            self.pools.append(self.rollouts)
        self._drive("actors to start", lambda: all(pool.all_ready for pool in self.pools))
        startup.reached("actors")
        self.sampling = Sampling(config, self.rollouts, self.inputs.family)
        self.scoring = Scoring(config, rewards)
        self._kept = KeptConditionings(KEPT_SHARE * ray.cluster_resources().get("object_store_memory", 0))
        self.rewards = rewards
        if self.recorder.resume_from:
            self.learners.call("read_checkpoint", self.recorder.resume_from.uri)
            self.learners.call("load_checkpoint")
        self.recorder.open()
        self.exporter.go_on_from(self.recorder.last_row)
        if log_lines.on():
            where = {pool.name: pool.status() for pool in self.pools} | {"learner": self.learners.status()}
            self.observer.say(nodes.placed(where))

    def _first_call(self, name: str) -> FirstCall | None:
        """What a reward of the user's own is called with when its actor starts; None for others."""
        reward, s, first = self.config.rewards[name], self.config.sampling, self.inputs.train[0]
        if reward.python is None:
            return None
        images = s.group_size if scope_of(name, reward) == "group" else s.micro_batch
        return FirstCall(first.prompt, first.reward_metadata, images, first.height or s.height, first.width or s.width)

    def _spawner(
        self, actor_class: type, pool: Any, name: str, args: tuple, environment: EnvironmentConfig | None = None,
    ) -> Callable[[int, int], Any]:
        def spawn(index: int, incarnation: int) -> Any:
            options = actor_options(pool, self.names.new(name, index), namespace=self.names.namespace,
                                    environment=environment, start_timeout_s=self.config.pools.start_timeout_s,
                                    cpu_threads=self.config.model.cpu_threads)
            return ray.remote(actor_class).options(**options).remote(*args)
        return spawn

    @property
    def learners(self) -> LearnerGroup:
        """The learner group, once it has been made."""
        assert self.group is not None
        return self.group

    @property
    def step_begun(self) -> bool:
        """Whether a training step has begun; until its checkpoint, if there is one, is committed."""
        return bool(self._step) or self.activity.phase == "checkpointing"

    # The loop ---------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to `run.steps`. Order within a step: updates, publish, evaluation if due, checkpoint.

        A step that cannot be finished leaves a row of the counts that say why. A signal leaves a checkpoint of the last
        finished step (see `last_step`).
        """
        try:
            self._train()
        except (KeyboardInterrupt, SystemExit, StopRequested) as why:
            self.commands.ending = True
            self.last.save_after_signal(self.learners, self.recorder, self.observer.say)
            if isinstance(why, StopRequested):
                raise self.commands.stopped() from None
            raise
        except FlowGrpoError as error:
            if isinstance(error, SyncError):
                self.exporter.sync_failed()
            if self._step is not None:
                self.exporter.row(self.recorder.row({"step": self._step, "stopped": 1, **self._totals()}))
            raise

    def _train(self) -> None:
        first, last, e = self.recorder.start_step, self.config.run.steps, self.config.eval
        self.publish(first)
        if first == 0 and e.at_start and self.inputs.eval:
            self._step = 0
            self._record({"step": 0, **self.evaluate(0)})
        for step in range(first, last):
            self.commands.check_stop()
            started, self._step = time.perf_counter(), step + 1
            log_lines.at_step(step + 1, last)
            row = self.train_step(plan_step(self.config, self.inputs.train, step))
            done = step + 1
            due = (e.every_steps and done % e.every_steps == 0) or (e.at_end and done == last)
            if due and self.inputs.eval:
                row |= self.evaluate(done)
            row["time_step"] = time.perf_counter() - started
            self._record(row)
            every = self.config.checkpoint.every_steps
            if done == last or (every and done % every == 0) or self.commands.want_checkpoint:
                self._save()

    @during("checkpointing")
    def _save(self) -> None:
        self.last.save(self.learners, self.recorder)
        self.commands.saved()

    @during("sampling")
    def train_step(self, plan: StepPlan) -> Row:
        """Sample, score, learn and publish one step; returns its row."""
        started = time.perf_counter()
        self._reset_clocks()
        self._forgive_deaths()
        self._leave_nodes()
        self.board = board = StepBoard(self.config, plan, self.learners.world_size)
        updates: list[Row] = []
        self.scoring.expect(sum(len(shard.rows) for shard in plan.shards))
        self.learners.cast("begin_step", plan, self.last.begin())
        self._encode_negatives(plan)
        self._with_conditioning(plan.groups, lambda group, ref: self._encoded(board, group.group, ref))
        if plan.step + 1 < self.config.run.steps:  # the text encoders need no new weights: fill the learner's tail
            self._with_conditioning(plan_step(self.config, self.inputs.train, plan.step + 1).groups,
                                    lambda group, ref: self._conditionings.update({(group.step, group.group): ref}))
        self._drive(f"step {plan.step + 1}", lambda: self._feed(board, updates) and not self.learners.pending
                    and self.rollouts.idle)
        self.scoring.check_budget()
        learned = time.perf_counter()
        advantages = self.learners.call("step_advantages")[0]
        norms = self.publish(plan.version + 1)
        row = {"step": plan.step + 1, **updates_row(updates), **norms,
               **step_row(self.config, plan, board.complete, advantages)}
        row |= self._speed(row, time.perf_counter() - started) | {"time_sync": time.perf_counter() - learned}
        if self.config.loss.beta == 0:
            row.pop("kl")  # not measured: a 0 would look like one
        row |= {"dropped_groups": board.dropped_groups, "trajectory_bytes": board.trajectory_bytes}
        self.recorder.samples(plan.step + 1, plan, board.complete, advantages)
        return row

    def _feed(self, board: StepBoard, updates: list[Row]) -> bool:
        """Give the learner what is ready, in plan order; True when the whole step has been issued."""
        if self.colocated and self.rollouts.queued("sample"):
            return False  # one process does both: sampling goes first, so that scoring overlaps with it
        while not board.issued:
            for micro in board.ready_micro_steps():
                self._issue("accumulate", [(item, micro.scores, self._negative(board, item.shard), *board.arguments(item))
                                           for item in micro.work])
            if not board.update_issued or (self.colocated and not board.all_sampled):
                return False
            if self.config.train.on_ratio_mismatch == "recompute" and board.update == 0:
                for work in board.later_micro_steps():
                    self._issue("recompute", [(item, self._negative(board, item.shard), *board.arguments(item))
                                              for item in work])
            refs = self.learners.cast("apply")
            self._learner_events[refs[0]] = updates.append
            board.next_update()
        return True

    def _issue(self, method: str, args_per_rank: list[tuple]) -> None:
        for ref in self.learners.cast_each(method, args_per_rank):
            self._learner_events[ref] = self._learned

    def _learned(self, timing: Row | None) -> None:
        if timing:
            assert self.board is not None
            self._learner_seconds += timing["seconds"]
            self._learner_peak = max(self._learner_peak, timing["peak_memory"])
            self.board.trained()

    def _drive(self, what: str, done: Callable[[], bool]) -> None:
        """Handle events until `done()`; every call in flight has a deadline, and what is waited for is logged."""
        last_log = time.monotonic()
        while not done():
            ready = wait_for_events(self.pools, list(self.learners.pending), what, longest_s=0.25,
                                    commands=self.commands.control.refs())
            for pool in self.pools:
                pool.settle(ready)
            scaling.make_room(self.pools)
            for ref in [ref for ref in self.learners.pending if ref in ready]:
                value = self.learners.reap(ref)
                self._learner_events.pop(ref, lambda _: None)(value)
            self.learners.check_deadline()
            doing = self._tick(what, ready)
            if time.monotonic() - last_log > 30:
                log.info("waiting for %s: %s", what, doing)
                last_log = time.monotonic()

    def _tick(self, what: str, ready: Iterable[ray.ObjectRef] = ()) -> dict[str, list[str]]:
        """Called several times a second in every wait."""
        doing = {pool.name: pool.activity() for pool in self.pools}
        doing["learner"] = self.group.activity() if self.group is not None else []
        self.observer.activity(doing)
        self.activity.wait(what, waiting_reason(self))
        if self.activity.status_due():
            self.exporter.status(status := run_status(self))
            self.commands.control.push(status.to_json())
        self.commands.control.settle(ready)  # last: it may raise
        return doing

    # Weights ----------------------------------------------------------------------------------------------------------

    @during("syncing")
    def publish(self, version: int) -> Row:
        """Export the learner's weights as `version` and prove that every rollout actor holds them."""
        infos, adapter, ema = self.learners.export(version)
        info = agreed(infos)
        self.published = {"policy": Published("policy", version, info.digest, info.tensors, info.changed, adapter)}
        self._ema = Published("ema", version, info.ema_digest, info.tensors, -1, ema)
        self.rollouts.prepare_again(lambda handle: self._load(handle, "policy"))
        self._drive(f"weight sync of version {version}", lambda: self.rollouts.all_ready)
        self.version = version
        return dict(info.norms)

    def _load(self, handle: Any, slot: str) -> Checked:
        """The call that gives an actor a published slot, and the proof it has to answer with."""
        held = self.published[slot]
        adopt = slot == "policy" and self.colocated
        ref = (handle.adopt_adapter.remote(held.version) if adopt
               else handle.load_adapter.remote(slot, held.version, held.arrays))
        return [(ref, lambda reply: verify(reply, held))]

    def _prepare(self, handle: Any) -> Checked:
        """A new actor that is up answers that it holds every published slot: birth and rebirth take one path."""
        return [call for slot in self.published for call in self._load(handle, slot)]

    # Sampling ---------------------------------------------------------------------------------------------------------

    def _with_conditioning(self, groups: Sequence[GroupPlan], then: Callable[[GroupPlan, ray.ObjectRef], None]) -> None:
        """Call `then` with each group and its conditioning: at once if it was encoded ahead, else when it is encoded."""
        keys = [(group.step, group.group) for group in groups]
        missing = [group for group, key in zip(groups, keys, strict=True) if key not in self._conditionings]
        self.sampling.encode([group.record for group in missing], [(group.step, group.group) for group in missing],
                             lambda number, ref, _: then(missing[number], ref))
        for group, key in zip(groups, keys, strict=True):
            if key in self._conditionings:
                then(group, self._conditionings.pop(key))

    def _negative_text(self, plan: StepPlan, shard: MicroBatch) -> str | None:
        return training_negative(self.config, plan.groups[shard.group].record)  # the plan batches no others with it

    def _negative(self, board: StepBoard, shard: MicroBatch) -> ray.ObjectRef | None:
        return self.sampling.negative(self._negative_text(board.plan, shard))

    def _encode_negatives(self, plan: StepPlan) -> None:
        self._need_negatives({text for shard in plan.shards if (text := self._negative_text(plan, shard)) is not None})

    def _need_negatives(self, texts: set[str]) -> None:
        new = [text for text in sorted(texts) if not self.sampling.has_negative(text)]
        self.sampling.encode_negatives(new)
        self._drive("negative prompts", lambda: all(self.sampling.has_negative(text) for text in new))

    def _encoded(self, board: StepBoard, group: int, conditioning: ray.ObjectRef) -> None:
        for shard in board.encoded(group, conditioning):
            self._sample_shard(board, shard)

    def _sample_shard(self, board: StepBoard, shard: MicroBatch) -> None:
        plan, order = board.plan, (board.plan.step, shard.group, shard.shard)
        what = f"step {plan.step + 1} " + (f"group {shard.group} shard {shard.shard}" if len(shard.groups) == 1
                                           else f"groups {shard.groups[0]}-{shard.groups[-1]}")

        def sampled(meta: SampleMeta, images: ray.ObjectRef, trajectory: ray.ObjectRef) -> None:
            board.sampled(shard, trajectory, meta.trajectory_bytes)
            self.scoring.submit(what, order, images, [plan.groups[group].record for group, _ in shard.rows],
                                lambda scores: board.scored(shard, scores), rewards=self.scoring.due(plan.step + 1),
                                groups=[(group, len(plan.micro_batches_of(group))) for group in shard.groups])

        request = sample_request(self.config, self.recorder.run_id, plan, shard)
        self.sampling.sample(what, order, request, self._negative_text(plan, shard), board.conditionings(shard), sampled)

    # Evaluation and records -------------------------------------------------------------------------------------------

    @during("evaluating")
    def evaluate(self, step: int) -> Row:
        """Evaluate raw and EMA weights at fixed seeds, and record their grids."""
        started = time.perf_counter()
        self._forgive_deaths()
        self._leave_nodes()
        self._need_negatives({text for shard in plan_evaluation(self.config, self.inputs.eval)
                              if (text := evaluation_negative(self.config, shard)) is not None})
        row = self._evaluate("policy", step)
        if self.config.train.ema.enabled and self._ema.digest == self.published["policy"].digest:
            row |= {key.replace("/policy", "/ema", 1): value for key, value in row.items()}  # same weights, same images
        elif self.config.train.ema.enabled:
            self.published["ema"] = self._ema
            self.rollouts.prepare_again(lambda handle: self._load(handle, "ema"))
            self._drive("weight sync of the EMA", lambda: self.rollouts.all_ready)
            row |= self._evaluate("ema", step)
        return row | {"time_eval": time.perf_counter() - started}

    def _evaluate(self, weights: str, step: int) -> Row:
        run = start_evaluation(self.config, self.inputs.eval, weights, step, self.recorder.run_id, self.sampling, self.scoring,
                               self._kept)
        self.scoring.expect(sum(len(shard.items) for shard in run.shards))
        self._drive(f"evaluation of {weights} at step {step}", lambda: run.finished)
        self.scoring.check_budget()
        self._kept.tell(len({prompt for shard in run.shards for prompt in shard.prompts}))
        self.recorder.grid(weights, step, run.grid(self.config, self.inputs.eval))
        return run.row()

    def _forgive_deaths(self) -> None:
        for pool in self.pools:
            pool.forgive_deaths()

    def scale(self, targets: dict[str, int]) -> str:
        """Have other numbers of rollout and reward actors from now on, by pool: {"rollout": 8, "reward.ocr": 4}.

        Returns at once with what is done, for the user. What comes out of the run does not depend on it. New actors are
        made now; those that the cluster cannot hold stay asked for, which makes an autoscaler add nodes, and the others do
        not wait for them. Where there are to be fewer, the last ones get no more work and end with the call that they are
        at. A target holds until the next one, through deaths of actors; a resume starts with pools.*.replicas again.

        Raises:
            ConfigError: a target is not possible (an unknown pool, less than 1, the learners); then no pool is changed.
        """
        return scaling.scale(self.config, self.pools, targets)

    def _leave_nodes(self) -> None:
        """Keep nothing on nodes that no actor works on any more, so that a cluster can give them back."""
        nodes = scaling.emptied(self.pools)
        self._kept.forget(scaling.kept_on(nodes, self._kept.refs()))
        self.sampling.forget_negatives(scaling.kept_on(nodes, self.sampling.negatives))

    def _reset_clocks(self) -> None:
        self._learner_seconds = self._learner_peak = 0.0
        self.sampling.peak_memory = 0
        scoring = self.scoring
        for counter in (self.sampling.seconds, self.sampling.calls, scoring.seconds, scoring.calls, scoring.images):
            counter.clear()
        for pool in self.pools:
            pool.restart_clock()

    def _speed(self, row: Row, seconds: float) -> Row:
        """Throughput, and the share of the step in which each role worked."""
        images, learner, pools = row["images"], self.config.pools.learner, named_pools(self.config)
        worked = {pool.name: max(1e-9, pool.count_time()) for pool in self.pools}  # seconds, summed over actors
        gpu_seconds = learner.num_gpus * learner.replicas * seconds + sum(
            pools[name].num_gpus * each for name, each in worked.items() if name != "colocated")
        speed = {
            "images_per_s": images / seconds,
            "busy_share/rollout": sum(self.sampling.seconds.values()) / worked[self.rollouts.name],
            "busy_share/reward": sum(self.scoring.seconds.values()) / sum(worked[pool.name] for pool in self.rewards.values()),
            "busy_share/learner": self._learner_seconds / (self.learners.world_size * seconds),
            "time_sample_call": self.sampling.seconds["sample"] / max(1, self.sampling.calls["sample"]),
            "time_reward_call": sum(self.scoring.seconds.values()) / max(1, self.scoring.calls.total()),
            "time_encode": self.sampling.seconds["encode"],
            "time_learn": self._learner_seconds / self.learners.world_size,
        }
        speed |= {f"time_score_image/{name}": self.scoring.seconds[name] / count
                  for name, count in self.scoring.images.items()}
        speed |= {f"pool_actors/{pool.name}": pool.alive for pool in self.pools}
        peaks = {"rollout": self.sampling.peak_memory, "learner": self._learner_peak}
        speed |= {f"peak_memory/{role}": value for role, value in peaks.items() if value}
        return speed | ({"images_per_gpu_s": images / gpu_seconds} if gpu_seconds else {})

    def _record(self, row: Row) -> None:
        """Add the totals since the start of the run, and record the row."""
        totals = self._totals()
        row |= totals
        self._step = None
        recorded = self.recorder.row(row)
        self.exporter.row(recorded)
        self.last.finish(int(row["step"]), totals)
        self.activity.recorded(row)
        self.observer.row(recorded)

    def _totals(self) -> Row:
        before = self.recorder.totals
        totals: Row = {"late_answers_dropped": sum(pool.count_late_answers() for pool in self.pools),
                       "trackers_dropped": len(self.recorder.trackers.dropped),
                       "time_total": time.perf_counter() - self._started}
        for name in self.rewards:
            totals[f"scoring_retries/{name}"] = self.scoring.counts[f"retries/{name}"]
            totals[f"scoring_failures/{name}"] = self.scoring.counts[f"failures/{name}"]
        for pool in self.pools:
            totals[f"actor_deaths/{pool.name}"] = pool.counts["deaths"]
            totals[f"timeouts/{pool.name}"] = pool.counts["timeouts"]
            totals[f"failed_starts/{pool.name}"] = pool.counts["failed_starts"]
            totals[f"actors_taken_out/{pool.name}"] = pool.counts["taken_out"]
            totals[f"calls_repeated/{pool.name}"] = pool.counts["repeated"]
        return {key: value + before.get(key, 0) for key, value in totals.items()}
