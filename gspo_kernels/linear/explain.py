"""The plan of a call, described for people."""

from __future__ import annotations

from dataclasses import dataclass

from gspo_kernels.linear.call import Call, LinearOperands
from gspo_kernels.linear.groups import CoefficientGroups
from gspo_kernels.linear.products import SEGMENT
from gspo_kernels.linear.schedule import Part, plan_parts
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
        peak_bytes: memory beyond inputs and gradients.
        parts: counted tokens by schedule; those under "forward" have no gradient.
    """

    schedule: str
    reason: str
    products: float
    peak_bytes: int
    parts: dict[str, int]
    multiplied_by: str

    def __str__(self) -> str:
        """Describe the plan in four lines."""
        tokens = ", ".join(f"{name} {rows}" for name, rows in self.parts.items())
        return (
            f"schedule {self.schedule}, because {self.reason}\n"
            f"  {self.products:.2f} matrix products over the counted tokens ({tokens})\n"
            f"  multiplied by {self.multiplied_by}\n"
            f"  {self.peak_bytes / 2**20:.1f} MiB of memory beyond inputs and gradients"
        )


def explain(reason: str, operands: LinearOperands, terms: Terms, plan: Plan) -> SchedulePlan:
    """Return the plan of a call with its schedule from ``schedule.choose``; reads lengths from the device."""
    call, needs = Call(operands, checked=False), plan.requires_grad
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
    rows = min(call.chunk_rows, max((part.rows for part in parts), default=0))
    sums = head.trained.numel() * stats_dtype(head.weight.dtype).itemsize if trained else 0
    peak = rows * head.row_bytes
    if stats_dtype(head.weight.dtype) != head.weight.dtype:
        peak += sums  # dWeight's sum is not the gradient itself
    if "deferred" in tokens:
        peak += sums  # the sums of one sequence
    if head.segments is not None and trained:
        peak += SEGMENT * head.vocabulary * head.rows_dtype.itemsize  # a segment that is not yet whole
    served_by = used[0] if len(used) == 1 else "mixed"
    return SchedulePlan(served_by, reason, products / max(total, 1), peak, tokens, head.name)
