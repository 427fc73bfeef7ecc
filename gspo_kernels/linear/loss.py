"""Operator: a hidden-state loss whose gradient is computed along with it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.linear.chunks import LINEAR, Call
from gspo_kernels.linear.run import Run
from gspo_kernels.linear.scaling import times, times_
from gspo_kernels.ops.library import operator
from gspo_kernels.ops.logprobs import fake_stats, scale_
from gspo_kernels.policy import TERMS, PolicyTerms, check_term_values
from gspo_kernels.types import stats_dtype


@operator(
    f"linear_policy({LINEAR}, {TERMS}, str schedule, bool entropy, bool need_hidden, "
    "bool need_weight, bool need_bias, bool skip) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def linear_policy(*args: Any) -> tuple[Tensor, ...]:
    """Log-probs, entropy, and the gradients for upstream 1; empty where not wanted.

    dHidden comes as two factors, see ``Gradients``; dWeight and dBias in the statistics' dtype.
    """
    call, rest = Call.split(args)
    fields = len(PolicyTerms._fields)
    terms = PolicyTerms(*rest[:fields])
    schedule, entropy, *needs, skip = rest[fields:]
    check_term_values(call.labels, terms)
    run = Run(call, terms, entropy, tuple(needs), skip)
    if schedule == "known":
        run.known()
    else:
        run.by_scopes(schedule, tuple(needs))
    scores, gradients = run.scores, run.gradients
    scores.close()
    outputs = (scores.entropy, gradients.hidden, gradients.scales, *gradients.sums.result())
    # one empty tensor each: an operator's outputs may not be the same tensor
    return scores.logprobs, *(scores.logprobs.new_empty(0) if x is None else x for x in outputs)


@linear_policy.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *args: Any) -> tuple[Tensor, ...]:
    _, entropy, *needs, _ = args[-6:]
    logprobs, _, entropies = fake_stats(labels, hidden.dtype, entropy)
    sums = stats_dtype(hidden.dtype)
    missing = logprobs.new_empty
    return (
        logprobs,
        entropies,
        hidden.new_empty(hidden.shape) if needs[0] else missing(0),
        missing(labels.shape),
        weight.new_empty(weight.shape, dtype=sums) if needs[1] else missing(0),
        weight.new_empty(weight.shape[0], dtype=sums) if needs[2] else missing(0),
    )


class _Gradients(NamedTuple):
    hidden: Tensor
    scales: Tensor
    weight: Tensor
    bias: Tensor

    def times(self, upstream: Tensor, dtype: torch.dtype, backend: str | None) -> tuple[Tensor, ...]:
        """Those of hidden, weight and bias for ``upstream``; in this memory where ``backend`` is given."""
        if backend is None:
            sums = ((total * upstream).to(dtype) for total in (self.weight, self.bias))
        else:
            sums = (_scaled(total, upstream, dtype, backend) for total in (self.weight, self.bias))
        if not self.hidden.numel():
            return self.hidden, *sums
        factor = (self.scales * upstream).unsqueeze(-1)
        if backend is not None:
            return times_(self.hidden, factor), *sums
        return times(self.hidden, factor).to(dtype), *sums


def _scaled(total: Tensor, upstream: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    if total.dtype != dtype:
        return torch.mul(total, upstream, out=torch.empty(total.shape, dtype=dtype, device=total.device))
    if total.numel():
        scale_(total, upstream, backend)
    return total


class LinearPolicyFunction(torch.autograd.Function):
    """Carries gradients that the forward already holds; the loss itself is evaluated by the caller.

    The first backward gives them away, scaled in place; later ones (``retain_graph``) compute them anew.
    Where ``kept``, which tracing needs, they are kept and scaled out of place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        schedule: str,
        entropy: bool,
        skip: bool,
        backend: str,
        kept: bool,
        *rest: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs = (*ctx.needs_input_grad[:2], bias is not None and ctx.needs_input_grad[2])
        settings = (schedule, entropy, *needs, skip)
        logprobs, entropies, *gradients = linear_policy(hidden, weight, bias, *rest, *settings)
        ctx.needs, ctx.dtype, ctx.backend = needs, hidden.dtype, backend
        ctx.nothing = (None,) * (5 + len(rest))
        ctx.gradients = None
        if kept:
            ctx.save_for_backward(*gradients)
            ctx.again = None
        else:
            ctx.gradients = _Gradients(*gradients)
            operands = (hidden, weight, bias, *rest, *settings)
            ctx.save_for_backward(*(x for x in operands if isinstance(x, Tensor)))
            ctx.again = [None if isinstance(x, Tensor) else (x,) for x in operands]
        ctx.mark_non_differentiable(logprobs, entropies)
        return logprobs.new_zeros(()), logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if ctx.again is None:
            results = _Gradients(*ctx.saved_tensors).times(grad, ctx.dtype, None)
        else:
            if gradients is None:
                tensors = iter(ctx.saved_tensors)
                operands = [next(tensors) if x is None else x[0] for x in ctx.again]
                gradients = _Gradients(*linear_policy(*operands)[2:])
            results = gradients.times(grad, ctx.dtype, ctx.backend)
        wanted = (result if need else None for result, need in zip(results, ctx.needs, strict=True))
        return (*wanted, *ctx.nothing)
