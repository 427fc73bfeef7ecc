"""Bridges between the batches that frameworks have and the two layouts that the losses take.

Packed means ``values`` [N, ...] with ``cu_seqlens`` int32 [B + 1], padded means [B, T, ...]. Every bridge is
a pure function, has an inverse, keeps dtype and device, and lets gradients of ``values`` through in both
directions; none loops over tokens. Anything that is per token goes through the same bridge: token ids, masks,
log-probs, hidden states.

Nothing is shifted silently. ``to_predictions`` moves a token's value to the position that predicts the token,
where the losses expect labels, masks and log-probs. ``to_tokens`` moves results back.
``response_predictions`` finds the positions that predict response tokens in whole sequences, for values that
a framework keeps per response token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels import checks
from gspo_kernels.layout import segment_ids
from gspo_kernels.ops.library import checked_values
from gspo_kernels.ops.value_checks import check_cu_seqlens


class PackedTokens(NamedTuple):
    """One value or vector per token, sequences one after the other.

    Attributes:
        values: [N, ...].
        cu_seqlens: int32 [B + 1], on the values' device: offsets, as the losses take them.
    """

    values: Tensor
    cu_seqlens: Tensor


def offsets_of(lengths: Tensor) -> Tensor:
    """Return ``cu_seqlens``, int32 [B + 1], of sequences whose ``lengths`` are integers [B]."""
    checks.tensor("lengths", lengths, None, "[B]", None, checks.INTEGERS)
    if lengths.ndim != 1:
        raise ValueError(f"lengths: got shape {tuple(lengths.shape)}, expected [B]")
    if checked_values(lengths.device) and lengths.numel() and (lowest := int(lengths.min())) < 0:
        raise ValueError(f"lengths: got {lowest}, expected numbers of at least 0")
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def offsets_from_position_ids(position_ids: Tensor) -> Tensor:
    """Return ``cu_seqlens`` of a packed row whose ``position_ids`` restart at 0 with every sequence.

    Args:
        position_ids: integers [N] or [1, N], as transformers has them for padding-free batches.

    Returns:
        int32 [B + 1]. B is read from the device.

    Raises:
        TypeError, ValueError: another shape or dtype; positions that neither restart nor count up by one.
    """
    positions = checks.tensor("position_ids", position_ids, None, "[N] or [1, N]", None, checks.INTEGERS)
    if positions.ndim == 2 and positions.shape[0] == 1:
        positions = positions[0]
    if positions.ndim != 1:
        raise ValueError(f"position_ids: got shape {tuple(positions.shape)}, expected [N] or [1, N]")
    starts = positions == 0
    if checked_values(positions.device) and positions.numel():
        if int(positions[0]) != 0:
            raise ValueError(f"position_ids: start at {int(positions[0])}, expected 0")
        wrong = ~starts[1:] & (positions[1:] != positions[:-1] + 1)
        if bool(wrong.any()):
            before, after = positions[int(wrong.nonzero()[0]) :][:2].tolist()
            raise ValueError(f"position_ids: got {after} after {before}, expected {before + 1} or 0")
    ends = positions.new_tensor([positions.numel()])
    return torch.cat([starts.nonzero().squeeze(1), ends]).to(torch.int32)


def pack(sequences: Sequence[Tensor]) -> PackedTokens:
    """Pack sequences that are one tensor [len_i, ...] each (slime, prime-rl); ``unpack`` is the inverse."""
    if isinstance(sequences, Tensor) or not all(isinstance(each, Tensor) for each in sequences):
        got = type(sequences).__name__
        raise TypeError(f"sequences: got a {got}, expected a list of tensors, one per sequence")
    if not sequences or any(each.ndim < 1 for each in sequences):
        raise ValueError("sequences: expected at least one tensor [len_i, ...]")
    first = sequences[0]
    for index, each in enumerate(sequences):
        if (each.shape[1:], each.dtype, each.device) != (first.shape[1:], first.dtype, first.device):
            raise ValueError(
                f"sequences: number {index} is {each.dtype} {tuple(each.shape)} on {each.device}, expected "
                f"the dtype, device and trailing shape of number 0, {first.dtype} {tuple(first.shape)} on "
                f"{first.device}"
            )
    lengths = torch.tensor([each.shape[0] for each in sequences], dtype=torch.int64, device="cpu")
    return PackedTokens(torch.cat(list(sequences)), offsets_of(lengths).to(first.device))


def unpack(values: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
    """Return one view [len_i, ...] per sequence of packed ``values``. Lengths are read from the device."""
    _check_packed("values", values, cu_seqlens)
    return list(torch.split_with_sizes(values, cu_seqlens.diff().tolist()))


def from_nested(nested: Tensor) -> PackedTokens:
    """Pack a nested jagged tensor [B, j, ...] (verl); ``to_nested`` is the inverse."""
    if not isinstance(nested, Tensor) or not nested.is_nested or nested.layout != torch.jagged:
        raise TypeError("nested: expected a nested tensor with layout=torch.jagged")
    jagged: Any = nested
    if getattr(jagged, "_ragged_idx", 1) != 1 or jagged.lengths() is not None:
        raise ValueError("nested: expected [B, j, ...] without holes; call contiguous() or transpose it back")
    return PackedTokens(jagged.values(), jagged.offsets().to(torch.int32))


def to_nested(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return packed ``values`` [N, ...] as a nested jagged tensor [B, j, ...] with int64 offsets."""
    _check_packed("values", values, cu_seqlens)
    return torch.nested.nested_tensor_from_jagged(values, cu_seqlens.to(torch.int64))


def from_padded(padded: Tensor, mask: Tensor) -> PackedTokens:
    """Pack the tokens of a padded batch that ``mask`` marks; ``to_padded_like`` is the inverse.

    Args:
        padded: [B, T, ...], padded on the left, the right, or both.
        mask: [B, T], bool or 0/1: tokens to keep (an attention mask, or a response mask; holes allowed).
            N is read from the device.
    """
    keep = _checked_mask("padded", padded, "mask", mask)
    return PackedTokens(padded[keep], offsets_of(keep.sum(1)))


def to_padded_like(values: Tensor, mask: Tensor, *, fill: float = 0.0) -> Tensor:
    """Put packed ``values`` [N, ...], row by row, where ``mask`` [B, T] marks tokens; ``fill`` elsewhere."""
    checks.tensor("values", values, None, "[N, ...]", None)
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask: got {got}, expected a tensor [B, T]")
    keep = mask != 0
    if checked_values(keep.device) and int(keep.sum()) != values.shape[0]:
        raise ValueError(
            f"mask: marks {int(keep.sum())} tokens, expected as many as values, {values.shape[0]}"
        )
    return values.new_full((*keep.shape, *values.shape[1:]), fill).index_put((keep,), values)


def to_padded(
    values: Tensor, cu_seqlens: Tensor, *, length: int | None = None, side: str = "right", fill: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Pad packed ``values``; ``from_padded`` with the returned mask is the inverse.

    Args:
        values: [N, ...].
        cu_seqlens: [B + 1].
        length: T; None: the longest sequence, which is read from the device.
        side: where the padding goes, "right" or "left".
        fill: the value of padding.

    Returns:
        The padded values [B, T, ...], and a mask, bool [B, T], of the positions that hold tokens.
    """
    _check_packed("values", values, cu_seqlens)
    checks.choice("side", side, ("right", "left"))
    lengths = cu_seqlens.diff().unsqueeze(1)
    if length is None or checked_values(cu_seqlens.device):
        longest = int(lengths.max()) if lengths.numel() else 0
        length = longest if length is None else checks.integer("length", length)
        if length < longest:
            raise ValueError(f"length: got {length}, expected at least the longest sequence's, {longest}")
    columns = torch.arange(length, device=values.device)
    mask = columns < lengths if side == "right" else columns >= length - lengths
    return to_padded_like(values, mask, fill=fill), mask


def to_predictions(
    tokens: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    fill: float,
) -> Tensor:
    """Move the value of token t + 1 to position t, which predicts that token, within each sequence.

    ``labels = to_predictions(input_ids, ..., fill=-100)`` makes the labels of the losses. Masks of tokens
    (``fill=0``) and log-probs aligned with tokens are moved in the same way. A sequence's last position gets
    ``fill``. The value of its first token is dropped, because no position predicts that token.

    Args:
        tokens: [B, T, ...], or [N, ...] with ``cu_seqlens``.
        cu_seqlens: [B + 1]: no value moves into another sequence.
        attention_mask: [B, T], bool or 0/1, for padded batches: padding on either side gets ``fill``, also
            left of the first token. None: there is no padding on the left.
        fill: the value of positions that predict no token.
    """
    return _shift(tokens, cu_seqlens, attention_mask, fill, -1)


def to_tokens(
    predictions: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    fill: float,
) -> Tensor:
    """Move the value of position t to token t + 1, which it predicts; a sequence's first token gets ``fill``.

    This is the inverse of ``to_predictions``, except that the value of a sequence's last position is dropped,
    because that position predicts no token.
    """
    return _shift(predictions, cu_seqlens, attention_mask, fill, 1)


def tokens_of_rank(cu_seqlens: Tensor, rank: int, ranks: int, *, order: str = "zigzag") -> PackedTokens:
    """Return which tokens of packed sequences a context-parallel rank has, for losses with ``cp_group``.

    Shift before you cut: ``to_predictions(input_ids, cu_seqlens=cu_seqlens, fill=-100)[positions]`` are the
    rank's labels. The tokens that they name may lie on another rank. For a padded batch [B, T], the positions
    of ``cu_seqlens = [0, T]`` are the rank's columns.

    Args:
        cu_seqlens: [B + 1], of the whole sequences.
        rank, ranks: number of the rank in the group, and number of ranks.
        order: "zigzag" cuts a sequence into 2 * ranks runs. A rank has run ``rank`` and after it run
            2 * ranks - 1 - ``rank`` (load-balanced ring attention). "contiguous" cuts a sequence into as many
            runs as ranks. "stream" cuts all packed tokens together into as many runs as ranks, also inside
            sequences (as for Ulysses). The lengths of a sequence's runs differ by one token at most.

    Returns:
        Positions, int64 [n], in ascending order, and the rank's ``cu_seqlens``, int32 [B + 1]: every rank has
        all B sequences, some of which may be empty. n is read from the device.

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
        return PackedTokens(positions[first:last], offsets)
    runs = [rank, 2 * ranks - 1 - rank] if order == "zigzag" else [rank]
    sequence = segment_ids(cu_seqlens, tokens)
    # run k of a sequence begins at length * k // (number of runs)
    run = ((positions - cu_seqlens[sequence] + 1) * len(runs) * ranks - 1) // cu_seqlens.diff()[sequence]
    local = torch.isin(run, run.new_tensor(runs)).nonzero().squeeze(1)
    return PackedTokens(local, offsets_of(torch.bincount(sequence[local], minlength=len(cu_seqlens) - 1)))


def response_predictions(cu_seqlens: Tensor, response_cu_seqlens: Tensor) -> Tensor:
    """Return the positions of packed whole sequences (prompt + response) that predict response tokens.

    ``values[index]`` takes the values of responses [R, ...] out of whole sequences [N, ...]: log-probs, or
    hidden states, so that no prompt is projected. ``values.new_zeros(N).index_copy(0, index, responses)``
    puts them back. Gradients pass in both directions.

    Args:
        cu_seqlens: [B + 1], of the whole sequences.
        response_cu_seqlens: [B + 1], of the responses. A response is the end of its sequence. Each prompt has
            at least one token, because no position predicts a sequence's first token.

    Returns:
        int64 [R], in the order of the response tokens; R is read from the device.
    """
    checks.layout("cu_seqlens", cu_seqlens, cu_seqlens)
    shape, device = tuple(cu_seqlens.shape), cu_seqlens.device
    checks.tensor("response_cu_seqlens", response_cu_seqlens, shape, "[B + 1]", device, checks.INTEGERS)
    lengths, responses = cu_seqlens.diff(), response_cu_seqlens.diff()
    if checked_values(cu_seqlens.device) and bool((responses >= lengths.clamp(min=1)).any()):
        raise ValueError(
            "response_cu_seqlens: a response is as long as its sequence or longer, expected a prompt of at "
            "least one token before it"
        )
    tokens = int(response_cu_seqlens[-1])
    before = (cu_seqlens[1:] - 1 - response_cu_seqlens[1:]).to(torch.int64)
    return before[segment_ids(response_cu_seqlens, tokens)] + torch.arange(tokens, device=before.device)


def _shift(
    values: Tensor, cu_seqlens: Tensor | None, attention_mask: Tensor | None, fill: float, by: int
) -> Tensor:
    """Move values within sequences by one, forwards (1) or backwards (-1); ``fill`` where no value moves."""
    checks.tensor("tokens", values, None, "[B, T, ...], or [N, ...] with cu_seqlens", None)
    if cu_seqlens is not None:
        if attention_mask is not None:
            raise ValueError("attention_mask: goes with padded tokens, expected None with cu_seqlens")
        _check_packed("tokens", values, cu_seqlens)
        dim, sequence = 0, segment_ids(cu_seqlens, values.shape[0])
        moves_in = sequence.roll(by) == sequence
    else:
        if values.ndim < 2:
            raise ValueError(
                f"tokens: got shape {tuple(values.shape)}, expected [B, T, ...], or [N, ...] with cu_seqlens"
            )
        dim, moves_in = 1, torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
        if attention_mask is not None:
            attended = _checked_mask("tokens", values, "attention_mask", attention_mask)
            starts = attended & ~torch.nn.functional.pad(attended, (1, -1))
            if checked_values(attended.device) and bool((starts.sum(1) > 1).any()):
                raise ValueError("attention_mask: has holes, expected padding on the left or right only")
            moves_in = attended.roll(by, dim) & attended
    size = values.shape[dim]
    moves_in = moves_in & (torch.arange(size, device=values.device) != (0 if by == 1 else size - 1))
    moves_in = moves_in.reshape(*moves_in.shape, *(1,) * (values.ndim - moves_in.ndim))
    return torch.where(moves_in, values.roll(by, dim), values.new_full((), fill))


def _check_packed(name: str, values: Tensor, cu_seqlens: Tensor) -> None:
    checks.tensor(name, values, None, "[N, ...]", None)
    if values.ndim < 1:
        raise ValueError(f"{name}: got a number, expected [N, ...]")
    checks.tensor("cu_seqlens", cu_seqlens, None, "[B + 1]", values.device)
    each_token = values.new_empty(values.shape[0])
    checks.layout(name, each_token, cu_seqlens)
    check_cu_seqlens(cu_seqlens, each_token)


def _checked_mask(name: str, padded: Tensor, mask_name: str, mask: Tensor) -> Tensor:
    """Return the mask as bool; raise an error if it doesn't fit the padded values."""
    checks.tensor(name, padded, None, "[B, T, ...]", None)
    if padded.ndim < 2:
        raise ValueError(f"{name}: got shape {tuple(padded.shape)}, expected [B, T, ...]")
    checks.tensor(mask_name, mask, tuple(padded.shape[:2]), "[B, T]", padded.device)
    return mask != 0
