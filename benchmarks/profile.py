"""The suite ``profile``: kernels of a loss and of a training step, and the gaps between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType

from benchmarks.contestants import PLAIN
from benchmarks.hidden import draw
from benchmarks.measure import CONTESTANTS, Options, suite, synchronize
from benchmarks.step import make
from benchmarks.tables import Row, aligned, number

Call = Callable[[], tuple[Tensor, ...]]


def call_of(name: str, problem: Any, device: torch.device) -> Call:
    """Return a call of a contestant, without arguments: it returns the loss and its gradients."""
    contestant = CONTESTANTS[problem.task, name]
    compute, laid_out = contestant.get(device), problem.layout(contestant.layout)
    leaves = laid_out.leaves()

    def call() -> tuple[Tensor, ...]:
        loss = laid_out.call(compute, leaves)
        gradients = torch.autograd.grad(loss, leaves)
        laid_out.finish(leaves, gradients)
        return loss.detach(), *gradients

    return call


class Span(NamedTuple):
    """Something that ran on the device; microseconds."""

    name: str
    start: float
    end: float


def spans_of(call: Call, device: torch.device, calls: int) -> list[Span]:
    """Return the kernels of some calls in order of time; on a CPU the outermost operators."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    call()
    synchronize(device)
    # host operators are not recorded on a GPU, as this would lengthen the gaps
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        for _ in range(calls):
            call()
        synchronize(device)
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == kind and event.cpu_parent is None and not event.is_user_annotation
    ]


def timeline(spans: Sequence[Span], calls: int) -> dict[str, Any]:
    """Return milliseconds and kernels per call: in all, busy, idle; by kernel; and the longest gaps."""
    ordered = sorted(spans, key=lambda span: span.start)
    kernels: dict[str, list[float]] = defaultdict(list)
    gaps, idle, last = [], 0.0, ordered[0]
    for span in ordered:
        kernels[span.name].append(span.end - span.start)
        if span.start > last.end:
            idle += span.start - last.end
            gaps.append({"us": span.start - last.end, "after": last.name, "before": span.name})
        last = max(last, span, key=lambda one: one.end)
    whole = last.end - ordered[0].start
    found = [
        {"name": name, "calls": len(each) / calls, "ms": sum(each) / calls / 1e3}
        for name, each in kernels.items()
    ]
    return {
        "ms": whole / calls / 1e3,
        "busy_ms": (whole - idle) / calls / 1e3,
        "idle_ms": idle / calls / 1e3,
        "kernels": sorted(found, key=lambda one: -one["ms"]),
        "gaps": sorted(gaps, key=lambda one: -one["us"])[:20],
    }


def profile_table(found: dict[str, dict[str, Any]]) -> list[Row]:
    """Return a table of the first kernels and gaps of each call."""
    rows: list[Row] = [["", "kernels", "ms", "share"]]
    for name, line in found.items():
        if "refused" in line:
            rows.append([name, line["refused"]])
            continue
        count = sum(one["calls"] for one in line["kernels"])
        rows.append([name, number(count), number(line["ms"]), ""])
        rows.append(["- device idle", "", number(line["idle_ms"]), f"{line['idle_ms'] / line['ms']:.0%}"])
        for one in line["kernels"][:10]:
            cells = number(one["calls"]), number(one["ms"]), f"{one['ms'] / line['ms']:.0%}"
            rows.append([f"- {one['name'][:70]}", *cells])
        for gap in line["gaps"][:5]:
            between = f"- gap: {gap['after'][:30]} ... {gap['before'][:30]}"
            rows.append([between, "", number(gap["us"] / 1e3), ""])
    return rows


@suite("profile", "Kernels and idle gaps", everything=False)
def profile(options: Options) -> dict[str, Any]:
    """Trace the loss from hidden states, and a training step next to plain PyTorch's, in queued calls."""
    device = options.device
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    loss = options.choose(cpu=(64, 300, 16, 4), gpu=(16384, 151936, 4096, 16), tiny=(64, 300, 16, 4))
    small = options.choose(cpu=(2, 8, 300, 64, 1), gpu=(8, 512, 151936, 1024, 4), tiny=(2, 8, 300, 64, 1))
    found: dict[str, dict[str, Any]] = {}

    def trace(what: str, problem: Any, *names: str) -> None:
        for name in names:
            spans = spans_of(call_of(name, problem, device), device, 3)
            nothing = {"refused": "the profiler saw nothing on the device"}
            found[f"{what}: {name}"] = timeline(spans, 3) if spans else nothing
            options.save({"calls": found, "table": profile_table(found)})

    trace("hidden", draw("hidden", *loss, dtype, device), "ours, auto")
    trace("step", make(*small, device, dtype), "ours, auto", PLAIN)
    table = profile_table(found)
    print(aligned(table))
    return {"calls": found, "table": table}
