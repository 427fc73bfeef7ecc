"""The cost per logit of the row kernels' machine code: counted from the compiler's output, not measured.

Kernels are compiled for GPUs that needn't be here. Only a device can tell how fast they are. The counts tell
when a kernel has become costlier; see tests/kernels/test_triton_compile.py.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.registry import Options, suite
from benchmarks.tables import Row, aligned, number

KERNELS = {
    "forward with ratio, bf16": ("ratio", "bf16", 4096, 1.0),
    "forward with ratio, fp32": ("ratio", "fp32", 4096, 1.0),
    "log-probs, bf16": ("logprobs", "bf16", 4096, 1.0),
    "log-probs, bf16, temperature": ("logprobs", "bf16", 4096, 0.7),
    "log-probs, bf16, entropy": ("entropy", "bf16", 4096, 1.0),
    "backward, bf16": ("backward", "bf16", 4096, 1.0),
    "one pass on-policy, bf16, read twice": ("both", "bf16", 1 << 20, 1.0),
    "one pass on-policy, bf16, held": ("both", "bf16", 151936, 1.0),
    "one pass on-policy, fp32, held": ("both", "fp32", 151936, 1.0),
    "rows from hidden states, fp32 to bf16, held": ("rows", "fp32", 151936, 1.0),
}
"""By name: the launch, dtype of logits, vocabulary and temperature."""


def record(what: str, dtype: str, vocabulary: int, temperature: float, blocks: int = 0) -> Any:
    """Return a kernel's recorded launch; see ``Recorder``. Only in a process without TRITON_INTERPRET."""
    from benchmarks.machine_code import Recorder
    from gspo_kernels import kernels
    from gspo_kernels.types import LogitRows, LogitTransform, RatioClip, RatioOperands, RowGradients, RowStats

    recorder, transform = Recorder(blocks), LogitTransform(temperature=temperature)
    logits = torch.empty(2, 3, vocabulary, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    labels, floats = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)
    rows = LogitRows(logits, labels, transform, -100)
    if what == "ratio":
        form = RatioClip(math.log(0.8), math.log(1.2), math.inf, False, "sequences", 1.0)
        kernels.sequence_ratio_forward(rows, None, RatioOperands(floats, torch.zeros(2)), form)
    elif what in ("logprobs", "entropy"):
        kernels.logprobs_forward(rows, what == "entropy")
    elif what == "backward":
        stats, grads = RowStats(floats, floats.double(), None), RowGradients(floats, None, torch.ones(()))
        kernels.logprobs_backward(rows, stats, grads, logits)
    elif what == "rows":
        narrow = logits.view(torch.bfloat16)[..., :vocabulary]
        kernels.logprobs_and_rows(rows, narrow)
    else:
        kernels.logprobs_and_grad(rows, floats, logits)
    return recorder.calls[-1]


def count(names: list[str], targets: list[str]) -> list[dict[str, Any]]:
    """Return the figures of each kernel on each target. Only in a process without TRITON_INTERPRET."""
    from benchmarks.machine_code import BLOCKS, compiled, counts

    found = []
    for name in names:
        for target in targets:
            call = record(*KERNELS[name], blocks=BLOCKS[target])
            if ("PIECES" in call[2]) == name.endswith("held"):
                found.append({"name": name, **counts(call, target, compiled(call, target))})
    return found


def dearer(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Return the figures in which a kernel is worse than before; those per logit by more than 3%."""
    found = []
    if now["instructions_per_logit"] > 1.03 * before["instructions_per_logit"]:
        found.append("instructions_per_logit")
    if now["mufu_per_logit"] > 1.03 * before["mufu_per_logit"]:
        found.append("mufu_per_logit")
    if now["spilled"] > before["spilled"]:
        found.append("spilled")
    # More registers cost something only if fewer warps fit.
    if now["warps"] < before["warps"]:
        found.append("warps")
    return found


def table(lines: list[dict[str, Any]]) -> list[Row]:
    """Return a table with a row per kernel and a column per target."""
    targets = list(dict.fromkeys(line["target"] for line in lines))
    rows: list[Row] = [["instructions per logit; registers, warps, KiB", *targets]]
    for name in dict.fromkeys(line["name"] for line in lines):
        cells = dict.fromkeys(targets, "")
        for line in (line for line in lines if line["name"] == name):
            spilled = f", {line['spilled']} spilled" if line["spilled"] else ""
            cells[line["target"]] = (
                f"{number(line['instructions_per_logit'])}; {line['registers']}{spilled}, {line['warps']}, "
                f"{number(line['bytes_in_flight'] / 1024)}"
            )
        rows.append([name, *cells.values()])
    return rows


@suite("static", "Machine code of the GPU kernels, counted", everything=False)
def static(options: Options) -> dict[str, Any]:
    """Count in a new process, because importing kernels decides whether they are interpreted or compiled."""
    names = list(KERNELS)[:1] if options.tiny else list(KERNELS)
    targets = ["sm_90"] if options.tiny else ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942"]
    code = f"import json; from benchmarks import static; print(json.dumps(static.count({names}, {targets})))"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment, capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    if run.returncode:
        raise RuntimeError(run.stderr.strip().splitlines()[-1])
    lines = json.loads(run.stdout.splitlines()[-1])
    rows = table(lines)
    print(aligned(rows))
    return {"lines": lines, "table": rows}
