"""How much is computed at a time: ``auto`` starts large and is halved when memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from accelerate.utils.memory import clear_device_cache

from gspo_kernels.trainer.config import InputError, TrainConfig

AUTO = {"micro_batch_tokens": 16384, "batch_size": 256}
"""The first value of ``auto`` on a GPU; a quarter of it on a CPU, where the system may kill the process."""

_LOGGER = logging.getLogger("gspo_kernels")
_Result = TypeVar("_Result")


@dataclass
class Size:
    """The value of ``update.micro_batch_tokens`` or ``rollout.batch_size``."""

    option: str
    value: int
    shrinks: bool  # when memory runs out: for auto, in a single process

    @classmethod
    def of(cls, config: TrainConfig, option: str, accelerator: Any) -> Size:
        """Return the configured size. ``auto`` does not shrink in several processes, which must agree."""
        section, _, name = option.partition(".")
        value = getattr(getattr(config, section), name)
        if value != "auto":
            return cls(option, value, False)
        start = AUTO[name] if accelerator.device.type == "cuda" else AUTO[name] // 4
        return cls(option, start, accelerator.num_processes == 1)

    def fit(self, work: Callable[[], _Result]) -> _Result:
        """Return the result of ``work``; while memory runs out, halve the value and call it again.

        Every attempt starts with the same random numbers. If a smaller value is not possible, an `InputError`
        names other options that help.
        """
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        while True:
            states = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
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
            torch.set_rng_state(states[0])
            for device, state in zip(devices, states[1], strict=True):
                torch.cuda.set_rng_state(state, device)
