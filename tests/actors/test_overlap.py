"""What runs while what: the learner starts on scored groups while others are sampled, where advantages allow it."""

from __future__ import annotations

from pathlib import Path

import ordered
import pytest
from runs import run, small_config

pytestmark = pytest.mark.usefixtures("ray_cluster")


def before_learning(tmp_path: Path, name: str, **overrides) -> list[str]:
    """What had happened before the learner's first micro-step, in a run of one step of 4 groups of 2 shards each."""
    events = tmp_path / "events"
    events.mkdir()
    env = {"EVENTS": str(events)}
    own = {"pools.rollout.env": env, "pools.learner.env": env, "pools.reward.jpeg_compressibility.env": env}
    finished = run(small_config(tmp_path, name, steps=1, overrides={**own, **overrides}), rollout_class=ordered.Teller,
                   reward_class=ordered.TellingReward, learner_class=ordered.TellingLearner)
    assert finished.rows[0]["updates"] == 2 and finished.rows[0]["first_update_log_ratio_max"] == 0.0
    assert len(list(events.glob("sampled-*"))) == 8
    return (events / "before-learning").read_text().split()


def test_the_learner_starts_while_the_last_shard_is_still_being_sampled(tmp_path):
    """That shard waits for the learner's first micro-step: a learner that waited for it would wait for ever."""
    env = {"EVENTS": str(tmp_path / "events"), "LAST_WAITS_FOR": "learning"}
    before = before_learning(tmp_path, "group", **{"pools.rollout.env": env})
    assert {"sampled-0-0", "sampled-0-2"} <= set(before) and "sampled-3-2" not in before


@pytest.mark.slow
def test_global_advantages_wait_for_every_score(tmp_path):
    before = before_learning(tmp_path, "global", **{"advantage.std": "global"})
    assert len([name for name in before if name.startswith("sampled")]) == 8
    assert sum(int(name.split("-")[1]) for name in before if name.startswith("scored")) == 16
