"""Batch-invariant mode: whether a token's results may depend on what is computed along with it."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from gspo_kernels import checks

_enabled = False


class set_batch_invariant:
    """Have everything that is computed for a token keep its bits, whatever is computed along with it.

    From its call on, in all threads of the process; as a context manager until the context ends. Entries over
    hidden states also take ``batch_invariant=`` for a single call. A call's backward, compiled and repeated
    ones too, is computed as the call was.

    The same bits for any chunk size (``max_chunk_bytes``), schedule, order of rows, padding or packing, split
    into micro-batches, number of rows and number of threads:

    - log-probs, entropies, log-probs and tails of selected ids;
    - gradients of logits and of hidden states, row by row;
    - coefficients dLoss/dlogprobs of objectives that look at no more than a sequence, given the same outer
      divisor (``normalizer``, or as many sequences or tokens), and so clip decisions.

    Gradients of weight and bias are sums over rows. Tokens that count are taken in segments of 128 in the
    order in which they come, and segments are added up from the first to the last: the same bits for any
    chunk size, schedule and number of threads, padded or packed. Rows in another order, and micro-batches,
    whose sums autograd adds up, are other sums, which round differently; so are sequences that
    ``skip_inactive="all"`` leaves out.

    Not promised: the loss and metrics, which are sums over the batch; coefficients of objectives over groups
    or the batch in another order of sequences; on a GPU, coefficients of objectives that PyTorch evaluates
    there where padding differs; the same bits on another processor or another release.

    Matrix products then run in a fixed order of their sums: on the CPU those of the C++ backend, on a GPU a
    Triton kernel. Single-pass shortcuts, and schedules whose sums have another order, are off.

    Args:
        mode: whether calls are batch-invariant. False at first.

    Raises:
        TypeError: ``mode`` is no bool.
    """

    def __init__(self, mode: bool) -> None:
        global _enabled
        self._before = _enabled
        _enabled = checks.flag("mode", mode)

    def __enter__(self) -> None:
        """Leave the mode as it was set."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Bring back what was before."""
        global _enabled
        _enabled = self._before


def is_batch_invariant() -> bool:
    """Whether calls that don't say otherwise are batch-invariant."""
    return _enabled


def in_force(asked: bool | None) -> bool:
    """What a call's ``batch_invariant`` argument comes to; None: as the process is set."""
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
    """Refuse rows by PyTorch's own operations, in a batch-invariant call.

    Raises:
        ValueError: with the reason.
    """
    if backend == "reference":
        raise ValueError(
            "backend: 'reference' is to serve a batch-invariant call, expected 'cpp' or 'triton': PyTorch's "
            "own sums over a row may be split among threads"
        )
