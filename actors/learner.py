"""The learner actor (one rank) and the group of them that the driver talks to."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import ray
from ray.util import remove_placement_group

from actors import head, nodes, tracebacks
from actors.dispatch import EVENTS
from actors.names import ActorNames
from actors.placement import actor_options, place_learners
from actors.process import Process, Shown
from flowgrpo_ray import signals, startup, waiting
from flowgrpo_ray.config.load import Config, from_tree
from flowgrpo_ray.data.plan import RankWork, StepPlan
from flowgrpo_ray.data.trajectory import Arrays, ExportInfo, GroupScores, Trajectory
from flowgrpo_ray.errors import CheckpointError, ConfigError, FlowGrpoError, first_line
from flowgrpo_ray.policies import load_policy, policy_class
from flowgrpo_ray.policies.source import find
from flowgrpo_ray.run_dir import shared_dir
from flowgrpo_ray.run_dir.checkpoint import FileEntry
from flowgrpo_ray.views.status import PoolStatus

if TYPE_CHECKING:
    from flowgrpo_ray.learning.learner import Learner
    from flowgrpo_ray.policies.lora import LoraSettings

log = logging.getLogger(__name__)


class LearnerMethods(Shown):
    """What a learner actor and a colocated actor have in common."""

    role = "trains"
    learner: Learner
    settings: LoraSettings
    _training = ""  # what its process shows while it trains

    def begin_step(self, plan: StepPlan, keep: bool = False) -> None:
        self._training = f"trains step {plan.step + 1} from version {plan.version}"
        self.shows(self._training)
        self.learner.begin_step(plan, keep)

    def accumulate(
        self, work: RankWork, scores: dict[int, GroupScores], negative: Arrays | None, *parts: Arrays | Trajectory,
    ) -> dict[str, float]:
        """`scores`: those of complete groups that the rank has not been told yet."""
        from flowgrpo_ray import device as devices

        self.shows(self._training)
        devices.reset_peak_memory(self.learner.policy.device)
        self.learner.add_scores(scores)
        return self.learner.accumulate(work, negative, *parts)

    def recompute(self, work: RankWork, negative: Arrays | None, *parts: Arrays | Trajectory) -> None:
        self.learner.recompute(work, negative, *parts)

    def apply(self) -> dict[str, float]:
        self.shows(self._training)
        return self.learner.apply()

    def step_advantages(self) -> dict[int, np.ndarray]:
        return self.learner.step_advantages()

    def export(self, version: int) -> tuple[ExportInfo, Arrays | None, Arrays | None]:
        return self.learner.export(version)

    def save(self, step_uri: str) -> list[FileEntry]:
        """Write this learner's files of a checkpoint (rank 0; the others only take part in the gathering)."""
        from flowgrpo_ray.learning.state import write_learner_state

        self.shows("writes a checkpoint")
        tensors, counters = self.learner.state()
        if self.learner.rank != 0:
            return []
        return write_learner_state(step_uri, tensors, counters, self.settings, type(self.learner.policy))

    def save_finished(self, step_uri: str, step: int) -> list[FileEntry]:
        """Write the state that was kept when the step after `step` began. For rank 0, without the other ranks.

        Raises:
            CheckpointError: that state was not kept.
        """
        if self.learner.finished is None or self.learner.finished[0] != step:
            raise CheckpointError(f"the learner holds no state of step {step}")
        from flowgrpo_ray.learning.state import write_learner_state

        _, tensors, counters = self.learner.finished
        return write_learner_state(step_uri, tensors, counters, self.settings, type(self.learner.policy))

    def read_checkpoint(self, step_uri: str) -> None:
        """Read the state of a committed checkpoint: every rank for itself, and so apart from the others."""
        from flowgrpo_ray.learning.state import read_learner_state

        self._read = read_learner_state(step_uri)

    def load_checkpoint(self) -> None:
        """Take the state that was read (a collective where the learner is sharded)."""
        self.learner.load_state(*self._read)
        del self._read

    def ready(self) -> Process:
        return Process.here()


class LearnerActor(LearnerMethods):
    """One rank. It computes nothing before `setup` has joined it to its group."""

    parts: Literal["all", "learner"] = "learner"

    def __init__(self, config_tree: dict, on_gpu: bool, run_id: str, nice: int = 0) -> None:
        self._config, self._run_id = from_tree(config_tree), run_id
        waiting.set_limits(self._config)
        with startup.loading():  # all ranks at once, and not one after the other in `setup`
            from flowgrpo_ray import device as devices
            from flowgrpo_ray.learning import learner, parallel  # noqa: F401

            devices.lower_priority(nice)
            self._device = devices.configure_process(on_gpu=on_gpu, cpu_threads=self._config.model.cpu_threads)
            with suppress(ConfigError):  # `setup` says so
                policy_class(find(self._config.model).family)
        self._store: Any = None  # where the ranks meet, on rank 0

    def address(self) -> tuple[str, int]:
        """Open the store where the ranks meet (rank 0), and return its host and port."""
        from flowgrpo_ray.learning import parallel

        self._store = parallel.open_store(ray.util.get_node_ip_address())
        return self._store.host, self._store.port

    def answer(self, run_dir: str, token: str, who: str) -> tuple[str, str | None]:
        """This node's address, and what is wrong with the run directory here (see `shared_dir`)."""
        return ray.util.get_node_ip_address(), shared_dir.answer(run_dir, token, who)

    def setup(self, rank: int, world_size: int, address: tuple[str, int]) -> str:
        """Load the model, attach LoRA, join the group, shard. Returns the sharding chosen."""
        from flowgrpo_ray.learning import parallel
        from flowgrpo_ray.learning.learner import Learner
        from flowgrpo_ray.policies import lora

        config, start_timeout_s = self._config, self._config.pools.start_timeout_s
        policy = load_policy(config.model, device=self._device, parts=self.parts)
        self.settings = lora.attach(policy, config.lora, config.train.seed)
        if world_size > 1 or config.train.sharding in ("full", "hybrid"):
            store = self._store or parallel.reach_store(address, start_timeout_s)
            parallel.join(rank, world_size, store, self._device, timeout_s=config.collective_timeout_s,
                          start_timeout_s=start_timeout_s, weights=policy.fingerprint())
        self.learner = Learner(policy, config, run_id=self._run_id, rank=rank, world_size=world_size)
        return self.learner.sharding


def _in_collective(cause: BaseException) -> bool:
    """Whether a call failed at its wait for other ranks; torch has a class for NCCL's errors, gloo's tell by their text."""
    return isinstance(cause, RuntimeError) and (type(cause).__name__.startswith("Dist") or "gloo" in str(cause))


class LearnerGroup:
    """The ranks, seen from the driver. Every call goes to all ranks in one order; the first failure ends the group."""

    def __init__(self, config: Config, run_id: str, names: ActorNames, actor_class: type = LearnerActor) -> None:
        pool = config.pools.learner
        self.world_size, self._timeout = pool.replicas, pool.timeout_s
        self.group = place_learners(config)
        tree = config.model_dump(mode="json")
        remote: Any = ray.remote(actor_class)
        options = [actor_options(pool, names.new("learner", rank), self.group, rank, namespace=names.namespace,
                                 cpu_threads=config.model.cpu_threads)
                   for rank in range(self.world_size)]
        self.actors = [remote.options(**o).remote(tree, pool.num_gpus > 0, run_id, pool.nice) for o in options]
        self.pending: dict[ray.ObjectRef, str] = {}
        self._places: list[Process] = []  # by rank, once they are in the group
        self._last_progress = time.monotonic()
        self.watch: Callable[[str], object] = lambda waiting_for: None  # called several times a second in every wait

    def start(self, timeout_s: float) -> None:
        """Form the group; all ranks load the model at the same time."""
        deadline = time.monotonic() + timeout_s
        address = self._get(self._watch([self.actors[0].address.remote()], "address"), timeout_s)[0]
        setup = [(rank, self.world_size, address) for rank in range(self.world_size)]
        chosen = self._get(self.cast_each("setup", setup), max(0.0, deadline - time.monotonic()))
        self._places = self._get(self.cast("ready"), max(1.0, deadline - time.monotonic()))
        for place in self._places:
            nodes.used(place)
        log.debug("train.sharding %s on %d learner ranks", chosen[0], self.world_size)

    def check_run_dir(self, run_dir: str, timeout_s: float) -> None:
        """Prove that a run directory is one place for the driver and every rank, which all can read and write.

        Raises:
            ConfigError: it is not.
        """
        names = [f"learner rank {rank}" for rank in range(self.world_size)]
        token = shared_dir.leave_token(run_dir)
        replies: dict[str, tuple[str, str | None]] = {}
        try:
            calls = self.cast_each("answer", [(run_dir, token, name) for name in names])
            replies = dict(zip(names, self._get(calls, timeout_s), strict=True))
        finally:
            shared_dir.check_answers(run_dir, token, {name: problem for name, (_, problem) in replies.items()},
                                     {name: node for name, (node, _) in replies.items()})

    def cast(self, method: str, *args: Any) -> list[ray.ObjectRef]:
        """Issue a call to all ranks without waiting; its failure shows at the next `reap`."""
        return self.cast_each(method, [args] * self.world_size)

    def cast_each(self, method: str, args_per_rank: list[tuple]) -> list[ray.ObjectRef]:
        """Issue a call with arguments of its own for each rank."""
        refs = [getattr(actor, method).remote(*args) for actor, args in zip(self.actors, args_per_rank, strict=True)]
        return self._watch(refs, method)

    def _watch(self, refs: list[ray.ObjectRef], method: str) -> list[ray.ObjectRef]:
        if not self.pending:
            self._last_progress = time.monotonic()
        for rank, ref in enumerate(refs):
            self.pending[ref] = f"{method} on learner rank {rank}"
        return refs

    def export(self, version: int) -> tuple[list[ExportInfo], ray.ObjectRef, ray.ObjectRef]:
        """Every rank's account of the version, and the refs of rank 0's adapter and EMA adapter."""
        refs = [actor.export.options(num_returns=3).remote(version) for actor in self.actors]
        infos = self._get(self._watch([info for info, _, _ in refs], "export"), self._timeout)
        return infos, refs[0][1], refs[0][2]

    def check_deadline(self) -> None:
        """Raises FlowGrpoError where calls are pending and none has been answered for `pools.learner.timeout_s`."""
        if self.pending and time.monotonic() - self._last_progress > self._timeout:
            raise FlowGrpoError(f"no answer within {self._timeout:g} s (pools.learner.timeout_s) from "
                                + ", ".join(sorted(set(self.pending.values()))))

    def activity(self) -> list[str]:
        """What each rank is doing, for the live view."""
        doing = {what.rsplit(" ", 1)[1]: what.split(" ", 1)[0] for what in reversed(self.pending.values())}
        return [doing.get(str(rank), "idle") for rank in range(self.world_size)]

    def status(self) -> PoolStatus:
        """The state of the group now; no call is made for it."""
        ready = len(self._places)
        busy = sum(doing != "idle" for doing in self.activity()) if ready else 0
        return PoolStatus(self.world_size, ready, self.world_size - ready, busy, counts=dict.fromkeys(EVENTS, 0),
                          nodes=dict(Counter(place.node for place in self._places)))

    def reap(self, ref: ray.ObjectRef) -> Any:
        """Take the value of a finished call; a failed one is raised with the rank's name."""
        what = self.pending.pop(ref)
        self._last_progress = time.monotonic()
        try:
            return ray.get(ref, timeout=60)
        except tracebacks.FAILED as error:
            head.check()  # what it needs went with Ray
            cause = getattr(error, "cause", None)
            if isinstance(cause, OSError):  # a full disk, a store that is gone
                raise FlowGrpoError(f"{what} failed: {cause}. The same command resumes from the newest checkpoint") from error
            if cause is not None and _in_collective(cause):
                said = re.sub(r"^\[.*?\] ", "", first_line(cause))  # without the place in gloo's sources
                raise FlowGrpoError(f"{what} failed: {self._still_out(what)} ({said}). "
                                    "pools.learner.collective_timeout_s is how long ranks wait for each other. The same "
                                    "command resumes from the newest checkpoint") from error
            if isinstance(cause, FlowGrpoError):
                raise type(cause)(f"{what}: {cause}") from error
            raise FlowGrpoError(f"{what} failed: {tracebacks.summary(error)}") from error
        except ray.exceptions.RayError as error:
            if getattr(error, "actor_init_failed", False):
                raise FlowGrpoError(f"{what.partition(' on ')[2]} could not start: {tracebacks.summary(error)}") from error
            head.check()
            rank = int(what.rpartition(" ")[2])
            why = nodes.why_lost(error, *self._places[rank][1:]) if self._places else nodes.why_lost(error)
            raise FlowGrpoError(f"{what} failed: {why}. The same command resumes from the newest checkpoint") from error

    def _still_out(self, failed: str) -> str:
        """Which ranks have not answered where that of `failed` has, and their nodes: one of them hangs, or its network does."""
        ranks = sorted({int(what.rpartition(" ")[2]) for what in self.pending.values()} - {int(failed.rpartition(" ")[2])})
        return "the ranks do not reach each other" if not ranks else "no answer from " + ", ".join(
            f"rank {rank}" + (f" on node {self._places[rank].node}" if self._places else "") for rank in ranks)

    def call(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Issue a call to all ranks and wait for all answers, in rank order."""
        return self._get(self.cast(method, *args), timeout_s or self._timeout)

    def _get(self, refs: list[ray.ObjectRef], timeout_s: float) -> list[Any]:
        waiting, values, last_log = list(refs), {}, time.monotonic()
        deadline = last_log + timeout_s
        while waiting:
            signals.check()
            head.check()
            self.watch(self.pending[waiting[0]])
            # One at a time: a rank that failed is seen at once, though another may hang in a collective with it.
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, min(0.25, deadline - time.monotonic())))
            if done:
                values[done[0]] = self.reap(done[0])
                continue
            names = ", ".join(self.pending[ref] for ref in waiting)
            if time.monotonic() >= deadline:
                raise FlowGrpoError(f"no answer within {timeout_s:g} s from {names}")
            if time.monotonic() - last_log > 30:
                log.info("waiting for %s", names)
                last_log = time.monotonic()
        return [values[ref] for ref in refs]

    def save_finished(self, step_uri: str, step: int, timeout_s: float) -> list[FileEntry]:
        """Let rank 0 write the state of a step before the one in progress. Calls that it has not begun are dropped; no other
        call makes sense afterwards."""
        for ref, what in self.pending.items():
            if what.endswith(" rank 0"):
                ray.cancel(ref)
        self.pending = {}
        return self._get(self._watch([self.actors[0].save_finished.remote(step_uri, step)], "save_finished"), timeout_s)[0]

    def shutdown(self) -> None:
        """Kill all ranks (none may stay in a collective) and give their resources back."""
        for actor in self.actors:
            ray.kill(actor)
        remove_placement_group(self.group)
