"""Estimators of the KL divergence to the reference policy."""

from __future__ import annotations

from torch import Tensor

from gspo_kernels.objectives import finite

KL_ESTIMATORS = ("k1", "k2", "k3")


def kl_penalty(log_ratio: Tensor, estimator: str) -> Tensor:
    """Estimate KL(pi, ref) after Schulman, with d = logp - ref: k1 = d, k2 = d^2/2, k3 = exp(-d) + d - 1."""
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return finite.mul(0.5 * log_ratio, log_ratio)
    return finite.k3(log_ratio)
