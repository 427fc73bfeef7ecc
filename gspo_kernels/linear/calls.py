"""What the public functions over hidden states do: bring arguments into form, and call an operator."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels import checks
from gspo_kernels.layout import as_rows, from_rows
from gspo_kernels.linear.call import Chunking, LinearOperands
from gspo_kernels.linear.explain import SchedulePlan, explain
from gspo_kernels.linear.inputs import ProductArguments, check_inputs
from gspo_kernels.linear.logprobs import LinearTokenLogprobsFunction
from gspo_kernels.linear.loss import LinearPolicyFunction, Schedule, SmallLossFunction, small_loss
from gspo_kernels.linear.schedule import choose, unsupported
from gspo_kernels.logits import LogitArguments, takes_dtensors, wants_entropy
from gspo_kernels.objectives.base import Objective
from gspo_kernels.plan import RequiresGrad, make_plan
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
        skip = skip_inactive != "none"
        self.plan = make_plan(
            objective, terms, self.options.backend, RequiresGrad.of(hidden, weight, bias), skip
        )
        self.unsupported = unsupported(objective, terms, self.plan, chunking.batch_invariant)

    @property
    def operands(self) -> LinearOperands:
        """What the operators take."""
        return LinearOperands(self.hidden, self.weight, self.bias, self.labels, self.options, self.chunking)

    def choose(self, name: str, entropy: bool) -> tuple[Schedule, str]:
        """See ``schedule.choose``."""
        lengths_known = self.plan.leaves_out or not self.packed or not self.hidden.is_cuda
        name, reason = choose(name, self.unsupported, any(self.plan.requires_grad), lengths_known)
        return Schedule(name, "deferred" not in self.unsupported, entropy), reason


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
    plan, terms = call.plan, call.terms
    chosen, _ = call.choose(schedule, with_entropy)
    compare_ranks(call.labels, terms, call.options, weight.shape[0], call.operands.scattered)
    # batch-invariant gradients of all schedules are multiplied by the upstream gradient at the same place
    if chosen.name == "two_pass" and not (chunking.batch_invariant and any(plan.requires_grad)):
        logprobs, entropy = LinearTokenLogprobsFunction.apply(*call.operands, with_entropy, plan.leaves_out)
        return loss_of(logprobs, entropy if with_entropy else None, plan.backend, terms, call.packed)
    small = small_loss(call.operands, terms, plan) if chosen.name == "auto" and not with_entropy else None
    if small is not None:
        loss, metrics, logprobs = SmallLossFunction.apply(
            call.hidden, weight, bias, call.labels, call.options, terms, small
        )
        return output_of(loss, metrics, logprobs, None, terms, call.packed)
    loss, metrics, logprobs, entropy = LinearPolicyFunction.apply(
        *call.operands, terms, plan, chosen, torch.compiler.is_compiling()
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
    chosen, reason = call.choose(schedule, with_entropy)
    return explain(reason, call.operands, call.terms, call.plan, chosen)
