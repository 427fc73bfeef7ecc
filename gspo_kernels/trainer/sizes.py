"""How much is computed at a time: ``auto`` starts large and is halved when memory runs out."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from gspo_kernels.trainer.config import InputError, TrainConfig

AUTO = {"micro_batch_tokens": 16384, "batch_size": 256}
"""Where ``auto`` starts on a GPU. On a CPU, where the system may end a process instead, it is a quarter."""

_LOGGER = logging.getLogger("gspo_kernels")
_Result = TypeVar("_Result")


@dataclass
class Size:
    """The value of ``update.micro_batch_tokens`` or ``rollout.batch_size``."""

    option: str
    value: int
    shrinks: bool  # if memory runs out: for auto, in a single process

    @classmethod
    def of(cls, config: TrainConfig, option: str, accelerator: Any) -> Size:
        """Return the configured size. In several processes, which must agree, ``auto`` does not shrink."""
        section, _, name = option.partition(".")
        value = getattr(getattr(config, section), name)
        if value != "auto":
            return cls(option, value, False)
        start = AUTO[name] if accelerator.device.type == "cuda" else AUTO[name] // 4
        return cls(option, start, accelerator.num_processes == 1)

    def fit(self, work: Callable[[], _Result], *, alone: Callable[[], bool]) -> _Result:
        """Return what ``work`` returns. While memory runs out, halve the value and call it again.

        Every attempt starts with the same random numbers. ``alone`` tells whether one sequence at a time was
        tried, so that a smaller value does not help: an `InputError` then names the options that do.
        """
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        states = torch.get_rng_state(), [torch.cuda.get_rng_state(device) for device in devices]
        while True:
            try:
                return work()
            except RuntimeError as error:
                if not ran_out_of_memory(error):
                    raise
                message = str(error)
            # Out of the except block, no traceback holds the tensors of the failed attempt.
            self._halve(message, alone())
            torch.set_rng_state(states[0])
            for device, state in zip(devices, states[1], strict=True):
                torch.cuda.set_rng_state(state, device)

    def _halve(self, error: str, alone: bool) -> None:
        if alone or not self.shrinks:
            smaller = "a smaller rollout.max_new_tokens" if alone else f"a smaller {self.option}"
            helps = f"{smaller}, update.gradient_checkpointing or lora.rank"
            tried = f"out of memory with {self.option} = {self.value}; what helps: {helps}"
            raise InputError(f"{tried}; --resume continues from the last checkpoint ({error:.200})")
        self.value //= 2
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        _LOGGER.warning("out of memory: %s is halved to %d", self.option, self.value)


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error says that a GPU, or the CPU, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
