"""The plan of a call, described for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gspo_kernels.linear.call import Call, LinearOperands
from gspo_kernels.linear.gradients import block_width
from gspo_kernels.linear.groups import CoefficientGroups
from gspo_kernels.linear.products import SEGMENT
from gspo_kernels.linear.schedule import Part, plan_parts
from gspo_kernels.ops.memory import HUGE_PAGES_FROM
from gspo_kernels.plan import Plan
from gspo_kernels.terms import Terms
from gspo_kernels.types import stats_dtype


@dataclass(frozen=True)
class SchedulePlan:
    """What a ``fused_linear_policy_loss`` call will do.

    Attributes:
        schedule: its schedule's name; "mixed": short and long sequences have different schedules.
        reason: why it has this schedule, in words.
        products: matrix products over the counted tokens, in units of the forward's: 3.0 is 6NHV operations.
            Rows that turn out to have no gradient reduce this number.
        multiplied_by: who multiplies, see ``linear.products.products_of``.
        peak_bytes: the most memory beyond the inputs at any time of forward and backward.
        gradient_bytes: how much of it the gradients of hidden states and weight are at the end.
        parts: counted tokens by schedule; those under "forward" have no gradient.
    """

    schedule: str
    reason: str
    products: float
    peak_bytes: int
    gradient_bytes: int
    parts: dict[str, int]
    multiplied_by: str

    def __str__(self) -> str:
        """Describe the plan in four lines."""
        tokens = ", ".join(f"{name} {rows}" for name, rows in self.parts.items())
        return (
            f"schedule {self.schedule}, because {self.reason}\n"
            f"  {self.products:.2f} matrix products over the counted tokens ({tokens})\n"
            f"  multiplied by {self.multiplied_by}\n"
            f"  {self.peak_bytes / 2**20:.1f} MiB of memory beyond inputs at the peak; "
            f"{self.gradient_bytes / 2**20:.1f} MiB are gradients"
        )


def explain(reason: str, operands: LinearOperands, terms: Terms, plan: Plan) -> SchedulePlan:
    """Return the plan of a call with its schedule from ``schedule.choose``; reads lengths from the device."""
    call, needs = Call(operands, checked=False, whole_logits=False), plan.requires_grad
    head, groups = call.products, CoefficientGroups(call, terms, plan.depends_on, plan.leaves_out)
    trained = needs.weight or needs.bias
    total = sum(groups.rows)
    if not any(needs):
        parts = [Part("forward", 0, len(groups.rows), total)]
    elif plan.schedule == "known":
        parts = [Part("known", 0, len(groups.rows), total)]
    else:
        parts = plan_parts(plan.schedule, groups.rows, groups.inactive, call.chunk_rows, plan.defers)
    products, tokens = 0, dict[str, int]()
    for part in parts:
        gradients = {"forward": 0, "two_pass": 1 + needs.hidden + trained}
        active = part.rows - part.inactive_rows
        products += part.rows + active * gradients.get(part.schedule, needs.hidden + trained)
        tokens[part.schedule] = tokens.get(part.schedule, 0) + active
        if part.inactive_rows:
            tokens["forward"] = tokens.get("forward", 0) + part.inactive_rows
    used = [name for name in tokens if name != "forward"] or ["forward"]
    served_by = used[0] if len(used) == 1 else "mixed"
    memory = memory_of(call, plan, parts)
    return SchedulePlan(served_by, reason, products / max(total, 1), *memory, tokens, head.name)


def memory_of(call: Call, plan: Plan, parts: Sequence[Part]) -> tuple[int, int]:
    """Return the most bytes beyond inputs that a call takes at a time, and the bytes of its gradients."""
    products, needs, hidden = call.products, plan.requires_grad, call.hidden
    wide, narrow, H = stats_dtype(hidden.dtype).itemsize, hidden.element_size(), hidden.shape[-1]
    trained = products.trained.numel() if needs.weight else 0
    of_hidden = hidden.numel() * narrow if needs.hidden else 0
    of_weight = trained * products.trained.element_size()
    count = sum(part.rows for part in parts)
    rows = min(call.chunk_rows, max((part.rows for part in parts), default=0))
    chunks = [part.rows for part in parts if part.schedule == "aligned"]
    if parts and parts[0].schedule == "known" and plan.depends_on == "token":
        ends = products.cut(count, call.chunk_rows)
        chunks = ends[:1] * len(ends)
    call.look_ahead(plan.leaves_out, chunks)
    scores = products.statistics_bytes(rows)
    if not any(needs):
        return scores, 0
    # what a row has besides its logits: its hidden state, unless that is read in place; the same times its
    # coefficient; and its part of dHidden
    in_place = hidden.is_contiguous() and count == call.labels.numel()
    operand = products.trained.shape[1] * products.operand_dtype.itemsize if needs.weight else 0
    row = (0 if in_place else H * narrow) + operand + (H * wide if needs.hidden else 0)
    kept: list[int] = []
    in_backward = plan.schedule == "two_pass" and not call.chunking.batch_invariant
    width = block_width(call, count) if in_backward else 0
    if width:
        chunk = count * width * products.row_bytes // products.vocabulary
        if products.rows_dtype == torch.float16 or not products.writes_16_bits:
            chunk += width * products.trained.shape[1] * wide if of_weight < trained * wide else 0
        at_work = chunk + count * row + of_weight
        at_the_end = count * (row - operand) + of_hidden + of_weight
    else:
        chunk, sums = (rows + products.ahead) * products.row_bytes, trained * wide
        chunk += rows * H * narrow if products.ahead and not in_place else 0
        at_the_end = of_hidden + sums + (of_weight if of_weight < sums else 0)
        if any(part.schedule == "deferred" for part in parts):
            kept, sums = [sums], 2 * sums  # those of one sequence, too
        if products.segments is not None and trained:
            sums += SEGMENT * products.vocabulary * products.rows_dtype.itemsize  # one that is not yet whole
        longest = max((part.rows for part in parts if part.schedule == "two_pass"), default=0)
        by_columns = longest if block_width(call, longest) else 0
        at_work = chunk + max(rows, by_columns) * row + of_hidden + sums
    if hidden.is_cpu:
        # pages that stay mapped
        at_the_end += sum(size for size in (chunk, *kept) if size >= HUGE_PAGES_FROM)
    return max(scores, at_work, at_the_end), of_hidden + of_weight
