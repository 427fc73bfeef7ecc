"""A hidden-state loss whose gradient is computed along with it, by the schedules of ``schedule``.

Log-probs of whole scopes (sequences, groups) give their coefficients, so the gradient of a part of the batch
can follow while its logits, or what is left of them, still exist. The outer divisor is known beforehand from
masks and lengths alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.layout import Padded, layout_of
from gspo_kernels.objectives.base import Objective, from_spec
from gspo_kernels.objectives.linear import Linear
from gspo_kernels.ops import linear
from gspo_kernels.ops.library import operator
from gspo_kernels.ops.logprobs import fake_stats, scale_
from gspo_kernels.policy import (
    TERMS,
    PolicyStep,
    PolicyTerms,
    check_term_values,
    evaluate,
    outer_total,
    token_shares,
)
from gspo_kernels.policy_step import policy_step, sequence_form
from gspo_kernels.schedule import Part, Refusals, Shapes, plan_parts
from gspo_kernels.types import RowStats, stats_dtype


def coefficients_depend_on(objective: Objective, terms: PolicyTerms) -> str:
    """What a token's coefficient depends on in this call: "nothing" (known beforehand), "token" or more."""
    on_policy = terms.old_logprobs is None and objective.ratio_only
    if terms.kl_beta is not None and terms.kl_ratio_weighted and objective.coefficient_scope != "token":
        return objective.coefficient_scope
    has_token_terms = terms.kl_beta is not None or terms.entropy_coef is not None
    if on_policy or objective.coefficient_scope == "nothing":
        return "token" if has_token_terms else "nothing"
    return objective.coefficient_scope


def what_couples_tokens(objective: Objective, terms: PolicyTerms) -> str:
    """What makes coefficients depend on more than a token, in words."""
    name = f"{type(objective).__name__} off-policy" if objective.ratio_only else type(objective).__name__
    if terms.kl_beta is not None and terms.kl_ratio_weighted:
        return f"kl_ratio_weighted with {name}"
    return name


def refusals(objective: Objective, terms: PolicyTerms, trains_head: bool) -> Refusals:
    """Why schedules are not exact for a call."""
    name, scope = type(objective).__name__, coefficients_depend_on(objective, terms)
    reasons = {}
    if scope not in ("nothing", "token"):
        what = what_couples_tokens(objective, terms)
        reasons["known"] = (
            f"it needs coefficients that depend on one token alone, but {what} makes them "
            f"depend on the {scope}"
        )
    if terms.kl_beta is not None:
        reasons["deferred"] = "kl_beta adds a coefficient of each token's own"
    elif not objective.factorizes:
        reasons["deferred"] = f"{name}'s coefficients are not one number per sequence"
    elif terms.advantages is not None and terms.advantages.ndim == 2:
        reasons["deferred"] = f"advantages per token give {name} coefficients per token"
    elif terms.rollout_weights is not None and terms.rollout_weights.ndim == 2 and objective.level == "token":
        reasons["deferred"] = f"rollout_weights per token give {name} coefficients per token"
    if terms.entropy_coef is not None:
        for schedule in ("deferred", "frozen", "cached"):
            reasons[schedule] = "entropy_coef adds a gradient that is no multiple of the log-prob's"
    if trains_head:
        reasons.setdefault("frozen", "the lm_head's weight or bias needs a gradient")
    if terms.skipped is not None and scope in ("group", "batch"):
        for schedule in ("aligned", "frozen", "cached"):
            reasons[schedule] = f"skip_inactive='all' leaves out sequences that {name}'s coefficients look at"
    return Refusals(reasons)


def known_coefficients(tokens: Tensor, terms: PolicyTerms) -> Tensor:
    """dLoss/dlogprobs of the objective alone, where log-probs don't matter; ``tokens`` gives the shape."""
    alone = terms._replace(old_logprobs=None, ref_logprobs=None, kl_beta=None, entropy_coef=None)
    return evaluate(
        torch.zeros_like(tokens, dtype=torch.float64), None, alone, want_metrics=False
    ).grad_logprobs


def _per_token(value: Tensor | None, labels: Tensor) -> Tensor | None:
    """A number, or what broadcasts to the labels, as tokens."""
    return None if value is None else value.to(labels.device).expand(labels.shape)


def _token_terms(labels: Tensor, terms: PolicyTerms) -> PolicyTerms:
    """The same terms with every tensor expanded to tokens and aggregation as a share per token."""
    layout = layout_of(labels, terms.cu_seqlens)
    mask = torch.ones_like(labels, dtype=torch.bool) if terms.loss_mask is None else terms.loss_mask != 0
    shares = token_shares(labels, mask, terms)
    objective, weights, advantages = terms.objective, terms.token_weights, terms.advantages
    if from_spec(objective).coefficient_scope not in ("nothing", "token"):
        coefficients = known_coefficients(labels, terms)
        weights, advantages = torch.where(shares != 0, coefficients / shares, 0.0), None
        objective = Linear().spec
        rollout_weights = None
    else:
        rollout_weights = terms.rollout_weights

    def expand(values: Tensor | None) -> Tensor | None:
        return layout.expand(values) if values is not None and values.ndim == 1 else values

    return terms._replace(
        loss_mask=mask,
        cu_seqlens=None,
        advantages=expand(advantages),
        rollout_weights=expand(rollout_weights),
        token_weights=weights,
        kl_beta=_per_token(terms.kl_beta, labels),
        entropy_coef=_per_token(terms.entropy_coef, labels),
        lengths=None,
        group_ids=None,
        turn_ids=None,
        normalizer=None,
        skipped=None,
        token_shares=shares,
        objective=objective,
    )


def _chunk_terms(terms: PolicyTerms, where: slice | Tensor) -> PolicyTerms:
    """Rows of token terms, each its own sequence of one token."""
    tensors: dict[str, Any] = {
        name: value.flatten()[where].unsqueeze(1)
        for name, value in terms._asdict().items()
        if isinstance(value, Tensor)
    }
    return terms._replace(**tensors)


class Scopes:
    """The rows of a call by scope: scopes in the order of their parts, those without any gradient last.

    Attributes:
        rows: rows of each scope.
        idle: how many scopes, the last ones, have no gradient whatever the forward finds.
    """

    def __init__(self, call: linear.Call, terms: PolicyTerms, skip: bool):
        self.call, self.terms = call, terms
        self.layout = layout_of(call.labels, terms.cu_seqlens)
        counts = self._counts()
        scopes = self._scopes(counts)
        idle = self._idle(terms) if skip else None
        if idle is not None:
            gone = idle.tolist()
            working = [scope for scope in scopes if not all(gone[i] for i in scope)]
            resting = [scope for scope in scopes if all(gone[i] for i in scope)]
        else:
            working, resting = scopes, []
        self.idle = len(resting)
        # those that fit a chunk together, next to those that only need a projection
        working.sort(key=lambda scope: sum(counts[i] for i in scope) <= call.chunk_rows)
        scopes = working + resting
        self.rows = [sum(counts[i] for i in scope) for scope in scopes]
        self._sequences = [i for scope in scopes for i in scope]
        self._sequence_ends = [0, *itertools.accumulate(len(scope) for scope in scopes)]
        self._row_ends = [0, *itertools.accumulate(counts[i] for i in self._sequences)]
        self.where = self._positions(counts)

    def _counts(self) -> list[int]:
        """Rows of each sequence."""
        call, layout = self.call, self.layout
        if isinstance(layout, Padded) and not call.compact:
            return [layout.length] * layout.sequences
        kept = call.counted if call.compact else torch.ones_like(call.counted)
        return [int(count) for count in layout.sum(kept.to(torch.float64)).tolist()]

    def _scopes(self, counts: list[int]) -> list[list[int]]:
        scope = coefficients_depend_on(from_spec(self.terms.objective), self.terms)
        if scope not in ("group", "batch"):
            return [[i] for i, count in enumerate(counts) if count]
        if scope == "batch" or self.terms.group_ids is None:
            return [list(range(len(counts)))] if counts else []
        groups: dict[int, list[int]] = {}
        for i, group in enumerate(self.terms.group_ids.tolist()):
            groups.setdefault(group, []).append(i)
        return list(groups.values())

    def _idle(self, terms: PolicyTerms) -> Tensor | None:
        """[B], sequences without gradient whatever the forward finds; None where no advantage tells."""
        terms_of_tokens = terms.kl_beta is not None or terms.entropy_coef is not None
        if terms.advantages is None or terms_of_tokens:
            return None
        if not from_spec(terms.objective).zero_advantage_is_inactive:
            return None
        idle = terms.advantages == 0
        if idle.ndim == 2:
            idle = self.layout.sum((~idle & self.call.counted).to(torch.float64)) == 0
        return idle

    def _positions(self, counts: list[int]) -> slice | Tensor:
        """Positions of all rows in the order of the scopes."""
        call = self.call
        where = call.index(call.counted if call.compact else None)
        present = [i for i, count in enumerate(counts) if count]
        if [i for i in self._sequences if counts[i]] == present:
            return where
        index = torch.arange(where.stop, device=call.labels.device) if isinstance(where, slice) else where
        starts = [0, *itertools.accumulate(counts)]
        return torch.cat([index[starts[i] : starts[i + 1]] for i in self._sequences])

    def rows_of(self, part: Part) -> slice | Tensor:
        """Positions of a part's rows among the flattened rows of the call."""
        first, last = self._sequence_range(part)
        rows = slice(self._row_ends[first], self._row_ends[last])
        return rows if isinstance(self.where, slice) else self.where[rows]

    def _sequence_range(self, part: Part) -> tuple[int, int]:
        return self._sequence_ends[part.start], self._sequence_ends[part.stop]

    def terms_of(self, part: Part, total: Tensor) -> PolicyTerms:
        """The part as a packed batch of its own; ``total`` is what the outer divisor counts in the call."""
        terms, labels = self.terms, self.call.labels
        first, last = self._sequence_range(part)
        where = self.rows_of(part)
        ends = self._row_ends[first : last + 1]
        sequences = torch.tensor(self._sequences[first:last], device=labels.device)

        def select(value: Tensor | None) -> Tensor | None:
            if value is None or value.ndim == 0:
                return value
            return value[sequences] if value.ndim == 1 else value.flatten()[where].unsqueeze(0)

        def select_broadcast(value: Tensor | None) -> Tensor | None:
            return value if value is None or value.ndim == 0 else select(_per_token(value, labels))

        return terms._replace(
            old_logprobs=select(terms.old_logprobs),
            advantages=select(terms.advantages),
            loss_mask=select(terms.loss_mask),
            ref_logprobs=select(terms.ref_logprobs),
            rollout_weights=select(terms.rollout_weights),
            token_weights=select(terms.token_weights),
            lengths=select(terms.lengths),
            group_ids=select(terms.group_ids),
            turn_ids=select(terms.turn_ids),
            kl_beta=select_broadcast(terms.kl_beta),
            entropy_coef=select_broadcast(terms.entropy_coef),
            cu_seqlens=torch.tensor([end - ends[0] for end in ends], dtype=torch.int32, device=labels.device),
            normalizer=total,
            skipped=None,
        )


def shapes_of(call: linear.Call, terms: PolicyTerms, needs: tuple[bool, ...]) -> Shapes:
    """What costs depend on."""
    head, objective = call.head, from_spec(terms.objective)
    entropy = terms.entropy_coef is not None or "entropy" in objective.needs
    return Shapes(
        vocabulary=head.vocabulary,
        width=call.hidden.shape[-1],
        chunk_rows=call.chunk_rows,
        logits_itemsize=head.dtype.itemsize,
        rows_itemsize=head.rows_dtype.itemsize,
        accumulator_itemsize=stats_dtype(call.hidden.dtype).itemsize,
        operand_itemsize=head.weight.dtype.itemsize,
        trains_hidden=needs[0],
        trains_weight=needs[1] or needs[2],
        one_launch=sequence_form(objective, terms, call.backend) is not None,
        one_pass=call.one_pass(entropy),
        device=call.hidden.device.type,
    )


class _Run:
    """One call at work."""

    def __init__(
        self, call: linear.Call, terms: PolicyTerms, entropy: bool, needs: tuple[bool, ...], skip: bool
    ):
        self.call, self.terms, self.skip = call, terms, skip
        self.scores = linear.Scores(call, entropy)
        self.gradients = linear.Gradients(call, needs, normalised=True)

    def known(self) -> None:
        """Coefficients token by token, or beforehand where they depend on nothing."""
        call = self.call
        if coefficients_depend_on(from_spec(self.terms.objective), self.terms) == "nothing":
            coefficients = known_coefficients(call.labels, self.terms).flatten()
            for chunk in call.chunks(call.index(call.counted if call.compact else None)):
                projected = self.scores.add(chunk)
                self.gradients.add(projected, chunk, coefficients[chunk.where], None, self.skip)
                del projected
            return
        per_token = _token_terms(call.labels, self.terms)
        for chunk in call.chunks(call.index(call.counted if call.compact else None)):
            projected = self.scores.add(chunk)
            logprobs, entropy = projected.stats.logprobs, projected.stats.entropy
            entropy = None if entropy is None else entropy.unsqueeze(1)
            terms = _chunk_terms(per_token, chunk.where)
            step = evaluate(logprobs.unsqueeze(1), entropy, terms, want_metrics=False)
            self.gradients.add(projected, chunk, *_flat(step), self.skip)
            del projected

    def by_scopes(self, schedule: str, needs: tuple[bool, ...]) -> None:
        """Part by part."""
        call, terms = self.call, self.terms
        self.scopes = Scopes(call, terms, self.skip)
        reasons = refusals(from_spec(terms.objective), terms, needs[1] or needs[2])
        shapes = shapes_of(call, terms, needs)
        parts = plan_parts(schedule, self.scopes.rows, self.scopes.idle, shapes, reasons)
        mask = (
            torch.ones_like(call.labels, dtype=torch.bool)
            if terms.loss_mask is None
            else terms.loss_mask != 0
        )
        self.scores.expect(min(call.chunk_rows, max((part.rows for part in parts), default=0)))
        self.total = outer_total(call.labels, mask, terms)
        self.scratch: linear.HeadSums | None = None
        strategies: dict[str, Callable[[Part], None]] = {
            "forward": self._forward,
            "aligned": self._aligned,
            "deferred": self._deferred,
            "frozen": self._frozen,
            "cached": self._cached,
            "two_pass": self._two_pass,
        }
        for part in parts:
            strategies[part.strategy](part)

    def _step(self, part: Part, stats: RowStats) -> tuple[Tensor, Tensor | None]:
        """dLoss/dlogprobs and dLoss/dentropy of a part's rows, given their statistics."""
        logprobs, terms = stats.logprobs.unsqueeze(0), self.scopes.terms_of(part, self.total)
        entropy = None if stats.entropy is None else stats.entropy.unsqueeze(0)
        return _flat(policy_step(logprobs, entropy, terms, self.call.backend, want_metrics=False))

    def _coefficients(self, part: Part) -> tuple[Tensor, Tensor | None]:
        """The same from the statistics that are kept."""
        return self._step(part, self.scores.at(self.scopes.rows_of(part)))

    def _forward(self, part: Part) -> None:
        for chunk in self.call.chunks(self.scopes.rows_of(part)):
            self.scores.add_forward(chunk)

    def _aligned(self, part: Part) -> None:
        chunk = self.call.chunk(self.scopes.rows_of(part))
        projected = self.scores.add(chunk)
        self.gradients.add(projected, chunk, *self._step(part, projected.stats), self.skip)

    def _two_pass(self, part: Part) -> None:
        self._forward(part)
        where = self.scopes.rows_of(part)
        grad, grad_entropy = self._coefficients(part)
        active = grad != 0 if grad_entropy is None else (grad != 0) | (grad_entropy != 0)
        everything = not self.skip or bool(active.all())
        gradient = self.call.new_rows().view(-1)
        gradient[where] = grad
        entropy_gradient = None
        if grad_entropy is not None:
            entropy_gradient = self.call.new_rows().view(-1)
            entropy_gradient[where] = grad_entropy
        if not everything:
            where = _index(where, active.device)[active]
        anew = not everything and linear.exact(self.call)
        linear.recompute(self.scores, self.gradients, where, anew, gradient, entropy_gradient)

    def _frozen(self, part: Part) -> None:
        gradients = self.gradients
        for chunk in self.call.chunks(self.scopes.rows_of(part)):
            projected = self.scores.add(chunk)
            rows = gradients.rows(projected, chunk)
            gradients.add_hidden(rows, chunk, torch.ones_like(projected.stats.logprobs))
            del projected, rows
        self._scale(part, self._coefficients(part)[0])

    def _scale(self, part: Part, coefficients: Tensor) -> None:
        """Let the coefficients that have come late multiply rows of dHidden."""
        scales = self.gradients.scales
        assert scales is not None
        scales.view(-1)[self.scopes.rows_of(part)] *= coefficients

    def _cached(self, part: Part) -> None:
        call, gradients, where = self.call, self.gradients, self.scopes.rows_of(part)
        head = call.head
        cache = torch.empty(part.rows, head.vocabulary, dtype=head.rows_dtype, device=call.hidden.device)
        factors, done = self.scores.logprobs.new_ones(part.rows), 0
        for chunk in call.chunks(where):
            now = slice(done, done + len(chunk))
            projected = self.scores.add(chunk, out=cache[now])
            rows = gradients.rows(projected, chunk, out=cache[now])
            if rows.factors is not None:
                factors[now] = rows.factors
            done = now.stop
            del projected
        grad, _ = self._coefficients(part)
        active = grad != 0
        if self.skip and not bool(active.all()):
            keep = active.nonzero().squeeze(1)
            cache, where = linear.move_up(cache, keep), _index(where, keep.device)[keep]
            grad, active, factors = grad[keep], active[keep], factors[keep]
        done = 0
        for chunk in call.chunks(where):
            now = slice(done, done + len(chunk))
            gradients.add_rows(linear.Rows(cache[now], factors[now]), chunk, grad[now], active[now])
            done = now.stop

    def _deferred(self, part: Part) -> None:
        call, gradients, where = self.call, self.gradients, self.scopes.rows_of(part)
        factors = self.scopes.terms_of(part, self.total).token_weights
        if self.scratch is None:
            self.scratch = linear.HeadSums(call.head, gradients.trained)
        self.scratch.clear()
        dtype, one, done = gradients.accumulate, self.scores.logprobs.new_ones(()), 0
        weights = one.expand(part.rows) if factors is None else factors.squeeze(0).to(dtype)
        for chunk in call.chunks(where):
            projected = self.scores.add(chunk)
            unit = weights[done : done + len(chunk)]
            done += len(chunk)
            rows = gradients.rows(projected, chunk)
            gradients.add_hidden(rows, chunk, unit)
            counted = chunk.labels.squeeze(0) != call.ignore_index
            self.scratch.add(rows, chunk.hidden, unit, counted, one)
            del projected, rows
        grad, _ = self._coefficients(part)
        # one number for the sequence, taken where rounding matters least
        counted = call.labels.flatten()[where] != call.ignore_index
        most = torch.where(counted, weights.abs(), -1.0).argmax()
        coefficient = torch.where(weights[most] == 0, 0.0, grad[most] / weights[most])
        self._scale(part, coefficient.expand(part.rows))
        gradients.sums.add_sums(self.scratch, coefficient)


def _flat(step: PolicyStep) -> tuple[Tensor, Tensor | None]:
    return step.grad_logprobs.flatten(), step.grad_entropy.flatten() if step.grad_entropy.numel() else None


def _index(where: slice | Tensor, device: torch.device) -> Tensor:
    return torch.arange(where.start, where.stop, device=device) if isinstance(where, slice) else where


@operator(
    f"linear_policy({linear.LINEAR}, {TERMS}, str schedule, bool entropy, bool need_hidden, "
    "bool need_weight, bool need_bias, bool skip) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def linear_policy(*args: Any) -> tuple[Tensor, ...]:
    """Log-probs, entropy, and the gradients for upstream 1; empty where not wanted.

    dHidden comes as two factors, see ``ops.linear.Gradients``; dWeight and dBias in the statistics' dtype.
    """
    call, rest = linear.Call.split(args)
    fields = len(PolicyTerms._fields)
    terms = PolicyTerms(*rest[:fields])
    schedule, entropy, *needs, skip = rest[fields:]
    check_term_values(call.labels, terms)
    run = _Run(call, terms, entropy, tuple(needs), skip)
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
            return linear.times_(self.hidden, factor), *sums
        return linear.times(self.hidden, factor).to(dtype), *sums


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
