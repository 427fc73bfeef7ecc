"""How far two sets of log-probs of the same tokens lie apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.layout import layout_of
from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import log_bounds
from gspo_kernels.off_policy import weight_metrics

QUANTILES = (0.5, 0.9, 0.99, 0.999)
ENTROPY_EDGES = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, math.inf)
LOGPROB_EDGES = (-math.inf, -10.0, -5.0, -3.0, -1.0, -0.1, 0.0)
CORRECTIONS: dict[str, dict[str, Any]] = {
    "per token, truncated at 2": {"level": "token", "mode": "truncate", "high": 2.0},
    "per sequence by the mean, truncated at 2": {
        "level": "sequence",
        "mode": "truncate",
        "high": 2.0,
    },
    "per sequence by the sum, truncated at 2": {
        "level": "sequence",
        "reduce": "sum",
        "mode": "truncate",
        "high": 2.0,
    },
}
"""Options of `gk.rollout_weights` whose effect is reported."""


@dataclass(frozen=True)
class Split:
    """The tokens of one bin.

    Attributes:
        label: what they have in common.
        tokens: how many.
        mean, largest: of the absolute differences, in nats; NaN where there are none.
    """

    label: str
    tokens: int
    mean: float
    largest: float


@dataclass(frozen=True)
class Comparison:
    """Training's log-probs of N tokens in B sequences beside the sampler's.

    Attributes:
        training, sampling: [N] fp64, nats.
        cu_seqlens: int32 [B + 1].
        clip: GSPO's range, below and above 1.
    """

    training: Tensor
    sampling: Tensor
    cu_seqlens: Tensor
    clip: tuple[float, float]

    @property
    def difference(self) -> Tensor:
        """[N], training less sampling: the token's log-ratio; 0 where both call a token impossible."""
        return finite.difference(self.training, self.sampling)

    @property
    def possible(self) -> Tensor:
        """[N] bool: tokens to which both sides give a probability."""
        return self.training.isfinite() & self.sampling.isfinite()

    @property
    def log_s(self) -> Tensor:
        """[B], GSPO's log s with these as new and old log-probs: the mean difference per token."""
        layout = layout_of(self.difference, self.cu_seqlens)
        total = layout.sum(self.difference.unsqueeze(0))
        return total / (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).clamp(min=1)

    @property
    def outside(self) -> Tensor:
        """[B] bool, sequences outside of the clip range although nothing was trained."""
        low, high, _ = log_bounds(*self.clip, None)
        return (self.log_s < low) | (self.log_s > high)

    @property
    def places(self) -> Tensor:
        """[N], each token's place in its completion, from 0."""
        starts = self.cu_seqlens[:-1].long()
        lengths = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()
        return torch.arange(len(self.training)) - starts.repeat_interleave(lengths)

    def summary(self) -> dict[str, float]:
        """Numbers of tokens, in nats, and of sequences."""
        sizes, log_s = self.difference[self.possible].abs(), self.log_s[self.log_s.isfinite()]
        ratios = self.difference[self.possible].exp()
        quantiles = {f"tokens/quantile_{q:g}": _quantile(sizes, q) for q in QUANTILES}
        return {
            "tokens/count": len(self.training),
            "tokens/impossible": int((~self.possible).sum()),
            "tokens/mean": _mean(sizes),
            "tokens/signed_mean": _mean(self.difference[self.possible]),
            "tokens/std": float(self.difference[self.possible].std()) if len(sizes) > 1 else 0.0,
            **quantiles,
            "tokens/max": _quantile(sizes, 1.0),
            "tokens/ratio_beyond_tenth": _mean(((ratios < 0.9) | (ratios > 1.1)).double()),
            "sequences/count": len(self.log_s),
            "sequences/rms_log_s": _mean(log_s.square()) ** 0.5,
            "sequences/mean_log_s": _mean(log_s),
            "sequences/max_abs_log_s": _quantile(log_s.abs(), 1.0),
            "sequences/outside": _mean(self.outside.double()),
            "sequences/outside_low": _mean((self.log_s < log_bounds(*self.clip, None)[0]).double()),
            "sequences/outside_high": _mean((self.log_s > log_bounds(*self.clip, None)[1]).double()),
        }

    def range_that_holds(self, share: float) -> tuple[float, float]:
        """The clip range, below and above 1, in which this share of the sequences lies by itself."""
        log_s = self.log_s[self.log_s.isfinite()]
        if len(log_s) == 0:
            return math.nan, math.nan
        low, high = _quantile(log_s, (1 - share) / 2), _quantile(log_s, (1 + share) / 2)
        return max(0.0, -math.expm1(low)), max(0.0, math.expm1(high))

    def corrections(self) -> dict[str, dict[str, float]]:
        """What `gk.rollout_weights` would leave of a batch whose advantages are all alike."""
        counted = self.possible
        advantages = torch.ones(len(self.cu_seqlens) - 1, dtype=torch.float64)
        found = {}
        for name, options in CORRECTIONS.items():
            weights = gk.rollout_weights(
                self.training, self.sampling, loss_mask=counted, cu_seqlens=self.cu_seqlens, **options
            )
            metrics = weight_metrics(weights, advantages, loss_mask=counted, cu_seqlens=self.cu_seqlens)
            found[name] = {key.removeprefix("weights/"): float(value) for key, value in metrics.items()}
        return found

    def by_position(self) -> list[Split]:
        """By place in the completion, in bins that double."""
        longest = int(self.places.max()) + 1
        edges = [0, *(2**k for k in range((longest - 1).bit_length() + 1))]
        names = [str(a) if b - a == 1 else f"{a} to {b - 1}" for a, b in pairwise(edges)]
        return self._splits(self.places.double(), [float(edge) for edge in edges], names)

    def by_logprob(self) -> list[Split]:
        """By training's log-prob."""
        edges = [*LOGPROB_EDGES[:-1], math.inf]
        names = [f"below {edges[1]:g}", *(f"{a:g} to {b:g}" for a, b in pairwise(LOGPROB_EDGES[1:]))]
        return self._splits(self.training, edges, names)

    def by_entropy(self, entropy: Tensor) -> list[Split]:
        """By the entropy of training's distribution, [N] in nats."""
        names = [
            *(f"{a:g} to {b:g}" for a, b in pairwise(ENTROPY_EDGES[:-1])),
            f"above {ENTROPY_EDGES[-2]:g}",
        ]
        return self._splits(entropy.clamp(min=0.0), ENTROPY_EDGES, names)

    def _splits(self, values: Tensor, edges: Sequence[float], names: list[str]) -> list[Split]:
        found = []
        for (low, high), name in zip(pairwise(edges), names, strict=True):
            sizes = self.difference[self.possible & (values >= low) & (values < high)].abs()
            found.append(Split(name, len(sizes), _mean(sizes), _quantile(sizes, 1.0)))
        return found


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else math.nan


def _quantile(values: Tensor, q: float) -> float:
    """The q-quantile; torch's own takes no more than 2^24 values."""
    return (
        float(values.sort().values[min(len(values) - 1, int(q * len(values)))]) if len(values) else math.nan
    )
