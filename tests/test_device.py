"""What depends on the kind of device, on a machine without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.learner import LearnerMethods
from actors.rollout import SamplingMethods
from flowgrpo_ray import device as devices

GPU = torch.device("cuda", 0)


class Memory:
    """torch.cuda's counter of the largest allocation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = 10
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)

    def reset(self, device: torch.device) -> None:
        self.peak = self.allocated

    def use(self, amount: int) -> int:
        """Allocate, free, and answer as a role does."""
        self.peak = max(self.peak, self.allocated + amount)
        return devices.peak_memory_bytes(GPU)


def test_the_peak_memory_of_a_call_is_its_own(monkeypatch):
    """Sampler and learner of one process, in turn: neither reports the other's peak, nor that of an earlier step."""
    memory = Memory(monkeypatch)

    def role(amounts: list[int]) -> Any:
        def call(*_: Any) -> int:
            return memory.use(amounts.pop(0))

        return SimpleNamespace(policy=SimpleNamespace(device=GPU), sample=call, accumulate=call, add_scores=lambda _: None)

    actor = type("Colocated", (SamplingMethods, LearnerMethods), {})()
    actor.sampler, actor.learner = role([50, 3]), role([70, 4])
    request = SimpleNamespace(version=1, slot="policy")
    found = [call for _ in range(2) for call in (actor.sample(request, None), actor.accumulate(None, {}, None, None))]
    assert found == [60, 80, 13, 14]


def test_there_is_no_peak_memory_on_cpu():
    devices.reset_peak_memory(torch.device("cpu"))
    assert devices.peak_memory_bytes(torch.device("cpu")) == 0
