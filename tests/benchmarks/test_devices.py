"""The suites for a GPU say what is right, wrong, idle and missing; planted faults are found."""

from types import SimpleNamespace

import pytest
import torch

import benchmarks.__main__  # noqa: F401  it registers contestants and suites
from benchmarks import host, products
from benchmarks.registry import SUITES, Missing, Options

TINY = Options(torch.device("cpu"), "tiny", repeats=1)


def test_gaps_are_times_in_which_nothing_ran():
    """The second kernel overlaps the first; b ends last but starts before c."""
    spans = [("c", 40.0, 45.0), ("a", 0.0, 10.0), ("b", 5.0, 30.0), ("a", 12.0, 20.0), ("c", 48.0, 50.0)]
    found = host.timeline([host.Span(*span) for span in spans], calls=2)
    assert found["ms"] == 0.025 and found["idle_ms"] == 0.0065 and found["busy_ms"] == 0.0185
    assert found["gaps"] == [
        {"us": 10.0, "after": "b", "before": "c"}, {"us": 3.0, "after": "c", "before": "c"}
    ]  # fmt: skip
    (b, *rest) = found["kernels"]
    assert b == {"name": "b", "calls": 0.5, "ms": 0.0125} and [one["calls"] for one in rest] == [1.0, 1.0]


def product(fault, hidden, weight, labels, offsets, tile):
    """Compute the product with exponentials in plain PyTorch, with a fault."""
    logits = hidden.float() @ weight.float().t()
    terms = torch.exp2(logits * products.LOG2E - offsets[:, None])
    if fault == "the label in the sums":
        sums = terms.sum(1)
    terms = terms.scatter(1, labels[:, None], 0.0)
    if fault != "the label in the sums":
        sums = terms.sum(1)
    of_label = logits.gather(1, labels[:, None])[:, 0]
    if fault == "the label's logit in 16 bits":
        of_label = of_label.bfloat16().float()
    if fault == "a column that is not there":
        terms[:, -1] = 0.0
    if fault == "no offset beyond the range":
        sums = sums.clamp_max(2.0**80)
    if fault == "a race":
        terms[5, torch.randint(len(weight), ())] = 0.0
    return terms.to(hidden.dtype), sums, of_label


FAULTS = {
    "": "", "the label in the sums": "sums are off", "the label's logit in 16 bits": "label are off",
    "a column that is not there": "rows are off", "no offset beyond the range": "other rows than fp64's",
    "a race": "rows are off|other bits",
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_product_with_exponentials_is_judged_before_it_is_timed(fault, monkeypatch):
    stand_in = SimpleNamespace(TILES=("128 x 256",), exponentials=lambda *args: product(fault, *args))
    monkeypatch.setattr(products, "load_exponentials", lambda: stand_in)
    known = []
    found = SUITES["exponentials"].run(Options(TINY.device, "tiny", repeats=1, save=known.append))
    judged, *timed = found["lines"]
    assert len(known) == len(found["lines"]) and known[0]["lines"][0] == judged
    assert [line["name"].partition(": ")[2] for line in timed][2:] == ([] if fault else ["128 x 256"])
    assert (judged["share"] <= 1 and not judged["reason"]) if not fault else judged["reason"]
    assert any(word in judged["reason"] for word in FAULTS[fault].split("|"))


def test_a_product_that_does_not_exist_is_missing():
    with pytest.raises(Missing, match=r"linear/products/exponentials.py"):
        products.load_exponentials()


def test_products_in_a_fixed_order_are_compared(monkeypatch):
    found = {line["name"]: line for line in SUITES["fixed"].run(TINY)["lines"]}
    for name in ("logits", "dHidden", "dWeight"):
        assert found[f"{name}: right"]["share"] <= 1 and not found[f"{name}: right"]["reason"]
        assert found[f"{name}: fixed"]["seconds"] and found[f"{name}: mm"]["seconds"]
    assert found["fp32 dLogits: rows"]["seconds"] and "not exist" in found["fp32 dLogits: grid"]["reason"]
    plain = products.fixed_product

    def moved(a, b, out):
        return plain(a, b, out).mul_(1 + 1e-6 * len(a))

    monkeypatch.setattr(products, "fixed_product", moved)
    found = {line["name"]: line for line in SUITES["fixed"].run(TINY)["lines"]}
    assert found["dWeight: right"]["share"] > 1 and "other bits" in found["dWeight: right"]["reason"]


def test_launches_and_traces():
    """What is missing or fails has a reason, and the others are timed."""
    lines = {line["name"]: line for line in SUITES["host"].run(TINY)["lines"]}
    for name in host.CAPTURED:
        refused = "refused" in lines[name] or "CUDA" in lines[name]["graph"]["refused"]
        assert refused, name
    assert lines["log-probs: ours"]["warm_host"] > 0 and lines["hidden: ours, auto"]["queued_done"] > 0
    calls = SUITES["profile"].run(TINY)["calls"]
    assert set(calls) == {"hidden: ours, auto", "step: ours, auto", "step: naive PyTorch"}
    assert all(0 <= one["idle_ms"] < one["ms"] and one["kernels"] for one in calls.values())
