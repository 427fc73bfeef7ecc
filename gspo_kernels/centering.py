"""Score centering (arXiv 2609.20807): a policy gradient without the mean of its score under the sampler.

The gradient ``A f s`` of a drawn token, s = dlog p, has the mean ``E_q[A] E_q[f s] + Cov_q(A, f s)``. The
first part is what the term of ``ScoreCentering`` takes away: its gradient is ``A E_q[f s]``, as the ids that
are not in H add alpha f(1 / alpha) times their sum of p_v s_v, which is minus the sum over H. A row then has
coefficients of K + 1 ids, see ``ops.selected``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels import bits, checks
from gspo_kernels.aggregation import Aggregation
from gspo_kernels.exact import exact, exact_dtype, exact_sum
from gspo_kernels.layout import as_rows
from gspo_kernels.objectives.base import Objective
from gspo_kernels.ops.library import operator
from gspo_kernels.ops.logprobs import check_rows
from gspo_kernels.ops.selected import checked_ids, first_places
from gspo_kernels.parallel.groups import sum_
from gspo_kernels.terms import Terms, check_values
from gspo_kernels.types import LogitTransform, RatioWeight, RowOptions, SelectedLogprobs

NO_OPTIONS = RowOptions(LogitTransform(), bits.NO_ID, "")
"""In the place of options where there are no logits."""


@dataclass(frozen=True, eq=False)
class ScoreCentering:
    """The sampler's probabilities, to take the mean of the score under the sampler out of a policy gradient.

    With q the sampler's probabilities of the ids H of a token, p the policy's, and f the weight that the
    objective gives a token, the loss becomes, after arXiv 2609.20807,

        loss += agg(A sum_{v in H} sg[q_v f(p_v / q_v) - alpha f(1 / alpha) p_v] log p_v)

    with the objective's aggregation and mask, but no ``rollout_weights``. ``alpha = (1 - Q_H) / (1 - P_H)``:
    the other ids count in the proportions of p; 0 where there are none. ``docs/off_policy.md`` says which
    objectives have such an f: 1, TIS and MIS are the paper's. Others are refused, as a ratio of a sequence
    (GSPO) gives an id no weight. Unless f is 1, ``old_logprobs`` must be the sampler's.

    Args:
        ids: [B, T, K], or [N, K] with ``cu_seqlens``; int64 or int32: the sampler's most likely ids, or all
            that it could have drawn; -1 (or -100) where a token has fewer. A repeated id counts once. A token
            without ids is not centred.
        logprobs: the shape of ``ids``, nats, at the sampler's temperature, over all that it could have drawn;
            pass the loss a ``kept_mask`` where that is not the vocabulary.
        weight: f; another one than the objective's is refused. None: the objective's.
    """

    ids: Tensor
    logprobs: Tensor
    weight: RatioWeight | None = None


class CenteringRows(NamedTuple):
    """What centering needs of rows besides their log-probs.

    Attributes:
        ids: int64 [B, T, K + 1]: the label, then the different ids; ``bits.NO_ID`` where there is none.
        logprobs: the sampler's log-probs of these K ids, [B, T, K], in ``exact_dtype``; -inf without an id.
        factors: [B, T]: each token's advantage times d loss / d its value, in ``exact_dtype``; zeros before
            ``weighted``.
        weight: f.
    """

    ids: Tensor
    logprobs: Tensor
    factors: Tensor
    weight: RatioWeight

    def at(self, where: slice | Tensor) -> CenteringRows:
        """Return some of the rows as [1, n]."""
        ids, logprobs, factors = (x.flatten(0, 1)[where].unsqueeze(0) for x in self[:3])
        return CenteringRows(ids, logprobs, factors, self.weight)

    def weighted(
        self, tokens: Tensor, terms: Terms, options: RowOptions = NO_OPTIONS, width: int = 0
    ) -> CenteringRows:
        """Return the rows with factors; see ``centering_factors``."""
        return self._replace(factors=centering_factors(tokens, terms, options, width))


def require_weight(objective: Objective) -> RatioWeight:
    """Return f of an objective; refuse those that can't be centred."""
    name, weight = type(objective).__name__, objective.ratio_weight()
    if weight is not None:
        return weight
    why = "its weight of a token is no function f(p / p_old) that is the same for every advantage"
    if objective.coefficient_scope not in ("nothing", "token"):
        why = f"its weight depends on the {objective.coefficient_scope}, so an id has none of its own"
    raise ValueError(
        f"centering: {name} can't be centred: {why}; expected GPG (f = 1), CISPO (truncated ratios), ABCGRPO "
        "with the same bounds for both signs (masked ratios), PrimeIPO without kl_tau, or an objective that "
        "declares its ratio_weight"
    )


def normalize(
    centering: Any,
    tokens: Tensor,
    terms: Terms,
    objective: Objective,
    options: RowOptions = NO_OPTIONS,
    width: int = 0,
) -> CenteringRows:
    """Check what is to be centred on this rank, and bring it into rows, without ``factors``.

    Args:
        centering: as the caller passed it.
        tokens: [B, T], labels or, where the width is 0, log-probs.
        terms: validated.
        objective: the loss.
        options: how logits become log-probs.
        width: how many columns of logits this process has; 0: there are none.
    """
    if not isinstance(centering, ScoreCentering):
        raise TypeError(f"centering: got {type(centering).__name__}, expected a ScoreCentering or None")
    name, weight = type(objective).__name__, require_weight(objective)
    if centering.weight not in (None, weight):
        raise ValueError(f"centering: weight is {centering.weight}, expected {weight}, the weight of {name}")
    if terms.old_logprobs is None and weight.low != weight.high:
        raise ValueError(
            f"old_logprobs: got None, expected the sampler's: centering needs {name}'s ratio to it"
        )
    if terms.token_weights is not None:
        raise ValueError("token_weights: got a tensor, expected None with centering")
    if width and (terms.entropy_coef is not None or "entropy" in objective.needs):
        raise ValueError("entropy_coef: the pass that serves centering gives the entropy no gradient")
    packed, device = terms.cu_seqlens is not None, tokens.device
    shape = tuple(tokens.shape[1:] if packed else tokens.shape)
    ids = checks.tensor("centering.ids", centering.ids, None, f"{(*shape, 'K')}", device, checks.INTEGERS)
    if tuple(ids.shape[:-1]) != shape or ids.shape[-1] == 0:
        raise ValueError(f"centering.ids: got shape {tuple(ids.shape)}, expected {(*shape, 'K')} with K >= 1")
    q = checks.floats("centering.logprobs", centering.logprobs, tuple(ids.shape), "the shape of ids", device)
    ids, q = (as_rows(each, packed) for each in (torch.where(ids == -1, bits.NO_ID, ids), q.detach()))
    labels = tokens if width else torch.where(terms.counted(tokens), 0, bits.NO_ID)
    try:
        ids = checked_ids(ids, q, labels, width, options, packed)
    except ValueError as error:
        raise ValueError(f"centering.{str(error).removeprefix('teacher_')}") from None
    left_out = labels == options.ignore_index
    present = first_places(ids, None) & ~left_out.unsqueeze(-1)
    label = labels.masked_fill(left_out, bits.NO_ID) if width else torch.full_like(labels, bits.NO_ID)
    chosen = torch.cat([label.unsqueeze(-1), torch.where(present, ids, bits.NO_ID)], -1)
    return CenteringRows(chosen, torch.where(present, exact(q), -torch.inf), torch.zeros_like(labels), weight)


@operator
def centering_factors(tokens: Tensor, terms: Terms, options: RowOptions, width: int) -> Tensor:
    """Check values, and return each token's advantage times d loss / d its value, [B, T] in ``exact_dtype``.

    ``tokens`` are labels of logits with ``width`` columns, or log-probs with a width of 0.
    """
    terms = check_values(tokens, terms)
    if width:
        check_rows(tokens, width, options)
    aggregation = Aggregation(tokens, terms)
    advantages = aggregation.selected(terms.advantages)
    assert advantages is not None
    each = aggregation.layout.expand(advantages) if advantages.ndim == 1 else advantages
    return aggregation.token_shares() * each


@centering_factors.register_fake
def _(tokens: Tensor, *_: Any) -> Tensor:
    return tokens.new_empty(tokens.shape, dtype=exact_dtype(tokens.device))


@torch.no_grad()
def coefficients_of(logprobs: Tensor, tail: Tensor, centering: CenteringRows) -> Tensor:
    """Return d loss / d log p of the K ids of each row, [B, T, K] in ``exact_dtype``.

    Args:
        logprobs: [B, T, K + 1]: of ``centering.ids``.
        tail: [B, T], the log of the probability that these ids leave.
        centering: the rows, with factors.
    """
    label, ids, log_q = centering.ids[..., :1], centering.ids[..., 1:], centering.logprobs
    weight, present, logprobs = centering.weight, ids != bits.NO_ID, exact(logprobs)
    log_p = torch.where(present, logprobs[..., 1:], -torch.inf)
    # a label beside the ids is one of those that they leave
    beside = (label != bits.NO_ID) & ~(ids == label).any(-1, keepdim=True)
    of_label = torch.where(beside, logprobs[..., :1], -torch.inf)
    log_rest_p = torch.logaddexp(exact(tail).unsqueeze(-1), of_label)
    log_rest_q = torch.log(-torch.expm1(log_q.logsumexp(-1, keepdim=True).clamp(max=0.0)))
    of_rest = weight._replace(eps=math.inf).times_q(torch.zeros_like(log_rest_p), log_rest_q - log_rest_p)
    nothing = (log_rest_p == -torch.inf) | (log_rest_q == -torch.inf)
    c = weight.times_q(log_p, log_q) - torch.where(nothing, 0.0, of_rest) * log_p.exp()
    factors = centering.factors.unsqueeze(-1)
    return torch.where(present & (factors != 0), factors * c, 0.0)


def sum_of(logprobs: Tensor, coefficients: Tensor, cp_group: str) -> Tensor:
    """Return ``sum(coefficients * logprobs)`` over the rows of all ranks, 0-d in ``exact_dtype``;
    differentiable. Log-probs without a coefficient may be anything.
    """
    total = exact_sum(torch.where(coefficients != 0, coefficients * exact(logprobs), 0.0).flatten())
    if not cp_group:
        return total
    return total + (sum_(cp_group, total.detach().clone()) - total.detach())


def centering_loss(scored: tuple[Tensor, Tensor], centering: CenteringRows, cp_group: str) -> Tensor:
    """Return what centering adds to the loss, from the first arguments of ``coefficients_of``."""
    coefficients = coefficients_of(*scored, centering)
    return sum_of(scored[0][..., 1:], coefficients, cp_group)


def normalize_given(
    centering: ScoreCentering | None, selected: Any, logprobs: Tensor, terms: Terms, objective: Objective
) -> tuple[tuple[Tensor, Tensor], CenteringRows]:
    """Return the first arguments of ``centering_loss`` where the caller has the log-probs of the ids.

    ``logprobs`` are the labels', [B, T].
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
    tail = torch.full_like(of_ids[..., 0], -torch.inf) if tail is None else tail
    checks.floats("selected_logprobs.tail", tail, shape[:-1], "the tokens of centering.ids", device)
    # in the place of the label, which is no id here, anything
    return (torch.nn.functional.pad(as_rows(of_ids, packed), (1, 0)), as_rows(tail.detach(), packed)), rows
