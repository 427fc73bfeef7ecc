"""A GSPO loss from hidden states to compute, its fp64 answer, and plain PyTorch's.

Hidden states are standard normal and the weight is scaled so that logits have a standard deviation of 3.
Tokens are drawn from the policy itself. Old log-probs put every sequence on the side of the clip range where
its advantage can't be clipped, 5% from it: the noise of bf16 logits turns no gradient off, for anyone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

CLIP_LOW, CLIP_HIGH = 3e-4, 4e-4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SITUATIONS = ("all active", "half inactive", "frozen head", "on-policy")
_LOGITS_AT_ONCE = 2**24
_DISTANCE = 0.05


@dataclass(frozen=True)
class Problem:
    """B sequences of T tokens, all counted.

    Attributes:
        hidden: [B, T, H].
        weight: [V, H], the same dtype.
        labels: [B, T].
        old_logprobs: [B, T], fp32, or None: on-policy.
        advantages: [B], fp32.
        logprobs: [B, T], fp64, of exactly these inputs.
        trains_weight: whether the weight receives a gradient.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    old_logprobs: Tensor | None
    advantages: Tensor
    logprobs: Tensor
    trains_weight: bool = True

    def situation(self, name: str) -> Problem:
        """The same problem with every second advantage zero, a head without gradient, or on-policy."""
        if name == "half inactive":
            return replace(self, advantages=self.advantages * (torch.arange(len(self.advantages)) % 2))
        if name == "frozen head":
            return replace(self, trains_weight=False)
        return replace(self, old_logprobs=None) if name == "on-policy" else self


@dataclass(frozen=True)
class Result:
    """What a contestant returns; ``loss`` is None for the bare products, ``weight`` for a frozen head."""

    loss: Tensor | None
    hidden: Tensor
    weight: Tensor | None


def gspo(logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor) -> Tensor:
    """[B] losses: -min(s A, clip(s) A) with s = exp(mean_t(logp - logp_old)) (arXiv 2507.18071)."""
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    ratio = (logprobs - old).mean(-1).exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def plain_losses(hidden: Tensor, weight: Tensor, problem: Problem, logits: str, native: bool) -> Tensor:
    """[B] losses as one writes them in PyTorch; statistics are at least fp32.

    Args:
        hidden, weight: those of the problem, which autograd follows.
        problem: the rest.
        logits: "input": 16-bit products are rounded to 16 bits, "float32": they stay as they are.
        native: 16-bit operands enter a product that is to be rounded to 16 bits. Otherwise they are raised
            and the product is rounded: the same precision, also where a CPU has no fast 16-bit products.
    """
    dtype = hidden.dtype
    if dtype != torch.float64 and not (native and logits == "input"):
        hidden, weight = hidden.float(), weight.float()
    scores = F.linear(hidden, weight)
    if logits == "input":
        scores = scores.to(dtype)
    wide = scores if dtype == torch.float64 else scores.float()
    chosen = wide.log_softmax(-1).gather(-1, problem.labels.unsqueeze(-1)).squeeze(-1)
    return gspo(chosen, problem.old_logprobs, problem.advantages)


def leaves(problem: Problem) -> tuple[Tensor, Tensor]:
    """Fresh hidden states and weight for autograd; the weight only takes part where it is trained."""
    return (
        problem.hidden.detach().requires_grad_(),
        problem.weight.detach().requires_grad_(problem.trains_weight),
    )


def differentiate(loss: Tensor, hidden: Tensor, weight: Tensor) -> Result:
    """The result of a loss that autograd knows."""
    wanted = (hidden, weight) if weight.requires_grad else (hidden,)
    gradients = torch.autograd.grad(loss, wanted)
    return Result(loss.detach(), gradients[0], gradients[1] if weight.requires_grad else None)


def plain(problem: Problem, logits: str, native: bool = True) -> Result:
    """Naive PyTorch, forward and backward."""
    hidden, weight = leaves(problem)
    losses = plain_losses(hidden, weight, problem, logits, native)
    return differentiate(losses.mean(), hidden, weight)


def row_chunks(rows: int, vocabulary: int) -> Iterator[slice]:
    """Slices of rows whose fp64 logits take 128 MiB."""
    step = max(1, _LOGITS_AT_ONCE // vocabulary)
    yield from (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def draw(tokens: int, vocabulary: int, width: int, sequences: int, dtype: torch.dtype) -> Problem:
    """The problem of a shape, from a fixed seed."""
    if tokens % sequences:
        raise ValueError(f"{tokens} tokens are not {sequences} sequences of equal length")
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator).mul_(3 / width**0.5).to(dtype)
    labels = torch.empty(tokens, dtype=torch.int64)
    logprobs = torch.empty(tokens, dtype=torch.float64)
    raised = weight.double()
    for rows in row_chunks(tokens, vocabulary):
        all_logprobs = (hidden[rows].double() @ raised.t()).log_softmax(-1)
        labels[rows] = torch.multinomial(all_logprobs.exp(), 1, generator=generator).squeeze(1)
        logprobs[rows] = all_logprobs.gather(1, labels[rows].unsqueeze(1)).squeeze(1)
    shape = (sequences, tokens // sequences)
    sign = 1.0 - 2.0 * (torch.arange(sequences) // 2 % 2)
    advantages = sign * torch.linspace(0.5, 1.5, sequences)
    noise = 0.02 * torch.randn(shape, generator=generator, dtype=torch.float64)
    log_ratio = noise - noise.mean(1, keepdim=True) - _DISTANCE * sign.double().unsqueeze(1)
    logprobs = logprobs.view(shape)
    return Problem(
        hidden.view(*shape, width),
        weight,
        labels.view(shape),
        (logprobs - log_ratio).float(),
        advantages,
        logprobs,
    )


def logit_gradients(problem: Problem, rows: slice, raised: Tensor, coefficients: Tensor) -> Tensor:
    """dLoss/dlogits of some rows, fp64 [n, V]: coefficient * (onehot - p)."""
    hidden = problem.hidden.flatten(0, 1)[rows].double()
    chunk = (hidden @ raised.t()).softmax(-1).neg_()
    chunk.scatter_add_(1, problem.labels.flatten()[rows, None], torch.ones(chunk.shape[0], 1).double())
    return chunk.mul_(coefficients[rows, None])


def exact_losses(problem: Problem) -> tuple[Tensor, Tensor]:
    """[B] losses in fp64 and dLoss/dlogprobs of their mean, [B * T]."""
    logprobs = problem.logprobs.clone().requires_grad_()
    losses = gspo(logprobs, problem.old_logprobs, problem.advantages.double())
    (coefficients,) = torch.autograd.grad(losses.mean(), logprobs)
    return losses.detach(), coefficients.flatten()


def exact(problem: Problem) -> Result:
    """The fp64 answer, with the gradient of log-softmax written out; a chunk of logits at a time."""
    losses, coefficients = exact_losses(problem)
    raised, hidden = problem.weight.double(), problem.hidden.flatten(0, 1)
    grad_hidden = torch.zeros(hidden.shape, dtype=torch.float64)
    grad_weight = torch.zeros_like(raised) if problem.trains_weight else None
    for rows in row_chunks(len(hidden), len(raised)):
        if not coefficients[rows].any():
            continue
        chunk = logit_gradients(problem, rows, raised, coefficients)
        torch.mm(chunk, raised, out=grad_hidden[rows])
        if grad_weight is not None:
            grad_weight.addmm_(chunk.t(), hidden[rows].double())
    return Result(losses.mean(), grad_hidden.view(problem.hidden.shape), grad_weight)
