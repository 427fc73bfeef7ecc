"""Which tokens a sampler could have drawn, as bitmasks: made of ids, or rebuilt from logits by the rules of
top-k, top-p and min-p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels.arguments.logit_options import check_scores, tokens_of
from gspo_kernels.arguments.values import check_ids
from gspo_kernels.core import bits, checks
from gspo_kernels.core.exact import exact, exact_dtype
from gspo_kernels.core.operators import checked_values
from gspo_kernels.core.types import stats_dtype

ENGINES = ("transformers", "vllm")
_CANDIDATES = 1024
"""How many of the most likely tokens top-p looks at first."""
_GROWTH = 16
"""Top-p looks at this many times more tokens where the first ones do not reach its share."""
_ELEMENTS = 2**24
"""How many logits are looked at in one chunk of rows."""


class _Rules(NamedTuple):
    top_k: int
    top_p: float
    log_min_p: float
    min_p_first: bool


class SamplingMask(NamedTuple):
    """The tokens that a sampler could have drawn at each of C places."""

    ids: Tensor  # int32 [S], the ids of the first place, then those of the second one, and so on
    counts: Tensor  # [C] int64, number of ids at each place; 0: any id, as for tokens that a tool wrote

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]]) -> SamplingMask:
        """Return the mask of one list of ids for each place, as vLLM returns it."""
        ids = [token for each in sets for token in each]
        counts = [len(each) for each in sets]
        return cls(
            torch.tensor(ids, dtype=torch.int32, device="cpu"),
            torch.tensor(counts, dtype=torch.int64, device="cpu"),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[SamplingMask]) -> SamplingMask:
        """Put the places of several masks one after the other; at least one mask."""
        return cls(*(torch.cat(each) for each in zip(*parts, strict=True)))

    def to_lists(self) -> list[list[int]]:
        """Return one list of ids for each place, as `of` takes it."""
        ids, ends = self.ids.tolist(), self.counts.cumsum(0).tolist()
        return [ids[end - count : end] for count, end in zip(self.counts.tolist(), ends, strict=True)]

    def to(self, device: torch.device) -> SamplingMask:
        """Return the same mask on another device."""
        return SamplingMask(self.ids.to(device), self.counts.to(device))

    def bitmask(self, vocabulary: int) -> Tensor:
        """Return the mask as the losses take it, as ``kept_mask``: int32 [C, ceil(V / 32)]."""
        whole = bits.packed_columns(torch.ones(vocabulary, dtype=torch.bool, device=self.ids.device))
        kept = bits.packed_rows(self.ids, self.counts, vocabulary)
        return torch.where(self.counts.unsqueeze(1) > 0, kept, whole)


def kept_mask(ids: Tensor, vocabulary_size: int) -> Tensor:
    """The ids that a sampler could have drawn, as a bitmask to pass as ``kept_mask``.

    Args:
        ids: [B, T, K] or [N, K], int64 or int32, in any order and any number of times; -1 or -100 where a
            token has fewer than K.
        vocabulary_size: V of the logits; where ranks share the vocabulary, that of all ranks together.

    Returns:
        int32 [B, T, ceil(V / 32)] or [N, ceil(V / 32)]: bit v % 32 of word v // 32 is for id v.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message. On CPU tensors, and elsewhere with
            GSPO_KERNELS_VALIDATE=1, also an id outside of the vocabulary; unchecked, it is left out.
    """
    checks.tensor("ids", ids, None, "[B, T, K] or [N, K]", None, checks.INTEGERS)
    if ids.ndim not in (2, 3):
        raise ValueError(f"ids: got shape {tuple(ids.shape)}, expected [B, T, K] or [N, K]")
    if checks.integer("vocabulary_size", vocabulary_size) < 1:
        raise ValueError(f"vocabulary_size: got {vocabulary_size}, expected at least 1")
    check_ids("ids", ids, vocabulary_size)
    return bits.packed_ids(ids, vocabulary_size)


@torch.no_grad()
def sampling_mask(
    logits: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    labels: Tensor | None = None,
    engine: str = "transformers",
) -> Tensor:
    """The ids that a sampler could have drawn from logits, as a bitmask to pass as ``kept_mask``.

    The rules are those of transformers' warpers and of vLLM's sampler, which divide logits by the temperature
    first. Top-k keeps the k most likely ids and all that tie with the last of them. Top-p keeps an id if all
    more likely ids together have less than ``top_p`` of the probability that top-k left, so it always keeps
    the most likely id. Of ids that tie at the edge, engines keep some, by the order of their sort; this
    function keeps all. Min-p keeps ids with at least ``min_p`` times the probability of the most likely id.
    The engines differ in one thing: transformers applies min-p after top-k and top-p, vLLM before them, so
    that its top-p is a share of what min-p and top-k left.

    Sums are in fp64. An engine that rounds differently, or whose logits differ, may draw an id just beyond
    the edge of a set: pass ``labels``, and each set holds the id that was drawn.

    Args:
        logits: [B, T, V] or [N, V], fp16, bf16, fp32 or fp64, before the temperature: the logits that were
            sampled from, so those of the old policy.
        temperature: a positive number, or a tensor [B] ([N] for packed logits).
        top_k: how many ids are kept; 0: all.
        top_p: the share of probability that is kept, in (0, 1]; 1: all.
        min_p: the least probability, relative to the most likely id's, in [0, 1); 0: none.
        labels: [B, T] or [N], int64 or int32, or None: ids that are kept whatever the rules say; -100 where
            no id was drawn. Logits of rows with label -100 may hold anything.
        engine: "transformers" or "vllm".

    Returns:
        int32 [B, T, ceil(V / 32)] or [N, ceil(V / 32)]: bit v % 32 of word v // 32 is for id v. A row without
        a softmax (NaN or +inf among its logits) keeps all ids.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message. On CPU tensors, and elsewhere with
            GSPO_KERNELS_VALIDATE=1, also a label outside of the vocabulary, and a row without a softmax
            unless its label is -100.
    """
    tokens = tokens_of("logits", logits, "V")
    check_scores("logits", logits, tokens if labels is None else labels, "V")
    shape, vocabulary = tokens.shape, logits.shape[-1]
    checks.choice("engine", engine, ENGINES)
    if checks.integer("top_k", top_k) < 0:
        raise ValueError(f"top_k: got {top_k}, expected at least 0")
    if not 0 < checks.number("top_p", top_p) <= 1:
        raise ValueError(f"top_p: got {top_p}, expected a share above 0 and at most 1")
    if not 0 <= checks.number("min_p", min_p) < 1:
        raise ValueError(f"min_p: got {min_p}, expected a share of at least 0 and below 1")
    log_min_p = math.log(min_p) if min_p else -math.inf
    rules = _Rules(min(top_k, vocabulary), top_p, log_min_p, engine == "vllm")
    if isinstance(temperature, Tensor):
        checks.tensor(
            "temperature", temperature, (shape[0],), "one per sequence", logits.device, checks.FLOATS
        )
        divisors = temperature.view(-1, *(1,) * (len(shape) - 1)).expand(shape).reshape(-1, 1)
    else:
        divisors = logits.new_full(
            (), checks.number("temperature", temperature, positive=True), dtype=exact_dtype(logits.device)
        )
    rows = logits.reshape(-1, vocabulary)
    validating = checked_values(logits.device)
    if validating and labels is not None:
        _check_labels(labels, vocabulary)
    masks = rows.new_empty((rows.shape[0], bits.words(vocabulary)), dtype=torch.int32)
    step = max(1, _ELEMENTS // vocabulary)
    for start in range(0, rows.shape[0], step):
        chunk = slice(start, start + step)
        z = rows[chunk].to(stats_dtype(logits.dtype))
        z = z / (divisors if divisors.ndim == 0 else divisors[chunk]).to(z.dtype)
        defined = z.amax(-1, keepdim=True) < torch.inf  # False for NaN, the largest of a row with NaN
        if validating and not bool(defined.all()):
            drawn = None if labels is None else labels.reshape(-1)[chunk] != bits.NO_ID
            _check_defined(defined.squeeze(-1), drawn, start, shape)
        masks[chunk] = bits.packed_columns((z >= _least_kept(z, rules)) | ~defined)
    if labels is not None:
        masks |= bits.packed_ids(labels.reshape(-1, 1), vocabulary)
    return masks.view(*shape, masks.shape[-1])


def _check_labels(labels: Tensor, vocabulary: int) -> None:
    wrong = (labels != bits.NO_ID) & ((labels < 0) | (labels >= vocabulary))
    if bool(wrong.any()):
        raise ValueError(
            f"labels: got {int(labels[wrong][0])} at position {wrong.nonzero()[0].tolist()}, expected "
            f"0 <= label < {vocabulary}, or {bits.NO_ID} for none"
        )


def _check_defined(defined: Tensor, drawn: Tensor | None, start: int, shape: torch.Size) -> None:
    """Check that rows [n] from ``start`` on have a softmax, if an id was ``drawn`` there (None: in all)."""
    wrong = ~defined if drawn is None else ~defined & drawn
    if bool(wrong.any()):
        place = start + int(wrong.nonzero()[0])
        position = [place] if len(shape) == 1 else list(divmod(place, shape[1]))
        raise ValueError(
            f"logits: got NaN or +inf at position {position}, from which no sampler draws; expected numbers "
            f"or -inf (rows whose label is {bits.NO_ID} may hold anything)"
        )


def _least_kept(z: Tensor, rules: _Rules) -> Tensor:
    """Return the least kept logit of each row, [n, 1], of logits [n, V]."""
    highest = z.amax(-1, keepdim=True)
    least_by_min_p = highest + rules.log_min_p
    bound = least_by_min_p if rules.min_p_first else torch.full_like(highest, -math.inf)
    if rules.top_k:
        bound = torch.maximum(bound, z.topk(rules.top_k, sorted=True).values[:, -1:])
    if rules.top_p < 1:
        bound = _least_by_top_p(z, bound, highest, rules)
    return torch.maximum(bound, least_by_min_p)


def _least_by_top_p(z: Tensor, bound: Tensor, highest: Tensor, rules: _Rules) -> Tensor:
    """Return the least logit that top-p keeps among those that are at least ``bound``, [n, 1]."""
    left = exact(torch.where(z >= bound, (z - highest).exp(), 0.0)).sum(-1, keepdim=True)
    V, mass = z.shape[-1], rules.top_p * left
    count = rules.top_k or min(_CANDIDATES, V)
    lowest, decided = _last_within(z.topk(count, sorted=True).values, highest, mass)
    # with top-k, logits beyond the first k lie below the bound or tie with the last of the k
    while not rules.top_k and count < V and not bool(decided.all()):
        count = _GROWTH * count if 4 * _GROWTH * count <= V else V
        rows = (~decided).nonzero().squeeze(1)
        if count == V:  # a sort is faster than a topk of everything
            likeliest = z[rows].sort(descending=True).values
        else:
            likeliest = z[rows].topk(count, sorted=True).values
        lowest[rows], decided[rows] = _last_within(likeliest, highest[rows], mass[rows])
    return torch.maximum(lowest, bound)


def _last_within(descending: Tensor, highest: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last of the descending logits before which there is less than ``mass``, [n, 1]; and whether
    other logits follow it here, [n]: then no more logits need to be looked at.
    """
    weights = exact(descending - highest).exp()
    inside = weights.cumsum(-1) - weights < mass
    count = inside.sum(-1, keepdim=True)
    return descending.gather(-1, (count - 1).clamp(min=0)), ~inside[:, -1]
