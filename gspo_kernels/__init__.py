"""Fused losses for sequence-level policy optimization: Triton kernels on the GPU, C++ kernels on the CPU."""

from importlib.metadata import PackageNotFoundError, version

from gspo_kernels import advantages, objectives
from gspo_kernels.aggregation import normalizer
from gspo_kernels.distillation import distillation_loss, fused_linear_distillation_loss
from gspo_kernels.invariance import is_batch_invariant, set_batch_invariant
from gspo_kernels.logprobs import linear_token_logprobs, token_logprobs
from gspo_kernels.losses import (
    explain_schedule,
    fused_linear_policy_loss,
    fused_policy_loss,
    policy_coefficients,
    policy_loss,
)
from gspo_kernels.objectives import *  # noqa: F403 - one export line per objective, in its own package
from gspo_kernels.off_policy import off_policy_mask, rollout_weights
from gspo_kernels.sampling import sampling_mask
from gspo_kernels.selected import linear_selected_logprobs, selected_logprobs
from gspo_kernels.types import DistillationOutput, LossOutput, SelectedLogprobs, TokenLogprobs

try:
    __version__ = version("gspo_kernels")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = [
    "DistillationOutput",
    "LossOutput",
    "SelectedLogprobs",
    "TokenLogprobs",
    "advantages",
    "distillation_loss",
    "explain_schedule",
    "fused_linear_distillation_loss",
    "fused_linear_policy_loss",
    "fused_policy_loss",
    "is_batch_invariant",
    "linear_selected_logprobs",
    "linear_token_logprobs",
    "normalizer",
    "objectives",
    "off_policy_mask",
    "policy_coefficients",
    "policy_loss",
    "rollout_weights",
    "sampling_mask",
    "selected_logprobs",
    "set_batch_invariant",
    "token_logprobs",
]
__all__ += objectives.__all__
