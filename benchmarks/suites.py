"""The suites that time contestants on one problem each: from logits, from hidden states, and sweeps."""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import problem as gspo
from benchmarks.measure import Case, run_cases
from benchmarks.problem import Problem
from benchmarks.registry import Options, suite

PRODUCTS = {"logits": 1.0, "dHidden": 1.0, "dWeight": 1.0}
THREE_PRODUCTS = "the three products"
# Everyone but our own variants, of which each case names those that it is about.
OTHERS = r"(?!ours)(?!.*packed).*"
HALF = (r"ours, auto", r"ours, auto, skip .*", r"naive PyTorch", r"ours, auto, 16-bit logits")


def shape_of(B: int, T: int, V: int, H: int | None, dtype: str) -> dict[str, Any]:
    """What tables say of a problem."""
    shape: dict[str, Any] = {"dtype": dtype, "sequences": B, "length": T, "V": V}
    return shape if H is None else {**shape, "H": H}


def _drawn(
    task: str, B: int, T: int, V: int, H: int, dtype: str, situation: str = "all active"
) -> Callable[[torch.device], Problem]:
    def make(device: torch.device) -> Problem:
        drawn = gspo.draw(task, B * T, V, H, B, gspo.DTYPES[dtype], device)
        return drawn.situation(situation)

    return make


def _case(
    task: str,
    name: str,
    size: Sequence[int],
    dtype: str,
    wanted: Sequence[str],
    situation: str = "all active",
    floor: dict[str, float] | None = None,
    floor_name: str = "",
    repeats: int = 5,
) -> Case:
    B, T, V, H = size
    make = _drawn(task, B, T, V, H, dtype, situation)
    shape = shape_of(B, T, V, H or None, dtype)
    if task == "logprobs":
        del shape["V"]
    return Case(name, make, shape, wanted, floor or {}, floor_name, repeats)


# --- from logits


@suite("logits", "Loss and gradient from logits")
def logits(options: Options) -> dict[str, Any]:
    """Forward, backward and both; the floor is the least traffic at the rate of a plain copy."""
    on_cpu = options.device.type == "cpu"
    size = (8, 64, 32000, 0) if on_cpu else (16, 1024, 151936, 0)
    small = (4, 16, 1000, 0)
    if options.tiny:
        size, small = (2, 8, 300, 0), (2, 4, 50, 0)
    ours, plain = r"ours, (cpp|triton)(, in place)?", r"naive PyTorch"
    first, second = ("fp32", "bf16") if on_cpu else ("bf16", "fp32")

    def case(name: str, dtype: str, situation: str, accesses: float, *wanted: str, size: Any = size) -> Case:
        # a copy is two accesses per logit
        floor, words = {"copy": accesses / 2}, f"{accesses:g} accesses per logit, at the rate of a copy"
        return _case("logits", name, size, dtype, wanted, situation, floor, words, 9)

    cases = [
        case(f"{first}, all active", first, "all active", 3, OTHERS, ours, r"ours, reference"),
        case(f"{second}, all active", second, "all active", 3, OTHERS, ours),
        case("bf16, on-policy", "bf16", "on-policy", 2, plain, ours),
        case(f"{first}, half inactive", first, "half inactive", 2.5, plain, ours),
        case("fp32, tiny", "fp32", "all active", 3, OTHERS, ours, r"ours, reference", size=small),
    ]
    return {"cases": run_cases(cases, options)}


# --- from hidden states


@suite("hidden", "Loss and gradients from hidden states")
def hidden(options: Options) -> dict[str, Any]:
    """Every schedule; half of the sequences inactive; a frozen head; on-policy; bf16; a tiny shape."""
    on_cpu = options.device.type == "cpu"
    size = (4, 128, 32000, 512) if on_cpu else (16, 1024, 151936, 4096)
    size, dtype = ((2, 8, 300, 16) if options.tiny else size), "fp32" if on_cpu else "bf16"
    case = functools.partial(_case, "hidden", floor=PRODUCTS, floor_name=THREE_PRODUCTS)
    schedules = r"ours, (auto|known|aligned|deferred|frozen|two_pass)(, 16-bit logits)?"
    cases = [
        case("all active", size, dtype, (OTHERS, schedules)),
        case("batch-invariant", size, dtype, (r"ours, auto(, batch-invariant)?", r"naive PyTorch")),
        case("half inactive", size, dtype, HALF, "half inactive"),
        case("frozen head", size, dtype, (r"ours, (auto|frozen)", r"naive PyTorch"), "frozen head"),
        case("on-policy", size, dtype, (r"ours, (auto|known)", r"naive PyTorch"), "on-policy"),
    ]
    if not on_cpu and not options.tiny:
        narrow = (*size[:3], 2048)
        cases.append(case("all active, H=2048", narrow, dtype, (OTHERS, r"ours, auto")))
    if on_cpu:
        for words, V in (("large", 32000), ("small", 1000)) if not options.tiny else (("large", 300),):
            long = (4, 512, V, 512) if not options.tiny else size
            ours = r"ours, auto(, 16-bit logits)?"
            cases.append(case(f"bf16, {words} vocabulary", long, "bf16", (OTHERS, ours)))
    tiny = (4, 16, 1000, 64) if not options.tiny else (2, 4, 50, 8)
    cases.append(case("tiny", tiny, "fp32", (OTHERS, r"ours, auto(, reference backend)?"), repeats=9))
    return {"cases": run_cases(cases, options)}


@suite("logprobs", "Loss and gradient from log-probs")
def logprobs(options: Options) -> dict[str, Any]:
    """Everything but the log-probs: what a loss costs at least; a tiny batch and a usual one."""
    sizes = {"tiny": (4, 16, 1000, 0), "64 sequences": (64, 1024, 64, 0)}
    if options.tiny:
        sizes = {"tiny": (2, 4, 50, 0)}
    return {
        "cases": run_cases(
            [_case("logprobs", name, size, "fp32", (".*",), repeats=9) for name, size in sizes.items()],
            options,
        )
    }


@suite("scoring", "Log-probs from hidden states, no gradient")
def scoring(options: Options) -> dict[str, Any]:
    """The floor is one product."""
    on_cpu = options.device.type == "cpu"
    size = (4, 128, 32000, 512) if on_cpu else (16, 1024, 151936, 4096)
    size, dtype = ((2, 8, 300, 16) if options.tiny else size), "fp32" if on_cpu else "bf16"
    floor = {"floor": {"logits": 1.0}, "floor_name": "one product"}
    cases = [_case("scoring", "all tokens", size, dtype, (".*",), **floor)]
    if not on_cpu and not options.tiny:
        cases.append(_case("scoring", "all tokens, H=2048", (*size[:3], 2048), dtype, (".*",), **floor))
    return {"cases": run_cases(cases, options)}


@suite("large", "Larger problems on a CPU", everything=False)
def large(options: Options) -> dict[str, Any]:
    """From logits and hidden states at thousands of tokens, or 152k words. For a CPU; it takes minutes."""
    sizes = ((8, 256, 32000, 512), (4, 256, 151936, 896))
    rows, small = (8, 128, 32000, 0), (4, 128, 8000, 256)
    if options.tiny:
        sizes, rows, small = ((2, 8, 300, 16),), (2, 8, 300, 0), (2, 8, 300, 16)
    ours = (OTHERS, r"ours, (cpp|triton)(, in place)?")
    copies = {"floor": {"copy": 1.5}, "floor_name": "3 accesses per logit, at the rate of a copy"}
    cases = [
        _case("logits", f"from logits, {dtype}", rows, dtype, ours, **copies) for dtype in ("fp32", "bf16")
    ]
    auto = r"ours, auto(, 16-bit logits)?"
    head = functools.partial(_case, "hidden", floor=PRODUCTS, floor_name=THREE_PRODUCTS, repeats=3)
    for size in sizes:
        vocabulary = f"V={size[2]:,}"
        cases += [
            head(f"all active, {vocabulary}", size, "fp32", (OTHERS, auto)),
            head(f"half inactive, {vocabulary}", size, "fp32", HALF, "half inactive"),
            head(f"frozen head, {vocabulary}", size, "fp32", (auto, "naive PyTorch"), "frozen head"),
        ]
    cases.append(head("all active, bf16", small, "bf16", (OTHERS, auto)))
    return {"cases": run_cases(cases, options)}


# --- a batch as training meets it


@suite("realistic", "A batch as training meets it")
def realistic(options: Options) -> dict[str, Any]:
    """Log-normal lengths, groups without variance, clipped sequences; the floor is that of counted tokens."""
    on_cpu = options.device.type == "cpu"
    B, T, V, H = (20, 64, 32000, 512) if on_cpu else (40, 1024, 151936, 4096)
    if options.tiny:
        B, T, V, H = 8, 16, 300, 16
    dtype = "fp32" if on_cpu else "bf16"

    def make(device: torch.device) -> Problem:
        return gspo.realistic("hidden", B, T, V, H, gspo.DTYPES[dtype], device)

    wanted = (OTHERS, r"naive.*packed tokens", r"ours, auto(, skip all)?", r"ours, auto, packed tokens")
    case = Case(
        "realistic",
        make,
        shape_of(B, T, V, H, dtype),
        wanted,
        PRODUCTS,
        "three products of the counted tokens",
    )
    about = gspo.about(gspo.realistic("hidden", B, T, 50, 4, torch.float32))
    return {"about": about, "cases": run_cases([case], options)}


# --- memory alone, and sweeps


@suite("memory", "Peak memory beyond inputs")
def memory(options: Options) -> dict[str, Any]:
    """A large vocabulary; nothing is timed."""
    on_cpu = options.device.type == "cpu"
    size = (4, 64, 151936, 64) if on_cpu else (8, 1024, 151936, 1024)
    size, dtype = ((2, 8, 300, 16) if options.tiny else size), "fp32" if on_cpu else "bf16"
    every = (OTHERS, r"ours, auto(, 16-bit logits)?", r"ours, (deferred|two_pass)")
    head = _case("hidden", "from hidden states", size, dtype, every, repeats=0)
    small = size if not on_cpu or options.tiny else (2, 64, 151936, 0)
    rows = _case(
        "logits",
        "from logits",
        (*small[:3], 0),
        dtype,
        (OTHERS, r"ours, (cpp|triton)(, in place)?"),
        repeats=0,
    )
    return {"cases": run_cases([head, rows], options)}


@suite("scaling", "How time and memory grow")
def scaling(options: Options) -> dict[str, Any]:
    """Tokens, vocabulary and length, each over two decades; the other sizes stay."""
    on_cpu = options.device.type == "cpu"
    dtype, H = ("fp32", 128) if on_cpu else ("bf16", 2048)
    if options.tiny:
        # by sweep its sizes, then what stays: the vocabulary, (sequences, length), (tokens, vocabulary)
        tokens, V, batch, vocabularies, total, lengths = (8, 16), 60, (4, 2), (50, 100), (32, 15), (8, 32)
        H = 8
    elif on_cpu:
        tokens, V, total, lengths = (40, 400, 1200, 4000), 8000, (4096, 2000), (32, 512, 4096)
        batch, vocabularies = (4, 128), (1000, 10000, 30000, 100000)
    else:
        tokens, V, total, lengths = (400, 2000, 10000, 40000), 65536, (16384, 16384), (128, 1024, 4096, 16384)
        batch, vocabularies = (8, 1024), (2000, 10000, 50000, 200000)
    sizes = [(f"tokens {n}", (4, n // 4, V, H)) for n in tokens]
    sizes += [(f"vocabulary {v}", (*batch, v, H)) for v in vocabularies]
    sizes += [(f"length {t}", (total[0] // t, t, total[1], H)) for t in lengths]
    wanted = (r"ours, auto", r"naive PyTorch")
    records = run_cases(
        [_case("hidden", name, size, dtype, wanted, repeats=3) for name, size in sizes], options
    )
    return {"slopes": slopes(records), "cases": records}


def slopes(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Exponents of growth, sweep -> contestant -> "time" and "memory", over the upper half of each sweep.

    By least squares on logarithms; 1 is linear, 0 constant. The lower half is left out because there the
    constant costs of a call, not its growth, are what is measured.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    points: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for record in records:
        match = re.fullmatch(r"(\w+) (\d+)", record["name"])
        assert match
        for result in record["results"]:
            if "seconds" in result:
                values = {
                    "time": statistics.median(result["seconds"]["both"]),
                    "memory": result.get("peak_bytes"),
                }
                for what, value in values.items():
                    if value:
                        key = (match[1], result["contestant"], what)
                        points.setdefault(key, []).append((math.log(int(match[2])), math.log(value)))
    for (sweep, name, what), pairs in points.items():
        upper = pairs[len(pairs) // 2 :] if len(pairs) > 3 else pairs
        if len(upper) > 1:
            slope = statistics.linear_regression(*zip(*upper, strict=True)).slope
            found.setdefault(sweep, {}).setdefault(name, {})[what] = slope
    return found
