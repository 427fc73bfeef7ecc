"""The suite ``launches``: kernels, copies and waits of one step of each kind, counted by torch's profiler.

A step is a loss and its gradients. On a CPU, where nothing is launched, the operators that run are counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import gspo_kernels as gk
from benchmarks import problem as gspo
from benchmarks.measure import synchronize
from benchmarks.problem import Problem
from benchmarks.registry import Options, suite
from benchmarks.tables import Row, aligned

_WAITS = re.compile(r"(?:cuda|hip)(?:Stream|Device|Event)Synchronize")
_PRODUCTS = re.compile(r"gemm|cutlass|nvjet|xmma|Cijk", re.IGNORECASE)
CHUNKS = 4


def counted(step: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """What a step asks of the device, after one that doesn't count."""
    step()
    synchronize(device)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as run:
        step()
    events = list(run.events() or ())
    names = Counter(event.name for event in events if event.device_type.name != "CPU")
    copies = Counter({name: count for name, count in names.items() if re.match("Mem(cpy|set)", name)})
    kernels = names - copies
    return {
        "kernels": kernels.total(),
        "products": sum(count for name, count in kernels.items() if _PRODUCTS.search(name)),
        "copies": copies.total(),
        "copies_to_host": sum(count for name, count in copies.items() if "DtoH" in name),
        "waits": sum(bool(_WAITS.match(event.name)) for event in events),
        "operators": sum(event.name.startswith("aten::") for event in events),
        "most": dict(kernels.most_common(12)),
    }


def _step(call: Callable[..., Any], problem: Problem, **options: Any) -> Callable[[], Any]:
    """A loss and its gradients."""
    leaves = [leaf.requires_grad_() for leaf in problem.leaves()]
    from_logprobs = call is gk.policy_loss
    terms = (problem.old_logprobs, problem.advantages)
    inputs = (*leaves, *terms) if from_logprobs else (*leaves, problem.labels, *terms)
    if "kl_beta" in options:
        options["ref_logprobs"] = problem.old_logprobs
    if "entropy_coef" in options and from_logprobs:
        options["entropy"] = -problem.old_logprobs

    def step() -> Any:
        return torch.autograd.grad(call(*inputs, loss_mask=problem.mask, **options).loss, leaves)

    return step


def steps(options: Options) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each entry with each kind of objective and, from hidden states, each schedule."""
    B, T, V, H = (4, 4, 300, 16) if options.tiny else (16, 256, 151936, 2048)
    dtype = torch.float32 if options.tiny else torch.bfloat16
    kinds: dict[str, dict[str, Any]] = {
        "GSPO": {},
        "GRPO": {"objective": gk.GRPO()},
        "GSPO with KL": {"kl_beta": 0.04},
        "GSPO with entropy": {"entropy_coef": 0.01},
    }
    chunked = {"max_chunk_bytes": B * T * V * 4 // CHUNKS}
    entries: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "logprobs": (gk.policy_loss, {}),
        "logits": (gk.fused_policy_loss, {}),
        "hidden": (gk.fused_linear_policy_loss, chunked),
    }
    for task, (call, own) in entries.items():
        problem = gspo.draw(task, B * T, V, H, B, dtype, options.device)
        for kind, terms in kinds.items():
            yield f"{task}, {kind}", _step(call, problem, **own, **terms)
        yield f"{task}, GSPO, on-policy", _step(call, problem.situation("on-policy"), **own)
        if task == "hidden":
            for schedule, skip in product(("aligned", "deferred", "two_pass"), ("backward", "none")):
                chosen = {"schedule": schedule, "skip_inactive": skip}
                yield f"hidden, {schedule}, skip {skip}", _step(call, problem, **own, **chosen)


@suite("launches", "Kernels and waits of a step", everything=False)
def launches(options: Options) -> dict[str, Any]:
    """From log-probs, logits and hidden states in chunks."""
    lines: list[dict[str, Any]] = []
    for name, step in steps(options):
        try:
            lines.append({"name": name, **counted(step, options.device)})
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0][:200]
            lines.append({"name": name, "missing": f"{type(error).__name__}: {reason}"})
    columns = ("kernels", "products", "copies", "copies_to_host", "waits", "operators")
    rows: list[Row] = [["step", *(column.replace("_", " ") for column in columns)]]
    for line in lines:
        figures = [line["missing"]] if "missing" in line else [str(line[column]) for column in columns]
        rows.append([line["name"], *figures, *[""] * (len(columns) - len(figures))])
    print(aligned(rows))
    return {"chunks": CHUNKS, "lines": lines, "table": rows}
