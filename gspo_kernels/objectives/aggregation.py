"""Aggregation of values per token and sequence to one loss: the outer divisor, and each value's share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gspo_kernels.arguments.terms import Terms, check_values, normalize_terms
from gspo_kernels.core import checks
from gspo_kernels.core.exact import exact, exact_dtype
from gspo_kernels.core.layout import as_rows, runs
from gspo_kernels.core.operators import operator
from gspo_kernels.distributed.groups import Parallel, group_name, rank_and_size, sum_
from gspo_kernels.distributed.validate import agree_across_ranks
from gspo_kernels.objectives.base import Objective, from_spec

if TYPE_CHECKING:  # not in every build of PyTorch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def zero_uncounted(values: Tensor | None, mask: Tensor) -> Tensor | None:
    """Return the values in fp64 with zeros outside the mask, where they may be NaN."""
    return None if values is None else torch.where(mask, exact(values), 0.0)


class Aggregation:
    """Counts and weights that aggregate per-token and per-sequence values of a call to one loss.

    Attributes:
        layout: the layout of the tokens, with sums over all ranks of ``cp_group``.
        mask: the tokens that count, bool in the shape of the tokens.
        nonempty: sequences with a counted token, bool [B].
        lengths: |y_i|, or 1 for empty sequences, fp64 [B].
        count: the count of the outer divisor, or the normalizer, fp64: 0-d, or [B] for a normalizer of
            "prompt_mean".
        prompt_tokens: the sum of ``lengths`` over each sequence's group, or 1 for groups without a counted
            token, fp64 [B]; only for "prompt_mean" without a normalizer.
        total: ``count``, or 1.0 where that is 0; for "prompt_mean" [B], times ``prompt_tokens``.
        divisor: ``total`` times the constant of the objective's aggregation.
    """

    def __init__(self, tokens: Tensor, terms: Terms):
        """Compute the counts for the shape and device of ``tokens``."""
        objective = from_spec(terms.objective)
        layout, mask = terms.layout(tokens), terms.counted(tokens)
        if terms.cp_group:
            from gspo_kernels.distributed.sequences import AcrossRanks

            layout = AcrossRanks(layout, terms.cp_group)
        self.layout, self.mask = layout, mask
        counts = layout.sum(exact(mask))
        self.nonempty = counts > 0
        lengths = counts if terms.lengths is None else exact(terms.lengths)
        self.lengths = torch.where(self.nonempty, lengths, 1.0)
        self._per_sequence = objective.aggregation == "sequence_mean"
        self.prompt_tokens: Tensor | None = None
        what, scale = objective.outer_divisor()
        if terms.normalizer is not None:
            divisor = terms.normalizer.to(mask.device, exact_dtype(mask.device))
        elif what == "tokens":
            divisor = torch.where(self.nonempty, lengths, 0.0).sum()
        elif what == "sequences":
            divisor = exact(self.nonempty.sum())
        elif what == "pairs":
            advantages = self.zero_uncounted(terms.advantages)
            assert advantages is not None and terms.group_ids is not None
            divisor = objective.count_pairs(advantages, terms.group_ids, self.nonempty)
        elif what == "prompts" and terms.group_ids is not None:
            order = terms.group_ids.argsort(stable=True)
            prompts = runs(terms.group_ids[order])
            divisor = exact((prompts.sum(exact(self.nonempty)[order]) > 0).sum())
            tokens_of = prompts.sum(torch.where(self.nonempty, lengths, 0.0)[order])
            each = prompts.expand(torch.where(tokens_of == 0, 1.0, tokens_of)).squeeze(0)
            self.prompt_tokens = torch.empty_like(each).scatter(0, order, each)
        else:
            divisor = torch.ones((), dtype=exact_dtype(mask.device), device=mask.device)
        self.count: Tensor = divisor
        self.total = torch.where(divisor == 0, 1.0, divisor)
        if self.prompt_tokens is not None:
            self.total = self.total * self.prompt_tokens
        self.divisor = self.total * scale

    def zero_uncounted(self, values: Tensor | None) -> Tensor | None:
        """Return values [B] or of tokens in fp64, with zeros for those that don't count."""
        if values is None:
            return None
        return zero_uncounted(values, self.mask if values.ndim == self.mask.ndim else self.nonempty)

    def token_shares(self) -> Tensor:
        """Return d loss / d value of each counted token, 0 for other tokens."""
        divisor = self.layout.expand(self.divisor) if self.divisor.ndim else self.divisor
        share = torch.where(self.mask, 1.0 / divisor, 0.0)
        return share / self.layout.expand(self.lengths) if self._per_sequence else share

    def sequence_shares(self) -> Tensor:
        """Return d loss / d value of each sequence with a counted token, 0 for other sequences; [B]."""
        share = torch.where(self.nonempty, 1.0 / self.divisor, 0.0)
        return share if self._per_sequence else share * self.lengths


@operator
def token_shares(tokens: Tensor, terms: Terms) -> Tensor:
    """Check values, then return d loss / d value of each token times its ``token_weights``, [B, T] fp64."""
    terms = check_values(tokens, terms)
    aggregation = Aggregation(tokens, terms)
    weights = aggregation.zero_uncounted(terms.token_weights)
    shares = aggregation.token_shares()
    return shares if weights is None else shares * weights


@token_shares.register_fake
def _(tokens: Tensor, terms: Terms) -> Tensor:
    return tokens.new_empty(tokens.shape, dtype=exact_dtype(tokens.device))


@agree_across_ranks
def normalizer(
    objective: Objective,
    loss_mask: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    lengths: Tensor | None = None,
    advantages: Tensor | None = None,
    group_ids: Tensor | None = None,
    group: ProcessGroup | DeviceMesh | None = None,
    parallel: Parallel = Parallel(),
) -> Tensor:
    """Return the divisor of a batch, to pass as ``normalizer=`` with every micro-batch.

    Call this once on the whole batch. With the result as ``normalizer=``, losses and gradients of any
    micro-batches add up to those of the whole batch.

    Args:
        objective: the objective, whose ``aggregation`` determines whether sequences, tokens, prompts or pairs
            are counted.
        loss_mask: [B, T], or [N] with ``cu_seqlens``; bool or 0/1, the tokens that count.
        cu_seqlens: int32 or int64 [B + 1], offsets of packed sequences; on the mask's device or the CPU.
        lengths: [B], |y_i| if it is not the number of counted tokens; only for objectives that count tokens
            or prompts.
        advantages: [B]; only for objectives that count pairs.
        group_ids: [B], integers; only for objectives that count prompts or pairs. Equal ids on different
            ranks are different groups.
        group: ProcessGroup or DeviceMesh of one dimension of the data-parallel ranks, each with a part of the
            batch. The result is the sum of their counts divided by the number of ranks, because DDP and FSDP
            average gradients.
        parallel: ``Parallel(cp_group=...)`` if ranks have parts of the same sequences; these count as one
            sequence, and the result is the same on all ranks.

    Returns:
        The count on the mask's device, 0-d fp64, or 1.0 if all ranks count 0. For "prompt_mean" [B], the
        count times the number of tokens of each sequence's group; pass the values of its sequences with each
        micro-batch, which need not contain whole groups.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        RanksDisagreeError: with GSPO_KERNELS_VALIDATE=1, another rank raised an error, or was called with
            different arguments; see ``docs/parallel.md``.
    """
    passed = Terms(
        loss_mask=loss_mask,
        cu_seqlens=cu_seqlens,
        lengths=lengths,
        advantages=advantages,
        group_ids=group_ids,
    )
    Parallel.check(parallel, "normalizer", ("cp_group",), batch_invariant=False)
    name = "" if group is None else group_name("group", group)
    checks.objective(objective, Objective)
    mask = checks.tensor("loss_mask", loss_mask, None, "[B, T], or [N] with cu_seqlens", None)
    checks.layout("loss_mask", mask, cu_seqlens)
    kind, (divisor, _) = type(objective).__name__, objective.outer_divisor()
    for label, value, users in (
        ("advantages", advantages, ("pairs",)),
        ("group_ids", group_ids, ("pairs", "prompts")),
        ("lengths", lengths, ("tokens", "prompts")),
    ):
        if divisor in users and value is None and label != "lengths":
            raise ValueError(f"{label}: got None, but {kind} counts {divisor} and needs it")
        if divisor not in users and value is not None:
            raise ValueError(f"{label}: got a tensor, expected None: {kind}'s divisor ignores it")
    rows = as_rows(mask, cu_seqlens is not None)
    terms, _ = normalize_terms(passed, mask, objective, parallel)
    aggregation = Aggregation(rows, check_values(rows, terms))
    count = aggregation.count
    if group is not None:
        _, size = rank_and_size(name)
        if divisor == "one":
            return count / size
        count = sum_(name, count.clone()) / size
    count = torch.where(count == 0, 1.0, count)
    return count if aggregation.prompt_tokens is None else count * aggregation.prompt_tokens
