"""A sweep of kernel configurations: which tiles are fastest on this device, beside those that are chosen now.

Row kernels take their block and warps from tables of ``kernels.launch``. Each configuration replaces the
entry for its time only, and must give the same answer as the present one before it is timed (bit for bit but
for the order of sums: within a rounding of fp32 log-probs).
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Clock
from benchmarks.registry import Options, suite
from benchmarks.tables import aligned, number

SECONDS = 60.0
"""How long the sweep may take; configurations that were not reached are listed."""


@contextlib.contextmanager
def _entry(table: dict[int, Any], key: int, value: Any) -> Iterator[None]:
    before = table[key]
    table[key] = value
    try:
        yield
    finally:
        table[key] = before


@contextlib.contextmanager
def _attribute(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _median(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    call()
    seconds = []
    for _ in range(repeats):
        clock = Clock(device)
        clock.mark()
        call()
        clock.mark()
        seconds += clock.seconds()
    return statistics.median(seconds)


def configurations(tiny: bool) -> list[tuple[str, str, tuple[int, ...]]]:
    """(kernel, what its numbers mean, numbers): the present ones first, then the kernels in turn."""
    from gspo_kernels.kernels import launch

    blocks, warps = ((4096, 8192) if tiny else (2048, 4096, 8192, 16384)), ((8,) if tiny else (4, 8, 16))
    columns: list[list[tuple[str, str, tuple[int, ...]]]] = []
    tables = {"fold": launch.FORWARD, "backward": launch.BACKWARD, "fold_and_grad": launch.FORWARD_BACKWARD}
    for kernel, table in tables.items():
        present = (table[2].block, table[2].warps)
        others = [(b, w) for b in blocks for w in warps if (b, w) != present]
        columns.append([(kernel, "block, warps", numbers) for numbers in (present, *others)])
    columns.append([("held", "blocks of threads at most", (blocks,)) for blocks in (16, 8, 4, 0)])
    return [one for turn in itertools.zip_longest(*columns) for one in turn if one is not None]


def tune(options: Options) -> list[dict[str, Any]]:
    """Seconds of every configuration that time allows."""
    from gspo_kernels import kernels
    from gspo_kernels.kernels import launch, one_pass
    from gspo_kernels.types import LogitTransform

    device, plain = options.device, LogitTransform()
    N, V = (4, 300) if options.tiny else (4096, 151936)
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(1, N, V, generator=generator, device=device).mul_(3).bfloat16()
    labels = torch.randint(V, (1, N), generator=generator, device=device)
    c = torch.randn(1, N, generator=generator, device=device)
    out = torch.empty_like(logits)
    stats = kernels.logprobs_forward(logits, labels, plain, ignore_index=-100, entropy=False)

    def backward() -> Tensor:
        kernels.logprobs_backward(logits, labels, stats, c, None, None, plain, ignore_index=-100, out=out)
        return out

    def in_one_pass() -> Tensor:
        return kernels.logprobs_and_grad(logits, labels, c, plain, ignore_index=-100, out=out).logprobs

    calls: dict[str, Callable[[], Tensor]] = {
        "fold": lambda: (
            kernels.logprobs_forward(logits, labels, plain, ignore_index=-100, entropy=False).logprobs
        ),
        "backward": backward,
        "fold_and_grad": in_one_pass,
        "held": in_one_pass,
    }
    tables = {"fold": launch.FORWARD, "backward": launch.BACKWARD, "fold_and_grad": launch.FORWARD_BACKWARD}
    wanted: dict[str, Tensor] = {}
    start, found = time.perf_counter(), []
    for kernel, fields, numbers in configurations(options.tiny):
        line: dict[str, Any] = {"kernel": kernel, "fields": fields, "configuration": list(numbers)}
        found.append(line)
        if time.perf_counter() - start > SECONDS:
            line["skipped"] = "out of time"
            continue
        if kernel == "held":
            change = _attribute(one_pass, "most_blocks", lambda device, most=numbers[0]: most)
        else:
            change = _entry(tables[kernel], 2, launch.Tile(*numbers))
        # Rows that are held aren't walked.
        aside = _attribute(one_pass, "on_chip_tile", lambda *_: None)
        try:
            with change, aside if kernel == "fold_and_grad" else contextlib.nullcontext():
                got = calls[kernel]().clone()
                present = kernel not in wanted
                line["present"] = present
                want = wanted.setdefault(kernel, got)
                error = (got.float() - want.float()).abs().max().item()
                allowed = 4 * torch.finfo(got.dtype).eps * want.float().abs().max().item()
                if not error <= allowed:
                    line["wrong"] = f"differs by {error:.1e}, allowed {allowed:.1e}"
                    continue
                line["seconds"] = _median(calls[kernel], device, 2 if options.tiny else 7)
        except Exception as error:
            line["refused"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            if device.type == "cuda":
                torch.cuda.synchronize()
    return found


@suite("tuning", "Kernel configurations", everything=False)
def tuning(options: Options) -> dict[str, Any]:
    """bf16; needs a GPU, or Triton's interpreter and a tiny size."""
    lines = tune(options)
    rows = [["", "configuration", "ms", "x present"]]
    for kernel in dict.fromkeys(line["kernel"] for line in lines):
        mine = [line for line in lines if line["kernel"] == kernel]
        timed = sorted((line for line in mine if "seconds" in line), key=lambda line: line["seconds"])
        present = next((line["seconds"] for line in timed if line["present"]), None)
        for line in timed[:5]:
            ratio = number(line["seconds"] / present) if present else ""
            name = f"{kernel} ({line['fields']}){' *' if line['present'] else ''}"
            rows.append([name, str(line["configuration"]), number(1e3 * line["seconds"]), ratio])
    print(aligned(rows), "\n* the present one")
    return {"lines": lines, "table": rows}
