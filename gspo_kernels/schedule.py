"""How a hidden-state loss is cut into chunks and matrix products.

One product over all counted rows is G = 2NHV operations. "known" does forward and both gradients from one
projection of each chunk (3G); "two_pass" projects once for the log-probs and again in the backward (4G),
leaving rows without gradient out of the latter (1 + 3f of G for an active fraction f).
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULES = ("known", "two_pass")


@dataclass(frozen=True)
class SchedulePlan:
    """What a call will do.

    Attributes:
        schedule: "known" or "two_pass".
        gemms: matrix products over all counted rows, forward and backward, with every row active.
        chunk_rows: rows of logits that exist at once.
        chunks: how many chunks cover all rows.
        chunk_bytes: bytes of those logits.
        accumulator_bytes: fp32 (fp64) copies of dWeight and dBias that live until the end of the call.
        reason: why this schedule.
    """

    schedule: str
    gemms: int
    chunk_rows: int
    chunks: int
    chunk_bytes: int
    accumulator_bytes: int
    reason: str

    def __str__(self) -> str:
        """One paragraph for people."""
        return (
            f"schedule {self.schedule}: {self.gemms} GEMMs, {self.chunks} chunk(s) of up to "
            f"{self.chunk_rows} rows ({self.chunk_bytes / 2**20:.1f} MiB of logits), "
            f"{self.accumulator_bytes / 2**20:.1f} MiB of accumulators; {self.reason}"
        )


def choose(schedule: str, depends_on: str, why: str, needs_gradient: bool) -> tuple[str, str]:
    """The schedule of a call and the reason for it.

    Args:
        schedule: "auto" or a name.
        depends_on: what a token's coefficient depends on in this call.
        why: the objective and terms that make it so, for messages.
        needs_gradient: whether any input needs one.

    Raises:
        ValueError: unknown name, or a schedule that is not exact for the call.
    """
    if schedule not in ("auto", *SCHEDULES):
        raise ValueError(
            f"schedule: got {schedule!r}, expected 'auto' or one of {', '.join(map(repr, SCHEDULES))}"
        )
    exact = depends_on in ("nothing", "token")
    if schedule == "known" and not exact:
        raise ValueError(
            f"schedule: 'known' needs coefficients that depend on one token alone, but {why} makes them "
            f"depend on the {depends_on}; use 'two_pass' or 'auto'"
        )
    if schedule != "auto":
        return schedule, "asked for"
    if not needs_gradient:
        return "two_pass", "no input needs a gradient, so there is only the forward product"
    if exact:
        known = "known before the forward" if depends_on == "nothing" else "a function of its own log-prob"
        return "known", f"every token's coefficient is {known}"
    return "two_pass", f"{why} makes coefficients depend on the {depends_on}"
