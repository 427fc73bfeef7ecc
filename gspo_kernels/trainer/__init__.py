"""The bundled trainer: GSPO for transformers models, read from ``loop.py`` outwards.

``GSPOTrainer`` is imported on first use, because torch and transformers take seconds to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gspo_kernels.trainer.config import InputError, TrainConfig, load_config

if TYPE_CHECKING:
    from gspo_kernels.trainer.loop import GSPOTrainer

__all__ = ["GSPOTrainer", "InputError", "TrainConfig", "load_config"]


def __getattr__(name: str) -> Any:
    if name == "GSPOTrainer":
        from gspo_kernels.trainer.loop import GSPOTrainer

        return GSPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
