"""Calls of the entries that take labels, drawn from a seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from tests import oracle
from tests.cases import AGGREGATIONS, KIND, Case, draw_kept, offsets, pad
from tests.fuzz import DTYPES
from tests.judging import expect, true_logprobs

ENTRIES = tuple(KIND)
SCHEDULES = ("auto", "known", "aligned", "deferred", "frozen", "two_pass")
POISON = (math.nan, math.inf, -math.inf)


def shown(values: dict[str, Any]) -> dict[str, Any]:
    """Of tensors what they are like."""
    return {
        name: (value.dtype, tuple(value.shape), value.stride()) if isinstance(value, Tensor) else value
        for name, value in values.items()
    }


@dataclass(frozen=True)
class Drawn:
    entry: str
    case: Case
    objective: Any
    options: dict[str, Any]
    factor: float
    twice: bool

    def __str__(self) -> str:
        case, inputs = self.case, shown(self.case.inputs)
        layout = "padded" if case.cu_seqlens is None else f"packed {case.cu_seqlens.tolist()}"
        return (
            f"{self.entry} {layout} {inputs} {self.objective} {case.terms} {case.logit_options} "
            f"{self.options} old {case.old_logprobs is not None} "
            f"factor {self.factor} twice {self.twice}"
        )


class Draw:
    """One call, drawn from a seed."""

    def __init__(self, seed: int, largest: int):
        self.dice, self.rng, self.largest = random.Random(seed), torch.Generator().manual_seed(seed), largest

    def chance(self, probability: float) -> bool:
        return self.dice.random() < probability

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return 0.5 + torch.rand(*shape, generator=self.rng, dtype=torch.float64).float()

    def call(self) -> Drawn:
        while True:
            drawn = self._call()
            clean = cleaned(drawn.case)
            if near_a_clip_bound(clean, drawn.objective) or not fits(clean, drawn.objective, 1.0):
                continue
            return drawn if fits(clean, drawn.objective, drawn.factor) else replace(drawn, factor=1.0)

    def _call(self) -> Drawn:
        dice = self.dice
        entry = dice.choice(ENTRIES)
        objective = self.objective()
        lengths = tuple(dice.choice((0, 1, 1, 2, 3, 5, 8)) for _ in range(dice.choice((0, 1, 2, 3, 4))))
        if self.chance(0.05):
            lengths = (0,) * len(lengths)
        if sum(lengths) == len(lengths):
            lengths = (*lengths, 0)  # one number per sequence, or one per token: the shape must tell
        tokens, dtype = sum(lengths), dice.choice(DTYPES)
        vocabulary = min(self.largest, max(1, round(math.exp(dice.uniform(0.0, math.log(5000))))))
        labels = torch.randint(0, vocabulary, (tokens,), generator=self.rng)
        options = self.logit_options(len(lengths)) if KIND[entry] != "logprobs" else {}
        if KIND[entry] != "logprobs" and self.chance(0.25):
            options["kept_ids"] = draw_kept(labels, vocabulary, dice.choice((1, 2, 7, 40)), self.rng)
        inputs = self.inputs(KIND[entry], labels, vocabulary, dtype, options)
        mask = torch.rand(tokens, generator=self.rng) < 0.8 if self.chance(0.6) else None
        terms = self.terms(objective, lengths)
        if KIND[entry] == "logprobs" and "entropy_coef" in terms:
            inputs["entropy"] = self.normal(tokens).abs().to(dtype)
        case = Case(
            kind=KIND[entry],
            labels=labels.to(dice.choice((torch.int64, torch.int32))),
            inputs=inputs,
            old_logprobs=None,
            advantages=self.advantages(objective, lengths),
            cu_seqlens=offsets(lengths),
            loss_mask=mask,
            terms=terms,
            logit_options=options,
        )
        truth = true_logprobs(case)
        statistics = torch.float64 if dtype == torch.float64 else torch.float32
        if not self.chance(0.3):
            old = (truth - self.log_ratios(lengths)).clamp(max=0.0)
            case = replace(case, old_logprobs=old.to(statistics))
        if "ref_logprobs" in terms:
            case = replace(
                case, terms=terms | {"ref_logprobs": (truth + 0.2 * self.normal(tokens)).to(statistics)}
            )
        by_labels = entry in ("fused_policy_loss", "fused_linear_policy_loss")
        case = self.laid_out(self.poisoned(case), by_labels)
        factor = dice.choice((1.0, 1.0, 0.5, -3.0, 0.0, 65536.0, 65536.0))
        return Drawn(entry, case, objective, self.options(entry, case, vocabulary), factor, self.chance(0.1))

    def objective(self) -> Any:
        dice = self.dice
        aggregation = dice.choice(AGGREGATIONS)
        shared = {
            "aggregation": aggregation,
            "aggregation_constant": 6.0 if aggregation == "constant" else None,
        }
        kind = dice.choice((gk.GSPO, gk.GSPO, gk.GSPOToken, gk.GRPO, gk.Linear))
        if kind is gk.Linear:
            return gk.Linear(**shared)
        low, high = dice.choice(((0.2, 0.2), (0.1, 0.3)) if kind is gk.GRPO else ((3e-4, 4e-4), (0.2, 0.2)))
        return kind(clip_low=low, clip_high=high, dual_clip=dice.choice((None, None, 1.5)), **shared)

    def log_ratios(self, lengths: tuple[int, ...]) -> Tensor:
        """Tokens around what their sequence has, which is at times far outside of any clip range."""
        centre = [self.dice.choice((0.0, 1e-4, 1e-3, -1e-3, 0.5, -0.5, 20.0, -20.0)) for _ in lengths]
        spread = self.dice.choice((0.0, 1e-3, 0.3))
        parts = [c + spread * self.normal(n) for c, n in zip(centre, lengths, strict=True)]
        return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])

    def advantages(self, objective: Any, lengths: tuple[int, ...]) -> Tensor | None:
        if isinstance(objective, gk.Linear):
            return None
        by_token = not isinstance(objective, gk.GSPO) and self.chance(0.3)
        values = self.normal(sum(lengths) if by_token else len(lengths)).float()
        return torch.where(torch.rand(values.shape, generator=self.rng) < 0.2, 0.0, values)

    def terms(self, objective: Any, lengths: tuple[int, ...]) -> dict[str, Any]:
        dice, tokens, linear = self.dice, sum(lengths), isinstance(objective, gk.Linear)
        terms: dict[str, Any] = {}
        if linear or self.chance(0.15):
            terms["token_weights"] = self.uniform(tokens) * (dice.choice((1.0, -1.0)) if linear else 1.0)
        if self.chance(0.25):
            terms |= {"ref_logprobs": None, "kl_estimator": dice.choice(("k1", "k2", "k3"))}
            terms["kl_beta"] = self.uniform(tokens) if self.chance(0.3) else 0.1
            if not linear and self.chance(0.3):
                terms["kl_ratio_weighted"] = True
        if self.chance(0.2):
            terms["entropy_coef"] = 0.1 * self.uniform(tokens) if self.chance(0.3) else 0.05
        if self.chance(0.2):
            terms["rollout_weights"] = self.uniform(tokens if self.chance(0.5) else len(lengths))
        if self.chance(0.15):
            terms["lengths"] = torch.tensor([length + 1.5 for length in lengths])
        if self.chance(0.2):
            terms["normalizer"] = torch.tensor(5.0) if self.chance(0.5) else 7.5
        return terms

    def logit_options(self, sequences: int) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.chance(0.4):
            options["temperature"] = self.uniform(sequences) if self.chance(0.5) else 0.7
        if self.chance(0.3):
            options["softcap"] = self.dice.choice((3.0, 30.0))
        if self.chance(0.3):
            options["logit_scale"] = self.dice.choice((0.3, 1.7, -0.4))
        return options

    def inputs(
        self, kind: str, labels: Tensor, vocabulary: int, dtype: torch.dtype, options: dict[str, Any]
    ) -> dict[str, Tensor]:
        tokens, size = labels.numel(), self.dice.choice((0.1, 2.0, 2.0, 30.0))
        if kind == "logprobs":
            return {"logprobs": -self.normal(tokens).abs().to(dtype)}
        # a label keeps a finite logit: without one there is no gradient to compare
        impossible = (torch.rand(vocabulary, generator=self.rng) < 0.2) & ~torch.isin(
            torch.arange(vocabulary), labels
        )
        if self.chance(0.8) or options.get("logit_scale", 1.0) < 0:
            impossible[:] = False
        if kind == "logits":
            logits = (size * self.normal(tokens, vocabulary)).to(dtype)
            return {"logits": logits.masked_fill(impossible, -math.inf)}
        width = self.dice.choice((1, 3, 16, 40))
        inputs = {
            "hidden": self.normal(tokens, width).to(dtype),
            "weight": (size / width**0.5 * self.normal(vocabulary, width)).to(dtype),
        }
        if self.chance(0.5):
            inputs["bias"] = self.normal(vocabulary).to(dtype).masked_fill(impossible, -math.inf)
        return inputs

    def poisoned(self, case: Case) -> Case:
        """What doesn't count may hold anything."""
        hole = ~case.counted
        if not hole.any() or self.chance(0.3):
            return case

        def spoil(value: Tensor | None) -> Tensor | None:
            if value is None or value.shape[:1] != hole.shape:
                return value
            if not value.is_floating_point():
                return value
            bad = torch.tensor([self.dice.choice(POISON) for _ in hole], dtype=value.dtype)
            return torch.where(
                hole.view(-1, *(1,) * (value.ndim - 1)), bad.view(-1, *(1,) * (value.ndim - 1)), value
            )

        rows = ("logits", "hidden", "logprobs")
        terms = dict(case.terms)
        if "ref_logprobs" in terms:
            terms["ref_logprobs"] = spoil(terms["ref_logprobs"])
        return replace(
            case,
            inputs={name: spoil(value) if name in rows else value for name, value in case.inputs.items()},
            old_logprobs=spoil(case.old_logprobs),
            terms=terms,
        )

    def laid_out(self, case: Case, by_labels: bool) -> Case:
        """Padded or packed, a mask of any dtype or (``by_labels``) ignored labels, any strides."""
        ignored = by_labels and case.loss_mask is not None and self.chance(0.3)
        if ignored:
            labels = case.labels.masked_fill(~case.loss_mask, case.ignore_index)
            case = replace(case, labels=labels, loss_mask=None)
        if len(case.cu_seqlens) > 1 and self.chance(0.5):
            case = pad(
                case, self.dice.choice((0, 0, 3)), masked=not (ignored or (by_labels and self.chance(0.3)))
            )
        if case.loss_mask is not None:
            dtype = self.dice.choice((torch.bool, torch.int64, torch.float32))
            case = replace(case, loss_mask=case.loss_mask.to(dtype))
        return replace(
            case,
            inputs={name: self.strided(value) for name, value in case.inputs.items()},
        )

    def strided(self, value: Tensor) -> Tensor:
        """The same values in memory of another order, between values that are none."""
        kind = self.dice.choice(("contiguous", "contiguous", "gaps", "reversed axes", "sliced"))
        if kind == "reversed axes":
            axes = tuple(reversed(range(value.ndim)))
            return value.permute(axes).contiguous().permute(axes)
        other = torch.full_like(value, math.nan)
        if kind == "gaps":
            return torch.stack([value, other], -1)[..., 0]
        return torch.cat([other, value], -1)[..., value.shape[-1] :] if kind == "sliced" else value

    def options(self, entry: str, case: Case, vocabulary: int) -> dict[str, Any]:
        options: dict[str, Any] = {}
        policy = entry in ("fused_policy_loss", "fused_linear_policy_loss")
        if policy and self.chance(0.3):
            options["return_entropy"] = True
        if entry == "token_logprobs" or entry == "fused_policy_loss":
            options["inplace_backward"] = self.chance(0.15) and case.inputs["logits"].is_contiguous()
        if "linear" in entry and self.chance(0.6):
            options["max_chunk_bytes"] = self.dice.choice((1, 3, 7)) * vocabulary * 8
        if entry == "fused_linear_policy_loss":
            options["schedule"] = self.dice.choice(SCHEDULES)
            options["skip_inactive"] = self.dice.choice(("backward", "none"))
        return options


def near_a_clip_bound(case: Case, objective: Any) -> bool:
    """Whether rounding could turn a decision: a log-ratio within its own error of a bound."""
    if case.old_logprobs is None or isinstance(objective, gk.Linear):
        return False
    bounds = [math.log1p(objective.clip_high), math.log1p(-objective.clip_low)]
    bounds += [] if objective.dual_clip is None else [math.log(objective.dual_clip)]
    logprobs = true_logprobs(case)
    for sequence in oracle.sequences(case.counted, case.cu_seqlens):
        if not sequence.count:
            continue
        new = sequence.pick(logprobs)
        found = new - sequence.pick(case.old_logprobs).double()
        if "token_weights" in case.terms:
            found = found * sequence.pick(case.terms["token_weights"])
        margin = 1e-5 + 4e-6 * float(new.abs().max())
        if not isinstance(objective, gk.GRPO):
            length = case.terms["lengths"][sequence.index] if "lengths" in case.terms else sequence.count
            found = (found.sum() / length).reshape(1)
        if any(float((found - bound).abs().min()) < margin for bound in bounds):
            return True
    return False


def cleaned(case: Case) -> Case:
    """With zeros where nothing counts: the oracle's products would multiply what is there by zero."""

    def clean(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape[: case.labels.ndim] != case.labels.shape:
            return value
        return torch.where(
            case.counted.view(*case.labels.shape, *(1,) * (value.ndim - case.labels.ndim)), value, 0
        )

    rows = ("logits", "hidden", "logprobs", "entropy")
    return replace(
        case,
        inputs={name: clean(value) if name in rows else value for name, value in case.inputs.items()},
        old_logprobs=clean(case.old_logprobs),
        terms={name: clean(value) if name == "ref_logprobs" else value for name, value in case.terms.items()},
    )


def fits(case: Case, objective: Any, factor: float) -> bool:
    grads = expect(case, objective).grads
    return all(
        grad.numel() == 0
        or float(grad.abs().max()) * abs(factor) < torch.finfo(case.inputs[name].dtype).max / 16
        for name, grad in grads.items()
    )
