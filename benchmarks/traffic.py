"""The suite ``traffic``: bytes that each logit costs, counted, not timed.

Triton kernels run under the interpreter, where every load and store of a watched tensor counts where its mask
lets it through: what a kernel asks for; whether a second walk of a row is served by a cache is for a device
to measure. PyTorch's own operators are counted as operands read and results written, each once, which is the
least they can do. Both are in units of the logits' bytes, per logit.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from benchmarks import problem as gspo
from benchmarks.problem import Problem
from benchmarks.registry import Options, suite
from benchmarks.tables import aligned, number

# Views touch no memory. These operators touch none either, or only an element per row.
_FREE = ("empty", "detach", "alias", "lift_fresh", "gather", "scatter")


class Traffic:
    """Reads and writes per element of the tensors that it watches."""

    def __init__(self, *tensors: Tensor):
        self.tensors = tensors
        self.reads = [torch.zeros(tensor.numel(), dtype=torch.int64) for tensor in tensors]
        self.writes = [torch.zeros(tensor.numel(), dtype=torch.int64) for tensor in tensors]

    def record(self, counts: list[Tensor], pointers: Any, mask: Any) -> None:
        """Count accesses of a block of pointers."""
        addresses = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))
        addresses = addresses[np.broadcast_to(mask.data, addresses.shape).astype(bool)].astype(np.int64)
        width = pointers.get_element_ty().primitive_bitwidth // 8
        for tensor, count in zip(self.tensors, counts, strict=True):
            start, size = tensor.data_ptr(), tensor.element_size()
            # A load may hold several elements.
            each = (addresses[:, None] + np.arange(0, width, size)).ravel()
            inside = each[(each >= start) & (each < start + tensor.numel() * size)]
            count += torch.from_numpy(np.bincount((inside - start) // size, minlength=tensor.numel()))

    def per_row(self, counts: list[Tensor], index: int) -> list[int]:
        """One number per row where all its elements have the same count, otherwise an error."""
        rows = counts[index].view(-1, self.tensors[index].shape[-1])
        assert (rows == rows[:, :1]).all()
        return rows[:, 0].tolist()  # type: ignore[no-any-return]


@contextlib.contextmanager
def counted(*tensors: Tensor) -> Iterator[Traffic]:
    """Count accesses of tensors by Triton's interpreter, within the block."""
    from triton.runtime import interpreter

    traffic = Traffic(*tensors)

    class Counting(type(interpreter.interpreter_builder)):  # type: ignore[misc]
        def create_masked_load(self, pointers: Any, mask: Any, *rest: Any) -> Any:
            traffic.record(traffic.reads, pointers, mask)
            return super().create_masked_load(pointers, mask, *rest)

        def create_masked_store(self, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            traffic.record(traffic.writes, pointers, mask)
            return super().create_masked_store(pointers, value, mask, *rest)

    builder = interpreter.interpreter_builder
    plain, builder.__class__ = builder.__class__, Counting
    try:
        yield traffic
    finally:
        builder.__class__ = plain


class Operators(TorchDispatchMode):
    """Bytes of operands and results of every operator that isn't a view, of tensors of ``least`` elements."""

    def __init__(self, least: int):
        super().__init__()
        self.least, self.bytes = least, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.is_view or any(name in function.name() for name in _FREE):
            return result
        operands = [one for one in tree_flatten((args, kwargs or {}))[0] if isinstance(one, Tensor)]
        results = [one for one in tree_flatten(result)[0] if isinstance(one, Tensor)]
        written = (
            results if "zeros" in function.name() or "fill" in function.name() else [*operands, *results]
        )
        self.bytes += sum(one.numel() * one.element_size() for one in written if one.numel() >= self.least)
        return result


def of_operators(problem: Problem, call: Callable[..., Tensor]) -> float:
    """Bytes per logit of plain PyTorch, forward and backward."""
    leaves = problem.leaves()
    logits = leaves[0]
    with Operators(logits.numel() // 2) as operators:
        torch.autograd.grad(problem.call(call, leaves), leaves)
    return operators.bytes / logits.numel()


def of_ours(problem: Problem) -> float:
    """Bytes per logit of the Triton kernels, forward and backward; the gradient lies in memory of its own."""
    import gspo_kernels as gk

    (logits,) = problem.leaves()
    gradient = torch.empty_like(logits)
    terms = (problem.labels, problem.old_logprobs, problem.advantages)
    with _into(gradient), counted(logits.detach(), gradient) as traffic:
        loss = gk.fused_policy_loss(logits, *terms, backend="triton").loss
        torch.autograd.grad(loss, logits)
    accesses = sum(int(count.sum()) for count in [*traffic.reads, *traffic.writes])
    return accesses * logits.element_size() / logits.numel()


@contextlib.contextmanager
def _into(gradient: Tensor) -> Iterator[None]:
    """Have the kernels write their gradient into this tensor, which is watched."""
    from gspo_kernels import kernels

    names = ("logprobs_backward", "logprobs_and_grad")
    plain = {name: getattr(kernels, name) for name in names}

    def redirected(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, out: Tensor, **options: Any) -> Any:
            found = function(*args, out=gradient.view(out.shape), **options)
            out.copy_(gradient.view(out.shape))
            return found

        return call

    for name, function in plain.items():
        setattr(kernels, name, redirected(function))
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(kernels, name, function)


def of_liger(problem: Problem) -> float:
    """Bytes per logit of ``triton_grpo_loss``, which overwrites the logits."""
    from benchmarks.registry import CONTESTANTS

    laid_out = problem.layout("next")
    (logits,) = laid_out.leaves(copy=True)
    call = CONTESTANTS["Liger triton_grpo_loss"].get(torch.device("cuda"))
    with counted(logits.detach()) as traffic:
        torch.autograd.grad(call(laid_out, logits), logits)
    counts = [count.view(logits.shape)[:, :-1] for count in [*traffic.reads, *traffic.writes]]
    return sum(int(count.sum()) for count in counts) * logits.element_size() / counts[0].numel()


def count(vocabulary: int) -> list[dict[str, Any]]:
    """All contestants and situations, in this process, which must have TRITON_INTERPRET=1."""
    from benchmarks.contestants import _naive

    ways: dict[str, Callable[[Problem], float]] = {
        "ours, triton": of_ours,
        "Liger triton_grpo_loss": of_liger,
        "naive PyTorch": lambda problem: of_operators(problem, _naive),
    }
    found = []
    for dtype in ("bf16", "fp32"):
        drawn = gspo.draw("logits", 4 * 3, vocabulary, 0, 4, gspo.DTYPES[dtype])
        for situation in ("all active", "half inactive", "on-policy"):
            problem = drawn.situation(situation)
            for name, way in ways.items():
                line: dict[str, Any] = {"dtype": dtype, "situation": situation, "contestant": name}
                try:
                    line["bytes_per_logit"] = way(problem)
                except Exception as error:
                    line["missing"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                found.append(line)
    return found


@suite("traffic", "Bytes per logit, counted")
def traffic(options: Options) -> dict[str, Any]:
    """In a process of its own, because kernels are interpreted or compiled from their import on."""
    vocabulary = 300 if options.tiny else 2 * 4096 + 80
    code = f"import json; from benchmarks import traffic; print(json.dumps(traffic.count({vocabulary})))"
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-c", f"import benchmarks.contestants; {code}"],
        env=environment, capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    if run.returncode:
        raise RuntimeError(run.stderr.strip().splitlines()[-1])
    lines = json.loads(run.stdout.splitlines()[-1])
    columns = list(dict.fromkeys(f"{line['dtype']}, {line['situation']}" for line in lines))
    rows = [["bytes per logit", *columns]]
    for name in dict.fromkeys(line["contestant"] for line in lines):
        mine = [line for line in lines if line["contestant"] == name]
        rows.append([name, *(number(line.get("bytes_per_logit")) or "missing" for line in mine)])
    print(aligned(rows))
    return {"vocabulary": vocabulary, "lines": lines}
