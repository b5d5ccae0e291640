"""What the driver says of learner ranks that fail; without Ray: the test plays their answers."""

from __future__ import annotations

import pytest
import ray
from ray.exceptions import RayTaskError

from actors.learner import LearnerGroup
from actors.process import Process
from flowgrpo_ray.errors import FlowGrpoError

GLOO = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation to complete")


def message(monkeypatch, cause: Exception, pending: dict[str, str]) -> str:
    """Of the error for call "a", which ends with `cause`."""
    group = LearnerGroup.__new__(LearnerGroup)
    group.pending, group._places = dict(pending), [Process(1, "10.0.0.1", "a"), Process(2, "10.0.0.2", "b")]

    def get(ref, timeout):
        raise RayTaskError("apply", "Traceback: …", cause)

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(FlowGrpoError) as raised:
        group.reap("a")
    return str(raised.value)


def test_a_rank_that_waited_in_vain_names_the_one_that_did_not_answer(monkeypatch):
    said = message(monkeypatch, GLOO, {"a": "apply on learner rank 0", "b": "apply on learner rank 1",
                                       "c": "export on learner rank 1", "d": "export on learner rank 0"})
    assert said.startswith("apply on learner rank 0 failed: no answer from rank 1 on node 10.0.0.2 (Timed out waiting")
    assert "Traceback" not in said and "resumes from" in said
    assert "the ranks do not reach each other" in message(monkeypatch, GLOO, {"a": "apply on learner rank 0"})


def test_an_error_of_a_rank_s_own_is_not_taken_for_a_wait(monkeypatch):
    said = message(monkeypatch, RuntimeError("CUDA error"), {"a": "apply on learner rank 0", "b": "apply on learner rank 1"})
    assert said == "apply on learner rank 0 failed: RuntimeError: CUDA error"
