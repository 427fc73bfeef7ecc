"""Schedules of a loss over hidden states, which compute log-probs and gradients of the rows of a step.

With N counted tokens, width H and vocabulary V one matmul is G = 2NHV operations; f is the fraction of the
rows whose gradient is computed. A *group* is a set of sequences whose coefficients depend on each other: one
sequence, a group of the objective, or the batch.

| schedule | exact if | matmuls | how |
|---|---|---|---|
| known | coefficients are known or per token | (1 + 2f)G | log-probs and gradient from one chunk |
| frozen | the head has no gradient | (1 + f)G | dHidden is scaled when coefficients are known |
| aligned | groups fit in a chunk | (1 + 2f)G | log-probs, coefficients and gradient of the same logits |
| deferred | one coefficient per sequence | (1 + 2f)G | a sequence's sums are scaled at its end |
| two_pass | always | (1 + 3f)G | log-probs first, then logits are recomputed for the gradient |

With z a row's logits, p = softmax(z) and c the row's coefficient dLoss/dlogprob, every schedule accumulates

    dLoss/dz = c (onehot(label) - p),    dHidden = dLoss/dz @ weight,    dWeight = dLoss/dz.T @ hidden

Schedules differ in when c is known. It multiplies rows of dHidden and the hidden states in dWeight, not the
logits, and may be applied after the matmul.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.arguments.terms import ArgSpec, Terms
from gspo_kernels.core.exact import exact_dtype
from gspo_kernels.core.torch_internals import inner_autograd
from gspo_kernels.core.types import NO_RATIO, RowStats
from gspo_kernels.hidden.call import Call, Decisions
from gspo_kernels.hidden.chunk import Chunk, Projected, as_index, indices, rows_at
from gspo_kernels.hidden.gradients import Accumulators, HeadSums, block_width, is_active
from gspo_kernels.hidden.plan import Plan, Step
from gspo_kernels.logits.centering import CenteringRows, centering_loss
from gspo_kernels.logits.policy_step import evaluate_objective, known_coefficients
from gspo_kernels.logits.selected import SelectedGradients, selected_rows
from gspo_kernels.logits.sequence_ratio import sum_over_tokens
from gspo_kernels.objectives.aggregation import Aggregation
from gspo_kernels.objectives.base import from_spec
from gspo_kernels.objectives.evaluate import PolicyStep, evaluate
from gspo_kernels.objectives.linear import Linear


class Part(NamedTuple):
    """The inputs of a step.

    Attributes:
        step: the step of the plan.
        where: the positions of its rows among the flattened rows of the call.
        labels: [n].
        terms: terms of its rows, packed, or padded for whole padded sequences, with the call's outer divisor;
            with ``one_evaluation`` the call's terms.
    """

    step: Step
    where: slice | Tensor
    labels: Tensor
    terms: Terms


class LossAccumulators(Accumulators):
    """The accumulators of a loss, and the evaluation of its objective.

    Attributes:
        decisions, plan, terms: of the call.
        min_rows_to_skip: minimum of rows for gradient matmuls to skip those without a gradient.
        has_ratio: whether the loss has a ratio, which is sensitive to the last bits of log-probs.
        sequence_sums: dWeight and dBias of one deferred sequence, or None if none is deferred.
        centering: the rows of score centering, or None.
        centered: the loss term of score centering, 0-d.
    """

    def __init__(
        self,
        call: Call,
        decisions: Decisions,
        plan: Plan,
        terms: Terms,
        centering: CenteringRows | None = None,
    ):
        self.decisions, self.plan, self.terms, self.centering = decisions, plan, terms, centering
        if centering is not None:
            device = call.labels.device
            self.centered = torch.zeros((), dtype=exact_dtype(device), device=device)
        self.min_rows_to_skip = call.matmul.min_rows_to_sync if decisions.skips else math.inf
        self.has_ratio = terms.old_logprobs is not None or terms.ref_logprobs is not None
        schedules = [step.schedule for step in plan.steps]
        total, count = call.labels.numel(), sum(plan.lengths)
        projects_all = count == total and plan.in_order and call.chunking.where is None
        super().__init__(
            call,
            decisions.requires_grad,
            plan.max_rows,
            normalized=True,
            entropy=decisions.entropy,
            projects_all=projects_all,
            stores_all=projects_all
            and "forward" not in schedules
            and call.tokens is None
            and self.min_rows_to_skip > total,
            one_product=plan.one_product and centering is None,
        )
        self.sequence_sums: HeadSums | None = None
        if "deferred" in schedules:
            self.sequence_sums = HeadSums(call.matmul, decisions.requires_grad, call.options.backend)
        self._evaluation: PolicyStep | None = None

    def project(self, chunk: Chunk, all_rows_active: bool = True) -> Projected:
        """Project a chunk and store its statistics."""
        projected = self.call.matmul.project(
            chunk,
            self.decisions.entropy,
            self.logits_memory(chunk.size),
            all_rows_active=all_rows_active,
            has_ratio=self.has_ratio,
        )
        self.keep(chunk, projected.stats)
        return projected

    def coefficients(self, part: Part, stats: RowStats | None = None) -> tuple[Tensor, Tensor | None]:
        """Return dLoss/dlogprobs and dLoss/dentropy of a part's rows, [n] each, from ``stats`` if passed."""
        where, terms = part.where, part.terms
        if self.plan.one_evaluation:
            evaluated = self.evaluation()
        else:
            logprobs, _, entropy = self.stats_at(where) if stats is None else stats
            if terms.cu_seqlens is None:
                assert terms.loss_mask is not None
                logprobs = logprobs.view(terms.loss_mask.shape)
                entropy = None if entropy is None else entropy.view(logprobs.shape)
            evaluated = evaluate_objective(
                logprobs,
                entropy,
                terms,
                self.call.options.backend,
                self.decisions.ratio_clip,
                want_metrics=False,
            )
            where = slice(0, logprobs.numel())
        grad_entropy = rows_at(evaluated.grad_entropy, where) if evaluated.grad_entropy.numel() else None
        return rows_at(evaluated.grad_logprobs, where), grad_entropy

    def evaluation(self) -> PolicyStep:
        """Evaluate the objective of the whole call, after all log-probs are computed."""
        if self._evaluation is None:
            logprobs, _, entropy = self.stats
            self._evaluation = evaluate_objective(
                logprobs, entropy, self.terms, self.call.options.backend, self.decisions.ratio_clip
            )
        return self._evaluation


def forward(call: Call, part: Part, out: LossAccumulators) -> None:
    """Compute only the statistics of rows without a gradient."""
    out.forward(part.where, part.step.ends)


def known(call: Call, part: Part, out: LossAccumulators) -> None:
    """Compute log-probs and gradient from the same chunk, for coefficients that are known or per token."""
    where, step = part.where, part.step
    if out.decisions.depends_on == "nothing":
        grads = known_coefficients(call.labels, part.terms, call.options.backend).flatten()
        keep = indices(grads[where] != 0) if out.min_rows_to_skip <= call.labels.numel() else None
        ends = step.ends
        if isinstance(keep, Tensor):
            # rows without gradient are only projected
            index = as_index(where, keep.device)
            rest = index[indices(grads[index] == 0, len(index) - len(keep))]
            most = max(out.max_rows, call.matmul.min_statistics_rows)
            out.forward(rest, call.cut(len(rest), most))
            where, ends = index[keep], call.cut(len(keep), out.max_rows)
        for chunk in call.chunks(where, ends):
            projected = out.project(chunk)
            out.add(projected, chunk, grads[chunk.where], None, skip=False)
            del projected
        return
    per_token = token_terms(call.labels, part.terms, call.options.backend)
    ratio_clip = out.decisions.ratio_clip
    in_one_launch = ratio_clip != NO_RATIO
    if in_one_launch:
        per_token, ratio_clip = sum_over_tokens(per_token, ratio_clip)
    for chunk in call.chunks(where, step.ends):
        skip = out.min_rows_to_skip <= chunk.size
        projected = out.project(chunk, all_rows_active=not skip)
        # the chunk is one sequence to the kernel, each of its tokens is one to PyTorch
        stats = projected.stats if in_one_launch else projected.stats.each(torch.t)
        terms = rows_of_terms(per_token, chunk.where, 0 if in_one_launch else 1)
        evaluated = evaluate_objective(
            stats.logprobs, stats.entropy, terms, call.options.backend, ratio_clip, want_metrics=False
        )
        grad_entropy = evaluated.grad_entropy.flatten() if evaluated.grad_entropy.numel() else None
        out.add(projected, chunk, evaluated.grad_logprobs.flatten(), grad_entropy, skip)
        del projected


def known_with_centering(call: Call, part: Part, out: LossAccumulators) -> None:
    """Run ``known`` with score centering: coefficients of K + 1 ids and the remaining mass of each row, which
    depend on its own logits only.
    """
    per_token = token_terms(call.labels, part.terms, call.options.backend)
    for chunk in call.chunks(part.where, part.step.ends):
        logits, centering = call.matmul.logits(chunk.hidden, out.logits_memory(chunk.size)), out.centering
        assert centering is not None
        centering = centering.at(chunk.where)
        selected = selected_rows(logits.unsqueeze(0), centering.ids, chunk.options, False)
        logprobs = selected.logprobs[..., 0].contiguous()
        entropy: Tensor | None = None
        if out.decisions.entropy:
            entropy = call.matmul.backend.logprobs_forward(chunk.rows(logits), True).entropy
        out.keep(chunk, RowStats(logprobs, selected.lse_others, entropy))
        terms = rows_of_terms(per_token, chunk.where, 1)
        evaluated = evaluate(logprobs.t(), None, terms, want_metrics=False)
        with inner_autograd():
            leaves = [each.to(out.centered.dtype, copy=True).requires_grad_() for each in selected[:2]]
            centered = centering_loss((leaves[0], leaves[1]), centering, part.terms.objective, "")
            grads = SelectedGradients(*torch.autograd.grad(centered, leaves))
        out.centered = out.centered + centered.detach()
        grads.logprobs[..., 0] += evaluated.grad_logprobs.flatten()
        out.add_selected(logits, centering.ids, selected, grads, chunk)
        del logits


def aligned(call: Call, part: Part, out: LossAccumulators) -> None:
    """Compute log-probs, coefficients and gradient of whole groups from the logits of one chunk."""
    chunk = call.chunk(part.where, part.labels)
    skip = out.min_rows_to_skip <= chunk.size
    projected = out.project(chunk, all_rows_active=not skip)
    grad, grad_entropy = out.coefficients(part, projected.stats)
    out.add(projected, chunk, grad, grad_entropy, skip)


def deferred(call: Call, part: Part, out: LossAccumulators) -> None:
    """Accumulate a sequence in chunks, and multiply its sums by its one coefficient c at the end.

    With token weights w, dWeight += c sum_t w_t row_t hidden_t, and c = dLoss/dlogprob_t / w_t of any t.
    """
    where, sums, factors = part.where, out.sequence_sums, out.terms.token_weights
    assert sums is not None
    sums.clear()
    counted = call.counted.flatten()[where]
    weights = out.one.expand(counted.shape)
    if factors is not None:
        weights = torch.where(counted, rows_at(factors, where).to(out.dtype), 0.0)
    done = 0
    for chunk in call.chunks(where, part.step.ends):
        projected = out.project(chunk)
        unit = weights[done : done + chunk.size]
        done += chunk.size
        active = None if call.chunking.compact else call.counted.flatten()[chunk.where]
        out.add_rows(out.rows(projected, chunk, unit, None, active), chunk, sums)
        del projected
    grad, _ = out.coefficients(part)
    # divide at the token of the largest weight, for accuracy
    at = torch.where(counted, weights.abs(), -1.0).argmax()
    weight, total = weights.take(at), grad.take(at)  # indexing would sync with the device
    coefficient = torch.where(weight == 0, 0.0, total / weight)
    out.scale(where, coefficient.expand(counted.shape))
    out.sums.add_sums(sums, coefficient)


def frozen(call: Call, part: Part, out: LossAccumulators) -> None:
    """Compute dHidden for a head without gradient, and multiply its rows when the coefficients are known.

    Chunks of rows are faster than blocks of columns, each of which accumulates dHidden: 8NH bytes, for
    151,936 columns, 16,384 tokens and H = 4,096 20 GB or 4 ms, next to 59 ms of matmuls on an H200. Chunks
    read the weight again, overlapped with the matmul. Blocks [n, 4096] and an fp32 dHidden also take more
    memory than 256 MiB of rows from 11,000 tokens (22,000 at H = 1,024).
    """
    for chunk in call.chunks(part.where, part.step.ends):
        projected = out.project(chunk)
        out.add_rows(out.rows(projected, chunk), chunk)
        del projected
    out.scale(part.where, out.coefficients(part)[0])


def two_pass(call: Call, part: Part, out: LossAccumulators) -> None:
    """Project all rows for their coefficients, then recompute the logits of rows with a gradient."""
    where = part.where
    out.forward(where, part.step.ends)
    grad, grad_entropy = out.coefficients(part)
    keep = indices(is_active(grad, grad_entropy)) if out.min_rows_to_skip <= len(grad) else None
    chosen = keep if isinstance(keep, Tensor) else None
    if chosen is not None:
        where = as_index(where, chosen.device)[chosen]
    if call.chunking.batch_invariant and isinstance(where, Tensor):
        where, order = where.sort()
        chosen = order if chosen is None else chosen[order]
    if chosen is not None:
        grad, grad_entropy = grad[chosen], None if grad_entropy is None else grad_entropy[chosen]
    width = block_width(call, len(grad), out.plan.chunk_rows)
    new_stats = isinstance(keep, Tensor) and call.matmul.varies
    out.recompute(where, grad, grad_entropy, width=width, new_stats=new_stats)


SCHEDULES: dict[str, Callable[[Call, Part, LossAccumulators], None]] = {
    "forward": forward,
    "known": known,
    "frozen": frozen,
    "aligned": aligned,
    "deferred": deferred,
    "two_pass": two_pass,
}

_LINEAR = Linear().spec


def token_terms(tokens: Tensor, terms: Terms, backend: str) -> Terms:
    """Return the terms with every tensor expanded to tokens, and the aggregation as a share per token.

    An objective of a wider scope is replaced by ``Linear``, with its known coefficients as token weights.
    """
    layout = terms.layout(tokens)
    shares = Aggregation(tokens, terms).token_shares()

    def expanded(spec: ArgSpec, value: Tensor) -> Tensor:
        if spec.shape == "broadcast":
            return value.to(tokens.device).expand(tokens.shape)
        return layout.expand(value) if spec.shape != "tokens" and value.ndim == 1 else value

    # the shares include these fields, or only objectives of a wider scope use them
    rest = terms._replace(
        cu_seqlens=None, lengths=None, normalizer=None, skipped=None, group_ids=None, cp_group=""
    )
    per_token = rest.each(expanded)._replace(loss_mask=terms.counted(tokens), token_shares=shares)
    if from_spec(terms.objective).coefficient_scope in ("nothing", "token"):
        return per_token
    coefficients = known_coefficients(tokens, terms, backend)
    weights = torch.where(shares != 0, coefficients / shares, 0.0)
    return per_token._replace(advantages=None, rollout_weights=None, token_weights=weights, objective=_LINEAR)


def rows_of_terms(per_token: Terms, where: Any, across: int) -> Terms:
    """Return the terms of some tokens as [1, n] (``across`` 0) or [n, 1] (``across`` 1)."""
    return per_token.each(lambda _, value: value.flatten()[where].unsqueeze(across))
