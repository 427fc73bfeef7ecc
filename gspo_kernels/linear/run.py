"""A hidden-state loss whose gradient is computed along with it, by the schedules of ``schedule``.

Log-probs of whole scopes (sequences, groups) give their coefficients, so the gradient of a part of the batch
can follow while its logits, or what is left of them, still exist. The outer divisor is known beforehand from
masks and lengths alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from gspo_kernels.aggregation import Aggregation
from gspo_kernels.evaluate import PolicyStep, evaluate
from gspo_kernels.linear.chunks import Call
from gspo_kernels.linear.cost import Shapes
from gspo_kernels.linear.exactness import coefficients_depend_on, evaluated_at_once, refusals
from gspo_kernels.linear.gradients import Gradients, HeadSums, Needs, Rows, recompute
from gspo_kernels.linear.schedule import Part, plan_parts
from gspo_kernels.linear.scopes import Scopes, chunk_terms, known_coefficients, token_terms
from gspo_kernels.linear.scores import Kept, Scores
from gspo_kernels.objectives.base import from_spec
from gspo_kernels.sequence_ratio import ratio_form
from gspo_kernels.step import take_step
from gspo_kernels.terms import Terms
from gspo_kernels.types import RowStats, stats_dtype


def shapes_of(call: Call, terms: Terms, needs: Needs) -> Shapes:
    """What costs depend on."""
    head, objective = call.head, from_spec(terms.objective)
    entropy = terms.entropy_coef is not None or "entropy" in objective.needs
    return Shapes(
        vocabulary=call.vocabulary,
        width=call.hidden.shape[-1],
        chunk_rows=call.chunk_rows,
        logits_itemsize=head.dtype.itemsize,
        rows_itemsize=call.rows_itemsize,
        accumulator_itemsize=stats_dtype(call.hidden.dtype).itemsize,
        operand_itemsize=head.weight.dtype.itemsize,
        trains_hidden=needs.hidden,
        trains_weight=needs.head,
        one_launch=ratio_form(objective, terms, call.options.backend) is not None,
        one_pass=call.one_pass(entropy),
        device=call.hidden.device.type,
    )


class Run:
    """One call: its chunks go through the schedules, which add up statistics and gradients."""

    def __init__(self, call: Call, terms: Terms, entropy: bool, needs: Needs, skip: bool):
        self.call, self.terms, self.skip = call, terms, skip
        self.scores = Scores(call, entropy)
        self.gradients = Gradients(call, needs, normalised=True)
        self._step: PolicyStep | None = None

    def step(self) -> PolicyStep:
        """Loss and metrics of the whole call, once all its log-probs are there."""
        if self._step is None:
            scores, backend = self.scores, self.call.options.backend
            self._step = take_step(scores.logprobs, scores.entropy, self.terms, backend)
        return self._step

    @cached_property
    def total(self) -> Tensor:
        """What the outer divisor counts."""
        return Aggregation.of(self.call.labels, self.terms).total

    def known(self) -> None:
        """Coefficients token by token, or beforehand where they depend on nothing."""
        call = self.call
        if coefficients_depend_on(from_spec(self.terms.objective), self.terms) == "nothing":
            coefficients = known_coefficients(call.labels, self.terms, call.options.backend).flatten()
            for chunk in call.chunks(call.projected):
                projected = self.scores.add(chunk)
                self.gradients.add(projected, chunk, coefficients[chunk.where], None, self.skip)
                del projected
            return
        per_token = token_terms(call.labels, self.terms, call.options.backend)
        for chunk in call.chunks(call.projected):
            projected = self.scores.add(chunk)
            logprobs, entropy = projected.stats.logprobs, projected.stats.entropy
            entropy = None if entropy is None else entropy.unsqueeze(1)
            terms = chunk_terms(per_token, chunk.where)
            step = evaluate(logprobs.unsqueeze(1), entropy, terms, want_metrics=False)
            self.gradients.add(projected, chunk, *_flat(step), self.skip)
            del projected

    def by_scopes(self, schedule: str, needs: Needs) -> None:
        """Part by part."""
        call, terms = self.call, self.terms
        if schedule in ("auto", "aligned") and self._is_one_chunk():
            self._whole()
            return
        self.scopes = Scopes(call, terms, self.skip)
        reasons = refusals(from_spec(terms.objective), terms, needs.head, call.head.fixed)
        shapes = shapes_of(call, terms, needs)
        parts = plan_parts(schedule, self.scopes.rows, self.scopes.idle, shapes, reasons)
        self.at_once = bool(terms.cp_group) or evaluated_at_once(
            from_spec(terms.objective), terms, call.head.fixed
        )
        self.scores.expect(min(call.chunk_rows, max((part.rows for part in parts), default=0)))
        if self.at_once:
            # the one evaluation, of all tokens on all ranks, stands behind the last projection
            parts.sort(key=lambda part: part.strategy != "forward")
        self.scratch: HeadSums | None = None
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

    def _is_one_chunk(self) -> bool:
        """Whether nothing is to be cut or left out: what small calls need no plan for."""
        rows = self.call.labels.numel()
        whole = 0 < rows <= self.call.chunk_rows and self.terms.skipped is None
        return whole and isinstance(self.call.projected, slice)

    def _whole(self) -> None:
        chunk = self.call.chunk(slice(0, self.call.labels.numel()))
        projected = self.scores.add(chunk)
        shown = projected.stats.each(lambda stat: stat.view(self.call.labels.shape))
        backend = self.call.options.backend
        terms = self.terms._replace(normalizer=self.total) if self.call.head.fixed else self.terms
        self._step = take_step(shown.logprobs, shown.entropy, terms, backend)
        self.gradients.add(projected, chunk, *_flat(self._step), self.skip)

    def _step_of(self, part: Part, stats: RowStats) -> tuple[Tensor, Tensor | None]:
        """dLoss/dlogprobs and dLoss/dentropy of a part's rows, given their statistics."""
        logprobs, terms = stats.logprobs.unsqueeze(0), self.scopes.terms_of(part, self.total)
        entropy = None if stats.entropy is None else stats.entropy.unsqueeze(0)
        return _flat(take_step(logprobs, entropy, terms, self.call.options.backend, want_metrics=False))

    def _coefficients(self, part: Part) -> tuple[Tensor, Tensor | None]:
        """The same from the statistics that are kept."""
        if self.at_once:
            where = self.scopes.rows_of(part)
            grad, grad_entropy = _flat(self.step())
            return grad[where], None if grad_entropy is None else grad_entropy[where]
        return self._step_of(part, self.scores.at(self.scopes.rows_of(part)))

    def _forward(self, part: Part) -> None:
        for chunk in self.call.forward_chunks(self.scopes.rows_of(part)):
            self.scores.add_forward(chunk)

    def _aligned(self, part: Part) -> None:
        chunk = self.call.chunk(self.scopes.rows_of(part))
        projected = self.scores.add(chunk)
        self.gradients.add(projected, chunk, *self._step_of(part, projected.stats), self.skip)

    def _two_pass(self, part: Part) -> None:
        self._forward(part)
        where = self.scopes.rows_of(part)
        grad, grad_entropy = self._coefficients(part)
        active = grad != 0 if grad_entropy is None else (grad != 0) | (grad_entropy != 0)
        keep = self.call.index(active) if self.skip else None
        gradient = self.call.new_rows().view(-1)
        gradient[where] = grad
        entropy_gradient = None
        if grad_entropy is not None:
            entropy_gradient = self.call.new_rows().view(-1)
            entropy_gradient[where] = grad_entropy
        if isinstance(keep, Tensor):
            where = _index(where, keep.device)[keep]
        if self.call.head.fixed and isinstance(where, Tensor):
            where = where.sort().values
        anew = isinstance(keep, Tensor) and self.call.head.shows_other_rows
        recompute(self.scores, self.gradients, where, anew, gradient, entropy_gradient)

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
        own, where = self.call.own_rows(self.scopes.rows_of(part))
        scales.view(-1)[where] *= coefficients[own]

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
        keep = call.index(active) if self.skip else None
        if isinstance(keep, Tensor):
            kept = Kept.of(keep, part.rows, head.fixed)
            cache, keep = kept.to_front(cache), kept.rows
            where = _index(where, keep.device)[keep]
            grad, active, factors = grad[keep], active[keep], factors[keep]
        done = 0
        for chunk in call.chunks(where):
            now = slice(done, done + len(chunk))
            gradients.add_rows(Rows(cache[now], factors[now]), chunk, grad[now], active[now])
            done = now.stop

    def _deferred(self, part: Part) -> None:
        call, gradients, where = self.call, self.gradients, self.scopes.rows_of(part)
        factors = self.scopes.terms_of(part, self.total).token_weights
        if self.scratch is None:
            self.scratch = HeadSums(call.head, gradients.needs, gradients.backend)
        self.scratch.clear()
        dtype, one, done = gradients.accumulate, self.scores.logprobs.new_ones(()), 0
        weights = one.expand(part.rows) if factors is None else factors.squeeze(0).to(dtype)
        for chunk in call.chunks(where):
            projected = self.scores.add(chunk)
            unit = weights[done : done + len(chunk)]
            done += len(chunk)
            rows = gradients.rows(projected, chunk)
            finish = gradients.begin_hidden(rows, chunk, unit)
            counted = chunk.labels.squeeze(0) != call.options.ignore_index
            self.scratch.add(rows, chunk.hidden, unit, counted)
            finish()
            del projected, rows
        grad, _ = self._coefficients(part)
        # one number for the sequence, taken where rounding matters least
        counted = call.labels.flatten()[where] != call.options.ignore_index
        most = torch.where(counted, weights.abs(), -1.0).argmax()
        weight, own = weights.take(most), grad.take(most)  # an index in brackets would be read by the host
        coefficient = torch.where(weight == 0, 0.0, own / weight)
        self._scale(part, coefficient.expand(part.rows))
        gradients.sums.add_sums(self.scratch, coefficient)


def _flat(step: PolicyStep) -> tuple[Tensor, Tensor | None]:
    return step.grad_logprobs.flatten(), step.grad_entropy.flatten() if step.grad_entropy.numel() else None


def _index(where: slice | Tensor, device: torch.device) -> Tensor:
    return torch.arange(where.start, where.stop, device=device) if isinstance(where, slice) else where
