"""A hidden-state loss whose gradient is computed along with it, by the schedules of ``schedule``.

Coefficients follow from the log-probs of a whole group (one sequence or several). So the gradient of a part
of the batch can follow while its logits, or rows made of them, still exist. The outer divisor is known
beforehand from masks and lengths alone.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.aggregation import Aggregation
from gspo_kernels.evaluate import PolicyStep, evaluate, metric_names
from gspo_kernels.linear.call import Call, Chunk, LinearOperands, as_index
from gspo_kernels.linear.gradients import (
    Gradients,
    HeadGradients,
    is_active,
    recompute,
    save_gradients,
    take_gradients,
)
from gspo_kernels.linear.groups import CoefficientGroups, known_coefficients, token_terms
from gspo_kernels.linear.head import Head
from gspo_kernels.linear.schedule import plan_parts
from gspo_kernels.linear.scores import Scores
from gspo_kernels.linear.sums import HeadSums, times
from gspo_kernels.ops.library import can_bypass_dispatcher, matrix_operator
from gspo_kernels.ops.logprobs import ScoredRows, logprobs_backward, save_rows, saved_rows
from gspo_kernels.ops.products import transposed_product
from gspo_kernels.plan import Plan, RequiresGrad
from gspo_kernels.sequence_ratio import ratio_operands, sequence_ratio
from gspo_kernels.step import evaluate_objective
from gspo_kernels.terms import Terms, check_values
from gspo_kernels.types import (
    NO_RATIO,
    RowGradients,
    RowOptions,
    RowStats,
    SequenceRatioStats,
    stats_dtype,
)


class LinearLoss(NamedTuple):
    """Loss and metrics as in ``PolicyStep``, log-probs, the entropy or an empty tensor, and the gradients."""

    loss: Tensor
    metrics: Tensor
    logprobs: Tensor
    entropy: Tensor
    gradients: HeadGradients


@matrix_operator
def linear_policy(operands: LinearOperands, terms: Terms, plan: Plan) -> LinearLoss:
    """Return a hidden-state loss, its log-probs and its gradients."""
    terms = check_values(operands.labels, terms)
    run = Run(Call(operands), terms, plan)
    if plan.schedule == "known":
        run.known()
    else:
        run.by_parts()
    step, (logprobs, _, entropy) = run.whole_step(), run.scores.stats
    entropy = logprobs.new_empty(0) if entropy is None else entropy
    return LinearLoss(step.loss, step.metrics, logprobs, entropy, run.gradients.result())


@linear_policy.register_fake
def _(operands: LinearOperands, terms: Terms, plan: Plan) -> LinearLoss:
    scored = ScoredRows.fake(operands.labels, operands.hidden.dtype, plan.entropy)
    sums, entropy = stats_dtype(operands.hidden.dtype), scored.entropy if plan.entropy else None
    return LinearLoss(
        scored.logprobs.new_empty((), dtype=sums),
        scored.logprobs.new_empty(len(metric_names(terms, entropy)), dtype=sums),
        scored.logprobs,
        scored.entropy,
        HeadGradients.fake(operands, plan.requires_grad, normalised=True),
    )


class LinearPolicyFunction(torch.autograd.Function):
    """Loss, metrics, log-probs and entropy; the forward computes the gradients, too.

    The arguments are the operands (field by field), terms, the plan, and whether the call is traced.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        operands, (terms, plan, traced) = LinearOperands(*arguments[:7]), arguments[7:]
        call = (operands, terms, plan)
        result = linear_policy(*call)
        save_gradients(ctx, result.gradients, plan.requires_grad, linear_policy, call, traced)
        ctx.mark_non_differentiable(result.metrics, result.logprobs, result.entropy)
        return result.loss, result.metrics, result.logprobs, result.entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 10
        return (*take_gradients(ctx, grad), *(None,) * 7)


class Run:
    """One call. Every schedule is a method, which adds to the call's statistics and gradients."""

    def __init__(self, call: Call, terms: Terms, plan: Plan):
        self.call, self.terms, self.plan = call, terms, plan
        compared = terms.old_logprobs is not None or terms.ref_logprobs is not None
        self.scores = Scores(call, plan.entropy, compared=compared)
        self.gradients = Gradients(call, plan.requires_grad, normalised=True)
        # evaluate all tokens at once: other ranks have tokens of the same sequences, or sums over sequences
        # need one order
        self.at_once = bool(terms.cp_group) or (call.head.fixed and plan.depends_on in ("group", "batch"))
        self._step: PolicyStep | None = None
        self._sequence_sums: HeadSums | None = None

    def known(self) -> None:
        """Serve a call in which a token's coefficient is known beforehand, or depends on the token's log-prob
        alone: log-probs and gradient come from the same chunk.
        """
        call, where, skip, terms = self.call, self.call.projected, self.plan.leaves_out, self.terms
        if self.plan.depends_on == "nothing":
            grads = known_coefficients(call.labels, terms, self.plan.backend).flatten()
            keep = call.index(grads[where] != 0) if skip else None
            if isinstance(keep, Tensor):
                # the rows without gradient are only projected
                index = as_index(where, keep.device)
                self.scores.forward(index[call.index(grads[index] == 0, len(index) - len(keep))])
                where = index[keep]
            for chunk in call.chunks(where):
                projected = self.scores.project(chunk, self.plan.entropy, True)
                self.gradients.add(projected, chunk, grads[chunk.where], None, False)
                del projected
            return
        per_token = token_terms(call.labels, terms, self.plan.backend)
        form = self.plan.ratio
        in_one_launch = form != NO_RATIO
        if in_one_launch:
            # loss = sum_t w_t f(r_t, A_t), where w_t is the token's share times its rollout weight
            form = form._replace(level="token", count_tokens=True, divisor="one", divisor_scale=1.0)
            shares, weights, beta = per_token.token_shares, per_token.rollout_weights, per_token.kl_beta
            assert shares is not None
            if per_token.token_weights is not None:
                # Linear, on-policy: coefficients c_t = share_t * token_weights_t. As r = 1 and
                # dloss/dlogp = -w r A, they are those of w = c and A = -1.
                weights = per_token.token_weights
                per_token = per_token._replace(advantages=torch.full_like(shares, -1.0), token_weights=None)
            per_token = per_token._replace(
                token_shares=None,
                rollout_weights=shares if weights is None else shares * weights,
                kl_beta=None if beta is None else shares * beta,
            )
        for chunk in call.chunks(where):
            projected = self.scores.project(chunk, self.plan.entropy, not skip)
            rows, (logprobs, _, entropy) = chunk.where, projected.stats
            # the launch takes the chunk as one row of tokens, PyTorch each token as a sequence
            across = 0 if in_one_launch else 1
            chunk_terms = per_token.each(lambda _, value: value.flatten()[rows].unsqueeze(across))  # noqa: B023
            if in_one_launch:
                step = evaluate_objective(
                    logprobs, None, chunk_terms, self.plan.backend, form, want_metrics=False
                )
            else:
                entropy = None if entropy is None else entropy.t()
                step = evaluate(logprobs.t(), entropy, chunk_terms, want_metrics=False)
            grad_entropy = step.grad_entropy.flatten() if step.grad_entropy.numel() else None
            self.gradients.add(projected, chunk, step.grad_logprobs.flatten(), grad_entropy, skip)
            del projected

    def by_parts(self) -> None:
        """Cut the batch into parts, and work through each by its schedule."""
        call, plan = self.call, self.plan
        groups = CoefficientGroups(call, self.terms, plan.depends_on, plan.leaves_out)
        parts = plan_parts(plan.schedule, groups.rows, groups.inactive, call.chunk_rows, plan.defers)
        self.scores.most_rows = min(call.chunk_rows, max((part.rows for part in parts), default=0))
        if self.at_once:
            # the one evaluation needs all tokens projected, so parts that are only projected go first
            parts.sort(key=lambda part: part.schedule != "forward")
        total = Aggregation(call.labels, self.terms).total
        for part, where, labels, terms in groups.prepare(parts, total):
            if part.schedule == "forward":
                self.scores.forward(where)
            elif part.schedule == "aligned":
                self.aligned(call.chunk(where, labels), terms)
            elif part.schedule == "deferred":
                self.deferred(where, terms)
            elif part.schedule == "frozen":
                self.frozen(where, terms)
            else:
                self.two_pass(where, terms)

    def aligned(self, chunk: Chunk, terms: Terms) -> None:
        """Serve a chunk of whole groups: log-probs, coefficients and gradient come from the same logits."""
        skip = self.plan.leaves_out
        projected = self.scores.project(chunk, self.plan.entropy, not skip)
        grad, grad_entropy = self.coefficients(chunk.where, terms, projected.stats)
        self.gradients.add(projected, chunk, grad, grad_entropy, skip)

    def deferred(self, where: slice | Tensor, terms: Terms) -> None:
        """Serve a sequence in chunks: its one coefficient multiplies the sequence's sums at its end."""
        call, gradients, factors = self.call, self.gradients, terms.token_weights
        if self._sequence_sums is None:
            self._sequence_sums = HeadSums(call.head, self.plan.requires_grad, self.plan.backend)
        sums = self._sequence_sums
        sums.clear()
        counted = call.counted.flatten()[where]
        weights = gradients.one.expand(counted.shape)
        if factors is not None:
            weights = torch.where(counted, factors[0].to(gradients.dtype), 0.0)
        done = 0
        for chunk in call.chunks(where):
            projected = self.scores.project(chunk, self.plan.entropy, True)
            unit = weights[done : done + chunk.size]
            done += chunk.size
            active = None if call.chunking.compact else call.counted.flatten()[chunk.where]
            gradients.add_rows(gradients.rows(projected, chunk, unit, None, active), chunk, sums)
            del projected
        grad, _ = self.coefficients(where, terms)
        # the sequence's one coefficient, from the token of the largest weight, where rounding matters least
        most = torch.where(counted, weights.abs(), -1.0).argmax()
        weight, whole = weights.take(most), grad.take(most)  # an index in brackets would be read by the host
        coefficient = torch.where(weight == 0, 0.0, whole / weight)
        gradients.scale(where, coefficient.expand(counted.shape))
        gradients.sums.add_sums(sums, coefficient)

    def frozen(self, where: slice | Tensor, terms: Terms) -> None:
        """Serve a head without gradient: rows of dHidden wait for the coefficients that multiply them."""
        for chunk in self.call.chunks(where):
            projected = self.scores.project(chunk, self.plan.entropy, True)
            self.gradients.add_rows(self.gradients.rows(projected, chunk), chunk)
            del projected
        self.gradients.scale(where, self.coefficients(where, terms)[0])

    def two_pass(self, where: slice | Tensor, terms: Terms) -> None:
        """Project all rows for their coefficients, and rows with a gradient once more."""
        head = self.call.head
        self.scores.forward(where)
        grad, grad_entropy = self.coefficients(where, terms)
        keep = self.call.index(is_active(grad, grad_entropy)) if self.plan.leaves_out else None
        chosen = keep if isinstance(keep, Tensor) else None
        if chosen is not None:
            where = as_index(where, chosen.device)[chosen]
        if head.fixed and isinstance(where, Tensor):
            where, order = where.sort()
            chosen = order if chosen is None else chosen[order]
        if chosen is not None:
            grad, grad_entropy = grad[chosen], None if grad_entropy is None else grad_entropy[chosen]
        new_stats = isinstance(keep, Tensor) and head.shows_other_rows
        recompute(self.scores, self.gradients, where, new_stats, grad, grad_entropy)

    def coefficients(
        self, where: slice | Tensor, terms: Terms, stats: RowStats | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return dLoss/dlogprobs and dLoss/dentropy of a part's rows, [n] each, from ``stats`` if passed."""
        if self.at_once:
            step = self.whole_step()
        else:
            logprobs, _, entropy = self.scores.at(where) if stats is None else stats
            backend, ratio = self.plan.backend, self.plan.ratio
            step = evaluate_objective(logprobs, entropy, terms, backend, ratio, want_metrics=False)
            where = slice(None)
        grad_entropy = step.grad_entropy.flatten()[where] if step.grad_entropy.numel() else None
        return step.grad_logprobs.flatten()[where], grad_entropy

    def whole_step(self) -> PolicyStep:
        """Return loss, coefficients and metrics of the whole call, once all its log-probs are computed."""
        if self._step is None:
            logprobs, _, entropy = self.scores.stats
            self._step = evaluate_objective(logprobs, entropy, self.terms, self.plan.backend, self.plan.ratio)
        return self._step


SMALL_BYTES = 2**20
"""Logits on the CPU that take at most this many bytes stay until the backward."""
_LEAST, _MOST = 2.0**-64, 2.0**64
"""Coefficients with a magnitude between these, or zero, neither lose accuracy nor overflow in a product."""


def small_loss(
    operands: LinearOperands, terms: Terms, plan: Plan
) -> tuple[Tensor, SequenceRatioStats] | None:
    """Return logits [B, T, V] and loss of a small call on the CPU, without autograd; None where the schedules
    must serve the call.

    Where the logits fit a cache, planning, chunks and normalised coefficients would take longer than the
    products that they save or protect. The schedules serve calls that plain arithmetic could spoil: with
    tokens that are left out, whose hidden states may be anything; with coefficients that need normalised
    arithmetic; with ranks that share a vocabulary; with products in a fixed order, or with an adapter. They
    also serve calls that must pass torch's dispatcher.
    """
    hidden, weight, bias, labels, options, chunking, base = operands
    if plan.schedule != "auto" or plan.entropy:
        return None
    if base is not None or chunking.batch_invariant or options.shard.group:
        return None
    if not can_bypass_dispatcher([hidden, weight, labels]):
        return None
    budget = min(SMALL_BYTES, chunking.max_chunk_bytes or SMALL_BYTES)
    size = labels.numel() * weight.shape[0] * weight.element_size()
    exact = weight.dtype in (torch.float32, torch.float64)
    if not (hidden.is_cpu and exact and 0 < size <= budget):
        return None
    if plan.ratio.level != "sequence" or terms.old_logprobs is None or terms.ref_logprobs is not None:
        return None
    if terms.skipped is not None or not bool(terms.counted(labels).all()):
        return None
    head = Head(weight.detach(), None if bias is None else bias.detach(), chunking.logits_dtype)
    rows = hidden.detach().reshape(-1, hidden.shape[-1])
    logits = head.logits(rows, rows.new_empty(rows.shape[0], weight.shape[0]))
    logits = logits.view(*labels.shape, weight.shape[0])
    stats = sequence_ratio(logits, labels, options, ratio_operands(labels, terms), plan.ratio)
    coefficients = stats.coefficients / stats.divisor
    # hidden states that aren't finite show here, also where a zero advantage hides them from the loss
    finite = math.isfinite(stats.lse.sum().item())
    if not finite or not all(c == 0 or _LEAST < abs(c) < _MOST for c in coefficients.tolist()):
        return None
    return logits, stats


class SmallLossFunction(torch.autograd.Function):
    """Loss, metrics and log-probs of a small call; the backward computes the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        options: RowOptions,
        terms: Terms,
        logits: Tensor,
        stats: SequenceRatioStats,
    ) -> tuple[Tensor, Tensor, Tensor]:
        each = terms.layout(labels).expand(stats.coefficients / stats.divisor)
        save_rows(ctx, options, hidden, labels, logits, stats.logprobs, stats.lse, each, weight, bias)
        ctx.needs = RequiresGrad(*ctx.needs_input_grad[:3])
        ctx.mark_non_differentiable(stats.metrics, stats.logprobs)
        return stats.loss, stats.metrics, stats.logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 8
        (hidden, labels, logits, logprobs, lse, each, weight, bias), options = saved_rows(ctx)
        needs = ctx.needs
        head = Head(weight, bias, "float32")  # small calls are fp32 or fp64, where logits have no other dtype
        stats = RowStats(logprobs, lse, None)
        rows = logprobs_backward(logits, labels, stats, RowGradients(each), options)
        rows = rows.view(-1, rows.shape[-1])
        gradients: tuple[Tensor | None, ...] = (
            head.grad_hidden(rows).view(hidden.shape) if needs.hidden else None,
            transposed_product(rows, hidden.reshape(-1, hidden.shape[-1])) if needs.weight else None,
            rows.sum(0) if needs.bias else None,
        )
        if grad.item() != 1.0:
            gradients = tuple(None if one is None else times(one, grad) for one in gradients)
        return (*gradients, *(None,) * 5)
