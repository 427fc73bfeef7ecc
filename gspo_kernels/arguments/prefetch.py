"""Prefetch sequence lengths to the host, to avoid a host-device sync in the loss."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels.backends.reference.hidden import lengths as sequence_lengths
from gspo_kernels.core import checks
from gspo_kernels.core.layout import as_rows, copy_async


class Read:
    """An asynchronous copy of numbers to the host."""

    def __init__(self, numbers: Tensor):
        self._numbers, self._copied = numbers, None
        if numbers.is_cuda:
            self._numbers = numbers.to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(numbers.device))

    def wait(self) -> Tensor:
        """Wait for the copy; return the numbers on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._numbers


class _Prefetched(NamedTuple):
    """An asynchronous copy of lengths.

    Attributes:
        inputs: labels, mask, advantages and offsets, and their versions.
        ignore_index: the label of ignored tokens.
        lengths: int64 [2, B], counted tokens and whether all advantages are 0.
    """

    inputs: list[tuple[weakref.ref[Tensor], int] | None]
    ignore_index: int
    lengths: Read


_PREFETCHED: dict[int, _Prefetched] = {}
"""Keyed by the ``id`` of the labels, for their lifetime."""


def prefetch(
    labels: Tensor,
    loss_mask: Tensor | None = None,
    advantages: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    ignore_index: int = -100,
) -> None:
    """Start copying sequence lengths to the host for a later loss of the same tensors.

    Losses and log-probs from hidden states read sequence lengths on the host to split the batch into chunks,
    which on a GPU waits for all queued work. Call this before the model's forward to overlap the copy, a few
    numbers per sequence, with it. Results do not change.

    Pass the same tensor objects, unmodified, to the loss; otherwise it syncs as without this call. The
    tensors are held by weak references. A prefetched copy is used once. On the CPU this does nothing.

    Args:
        labels, loss_mask, advantages, cu_seqlens, ignore_index: as the loss takes them;
            ``linear_token_logprobs`` takes only labels, ``loss_mask`` and ``ignore_index``.

    Returns:
        None.

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
    """
    checks.tensor("labels", labels, None, "[B, T] or [N]", None, checks.INTEGERS)
    checks.integer("ignore_index", ignore_index, labels.dtype)
    packed = labels.ndim == 1
    if cu_seqlens is not None or not packed:  # log-probs of packed rows need no offsets
        checks.layout("labels", labels, cu_seqlens)
    if loss_mask is not None:
        shape = tuple(labels.shape)
        checks.tensor("loss_mask", loss_mask, shape, "the labels' shape", labels.device, host=True)
    sequences = 1 if packed else labels.shape[0]
    if cu_seqlens is not None:
        sequences = len(cu_seqlens) - 1
    if advantages is not None:
        checks.tensor("advantages", advantages, None, "[B] or the labels' shape", labels.device)
        if advantages.shape not in ((sequences,), labels.shape):
            raise ValueError(
                f"advantages: got shape {tuple(advantages.shape)}, expected {(sequences,)} or "
                f"{tuple(labels.shape)}"
            )
    if not labels.is_cuda:
        return
    tokens = as_rows(labels, packed)
    if loss_mask is not None:
        mask = copy_async(as_rows(loss_mask, packed), labels.device, "loss_mask")
        tokens = tokens.masked_fill(mask == 0, ignore_index)
    factors = advantages
    if advantages is not None and advantages.shape != (sequences,):
        factors = as_rows(advantages, packed)
    lengths = Read(sequence_lengths(tokens, ignore_index, cu_seqlens, factors))
    key = id(labels)
    tensors = (labels, loss_mask, advantages, cu_seqlens)
    inputs = [None if x is None else (weakref.ref(x), _version(x)) for x in tensors]
    _PREFETCHED[key] = _Prefetched(inputs, ignore_index, lengths)
    weakref.finalize(labels, _PREFETCHED.pop, key, None).atexit = False


def take_prefetched(
    labels: Tensor,
    loss_mask: Tensor | None,
    advantages: Tensor | None,
    cu_seqlens: Tensor | None,
    ignore_index: int,
) -> Tensor | None:
    """Return the lengths prefetched for exactly these tensors, int64 [2, B] on the CPU, or None.

    The rows are counted tokens, and 1 where all advantages are 0.
    """
    if not _PREFETCHED or torch.compiler.is_compiling():
        return None
    entry = _PREFETCHED.pop(id(labels), None)
    if entry is None or entry.ignore_index != ignore_index:
        return None
    for seen, tensor in zip(entry.inputs, (labels, loss_mask, advantages, cu_seqlens), strict=True):
        if seen is None or tensor is None:
            same = seen is None and tensor is None
        else:
            same = seen[0]() is tensor and seen[1] == _version(tensor)
        if not same:
            return None
    return entry.lengths.wait()


def lengths_on_host(
    tokens: Tensor, loss_mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Compute lengths and positions of tokens [B, T] or [N] from a mask or offsets on the CPU.

    Returns:
        Lengths in the form of ``take_prefetched``, with zeros in its second row, and the positions of the
        tokens in the mask, int64 [n] on the CPU, or None for all tokens. Labels are not read, so tokens whose
        label is ``ignore_index`` are included.
    """
    where = None
    if loss_mask is None:
        assert cu_seqlens is not None
        counts = cu_seqlens.diff().to(torch.int64)
    else:
        mask, ends = loss_mask.flatten() != 0, cu_seqlens
        if ends is None:
            ends = torch.arange(tokens.shape[0] + 1, dtype=torch.int64, device="cpu") * tokens.shape[1]
        before = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
        counts = before[ends.to(torch.int64)].diff()
        if int(before[-1]) < tokens.numel():
            where = mask.nonzero().squeeze(1)
    return torch.stack([counts, torch.zeros_like(counts)]), where


def _version(tensor: Tensor) -> int:
    """Return a tensor's version counter, or 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version
