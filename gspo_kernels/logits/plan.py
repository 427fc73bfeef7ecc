"""What a loss decides once, at its start, for everything that works on the call."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels.arguments.terms import Terms
from gspo_kernels.backends.dispatch import load
from gspo_kernels.core.torch_internals import constant_when_traced
from gspo_kernels.core.types import NO_RATIO, RatioClip
from gspo_kernels.objectives.base import Objective, from_spec


class RequiresGrad(NamedTuple):
    """Which inputs of a call over hidden states get a gradient; all are False for log-probs and logits."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False

    def select(self, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, weight and bias, with None for those that are not needed."""
        return tuple(grad if needed else None for grad, needed in zip(gradients, self, strict=True))


class Plan(NamedTuple):
    """The decisions of a call, made once, from ``coefficients_depend_on`` and ``ratio_clip_of`` of its terms.

    A plan holds only strings, numbers and flags, so that operators take it as it is.

    Attributes:
        backend: the name of a backend that serves the tensors' device.
        depends_on: what dLoss/dlogprob of one token depends on besides masks, lengths, weights and
            advantages: "nothing" (the coefficient is known beforehand), "token", "turn", "sequence", "group"
            or "batch".
        ratio_clip: the clipped ratio that the backend evaluates in one launch; with ``NO_RATIO`` PyTorch
            evaluates the objective instead.
        requires_grad: which of hidden states, weight and bias get a gradient.
        leaves_out: whether rows without a gradient stay out of gradient products.
        entropy: whether the entropy is computed, too.
        schedule: the schedule of a call over hidden states: a name of ``hidden.schedule.SCHEDULES``, or
            "auto": groups that fit in a chunk are "aligned", longer ones "deferred" or else "two_pass".
        defers: from how many rows on "auto" defers a group that doesn't fit in a chunk; 0: never.
    """

    backend: str
    depends_on: str
    ratio_clip: RatioClip = NO_RATIO
    requires_grad: RequiresGrad = RequiresGrad()
    leaves_out: bool = False
    entropy: bool = False
    schedule: str = ""
    defers: int = 0


def coefficients_depend_on(objective: Objective, terms: Terms) -> str:
    """Return what a token's coefficient depends on in a call; see ``Plan.depends_on``."""
    scope = objective.coefficient_scope
    if terms.kl_beta is not None and terms.kl_ratio_weighted and scope != "token":
        return scope
    on_policy = terms.old_logprobs is None and objective.ratio_only
    if on_policy or scope == "nothing":
        has_token_terms = terms.kl_beta is not None or terms.entropy_coef is not None
        return "token" if has_token_terms else "nothing"
    return scope


def ratio_clip_of(terms: Terms, backend: str) -> RatioClip:
    """Return the clipped ratio with which ``backend`` evaluates these terms in one launch, or ``NO_RATIO``.

    A call decides this once for its terms. A schedule that evaluates other terms (for known coefficients, or
    of a chunk) calls this again for them.
    """
    plain = terms.token_weights is None and terms.entropy_coef is None and terms.token_shares is None
    weighted_kl = terms.kl_beta is not None and terms.kl_ratio_weighted
    if weighted_kl or terms.cp_group or not plain:
        return NO_RATIO
    # the compiler would ignore the cache, and warn
    declared = _declared_ratio if torch.compiler.is_compiling() else _cached_ratio
    return declared(terms.objective, backend)


@constant_when_traced
def _declared_ratio(objective: str, backend: str) -> RatioClip:
    """Return the objective's clipped ratio if the backend is a ``RatioBackend``, otherwise ``NO_RATIO``."""
    served = hasattr(load(backend), "sequence_ratio_forward")
    return (from_spec(objective).ratio_form() if served else None) or NO_RATIO


_cached_ratio = functools.lru_cache(maxsize=1024)(_declared_ratio)
