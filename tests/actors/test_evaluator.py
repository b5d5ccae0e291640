"""What an evaluation takes over from the configuration of a run, and what its row counts."""

import numpy as np
import pytest

from actors.evaluation import Evaluation
from actors.evaluator import evaluation_config
from actors.scoring import ShardScores
from flowgrpo_ray.config import load
from flowgrpo_ray.data.plan import EvalMicroBatch
from flowgrpo_ray.errors import ConfigError

GROUPS = {"python": "own_rewards:rank_in_group"}


def config_of(rewards):
    return load(None, {"rewards": rewards, "data.eval_prompts": "builtin:tiny/heldout.txt",
                       "pools.reward": {name: {"num_cpus": 0.5} for name in rewards}})


def test_rewards_of_whole_groups_take_no_part_and_have_no_actors():
    config = evaluation_config(config_of({"rank": GROUPS, "jpeg_compressibility": {}}), None)
    assert list(config.rewards) == list(config.pools.reward) == ["jpeg_compressibility"]


def test_an_evaluation_needs_a_reward_of_images():
    with pytest.raises(ConfigError, match="rewards: rank score whole groups; an evaluation needs a reward that scores images"):
        evaluation_config(config_of({"rank": GROUPS}), None)


def evaluated(scores: ShardScores) -> dict[str, float]:
    return Evaluation("policy", [EvalMicroBatch(0, ((0, 0), (1, 0)), 0, 32, 64, None)], {0: scores}).row()


def test_images_without_a_score_are_counted_also_where_none_has_one():
    nan, none = np.full(2, np.nan), np.zeros(2, dtype=bool)
    assert evaluated(ShardScores({"ocr": nan}, none, none)) == {"eval_images/policy": 0, "eval_masked/policy": 2}
    assert evaluated(ShardScores({}, ~none, none)) == {"eval_images/policy": 0}, "nobody was asked"
