"""Actors that go wrong in one way each, for tests of what the run does then."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from actors.learner import LearnerActor
from actors.reward import RewardActor
from actors.rollout import RolloutActor
from flowgrpo_ray.policies import lora


class FaultyReward(RewardActor):
    """jpeg_compressibility that goes wrong on one image of step 2: the first one, group 1, shard 0 ("the victim").

    The test finds it by its bytes, so that it is the same image alone, in its batch, and after a respawn. `fault` and a
    file to find the victim with come through the environment.
    """

    def __init__(self, *args):
        super().__init__(*args)
        inner, fault, folder = self._reward, os.environ["FAULT"], Path(os.environ["FAULT_DIR"])

        class Broken:
            range, notes = inner.range, inner.notes

            def score(self, images, prompts, metadata, *, group_ids=None):
                result = inner.score(images, prompts, metadata)
                victim = folder / "victim.npy"
                if not victim.exists():
                    staged = folder / f"victim{os.getpid()}.npy"
                    np.save(staged, images[0])
                    try:
                        os.link(staged, victim)
                    except FileExistsError:
                        pass
                wanted = np.load(victim)
                hits = [i for i, image in enumerate(images) if np.array_equal(image, wanted)]
                if not hits:
                    return result
                if fault == "raise":
                    raise ValueError("this image is beyond me")
                if fault == "hang":
                    time.sleep(3600)
                if fault == "die":
                    os._exit(3)
                if fault == "nan":
                    result["jpeg_compressibility"][hits[0]] = np.nan
                if fault == "short":
                    result["jpeg_compressibility"] = result["jpeg_compressibility"][:-1]
                if fault == "flaky":
                    marker = folder / "failed-once"
                    if not marker.exists():
                        marker.touch()
                        raise ConnectionError("come back later")
                return result

        self._reward = Broken()


class BindsNothing(RolloutActor):
    """Says that it loaded the adapter, and leaves the model as it was."""

    def load_adapter(self, slot, version, arrays):
        if version == 0:
            return super().load_adapter(slot, version, arrays)
        return self.sampler.slots.adopt(slot, version)


class BindsOneTensorLess(RolloutActor):
    """Binds all tensors but one, and counts honestly."""

    def load_adapter(self, slot, version, arrays):
        reply = super().load_adapter(slot, version, arrays)
        return replace(reply, bound=reply.bound - 1)


class WrongDigest(RolloutActor):
    """One weight is off by one bit after the sync."""

    def load_adapter(self, slot, version, arrays):
        arrays = {key: value.copy() for key, value in arrays.items()}
        key = sorted(arrays)[0]
        arrays[key].view(np.uint8).reshape(-1)[0] ^= 1
        return super().load_adapter(slot, version, arrays)


class WrongVersion(RolloutActor):
    """Answers for the version before."""

    def load_adapter(self, slot, version, arrays):
        return super().load_adapter(slot, max(0, version - 1), arrays)


class ForgetsVersion(RolloutActor):
    """Answers as it should, then holds another version when work comes."""

    def load_adapter(self, slot, version, arrays):
        reply = super().load_adapter(slot, version, arrays)
        held = self.sampler.slots._held[slot]
        self.sampler.slots._held[slot] = replace(held, version=version + 7)
        return reply


class OtherConditioning(RolloutActor):
    """Samples under the right weights but another prompt than the learner is told."""

    def sample(self, request, negative, *conditionings):
        moved = [{key: value + np.float32(0.01) for key, value in part.items()} for part in conditionings]
        return super().sample(request, negative, *moved)


class StrayWeight(RolloutActor):
    """The proof was right, then something changed a weight (what the on-policy gate is for)."""

    def sample(self, request, negative, *conditionings):
        self.sampler.slots.bind(request.slot, request.version)
        stray = next(value for key, value in lora.parameters(self.sampler.policy).items() if "lora_B" in key)
        stray.data.add_(1e-3)
        return super().sample(request, negative, *conditionings)


class HangsOnce(RolloutActor):
    """Stops answering in the middle of its first sample call of step 2, once in the run."""

    def sample(self, request, negative, *conditionings):
        marker = Path(os.environ["FAULT_DIR"]) / "hung"
        if request.version == 1 and not marker.exists():
            marker.touch()
            time.sleep(3600)
        return super().sample(request, negative, *conditionings)


class OutOfMemoryOnce(RolloutActor):
    """Raises once, as a model that runs out of memory does."""

    def sample(self, request, negative, *conditionings):
        marker = Path(os.environ["FAULT_DIR"]) / "raised"
        if request.version == 1 and not marker.exists():
            marker.touch()
            raise MemoryError("out of memory")
        return super().sample(request, negative, *conditionings)


class SickOnce(RolloutActor):
    """Every sample call of the process that gets one first raises, as on a GPU with a sticky error."""

    def sample(self, request, negative, *conditionings):
        sick = Path(os.environ["FAULT_DIR"]) / "sick"
        try:
            sick.symlink_to(str(os.getpid()))
        except FileExistsError:
            pass
        if os.readlink(sick) == str(os.getpid()):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().sample(request, negative, *conditionings)


class AlwaysRaises(RolloutActor):
    def sample(self, request, negative, *conditionings):
        raise MemoryError("out of memory again")


class LearnerDies(LearnerActor):
    """Rank 1 dies in its first accumulate call."""

    def accumulate(self, *args):
        if self.learner.rank == 1:
            os._exit(5)
        return super().accumulate(*args)


class LearnerHasABug(LearnerActor):
    """Its update divides by zero."""

    def apply(self):
        return {"loss": 1 / self.learner.rank}


class LearnerHasABugAtItsStart(LearnerActor):
    """Its constructor raises what cannot be pickled."""

    def __init__(self, *args):
        class OddError(Exception):
            def __init__(self, lock):
                super().__init__("an odd one")
                self.lock = lock

        raise OddError(threading.Lock())


class LearnerHangs(LearnerActor):
    """Rank 1 never answers its first accumulate call."""

    def accumulate(self, *args):
        if self.learner.rank == 1:
            time.sleep(3600)
        return super().accumulate(*args)
