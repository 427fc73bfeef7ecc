"""Which schedule serves a hidden-state loss, and how the batch is cut into parts: plain numbers, no tensors.

With N counted tokens, width H and vocabulary V one product is G = 2NHV operations. A *group* is a set of
sequences that determine each other's coefficients: one sequence, a group of the objective, or the batch. A
*part* is a run of groups that is worked through in one way; f is the fraction of its rows with a gradient.

| schedule | exact where | products | how |
|---|---|---|---|
| known | a token's coefficient is known, or its own | 3G | log-probs and gradient from one chunk |
| frozen | the head has no gradient | 2G | rows of dHidden wait for their coefficients |
| aligned | groups fit in a chunk | (1 + 2f)G | log-probs, coefficients, gradient of the same logits |
| deferred | one number per sequence | 3G | a sequence's sums wait for their coefficient |
| two_pass | always | (1 + 3f)G | rows with a gradient are projected once more |

"auto" is the first row of the table that is exact for the call: groups that fit in a chunk are aligned, each
longer group is deferred, or two_pass if it is shorter than ``SUM_ROWS``. If no input needs a gradient,
there is only the forward product.

How many rows of logits exist at once follows ``memory``. "auto" takes one chunk of all rows if their logits
are small beside dWeight (``memory.ALL_ROWS_BYTES``). A bf16 dWeight is one product then, and the peak is
4NV + 2VH + 8NH bytes. Otherwise it takes chunks of ``max_chunk_bytes``, on a GPU 4,096 rows by default: a
chunk moves 8VH bytes of dWeight's fp32 sum in products of 6 * 4096 VH operations, 3,072 a byte, where a GPU
has time for 160 to 240. With R rows in a chunk and 16-bit weights the peak is 4RV + 4VH + 2NH + 6RH bytes. A
call that is two_pass takes ``memory.LEAST_BYTES`` of logits: up to 16,384 tokens the peak is 16,384N + 2VH +
6NH bytes. "least" is that, or frozen where this is exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from gspo_kernels.arguments.terms import Terms
from gspo_kernels.logits.plan import Plan
from gspo_kernels.objectives.base import Objective

MEMORY = ("auto", "least")
SUM_ROWS = {"cpu": 192, "cuda": 2048}
"""The rows from which on sums of dWeight in fp32 take less time than one more product of these rows. So many
rows of a group that doesn't fit in a chunk are deferred.

"deferred" saves one of two_pass's four products, 2L VH operations for L rows. It moves 8VH bytes per chunk
of R rows, and 12VH to add a sequence's sums; two_pass moves 8LH bytes of dHidden per block. On a GPU with
time for 200 operations a byte, deferred is faster from L (2 / 200 + 8 / 4096 - 8 / R) = 12 on: 1,200 rows
in chunks of 4,096 rows, 2,900 in chunks of 1,024. Measured on AMD AVX-512, one thread, V = 32,000, H = 512,
in two chunks, two_pass takes 0.57 (32 rows), 0.76 (64), 0.90 (128), 1.07 (256) and 1.14 (512) times as long
in bf16, and 0.81, 0.87, 0.93, 1.06 and 1.14 times in fp32.

Beside two_pass over a bf16 weight, fewer rows of groups that fit in a chunk are projected twice, too. By
themselves they would need the sum in fp32: two_pass writes it (4VH bytes), their chunk adds to it (8VH), and
it is rounded (6VH), where one product writes 2VH. These 16VH bytes take as long as a product of 1,600 rows.
Measured as above, beside 300 rows, they take 1.10 (32 rows), 1.07 (64), 1.03 (128) and 0.95 (256) times as
long by themselves."""
SCHEDULES = ("known", "frozen", "aligned", "deferred", "two_pass")


def unsupported(objective: Objective, terms: Terms, plan: Plan, invariant: bool) -> dict[str, str]:
    """Return, by name, why schedules are not exact for a call, or not batch-invariant if ``invariant``."""
    name, depends_on = type(objective).__name__, plan.depends_on
    reasons: dict[str, str] = {}
    if depends_on not in ("nothing", "token"):
        what = f"{name} off-policy" if objective.ratio_only else name
        if terms.kl_beta is not None and terms.kl_ratio_weighted:
            what = f"kl_ratio_weighted with {what}"
        reasons["known"] = (
            f"it needs coefficients that depend on one token alone, but {what} makes them "
            f"depend on the {depends_on}"
        )
    # "deferred" is not exact if the tokens of a sequence have more than one coefficient
    if terms.kl_beta is not None:
        reasons["deferred"] = "kl_beta adds a coefficient of each token's own"
    elif not objective.factorizes:
        reasons["deferred"] = f"{name}'s coefficients are not one number per sequence"
    elif terms.advantages is not None and terms.advantages.ndim == 2:
        reasons["deferred"] = f"advantages per token give {name} coefficients per token"
    elif terms.rollout_weights is not None and terms.rollout_weights.ndim == 2 and objective.level == "token":
        reasons["deferred"] = f"rollout_weights per token give {name} coefficients per token"
    if terms.entropy_coef is not None:
        why = "entropy_coef adds a gradient that is no multiple of the log-prob's"
        reasons |= dict.fromkeys(("deferred", "frozen"), why)
    if plan.requires_grad.weight or plan.requires_grad.bias:
        reasons.setdefault("frozen", "the lm_head's weight or bias needs a gradient")
    if terms.cp_group:
        why = "cp_group has tokens of the same sequences on other ranks"
        reasons |= dict.fromkeys(("aligned", "deferred"), why)
    if invariant:
        reasons.setdefault("deferred", "batch-invariant mode sums dWeight in segments, not in sequences")
        if depends_on == "token":
            reasons.setdefault(
                "known", "batch-invariant mode takes coefficients from whole sequences, as other schedules do"
            )
        if depends_on in ("group", "batch"):
            why = f"batch-invariant mode evaluates coefficients that depend on the {depends_on} all at once"
            reasons |= dict.fromkeys(("aligned", "frozen"), why)
    if terms.skipped is not None and depends_on in ("group", "batch"):
        why = f"skip_inactive='all' leaves out sequences that {name}'s coefficients look at"
        reasons |= dict.fromkeys(("aligned", "frozen"), why)
    return reasons


def choose(
    schedule: str, reasons: dict[str, str], learns: bool, may_synchronise: bool, memory: str = "auto"
) -> tuple[str, str]:
    """Return the schedule of a call, and the reason for it, without looking at any value.

    "two_pass" projects again in the backward; all others compute the gradient along with the loss. "auto"
    stands for parts: groups that fit in a chunk, and longer ones.

    Args:
        schedule: "auto" or a name.
        reasons: what ``unsupported`` returns.
        learns: whether any input needs a gradient.
        may_synchronise: whether sequence lengths may be read from the device.
        memory: "auto" or "least".

    Raises:
        ValueError: unknown name, a schedule that is not exact for the call, or a schedule beside "least".
    """
    if not isinstance(schedule, str) or schedule not in ("auto", *SCHEDULES):
        raise ValueError(
            f"schedule: got {schedule!r}, expected 'auto' or one of {', '.join(map(repr, SCHEDULES))}"
        )
    if memory == "least" and schedule != "auto":
        raise ValueError(f"schedule: got {schedule!r}, expected 'auto' beside memory='least', which chooses")
    if schedule in reasons:
        raise ValueError(f"schedule: {schedule!r} is not exact here: {reasons[schedule]}; use 'auto'")
    if not learns:
        return "two_pass", "no input needs a gradient, so there is only the forward product"
    if schedule != "auto":
        return schedule, "it was passed"
    if memory == "least" and ("frozen" in reasons or not may_synchronise):
        return "two_pass", "memory='least' keeps neither many logits nor a sum of dWeight in fp32"
    if memory == "least":
        return "frozen", "the lm_head is frozen, so memory='least' has nothing else to keep than dHidden"
    if "known" not in reasons:
        return "known", "every token's coefficient is known beforehand or a function of its own log-prob"
    if not may_synchronise:
        return "two_pass", "skip_inactive='none' reads no sequence lengths from the device"
    if "frozen" not in reasons:
        return "frozen", "the lm_head is frozen, so only dHidden waits for its coefficients"
    if "aligned" in reasons:
        return "two_pass", reasons["aligned"]
    return "auto", "whole sequences (or groups) that fit in a chunk share it, longer ones go by themselves"


class Part(NamedTuple):
    """Groups ``start`` to ``stop - 1`` and the schedule that serves them.

    The last ``inactive_rows`` of the rows have no gradient: they only share the projection.
    """

    schedule: str
    start: int
    stop: int
    row_count: int
    inactive_rows: int = 0


def plan_parts(
    schedule: str, row_counts: Sequence[int], inactive: int, chunk_rows: int, defers: int, joins: int = 0
) -> list[Part]:
    """Cut groups into parts.

    Args:
        schedule: "auto", or any name but "known", which needs no parts.
        row_counts: the number of rows of each group.
        inactive: how many groups at the end have no gradient, whatever the forward gives.
        chunk_rows: rows of logits that fit the budget.
        defers: from how many rows on a group that doesn't fit is deferred; 0: none is.
        joins: fewer rows than these of groups that fit join a two_pass part; 0: none do. See ``SUM_ROWS``.

    Raises:
        ValueError: "aligned" by name, but a group doesn't fit in a chunk.
    """
    working = row_counts[: len(row_counts) - inactive]
    if schedule == "aligned" and working and max(working) > chunk_rows:
        raise ValueError(
            f"schedule: 'aligned' needs chunks that hold whole sequences (or groups), one has {max(working)} "
            f"counted tokens but a chunk {chunk_rows} rows; raise max_chunk_bytes or use 'auto'"
        )
    schedules = [schedule] * len(working)
    if schedule == "auto":
        fits = ["aligned" if count <= chunk_rows else "two_pass" for count in working]
        schedules = [
            "deferred" if name == "two_pass" and 0 < defers <= count else name
            for name, count in zip(fits, working, strict=True)
        ]
        fitting = sum(count for name, count in zip(schedules, working, strict=True) if name == "aligned")
        if "two_pass" in schedules and "deferred" not in schedules and fitting < joins:
            schedules = ["two_pass"] * len(working)
    parts: list[Part] = []
    for name, run in itertools.groupby(range(len(working)), schedules.__getitem__):
        members = list(run)
        # neighbouring groups share a part: aligned parts have about the same size, a deferred group is alone
        max_rows = {"aligned": chunk_rows, "deferred": 0}.get(name, math.inf)
        total = sum(working[members[0] : members[-1] + 1])
        target = total / max(1, -(-total // chunk_rows)) if name == "aligned" else max_rows
        first, count = members[0], 0
        for i in members:
            if i > first and (count >= target or count + working[i] > max_rows):
                parts.append(Part(name, first, i, count))
                first, count = i, 0
            count += working[i]
        parts.append(Part(name, first, members[-1] + 1, count))
    parts = [part for part in parts if part.row_count]
    stop = len(working)
    if parts and parts[-1].schedule == "aligned":
        # groups without a gradient fill up the last chunk
        last, count = parts[-1], parts[-1].row_count
        while stop < len(row_counts) and count + row_counts[stop] <= chunk_rows:
            count += row_counts[stop]
            stop += 1
        parts[-1] = Part("aligned", last.start, stop, count, count - last.row_count)
    rest = sum(row_counts[stop:])
    return [*parts, Part("forward", stop, len(row_counts), rest)] if rest else parts
