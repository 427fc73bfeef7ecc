"""Gradients that a loss's forward has computed along with it, for upstream 1, until its backward.

The first backward gives them away, scaled in place; later ones (``retain_graph``) compute them anew. Where
they are ``kept``, which tracing needs, they are scaled out of place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.linear.gradients import HeadGradients
from gspo_kernels.linear.head import LOGITS_SLAB
from gspo_kernels.linear.scaling import times, times_
from gspo_kernels.linear.sums import Needs
from gspo_kernels.ops.backends import launches_of
from gspo_kernels.ops.library import Operator
from gspo_kernels.ops.logprobs import scale_


class _Held(NamedTuple):
    """Gradients that a forward has computed, for upstream 1."""

    hidden: Tensor
    scales: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, loss: Any) -> _Held:
        return cls(loss.grad_hidden, loss.scales, loss.grad_weight, loss.grad_bias)

    def times(self, upstream: Tensor, dtype: torch.dtype, backend: str | None) -> HeadGradients:
        """Those of hidden, weight and bias for ``upstream``; in this memory where ``backend`` is given."""
        if backend is None:
            weight, bias = ((total * upstream).to(dtype) for total in (self.weight, self.bias))
        else:
            weight, bias = (_scaled(total, upstream, dtype, backend) for total in (self.weight, self.bias))
        if not self.hidden.numel():
            return HeadGradients(self.hidden, weight, bias)
        launches = None if backend is None else launches_of(backend)
        if launches is not None:
            launches.scale_rows_(self.hidden, self.scales, upstream)
            return HeadGradients(self.hidden, weight, bias)
        factor = (self.scales * upstream).unsqueeze(-1)
        hidden = times(self.hidden, factor).to(dtype) if backend is None else times_(self.hidden, factor)
        return HeadGradients(hidden, weight, bias)


def _scaled(total: Tensor, upstream: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    if total.dtype != dtype:
        out = torch.empty(total.shape, dtype=dtype, device=total.device)
        # on the CPU what is to be rounded exists as a whole beforehand
        rows = LOGITS_SLAB if total.is_cpu else len(total)
        for own, into in zip(total.split(rows), out.split(rows), strict=True):
            torch.mul(own, upstream, out=into)
        return out
    if total.numel():
        scale_(total, upstream, backend)
    return total


def hold(
    ctx: Any,
    result: Any,
    computed_by: Operator,
    arguments: tuple[Any, ...],
    needs: Needs,
    backend: str,
    kept: bool,
) -> None:
    """Leave what ``released`` takes in an autograd context.

    Args:
        ctx: of the function.
        result: what the operator returned, with the fields of ``_Held``, of which dHidden comes as two
            factors (see ``Gradients``) and dWeight and dBias in the statistics' dtype.
        computed_by: the operator.
        arguments: of its call, hidden states first.
        needs: which gradients are wanted.
        backend: that of the call.
        kept: see above.
    """
    ctx.needs, ctx.dtype, ctx.backend = needs, arguments[0].hidden.dtype, backend
    ctx.kept, ctx.held, ctx.computed_by = kept, None, None
    if kept:
        ctx.save_for_backward(*_Held.of(result))
    else:
        ctx.held, ctx.computed_by = _Held.of(result), computed_by
        computed_by.save(ctx, *arguments)


def released(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of hidden, weight and bias for ``upstream``, None for those that nobody wants."""
    held, ctx.held = ctx.held, None
    if ctx.kept:
        gradients = _Held(*ctx.saved_tensors).times(upstream, ctx.dtype, None)
    else:
        if held is None:
            held = _Held.of(ctx.computed_by.repeat(ctx))
        gradients = held.times(upstream, ctx.dtype, ctx.backend)
    return gradients.wanted(ctx.needs)
