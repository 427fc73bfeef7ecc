"""What a call will do, for people."""

from __future__ import annotations

from dataclasses import dataclass

from gspo_kernels.linear.call import Call, LinearOperands
from gspo_kernels.linear.groups import CoefficientGroups
from gspo_kernels.linear.schedule import Part, plan_parts
from gspo_kernels.ops.products import SEGMENT
from gspo_kernels.plan import Plan
from gspo_kernels.terms import Terms
from gspo_kernels.types import stats_dtype


@dataclass(frozen=True)
class SchedulePlan:
    """What a ``fused_linear_policy_loss`` call will do.

    Attributes:
        schedule: the name of what serves it; "mixed": short and long sequences go by different ones.
        reason: why, in words.
        products: matrix products over the counted tokens, in units of the forward's: 3.0 is 6NHV operations.
            Rows that turn out to have no gradient make it fewer.
        peak_bytes: memory beyond inputs and gradients.
        parts: counted tokens by schedule; those under "forward" have no gradient.
    """

    schedule: str
    reason: str
    products: float
    peak_bytes: int
    parts: dict[str, int]

    def __str__(self) -> str:
        """For people."""
        tokens = ", ".join(f"{name} {rows}" for name, rows in self.parts.items())
        return (
            f"schedule {self.schedule}, because {self.reason}\n"
            f"  {self.products:.2f} matrix products over the counted tokens ({tokens})\n"
            f"  {self.peak_bytes / 2**20:.1f} MiB of memory beyond inputs and gradients"
        )


def explain(reason: str, operands: LinearOperands, terms: Terms, plan: Plan) -> SchedulePlan:
    """The plan of a call that ``schedule.choose`` gave a schedule; looks at the lengths on the device."""
    call, needs = Call(operands, checked=False), plan.requires_grad
    head, groups = call.head, CoefficientGroups(call, terms, plan.depends_on, plan.leaves_out)
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
        peak += sums  # a sequence's own
    if head.fixed and trained:
        peak += SEGMENT * head.vocabulary * head.rows_dtype.itemsize  # a segment that is not yet whole
    served_by = used[0] if len(used) == 1 else "mixed"
    return SchedulePlan(served_by, reason, products / max(total, 1), peak, tokens)
