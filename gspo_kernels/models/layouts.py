"""Offsets, labels and context-parallel shares of sequences, for the layouts that the losses take.

Packed values are [N, ...] with ``cu_seqlens`` int32 [B + 1], padded ones [B, T, ...]. The losses never shift
tokens: ``to_predictions`` moves a token's value to the position that predicts it, where they expect labels,
masks and log-probs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo_kernels.arguments.values import check_cu_seqlens
from gspo_kernels.core import checks
from gspo_kernels.core.layout import segment_ids
from gspo_kernels.core.operators import must_check_values


def offsets_of(lengths: Tensor) -> Tensor:
    """Return ``cu_seqlens``, int32 [B + 1], of sequences whose ``lengths`` are integers [B]."""
    checks.tensor("lengths", lengths, None, "[B]", None, checks.INTEGERS)
    if lengths.ndim != 1:
        raise ValueError(f"lengths: got shape {tuple(lengths.shape)}, expected [B]")
    if must_check_values(lengths.device) and lengths.numel() and (lowest := int(lengths.min())) < 0:
        raise ValueError(f"lengths: got {lowest}, expected numbers of at least 0")
    return F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def to_predictions(
    tokens: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    fill: float,
) -> Tensor:
    """Move the value of token t + 1 to position t, which predicts that token, within each sequence.

    ``labels = to_predictions(input_ids, ..., fill=-100)`` makes the labels of the losses; masks of tokens
    (``fill=0``) and log-probs of tokens are moved in the same way. The first token's value is dropped.

    Args:
        tokens: [B, T, ...], or [N, ...] with ``cu_seqlens``.
        cu_seqlens: [B + 1]: no value moves into another sequence.
        attention_mask: [B, T], bool or 0/1, for padded batches: padding on either side gets ``fill``, also
            left of the first token. None: there is no padding on the left.
        fill: the value of positions that predict no token, such as a sequence's last one.
    """
    shape = "[B, T, ...]" if cu_seqlens is None else "[N, ...] with cu_seqlens"
    dim = 1 if cu_seqlens is None else 0
    if checks.tensor("tokens", tokens, None, shape, None).ndim <= dim:
        raise ValueError(f"tokens: got shape {tuple(tokens.shape)}, expected {shape}")
    rows, device = tuple(tokens.shape[: dim + 1]), tokens.device
    predicts = torch.ones(rows, dtype=torch.bool, device=device)  # whether the next token is its sequence's
    if cu_seqlens is not None:
        if attention_mask is not None:
            raise ValueError("attention_mask: goes with padded tokens, expected None with cu_seqlens")
        checks.tensor("cu_seqlens", cu_seqlens, None, "[B + 1]", device)
        checks.layout("tokens", predicts, cu_seqlens)
        check_cu_seqlens(cu_seqlens, predicts)
        sequence = segment_ids(cu_seqlens, len(tokens))
        predicts = sequence.roll(-1) == sequence
    elif attention_mask is not None:
        attended = checks.tensor("attention_mask", attention_mask, rows, "[B, T]", device) != 0
        starts = attended & ~F.pad(attended, (1, -1))
        if must_check_values(device) and bool((starts.sum(1) > 1).any()):
            raise ValueError("attention_mask: has holes, expected padding on the left or right only")
        predicts = attended & attended.roll(-1, 1)
    predicts[..., -1:] = False
    predicts = predicts.reshape(*rows, *(1,) * (tokens.ndim - len(rows)))
    return torch.where(predicts, tokens.roll(-1, dim), tokens.new_full((), fill))


class RankTokens(NamedTuple):
    """The part of packed sequences that a rank has.

    Attributes:
        positions: int64 [n], places in the packed row.
        cu_seqlens: int32 [B + 1], offsets of the sequences among the rank's tokens.
    """

    positions: Tensor
    cu_seqlens: Tensor


def tokens_of_rank(cu_seqlens: Tensor, rank: int, ranks: int, *, order: str = "zigzag") -> RankTokens:
    """Return the tokens of packed sequences that a context-parallel rank has, for losses with ``cp_group``.

    Shift before you cut: ``to_predictions(input_ids, cu_seqlens=cu_seqlens, fill=-100)[positions]`` are the
    rank's labels. The tokens that they name may be on another rank. For a padded batch [B, T], the positions
    of ``cu_seqlens = [0, T]`` are the rank's columns.

    Args:
        cu_seqlens: [B + 1], of the whole sequences.
        rank, ranks: number of the rank in the group, and number of ranks.
        order: "zigzag" cuts a sequence into 2 * ranks runs. A rank has run ``rank`` and after it run
            2 * ranks - 1 - ``rank`` (load-balanced ring attention). "contiguous" cuts a sequence into as many
            runs as ranks. "stream" cuts all packed tokens together into as many runs as ranks, also inside
            sequences (as for Ulysses). The lengths of a sequence's runs differ by one token at most.

    Returns:
        Positions in ascending order, and the rank's ``cu_seqlens``: every rank has all B sequences, some of
        which may be empty. n is read from the device.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
    """
    checks.tensor("cu_seqlens", cu_seqlens, None, "[B + 1]", None)
    checks.layout("cu_seqlens", cu_seqlens, cu_seqlens)
    checks.choice("order", order, ("zigzag", "contiguous", "stream"))
    if checks.integer("ranks", ranks) < 1 or not 0 <= checks.integer("rank", rank) < ranks:
        raise ValueError(f"rank: got {rank} of {ranks} ranks, expected 0 <= rank < ranks")
    tokens = int(cu_seqlens[-1])
    positions = torch.arange(max(tokens, 0), device=cu_seqlens.device)
    check_cu_seqlens(cu_seqlens, positions)
    if order == "stream":
        first, last = tokens * rank // ranks, tokens * (rank + 1) // ranks
        offsets = (cu_seqlens - first).clamp(0, last - first).to(torch.int32)
        return RankTokens(positions[first:last], offsets)
    runs = [rank, 2 * ranks - 1 - rank] if order == "zigzag" else [rank]
    sequence = segment_ids(cu_seqlens, tokens)
    # run k of a sequence begins at length * k // (number of runs)
    run = ((positions - cu_seqlens[sequence] + 1) * len(runs) * ranks - 1) // cu_seqlens.diff()[sequence]
    local = torch.isin(run, run.new_tensor(runs)).nonzero().squeeze(1)
    return RankTokens(local, offsets_of(torch.bincount(sequence[local], minlength=len(cu_seqlens) - 1)))
