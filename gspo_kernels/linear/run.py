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
from gspo_kernels.linear.chunks import Chunk
from gspo_kernels.linear.exactness import compares_none, evaluated_at_once, refusals
from gspo_kernels.linear.gradients import Gradients, active, recompute
from gspo_kernels.linear.schedule import Part, plan_parts
from gspo_kernels.linear.scopes import Pieces, Scopes, chunk_terms, known_coefficients, token_terms
from gspo_kernels.linear.scores import Projected, Scores
from gspo_kernels.linear.sums import HeadSums, Needs, Weights
from gspo_kernels.objectives.base import from_spec
from gspo_kernels.plan import coefficients_depend_on, ratio_of
from gspo_kernels.step import evaluate_objective
from gspo_kernels.terms import Terms
from gspo_kernels.types import RowStats

_Coefficients = Callable[[slice, Chunk, RowStats], tuple[Tensor, Tensor | None]]
"""dLoss/dlogprobs and dLoss/dentropy of some of the rows of a call: a chunk of them, given its statistics."""


class Run:
    """One call: its chunks go through the schedules, which add up statistics and gradients."""

    def __init__(self, scores: Scores, terms: Terms, needs: Needs, skip: bool):
        call = scores.call
        self.call, self.scores, self.terms, self.skip = call, scores, terms, skip
        self.gradients = Gradients(call, needs, normalised=True)
        self._step: PolicyStep | None = None

    def step(self) -> PolicyStep:
        """Loss and metrics of the whole call, once all its log-probs are there."""
        if self._step is None:
            stats, backend = self.scores.stats, self.call.options.backend
            ratio = ratio_of(self.terms, backend)
            self._step = evaluate_objective(stats.logprobs, stats.entropy, self.terms, backend, ratio)
        return self._step

    @cached_property
    def total(self) -> Tensor:
        """What the outer divisor counts."""
        return Aggregation.of(self.call.labels, self.terms).total

    def known(self) -> None:
        """Coefficients token by token, or beforehand where they depend on nothing."""
        call, terms, where, skip, done = self.call, self.terms, self.call.projected, self.skip, 0
        if coefficients_depend_on(from_spec(terms.objective), terms) == "nothing":
            grad = known_coefficients(call.labels, terms, call.options.backend).flatten()[where]
            if skip and call.selects_rows:
                where, grad = self._score_idle(where, grad)
                skip = False
            coefficients = _taken_from(grad)
        else:
            coefficients = self._coefficients_of_tokens(where)
        for chunk in call.chunks(where):
            now = slice(done, done + len(chunk))
            projected = self._add(chunk, skip)
            self.gradients.add(projected, chunk, *coefficients(now, chunk, projected.stats), skip)
            done = now.stop
            del projected

    def _add(self, chunk: Chunk, skip: bool) -> Projected:
        """``Scores.add``; ``skip`` says that what it finds may leave rows out."""
        return self.scores.add(chunk, settled=not skip and compares_none(self.terms))

    def _score_idle(self, where: slice | Tensor, grad: Tensor) -> tuple[slice | Tensor, Tensor]:
        """Take log-probs of the rows at ``where`` whose coefficients ``grad`` are 0; what is left of both.

        One look at the device for the whole call. In chunks that are left every row has a gradient.
        """
        call = self.call
        keep = call.index(grad != 0)
        if not isinstance(keep, Tensor):
            return where, grad
        where = _index(where, keep.device)
        idle = call.index(grad == 0, len(where) - len(keep))
        for chunk in call.forward_chunks(where[idle]):
            self.scores.add_forward(chunk)
        return where[keep], grad[keep]

    def _coefficients_of_tokens(self, where: slice | Tensor) -> _Coefficients:
        labels, terms, backend = self.call.labels, self.terms, self.call.options.backend
        form = ratio_of(terms, backend)
        if form.level:
            pieces = Pieces(self.call, terms, form.level, where)

            def of_pieces(rows: slice, _: Chunk, stats: RowStats) -> tuple[Tensor, Tensor | None]:
                logprobs = stats.logprobs.unsqueeze(0)
                return _flat(evaluate_objective(logprobs, None, pieces.at(rows), backend, form, False))

            return of_pieces
        per_token = token_terms(labels, terms, backend)

        def of_tokens(_: slice, chunk: Chunk, stats: RowStats) -> tuple[Tensor, Tensor | None]:
            entropy = None if stats.entropy is None else stats.entropy.unsqueeze(1)
            own = chunk_terms(per_token, chunk.where)
            return _flat(evaluate(stats.logprobs.unsqueeze(1), entropy, own, want_metrics=False))

        return of_tokens

    def by_scopes(self, schedule: str, needs: Needs) -> None:
        """Part by part."""
        call, terms = self.call, self.terms
        if schedule in ("auto", "aligned") and self._is_one_chunk():
            self._whole()
            return
        self.scopes = Scopes(call, terms, self.skip)
        reasons = refusals(from_spec(terms.objective), terms, needs.head, call.head.fixed)
        parts = plan_parts(schedule, self.scopes.rows, self.scopes.idle, call.chunk_rows, reasons)
        self.at_once = bool(terms.cp_group) or evaluated_at_once(
            from_spec(terms.objective), terms, call.head.fixed
        )
        self.scores.expect(min(call.chunk_rows, max((part.rows for part in parts), default=0)))
        if self.at_once:
            # the one evaluation, of all tokens on all ranks, stands behind the last projection
            parts.sort(key=lambda part: part.strategy != "forward")
        self.scopes.bring(parts)
        self.scratch: HeadSums | None = None
        strategies: dict[str, Callable[[Part], None]] = {
            "forward": self._forward,
            "aligned": self._aligned,
            "deferred": self._deferred,
            "frozen": self._frozen,
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
        projected = self._add(chunk, self.skip)
        shown = projected.stats.each(lambda stat: stat.view(self.call.labels.shape))
        backend = self.call.options.backend
        terms = self.terms._replace(normalizer=self.total) if self.call.head.fixed else self.terms
        ratio = ratio_of(terms, backend)
        self._step = evaluate_objective(shown.logprobs, shown.entropy, terms, backend, ratio)
        self.gradients.add(projected, chunk, *_flat(self._step), self.skip)

    def _step_of(self, part: Part, stats: RowStats) -> tuple[Tensor, Tensor | None]:
        """dLoss/dlogprobs and dLoss/dentropy of a part's rows, given their statistics."""
        logprobs, terms = stats.logprobs.unsqueeze(0), self.scopes.terms_of(part, self.total)
        entropy = None if stats.entropy is None else stats.entropy.unsqueeze(0)
        backend = self.call.options.backend
        ratio = ratio_of(terms, backend)
        return _flat(evaluate_objective(logprobs, entropy, terms, backend, ratio, want_metrics=False))

    def _coefficients(self, part: Part) -> tuple[Tensor, Tensor | None]:
        """``_step_of`` a part, given the statistics that are kept."""
        if self.at_once:
            where = self.scopes.rows_of(part)
            grad, grad_entropy = _flat(self.step())
            return grad[where], None if grad_entropy is None else grad_entropy[where]
        return self._step_of(part, self.scores.at(self.scopes.rows_of(part)))

    def _forward(self, part: Part) -> None:
        for chunk in self.call.forward_chunks(self.scopes.rows_of(part)):
            self.scores.add_forward(chunk)

    def _aligned(self, part: Part) -> None:
        chunk = self.call.chunk(self.scopes.rows_of(part), self.scopes.labels_of(part))
        projected = self._add(chunk, self.skip)
        self.gradients.add(projected, chunk, *self._step_of(part, projected.stats), self.skip)

    def _two_pass(self, part: Part) -> None:
        self._forward(part)
        where = self.scopes.rows_of(part)
        grads = self._coefficients(part)
        keep = self.call.index(active(*grads)) if self.skip else None
        chosen = keep if isinstance(keep, Tensor) else None
        if chosen is not None:
            where = _index(where, chosen.device)[chosen]
        if self.call.head.fixed and isinstance(where, Tensor):
            where, order = where.sort()
            chosen = order if chosen is None else chosen[order]
        grad, grad_entropy = (each if each is None or chosen is None else each[chosen] for each in grads)
        assert grad is not None
        anew = isinstance(keep, Tensor) and self.call.head.shows_other_rows
        recompute(self.scores, self.gradients, where, anew, grad, grad_entropy)

    def _frozen(self, part: Part) -> None:
        gradients = self.gradients
        for chunk in self.call.chunks(self.scopes.rows_of(part)):
            projected = self._add(chunk, skip=False)
            rows = gradients.rows(projected, chunk)
            gradients.add_hidden(rows, chunk, Weights(gradients.ones(len(chunk))))
            del projected, rows
        self._scale(part, self._coefficients(part)[0])

    def _scale(self, part: Part, coefficients: Tensor) -> None:
        """Let the coefficients that have come late multiply rows of dHidden."""
        scales = self.gradients.scales
        assert scales is not None
        own, where = self.call.own_rows(self.scopes.rows_of(part))
        if isinstance(where, slice):
            scales.view(-1)[where].mul_(coefficients[own])
        else:
            scales.view(-1)[where] *= coefficients[own]

    def _deferred(self, part: Part) -> None:
        call, gradients, where = self.call, self.gradients, self.scopes.rows_of(part)
        factors = self.scopes.terms_of(part, self.total).token_weights
        if self.scratch is None:
            self.scratch = HeadSums(call.head, gradients.needs, call.options.backend)
        self.scratch.clear()
        done = 0
        weights = gradients.ones(part.rows) if factors is None else factors[0].to(gradients.accumulate)
        for chunk in call.chunks(where):
            projected = self._add(chunk, skip=False)
            unit = weights[done : done + len(chunk)]
            done += len(chunk)
            rows = gradients.rows(projected, chunk)
            own = Weights(unit, None if call.compact else call.counted.flatten()[chunk.where])
            finish = gradients.begin_hidden(rows, chunk, own)
            self.scratch.add(rows, chunk.hidden, own)
            finish()
            del projected, rows
        grad, _ = self._coefficients(part)
        # one number for the sequence, taken where rounding matters least
        counted = call.counted.flatten()[where]
        most = torch.where(counted, weights.abs(), -1.0).argmax()
        weight, whole = weights.take(most), grad.take(most)  # an index in brackets would be read by the host
        coefficient = torch.where(weight == 0, 0.0, whole / weight)
        self._scale(part, coefficient.expand(part.rows))
        gradients.sums.add_sums(self.scratch, coefficient)


def _taken_from(grad: Tensor) -> _Coefficients:
    return lambda rows, *_: (grad[rows], None)


def _flat(step: PolicyStep) -> tuple[Tensor, Tensor | None]:
    return step.grad_logprobs.flatten(), step.grad_entropy.flatten() if step.grad_entropy.numel() else None


def _index(where: slice | Tensor, device: torch.device) -> Tensor:
    return torch.arange(where.start, where.stop, device=device) if isinstance(where, slice) else where
