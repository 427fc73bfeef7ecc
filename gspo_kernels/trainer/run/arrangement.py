"""Which processes compute together: they share a model's weight matrices, or the tokens of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from gspo_kernels.trainer.config import TrainConfig
from gspo_kernels.trainer.input_errors import ConfigError
from gspo_kernels.trainer.rows.context import Context


@dataclass(frozen=True)
class Arrangement:
    """What the processes share, seen from one of them.

    Attributes:
        tensor: how many have a part of each weight matrix; 1: all weights are here, or FSDP's to gather.
        context: those that share sequences with this one, if any do.
        parts: of how many processes, or groups of them, each has its own part of a batch.
        part: which one this process works on.
        averaged: over how many processes gradients are averaged.
    """

    tensor: int = 1
    context: Context | None = None
    parts: int = 1
    part: int = 0
    averaged: int = 1

    @classmethod
    def of(cls, accelerator: Any, config: TrainConfig) -> Arrangement:
        """As configuration and accelerate say.

        Raises:
            ConfigError: they contradict each other, or want what cannot be had together.
        """
        count, index = accelerator.num_processes, accelerator.process_index
        tensor, context = (_size(accelerator, config, name) for name in ("tensor", "context"))
        _check(accelerator, config, tensor, context)
        if tensor > 1:
            return cls(tensor=tensor)
        shared = None
        if context > 1:
            shape, names = (count // context, context), ("parts", "context")
            mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=names)
            shared = Context(mesh["context"].get_group())
        return cls(context=shared, parts=count // context, part=index // context, averaged=count)


def _size(accelerator: Any, config: TrainConfig, name: str) -> int:
    """How many processes share something."""
    asked: int | None = getattr(config.parallel, name)
    short = {"tensor": "tp", "context": "cp"}[name]
    launched = int(getattr(getattr(accelerator, "parallelism_config", None), f"{short}_size", 1))
    if asked is not None and launched not in (1, asked):
        raise ConfigError(
            f"parallel.{name} must be {launched} or none, as accelerate's ParallelismConfig has "
            f"{short}_size={launched}; got {asked}"
        )
    return launched if asked is None else asked


def _check(accelerator: Any, config: TrainConfig, tensor: int, context: int) -> None:
    """Refuse what cannot be had together."""
    count, sharded = accelerator.num_processes, accelerator.is_fsdp2
    needs: list[tuple[bool, str, str]] = []
    if tensor > 1:
        needs = [
            (context == 1, "parallel.context", "1: sequences are whole where weight matrices are cut"),
            (not sharded, "FSDP", "off: it splits weights by itself, and the vocabulary is not cut then"),
            (tensor == count, "parallel.tensor", f"1, or the number of processes ({count})"),
            (config.lora.rank == 0, "lora.rank", "0: adapters are not cut along with their weights"),
        ]
    elif context > 1:
        packed = config.update.layout == "packed"
        needs = [
            (count % context == 0, "parallel.context", f"a divisor of the number of processes ({count})"),
            (packed, "update.layout", "'packed', the layout whose rows are cut"),
        ]
    if tensor > 1 or context > 1:
        needs.append((not config.update.batch_invariant, "update.batch_invariant", "off: ranks' sums round"))
        served = config.distillation.url is not None
        needs.append(
            (not served, "distillation.url", "none: what a server says belongs to whole rows of one")
        )
    for held, name, expected in needs:
        if not held:
            what = f"parallel.tensor {tensor}" if tensor > 1 else f"parallel.context {context}"
            raise ConfigError(f"{name} must be {expected}; got {what}")
