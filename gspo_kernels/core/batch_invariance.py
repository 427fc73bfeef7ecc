"""Batch-invariant mode: a token's results do not depend on the rest of the batch."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from gspo_kernels.core import checks

_switches: list[set_batch_invariant] = []
"""Active switches of all threads, in the order of the calls. Each list operation below is atomic."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.switches: list[set_batch_invariant] = []


_thread = _Thread()
"""Active switches of the current thread."""


class set_batch_invariant:
    """Switch batch-invariant mode: a token's results are bitwise identical in any batch.

    The call sets the mode for all threads of the process. As a context manager it restores the previous mode
    at the end. If contexts of several threads overlap, a thread inside a context has the mode of its
    innermost one, and other threads, such as autograd's, have that of the context entered last. Functions of
    hidden states also take ``batch_invariant=`` for a single call. A backward runs in the mode of its
    forward.

    These are bitwise identical for any chunk size (``max_chunk_bytes``), schedule, order of rows, padding or
    packing, split into micro-batches, number of rows and number of threads:

    - log-probs, entropies, log-probs and tails of selected ids;
    - gradients of logits and of hidden states, row by row;
    - coefficients dLoss/dlogprobs, including clip decisions, of objectives whose scope is a token or a
      sequence, given the same outer divisor (``normalizer``, or number of sequences or tokens).

    Gradients of weight and bias are sums over segments of 128 counted tokens, in order. They are bitwise
    identical for any chunk size, schedule and number of threads, padded or packed. They change with the order
    of rows, the split into micro-batches, and the sequences skipped by ``skip_inactive="all"``.

    Not batch-invariant: the loss and metrics, which are sums over the batch; coefficients of objectives over
    groups or the batch, under reordering; on a GPU, coefficients of objectives evaluated by PyTorch, under
    different padding. Results may differ between processors and releases.

    Matmuls are those of the C++ backend on the CPU and a Triton kernel on a GPU. Single-pass kernels and
    schedules with a different order of sums are disabled.

    Args:
        mode: whether calls are batch-invariant. The initial mode is False.

    Raises:
        TypeError: ``mode`` is not a bool.
        RuntimeError: a context is entered while it is active.
    """

    def __init__(self, mode: bool) -> None:
        self._mode, self._entered, self._own = checks.flag("mode", mode), False, _thread.switches
        # keep the last call outside of contexts, and the one before it, to restore on exit
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
        """Keep the mode set by the call until the context ends."""
        if self._entered:
            raise RuntimeError("set_batch_invariant: this context is active; create another one to nest it")
        if self not in self._own:  # reused as a context
            self._do()
        self._entered = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the mode from before the call."""
        self._entered = False
        inside = self._own[self._own.index(self) + 1 :]
        for each in [self, *[call for call in inside if not call._entered]]:
            each._undo()


def is_batch_invariant() -> bool:
    """Return whether calls without ``batch_invariant=`` are batch-invariant."""
    return checked_mode(None)


def checked_mode(requested: bool | None) -> bool:
    """Return whether a call is batch-invariant, from its argument or, if None, the current mode."""
    return checks.flag("batch_invariant", mode_of(requested))


def mode_of(requested: bool | None) -> bool:
    """Return a call's ``batch_invariant=`` or, if None, the current mode.

    Call this once per call, as other threads may switch the mode.
    """
    if requested is not None:
        return requested
    if not _switches:
        return False
    thread_switches = _thread.switches
    switches = thread_switches if any(each._entered for each in thread_switches) else _switches
    return [False, *[each._mode for each in switches]][-1]


def refuse_groups(invariant: bool, **groups: Any) -> None:
    """Raise a ValueError for process groups in a batch-invariant call."""
    for name, group in groups.items():
        if invariant and group is not None:
            raise ValueError(
                f"{name}: got a process group in batch-invariant mode, expected None: the order of sums in "
                "collectives depends on tensor sizes"
            )
