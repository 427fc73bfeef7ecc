"""Statistics of the difference of two sets of log-probs of the same tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.core.layout import layout_of
from gspo_kernels.objectives import finite
from gspo_kernels.objectives.clip import log_bounds
from gspo_kernels.off_policy import weight_metrics

QUANTILES = (0.5, 0.9, 0.99, 0.999)
CORRECTIONS: dict[str, dict[str, Any]] = {  # options of `gk.rollout_weights`, truncated at 2
    "per token": {"level": "token"},
    "per sequence by the mean": {"level": "sequence"},
    "per sequence by the sum": {"level": "sequence", "reduce": "sum"},
}


@dataclass(frozen=True)
class Comparison:
    """Log-probs of N tokens in B sequences, by training and by the sampler."""

    training: Tensor  # [N] fp64, nats
    sampling: Tensor  # [N] fp64, nats
    cu_seqlens: Tensor  # int32 [B + 1]
    clip: tuple[float, float]  # GSPO's clip range, below and above 1

    @property
    def difference(self) -> Tensor:
        """Each token's log-ratio, training minus sampling, [N]; 0 if both log-probs are -inf."""
        return finite.difference(self.training, self.sampling)

    @property
    def possible(self) -> Tensor:
        """Tokens whose log-probs are finite on both sides, bool [N]."""
        return self.training.isfinite() & self.sampling.isfinite()

    @property
    def log_s(self) -> Tensor:
        """GSPO's log s of each sequence, the mean of its tokens' differences, [B]."""
        layout = layout_of(self.difference, self.cu_seqlens)
        total = layout.sum(self.difference.unsqueeze(0))
        return total / self.cu_seqlens.diff().clamp(min=1)

    @property
    def outside(self) -> Tensor:
        """Sequences outside the clip range without any training, bool [B]."""
        low, high, _ = log_bounds(*self.clip, None)
        return (self.log_s < low) | (self.log_s > high)

    def summary(self) -> dict[str, float]:
        """Return statistics of the tokens' differences, in nats, and of the sequences' log s.

        Counts and shares outside the clip range include infinite values, the other numbers do not.
        """
        difference, log_s = self.difference[self.possible], self.log_s[self.log_s.isfinite()]
        sizes, ratios = difference.abs(), difference.exp()
        low, high, _ = log_bounds(*self.clip, None)
        return {
            "tokens/count": len(self.training),
            "tokens/impossible": int((~self.possible).sum()),
            "tokens/mean": mean(sizes),
            "tokens/signed_mean": mean(difference),
            **{f"tokens/quantile_{q:g}": quantile(sizes, q) for q in QUANTILES},
            "tokens/max": quantile(sizes, 1.0),
            "tokens/ratio_beyond_tenth": mean(((ratios < 0.9) | (ratios > 1.1)).double()),
            "sequences/count": len(self.log_s),
            "sequences/rms_log_s": mean(log_s.square()) ** 0.5,
            "sequences/mean_log_s": mean(log_s),
            "sequences/max_abs_log_s": quantile(log_s.abs(), 1.0),
            "sequences/outside": mean(self.outside.double()),
            "sequences/outside_low": mean((self.log_s < low).double()),
            "sequences/outside_high": mean((self.log_s > high).double()),
        }

    def range_that_holds(self, share: float) -> tuple[float, float]:
        """Return the clip range, below and above 1, that contains this share of the untrained sequences."""
        log_s = self.log_s[self.log_s.isfinite()]
        low, high = quantile(log_s, (1 - share) / 2), quantile(log_s, (1 + share) / 2)
        return max(-math.expm1(low), 0.0), max(math.expm1(high), 0.0)

    def corrections(self) -> dict[str, dict[str, float]]:
        """Return for each correction the metrics of its weights for a batch with equal advantages."""
        counted, seqlens = self.possible, self.cu_seqlens
        advantages = torch.ones(len(seqlens) - 1, dtype=torch.float64, device=counted.device)
        effects = {}
        for name, options in CORRECTIONS.items():
            weights = gk.rollout_weights(
                self.training, self.sampling, loss_mask=counted, cu_seqlens=seqlens, high=2.0, **options
            )
            metrics = weight_metrics(weights, advantages, loss_mask=counted, cu_seqlens=seqlens)
            effects[name] = {key.removeprefix("weights/"): float(value) for key, value in metrics.items()}
        return effects


def mean(values: Tensor) -> float:
    """Return the mean, or NaN if there are no values."""
    return float(values.mean()) if len(values) else math.nan


def quantile(values: Tensor, q: float) -> float:
    """Return the q-quantile, or NaN if there are no values; `torch.quantile` takes at most 2^24 values."""
    if len(values) == 0:
        return math.nan
    return float(values.sort().values[min(len(values) - 1, int(q * len(values)))])
