"""The reward actor. Imports only the standard library, numpy, ray, process.py, rewards/base.py and
startup.py: a reward may live in another environment than the rest."""

from __future__ import annotations

import os
import pickle
import sys
import time
from dataclasses import dataclass

import numpy as np

from actors.process import Process, Shown
from flowgrpo_ray.errors import described, place_of
from flowgrpo_ray.rewards import RewardError, get, validated
from flowgrpo_ray.rewards.base import explained, no_exit, read_only, renamed, self_tested
from flowgrpo_ray.startup import loading

PLACE = "raised in "  # begins the note that an exception of the user's own code carries to the driver


@dataclass(frozen=True)
class FirstCall:
    """A call as the run makes it, to find a bug of the user's own code before anything is sampled: known images of
    that size in pixels, with the first prompt of the run."""

    prompt: str
    metadata: dict
    images: int
    height: int
    width: int

    def known_images(self) -> np.ndarray:
        """uint8 [n, height, width, 3]: a gradient with noise, another one for each image; none of them is flat."""
        ramp = np.add.outer(np.linspace(0, 90, self.height), np.linspace(0, 90, self.width))
        noise = np.random.default_rng(0).integers(0, 64, (self.images, self.height, self.width, 3))
        return (ramp[None, :, :, None] + noise).astype(np.uint8)


class RewardActor(Shown):
    """Scores batches of images with one reward.

    Args:
        name: key of the reward in the configuration; its scores carry this name.
        spec: what the registry is asked for: a reward's name, or `module:attribute`.
        self_test: score known images first; RewardError where that goes wrong.
        scope: what the driver takes the reward's scope for, "sample" or "group".
        group_size: images in a group of the run.
        on_gpu: the actor was given a GPU; RewardError where the reward does not use it.
        cpu_threads: torch threads, since bits depend on it.
        first_call: with `self_test`, made once if the reward has no self-test of its own; RewardError if it fails.
    """

    def __init__(
        self, name: str, spec: str, options: dict, self_test: bool = True, nice: int = 0, scope: str | None = None,
        group_size: int = 1, on_gpu: bool = False, cpu_threads: int = 1, first_call: FirstCall | None = None,
    ) -> None:
        self.role = f"scores {name}"
        if nice > 0:
            os.nice(max(0, nice - os.nice(0)))
        self._name, self._own = name, ":" in spec
        with explained(name, "its start"):
            with loading():
                self._reward = get(spec, **options)
            self._kind = self._reward.name
            if scope is not None and self._reward.scope != scope:
                raise RewardError(f"reward {name} is scored per {self._reward.scope}, and the run takes it for one that is "
                                  f"scored per {scope}: its module must be importable where the run is started, too")
            if self._reward.scope == "group" and group_size > (self._reward.max_group or group_size):
                raise RewardError(f"reward {name} scores groups of {self._reward.max_group} images at most, and "
                                  f"sampling.group_size is {group_size}")
            if on_gpu and self._reward.device == "any" and (problem := self._reward.gpu_problem()):
                raise RewardError(f"the actor of reward {name} was given a GPU (pools.reward.{name}.num_gpus), and {problem}")
            if "torch" in sys.modules:  # a later import takes the number of threads from the environment
                from flowgrpo_ray.device import configure_process

                configure_process(on_gpu=False, cpu_threads=cpu_threads)  # the reward has chosen its device itself
            if self_test:
                self_tested(self._reward)
                if first_call is not None and self._reward.self_test_case() is None:
                    self._call_once(first_call)

    def _call_once(self, call: FirstCall) -> None:
        """Score known images. A RewardError of the reward's own is its answer to images that it cannot score, not a bug."""
        n = call.images
        what = f"its self-test ({n} made-up images of {call.width} x {call.height} with the prompt {call.prompt!r})"
        with explained(self._name, what):
            try:
                result = self._reward.score(read_only(call.known_images()), [call.prompt] * n, [call.metadata] * n,
                                            group_ids=[0] * n if self._reward.scope == "group" else None)
            except RewardError:
                return
        try:
            validated(result, n, self._kind, range=self._reward.range)
        except RewardError as error:
            raise RewardError(f"{error}, in {what}") from None

    def score(
        self, prompts: list[str], metadata: list[dict], group_ids: list[int] | None, part: tuple[int, int] | None,
        *shards: np.ndarray,
    ) -> dict[str, object]:
        """Scores of the images of one or more shards, uint8 [m, H, W, 3] each; `part` = (start, stop) scores
        these of them alone.

        Returns {"scores": {name: float64 [n]}, "seconds": …, "cpu_seconds": …, "notes": the reward's, so far}.

        Raises:
            RewardError: the reward answered with NaN, a wrong length, or not its own name; its exceptions pass through.
        """
        wall, cpu = time.perf_counter(), time.process_time()
        self.shows(f"scores {len(prompts)} images with {self._name}")
        images = read_only(shards[0] if len(shards) == 1 else np.concatenate(shards))
        if part is not None:
            rows = slice(*part)
            images, prompts, metadata = images[rows], prompts[rows], metadata[rows]
        try:
            with no_exit(self._name):
                result = self._reward.score(images, prompts, metadata, group_ids=group_ids)
        except KeyboardInterrupt:  # Ray would take it for a call that was cancelled
            raise RewardError("KeyboardInterrupt") from None
        except Exception as error:
            sent = error if _travels(error) else RewardError(described(error))
            if self._own and not isinstance(error, RewardError):
                sent.add_note(f"{PLACE}{place_of(error)}")
            raise sent from None
        scores = validated(result, len(prompts), self._kind, range=self._reward.range)
        return {"scores": renamed(scores, self._kind, self._name),
                "seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu,
                "notes": list(self._reward.notes)}

    def ready(self) -> Process:
        """Answers once the constructor is through."""
        return Process.here()


def _travels(error: Exception) -> bool:
    """Whether an exception can be sent to the driver as it is."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True
