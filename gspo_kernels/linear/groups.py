"""The rows of a call by group (sequences that determine each other's coefficients), and their terms."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.aggregation import Aggregation
from gspo_kernels.exact import exact, exact_dtype
from gspo_kernels.layout import Padded
from gspo_kernels.linear.call import Call
from gspo_kernels.linear.chunk import as_index
from gspo_kernels.linear.schedule import Part
from gspo_kernels.objectives.base import from_spec
from gspo_kernels.objectives.linear import Linear
from gspo_kernels.plan import ratio_of
from gspo_kernels.step import evaluate_objective
from gspo_kernels.terms import SPECS, ArgSpec, Terms, inactive_sequences


def without_logprobs(tokens: Tensor, terms: Terms) -> tuple[Tensor, Terms]:
    """Return log-probs (zeros) and terms that give dLoss/dlogprobs of the objective alone, without KL and
    entropy bonus, where log-probs don't matter. ``tokens`` gives the shape.
    """
    alone = terms._replace(old_logprobs=None, ref_logprobs=None, kl_beta=None, entropy_coef=None)
    return torch.zeros_like(tokens, dtype=exact_dtype(tokens.device)), alone


def known_coefficients(tokens: Tensor, terms: Terms, backend: str) -> Tensor:
    """Return dLoss/dlogprobs of the objective alone, where log-probs don't matter. For use in operators."""
    logprobs, alone = without_logprobs(tokens, terms)
    ratio = ratio_of(alone, backend)
    return evaluate_objective(logprobs, None, alone, backend, ratio, want_metrics=False).grad_logprobs


def token_terms(tokens: Tensor, terms: Terms, backend: str) -> Terms:
    """Return the terms with every tensor expanded to tokens, and the aggregation as a share per token.

    An objective over more than a token becomes ``Linear``, with its known coefficients as token weights.
    """
    layout = terms.layout(tokens)
    shares = Aggregation(tokens, terms).token_shares()

    def expanded(form: ArgSpec, value: Tensor) -> Tensor:
        if form.shape == "broadcast":
            return value.to(tokens.device).expand(tokens.shape)
        return layout.expand(value) if form.shape != "tokens" and value.ndim == 1 else value

    # the shares contain these fields already, or only objectives over more than a token use them
    rest = terms._replace(
        cu_seqlens=None, lengths=None, normalizer=None, skipped=None, group_ids=None, cp_group=""
    )
    alone = rest.each(expanded)._replace(loss_mask=terms.counted(tokens), token_shares=shares)
    if from_spec(terms.objective).coefficient_scope in ("nothing", "token"):
        return alone
    coefficients = known_coefficients(tokens, terms, backend)
    weights = torch.where(shares != 0, coefficients / shares, 0.0)
    return alone._replace(
        advantages=None, rollout_weights=None, token_weights=weights, objective=Linear().spec
    )


class CoefficientGroups:
    """The rows of a call by group: groups in the order of their parts, groups without any gradient last.

    Attributes:
        rows: the number of rows of each group.
        inactive: how many groups at the end have no gradient, whatever the forward gives.
    """

    def __init__(self, call: Call, terms: Terms, depends_on: str, skip: bool):
        self._call, self._terms = call, terms
        layout, compact = terms.layout(call.labels), call.chunking.compact
        # every sequence has T rows, so no counts are read from the device
        equal = isinstance(layout, Padded) and not compact
        known: dict[str, list[int]] = {}
        if isinstance(layout, Padded):
            known["counts"] = [layout.length] * layout.rows
        asked: dict[str, Tensor] = {}
        inactive, on_host = inactive_sequences(call.labels, terms) if skip else None, call.chunking.lengths
        if compact and on_host is not None:
            known["counts"], flags = on_host.tolist()
            known |= {} if inactive is None else {"inactive": flags}
        elif not equal:
            present = call.counted if compact else torch.ones_like(call.counted)
            asked["counts"] = layout.sum(exact(present))
        if inactive is not None and on_host is None:
            asked["inactive"] = inactive
        if depends_on == "group" and terms.group_ids is not None:
            asked["groups"] = terms.group_ids
        if asked:
            # one read from the device
            values = torch.stack([value.to(torch.int64) for value in asked.values()]).tolist()
            known |= dict(zip(asked, values, strict=True))
        counts = known["counts"]
        without = known.get("inactive", [0] * len(counts))
        present_sequences = [i for i, count in enumerate(counts) if count]

        members: dict[int, list[int]] = {}
        if depends_on not in ("group", "batch"):
            members = {i: [i] for i in present_sequences}
        else:
            for i, group in enumerate(known.get("groups", [0] * len(counts))):
                members.setdefault(group, []).append(i)
        groups = list(members.values())
        working = [group for group in groups if not all(without[i] for i in group)]
        inactive_groups = [group for group in groups if all(without[i] for i in group)]
        # groups that fit a chunk go last, next to those that are only projected; segments keep their order
        if not call.chunking.batch_invariant:
            fit = [sum(counts[i] for i in group) <= call.chunk_rows for group in working]
            working = [working[i] for i in sorted(range(len(working)), key=fit.__getitem__)]
        groups = working + inactive_groups
        self.inactive = len(inactive_groups)
        self.rows = [sum(counts[i] for i in group) for group in groups]
        self._sequences = [i for group in groups for i in group]
        self._sequence_ends = [0, *itertools.accumulate(len(group) for group in groups)]
        self._row_ends = [0, *itertools.accumulate(counts[i] for i in self._sequences)]

        # positions of all rows in the order of the groups
        self._where = call.index(call.counted if compact else None, sum(counts))
        if [i for i in self._sequences if counts[i]] != present_sequences:
            index, starts = as_index(self._where, call.labels.device), [0, *itertools.accumulate(counts)]
            self._where = torch.cat([index[starts[i] : starts[i + 1]] for i in self._sequences])
        self._in_place = equal and self._sequences == list(range(len(counts)))

    def prepare(
        self, parts: Sequence[Part], total: Tensor
    ) -> Iterator[tuple[Part, slice | Tensor, Tensor, Terms]]:
        """Copy what all parts need to the device at once, then yield part by part.

        ``total`` is the call's ``Aggregation.total``, the count in the outer divisor.

        Yields:
            Each part, the positions of its rows among the flattened rows of the call, their labels [n], and
            their terms as a packed batch with the call's outer divisor.
        """
        if not parts:
            return
        labels, where, ends = self._call.labels, self._where, self._row_ends
        ranges = [(self._sequence_ends[part.start], self._sequence_ends[part.stop]) for part in parts]
        sizes = [last - first + 1 for first, last in ranges]
        order: slice | Tensor = slice(None)
        if self._in_place:
            length = labels.shape[1]
            longest = torch.arange(0, max(sizes) * length, length, dtype=torch.int32, device=labels.device)
            offsets = [longest[:size] for size in sizes]
        else:
            numbers = list(self._sequences)
            for first, last in ranges:
                numbers += [end - ends[first] for end in ends[first : last + 1]]
            table = torch.tensor(numbers, dtype=torch.int32, device="cpu")
            # pinned, so that the host doesn't wait for the copy
            pinned = table.pin_memory() if labels.is_cuda else table
            order, *offsets = pinned.to(labels.device, non_blocking=True).split(
                [len(self._sequences), *sizes]
            )

        # values in the order of the groups: [B] if there is one per sequence, [1, n] if one per token
        ordered: dict[str, Tensor] = {}
        whole = self._terms._replace(skipped=None, cu_seqlens=None, normalizer=total)
        for name, form in SPECS.items():
            value = getattr(whole, name)
            if value is None or value.ndim == 0:
                continue
            if form.shape == "broadcast":
                value = value.to(labels.device).expand(labels.shape)
            ordered[name] = value[order] if value.ndim == 1 else value.flatten()[where].unsqueeze(0)
        flat_labels = labels.flatten()[where]
        for part, (first, last), cu_seqlens in zip(parts, ranges, offsets, strict=True):
            rows = slice(ends[first], ends[last])
            here: dict[str, Any] = {
                name: value[first:last] if value.ndim == 1 else value[:, rows]
                for name, value in ordered.items()
            }
            terms = whole._replace(**here, cu_seqlens=cu_seqlens)
            yield part, rows if isinstance(where, slice) else where[rows], flat_labels[rows], terms
