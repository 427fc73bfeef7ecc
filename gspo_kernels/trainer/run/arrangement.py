"""Which processes compute together: they share a model's weight matrices, or the tokens of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import all_reduce, group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from gspo_kernels.trainer.config import TrainConfig
from gspo_kernels.trainer.input_errors import ConfigError
from gspo_kernels.trainer.rows.context import Context


@dataclass(frozen=True)
class Arrangement:
    """What the processes share, seen from one of them.

    Those with parts of the same weight matrices follow each other, and then those with parts of the same
    sequences.

    Attributes:
        tensor: how many have a part of each weight matrix; 1: all weights are here, or FSDP's to gather.
        context: those that share sequences with this one, if any do.
        parts: of how many processes, or groups of them, each has its own part of a batch.
        part: which one this process works on.
        averaged: over how many processes DDP or FSDP averages gradients; 1: neither does.
        peers: the group of those that have the same of each weight matrix as this one, and another part of
            the batch or of its sequences; None: there are no others.
    """

    tensor: int = 1
    context: Context | None = None
    parts: int = 1
    part: int = 0
    averaged: int = 1
    peers: Any = None

    @classmethod
    def of(cls, accelerator: Any, config: TrainConfig) -> Arrangement:
        """As configuration and accelerate say; a `ConfigError` says what contradicts or excludes what."""
        count, index = accelerator.num_processes, accelerator.process_index
        tensor = _size(accelerator, config.parallel.tensor, "tensor", "tp")
        context = _size(accelerator, config.parallel.context, "context", "cp")
        _check(accelerator, config, tensor, context)
        together = tensor * context
        shared, peers = None, group.WORLD
        if context > 1:
            shared = Context(_group(accelerator, count // together, context, tensor))
        if tensor > 1:
            peers = None if tensor == count else _group(accelerator, 1, count // tensor, tensor)
        averaged = count // tensor if tensor == 1 or accelerator.is_fsdp2 else 1
        return cls(tensor, shared, count // together, index // together, averaged, peers)

    def sum_(self, values: Tensor) -> None:
        """Add up, in place, what this process and its peers have of something."""
        if self.peers is not None:
            all_reduce(values, group=self.peers)

    def sum_gradients(self, policy: Any) -> None:
        """Add up the gradients of this process and its peers, where neither DDP nor FSDP does it."""
        # all have run the same layers, so the same weights have gradients
        for p in policy.parameters() if self.averaged == 1 and self.peers is not None else ():
            if p.grad is not None:
                self.sum_(p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad)


def set_aside(policy: Any, earlier: dict[Tensor, Tensor]) -> None:
    """Take the gradients of whole weights out of sight of hooks that sum them over processes: transformers'
    own (5.23) do so with every backward, and would sum those of earlier micro-batches once more.
    """
    for p in policy.parameters():
        if p.grad is not None and not isinstance(p, DTensor):
            earlier[p] = p.grad if p not in earlier else earlier[p].add_(p.grad)
            p.grad = None


def _group(accelerator: Any, outer: int, size: int, inner: int) -> Any:
    """The group of ``size`` processes that has this one; neighbours in it are ``inner`` ranks apart."""
    names = ("outer", "group", "inner")
    mesh = init_device_mesh(accelerator.device.type, (outer, size, inner), mesh_dim_names=names)
    return mesh["group"].get_group()


def _size(accelerator: Any, asked: int | None, name: str, short: str) -> int:
    """How many processes share something."""
    launched = _launched(accelerator, short)
    if asked is not None and launched not in (1, asked):
        raise ConfigError(
            f"parallel.{name} must be {launched} or none, as accelerate's ParallelismConfig has "
            f"{short}_size={launched}; got {asked}"
        )
    return launched if asked is None else asked


def _launched(accelerator: Any, short: str) -> int:
    return int(getattr(getattr(accelerator, "parallelism_config", None), f"{short}_size", 1))


def _check(accelerator: Any, config: TrainConfig, tensor: int, context: int) -> None:
    """Refuse what cannot be had together."""
    asked = {"parallel.tensor": tensor, "parallel.context": context}
    asked = {name: size for name, size in asked.items() if size > 1}
    if not asked:
        return
    count, update = accelerator.num_processes, config.update
    got = ", ".join(f"{name} {size}" for name, size in asked.items())

    def require(held: bool, name: str, expected: str) -> None:
        if not held:
            raise ConfigError(f"{name} must be {expected}; got {got}")

    divisor = f"a divisor of the number of processes ({count})"
    require(count % (tensor * context) == 0, " times ".join(asked), divisor)
    if tensor > 1:
        launched = not accelerator.is_fsdp2 or _launched(accelerator, "tp") == tensor
        require(launched, "FSDP", f"off, or launched with a tp_size of {tensor} beside its dp_shard_size")
        alone = "0: peft makes adapters of this process's part of a weight alone"
        require(config.lora.rank == 0, "lora.rank", alone)
    if context > 1:
        require(update.layout == "packed", "update.layout", "'packed', the layout whose rows are cut")
    require(not update.batch_invariant, "update.batch_invariant", "off: ranks' sums round")
    served = "none: what a server says belongs to whole rows of one"
    require(config.distillation.url is None, "distillation.url", served)
