"""Gradients that a loss's forward has computed along with it, for upstream 1, until its backward.

The first backward gives them away, scaled in place; later ones (``retain_graph``) compute them anew. Where
they are ``kept``, which tracing needs, they are scaled out of place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.linear.chunks import LinearOperands
from gspo_kernels.linear.gradients import Gradients, HeadGradients
from gspo_kernels.linear.head import LOGITS_SLAB
from gspo_kernels.linear.scaling import times, times_
from gspo_kernels.linear.sums import Needs
from gspo_kernels.ops.backends import launches_of
from gspo_kernels.ops.library import Operator
from gspo_kernels.ops.logprobs import scale_
from gspo_kernels.types import stats_dtype


class Held(NamedTuple):
    """Gradients that a forward has computed, for upstream 1; empty where not needed.

    dHidden comes as two factors, see ``Gradients``; dWeight and dBias are in the statistics' dtype.
    """

    hidden: Tensor
    scales: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, gradients: Gradients) -> Held:
        """As an operator returns them: no two of its outputs may be the same tensor."""
        found = (gradients.hidden, gradients.scales, *gradients.sums.result())
        missing = gradients.call.hidden.new_empty
        return cls(*(missing(0, dtype=gradients.accumulate) if x is None else x for x in found))

    @classmethod
    def fake(cls, operands: LinearOperands, needs: Needs) -> Held:
        """Without values, for tracing."""
        hidden, weight = operands.hidden, operands.weight
        sums = stats_dtype(hidden.dtype)
        return cls(
            hidden.new_empty(hidden.shape) if needs.hidden else hidden.new_empty(0, dtype=sums),
            hidden.new_empty(hidden.shape[:-1], dtype=sums),
            weight.new_empty(weight.shape if needs.weight else 0, dtype=sums),
            weight.new_empty(weight.shape[0] if needs.bias else 0, dtype=sums),
        )

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
        result: what the operator returned, with gradients as ``held``.
        computed_by: the operator.
        arguments: of its call, hidden states first.
        needs: which gradients are wanted.
        backend: that of the call.
        kept: see above.
    """
    ctx.needs, ctx.dtype, ctx.backend = needs, arguments[0].hidden.dtype, backend
    ctx.kept, ctx.held, ctx.computed_by = kept, None, None
    if kept:
        ctx.save_for_backward(*result.held)
    else:
        ctx.held, ctx.computed_by = result.held, computed_by
        computed_by.save(ctx, *arguments)


def released(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of hidden, weight and bias for ``upstream``, None for those that nobody wants."""
    held, ctx.held = ctx.held, None
    if ctx.kept:
        gradients = Held(*ctx.saved_tensors).times(upstream, ctx.dtype, None)
    else:
        if held is None:
            held = ctx.computed_by.repeat(ctx).held
        gradients = held.times(upstream, ctx.dtype, ctx.backend)
    return gradients.wanted(ctx.needs)
