"""The plan of a call, described for people."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gspo_kernels.arguments.terms import Terms
from gspo_kernels.core.memory import HUGE_PAGES_FROM
from gspo_kernels.core.types import stats_dtype
from gspo_kernels.hidden.call import Call, LinearOperands
from gspo_kernels.hidden.gradients import block_width
from gspo_kernels.hidden.groups import CoefficientGroups
from gspo_kernels.hidden.matmul import SEGMENT
from gspo_kernels.hidden.sums import ROUNDED_COLUMNS
from gspo_kernels.logits.plan import Plan


@dataclass(frozen=True)
class SchedulePlan:
    """What a ``fused_linear_policy_loss`` call will do.

    Attributes:
        schedule: its schedule's name; "mixed": short and long sequences have different schedules.
        reason: why it has this schedule, in words.
        products: matrix products over the counted tokens, in units of the forward's: 3.0 is 6NHV operations.
            Rows that turn out to have no gradient reduce this number.
        multiplied_by: who multiplies, see ``matmul.products_of``.
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
        tokens = ", ".join(f"{name} {count}" for name, count in self.parts.items())
        return (
            f"schedule {self.schedule}, because {self.reason}\n"
            f"  {self.products:.2f} matrix products over the counted tokens ({tokens})\n"
            f"  multiplied by {self.multiplied_by}\n"
            f"  {self.peak_bytes / 2**20:.1f} MiB of memory beyond inputs at the peak; "
            f"{self.gradient_bytes / 2**20:.1f} MiB are gradients"
        )


CENTERING_BYTES = {"known": (51, 16, 146, 31), "two_pass": (75, 16, 119, 5)}
"""Bytes for each id of centering: of all rows before there is a chunk, and kept beside chunks; of a chunk's
rows while their gradient is written, and while it is multiplied. Measured peaks are held against the sums.
"""


def explain(reason: str, operands: LinearOperands, terms: Terms, plan: Plan, ids: int = 0) -> SchedulePlan:
    """Return the plan of a call with its schedule from ``schedule.choose``; reads lengths from the device.

    ``ids`` are how many each row has with centering, its label among them.
    """
    call = Call(operands, checked=False, whole_logits=False, plan=None if ids else plan)
    needs = plan.requires_grad
    groups = CoefficientGroups(call, terms, plan)
    trained, total = needs.weight or needs.bias, sum(groups.row_counts)
    products, tokens = 0, dict[str, int]()
    for part in groups.parts:
        gradients = {"forward": 0, "two_pass": 1 + needs.hidden + trained}
        active = part.row_count - part.inactive_rows
        products += part.row_count + active * gradients.get(part.schedule, needs.hidden + trained)
        tokens[part.schedule] = tokens.get(part.schedule, 0) + active
        if part.inactive_rows:
            tokens["forward"] = tokens.get("forward", 0) + part.inactive_rows
    used = [name for name in tokens if name != "forward"] or ["forward"]
    served_by = used[0] if len(used) == 1 else "mixed"
    memory, name = memory_of(call, plan, groups, ids), call.products.name
    return SchedulePlan(served_by, reason, products / max(total, 1), *memory, tokens, name)


def memory_of(call: Call, plan: Plan, groups: CoefficientGroups, ids: int) -> tuple[int, int]:
    """Return the most bytes beyond inputs that a call takes at a time, and the bytes of its gradients."""
    products, needs, hidden = call.products, plan.requires_grad, call.hidden
    wide, narrow, H = stats_dtype(hidden.dtype).itemsize, hidden.element_size(), hidden.shape[-1]
    trained = products.trained.numel() if needs.weight else 0
    of_hidden = hidden.numel() * narrow if needs.hidden else 0
    of_weight = trained * products.trained.element_size()
    parts, count = groups.parts, sum(groups.row_counts)
    call.make_room(*(part.row_count for part in parts))
    rows = products.max_rows
    scores, beside, with_row = products.statistics_bytes(rows), 0, 0
    if ids:
        before, beside, written, with_row = (ids * each for each in CENTERING_BYTES[plan.schedule])
        copied, beside = 0 if groups.all_rows else 16 * ids, beside * call.labels.numel()
        with_row += copied
        # a row's other ids are cut by a mask
        writing = beside + rows * (products.row_bytes + written + copied + products.vocabulary // 8)
        scores = max(before * call.labels.numel(), writing)
    if not any(needs):
        return scores, 0
    # what a row has besides its logits: its hidden state, unless that is read in place; the same times its
    # coefficient; and its part of dHidden
    in_backward = plan.schedule == "two_pass" and not call.chunking.batch_invariant
    in_place = hidden.is_contiguous() and count == call.labels.numel() and (groups.all_rows or in_backward)
    operand = products.trained.shape[1] * products.operand_dtype.itemsize if needs.weight else 0
    row = (0 if in_place else H * narrow) + operand + (H * wide if needs.hidden else 0) + with_row
    longest = max((part.row_count for part in parts if part.schedule == "two_pass"), default=0)
    longest = count if in_backward else longest
    width, kept = 0 if ids else block_width(call, longest), list[int]()
    chunk, sums = rows * products.row_bytes, trained * wide
    once = groups.in_one_product and (in_backward or products.rounds_early) and not ids
    if once and of_weight < sums:
        if products.rows_from_project and not width:
            row += 2 * H * wide  # rows of dWeight that are multiplied again, see ``HeadSums.add_rests``
        if products.rows_dtype == torch.float16 or not products.writes_16_bits:
            kept = [min(width or products.vocabulary, ROUNDED_COLUMNS) * products.trained.shape[1] * wide]
        sums = of_weight
    if once and width:
        chunk = longest * width * products.row_bytes // products.vocabulary
        scores += 0 if in_backward else sums
        at_work = chunk + sum(kept) + longest * row + sums
        at_the_end = longest * (row - operand) + of_hidden + sums
    else:
        at_the_end = of_hidden + sums + (of_weight if of_weight < sums else 0)
        if any(part.schedule == "deferred" for part in parts):
            kept = [sums]  # those of one sequence
        if products.segments is not None and trained:
            sums += SEGMENT * products.vocabulary * products.rows_dtype.itemsize  # one that is not yet whole
        at_work = chunk + sum(kept) + max(rows, longest if width else 0) * row + of_hidden + sums
        scores += of_hidden + sums if ids and (rows < count or not hidden.is_cpu) else 0
    if hidden.is_cpu:
        # pages that stay mapped
        at_the_end += sum(size for size in (chunk, *kept) if size >= HUGE_PAGES_FROM)
    return max(scores, at_work + beside, at_the_end + beside), of_hidden + of_weight
