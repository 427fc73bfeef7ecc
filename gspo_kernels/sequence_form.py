"""Policy steps that are a clipped sequence ratio and nothing else: one launch of the backend serves them.

``policy.evaluate`` says the same of every objective, in a few hundred small operations.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from gspo_kernels.layout import layout_of
from gspo_kernels.objectives.base import Objective
from gspo_kernels.ops.backends import SequenceRatioBackend, load
from gspo_kernels.ops.sequence_ratio import has_single_launch
from gspo_kernels.policy import PolicyTerms, outer_total
from gspo_kernels.types import ClippedSequenceRatio


def sequence_form(objective: Objective, terms: PolicyTerms, backend: str) -> ClippedSequenceRatio | None:
    """The form in which ``backend`` can serve a step of the objective; None where a term goes beyond it."""
    beyond = (terms.ref_logprobs, terms.token_weights, terms.kl_beta, terms.entropy_coef, terms.token_shares)
    if any(term is not None for term in beyond) or not has_single_launch(backend):
        return None
    return objective.sequence_ratio_form()


class SequenceOperands(NamedTuple):
    """What the backend takes besides log-probs and mask, in its order."""

    old_logprobs: Tensor | None
    advantages: Tensor
    sequence_weights: Tensor | None
    lengths: Tensor | None
    normalizer: Tensor | None
    cu_seqlens: Tensor | None


def sequence_operands(tokens: Tensor, terms: PolicyTerms) -> SequenceOperands:
    """The terms as operands; ``tokens`` gives shape and device, ``terms.loss_mask`` what counts."""
    weights, normalizer = terms.rollout_weights, terms.normalizer
    assert terms.loss_mask is not None and terms.advantages is not None
    if weights is not None and weights.ndim == 2:
        layout, counted = layout_of(tokens, terms.cu_seqlens), terms.loss_mask != 0
        counts = layout.sum(counted.to(torch.float64)).clamp(min=1)
        weights = layout.sum(torch.where(counted, weights.double(), 0.0)) / counts
    if terms.skipped is not None:
        # they have no log-probs, but they are in the divisor
        normalizer = outer_total(tokens, terms.loss_mask != 0, terms)
    if normalizer is not None:
        normalizer = normalizer.to(tokens.device)
    return SequenceOperands(
        terms.old_logprobs, terms.advantages, weights, terms.lengths, normalizer, terms.cu_seqlens
    )


def present(terms: PolicyTerms) -> Tensor:
    """Tokens that have a log-prob and count."""
    assert terms.loss_mask is not None
    mask = terms.loss_mask != 0
    if terms.skipped is None:
        return mask
    return mask & ~layout_of(mask, terms.cu_seqlens).expand(terms.skipped)


def sequence_gradient(
    logprobs: Tensor, terms: PolicyTerms, form: ClippedSequenceRatio, backend: str
) -> Tensor:
    """dLoss/dlogprobs of all tokens, flat; only inside an operator."""
    mask = present(terms)
    step = cast(SequenceRatioBackend, load(backend)).sequence_ratio_step(
        logprobs, mask, form=form, **sequence_operands(logprobs, terms)._asdict()
    )
    coefficients = layout_of(logprobs, terms.cu_seqlens).expand(step.coefficients / step.divisor)
    return torch.where(mask, coefficients, 0.0).flatten()
