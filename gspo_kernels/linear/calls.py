"""What the public functions over hidden states do: bring arguments into form, and call an operator."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels import checks
from gspo_kernels.layout import as_rows, from_rows
from gspo_kernels.linear.call import Chunking, LinearOperands, RequiresGrad
from gspo_kernels.linear.explain import SchedulePlan, explain
from gspo_kernels.linear.inputs import ProductArguments, check_inputs
from gspo_kernels.linear.logprobs import LinearTokenLogprobsFunction
from gspo_kernels.linear.loss import LinearPolicyFunction, LossPlan, SmallLossFunction, small_loss
from gspo_kernels.linear.schedule import choose, coefficients_depend_on, unsupported
from gspo_kernels.logits import LogitArguments, takes_dtensors, wants_entropy
from gspo_kernels.objectives.base import Objective
from gspo_kernels.ranks import compare_ranks, on_all_ranks
from gspo_kernels.step import loss_of, output_of
from gspo_kernels.terms import Terms, checked, leave_out_idle, merge_mask
from gspo_kernels.types import LossOutput, TokenLogprobs

SKIP_INACTIVE = ("backward", "all", "none")


@on_all_ranks
def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    logit_arguments: LogitArguments,
    product_arguments: ProductArguments,
    return_entropy: bool,
) -> TokenLogprobs:
    """See ``gspo_kernels.linear_token_logprobs``."""
    chunking = product_arguments.checked(compact=True, group=logit_arguments.tp_group)
    hidden, weight, bias = check_inputs(hidden, weight, bias, labels, chunking)
    packed = labels.ndim == 1
    options = logit_arguments.checked(labels, labels.shape[0], weight.shape[0])
    checks.flag("return_entropy", return_entropy)
    rows, row_labels = as_rows(hidden, packed), as_rows(labels, packed)
    options = logit_arguments.with_rows(options, row_labels, packed, None, hidden.dtype, weight.shape[0])
    operands = LinearOperands(rows, weight, bias, row_labels, options, chunking)
    compare_ranks(row_labels, None, options, weight.shape[0], operands.scattered)
    logprobs, entropy = LinearTokenLogprobsFunction.apply(*operands, return_entropy, True)
    return TokenLogprobs(from_rows(logprobs, packed), from_rows(entropy, packed) if return_entropy else None)


class _Prepared:
    """The arguments of a hidden-state loss in the operators' form, and what may serve it."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None,
        logit_arguments: LogitArguments,
        terms: Terms,
        has_entropy: bool,
        chunking: Chunking,
        skip_inactive: str,
        objective: Objective,
    ):
        self.packed = checks.layout("labels", labels, terms.cu_seqlens) is not None
        sequences = labels.shape[0] if terms.cu_seqlens is None else terms.cu_seqlens.shape[0] - 1
        options = logit_arguments.checked(labels, sequences, weight.shape[0])
        terms = checked(terms, labels, objective, has_entropy)
        rows, terms = merge_mask(as_rows(labels, self.packed), terms, options.ignore_index)
        self.hidden, self.weight, self.bias = as_rows(hidden, self.packed), weight, bias
        self.options = logit_arguments.with_rows(
            options, rows, self.packed, terms.cu_seqlens, hidden.dtype, weight.shape[0]
        )
        if skip_inactive == "all":
            rows, terms = leave_out_idle(rows, terms, options.ignore_index)
        self.labels, self.terms, self.chunking = rows, terms, chunking
        self.skip = skip_inactive != "none"
        learns = torch.is_grad_enabled()
        self.needs = RequiresGrad(
            *(learns and x is not None and x.requires_grad for x in (hidden, weight, bias))
        )
        self.depends_on = coefficients_depend_on(objective, terms)
        self.reasons = unsupported(
            objective, terms, self.depends_on, self.needs.head, chunking.batch_invariant
        )

    @property
    def operands(self) -> LinearOperands:
        """What the operators take."""
        return LinearOperands(self.hidden, self.weight, self.bias, self.labels, self.options, self.chunking)

    def choose(self, schedule: str) -> tuple[str, str]:
        """See ``schedule.choose``."""
        lengths_known = self.skip or not self.packed or not self.hidden.is_cuda
        return choose(schedule, self.reasons, any(self.needs), lengths_known)


@on_all_ranks
def fused_linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    logit_arguments: LogitArguments,
    product_arguments: ProductArguments,
    terms: Terms,
    return_entropy: bool,
    schedule: str,
    skip_inactive: str,
    objective: Objective,
) -> LossOutput:
    """See ``gspo_kernels.fused_linear_policy_loss``."""
    checks.choice("skip_inactive", skip_inactive, SKIP_INACTIVE)
    chunking = product_arguments.checked(skip_inactive != "none", logit_arguments.tp_group)
    hidden, weight, bias = check_inputs(hidden, weight, bias, labels, chunking)
    with_entropy = wants_entropy(return_entropy, terms.entropy_coef, objective)
    head = (hidden, weight, labels, bias)
    call = _Prepared(*head, logit_arguments, terms, with_entropy, chunking, skip_inactive, objective)
    name, _ = call.choose(schedule)
    backend, terms = call.options.backend, call.terms
    compare_ranks(call.labels, terms, call.options, weight.shape[0], call.operands.scattered)
    # batch-invariant gradients of all schedules are multiplied by what comes from above at the same place
    if name == "two_pass" and not (chunking.batch_invariant and any(call.needs)):
        logprobs, entropy = LinearTokenLogprobsFunction.apply(*call.operands, with_entropy, call.skip)
        return loss_of(logprobs, entropy if with_entropy else None, backend, terms, call.packed)
    small = small_loss(call.operands, terms, objective, with_entropy) if name == "auto" else None
    if small is not None:
        loss, metrics, logprobs = SmallLossFunction.apply(
            call.hidden, weight, bias, call.labels, call.options, terms, small
        )
        return output_of(loss, metrics, logprobs, None, terms, call.packed)
    plan = LossPlan(name, "deferred" not in call.reasons, call.depends_on, with_entropy, call.skip)
    loss, metrics, logprobs, entropy = LinearPolicyFunction.apply(
        *call.operands, terms, plan, torch.compiler.is_compiling()
    )
    return output_of(loss, metrics, logprobs, entropy if with_entropy else None, terms, call.packed)


@takes_dtensors
def explain_schedule(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    logit_arguments: LogitArguments,
    product_arguments: ProductArguments,
    terms: Terms,
    schedule: str,
    skip_inactive: str,
    objective: Objective,
) -> SchedulePlan:
    """See ``gspo_kernels.explain_schedule``."""
    checks.choice("skip_inactive", skip_inactive, SKIP_INACTIVE)
    chunking = product_arguments.checked(skip_inactive != "none", logit_arguments.tp_group)
    hidden, weight, bias = check_inputs(hidden, weight, bias, labels, chunking)
    with_entropy = wants_entropy(False, terms.entropy_coef, objective)
    head = (hidden, weight, labels, bias)
    call = _Prepared(*head, logit_arguments, terms, True, chunking, skip_inactive, objective)
    name, reason = call.choose(schedule)
    plan = LossPlan(name, "deferred" not in call.reasons, call.depends_on, with_entropy, call.skip)
    return explain(name, reason, call.operands, call.terms, plan, call.needs)
