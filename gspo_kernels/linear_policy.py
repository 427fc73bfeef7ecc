"""Schedule "known": forward and all three gradients of a hidden-state loss from one projection per chunk.

A chunk's gradient can follow its log-probs at once where a token's coefficient depends on that token alone,
or is known before the forward: on-policy the ratio is 1 whatever the log-probs are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gspo_kernels.layout import layout_of
from gspo_kernels.objectives.base import Objective, from_spec
from gspo_kernels.objectives.linear import Linear
from gspo_kernels.ops import linear
from gspo_kernels.ops.backends import load
from gspo_kernels.ops.library import operator
from gspo_kernels.ops.logprobs import check_labels, fake_stats
from gspo_kernels.ops.values import check_temperature
from gspo_kernels.policy import TERMS, PolicyTerms, check_term_values, evaluate, token_shares


def coefficients_depend_on(objective: Objective, terms: PolicyTerms) -> str:
    """What a token's coefficient depends on in this call: "nothing" (known beforehand), "token" or more."""
    on_policy = terms.old_logprobs is None and objective.ratio_only
    if terms.kl_beta is not None and terms.kl_ratio_weighted and objective.coefficient_scope != "token":
        return objective.coefficient_scope
    has_token_terms = terms.kl_beta is not None or terms.entropy_coef is not None
    if on_policy or objective.coefficient_scope == "nothing":
        return "token" if has_token_terms else "nothing"
    return objective.coefficient_scope


def known_coefficients(tokens: Tensor, terms: PolicyTerms) -> Tensor:
    """dLoss/dlogprobs of the objective alone, where log-probs don't matter; ``tokens`` gives the shape."""
    alone = terms._replace(old_logprobs=None, ref_logprobs=None, kl_beta=None, entropy_coef=None)
    return evaluate(
        torch.zeros_like(tokens, dtype=torch.float64), None, alone, want_metrics=False
    ).grad_logprobs


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
        if values is None or values.ndim == 2:
            return values
        if values.ndim == 1 and values.shape[0] == layout.sequences:
            return layout.expand(values)
        return values.to(labels.device).expand(labels.shape)

    return terms._replace(
        loss_mask=mask,
        cu_seqlens=None,
        advantages=expand(advantages),
        rollout_weights=expand(rollout_weights),
        token_weights=weights,
        kl_beta=None if terms.kl_beta is None else terms.kl_beta.to(labels.device).expand(labels.shape),
        entropy_coef=None
        if terms.entropy_coef is None
        else terms.entropy_coef.to(labels.device).expand(labels.shape),
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


@operator(
    f"linear_policy_known({linear.LINEAR}, {TERMS}, bool entropy, bool need_hidden, "
    "bool need_weight, bool need_bias, bool skip) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def linear_policy_known(*args: Any) -> tuple[Tensor, ...]:
    """Log-probs, entropy (empty unless asked for), gradients of hidden, weight and bias for upstream 1."""
    call, rest = linear.Call.split(args)
    fields = len(PolicyTerms._fields)
    terms = PolicyTerms(*rest[:fields])
    entropy, *needs, skip = rest[fields:]
    check_labels(call.labels, call.head.vocabulary, call.ignore_index)
    check_temperature(call.transform.row_temperature)
    check_term_values(call.labels, terms)

    backend, rows = load(call.backend), call.rows()
    gradients = linear.GradientAccumulator(call, tuple(needs))
    logprobs, entropies = call.new_rows(), call.new_rows() if entropy else None
    per_token = _token_terms(call.labels, terms)
    for where, hidden in rows:
        logits = call.head.logits(hidden)
        labels = call.labels.flatten()[where].unsqueeze(0)
        transform = rows.transform(call.transform, where)
        stats = backend.logprobs_forward(
            logits.unsqueeze(0), labels, transform, ignore_index=call.ignore_index, entropy=entropy
        )
        stats = stats.each(lambda stat: stat.squeeze(0))
        logprobs.view(-1)[where] = stats.logprobs
        if entropies is not None and stats.entropy is not None:
            entropies.view(-1)[where] = stats.entropy
        step = evaluate(
            stats.logprobs.unsqueeze(1),
            None if stats.entropy is None else stats.entropy.unsqueeze(1),
            _chunk_terms(per_token, where),
            want_metrics=False,
        )
        grad_entropy = step.grad_entropy.flatten() if step.grad_entropy.numel() else None
        gradients.add(
            logits, hidden, where, labels, stats, step.grad_logprobs.flatten(), grad_entropy, transform, skip
        )
    return logprobs, logprobs.new_empty(0) if entropies is None else entropies, *gradients.result()


@linear_policy_known.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *args: Any) -> tuple[Tensor, ...]:
    entropy, *needs, _ = args[-5:]
    logprobs, _, entropies = fake_stats(labels, hidden.dtype, entropy)
    return logprobs, entropies, *linear.fake_gradients(hidden, weight, bias, tuple(needs))


class KnownLinearFunction(torch.autograd.Function):
    """Carries gradients that the forward already holds; the loss itself is evaluated by the caller."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, entropy: bool, skip: bool, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs = (
            ctx.needs_input_grad[0],
            ctx.needs_input_grad[1],
            bias is not None and ctx.needs_input_grad[2],
        )
        logprobs, entropies, *gradients = linear_policy_known(
            hidden, weight, bias, *rest, entropy, *needs, skip
        )
        ctx.save_for_backward(*gradients)
        ctx.needs = needs
        ctx.nothing = (None,) * (2 + len(rest))
        ctx.mark_non_differentiable(logprobs, entropies)
        return logprobs.new_zeros(()), logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        # out of place: the stored gradients serve every backward of a retained graph
        scaled = (
            (gradient * grad).to(gradient.dtype) if need else None
            for gradient, need in zip(ctx.saved_tensors, ctx.needs, strict=True)
        )
        return (*scaled, *ctx.nothing)
