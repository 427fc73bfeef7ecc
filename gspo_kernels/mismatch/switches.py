"""Where a difference comes from: one thing of the training's computation is switched at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.mismatch.measure import Comparison
from gspo_kernels.mismatch.samples import Samples
from gspo_kernels.mismatch.scoring import Load, Setting, score
from gspo_kernels.trainer.rollout import Sampling
from gspo_kernels.trainer.run.models import load_model

_FEW_ROWS = 16
"""Rows of logits in a chunk, for the switch of the chunk."""


@dataclass(frozen=True)
class Switched:
    """What one switch does.

    Attributes:
        name: what was switched.
        change: the fields of `Setting` that differ from the baseline.
        comparison: training switched, beside the sampler.
        moved: mean absolute change of training's own log-probs, in nats.
    """

    name: str
    change: dict[str, Any]
    comparison: Comparison
    moved: float


class Models:
    """Loads a directory's model in a precision, keeping only the last one."""

    def __init__(self, path: str, device: torch.device) -> None:
        self.path, self.device = path, device
        self._key: tuple[torch.dtype, str | None] | None = None
        self._model: Any = None

    def __call__(self, dtype: torch.dtype, attention: str | None) -> Any:
        """Return the model with its weights in ``dtype``."""
        if self._key != (dtype, attention):
            self._model = None
            gc.collect()
            model = load_model(self.path, half=dtype == torch.bfloat16, attention=attention)
            self._model = model.to(self.device, dtype).eval()
            self._key = (dtype, attention)
        return self._model


def switches(
    baseline: Setting, sampling: Sampling, attention: str, vocabulary: int
) -> dict[str, dict[str, Any]]:
    """Return what can be switched, by name, as changes of the baseline.

    Args:
        baseline: how training computes.
        sampling: how the sampler drew.
        attention: the implementation that the baseline resolves to.
        vocabulary: V, which says how many bytes a chunk of a few rows has.
    """
    half = baseline.weights if baseline.weights != "fp32" else "bf16"
    other_half = "fp16" if half == "bf16" else "bf16"
    found: dict[str, dict[str, Any]] = {}
    if baseline.weights == "fp32":
        found[f"weights in {half}"] = {"weights": half}
        found[f"weights and head in {half}"] = {"weights": half, "head": half}
        found[f"weights and head in {other_half}"] = {"weights": other_half, "head": other_half}
    else:
        found["weights in fp32"] = {"weights": "fp32", "head": "fp32"}
    head = half if baseline.head == "fp32" else "fp32"
    found[f"head in {head}"] = {"head": head}
    found[f"softmax in {half}"] = {"softmax": half}
    other = "eager" if attention != "eager" else "sdpa"
    found[f"{other} attention"] = {"attention": other}
    found["padded rows" if baseline.layout != "padded" else "packed rows"] = {
        "layout": "padded" if baseline.layout != "padded" else "packed"
    }
    found["one sequence at a time"] = {"layout": "alone"}
    found[f"chunks of {_FEW_ROWS} rows"] = {"max_chunk_bytes": 4 * _FEW_ROWS * vocabulary}
    tempered = baseline.temperature != 1.0
    if tempered:
        found["log-probs before temperature"] = {"order": "before temperature"}
    if baseline.recorded:
        found["sampling mask off"] = {"recorded": False}
    elif sampling.top_p < 1.0 or sampling.top_k > 0:
        mask = {"top_p": sampling.top_p, "top_k": sampling.top_k}
        found["sampling mask on"] = mask
        if tempered:
            found["mask before temperature"] = mask | {"order": "mask, temperature"}
    return found


def attribute(
    load: Load,
    samples: Samples,
    baseline: Setting,
    comparison: Comparison,
    named: dict[str, dict[str, Any]],
    budget: int,
    tell: Callable[[str], None],
) -> list[Switched]:
    """Score the samples once per switch, those that need the same model one after the other."""

    def model_of(change: dict[str, Any]) -> tuple[str, str]:
        setting = replace(baseline, **change)
        return setting.weights, str(setting.attention)

    done: dict[str, Switched] = {}
    for name, change in sorted(named.items(), key=lambda item: model_of(item[1])):
        tell(f"switching: {name}")
        switched = score(load, samples, replace(baseline, **change), budget).logprobs
        moved = _mean_size(switched, comparison.training)
        done[name] = Switched(name, change, replace(comparison, training=switched), moved)
    return [done[name] for name in named]


def _mean_size(one: Tensor, other: Tensor) -> float:
    both = one.isfinite() & other.isfinite()
    return float((one - other)[both].abs().mean()) if bool(both.any()) else float("nan")
