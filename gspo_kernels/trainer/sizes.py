"""How much is computed at a time: ``auto`` starts large and is halved when memory runs out."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from typing import Any

import torch

from gspo_kernels.trainer.config import InputError, TrainConfig

AUTO = {"micro_batch_tokens": 16384, "batch_size": 256}
"""Where ``auto`` starts on a GPU. On a CPU, where the system may end a process instead, it is a quarter."""

_LOGGER = logging.getLogger("gspo_kernels")


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

    def halve(self, error: str, *, alone: bool) -> None:
        """Free cached memory and halve the value, or raise an `InputError` with the options that help.

        ``alone``: one sequence at a time was tried, so that a smaller value does not help.
        """
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
