"""Helpers for contestants of several suites: optional packages, and registration of losses."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from benchmarks.judging import Problem, losses
from benchmarks.measure import Missing, contestant
from gspo_kernels.backends import dispatch as backends
from gspo_kernels.hidden.matmul.exponentials import unavailable_on

Call = Callable[..., Tensor]
PLAIN = "naive PyTorch"
OTHERS = r"(?!ours)(?!.*packed).*"
"""All contestants except ours and packed ones, which each case lists."""


def package(module: str, device: torch.device, gpu_only: bool = False) -> Any:
    """Import a module of another package; raise ``Missing`` with the reason if that fails."""
    root = module.split(".", 1)[0]
    if importlib.util.find_spec(root) is None:
        raise Missing(f"{root} is not installed")
    if gpu_only and device.type != "cuda":
        raise Missing("its kernels need a GPU")
    try:
        return importlib.import_module(module)
    except Exception as error:  # a package may raise anything while it is imported
        raise Missing(f"{root} can't be imported: {error}") from error


def from_logprobs(name: str, *tasks: str, flat: bool = True, **about: Any) -> Callable[..., Any]:
    """Register a contestant whose loader returns a function (leaves..., labels) -> log-probs.

    The function gets tokens in one dimension if ``flat``, otherwise [B, T]. The loss is plain PyTorch.
    """

    def register(load: Callable[[torch.device], Call]) -> Callable[[torch.device], Call]:
        @contestant(name, *tasks, **about)
        def load_loss(device: torch.device) -> Call:
            function = load(device)

            def call(problem: Problem, first: Tensor, *weight: Tensor) -> Tensor:
                labels = problem.labels
                tokens = (first.flatten(0, -2), labels.flatten()) if flat else (first, labels)
                logprobs = function(tokens[0], *weight, tokens[1]).view(labels.shape)
                return logprobs if problem.task == "scoring" else losses(problem, logprobs.float()).mean()

            return call

        return load

    return register


def tensor_maps_missing(device: torch.device, product: str) -> str | None:
    """Enable matmuls by tensor maps; return the reason if one of them does not support a device, or None."""
    gk.enable_tensor_maps(True)
    if device.type != "cuda":
        return "its products need the tensor maps of a GPU"
    if product == "exponentials":
        return unavailable_on(device)
    unavailable_reason: str | None = package(
        "gspo_kernels.backends.triton.batch_invariant_matmul", device
    ).TENSOR_MAPS.unavailable_reason(device)
    return unavailable_reason


def our_loss(
    function: Callable[..., Any],
    name: str,
    task: str,
    about: dict[str, Any] | None = None,
    tensor_maps: str = "",
    **options: Any,
) -> None:
    """Register one of our losses with options; ``tensor_maps`` names the matmul that uses them."""

    @contestant(f"ours, {name}", task, ours=True, **{"precision": "float32", **(about or {})})
    def load(device: torch.device) -> Call:
        backend = options.get("backend", "reference")
        interpreted = backend == "triton" and device.type == "cpu"
        reason = backends.unavailable_reason(backend, device)
        reason = reason or (interpreted and "under Triton's interpreter times mean nothing")
        if reason := reason or (tensor_maps and tensor_maps_missing(device, tensor_maps)):
            raise Missing(reason)

        def call(problem: Problem, *leaves: Tensor) -> Tensor:
            gk.enable_tensor_maps(bool(tensor_maps))  # until the next call, so also for this one's backward
            if problem.task == "scoring":
                return function(*leaves, problem.labels, **options).logprobs
            packed = problem.cu_seqlens is not None
            layout = {"cu_seqlens": problem.cu_seqlens} if packed else {"loss_mask": problem.mask}
            terms = (problem.labels, problem.old_logprobs, problem.advantages)
            return function(*leaves, *terms, **layout, **options).loss

        return call
