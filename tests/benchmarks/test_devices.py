"""The suites for a GPU report correct, wrong, idle and missing items, and find planted faults."""

import functools
import re

import pytest
import torch

import benchmarks.__main__  # noqa: F401  it registers contestants and suites
from benchmarks import products, profile
from benchmarks.measure import SUITES, Options

TINY = Options(torch.device("cpu"), "tiny", repeats=1)


def product(fault, hidden, weight, labels, store=True):
    """Compute the product with exponentials in plain PyTorch, with a fault."""
    logits, label = hidden.double() @ weight.double().t(), labels[:, None]
    own = logits.gather(1, label)
    others = logits.scatter(1, label, -torch.inf).logsumexp(1, keepdim=True)
    whole = torch.logaddexp(others, own)
    e = torch.exp(logits - whole).scatter(1, label, -torch.exp(others - whole))
    rounded, logprobs = e.to(hidden.dtype), (own - whole)[:, 0]
    label_residual = (e - rounded.double()).gather(1, label)[:, 0]
    if fault == "the label in 16 bits":
        label_residual = torch.zeros_like(label_residual)
    if fault == "NaN is lost":
        logprobs = logprobs.nan_to_num()
    if fault == "a race":
        rounded[5, torch.randint(len(weight), ())] = 0.0
    return rounded, -torch.ones_like(logprobs), label_residual, logprobs.float()


FAULTS = {
    "": "",
    "the label in 16 bits": "labels are off",
    "NaN is lost": "other log-probs than fp64's",
    "a race": "rows are off|labels are off|other bits",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_exponential_product_is_not_timed(fault, monkeypatch):
    monkeypatch.setattr(products, "load_product", lambda device: functools.partial(product, fault))
    found = {line["name"]: line for line in SUITES["exponentials"].run(TINY)["lines"]}
    judged, timed = found["right"], any(name.endswith("ours") for name in found)
    assert re.search(FAULTS[fault], judged["reason"]) and bool(judged["reason"]) == bool(fault)
    assert timed == (not fault) and (fault or judged["share"] <= 1)


def test_products_in_a_fixed_order_are_compared(monkeypatch):
    def lines():
        return {line["name"]: line for line in SUITES["fixed"].run(TINY)["lines"]}

    assert all(lines()[f"{name}: right"]["share"] <= 1 for name in ("logits", "dHidden", "dWeight"))
    plain = products.batch_invariant_mm
    moved = lambda a, b, out: plain(a, b, out).mul_(1 + 1e-6 * len(a))  # noqa: E731
    monkeypatch.setattr(products, "batch_invariant_mm", moved)
    found = lines()["dWeight: right"]
    assert found["share"] > 1 and "other bits" in found["reason"]


def test_gaps_are_times_in_which_nothing_ran():
    """The second kernel overlaps the first; b ends last but starts before c."""
    spans = [("c", 40.0, 45.0), ("a", 0.0, 10.0), ("b", 5.0, 30.0), ("a", 12.0, 20.0), ("c", 48.0, 50.0)]
    found = profile.timeline([profile.Span(*span) for span in spans], calls=2)
    assert (found["ms"], found["idle_ms"], found["busy_ms"]) == (0.025, 0.0065, 0.0185)
    assert [(gap["us"], gap["after"], gap["before"]) for gap in found["gaps"]] == [
        (10, "b", "c"),
        (3, "c", "c"),
    ]


def test_kernels_and_gaps_are_recorded():
    calls = SUITES["profile"].run(TINY)["calls"]
    assert len(calls) == 3
    assert all(0 <= one["idle_ms"] < one["ms"] and one["kernels"] for one in calls.values())
