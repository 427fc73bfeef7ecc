"""Batch-invariant mode: whether a token's results may depend on what is computed along with it."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from gspo_kernels.core import checks

_switches: list[set_batch_invariant] = []
"""What all threads have switched, in the order of the calls. Each list operation below is atomic."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.switches: list[set_batch_invariant] = []


_thread = _Thread()
"""What the current thread has switched."""


class set_batch_invariant:
    """Switch batch-invariant mode: a token's results are bitwise identical in any batch.

    The mode holds from this call on, in all threads of the process; as a context manager, until the context
    ends. Contexts of several threads may overlap: a thread inside contexts of its own has the mode of the
    innermost one, and all other threads, such as autograd's, have the mode of the last context that has not
    ended. Functions over hidden states also take ``batch_invariant=`` for a single call. A backward runs in
    the mode of its forward, also if it is compiled or repeated.

    These keep their bits for any chunk size (``max_chunk_bytes``), schedule, order of rows, padding or
    packing, split into micro-batches, number of rows and number of threads:

    - log-probs, entropies, log-probs and tails of selected ids;
    - gradients of logits and of hidden states, row by row;
    - coefficients dLoss/dlogprobs, and so clip decisions, of objectives that depend on one sequence at most,
      given the same outer divisor (the same ``normalizer``, or as many sequences or tokens).

    Gradients of weight and bias are sums over rows. Counted tokens are cut into segments of 128 in their
    order, and segments are added up from the first to the last. So these gradients keep their bits for any
    chunk size, schedule and number of threads, padded or packed. They round differently if rows come in
    another order, if the batch is split into micro-batches, whose gradients autograd adds up, or if
    ``skip_inactive="all"`` skips sequences.

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
        self._mode, self._entered, self._own = checks.flag("mode", mode), False, _thread.switches
        # The last call without a context counts. The one before is what this one, as a context, ends in.
        if len(self._own) > 1 and not (self._own[-1]._entered or self._own[-2]._entered):
            self._own[-2]._undo()
        self._do()

    def _do(self) -> None:
        self._own.append(self)
        _switches.append(self)

    def _undo(self) -> None:
        self._own.remove(self)
        _switches.remove(self)

    def __enter__(self) -> None:
        """Keep the mode that the call has set until the context ends."""
        if self not in self._own:  # the object has been a context before
            self._do()
        self._entered = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the mode from before the call."""
        inside = self._own[self._own.index(self) + 1 :]
        for each in [self, *[call for call in inside if not call._entered]]:
            each._undo()


def is_batch_invariant() -> bool:
    """Return whether calls are batch-invariant, unless they pass ``batch_invariant=``."""
    return in_force(None)


def in_force(requested: bool | None) -> bool:
    """Return whether a call is batch-invariant: its argument or, if that is None, the current mode."""
    return checks.flag("batch_invariant", or_current(requested))


def or_current(requested: bool | None) -> bool:
    """Return a call's ``batch_invariant=`` or, if that is None, the current mode.

    A call reads the mode once: another thread may switch it at any time.
    """
    if requested is not None:
        return requested
    if not _switches:
        return False
    thread_switches = _thread.switches
    switches = thread_switches if any(each._entered for each in thread_switches) else _switches
    return [False, *[each._mode for each in switches]][-1]


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
