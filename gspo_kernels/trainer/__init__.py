"""The bundled trainer: GSPO for transformers models in a few readable files.

``GSPOTrainer`` is imported on first use, because transformers takes seconds to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gspo_kernels.trainer.config import TrainConfig
from gspo_kernels.trainer.input_errors import InputError
from gspo_kernels.trainer.run.config_file import load_config

if TYPE_CHECKING:
    from gspo_kernels.trainer.trainer import GSPOTrainer

__all__ = ["GSPOTrainer", "InputError", "TrainConfig", "load_config"]


def __getattr__(name: str) -> Any:
    if name == "GSPOTrainer":
        from gspo_kernels.trainer.trainer import GSPOTrainer

        return GSPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
