"""Batch-invariant mode: whether a token's results may depend on what is computed along with it."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from gspo_kernels import checks

_enabled = False


class set_batch_invariant:
    """Switch batch-invariant mode: results of a token keep their bits, whatever is computed along with it.

    The mode holds from this call on, in all threads of the process; as a context manager, until the context
    ends. Functions over hidden states also take ``batch_invariant=`` for a single call. A backward runs in
    the mode of its forward, also if it is compiled or repeated.

    These keep their bits for any chunk size (``max_chunk_bytes``), schedule, order of rows, padding or
    packing, split into micro-batches, number of rows and number of threads:

    - log-probs, entropies, log-probs and tails of selected ids;
    - gradients of logits and of hidden states, row by row;
    - coefficients dLoss/dlogprobs, and so clip decisions, of objectives that look at no more than a sequence,
      given the same outer divisor (the same ``normalizer``, or as many sequences or tokens).

    Gradients of weight and bias are sums over rows. Counted tokens are cut into segments of 128 in their
    order, and segments are added up from the first to the last. So these gradients keep their bits for any
    chunk size, schedule and number of threads, padded or packed. They round differently if rows come in
    another order, if the batch is split into micro-batches, whose gradients autograd adds up, or if
    ``skip_inactive="all"`` leaves out sequences.

    These may change their bits: the loss and metrics, which are sums over the batch; coefficients of
    objectives over groups or the batch, with another order of sequences; on a GPU, coefficients of objectives
    that PyTorch evaluates, with other padding; everything, on another processor or with another release.

    In this mode matrix products sum in a fixed order: those of the C++ backend on the CPU, a Triton kernel on
    a GPU. Single-pass shortcuts, and schedules whose sums have another order, are off.

    Args:
        mode: whether calls are batch-invariant. A process starts with False.

    Raises:
        TypeError: ``mode`` is no bool.
    """

    def __init__(self, mode: bool) -> None:
        global _enabled
        self._before = _enabled
        _enabled = checks.flag("mode", mode)

    def __enter__(self) -> None:
        """Keep the mode that the call has set."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the mode from before the call."""
        global _enabled
        _enabled = self._before


def is_batch_invariant() -> bool:
    """Return whether calls are batch-invariant, unless they pass ``batch_invariant=``."""
    return _enabled


def in_force(asked: bool | None) -> bool:
    """Return whether a call is batch-invariant: its argument or, if that is None, the process's mode."""
    return _enabled if asked is None else checks.flag("batch_invariant", asked)


def refuse_groups(invariant: bool, **groups: Any) -> None:
    """Refuse process groups in a batch-invariant call.

    Raises:
        ValueError: with the reason.
    """
    for name, group in groups.items():
        if invariant and group is not None:
            raise ValueError(
                f"{name}: got a process group in batch-invariant mode, expected None: collectives add up "
                "ranks in an order that depends on the size of what they sum"
            )


def refuse_backend(backend: str) -> None:
    """Refuse the backend "reference", PyTorch's own operations, in a batch-invariant call.

    Raises:
        ValueError: with the reason.
    """
    if backend == "reference":
        raise ValueError(
            "backend: 'reference' is to serve a batch-invariant call, expected 'cpp' or 'triton': PyTorch's "
            "own sums over a row may be split among threads"
        )
