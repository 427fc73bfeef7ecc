"""Score centering (arXiv 2609.20807), which subtracts the mean score under the sampler from a policy
gradient.

The gradient ``A f s`` of a drawn token, s = dlog p, has the mean ``E_q[A] E_q[f s] + Cov_q(A, f s)``. The
term of ``ScoreCentering`` subtracts the first part, ``A E_q[f s]``, where q is ``alpha p_v`` outside of S.
These ids contribute ``alpha f(1 / alpha)`` times their sum of p_v s_v, which is ``(1 - P_S) dlog(1 - P_S)``.
Together they add ``(1 - Q_S) f(1 / alpha) dlog(1 - P_S)``, without unbounded coefficients alpha p_v that
would have to cancel. A row has coefficients of K + 1 ids and of the remaining mass, see ``selected``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.arguments.terms import Terms, check_values
from gspo_kernels.core import bits, checks
from gspo_kernels.core.exact import exact, exact_dtype, exact_sum
from gspo_kernels.core.layout import as_rows
from gspo_kernels.core.operators import operator
from gspo_kernels.core.torch_internals import constant_when_traced
from gspo_kernels.core.types import LogitTransform, RatioWeight, RowOptions, SelectedLogprobs
from gspo_kernels.distributed.groups import sum_
from gspo_kernels.logits.logprobs import check_rows
from gspo_kernels.logits.selected import checked_ids, first_places
from gspo_kernels.objectives import finite
from gspo_kernels.objectives.aggregation import Aggregation
from gspo_kernels.objectives.base import Objective, from_spec

NO_OPTIONS = RowOptions(LogitTransform(), bits.NO_ID, "")
"""Options of a call without logits."""


@dataclass(frozen=True, eq=False)
class ScoreCentering:
    """The sampler's probabilities for score centering, which subtracts the mean score from a policy gradient.

    Let q be the sampler's probabilities of the ids S of a token and p the policy's, Q_S and P_S their sums
    over S, and f the objective's weight of a token. The loss becomes, after arXiv 2609.20807,

        loss += agg(A (sum_{v in S} sg[q_v f(p_v / q_v)] log p_v + sg[(1 - Q_S) f(1 / alpha)] log(1 - P_S)))

    with the objective's aggregation and mask, without ``rollout_weights``. ``alpha = (1 - Q_S) / (1 - P_S)``
    distributes the remaining mass in proportion to p. ``docs/off_policy.md`` lists the objectives that have
    an f: 1, TIS and MIS are the paper's; PPO's clip has one for each sign of A, the ratio where the gradient
    passes and 0 elsewhere. Objectives without f, such as those with sequence ratios (GSPO), are not
    supported. Unless f is 1, ``old_logprobs`` must be the sampler's.

    Args:
        ids: the sampler's most likely ids, or all that it could have drawn, int64 or int32 [B, T, K], or
            [N, K] with ``cu_seqlens``; padded with -1 (or -100). Repeated ids count once. Tokens without ids
            are not centered.
        logprobs: the shape of ``ids``, in nats, at the sampler's temperature, normalized over all ids that it
            could have drawn; if these are not the whole vocabulary, pass ``kept_mask`` to the loss.
        weight: f, or a pair of f for A >= 0 and A < 0, which must equal the objective's; default: that.
    """

    ids: Tensor
    logprobs: Tensor
    weight: RatioWeight | tuple[RatioWeight, RatioWeight] | None = None


class CenteringRows(NamedTuple):
    """Inputs of score centering besides the policy's log-probs.

    Attributes:
        ids: int64 [B, T, K + 1], the label followed by distinct ids, padded with ``bits.NO_ID``.
        logprobs: the sampler's log-probs of these K ids, [B, T, K], in ``exact_dtype``; -inf for padding.
        factors: each token's advantage times d loss / d its value, [B, T] in ``exact_dtype``; zeros before
            ``weighted``.
    """

    ids: Tensor
    logprobs: Tensor
    factors: Tensor

    def at(self, where: slice | Tensor) -> CenteringRows:
        """Return some of the rows as [1, n]."""
        ids, logprobs, factors = (x.flatten(0, 1)[where].unsqueeze(0) for x in self)
        return CenteringRows(ids, logprobs, factors)

    def weighted(
        self, tokens: Tensor, terms: Terms, options: RowOptions = NO_OPTIONS, width: int = 0
    ) -> CenteringRows:
        """Return the rows with factors; see ``centering_factors``."""
        return self._replace(factors=centering_factors(tokens, terms, options, width))


def require_weight(objective: Objective) -> tuple[RatioWeight, RatioWeight]:
    """Return f of an objective for advantages A >= 0 and A < 0; raise an error if it has none."""
    name, weight = type(objective).__name__, objective.ratio_weight()
    if weight is not None:
        return (weight, weight) if isinstance(weight, RatioWeight) else weight
    why = "its weight of a token is not a function of p / p_old and the sign of the advantage"
    if objective.coefficient_scope not in ("nothing", "token"):
        why = f"its weight depends on the {objective.coefficient_scope}, so an id has no weight"
    raise ValueError(
        f"centering: {name} can't be centered: {why}; expected GPG (f = 1), CISPO (truncated ratios), "
        "ABCGRPO (masked ratios), GRPO, DAPO, DrGRPO or BNPO (clipped ratios), PrimeIPO without kl_tau, or "
        "an objective that declares its ratio_weight"
    )


def normalize(
    centering: Any,
    tokens: Tensor,
    terms: Terms,
    objective: Objective,
    options: RowOptions = NO_OPTIONS,
    width: int = 0,
) -> CenteringRows:
    """Check the caller's ``ScoreCentering`` and convert it to rows, without ``factors``.

    Args:
        centering: as the caller passed it.
        tokens: labels or, if the width is 0, log-probs, [B, T].
        terms: the validated terms.
        objective: the objective.
        options: the options of rows.
        width: the number of logit columns of this process, or 0 without logits.
    """
    if not isinstance(centering, ScoreCentering):
        raise TypeError(f"centering: got {type(centering).__name__}, expected a ScoreCentering or None")
    name, weights = type(objective).__name__, require_weight(objective)
    weight = weights[0] if weights[0] == weights[1] else weights
    if centering.weight not in (None, weight, weights):
        raise ValueError(f"centering: weight is {centering.weight}, expected {weight}, the weight of {name}")
    if terms.old_logprobs is None and any(each.low != each.high for each in weights):
        raise ValueError(
            f"old_logprobs: got None, expected the sampler's: centering needs {name}'s ratio to it"
        )
    if terms.token_weights is not None:
        raise ValueError("token_weights: got a tensor, expected None with centering")
    if width and (terms.entropy_coef is not None or "entropy" in objective.needs):
        raise ValueError("entropy_coef: expected 0 with centering, which has no gradient of the entropy")
    packed, device = terms.cu_seqlens is not None, tokens.device
    shape = tuple(tokens.shape[1:] if packed else tokens.shape)
    ids = checks.tensor("centering.ids", centering.ids, None, f"{(*shape, 'K')}", device, checks.INTEGERS)
    if tuple(ids.shape[:-1]) != shape or ids.shape[-1] == 0:
        raise ValueError(f"centering.ids: got shape {tuple(ids.shape)}, expected {(*shape, 'K')} with K >= 1")
    q = checks.floats("centering.logprobs", centering.logprobs, tuple(ids.shape), "the shape of ids", device)
    ids, q = as_rows(ids, packed), as_rows(q.detach(), packed)
    labels = tokens if width else torch.where(terms.counted(tokens), 0, bits.NO_ID)
    ids = checked_ids(ids, q, labels, width, options, packed, "centering.ids", "centering.logprobs")
    present, label = first_places(ids, None), torch.full_like(labels, bits.NO_ID)
    if width:
        label = labels.masked_fill(labels == options.ignore_index, bits.NO_ID)
    chosen = torch.cat([label.unsqueeze(-1), torch.where(present, ids, bits.NO_ID)], -1)
    return CenteringRows(chosen, torch.where(present, exact(q), -torch.inf), torch.zeros_like(labels))


@operator
def centering_factors(tokens: Tensor, terms: Terms, options: RowOptions, width: int) -> Tensor:
    """Check values, and return each token's advantage times d loss / d its value, [B, T] in ``exact_dtype``.

    ``tokens`` are labels of logits with ``width`` columns, or log-probs with a width of 0.
    """
    if width:
        check_rows(tokens, width, options)
    terms = check_values(tokens, terms)
    aggregation = Aggregation(tokens, terms)
    advantages = aggregation.zero_uncounted(terms.advantages)
    assert advantages is not None
    each = aggregation.layout.expand(advantages) if advantages.ndim == 1 else advantages
    return aggregation.token_shares() * each


@centering_factors.register_fake
def _(tokens: Tensor, *_: Any) -> Tensor:
    return tokens.new_empty(tokens.shape, dtype=exact_dtype(tokens.device))


@constant_when_traced
def _weights(objective: str) -> list[tuple[RatioWeight, RatioWeight]]:
    """Return f for A >= 0 and for A < 0, each of an id and of the mass that is left, where no id is large."""
    return [(f, f._replace(eps=math.inf)) for f in require_weight(from_spec(objective))]


def centering_loss(
    selected: tuple[Tensor, Tensor], centering: CenteringRows, objective: str, cp_group: str
) -> Tensor:
    """Return the loss term of score centering over the rows of all ranks, 0-d in ``exact_dtype``.

    It is differentiable. Log-probs without a coefficient may be NaN.

    Args:
        selected: log-probs of ``centering.ids`` [B, T, K + 1], and the log of the remaining mass, [B, T].
        centering: the rows, with factors.
        objective: the spec of an objective that has an f.
        cp_group: the process group whose ranks share sequences, or "".
    """
    label, ids = centering.ids[..., :1], centering.ids[..., 1:]
    logprobs, tail, present = exact(selected[0]), exact(selected[1]).unsqueeze(-1), ids != bits.NO_ID
    log_p = torch.where(present, logprobs[..., 1:], -torch.inf)
    # a label that is not among the ids belongs to the remaining mass
    outside = (label != bits.NO_ID) & ~(ids == label).any(-1, keepdim=True)
    of_label = torch.where(outside, logprobs[..., :1], -torch.inf)
    log_left_p = finite.logsumexp(torch.cat([tail, of_label], -1))
    with torch.no_grad():
        log_q, factors = centering.logprobs, centering.factors.unsqueeze(-1)
        log_left_q = torch.log(-torch.expm1(log_q.logsumexp(-1, keepdim=True).clamp(max=0.0)))
        nothing = (log_left_p == -torch.inf) | (log_left_q == -torch.inf) | ~present.any(-1, keepdim=True)

        def coefficients_of(weight: RatioWeight, weight_of_left: RatioWeight) -> Tensor:
            of_left = weight_of_left.times_q(log_left_p, log_left_q)
            return torch.cat([weight.times_q(log_p, log_q), torch.where(nothing, 0.0, of_left)], -1)

        positive, negative = _weights(objective)
        coefficients = coefficients_of(*positive)
        if positive != negative:
            coefficients = torch.where(factors < 0, coefficients_of(*negative), coefficients)
        coefficients = torch.where(factors != 0, factors * coefficients, 0.0)
    terms = torch.where(coefficients != 0, coefficients * torch.cat([log_p, log_left_p], -1), 0.0)
    total = exact_sum(terms.flatten())
    if not cp_group:
        return total
    return total + (sum_(cp_group, total.detach().clone()) - total.detach())


def normalize_given(
    centering: ScoreCentering | None, selected: Any, logprobs: Tensor, terms: Terms, objective: Objective
) -> tuple[tuple[Tensor, Tensor], CenteringRows]:
    """Return the first arguments of ``centering_loss`` from the caller's log-probs of the ids.

    ``logprobs`` [B, T] are those of the labels.
    """
    if centering is None:
        raise ValueError("selected_logprobs: got a tensor, expected None without centering")
    rows = normalize(centering, logprobs, terms, objective)
    if not isinstance(selected, SelectedLogprobs):
        name = type(selected).__name__
        raise TypeError(f"selected_logprobs: got {name}, expected the SelectedLogprobs of centering.ids")
    of_ids, tail = selected
    packed, shape, device = terms.cu_seqlens is not None, tuple(centering.ids.shape), logprobs.device
    checks.floats("selected_logprobs.logprobs", of_ids, shape, "the shape of centering.ids", device)
    if tail is None:
        tail = torch.full_like(of_ids[..., 0], -torch.inf)
    else:
        checks.floats("selected_logprobs.tail", tail, shape[:-1], "the tokens of centering.ids", device)
        if of_ids.requires_grad and not tail.requires_grad:
            raise ValueError(
                "selected_logprobs.tail: got a tensor without gradient, expected the tail returned by "
                "gk.selected_logprobs, or None if no other id could be drawn"
            )
    # the label's column is unused
    return (torch.nn.functional.pad(as_rows(of_ids, packed), (1, 0)), as_rows(tail, packed)), rows
