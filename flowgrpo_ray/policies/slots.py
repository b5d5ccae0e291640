"""The adapter versions that an actor holds, one of them bound in the model, each proven by reading it back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowgrpo_ray.data.trajectory import Arrays, SyncReply
from flowgrpo_ray.errors import SyncError
from flowgrpo_ray.policies import lora
from flowgrpo_ray.policies.base import Policy


@dataclass(frozen=True)
class Held:
    version: int
    digest: str
    arrays: Arrays


class AdapterSlots:
    """Slots `policy` and `ema`. A request names slot and version; what is not held is refused, never approximated."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._held: dict[str, Held] = {}
        self._bound: str | None = None

    def load(self, slot: str, version: int, arrays: Arrays) -> SyncReply:
        """Write an adapter into the model, read it back from the bound parameters, and answer with the proof."""
        bound, _ = lora.write_state(self._policy, arrays)
        return self._record(slot, version, bound)

    def adopt(self, slot: str, version: int) -> SyncReply:
        """Give the parameters as they stand in the model a version: a colocated learner has trained them in place."""
        if self._bound not in (None, slot):
            raise SyncError(f"slot {slot!r} cannot be adopted while {self._bound!r} is bound in the model")
        return self._record(slot, version, len(lora.parameters(self._policy)))

    def version(self, slot: str) -> int:
        """The version that a slot holds."""
        return self._held[slot].version

    def bind(self, slot: str, version: int) -> str:
        """Put a held version into the model (nothing to do where it is there already); returns its digest.

        Raises:
            SyncError: the slot holds another version, or none.
        """
        held = self._held.get(slot)
        if held is None or held.version != version:
            has = "nothing" if held is None else f"version {held.version}"
            raise SyncError(f"the request names {slot} version {version}, and this actor holds {has}")
        if self._bound != slot:
            lora.write_state(self._policy, held.arrays)
            self._bound = slot
        return held.digest

    def _record(self, slot: str, version: int, bound: int) -> SyncReply:
        state = lora.read_state(self._policy)
        before = self._held.get(slot)
        changed = -1 if before is None else changed_tensors(before.arrays, state)
        self._held[slot] = Held(version, lora.digest(state), state)
        self._bound = slot
        previous = -1 if before is None else before.version
        return SyncReply(slot, version, previous, self._held[slot].digest, bound, changed)


def changed_tensors(before: Arrays, after: Arrays) -> int:
    """How many tensors differ in their bytes."""
    return sum(not np.array_equal(before[key].view(np.uint8), after[key].view(np.uint8)) for key in after)
