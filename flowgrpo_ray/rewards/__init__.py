"""Rewards: what an image is worth. `get(name, **options)` makes one; base.py holds the contract."""

from flowgrpo_ray.rewards.base import (
    Option,
    Reward,
    RewardError,
    get,
    known_rewards,
    option_problems,
    register,
    reward_class,
    validated,
)

__all__ = [
    "Option",
    "Reward",
    "RewardError",
    "get",
    "known_rewards",
    "option_problems",
    "register",
    "reward_class",
    "validated",
]
