"""What the C++ backend is held against: an oracle in NumPy, and plain PyTorch for the budget."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gspo_kernels.types import LogitTransform, stats_dtype
from tests.accuracy import Spread, assert_as_exact, gradient_units, row_units

IGNORE = -100


class Result(NamedTuple):
    """Statistics [B, T]; grad [B, T, V] of ``sum(grad_logprobs * logprobs + grad_entropy * entropy)``."""

    logprobs: np.ndarray
    lse: np.ndarray
    entropy: np.ndarray
    grad: np.ndarray


def exact(
    logits: Tensor,
    labels: Tensor,
    transform: LogitTransform,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None = None,
) -> Result:
    """The formulas in fp64, for fp64 logits in long double. Finite logits, labels in range or ``IGNORE``."""
    real = np.longdouble if logits.dtype == torch.float64 else np.float64

    def column(values: Tensor) -> np.ndarray:
        return wide(values).astype(real)[..., None]

    x, g = wide(logits).astype(real), column(grad_logprobs)
    ge = np.zeros_like(g) if grad_entropy is None else column(grad_entropy)
    temperature = (
        real(transform.temperature)
        if transform.row_temperature is None
        else column(transform.row_temperature)
    )
    u = x * real(transform.logit_scale)
    slope = real(transform.logit_scale) / temperature
    if transform.softcap:
        tanh = np.tanh(u / real(transform.softcap))
        u, slope = real(transform.softcap) * tanh, slope * (1 - tanh**2)
    z = u / temperature
    maximum = z.max(-1, keepdims=True)
    log_sum = np.log(np.exp(z - maximum).sum(-1, keepdims=True))
    log_p = z - maximum - log_sum
    p = np.exp(log_p)
    entropy = -(p * log_p).sum(-1, keepdims=True)
    counted = labels.numpy() != IGNORE
    index = np.where(counted, labels.numpy(), 0)[..., None]
    one_hot = (np.arange(x.shape[-1]) == index).astype(real)
    grad = (g * (one_hot - p) - ge * p * (log_p + entropy)) * slope
    stats = np.take_along_axis(log_p, index, -1), maximum + log_sum, entropy
    return Result(*(np.where(counted, s[..., 0], 0) for s in stats), np.where(counted[..., None], grad, 0))


def plain(
    logits: Tensor,
    labels: Tensor,
    transform: LogitTransform,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None = None,
) -> Result:
    """What a user would write in PyTorch, in the statistics' dtype, its gradient in the logits' dtype."""
    leaf = logits.detach().clone().requires_grad_()
    z = leaf.to(stats_dtype(logits.dtype)) * transform.logit_scale
    if transform.softcap:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    z = z / (
        transform.temperature if transform.row_temperature is None else transform.row_temperature[..., None]
    )
    log_p = torch.log_softmax(z, -1)
    counted = labels != IGNORE
    logprobs = log_p.gather(-1, labels.long().where(counted, 0)[..., None])[..., 0].where(counted, 0)
    entropy = -(log_p.exp() * log_p).sum(-1).where(counted, 0)
    objective = (logprobs * grad_logprobs).sum()
    if grad_entropy is not None:
        objective = objective + (entropy * grad_entropy).sum()
    (grad,) = torch.autograd.grad(objective, leaf)
    lse = torch.logsumexp(z, -1).where(counted, 0)
    return Result(*(wide(t.detach()) for t in (logprobs, lse, entropy, grad)))


def assert_within_budget(
    name: str,
    ours: Tensor,
    plain: Result,
    exact: Result,
    field: str,
    factors: np.ndarray | None = None,
) -> None:
    """As exact as plain PyTorch in the same dtype, by ``accuracy``, in units of each row's rounding.

    ``factors``, one per row, are what ours is times. They are rounded as well, so eps counts twice.
    """
    assert not ours.isnan().any(), name
    want, usual = getattr(exact, field), getattr(plain, field)
    values = wide(ours) if factors is None else wide(ours) * factors[..., None]
    unit = row_units(narrow(exact.logprobs), narrow(exact.lse))
    if by_row := field == "grad":
        unit = gradient_units(unit, narrow(want))
    eps = torch.finfo(ours.dtype).eps * (1 if factors is None else 2)
    error, error_of_plain, size = (narrow(each) / unit for each in (values - want, usual - want, want))
    assert_as_exact(name, [error], Spread.of([error_of_plain], by_row=by_row), [size], eps)


def narrow(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float64))


def wide(tensor: Tensor) -> np.ndarray:
    return tensor.double().numpy().astype(np.longdouble)
