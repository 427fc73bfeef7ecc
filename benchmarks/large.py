"""The suites ``large`` and ``memory``: problems of ``logits`` and ``hidden`` with many tokens or words."""

from __future__ import annotations

from typing import Any

from benchmarks import logits
from benchmarks.contestants import OTHERS, PLAIN
from benchmarks.hidden import AUTO, SKIP, from_hidden
from benchmarks.measure import Options, run_cases, suite


@suite("large", "Larger problems on a CPU", everything=False)
def large(options: Options) -> dict[str, Any]:
    """From logits, and from hidden states with thousands of tokens or 152k words; it takes minutes."""
    sizes = [(8, 256, 32000, 512), (4, 256, 151936, 896)]
    rows, small = (8, 128, 32000), (4, 128, 8000, 256)
    if options.tiny:
        sizes, rows, small = [(2, 8, 300, 16)], (2, 8, 300), (2, 8, 300, 16)
    cases = [logits.case(3, f"from logits, {dtype}", rows, dtype, repeats=5) for dtype in ("fp32", "bf16")]
    for size in sizes:
        vocabulary = f"V={size[2]:,}"
        situations = {"all active": (OTHERS, AUTO), "half inactive": SKIP, "frozen head": (AUTO, PLAIN)}
        for name, wanted in situations.items():
            cases.append(from_hidden(f"{name}, {vocabulary}", size, "fp32", wanted, name, repeats=3))
    cases.append(from_hidden("all active, bf16", small, "bf16", (OTHERS, AUTO), repeats=3))
    return {"cases": run_cases(cases, options)}


@suite("memory", "Peak memory beyond inputs")
def memory(options: Options) -> dict[str, Any]:
    """A large vocabulary; nothing is timed."""
    size = options.choose(cpu=(4, 64, 151936, 64), gpu=(8, 1024, 151936, 1024), tiny=(2, 8, 300, 16))
    rows = options.choose(cpu=(2, 64, 151936), gpu=size[:3], tiny=size[:3])
    every = (OTHERS, AUTO, r"ours, (deferred|two_pass|least memory)")
    cases = [
        from_hidden("from hidden states", size, options.dtype, every, repeats=0),
        logits.case(3, "from logits", rows, options.dtype, repeats=0),
    ]
    return {"cases": run_cases(cases, options)}
