"""Which recipe a configuration asks for."""

from __future__ import annotations

from typing import Any

from gspo_kernels.trainer.config import TrainConfig
from gspo_kernels.trainer.recipes.igrpo import IGRPO
from gspo_kernels.trainer.recipes.plain import Recipe
from gspo_kernels.trainer.recipes.turns import Turns
from gspo_kernels.trainer.recipes.veripo import VeriPO


def make_recipe(config: TrainConfig, *parts: Any) -> Recipe | VeriPO:
    """Return the recipe that the configuration asks for, made of what `Recipe` takes after it."""
    kind = IGRPO if config.igrpo.drafts > 0 else Turns if config.turns.count > 1 else Recipe
    recipe = kind(config, *parts)
    return VeriPO(recipe) if config.veripo.dpo_steps > 0 else recipe
