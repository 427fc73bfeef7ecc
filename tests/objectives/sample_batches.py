"""Every registered objective with the options worth testing, and batches with all that objectives need."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import gspo_kernels as gk
from tests.cases import Case, generator

EVERY = {name: getattr(gk.objectives, name) for name in gk.objectives.__all__}

OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "GRPO": ({"dual_clip": 1.5},),
    "GSPO": ({"clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.5},),
    "GSPOToken": ({"clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.5},),
    "LUSPO": ({"clip_low": 0.1, "clip_high": 0.15},),
    "TLGRPO": ({"clip_low": 0.1, "clip_high": 0.15},),
    "DrGRPO": ({"aggregation_constant": 16},),
    "CISPO": ({"min_ratio": 0.8, "max_ratio": 1.2},),
    "MinPRO": ({"min_ratio": 0.8, "max_ratio": 1.2},),
    "SPO": ({"eps": 0.15},),
    "DRPO": ({"eps": 0.1},),
    "CPPO": (
        {"bound": 0.05, "prefix_bound_low": 0.01, "prefix_bound_high": 0.03, "min_weight": 0.6},
        {"bound": 0.05, "prefix_bound_low": 0.0, "prefix_bound_high": 1.0, "min_weight": 0.1},
    ),
    "SSPO": ({"gate": "identity"},),
    "DHPO": ({"mix": 0.3, "sequence_clip_low": 0.1, "sequence_clip_high": 0.1}, {"mix": "entropy"}),
    "ESPO": ({"elbo_kl_beta": 0.0},),
    "TOPR": ({"ratio_level": "token"},),
    "DPPO": (
        {"bound_low": 0.02, "bound_high": 0.03},
        {"divergence": "kl", "bound_low": 0.01, "bound_high": 0.02},
    ),
    "PrimeIPO": ({"eps": 0.05, "max_ratio": 1.1}, {"kl_tau": 0.2}),
    "M2PO": ({"threshold": 0.01}, {"threshold": 0.02, "one_sided": False}),
    "REAL": ({"tau": 0.1, "threshold": 0.0},),
    "FSPO": ({"log_clip_low": 0.2, "log_clip_high": 0.3},),
    "CTPO": ({"log_clip_low": 0.2, "log_clip_high": 0.3, "power": 0.7, "log_dual_clip": 0.4},),
    "FIPO": (
        {"half_life": 1.5, "influence_low": 0.3, "influence_high": 0.5, "safe_ratio": 1.1},
        {"dual_clip": 1.3, "half_life": 3.0, "influence_high": 2.0},
        {"dual_clip": None},
    ),
    "DPO": ({"beta": 0.5, "min_gap": 1.0},),  # two advantages of a group differ by as much
    "TRPA": ({"beta": 0.7, "kl_coef": 0.2},),
    "EGSW": ({"alpha": 0.7, "temperature": 0.6, "dual_clip": 1.5},),
    "ClipCov": ({"clip_cov_ratio": 0.1, "clip_cov_lb": 0.001},),
    "KLCov": ({"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.6},),
    "ABCGRPO": ({"positive_low": 0.1, "positive_high": 0.3, "negative_low": 1.0, "negative_high": 0.05},),
}
"""Options to test besides an objective's defaults."""

NO_DEFAULTS = {"DrGRPO"}
"""Objectives that can't be made without options."""


def examples() -> list[gk.objectives.base.Objective]:
    """Return each objective with its defaults and with its ``OPTIONS``."""
    made = []
    for name, cls in EVERY.items():
        options = OPTIONS.get(name, ())
        made += [cls(**given) for given in (options if name in NO_DEFAULTS else ({}, *options))]
    return made


def name_of(objective: Any) -> str:
    changed = [
        f"{option.name}={value}"
        for option in dataclasses.fields(objective)
        if (value := getattr(objective, option.name)) != getattr(type(objective), option.name, None)
    ]
    return " ".join([type(objective).__name__, *changed])


def declaring() -> list[gk.objectives.base.Objective]:
    """Return an example of every set of declarations: others differ from it in the numbers of a formula."""
    names = ("coefficient_scope", "ratio_only", "factorizes", "zero_advantage_is_inactive", "needs")
    kinds = {
        (type(one), one.ratio_form() is None, *(getattr(one, n) for n in names)): one for one in examples()
    }
    return list(kinds.values())


every = pytest.mark.parametrize("objective", examples(), ids=name_of)
every_declaration = pytest.mark.parametrize("objective", declaring(), ids=name_of)


@dataclass(frozen=True)
class Batch:
    """Padded arguments of ``policy_loss`` in fp64; masked positions hold NaN."""

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor | None
    loss_mask: Tensor
    terms: dict[str, Tensor] = field(default_factory=dict)

    def call(self, function: Any, objective: Any, **changes: Any) -> Any:
        """Call ``policy_loss`` or ``policy_coefficients`` on the batch, with changed arguments."""
        names = ("logprobs", "old_logprobs", "advantages", "loss_mask")
        arguments = {name: getattr(self, name) for name in names} | self.terms | changes
        tokens = [arguments.pop(name) for name in names[:3]]
        return function(*tokens, objective=objective, **arguments)

    def each(self, change: Any) -> Batch:
        """Return the batch with every tensor changed."""
        tensors = (self.logprobs, self.old_logprobs, self.advantages, self.loss_mask)
        terms = {name: change(value) for name, value in self.terms.items()}
        return Batch(*(None if x is None else change(x) for x in tensors), terms)

    def packed(self) -> Batch:
        """Return the tokens, masked ones too, one sequence after the other; ``cu_seqlens`` is a term."""
        rows, width = self.logprobs.shape
        flat = self.each(lambda value: value.flatten())
        flat.terms["cu_seqlens"] = torch.arange(0, rows * width + 1, width, dtype=torch.int32)
        return flat


def coefficients(batch: Batch, objective: Any, **changes: Any) -> Tensor:
    return batch.call(gk.policy_coefficients, objective, **changes)


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


ADVANTAGES = (1.0, -0.7, 0.0, -1.3, 2.0, 0.4)


def make_batch(
    objective: Any,
    *,
    seed: int = 0,
    spread: float = 0.25,
    length: int = 7,
    token_advantages: bool = False,
    everything: bool = False,
) -> Batch:
    """Draw six sequences, one of them empty, with holes in their masks.

    Each sequence's log-ratios are around 0.0, +-0.05 or +-0.2, so that all branches of all clips are reached.
    ``everything`` adds token weights and rollout weights.
    """
    rng = generator(seed)
    shape = (len(ADVANTAGES), length)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng, dtype=torch.float64)

    def uniform(*size: int) -> Tensor:
        return 0.5 + torch.rand(*size, generator=rng, dtype=torch.float64)

    mask = torch.rand(shape, generator=rng) < 0.75
    mask[:, 0] = True
    mask[5] = False
    logprobs = -normal(*shape).abs() - 0.05
    center = torch.tensor([0.2, -0.2, 0.05, 0.2, -0.05, 0.0], dtype=torch.float64).unsqueeze(1)
    old = (logprobs - center - spread * normal(*shape)).clamp(max=-1e-3)
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    if token_advantages:
        advantages = advantages.unsqueeze(1) * normal(*shape).sign()
    has = {
        "token_weights": uniform(*shape),
        "lengths": mask.sum(1) + 2.5,
        "ref_logprobs": logprobs + 0.3 * normal(*shape),
        "turn_ids": torch.randint(-1, 2, shape, generator=rng),
        "group_ids": torch.tensor([0, 0, 1, 1, 0, 1]),
        "entropy": uniform(*shape),
        "rollout_weights": uniform(len(ADVANTAGES)),
    }
    has["entropy"][3] = 1.0  # the same for all tokens of one sequence
    wanted = {*objective.needs, *(("token_weights", "rollout_weights") if everything else ())}
    for name in ("token_weights", "ref_logprobs", "entropy"):
        has[name] = has[name].masked_fill(~mask, float("nan"))
    return Batch(
        logprobs.masked_fill(~mask, float("nan")),
        old.masked_fill(~mask, float("nan")),
        advantages if objective.needs_advantages else None,
        mask,
        {name: value for name, value in has.items() if name in wanted},
    )


def from_hidden_states(batch: Batch, objective: Any, vocabulary: int) -> Case:
    """Return a case with the batch's ratios to old and reference log-probs, from hidden states and a head."""
    rng, shape = generator(1), batch.logprobs.shape
    labels = torch.randint(vocabulary, shape, generator=rng)
    hidden = torch.randn(*shape, 8, generator=rng, dtype=torch.float64)
    weight = 0.3 * torch.randn(vocabulary, 8, generator=rng, dtype=torch.float64)
    moved = gk.token_logprobs(hidden @ weight.T, labels).logprobs - batch.logprobs
    terms = {name: value for name, value in batch.terms.items() if name not in ("entropy", "cu_seqlens")}
    if "ref_logprobs" in terms:
        terms["ref_logprobs"] = terms["ref_logprobs"] + moved
    return Case(
        "linear", labels, {"hidden": hidden, "weight": weight}, batch.old_logprobs + moved, batch.advantages,
        cu_seqlens=batch.terms.get("cu_seqlens"), loss_mask=batch.loss_mask, terms=terms,
        needs_entropy="entropy" in objective.needs,
    )  # fmt: skip
