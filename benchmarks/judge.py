"""No time without a right answer: who computes a problem, and how far from fp64 it may be.

``error <= 2 x the error of plain PyTorch whose logits have the same precision + one rounding of the largest
value``, for loss, dHidden and dWeight, on the very problem that is timed. Plain PyTorch itself, and with it
every budget, must stay below what the precision of the logits explains.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks import problem as gspo
from benchmarks.problem import Problem, Result

_LARGEST_LOGIT = 21.0
"""Seven standard deviations."""


@dataclass(frozen=True)
class Contestant:
    """A forward and backward of a situation's problem.

    Attributes:
        name: how the table calls it.
        situation: one of ``problem.SITUATIONS``.
        logits: "float32" or "input": the plain PyTorch that it is held against.
        call: problem -> result; None where it can't be had.
        missing: why.
        has_loss: False for the bare products.
    """

    name: str
    situation: str
    logits: str
    call: Callable[[Problem], Result] | None
    missing: str = ""
    has_loss: bool = True


@dataclass
class Outcome:
    """A line of the table.

    Attributes:
        status: "right", "wrong", "refused" (the call raised) or "missing".
        reason: why it has no time; for ours that has one, the schedule's own account.
        errors, budgets: largest absolute errors of loss, dHidden, dWeight against fp64, and what was allowed.
        first_seconds: of the call that was judged; it counts for nothing.
        seconds: of each repeat.
        to_floor: median over the faster floor's.
    """

    name: str
    situation: str
    logits: str
    status: str = "right"
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    budgets: dict[str, float] = field(default_factory=dict)
    first_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)
    to_floor: float | None = None


class Judge:
    """Holds results of a problem against fp64."""

    def __init__(self, problem: Problem):
        self.problem, self.exact = problem, gspo.exact(problem)
        self.exact_losses, _ = gspo.exact_losses(problem)
        self._plain_errors: dict[str, dict[str, float]] = {}

    def judge(self, contestant: Contestant, outcome: Outcome) -> None:
        """Fill in errors, budgets and status."""
        if contestant.call is None:
            outcome.status, outcome.reason = "missing", contestant.missing
            return
        start = time.perf_counter()
        try:
            result = contestant.call(self.problem)
        except (ValueError, TypeError, RuntimeError) as error:
            outcome.status, outcome.reason = "refused", f"{error}"
            return
        outcome.first_seconds = time.perf_counter() - start
        outcome.errors, outcome.budgets = self._errors(result), self._budgets(contestant.logits)
        if not contestant.has_loss:
            del outcome.errors["loss"]
        beyond = [
            f"{name} is off by {error:.1e}, allowed {outcome.budgets[name]:.1e}"
            for name, error in outcome.errors.items()
            if not error <= outcome.budgets[name]
        ]
        if beyond:
            outcome.status, outcome.reason = "wrong", "; ".join(beyond)

    def _errors(self, result: Result) -> dict[str, float]:
        """Largest absolute errors; infinite where something is missing; no dWeight for a frozen head."""
        found = {}
        for name in ("loss", "hidden", "weight"):
            got, wanted = getattr(result, name), getattr(self.exact, name)
            if wanted is None:
                continue
            comparable = got is not None and got.shape == wanted.shape
            found[name] = got.double().sub_(wanted).abs_().max().item() if comparable else float("inf")
        return found

    def _plain(self, logits: str) -> dict[str, float]:
        if logits not in self._plain_errors:
            hidden, weight = gspo.leaves(self.problem)
            losses = gspo.plain_losses(hidden, weight, self.problem, logits, native=False)
            errors = self._errors(gspo.differentiate(losses.mean(), hidden, weight))
            # in the mean, errors of sequences cancel by luck; their sizes don't
            errors["loss"] = (losses.double() - self.exact_losses).abs().mean().item()
            self._plain_errors[logits] = errors
        return self._plain_errors[logits]

    def _budgets(self, logits: str) -> dict[str, float]:
        dtype, width = self.problem.weight.dtype, self.problem.hidden.shape[-1]
        single = torch.finfo(torch.float32).eps
        of_logits = _LARGEST_LOGIT * (
            single * width**0.5 + (torch.finfo(dtype).eps if logits == "input" else single)
        )
        budgets = {}
        for name, error in self._plain(logits).items():
            wanted = self.exact_losses if name == "loss" else getattr(self.exact, name)
            rounding = single if name == "loss" else torch.finfo(dtype).eps
            largest = wanted.abs().max().item()
            budgets[name] = min(2 * error + rounding * largest, (4 * of_logits + rounding) * largest)
        return budgets
