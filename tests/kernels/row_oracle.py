"""Row formulas twice: in extended precision with numpy, and as plain PyTorch, whose error sets budgets."""

import numpy as np
import torch

from gspo_kernels.types import LogitTransform, stats_dtype


def exact(logits, labels, transform, grad_logprobs=None, grad_entropy=None):
    """(logprobs, lse, entropy, grad) of finite rows whose labels are columns, in long double."""
    wide = np.longdouble
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


def assert_within_budget(got, reference, *baselines, eps):
    """Error at most twice plain PyTorch's (its worse formula's), plus one rounding of the largest value."""
    assert torch.isfinite(got).all()
    allowed = max((base.double() - reference).abs().max().item() for base in baselines)
    budget = 2 * allowed + eps * reference.abs().max().item()
    error = (got.double() - reference).abs().max().item()
    assert error <= budget, f"error {error:.3e}, budget {budget:.3e}"


PLAIN = LogitTransform()
