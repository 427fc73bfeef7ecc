"""The schedules of a loss over hidden states: how the rows of a step become log-probs and gradients.

With N counted tokens, width H and vocabulary V one product is G = 2NHV operations; f is the fraction of the
rows with a gradient. A *group* is a set of sequences that determine each other's coefficients: one sequence,
a group of the objective, or the batch.

| schedule | exact where | products | how |
|---|---|---|---|
| known | a token's coefficient is known, or its own | 3G | log-probs and gradient from one chunk |
| frozen | the head has no gradient | 2G | rows of dHidden wait for their coefficients |
| aligned | groups fit in a chunk | (1 + 2f)G | log-probs, coefficients, gradient of the same logits |
| deferred | one number per sequence | 3G | a sequence's sums wait for their coefficient |
| two_pass | always | (1 + 3f)G | log-probs first; then the rows once more |

With z a row's logits, p = softmax(z) and c the row's coefficient dLoss/dlogprob, every schedule adds up

    dLoss/dz = c (onehot(label) - p),    dHidden = dLoss/dz @ weight,    dWeight = dLoss/dz.T @ hidden

Schedules differ in when c is known: c multiplies the rows of dHidden and the hidden states in dWeight, never
the logits, so that it may come after the product.
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
from gspo_kernels.hidden.chunk import Chunk, Projected, as_index, rows_at
from gspo_kernels.hidden.gradients import Accumulators, HeadSums, block_width, is_active
from gspo_kernels.hidden.plan import Plan, Step
from gspo_kernels.logits.centering import CenteringRows, centering_loss
from gspo_kernels.logits.policy_step import evaluate_objective, known_coefficients
from gspo_kernels.logits.selected import SelectedGradients, score
from gspo_kernels.logits.sequence_ratio import sum_over_tokens
from gspo_kernels.objectives.aggregation import Aggregation
from gspo_kernels.objectives.base import from_spec
from gspo_kernels.objectives.evaluate import PolicyStep, evaluate
from gspo_kernels.objectives.linear import Linear


class Part(NamedTuple):
    """What a step works on.

    Attributes:
        step: of the plan.
        where: the positions of its rows among the flattened rows of the call.
        labels: [n].
        terms: of its rows, with the call's outer divisor: as a packed batch, or padded where whole padded
            sequences stay in place. Where the plan has ``one_evaluation``: the call's terms.
    """

    step: Step
    where: slice | Tensor
    labels: Tensor
    terms: Terms


class LossAccumulators(Accumulators):
    """What the steps of a loss add up, and the evaluation of all its tokens.

    Attributes:
        decisions, plan, terms: of the call.
        min_rows_to_skip: the least number of rows for which gradient products skip those without a gradient.
        has_ratio: a ratio, which would show the last bits of the log-probs.
        sequence_sums: dWeight and dBias of one deferred sequence; None where no sequence is deferred.
        centering: what is centered, or None.
        centered: with centering: 0-d, what it adds to the loss.
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
            normalised=True,
            entropy=decisions.entropy,
            projects_all=projects_all,
            stores_all=projects_all
            and "forward" not in schedules
            and call.tokens is None
            and self.min_rows_to_skip > total,
            once=plan.one_product and centering is None,
        )
        self.sequence_sums: HeadSums | None = None
        if "deferred" in schedules:
            self.sequence_sums = HeadSums(call.matmul, decisions.requires_grad, decisions.backend)
        self._evaluation: PolicyStep | None = None

    def project(self, chunk: Chunk, all_rows_active: bool = True) -> Projected:
        """Project a chunk and keep its statistics."""
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
            step = self.evaluation()
        else:
            logprobs, _, entropy = self.stats_at(where) if stats is None else stats
            if terms.cu_seqlens is None:
                assert terms.loss_mask is not None
                logprobs = logprobs.view(terms.loss_mask.shape)
                entropy = None if entropy is None else entropy.view(logprobs.shape)
            step = evaluate_objective(
                logprobs,
                entropy,
                terms,
                self.decisions.backend,
                self.decisions.ratio_clip,
                want_metrics=False,
            )
            where = slice(0, logprobs.numel())
        grad_entropy = rows_at(step.grad_entropy, where) if step.grad_entropy.numel() else None
        return rows_at(step.grad_logprobs, where), grad_entropy

    def evaluation(self) -> PolicyStep:
        """Return loss, coefficients and metrics of the whole call, once all its log-probs are computed."""
        if self._evaluation is None:
            logprobs, _, entropy = self.stats
            self._evaluation = evaluate_objective(
                logprobs, entropy, self.terms, self.decisions.backend, self.decisions.ratio_clip
            )
        return self._evaluation


def forward(call: Call, part: Part, out: LossAccumulators) -> None:
    """Serve rows without a gradient: only their statistics are computed."""
    out.forward(part.where, part.step.ends)


def known(call: Call, part: Part, out: LossAccumulators) -> None:
    """Serve tokens whose coefficient is known beforehand, or a function of their own log-prob: log-probs and
    gradient come from the same chunk.
    """
    where, step = part.where, part.step
    if out.decisions.depends_on == "nothing":
        grads = known_coefficients(call.labels, part.terms, out.decisions.backend).flatten()
        keep = call.index(grads[where] != 0) if out.min_rows_to_skip <= call.labels.numel() else None
        ends = step.ends
        if isinstance(keep, Tensor):
            # the rows without gradient are only projected
            index = as_index(where, keep.device)
            rest = index[call.index(grads[index] == 0, len(index) - len(keep))]
            most = max(out.max_rows, call.matmul.min_statistics_rows)
            out.forward(rest, call.cut(len(rest), most))
            where, ends = index[keep], call.cut(len(keep), out.max_rows)
        for chunk in call.chunks(where, ends):
            projected = out.project(chunk)
            out.add(projected, chunk, grads[chunk.where], None, skip=False)
            del projected
        return
    per_token, ratio_clip = (
        token_terms(call.labels, part.terms, out.decisions.backend),
        out.decisions.ratio_clip,
    )
    in_one_launch = ratio_clip != NO_RATIO
    if in_one_launch:
        per_token, ratio_clip = sum_over_tokens(per_token, ratio_clip)
    for chunk in call.chunks(where, step.ends):
        skip = out.min_rows_to_skip <= chunk.size
        projected = out.project(chunk, all_rows_active=not skip)
        logprobs, _, entropy = projected.stats
        if in_one_launch:  # which takes the chunk as one sequence
            terms = rows_of_terms(per_token, chunk.where, 0)
            evaluated = evaluate_objective(
                logprobs, None, terms, out.decisions.backend, ratio_clip, want_metrics=False
            )
        else:  # PyTorch takes each token as a sequence
            terms, entropy = (
                rows_of_terms(per_token, chunk.where, 1),
                None if entropy is None else entropy.t(),
            )
            evaluated = evaluate(logprobs.t(), entropy, terms, want_metrics=False)
        grad_entropy = evaluated.grad_entropy.flatten() if evaluated.grad_entropy.numel() else None
        out.add(projected, chunk, evaluated.grad_logprobs.flatten(), grad_entropy, skip)
        del projected


def known_with_centering(call: Call, part: Part, out: LossAccumulators) -> None:
    """Serve ``known`` with score centering: a row has coefficients of K + 1 ids and of the mass that these
    leave, which all follow from its own logits.
    """
    per_token = token_terms(call.labels, part.terms, out.decisions.backend)
    for chunk in call.chunks(part.where, part.step.ends):
        logits, centering = call.matmul.logits(chunk.hidden, out.logits_memory(chunk.size)), out.centering
        assert centering is not None
        centering = centering.at(chunk.where)
        scored = score(logits.unsqueeze(0), centering.ids, chunk.options, False)
        logprobs = scored.logprobs[..., 0].contiguous()
        entropy: Tensor | None = None
        if out.decisions.entropy:
            entropy = call.matmul.backend.logprobs_forward(chunk.rows(logits), True).entropy
        out.keep(chunk, RowStats(logprobs, scored.lse_others, entropy))
        terms = rows_of_terms(per_token, chunk.where, 1)
        step = evaluate(logprobs.t(), None, terms, want_metrics=False)
        with inner_autograd():
            leaves = [each.to(out.centered.dtype, copy=True).requires_grad_() for each in scored[:2]]
            centered = centering_loss((leaves[0], leaves[1]), centering, part.terms.objective, "")
            grads = SelectedGradients(*torch.autograd.grad(centered, leaves))
        out.centered = out.centered + centered.detach()
        grads.logprobs[..., 0] += step.grad_logprobs.flatten()
        out.add_selected(logits, centering.ids, scored, grads, chunk)
        del logits


def aligned(call: Call, part: Part, out: LossAccumulators) -> None:
    """Serve one chunk of whole groups: log-probs, coefficients and gradient come from the same logits."""
    chunk = call.chunk(part.where, part.labels)
    skip = out.min_rows_to_skip <= chunk.size
    projected = out.project(chunk, all_rows_active=not skip)
    grad, grad_entropy = out.coefficients(part, projected.stats)
    out.add(projected, chunk, grad, grad_entropy, skip)


def deferred(call: Call, part: Part, out: LossAccumulators) -> None:
    """Serve a sequence in chunks: its one coefficient c multiplies the sequence's sums at its end.

    With token weights w: dWeight += c sum_t w_t row_t hidden_t, and c = dLoss/dlogprob_t / w_t of any t.
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
    # from the token of the largest weight, where rounding matters least
    at = torch.where(counted, weights.abs(), -1.0).argmax()
    weight, total = weights.take(at), grad.take(at)  # an index in brackets would be a host-device sync
    coefficient = torch.where(weight == 0, 0.0, total / weight)
    out.scale(where, coefficient.expand(counted.shape))
    out.sums.add_sums(sums, coefficient)


def frozen(call: Call, part: Part, out: LossAccumulators) -> None:
    """Serve a head without gradient: rows of dHidden wait for the coefficients that multiply them.

    Blocks of columns would not pay. Each adds to all of dHidden: 8NH bytes, of 151,936 columns 20 GB for
    16,384 tokens and H = 4,096, which is 4 ms in addition to 59 of products on an H200; chunks of rows read
    the weight again, but while they multiply. And [n, 4096] with dHidden in fp32 take more memory than 256
    MiB of rows from 11,000 tokens on (22,000 at H = 1,024). Exponentials whose offset is the label's logit
    would have to wait for a row's last column, too, which alone shows whether that offset serves.
    """
    for chunk in call.chunks(part.where, part.step.ends):
        projected = out.project(chunk)
        out.add_rows(out.rows(projected, chunk), chunk)
        del projected
    out.scale(part.where, out.coefficients(part)[0])


def two_pass(call: Call, part: Part, out: LossAccumulators) -> None:
    """Project all rows for their coefficients, and rows with a gradient once more."""
    where = part.where
    out.forward(where, part.step.ends)
    grad, grad_entropy = out.coefficients(part)
    keep = call.index(is_active(grad, grad_entropy)) if out.min_rows_to_skip <= len(grad) else None
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

    An objective over more than a token becomes ``Linear``, with its known coefficients as token weights.
    """
    layout = terms.layout(tokens)
    shares = Aggregation(tokens, terms).token_shares()

    def expanded(spec: ArgSpec, value: Tensor) -> Tensor:
        if spec.shape == "broadcast":
            return value.to(tokens.device).expand(tokens.shape)
        return layout.expand(value) if spec.shape != "tokens" and value.ndim == 1 else value

    # the shares contain these fields already, or only objectives over more than a token use them
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
    """Return the terms of some tokens, [1, n] (``across`` 0) or [n, 1] (1)."""
    return per_token.each(lambda _, value: value.flatten()[where].unsqueeze(across))
