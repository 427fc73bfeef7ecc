"""Several processes: accelerate's setup, work that raises on all if it fails on one, gathered weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from gspo_kernels.trainer.config import InputError, replaced

_Result = TypeVar("_Result")

ALONE: Any = SimpleNamespace(
    num_processes=1, process_index=0, is_main_process=True, is_fsdp2=False, device=torch.device("cpu")
)
"""A substitute for accelerate's `Accelerator` where one process runs and nothing is trained."""


def set_up(config: Any, folder: str | Path = ".", accelerator: Any = None) -> tuple[Any, Any]:
    """Return accelerate's `Accelerator`, by default a new one with trackers that write to a folder; and the
    configuration, with the accelerator's precision if ``update.precision`` is auto.
    """
    from accelerate import Accelerator

    started, precision = int(os.environ.get("WORLD_SIZE", "1")), config.update.precision
    if precision == "auto" and torch.cuda.is_available():
        precision = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    try:
        accelerator = accelerator or Accelerator(
            mixed_precision="bf16" if precision == "bf16" else "no",
            log_with=list(config.trackers) or None,
            project_dir=folder,
            # otherwise, under torchrun without GPUs, accelerate sets up each process as the only one
            cpu=True if started > 1 and not torch.accelerator.is_available() else None,
        )
    except (ValueError, RuntimeError, ImportError) as error:
        option = "trackers" if "logging" in str(error) else "update.precision, or accelerate's environment"
        raise InputError(f"{option}: {error}") from error
    installed = [str(getattr(tracker, "value", tracker)) for tracker in accelerator.log_with]
    for name in config.trackers:  # accelerate skips trackers that are not installed
        if name not in installed:
            raise InputError(f"trackers: {name} is not installed")
    check_processes(accelerator)
    used = "bf16" if accelerator.mixed_precision == "bf16" else "fp32"
    if config.update.precision not in ("auto", used):
        raise InputError(
            f"update.precision: got {config.update.precision}, expected the Accelerator's {used}"
        )
    return accelerator, replaced(config, "update", precision=used)


def check_processes(accelerator: Any) -> None:
    """Refuse processes that accelerate did not set up together, and unsupported setups."""
    started, count = int(os.environ.get("WORLD_SIZE", "1")), accelerator.num_processes
    kind = accelerator.distributed_type.value
    if started != count:
        raise InputError(
            f"{started} processes were started and accelerate set up {count}, so each would train alone; "
            f"start them with accelerate launch, or torchrun --nproc_per_node {started} -m gspo_kernels.cli"
        )
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU") and not accelerator.is_fsdp2:
        raise InputError(f"accelerate set up {kind}; supported are one process, DDP and FSDP version 2")
    sharded, mixed = kind == "FSDP", accelerator.mixed_precision
    plugin: Any = accelerator.state.fsdp_plugin if sharded else None
    parallel = getattr(accelerator, "parallelism_config", None)
    policy = getattr(plugin, "mixed_precision_policy", None) if mixed == "no" else None  # else accelerate's
    micro_batches = "gradient_accumulation_steps (update.micro_batch_tokens cuts minibatches)"
    checkpointing = "activation_checkpointing (update.gradient_checkpointing does it)"
    for name, value, *expected in (  # other values change numbers, or the names in checkpoints
        ("mixed_precision", mixed, "no", "bf16"),
        (micro_batches, accelerator.gradient_accumulation_steps, 1),
        ("dynamo_backend", accelerator.state.dynamo_plugin.backend.value, "NO"),
        *((f"{axis}_size", getattr(parallel, f"{axis}_size", 1), 1) for axis in ("tp", "cp", "sp")),
        (checkpointing, getattr(plugin, "activation_checkpointing", False), False),
        ("ignored_modules", getattr(plugin, "ignored_modules", None), None),
        ("mixed_precision_policy", policy, None),
    ):
        if value not in expected:
            raise InputError(f"accelerate's {name}: got {value}, expected {' or '.join(map(str, expected))}")
    if sharded and mixed != "no":
        # By default FSDP also rounds the policy's inputs (advantages) and outputs (log-probs).
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )


def on_all(accelerator: Any, work: Callable[[], _Result]) -> list[_Result]:
    """Run ``work`` on every process and return the results of all; if one fails, all raise.

    Otherwise the others would wait forever in the next collective.
    """
    from accelerate.utils import gather_object

    if accelerator.num_processes == 1:
        return [work()]
    outcome: Any
    try:
        outcome = work()
    except (Exception, SystemExit) as error:
        known = isinstance(error, InputError | OSError)
        outcome = error if known else RuntimeError(f"{type(error).__name__}: {error}")
    outcomes: list[Any] = gather_object([outcome])
    for each in outcomes:
        if isinstance(each, Exception):
            raise each
    return outcomes


def on_main(accelerator: Any, work: Callable[[], _Result]) -> _Result | None:
    """Run ``work`` in the first process and return its result in all; if it fails, all raise."""
    return on_all(accelerator, lambda: work() if accelerator.is_main_process else None)[0]


def map_shares(accelerator: Any, count: int, work: Callable[[list[int]], _Result]) -> list[_Result]:
    """Call ``work`` in each process on its share of ``range(count)``; return all results, in order."""
    share = np.array_split(np.arange(count), accelerator.num_processes)[accelerator.process_index].tolist()
    parts = on_all(accelerator, lambda: work(share) if share else None)
    return [part for part in parts if part is not None]


def seed_everything(*numbers: int) -> None:
    """Seed the generators of Python, NumPy and torch from all numbers."""
    from accelerate.utils import set_seed

    set_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


@contextmanager
def whole_weights(accelerator: Any, policy: nn.Module) -> Iterator[None]:
    """Gather all weights on every device: processes may then run different numbers of forward passes."""
    modules = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            # By FSDP's default, the outermost module keeps its weights until the backward.
            reshards = module is not policy and bool(accelerator.state.fsdp_plugin.reshard_after_forward)
            module.set_reshard_after_forward(reshards, recurse=False)
        reshard(policy)


def reshard(policy: nn.Module) -> None:
    """Free gathered weights; FSDP keeps those of the outermost module after a forward without backward."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
