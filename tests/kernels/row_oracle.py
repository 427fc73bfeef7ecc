"""Row formulas twice: with numpy, and as plain PyTorch, whose error sets budgets."""

import numpy as np
import torch

from gspo_kernels.types import LogitTransform, stats_dtype
from tests.accuracy import Spread, assert_as_exact, gradient_units, row_units
from tests.draws import shifted_seed


def exact(logits, labels, transform, grad_logprobs=None, grad_entropy=None):
    """(logprobs, lse, entropy, grad) of finite rows whose labels are columns; fp64's are by long double."""
    wide = np.longdouble if logits.dtype == torch.float64 else np.float64
    x = np.array(logits.double().numpy(), dtype=wide)
    scale, cap = wide(transform.logit_scale), wide(transform.softcap)
    heat = wide(transform.temperature)
    if transform.row_temperature is not None:
        heat = np.array(transform.row_temperature.double().numpy(), dtype=wide)[..., None]
    bent = np.tanh(scale * x / cap) if cap else None
    z = (cap * bent if cap else scale * x) / heat
    slope = scale / heat * (1 - bent * bent if cap else np.ones_like(x))
    top = z.max(-1, keepdims=True)
    lse = top + np.log(np.exp(z - top).sum(-1, keepdims=True))
    logp = z - lse
    p = np.exp(logp)
    onehot = np.arange(x.shape[-1]) == labels.numpy()[..., None]
    # By the other columns, because log p(label) near 0 is lost in z - lse.
    chosen = (logp * onehot).sum(-1)
    others = (p * ~onehot).sum(-1)
    chosen = np.where(chosen > -0.5, np.log1p(-np.minimum(others, wide(0.5))), chosen)
    entropy = -(p * logp).sum(-1)
    grad = np.zeros_like(x)
    if grad_logprobs is not None:
        onehot_minus_p = np.where(onehot, others[..., None], -p)
        grad = grad + np.array(grad_logprobs.double().numpy(), dtype=wide)[..., None] * onehot_minus_p
    if grad_entropy is not None:
        weight = np.array(grad_entropy.double().numpy(), dtype=wide)[..., None]
        grad = grad - weight * p * (logp + entropy[..., None])
    numbers = (chosen, lse[..., 0], entropy, grad * slope)
    return tuple(torch.from_numpy(number.astype(np.float64)) for number in numbers)


def plain(logits, labels, transform, grad_logprobs, grad_entropy, through_lse):
    """The same with autograd, in the statistics' dtype: by log_softmax, or by logsumexp as TRL does."""
    dtype = stats_dtype(logits.dtype)
    leaf = logits.to(dtype, copy=True).requires_grad_()
    z = leaf * transform.logit_scale
    if transform.softcap:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    if transform.row_temperature is not None:
        z = z / transform.row_temperature.unsqueeze(-1)
    else:
        z = z / transform.temperature
    lse = torch.logsumexp(z, -1, keepdim=True)
    logp = z - lse if through_lse else torch.log_softmax(z, -1)
    chosen = logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    outputs = [(chosen, grad_logprobs), (entropy, grad_entropy)]
    sum((output * grad.to(dtype)).sum() for output, grad in outputs if grad is not None).backward()
    return chosen.detach(), lse.detach().squeeze(-1), entropy.detach(), leaf.grad


class Judge:
    """Holds results to an exact answer and to plain PyTorch's spread over neighbouring inputs.

    ``draw(k)`` gives ((logprobs, lse, entropy, grad) exact, [the same by a plain formula, ...]) of the k-th
    neighbour, the 0th being the input itself. Errors are in units of each row's rounding; of several formulas
    the least exact one counts.
    """

    def __init__(self, draw, draws=6):
        drawn = [draw(k) for k in range(draws)]
        self.exact, formulas = drawn[0][0], range(len(drawn[0][1]))
        self.units = self._units(self.exact)
        self.plain = []
        for field in range(4):
            spreads = [
                Spread.of(
                    [
                        (plains[f][field].double() - exact[field]) / self._units(exact)[field]
                        for exact, plains in drawn
                    ],
                    by_row=field == 3,
                )
                for f in formulas
            ]
            self.plain.append(spreads)

    @staticmethod
    def _units(exact):
        rows = row_units(exact[0], exact[1])
        return rows, rows, rows, gradient_units(rows, exact[3])

    def hold(self, name, got, *, eps, formulas=None):
        """``formulas`` of the plain ones to compare with, all unless given."""
        field = ("logprobs", "lse", "entropy", "grad").index(name)
        assert torch.isfinite(got).all(), name
        exact, unit = self.exact[field], self.units[field]
        worst = max(self.plain[field][:formulas], key=lambda spread: spread.norm)
        assert_as_exact(name, [(got.double() - exact) / unit], worst, [exact / unit], eps)


def neighbour(values, k):
    """The k-th draw of ``values`` moved by up to a part in 128: of the same size, roundings of its own."""
    if k == 0:
        return values
    noise = torch.rand(
        values.shape, generator=torch.Generator().manual_seed(shifted_seed(k)), dtype=torch.float64
    )
    return (values.double() * (1 + (noise - 0.5) / 64)).to(values.dtype)


PLAIN = LogitTransform()
