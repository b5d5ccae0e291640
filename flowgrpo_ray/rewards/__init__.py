"""Rewards: what an image is worth. `get(name, **options)` makes one; base.py holds the contract."""

from flowgrpo_ray.rewards.base import Option, Reward, RewardError, SelfTest, validated
from flowgrpo_ray.rewards.registry import get, known_rewards, option_problems, register, reward_class

__all__ = [
    "Option",
    "Reward",
    "RewardError",
    "SelfTest",
    "get",
    "known_rewards",
    "option_problems",
    "register",
    "reward_class",
    "validated",
]
