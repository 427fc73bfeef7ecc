"""Teachers, drawn: a head of their own or logits, or log-probs that an engine has given of some ids."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests import oracle
from tests.cases import scores_of


def draw_form(dice: random.Random, vocabulary: int, over_ids: bool = True) -> dict[str, Any]:
    """Which divergence."""
    form: dict[str, Any] = {"beta": dice.choice((0.0, 0.1, 0.5, 1.0))}
    if over_ids and dice.random() < 0.4:
        form["top_k"] = min(vocabulary, dice.choice((1, 3, 30)))
        form["add_tail"] = dice.random() < 0.5
        form["top_k_of"] = dice.choice(("teacher", "student"))
    return form


def draw_scored(
    dice: random.Random, rng: torch.Generator, shape: tuple[int, ...], vocabulary: int
) -> dict[str, Tensor]:
    """Ids of tokens and their log-probs: some places without, some ids twice.

    One id of the vocabulary is nowhere: what an engine says to be left is infinitely far from nothing.
    """
    ids = torch.randint(0, vocabulary - 1, (*shape, dice.choice((1, 2, 5, 20))), generator=rng)
    ids[torch.rand(ids.shape, generator=rng) < 0.2] = -100
    logits = 2 * torch.randn(*shape, vocabulary, generator=rng, dtype=torch.float64)
    logprobs = logits.log_softmax(-1).gather(-1, ids.clamp(min=0)).float()
    ids = ids.to(dice.choice((torch.int64, torch.int32)))
    return {"ids": ids, "logprobs": logprobs.masked_fill(ids < 0, math.nan)}


def draw_side(
    dice: random.Random,
    normal: Callable[..., Tensor],
    linear: bool,
    shape: tuple[int, ...],
    vocabulary: int,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Logits of tokens, or what they are the product of."""
    size, width = dice.choice((0.1, 2.0, 10.0)), dice.choice((1, 3, 16))
    if not linear:
        return {"logits": (size * normal(*shape, vocabulary)).to(dtype)}
    found = {
        "hidden": normal(*shape, width).to(dtype),
        "weight": (size / width**0.5 * normal(vocabulary, width)).to(dtype),
    }
    if dice.random() < 0.5:
        found["bias"] = normal(vocabulary).to(dtype)
    return found


def near_a_tie(
    inputs: dict[str, Tensor], options: dict[str, Any], teacher: dict[str, Any], counted: Tensor
) -> bool:
    """Whether rounding could turn which ids are the ``top_k`` of a student's or a teacher's."""
    k = teacher.get("top_k", 0)
    if not k:
        return False
    sides = ("hidden", "weight", "bias", "logits")
    side = {name: teacher[name] for name in sides if name in teacher}
    if teacher["top_k_of"] == "student":
        side = inputs
    else:
        options = teacher
    how = {name: options[name] for name in ("logit_scale", "softcap") if name in options}
    for row in scores_of({name: value.double() for name, value in side.items()})[counted]:
        for values, least in ((row, 1e-5 * float(row.abs().max())), (oracle.transformed(row, 0, **how), 0.0)):
            signed = values * (-1 if how.get("logit_scale", 1.0) < 0 and values is row else 1)
            leading = signed.topk(min(k + 1, len(row))).values
            if len(leading) > k and float(leading[k - 1] - leading[k]) <= least:
                return True
    return False
