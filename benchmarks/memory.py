"""The suite ``memory``: peaks of problems of ``logits`` and ``hidden`` with a large vocabulary."""

from __future__ import annotations

from typing import Any

from benchmarks import logits
from benchmarks.contestants import OTHERS
from benchmarks.hidden import AUTO, from_hidden
from benchmarks.measure import Options, run_cases, suite


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
