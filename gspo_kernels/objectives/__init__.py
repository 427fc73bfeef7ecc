"""The objectives: one small file each. ``__all__`` is the registry that everything iterates."""

from gspo_kernels.objectives.grpo import GRPO
from gspo_kernels.objectives.gspo import GSPO
from gspo_kernels.objectives.gspo_token import GSPOToken
from gspo_kernels.objectives.linear import Linear

__all__ = ["GRPO", "GSPO", "GSPOToken", "Linear"]
