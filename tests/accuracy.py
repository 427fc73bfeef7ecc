"""Budgets of errors: how exact a result must be, judged so that no lucky rounding decides.

Plain PyTorch in the kernel's dtype errs, too. Its errors against fp64 are measured over several draws
(``Spread``). A kernel's may be twice as large, plus one rounding of its result. Two norms count:

- the root of the sum of squares, which every systematic error moves:
  ``|error| <= (2 + SURE * sqrt(1 / n + 1 / m)) * plain + eps / sqrt(12) * |exact|``, where ``n`` rows share
  the error and plain PyTorch's comes from ``m``. The norm of n independent errors of spread 1 exceeds
  sqrt(n) + t with a probability below exp(-t^2 / 2), so SURE times the root is what chance may add: almost
  nothing for many rows, more for few. So no test depends on how many rows happen to share the error. A
  rounding is at most eps / 2; eps / sqrt(12) is the root mean square of many.
- the largest single error, which one wrong element moves:
  ``max |error| <= 2 * max |plain| + SURE * spread of the least exact element + eps * max |exact|``. Where a
  single error shows in all elements (``rows`` is 1), the largest gets the same allowance for chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SURE = 4.0


@dataclass(frozen=True)
class Spread:
    """Errors of plain PyTorch over a few draws of the same shape."""

    norm: float
    """Root mean square over the draws of the 2-norm."""
    rows: float
    """How many rows carry that norm: 1 if one has it all, their number if they share it evenly."""
    draws: int
    largest: float
    least_exact: float
    """Root mean square over the draws of the error of the least exact element."""
    element: float
    """Root mean square of all errors, over draws and elements."""

    @staticmethod
    def of(errors: Sequence[Tensor], *, by_row: bool) -> Spread:
        """Summarize errors, a tensor per draw. ``by_row``: rows (last dimension) share an error each."""
        squares = torch.stack([each.detach().double() for each in errors]).square()
        if squares[0].numel() == 0:
            return Spread(0.0, 1.0, 1, 0.0, 0.0, 0.0)
        mean = squares.mean(0)
        rows = mean.sum(-1) if by_row else mean
        total = float(rows.sum())
        carried_by = float(rows.numel())
        if total:
            # a normal number's square has variance 2 mean^2, the mean of k squares has variance 2 mean^2 / k
            carried_by = min(carried_by, (1 + 2 / len(errors)) * total**2 / float(rows.square().sum()))
        peaks = squares.max(), mean.max(), mean.mean()
        largest, least_exact, element = (float(each) ** 0.5 for each in peaks)
        return Spread(total**0.5, carried_by, len(errors), largest, least_exact, element)

    def at_least(self, norm: float, largest: float, numbers: float) -> Spread:
        """Return at least ``norm`` and ``largest``, which derive from ``numbers`` independent numbers."""
        if norm <= self.norm:
            return self
        return Spread(
            norm,
            self.rows,
            max(self.draws, round(numbers / self.rows)),
            max(self.largest, largest),
            max(self.least_exact, largest),
            self.element,
        )


def assert_as_exact(
    name: str,
    errors: Sequence[Tensor],
    plain: Spread,
    exact: Sequence[Tensor],
    eps: float,
    times: float = 2.0,
) -> None:
    """Check errors of one or more draws against plain PyTorch's; ``exact`` are the exact values."""
    got, norm, largest = (_norms(errors), *_norms(exact))
    assert got[0] == got[0], f"{name}: NaN"
    draws = len(errors)
    chance = SURE * (1 / (plain.rows * draws) + 1 / (plain.rows * plain.draws)) ** 0.5
    allowed = (
        (times + chance) * draws**0.5 * plain.norm + eps / 12**0.5 * norm,
        (times + (chance if plain.rows == 1 else 0.0)) * plain.largest
        + SURE * plain.least_exact
        + eps * largest,
    )
    for what, error, most in zip(("norm", "largest"), got, allowed, strict=True):
        assert error <= most, (
            f"{name}: {what} error {error:.3e} against fp64, allowed {most:.3e} (plain PyTorch: "
            f"{plain.norm:.3e} in {plain.rows:.0f} rows and {plain.draws} draws, largest {plain.largest:.3e})"
        )


def _norms(values: Sequence[Tensor]) -> tuple[float, float]:
    flat = torch.cat([each.detach().double().flatten() for each in values])
    return float(flat.norm()), float(flat.abs().max()) if flat.numel() else 0.0


def assert_draws_as_exact(
    draws: Iterable[tuple[Callable, Callable]], dtype: torch.dtype, compared: int | None = None
) -> None:
    """Check that calls in ``dtype`` are as exact as formulas in plain PyTorch in its dtype of statistics.

    A draw is a pair: ``formulas`` takes the dtype to compute in, ``ours`` takes nothing; both return tensors
    by name. The formulas' results are rounded to the dtypes of ours. For fp64 their errors in fp32 are
    scaled. Values that are -inf in fp64 must be -inf. All draws measure the formulas' errors, only the first
    ``compared`` measure ours: where a few draws have most of the error, a budget needs more draws than a
    comparison.
    """
    double = dtype == torch.float64
    scale = 2 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps if double else 1.0
    errors: dict[str, list[Tensor]] = {}
    results: dict[str, list[tuple[Tensor, Tensor]]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for draw, (formulas, ours) in enumerate(draws):
        exact, plain = formulas(torch.float64), formulas(torch.float32)
        got = ours() if compared is None or draw < compared else {}
        for name, want in exact.items():
            if name in got:
                dtypes[name] = got[name].dtype
            none = want == -torch.inf
            want, usual = want.masked_fill(none, 0.0), plain[name].masked_fill(none, 0.0)
            usual = usual.to(dtypes.get(name))
            errors.setdefault(name, []).append(scale * (usual.double() - want))
            if name in got:
                assert got[name].shape == want.shape and torch.equal(got[name] == -torch.inf, none), name
                results.setdefault(name, []).append((got[name].masked_fill(none, 0.0), want))
    for name, pairs in results.items():
        got, exact = zip(*pairs, strict=True)
        spread = Spread.of(errors[name], by_row=name.startswith("grad") and exact[0].ndim > 1)
        ours_errors = [one.detach().double() - other.double() for one, other in zip(got, exact, strict=True)]
        assert_as_exact(name, ours_errors, spread, exact, torch.finfo(got[0].dtype).eps)
