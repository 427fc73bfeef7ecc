"""Random calls of what takes no label: problems of the tests of selected ids and of distillation, drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests import test_distillation, test_selected
from tests.fuzz import DTYPES


@dataclass(frozen=True)
class Drawn:
    """Arguments of ``check`` of either file, which judges by the same call in plain PyTorch."""

    check: Callable[..., None]
    arguments: dict[str, Any]

    def attempt(self, backend: str) -> None:
        self.check(backend=backend, **self.arguments)


def draw(seed: int, largest: int) -> Drawn:
    dice = random.Random(seed)
    V, linear = min(largest, dice.choice((2, 5, 61, 613, 4097))), dice.random() < 0.5
    dtype = dice.choice(DTYPES[:-1])  # fp64's own roundings are no truth to judge many draws by
    if dtype == torch.float16:
        V = min(V, 61)  # so that hardly a gradient is below its normal numbers
    shared: dict[str, Any] = {"V": V, "linear": linear, "dtype": dtype, "first": seed}
    shared["options"] = dice.choice(("plain", "transformed"))
    if linear:
        shared["call"] = {"max_chunk_bytes": dice.choice((1, 2, 5)) * V * 8}
    if dice.random() < 0.5:
        K = min(V, dice.choice((1, 2, 5, 20, V)))
        layout, within = dice.choice(("padded", "packed")), dice.random() < 0.3
        return Drawn(test_selected.check, shared | {"K": K, "layout": layout, "within": within})
    form: dict[str, Any] = {"beta": dice.choice((0.0, 0.1, 0.5, 1.0))}
    # rounding turns the choice of ids where two logits are alike
    if not linear and dtype == torch.float32 and dice.random() < 0.4:
        form |= {"top_k": min(V, dice.choice((1, 3, 30))), "add_tail": dice.random() < 0.5}
        form["top_k_of"] = dice.choice(("teacher", "student"))
    packed = dice.random() < 0.3
    return Drawn(test_distillation.check, shared | {"forms": [form], "packed": packed})
