"""Processes and memory: accelerate's setup, work shared by processes, gathered weights, sizes that fit."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import is_initialized
from accelerate.utils import gather_object, set_seed
from accelerate.utils.memory import clear_device_cache
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from gspo_kernels.trainer.config import InputError, TrainConfig, replaced

_LOGGER = logging.getLogger("gspo_kernels")
_Result = TypeVar("_Result")


def set_up(config: Any, folder: str | Path = ".", accelerator: Any = None) -> tuple[Any, Any]:
    """Return accelerate's `Accelerator`, by default a new one with trackers that write to a folder; and the
    configuration, with the accelerator's precision if ``update.precision`` is auto.
    """
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


def process_state() -> Any:
    """Return accelerate's state, or that of a single process without an `Accelerator` (``gspo export``).

    `PartialState` would join the processes of a launcher's environment, which may not all call.
    """
    if is_initialized():
        return PartialState()
    return SimpleNamespace(num_processes=1, process_index=0, is_main_process=True, device=torch.device("cpu"))


def on_all(work: Callable[[], _Result]) -> list[_Result]:
    """Run ``work`` on every process and return the results of all; if one fails, all raise.

    Otherwise the others would wait forever in the next collective.
    """
    if process_state().num_processes == 1:
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


def on_main(work: Callable[[], _Result]) -> _Result:
    """Run ``work`` in the first process and return its result in all; if it fails, all raise."""
    result: Any = on_all(lambda: work() if process_state().is_main_process else None)[0]
    return cast(_Result, result)


def map_shares(count: int, work: Callable[[list[int]], _Result]) -> list[_Result]:
    """Call ``work`` in each process on its share of ``range(count)``; return all results, in order."""
    state = process_state()
    share = np.array_split(np.arange(count), state.num_processes)[state.process_index].tolist()
    parts = on_all(lambda: work(share) if share else None)
    return [part for part in parts if part is not None]


def seed_everything(*numbers: int) -> None:
    """Seed the generators of Python, NumPy and torch from all numbers."""
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


AUTO = {"micro_batch_tokens": 16384, "batch_size": 256}
"""The first value of ``auto`` on a GPU; a quarter of it on a CPU, where the system may kill the process."""


@dataclass
class AutoSize:
    """The value of ``update.micro_batch_tokens`` or ``rollout.batch_size``."""

    option: str
    value: int
    shrinks: bool  # when memory runs out: for auto, in a single process

    @classmethod
    def of(cls, config: TrainConfig, option: str) -> AutoSize:
        """Return the configured size. ``auto`` does not shrink in several processes, which must agree."""
        section, _, name = option.partition(".")
        value = getattr(getattr(config, section), name)
        if value != "auto":
            return cls(option, value, False)
        start = AUTO[name] if process_state().device.type == "cuda" else AUTO[name] // 4
        return cls(option, start, process_state().num_processes == 1)

    def fit(self, work: Callable[[], _Result]) -> _Result:
        """Return the result of ``work``; while memory runs out, halve the value and call it again.

        Every attempt starts with the same random numbers. If a smaller value is not possible, an `InputError`
        names other options that help.
        """
        while True:
            state = torch.get_rng_state()
            cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
            try:
                return work()
            except RuntimeError as error:
                message = str(error)
                on_cpu = "can't allocate memory" in message
                if not (on_cpu or isinstance(error, torch.OutOfMemoryError)):
                    raise
            # Outside of the except block, where the traceback would hold the tensors of the failed attempt.
            if self.value == 1 or not self.shrinks:
                smaller = "rollout.max_new_tokens" if self.value == 1 else self.option
                helps = f"a smaller {smaller}, update.gradient_checkpointing or lora.rank"
                tried = f"out of memory with {self.option} = {self.value}; what helps: {helps}"
                raise InputError(f"{tried}; --resume continues from the last checkpoint ({message:.200})")
            self.value //= 2
            clear_device_cache(garbage_collection=True)
            _LOGGER.warning("out of memory: %s is halved to %d", self.option, self.value)
            torch.set_rng_state(state)
            torch.cuda.set_rng_state_all(cuda_states)
