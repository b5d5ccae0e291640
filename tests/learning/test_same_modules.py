"""Sampler and learner on one transformer, taking turns: what sampling leaves in the modules must not reach the gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
from reference import JPEG, RECORDS, RUN_ID, configuration, run_update
from tiny_pipelines import build

from flowgrpo_ray.config import Config
from flowgrpo_ray.data.plan import plan_step
from flowgrpo_ray.learning.learner import Learner
from flowgrpo_ray.policies import lora
from flowgrpo_ray.policies.base import Policy
from flowgrpo_ray.policies.slots import AdapterSlots
from flowgrpo_ray.rewards import get
from flowgrpo_ray.sampling.sampler import Sampler

SIZE = {"height": 32, "width": 48, "num_steps": 3, "group_size": 2, "groups_per_step": 2, "micro_batch": 2}
KL = {"beta": 0.01}
CASES: dict[str, dict[str, Any]] = {
    "sd3_t5": {"sampling": SIZE, "model": {"max_sequence_length": 8}, "loss": KL},
    "sd3_cfg": {"sampling": {**SIZE, "guidance_scale": 3.0}, "data": {"negative_prompt": "a bad 1"},
                "model": {"max_sequence_length": 8, "use_t5": False}, "loss": KL},
    "flux_dev": {"sampling": {**SIZE, "guidance_scale": 3.5}, "model": {"max_sequence_length": 8}, "loss": KL},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pipelines")
    built = {kind: str(build(kind, folder / kind)) for kind in ("sd3_t5", "flux_dev")}
    return {case: built.get(case, built["sd3_t5"]) for case in CASES}


def start(config: Config, parts: str = "all") -> Policy:
    policy, _ = reference.load(config, parts)
    lora.write_state(policy, reference.perturbed(policy))
    return policy


def sample(policy: Policy, config: Config, plan: Any) -> reference.StepData:
    slots = AdapterSlots(policy)
    slots.adopt("policy", plan.version)
    return reference.sample_step(config, plan, Sampler(policy, config, slots), {JPEG: get(JPEG)})


@pytest.mark.parametrize("case", CASES)
def test_a_policy_that_has_sampled_trains_as_one_that_never_did(case, folders):
    sections = CASES[case]
    config = configuration(**{**sections, "model": {"use_t5": True, **sections["model"], "path": folders[case]}})
    policy = start(config)
    learners = [Learner(start(config, "learner"), config, run_id=RUN_ID)]
    for step in (0, 1):
        plan = plan_step(config, RECORDS, step)
        data = sample(policy, config, plan)
        if step == 0:
            learners.append(Learner(policy, config, run_id=RUN_ID))
        (metrics, alone), (_, together) = [run_update(learner, plan, data) for learner in learners]
        assert metrics["first_update_log_ratio_max"] == 0.0 and metrics["updates"] == step + 1
        assert same(alone, together)
        assert all(np.isfinite(value).all() for value in together.values())
        assert sum(value.any() for value in together.values()) > len(together) / 2
    assert same(learners[0].adapter(), learners[1].adapter())


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(one[key].tobytes() == other[key].tobytes() for key in one)
