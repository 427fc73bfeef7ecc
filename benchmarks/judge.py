"""The judge of answers: only a contestant with a right answer is timed.

The budget is ``error <= 2 x the error of plain PyTorch at the same precision + one rounding of the largest
value``, for loss and gradients (scoring: log-probs), against fp64 on the very problem that is timed. No
budget exceeds what the precision of the logits explains. A contestant that sums gradients in 16 bits gets
half a rounding more for each further rounding of its sums, because that is its precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import problem as gspo
from benchmarks.problem import Problem
from benchmarks.registry import Contestant

_LARGEST_LOGIT = 21.0
"""Seven standard deviations of the logits."""
_KEPT = 2**27
"""The most elements of fp64 gradients that are kept in memory."""
_SINGLE = torch.finfo(torch.float32).eps


@dataclass
class Verdict:
    """The largest absolute errors against fp64 and the allowed ones, by name; infinite if one is missing."""

    errors: dict[str, float]
    allowed: dict[str, float]

    @property
    def share(self) -> float:
        """The worst error as a share of what was allowed."""
        return max((error / self.allowed[name] for name, error in self.errors.items()), default=math.inf)

    @property
    def complaint(self) -> str:
        """What is wrong, empty if nothing."""
        return "; ".join(
            f"{name} is off by {error:.1e}, allowed {self.allowed[name]:.1e}"
            for name, error in self.errors.items()
            if not error <= self.allowed[name]
        )


def _distance(got: Tensor | None, wanted: Tensor) -> float:
    if got is None or got.shape != wanted.shape:
        return math.inf
    found = (got.double() - wanted).abs().max().item() if wanted.numel() else 0.0
    return math.inf if math.isnan(found) else found


class Judge:
    """Compares results of a padded problem with fp64."""

    def __init__(self, problem: Problem):
        self.problem, self.exact = problem, gspo.exact(problem)
        self._plain: dict[str, tuple[dict[str, float], dict[str, float]]] = {}
        self._rows: list[Tensor] = []

    def verdict(
        self, contestant: Contestant, result: Tensor | None, gradients: tuple[Tensor | None, ...]
    ) -> Verdict:
        """Judge a loss (scoring: log-probs) and the gradients of the leaves, in the contestant's layout."""
        counted = self.problem.mask.bool()
        exact, found = self.exact.loss, {}
        assert exact is not None
        if self.problem.task == "scoring":
            got = result
            if got is not None and contestant.layout != "packed":
                got = got[counted] if got.shape == exact.shape else None
            found["logprobs"] = _distance(got, exact[counted])
        else:
            found["loss"] = _distance(result, exact.mean())
        for name, gradient in zip(self.problem.names, gradients, strict=True):
            if name == "logits":
                found[name] = self._logits(gradient, contestant.layout)
                continue
            wanted = self.exact.gradients.get(name)
            if wanted is None:
                continue
            if name == "hidden" and contestant.layout == "packed":
                wanted = wanted[counted]
            found[name] = _distance(gradient, wanted)
        errors, largest = self._of_plain(contestant.precision_for(self.problem.task))
        return Verdict(
            found,
            {name: self._allowed(name, errors[name], largest[name], contestant) for name in found},
        )

    def _logits(self, gradient: Tensor | None, layout: str) -> float:
        logits = self.problem.inputs[0]
        if gradient is not None and layout == "next":
            gradient = gradient[:, :-1]
        if gradient is None or gradient.shape != logits.shape:
            return math.inf
        flat = gradient.flatten(0, -2)
        return max(_distance(flat[rows], wanted) for rows, wanted in self._logit_gradients())

    def _logit_gradients(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield fp64 dLogits by slices of rows; keep them in memory if they are few enough."""
        logits = self.problem.inputs[0]
        _, c = gspo.coefficients(self.problem, self.problem.logprobs)
        slices = list(gspo.row_chunks(c.numel(), self.problem.vocabulary, logits.device))
        if not self._rows and logits.numel() <= _KEPT:
            self._rows = [gspo.logit_gradients(self.problem, rows, None, c) for rows in slices]
        for index, rows in enumerate(slices):
            yield rows, self._rows[index] if self._rows else gspo.logit_gradients(self.problem, rows, None, c)

    def _of_plain(self, precision: str) -> tuple[dict[str, float], dict[str, float]]:
        """Return the errors of plain PyTorch, and the largest values of the fp64 answer."""
        if precision in self._plain:
            return self._plain[precision]
        answer, rows_of = gspo.plain(self.problem, precision)
        exact = self.exact.loss
        assert answer.loss is not None and exact is not None
        name = "logprobs" if self.problem.task == "scoring" else "loss"
        # signed errors of sequences may cancel in the mean by luck; absolute errors don't
        difference = (answer.loss.double() - exact).abs()
        if name == "logprobs":
            difference = difference * self.problem.mask
        errors = {name: (difference.max() if name == "logprobs" else difference.mean()).item()}
        largest = {name: (exact * self.problem.mask if name == "logprobs" else exact).abs().max().item()}
        for key, wanted in self.exact.gradients.items():
            errors[key], largest[key] = _distance(answer.gradients[key], wanted), wanted.abs().max().item()
        if rows_of is not None:
            errors["logits"] = largest["logits"] = 0.0
            for rows, wanted in self._logit_gradients():
                errors["logits"] = max(errors["logits"], _distance(rows_of(rows), wanted))
                largest["logits"] = max(largest["logits"], wanted.abs().max().item())
        self._plain[precision] = errors, largest
        return self._plain[precision]

    def _allowed(self, name: str, error: float, largest: float, contestant: Contestant) -> float:
        dtype = self.problem.inputs[0].dtype
        width = 0 if self.problem.task == "logits" else self.problem.inputs[0].shape[-1]
        of_input = (
            torch.finfo(dtype).eps if contestant.precision_for(self.problem.task) == "input" else _SINGLE
        )
        # the error of logits, and of summing V exponentials in fp32
        of_logits = (
            _LARGEST_LOGIT * (_SINGLE * width**0.5 + of_input) + _SINGLE * self.problem.vocabulary**0.5
        )
        rounding = _SINGLE if name in ("loss", "logprobs") else torch.finfo(dtype).eps
        budget = min(2 * error + rounding * largest, (4 * of_logits + rounding) * max(largest, 1e-30))
        if name in ("hidden", "weight"):
            budget += (contestant.roundings(self.problem) - 1) * rounding / 2 * largest
        return budget
