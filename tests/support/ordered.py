"""Actors that wait for each other, and tell in files what happened before what. The folder comes through EVENTS."""

from __future__ import annotations

import os
import time
from pathlib import Path

from actors.learner import LearnerActor
from actors.process import Process
from actors.reward import RewardActor
from actors.rollout import RolloutActor


def event(name: str) -> Path:
    return Path(os.environ["EVENTS"]) / name


def wait_for(name: str, seconds: float = 45.0) -> None:
    """Raises TimeoutError where the event does not come."""
    deadline = time.monotonic() + seconds
    while not event(name).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} did not happen within {seconds:g} s")
        time.sleep(0.02)


def once(name: str) -> bool:
    """True for the first who asks."""
    try:
        event(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Teller(RolloutActor):
    """Tells which shards it has sampled, and the last one waits for LAST_WAITS_FOR where that is set."""

    def sample(self, request, negative, *conditionings):
        _, _, group, sample = request.noise_keys[0]
        if (group, sample) == (3, 2) and "LAST_WAITS_FOR" in os.environ:
            wait_for(os.environ["LAST_WAITS_FOR"])
        answer = super().sample(request, negative, *conditionings)
        event(f"sampled-{group}-{sample}").touch()
        return answer


class Gated(RolloutActor):
    """Samples with version v once the file `go-v` is there, and tells that it could."""

    def sample(self, request, negative, *conditionings):
        event(f"samples-{request.version}-{os.getpid()}").touch()
        wait_for(f"go-{request.version}", seconds=240)
        return super().sample(request, negative, *conditionings)


class TellingReward(RewardActor):
    """Tells how many images it has scored."""

    def score(self, prompts, metadata, group_ids, only, *shards):
        answer = super().score(prompts, metadata, group_ids, only, *shards)
        event(f"scored-{len(prompts)}-{time.monotonic_ns()}").touch()
        return answer


class ScoresBesideAnother(RewardActor):
    """Its first call waits until another actor of the reward scores too."""

    def score(self, prompts, metadata, group_ids, only, *shards):
        if once(f"scoring-{os.getpid()}"):
            deadline = time.monotonic() + 60
            while len(list(event("").glob("scoring-*"))) < 2:
                if time.monotonic() > deadline:
                    raise TimeoutError("no other actor scores")
                time.sleep(0.02)
        return super().score(prompts, metadata, group_ids, only, *shards)


class TellingLearner(LearnerActor):
    """Tells what had happened before its first micro-step."""

    def accumulate(self, *args):
        if once("learning"):
            before = sorted(path.name for path in event("").iterdir())
            event("before-learning").write_text("\n".join(before))
        return super().accumulate(*args)


class LateReward(RewardActor):
    """One call of the run answers when it is told to."""

    def score(self, prompts, metadata, group_ids, only, *shards):
        if once("late-score"):
            wait_for("reward-may-answer")
        return super().score(prompts, metadata, group_ids, only, *shards)


class LateRollout(RolloutActor):
    """One sample call of the run answers when it is told to."""

    def sample(self, request, negative, *conditionings):
        if once("late-sample"):
            wait_for("rollout-may-answer")
        return super().sample(request, negative, *conditionings)


class Worker:
    """Waits as long as it is told, and answers with what it is told."""

    def ready(self) -> Process:
        return Process.here()

    def work(self, seconds: float, value: str) -> str:
        time.sleep(seconds)
        return value


class Halting:
    """Calls of the first actor wait for the file `go`; each tells who did it."""

    def __init__(self, folder: str, index: int) -> None:
        self.folder, self.index = folder, index

    def ready(self) -> Process:
        return Process.here()

    def work(self, number: int, fails_on: tuple[int, ...]) -> tuple[int, int]:
        while self.index == 0 and not os.path.exists(os.path.join(self.folder, "go")):
            time.sleep(0.02)
        if self.index in fails_on:
            raise ValueError(f"{number} failed on {self.index}")
        return number, self.index

    def value(self, size: int) -> bytes:
        return bytes(size)
