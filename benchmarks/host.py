"""The suites ``profile``: kernels and idle gaps, and ``host``: what launches take, and graphs."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType

import gspo_kernels as gk
from benchmarks import problem as gspo
from benchmarks import suites
from benchmarks.measure import DeviceBroken, synchronize
from benchmarks.registry import CONTESTANTS, Missing, Options, suite
from benchmarks.tables import Row, aligned, number

Call = Callable[[], tuple[Tensor, ...]]


def call_of(name: str, problem: Any, device: torch.device) -> Call:
    """Return a call of a contestant, without arguments: it returns the loss and its gradients."""
    contestant = CONTESTANTS[name]
    compute, laid_out = contestant.get(device), problem.layout(contestant.layout)
    leaves = laid_out.leaves()

    def call() -> tuple[Tensor, ...]:
        loss = laid_out.call(compute, leaves)
        gradients = torch.autograd.grad(loss, leaves)
        laid_out.finish(leaves, gradients)
        return loss.detach(), *gradients

    return call


# --- kernels and gaps


class Span(NamedTuple):
    """Something that ran on the device; microseconds."""

    name: str
    start: float
    end: float


def spans_of(call: Call, device: torch.device, calls: int) -> list[Span]:
    """Return what ran on the device in some calls, one after the other; on a CPU the outermost operators."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    call()
    synchronize(device)
    # the host's operators are left out on a GPU, because recording them makes the gaps longer
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
            rows.append(
                [f"- gap: {gap['after'][:30]} ... {gap['before'][:30]}", "", number(gap["us"] / 1e3), ""]
            )
    return rows


@suite("profile", "Kernels and idle gaps", everything=False)
def profile(options: Options) -> dict[str, Any]:
    """Trace the loss from hidden states, and a training step beside plain PyTorch's, in queued calls."""
    device, tiny = options.device, options.tiny
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    hidden = (64, 300, 16, 4) if tiny else (16384, 151936, 4096, 16)
    step = (2, 8, 300, 64, 1) if tiny else (8, 512, 151936, 1024, 4)
    problems: dict[str, Callable[[], Any]] = {
        "hidden": partial(gspo.draw, "hidden", *hidden, kind, device),
        "step": partial(suites.make, *step, device, kind),
    }
    found: dict[str, dict[str, Any]] = {}
    for what, names in {"hidden": ("ours, auto",), "step": ("ours, auto", suites.PLAIN)}.items():
        problem = problems[what]()
        for name in names:
            spans = spans_of(call_of(name, problem, device), device, 3)
            nothing = {"refused": "the profiler saw nothing on the device"}
            found[f"{what}: {name}"] = timeline(spans, 3) if spans else nothing
            options.save({"calls": found, "table": profile_table(found)})
        del problem
    table = profile_table(found)
    print(aligned(table))
    return {"calls": found, "table": table}


# --- launches


def host_times(call: Call, device: torch.device, repeats: int) -> dict[str, float]:
    """Return median milliseconds of single calls, until the host is free and until the device is done, with
    warm and with cold caches of the processor; and of calls that are queued one after the other.
    """
    swept = torch.zeros(2**20 if repeats < 3 else 2**26, dtype=torch.uint8)

    def once(calls: int, cold: bool) -> tuple[float, float]:
        if cold:  # as after a model's forward
            swept.add_(1)
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        free = time.perf_counter()
        synchronize(device)
        return 1e3 * (free - start) / calls, 1e3 * (time.perf_counter() - start) / calls

    _, single = once(1, False), once(1, False)[1]
    queued = max(2, min(50, math.ceil(300 / single))) if repeats > 2 else 2
    found = {}
    for name, calls, cold in (("warm", 1, False), ("cold", 1, True), ("queued", queued, False)):
        each = [once(calls, cold) for _ in range(repeats)]
        for phase, values in zip(("host", "done"), zip(*each, strict=True), strict=True):
            found[f"{name}_{phase}"] = statistics.median(values)
    return found


def replayed(call: Call, device: torch.device) -> dict[str, Any]:
    """Capture a call as a CUDA graph; return milliseconds of a replay, and whether it gives the same bits."""
    if device.type != "cuda":
        return {"refused": "graphs are CUDA's"}
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        wanted, graph = [one.clone() for one in call()], torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}
    graph.replay()
    same = all(torch.equal(got, want) for got, want in zip(captured, wanted, strict=True))
    synchronize(device)
    start = time.perf_counter()
    for _ in range(10):
        graph.replay()
    synchronize(device)
    return {"ms": 100 * (time.perf_counter() - start), "same_bits": same}


def host_table(lines: Sequence[dict[str, Any]]) -> list[Row]:
    """Return a table with a row per call."""
    names = ("warm_host", "cold_host", "warm_done", "queued_done")
    heads = ("host, warm", "host, cold", "single call", "queued call", "replayed")
    rows: list[Row] = [["ms", *heads]]
    for line in lines:
        if "refused" in line:
            rows.append([line["name"], line["refused"]])
            continue
        graph = line.get("graph", {"ms": None, "same_bits": True})
        replay = graph.get("refused") or number(graph["ms"]) + ("" if graph["same_bits"] else ", other bits")
        rows.append([line["name"], *(number(line[name]) for name in names), replay])
    return rows


LAUNCHED = {
    "hidden": (
        "ours, auto", "ours, auto, skip none", "ours, auto, packed tokens, skip none",
        "TRL chunked log-probs", suites.PLAIN,
    ),
    "logits": ("ours, triton", "ours, cpp", "TRL selective_log_softmax", suites.PLAIN),
}  # fmt: skip
CAPTURED = (
    "log-probs: ours",
    "logits: ours, triton",
    *(f"hidden: {name}" for name in LAUNCHED["hidden"][1:3]),
)
"""Calls that need read nothing from the device, so that a graph can hold them."""


@suite("host", "Time of the host, and graphs", everything=False)
def host(options: Options) -> dict[str, Any]:
    """Time calls of the size of a small step; capture those that need read nothing from the device."""
    device = options.device
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    tokens, V, H, B = (16, 300, 16, 2) if options.tiny else (4096, 151936, 1024, 8)
    lines: list[dict[str, Any]] = []

    def add(name: str, load: Callable[[], Call]) -> None:
        lines.append({"name": name})
        try:
            if name in options.without:
                raise Missing(options.without[name])
            call = load()
            lines[-1].update(host_times(call, device, options.repeats or 9))
            if name in CAPTURED:
                lines[-1]["graph"] = replayed(call, device)
        except (Missing, RuntimeError) as error:
            lines[-1]["refused"] = str(error).strip().splitlines()[0][:200]
        try:
            synchronize(device)
        except RuntimeError as error:
            raise DeviceBroken(name, str(error)) from error
        options.save({"lines": lines, "table": host_table(lines)})

    for task, names in LAUNCHED.items():
        problem = gspo.draw(task, tokens, V, H, B, kind, device)
        for name in names:
            add(f"{task}: {name}", partial(call_of, name, problem, device))
    leaf = problem.logprobs.float().requires_grad_()

    def ours() -> tuple[Tensor, ...]:
        loss = gk.policy_loss(leaf, problem.old_logprobs, problem.advantages, loss_mask=problem.mask).loss
        return loss.detach(), *torch.autograd.grad(loss, leaf)

    def plain() -> tuple[Tensor, ...]:
        loss = gspo.losses(problem, leaf).mean()
        return loss.detach(), *torch.autograd.grad(loss, leaf)

    add("log-probs: ours", lambda: ours)
    add(f"log-probs: {suites.PLAIN}", lambda: plain)
    print(aligned(host_table(lines)))
    return {"lines": lines, "table": host_table(lines)}
