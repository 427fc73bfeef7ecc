"""Reward functions: finding them, calling them within time limits, and what their values become."""

from gspo_kernels.trainer.rewards.comparing import ADVANTAGES, advantages_of
from gspo_kernels.trainer.rewards.loading import RewardFunction
from gspo_kernels.trainer.rewards.process import ProcessReward
from gspo_kernels.trainer.rewards.reward_set import Rewards, RewardSet, load_reward

__all__ = [
    "ADVANTAGES",
    "ProcessReward",
    "RewardFunction",
    "RewardSet",
    "Rewards",
    "advantages_of",
    "load_reward",
]
