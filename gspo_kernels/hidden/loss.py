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

from gspo_kernels.arguments.terms import Terms, check_values
from gspo_kernels.core.exact import exact_dtype
from gspo_kernels.core.operators import matrix_operator
from gspo_kernels.core.torch_internals import inner_autograd
from gspo_kernels.core.types import NO_RATIO, RowStats, stats_dtype
from gspo_kernels.distributed.groups import sum_
from gspo_kernels.hidden.call import Call, LinearOperands
from gspo_kernels.hidden.chunk import Chunk, as_index, rows_at
from gspo_kernels.hidden.gradients import (
    Gradients,
    HeadGradients,
    is_active,
    recompute,
    save_gradients,
    take_gradients,
)
from gspo_kernels.hidden.groups import CoefficientGroups, known_coefficients, token_terms
from gspo_kernels.hidden.scores import Scores
from gspo_kernels.hidden.sums import HeadSums
from gspo_kernels.logits.centering import CenteringRows, centering_loss
from gspo_kernels.logits.logprobs import ScoredRows
from gspo_kernels.logits.plan import Plan
from gspo_kernels.logits.policy_step import evaluate_objective
from gspo_kernels.logits.selected import SelectedGradients, score
from gspo_kernels.logits.sequence_ratio import sum_over_tokens
from gspo_kernels.objectives.evaluate import PolicyStep, evaluate, metric_names


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
    call = Call(operands, whole_logits=False, plan=plan)
    run = Run(call, check_values(call.labels, terms), plan)
    if plan.schedule == "known":
        run.known()
    else:
        run.by_parts()
    step, (logprobs, _, entropy) = run.whole_step(), run.scores.stats
    if entropy is None:
        entropy = torch.empty(0, dtype=logprobs.dtype, device=logprobs.device)
    return LinearLoss(step.loss, step.metrics, logprobs, entropy, run.gradients.result())


@matrix_operator
def linear_centered_policy(
    operands: LinearOperands, terms: Terms, plan: Plan, centering: CenteringRows
) -> LinearLoss:
    """Return the same for a loss with centering: a row has coefficients of K + 1 ids and of their tail, which
    all follow from its own logits, as in ``Run.known``.
    """
    call, needs = Call(operands), plan.requires_grad
    terms = check_values(call.labels, terms)
    call.make_room(call.row_count)
    scores, gradients = Scores(call, plan.entropy), Gradients(call, needs, normalised=True)
    per_token = token_terms(call.labels, terms, plan.backend)
    loss = torch.zeros((), dtype=exact_dtype(call.labels.device), device=call.labels.device)
    for chunk in call.chunks(call.projected):
        where, logits, some = chunk.where, call.products.logits_of(chunk), centering.at(chunk.where)
        scored = score(logits.unsqueeze(0), some.ids, chunk.options, False)
        logprobs = scored.logprobs[..., 0].contiguous()
        entropy: Tensor | None = None
        if plan.entropy:
            entropy = call.products.backend.logprobs_forward(chunk.rows(logits), True).entropy
        scores.keep(chunk, RowStats(logprobs, scored.lse_others, entropy))
        chunk_terms = per_token.each(lambda _, value: value.flatten()[where].unsqueeze(1))  # noqa: B023
        step = evaluate(logprobs.t(), None, chunk_terms, want_metrics=False)
        with inner_autograd():
            leaves = [each.to(loss.dtype, copy=True).requires_grad_() for each in scored[:2]]
            centred = centering_loss((leaves[0], leaves[1]), some, "")
            grads = SelectedGradients(*torch.autograd.grad(centred, leaves))
        loss = loss + centred.detach()
        grads.logprobs[..., 0] += step.grad_logprobs.flatten()
        gradients.add_selected(logits, some.ids, scored, grads, chunk)
        del logits
    logprobs, _, entropy = scores.stats
    step = evaluate_objective(logprobs, entropy, terms, plan.backend, plan.ratio_clip)
    if entropy is None:
        entropy = logprobs.new_empty(0)
    loss = step.loss + (sum_(terms.cp_group, loss) if terms.cp_group else loss)
    return LinearLoss(loss.to(step.loss.dtype), step.metrics, logprobs, entropy, gradients.result())


@linear_policy.register_fake
@linear_centered_policy.register_fake
def _(operands: LinearOperands, terms: Terms, plan: Plan, *_: Any) -> LinearLoss:
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

    The arguments are the operands (field by field), terms, the plan, whether the call is traced, and with
    centering its rows.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        operands, (terms, plan, traced, *centering) = LinearOperands(*arguments[:7]), arguments[7:]
        call, operator = (operands, terms, plan, *centering), linear_policy
        if centering:
            operator = linear_centered_policy
        result = operator(*call)
        ctx.others = 7 + len(centering)
        save_gradients(ctx, result.gradients, plan.requires_grad, operator, call, traced)
        ctx.mark_non_differentiable(result.metrics, result.logprobs, result.entropy)
        return result.loss, result.metrics, result.logprobs, result.entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        others = (None,) * ctx.others
        return (None, None, None, *others) if grad is None else (*take_gradients(ctx, grad), *others)


class Run:
    """One call. Every schedule is a method, which adds to the call's statistics and gradients."""

    def __init__(self, call: Call, terms: Terms, plan: Plan):
        self.call, self.terms, self.plan = call, terms, plan
        # the least number of rows for which gradient products skip those without gradient
        self.min_rows_to_skip = call.products.min_rows_to_sync if plan.leaves_out else math.inf
        # a ratio, which would show the last bits of the log-probs
        self.compared = terms.old_logprobs is not None or terms.ref_logprobs is not None
        # evaluate all tokens at once: other ranks have tokens of the same sequences, or sums over sequences
        # need one order
        self.at_once = bool(terms.cp_group) or (
            call.chunking.batch_invariant and plan.depends_on in ("group", "batch")
        )
        self._step: PolicyStep | None = None

    def start(self, all_rows: bool, all_active: bool, once: bool) -> None:
        """Make room for statistics and gradients: zeros where rows may be left out, which nothing writes.

        ``all_active``: no row is known to have no gradient. ``once``: dWeight is one product.
        """
        call = self.call
        keeps = (
            all_rows and all_active and call.tokens is None and self.min_rows_to_skip > call.labels.numel()
        )
        self.scores = Scores(call, self.plan.entropy, all_rows=all_rows)
        self.gradients = Gradients(call, self.plan.requires_grad, True, all_rows=keeps, once=once)

    def known(self) -> None:
        """Serve a call in which a token's coefficient is known beforehand, or depends on the token's log-prob
        alone: log-probs and gradient come from the same chunk.
        """
        call, where, terms = self.call, self.call.projected, self.terms
        row_count = call.row_count
        call.make_room(row_count)
        self.start(isinstance(where, slice), True, row_count <= call.chunk_rows)
        if self.plan.depends_on == "nothing":
            grads = known_coefficients(call.labels, terms, self.plan.backend).flatten()
            keep = call.index(grads[where] != 0) if self.min_rows_to_skip <= call.labels.numel() else None
            if isinstance(keep, Tensor):
                # the rows without gradient are only projected
                index = as_index(where, keep.device)
                self.scores.forward(index[call.index(grads[index] == 0, len(index) - len(keep))])
                where = index[keep]
            for chunk in call.chunks(where):
                projected = self.call.products.project(chunk, self.plan.entropy, True, self.compared)
                self.scores.keep(chunk, projected.stats)
                self.gradients.add(projected, chunk, grads[chunk.where], None, False)
                del projected
            return
        per_token = token_terms(call.labels, terms, self.plan.backend)
        ratio_clip = self.plan.ratio_clip
        in_one_launch = ratio_clip != NO_RATIO
        if in_one_launch:
            per_token, ratio_clip = sum_over_tokens(per_token, ratio_clip)
        for chunk in call.chunks(where):
            skip = self.min_rows_to_skip <= chunk.size
            projected = self.call.products.project(chunk, self.plan.entropy, not skip, self.compared)
            self.scores.keep(chunk, projected.stats)
            at, (logprobs, _, entropy) = chunk.where, projected.stats
            # the launch takes the chunk as one row of tokens, PyTorch each token as a sequence
            across = 0 if in_one_launch else 1
            chunk_terms = per_token.each(lambda _, value: value.flatten()[at].unsqueeze(across))  # noqa: B023
            if in_one_launch:
                step = evaluate_objective(
                    logprobs, None, chunk_terms, self.plan.backend, ratio_clip, want_metrics=False
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
        groups = CoefficientGroups(call, self.terms, plan)
        parts = groups.parts
        schedules = [part.schedule for part in parts]
        call.make_room(*(part.row_count for part in parts))
        if self.at_once:
            # the one evaluation needs all tokens projected, so parts that are only projected go first
            parts.sort(key=lambda part: part.schedule != "forward")
        self.start(groups.all_rows, "forward" not in schedules, groups.in_one_product)
        if groups.total is not None:
            self.terms = self.terms._replace(normalizer=groups.total)
        if len(parts) == 1 and not call.chunking.batch_invariant:
            # the evaluation of the call is that of its part; sums of a part would have an order of their own
            self.at_once = True
        sequence_sums = None
        if "deferred" in schedules:
            sequence_sums = HeadSums(call.products, plan.requires_grad, plan.backend)
        for part, where, labels, terms in groups.prepare(parts, self.terms, self.at_once):
            if part.schedule == "forward":
                self.scores.forward(where)
            elif part.schedule == "aligned":
                self.aligned(call.chunk(where, labels), terms)
            elif sequence_sums is not None and part.schedule == "deferred":
                self.deferred(where, terms, sequence_sums)
            elif part.schedule == "frozen":
                self.frozen(where, terms)
            else:
                self.two_pass(where, terms)

    def aligned(self, chunk: Chunk, terms: Terms) -> None:
        """Serve a chunk of whole groups: log-probs, coefficients and gradient come from the same logits."""
        skip = self.min_rows_to_skip <= chunk.size
        projected = self.call.products.project(chunk, self.plan.entropy, not skip, self.compared)
        self.scores.keep(chunk, projected.stats)
        grad, grad_entropy = self.coefficients(chunk.where, terms, projected.stats)
        self.gradients.add(projected, chunk, grad, grad_entropy, skip)

    def deferred(self, where: slice | Tensor, terms: Terms, sums: HeadSums) -> None:
        """Serve a sequence in chunks: its one coefficient multiplies the sequence's ``sums`` at its end."""
        call, gradients, factors = self.call, self.gradients, self.terms.token_weights
        sums.clear()
        counted = call.counted.flatten()[where]
        weights = gradients.one.expand(counted.shape)
        if factors is not None:
            weights = torch.where(counted, rows_at(factors, where).to(gradients.dtype), 0.0)
        done = 0
        for chunk in call.chunks(where):
            projected = self.call.products.project(chunk, self.plan.entropy, True, self.compared)
            self.scores.keep(chunk, projected.stats)
            unit = weights[done : done + chunk.size]
            done += chunk.size
            active = None if call.chunking.compact else call.counted.flatten()[chunk.where]
            gradients.add_rows(gradients.rows(projected, chunk, unit, None, active), chunk, sums)
            del projected
        grad, _ = self.coefficients(where, terms)
        # the sequence's one coefficient, from the token of the largest weight, where rounding matters least
        at = torch.where(counted, weights.abs(), -1.0).argmax()
        weight, total = weights.take(at), grad.take(at)  # an index in brackets would be read by the host
        coefficient = torch.where(weight == 0, 0.0, total / weight)
        gradients.scale(where, coefficient.expand(counted.shape))
        gradients.sums.add_sums(sums, coefficient)

    def frozen(self, where: slice | Tensor, terms: Terms) -> None:
        """Serve a head without gradient: rows of dHidden wait for the coefficients that multiply them.

        Blocks of columns would not pay. Each adds to all of dHidden: 8NH bytes, of 151,936 columns 20 GB for
        16,384 tokens and H = 4,096, which is 4 ms beside 59 of products on an H200; chunks of rows read the
        weight again, but while they multiply. And [n, 4096] with dHidden in fp32 take more memory than 256
        MiB of rows from 11,000 tokens on (22,000 at H = 1,024). Exponentials whose offset is the label's
        logit would have to wait for a row's last column, too, which alone shows whether that offset serves.
        """
        for chunk in self.call.chunks(where):
            projected = self.call.products.project(chunk, self.plan.entropy, True, self.compared)
            self.scores.keep(chunk, projected.stats)
            self.gradients.add_rows(self.gradients.rows(projected, chunk), chunk)
            del projected
        self.gradients.scale(where, self.coefficients(where, terms)[0])

    def two_pass(self, where: slice | Tensor, terms: Terms) -> None:
        """Project all rows for their coefficients, and rows with a gradient once more."""
        self.scores.forward(where)
        grad, grad_entropy = self.coefficients(where, terms)
        keep = self.call.index(is_active(grad, grad_entropy)) if self.min_rows_to_skip <= len(grad) else None
        chosen = keep if isinstance(keep, Tensor) else None
        if chosen is not None:
            where = as_index(where, chosen.device)[chosen]
        if self.call.chunking.batch_invariant and isinstance(where, Tensor):
            where, order = where.sort()
            chosen = order if chosen is None else chosen[order]
        if chosen is not None:
            grad, grad_entropy = grad[chosen], None if grad_entropy is None else grad_entropy[chosen]
        new_stats = isinstance(keep, Tensor) and self.call.products.varies
        recompute(self.scores, self.gradients, where, new_stats, grad, grad_entropy)

    def coefficients(
        self, where: slice | Tensor, terms: Terms, stats: RowStats | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return dLoss/dlogprobs and dLoss/dentropy of a part's rows, [n] each, from ``stats`` if passed."""
        if self.at_once:
            step = self.whole_step()
        else:
            logprobs, _, entropy = self.scores.at(where) if stats is None else stats
            backend, ratio_clip = self.plan.backend, self.plan.ratio_clip
            if terms.cu_seqlens is None:
                assert terms.loss_mask is not None
                logprobs = logprobs.view(terms.loss_mask.shape)
                entropy = None if entropy is None else entropy.view(logprobs.shape)
            step = evaluate_objective(logprobs, entropy, terms, backend, ratio_clip, want_metrics=False)
            where = slice(0, logprobs.numel())
        grad_entropy = rows_at(step.grad_entropy, where) if step.grad_entropy.numel() else None
        return rows_at(step.grad_logprobs, where), grad_entropy

    def whole_step(self) -> PolicyStep:
        """Return loss, coefficients and metrics of the whole call, once all its log-probs are computed."""
        if self._step is None:
            logprobs, _, entropy = self.scores.stats
            plan = self.plan
            self._step = evaluate_objective(logprobs, entropy, self.terms, plan.backend, plan.ratio_clip)
        return self._step
