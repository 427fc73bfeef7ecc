"""The public argument ``parallel``, and collectives in process groups that operators pass by name.

``torch.distributed`` is imported lazily, as it is not in every build of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from gspo_kernels.core import checks
from gspo_kernels.core.batch_invariance import checked_mode, refuse_groups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Parallel:
    """Distribution of the tensors of a call over ranks. By default this rank has all of them.

    A group is a ``ProcessGroup`` or a ``DeviceMesh`` of one dimension. DTensors determine their groups; keep
    the defaults of the corresponding fields.

    Args:
        tp_group: ranks that share the vocabulary (tensor parallelism). Each has a range of columns of the
            logits, [..., V of the rank], or of rows of the lm_head's weight and bias, [V of the rank, H].
            Labels are ids of the whole vocabulary. All other inputs must be the same on all ranks; results
            are bitwise identical on all ranks.
        vocab_range: (first, one past the last) id of this rank's columns or rows. Default: shards of equal
            size in the order of ranks.
        reduce_hidden_grad: all-reduce dHidden over ``tp_group``, a chunk at a time in fp32. If False, each
            rank returns its part of the sum.
        sequence_parallel: ``hidden`` holds the tokens of this rank only, [B, T of the rank, H] or
            [N of the rank, H], in the order of ranks. Labels and results are those of all tokens.
        cp_group: ranks that have parts of the same sequences (context parallelism). Tensors of the labels'
            shape hold this rank's tokens, padded [B, T of the rank], or packed with the same number of
            sequences on all ranks, possibly empty. Tensors [B] and the normalizer refer to whole sequences
            and are the same on all ranks, like loss and metrics. Gradients are those of the rank's tokens;
            sum them over the group.

    Raises:
        TypeError, ValueError: a wrong option, named in the message.
    """

    tp_group: ProcessGroup | DeviceMesh | None = None
    vocab_range: tuple[int, int] | None = None
    reduce_hidden_grad: bool = True
    sequence_parallel: bool = False
    cp_group: ProcessGroup | DeviceMesh | None = None
    _is_default: ClassVar[bool]

    def __post_init__(self) -> None:
        # read by every call
        self.__dict__["_is_default"] = all(getattr(self, each.name) == each.default for each in fields(self))
        for name in ("tp_group", "cp_group"):
            if getattr(self, name) is not None:
                group_name(name, getattr(self, name))
        checks.flag("reduce_hidden_grad", self.reduce_hidden_grad)
        checks.flag("sequence_parallel", self.sequence_parallel)
        if self.sequence_parallel and not self.reduce_hidden_grad:
            raise ValueError(
                "reduce_hidden_grad: got False, expected True with sequence_parallel=True, which always sums "
                "dHidden over tp_group"
            )
        if self.vocab_range is None:
            return
        if self.tp_group is None:
            raise ValueError(f"vocab_range: got {self.vocab_range} without a tp_group, expected None")
        if not isinstance(self.vocab_range, tuple) or len(self.vocab_range) != 2:
            raise ValueError(f"vocab_range: got {self.vocab_range!r}, expected (first, one past the last)")
        first, last = (checks.integer("vocab_range", end) for end in self.vocab_range)
        if not 0 <= first <= last:
            raise ValueError(f"vocab_range: got {self.vocab_range}, expected 0 <= first <= last")

    @staticmethod
    def check(
        parallel: object, function: str, usable: tuple[str, ...], batch_invariant: bool | None = None
    ) -> None:
        """Check the type, and reject fields that the function does not support and groups in a
        batch-invariant call.

        Raises:
            TypeError, ValueError: naming the argument or the field.
        """
        if not isinstance(parallel, Parallel):
            raise TypeError(f"parallel: got {type(parallel).__name__}, expected Parallel(...)")
        if parallel._is_default:
            return
        if parallel.tp_group is not None or parallel.cp_group is not None:
            refuse_groups(
                checked_mode(batch_invariant), cp_group=parallel.cp_group, tp_group=parallel.tp_group
            )
        for name, default in _DEFAULTS.items():
            if getattr(parallel, name) != default and name not in usable:
                raise ValueError(
                    f"{name}: not supported by {function}, expected {default}; supported fields of parallel: "
                    f"{', '.join(usable)}"
                )


_DEFAULTS = {field.name: field.default for field in fields(Parallel)}


def group_name(argument: str, group: object) -> str:
    """Return the name of a process group, or of the group of a device mesh of one dimension.

    Raises:
        TypeError, ValueError: naming ``argument``.
    """
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"{argument}: got {group}, expected a mesh of one dimension such as mesh['tp']")
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"{argument}: got {type(group).__name__}, expected a ProcessGroup of this process, or a "
            "DeviceMesh of one dimension"
        )
    name: str = group.group_name
    return name


def _group(name: str) -> ProcessGroup:
    from torch.distributed import distributed_c10d

    group: ProcessGroup = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    return group


BEFORE_COLLECTIVE: ContextVar[Callable[[], None] | None] = ContextVar("BEFORE_COLLECTIVE", default=None)
"""Called before the next collective if not None; see ``distributed.validate``."""


def _group_for_collective(name: str) -> ProcessGroup:
    """Call ``BEFORE_COLLECTIVE``; return the group."""
    if (before := BEFORE_COLLECTIVE.get()) is not None:
        before()
    return _group(name)


def rank_and_size(name: str) -> tuple[int, int]:
    """Return the rank of this process in the group, and the number of ranks."""
    group = _group(name)
    return group.rank(), group.size()


def gathered(name: str, local: Tensor) -> Tensor:
    """All-gather tensors of the same shape to [ranks, *shape]."""
    from torch.distributed import all_gather

    group = _group_for_collective(name)
    every = local.new_empty(group.size(), *local.shape)
    all_gather([*every.unbind()], local.contiguous(), group=group)
    return every


def gathered_numbers(name: str, device: torch.device, local: Sequence[int]) -> list[tuple[int, ...]]:
    """All-gather the same number of integers from each rank; ``device`` is that of the call's tensors."""
    numbers = torch.tensor(local, dtype=torch.int64, device=side_channel(name, device))
    return [tuple(int(number) for number in row) for row in gathered(name, numbers).tolist()]


def sum_(name: str, values: Tensor) -> Tensor:
    """All-reduce in place, with bitwise identical results on all ranks."""
    begin_sum_(name, values).wait()
    return values


def begin_sum_(name: str, values: Tensor) -> Work:
    """Start an all-reduce in place."""
    from torch.distributed import all_reduce

    work: Work = all_reduce(values, group=_group_for_collective(name), async_op=True)
    return work


def begin_broadcast(name: str, values: Tensor, rank: int) -> Work:
    """Start a broadcast of ``values`` from ``rank``."""
    from torch.distributed import broadcast

    work: Work = broadcast(values, group=_group_for_collective(name), group_src=rank, async_op=True)
    return work


def begin_reduce(name: str, values: Tensor, rank: int) -> Work:
    """Start a reduce of ``values`` to ``rank``; those of other ranks are overwritten."""
    from torch.distributed import reduce

    work: Work = reduce(values, group=_group_for_collective(name), group_dst=rank, async_op=True)
    return work


def side_channel(name: str, device: torch.device) -> torch.device:
    """Return the device for gathering a few numbers: the CPU if the group has a backend for it
    ("cpu:gloo,cuda:nccl", the default of ``init_process_group()``), else ``device``.
    """
    cpu = torch.device("cpu")
    return cpu if cpu in _group(name)._device_types else device
