"""The plan of a loss over hidden states as ``explain_schedule`` returns it, with the call's peak memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gspo_kernels.core.memory import HUGE_PAGES_FROM
from gspo_kernels.core.types import stats_dtype
from gspo_kernels.hidden.call import Call, Decisions
from gspo_kernels.hidden.gradients import ROUNDED_COLUMNS, block_width
from gspo_kernels.hidden.matmul import SEGMENT
from gspo_kernels.hidden.plan import Plan


@dataclass(frozen=True)
class SchedulePlan:
    """The plan of a ``fused_linear_policy_loss`` call.

    Attributes:
        schedule: the schedule's name, or "mixed" if sequences have different schedules.
        reason: the reason for this schedule.
        products: matmuls over the counted tokens, in units of the forward's: 3.0 is 6NHV operations. Rows
            that turn out to have no gradient are counted.
        multiplied_by: the matmul implementation, see ``matmul.select_matmul``.
        peak_bytes: peak memory of forward and backward beyond the inputs.
        gradient_bytes: the part of it that gradients of hidden states and weight take at the end.
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
"""Bytes per id of score centering: for all rows before the first chunk and kept during chunks, and for a
chunk's rows while their gradient is written and while it is multiplied. Measured peaks verify the sums.
"""


def explain(reason: str, call: Call, plan: Plan, decisions: Decisions, ids: int = 0) -> SchedulePlan:
    """Describe a plan; ``ids`` is the number of ids per row with score centering, including the label."""
    needs = decisions.requires_grad
    trained, total = needs.weight or needs.bias, sum(plan.lengths)
    products, tokens = 0, dict[str, int]()
    for step in plan.steps:
        gradients = {"forward": 0, "two_pass": 1 + needs.hidden + trained}
        active = step.row_count - step.inactive_rows
        products += step.row_count + active * gradients.get(step.schedule, needs.hidden + trained)
        tokens[step.schedule] = tokens.get(step.schedule, 0) + active
        if step.inactive_rows:
            tokens["forward"] = tokens.get("forward", 0) + step.inactive_rows
    used = [name for name in tokens if name != "forward"] or ["forward"]
    served_by = used[0] if len(used) == 1 else "mixed"
    memory, name = memory_of(call, plan, decisions, ids), call.matmul.name
    return SchedulePlan(served_by, reason, products / max(total, 1), *memory, tokens, name)


def memory_of(call: Call, plan: Plan, decisions: Decisions, ids: int) -> tuple[int, int]:
    """Return a call's peak bytes beyond inputs, and the bytes of its gradients.

    The peak is the maximum of three moments: the statistics of a chunk, its gradient matmuls, and the end,
    when sums become gradients.
    """
    matmul, needs, hidden = call.matmul, decisions.requires_grad, call.hidden
    wide, narrow, H = stats_dtype(hidden.dtype).itemsize, hidden.element_size(), hidden.shape[-1]
    chunk_rows, count = plan.max_rows, sum(plan.lengths)
    all_rows = count == call.labels.numel() and plan.in_order
    statistics, held_of_ids, row_of_ids = matmul.statistics_bytes(chunk_rows), 0, 0
    if ids:
        before, held, written, multiplied = (ids * each for each in CENTERING_BYTES[decisions.schedule])
        copied, held_of_ids = 0 if all_rows else 16 * ids, held * call.labels.numel()
        row_of_ids = multiplied + copied
        # a mask excludes a row's ids
        writing = chunk_rows * (matmul.row_bytes + written + copied + matmul.vocabulary // 8)
        statistics = max(before * call.labels.numel(), held_of_ids + writing)
    if not any(needs):
        return statistics, 0

    trained = matmul.trained.numel() if needs.weight else 0
    grad_hidden = hidden.numel() * narrow if needs.hidden else 0
    grad_weight = trained * matmul.trained.element_size()
    # a backward that recomputes logits holds no gradients meanwhile, and multiplies all rows in blocks
    recomputes = decisions.schedule == "two_pass" and not call.chunking.batch_invariant
    block_rows = count if recomputes else plan.longest("two_pass")
    columns = 0 if ids else block_width(call, block_rows, plan.chunk_rows)

    # of a row, besides logits: its hidden state (unless read in place), this times its coefficient, dHidden
    in_place = hidden.is_contiguous() and count == call.labels.numel() and (all_rows or recomputes)
    operand = matmul.trained.shape[1] * matmul.operand_dtype.itemsize if needs.weight else 0
    row = (0 if in_place else H * narrow) + operand + (H * wide if needs.hidden else 0) + row_of_ids

    # dWeight: fp32 sums, or its final dtype if one matmul writes it
    sums, buffers = trained * wide, list[int]()
    written_once = plan.one_product and (recomputes or matmul.rounds_early) and not ids
    if written_once and grad_weight < sums:
        if matmul.rows_from_project and not columns:
            row += 2 * H * wide  # recomputed rows of dWeight, see ``HeadSums.add_label_residual``
        if matmul.rows_dtype == torch.float16 or not matmul.writes_16_bits:
            rounded = min(columns or matmul.vocabulary, ROUNDED_COLUMNS)
            buffers = [rounded * matmul.trained.shape[1] * wide]
        sums = grad_weight
    if written_once and columns:
        logits = block_rows * columns * matmul.row_bytes // matmul.vocabulary
        statistics += 0 if recomputes else sums
        multiplying = logits + sum(buffers) + block_rows * row + sums
        end = block_rows * (row - operand) + grad_hidden + sums
    else:
        logits = chunk_rows * matmul.row_bytes
        end = grad_hidden + sums + (grad_weight if grad_weight < sums else 0)
        if plan.longest("deferred"):
            buffers = [sums]  # of one sequence
        if not matmul.any_order and trained:
            sums += SEGMENT * matmul.vocabulary * matmul.rows_dtype.itemsize  # an unfinished segment
        rows = max(chunk_rows, block_rows if columns else 0)
        multiplying = logits + sum(buffers) + rows * row + grad_hidden + sums
        statistics += grad_hidden + sums if ids and (chunk_rows < count or not hidden.is_cpu) else 0
    if hidden.is_cpu:
        # pages that are kept for the next call
        end += sum(size for size in (logits, *buffers) if size >= HUGE_PAGES_FROM)
    return max(statistics, multiplying + held_of_ids, end + held_of_ids), grad_hidden + grad_weight
