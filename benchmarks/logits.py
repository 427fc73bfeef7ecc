"""The suite ``logits``: a loss and its gradient from logits, relative to a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from benchmarks.contestants import OTHERS, PLAIN, from_logprobs, our_loss, package
from benchmarks.judging import CLIP_HIGH, CLIP_LOW, DTYPES, Problem, losses, picked, posed, row_chunks
from benchmarks.measure import Case, Options, contestant, run_cases, suite
from gspo_kernels.backends import dispatch as backends

ROWS = r"ours, (cpp|triton)(, in place)?"

# --- the problem and the floor


def draw(
    tokens: int, vocabulary: int, sequences: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Problem:
    """Draw logits from a fixed seed."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.empty(tokens, vocabulary, dtype=dtype, device=device)
    for rows in row_chunks(tokens, vocabulary, logits.device):
        part = torch.randn(logits[rows].shape, generator=generator, device=device)
        logits[rows] = part.mul_(3)
    return posed("logits", (logits,), sequences, generator)


def copy(problem: Problem) -> dict[str, Callable[[], Any]]:
    """Return a copy of the logits to preallocated memory, two accesses per logit."""
    (source,) = problem.inputs
    target = torch.empty_like(source)
    return {"copy": lambda: target.copy_(source)}


# --- contestants

for _backend in backends.BACKENDS:
    our_loss(gk.fused_policy_loss, _backend, "logits", backend=_backend)
    our_loss(
        gk.fused_policy_loss, f"{_backend}, in place", "logits", {"overwrites": True},
        backend=_backend, inplace_backward=True,
    )  # fmt: skip


def naive(problem: Problem, logits: Tensor) -> Tensor:
    """Compute log-probs by log_softmax and gather, and from them the loss."""
    return losses(problem, picked(logits.float(), problem.labels)).mean()


contestant(PLAIN, "logits", precision="float32")(lambda device: naive)


@contestant("torch.compile of naive", "logits", precision="float32")
def _load_compiled(device: torch.device) -> Any:
    torch._dynamo.reset()
    return torch.compile(naive, dynamic=False)


@from_logprobs("TRL selective_log_softmax", "logits", flat=False)
def _load_trl(device: torch.device) -> Any:
    """TRL processes 16-bit logits one sequence at a time."""
    return package("trl.trainer.utils", device).selective_log_softmax


@contestant("Liger triton_grpo_loss", "logits", precision="float32", overwrites=True, layout="next")
def _load_liger(device: torch.device) -> Any:
    """Liger's logits have one more position per sequence. By default its backward overwrites them."""
    function = package("liger_kernel.transformers.grpo_loss", device, gpu_only=True).triton_grpo_loss

    def call(problem: Problem, logits: Tensor) -> Tensor:
        terms = (problem.old_logprobs, None, problem.labels, problem.advantages, problem.mask)
        loss, _ = function(
            logits, *terms, temperature=1.0, beta=0.0, eps_low=CLIP_LOW, eps_high=CLIP_HIGH,
            loss_type="grpo", importance_sampling_level="sequence", reduce=True,
        )  # fmt: skip
        return loss

    return call


@from_logprobs("QuACK cross_entropy", "logits", precision="float32", overwrites=True)
def _load_quack(device: torch.device) -> Any:
    function = package("quack.cross_entropy", device, gpu_only=True).cross_entropy
    return lambda logits, labels: -function(logits, labels, reduction="none", inplace_backward=True)


@from_logprobs("verl logprobs_from_logits", "logits", precision="float32", overwrites=True)
def _load_verl(device: torch.device) -> Any:
    """Use flash-attention's cross-entropy, which overwrites the logits."""
    package("flash_attn", device, gpu_only=True)
    return package("verl.utils.torch_functional", device, gpu_only=True).logprobs_from_logits


# --- the suite


def case(
    accesses: float,
    name: str,
    size: tuple[int, int, int],
    dtype: str,
    wanted: tuple[str, ...] = (OTHERS, ROWS),
    situation: str = "all active",
    repeats: int = 9,
) -> Case:
    """Return a case of (sequences, length, vocabulary) whose loss needs so many accesses per logit."""
    B, T, V = size

    def make(device: torch.device) -> Problem:
        return draw(B * T, V, B, DTYPES[dtype], device).situation(situation)

    shape = {"dtype": dtype, "sequences": B, "length": T, "V": V}
    return Case(name, make, shape, wanted, {"copy": accesses / 2}, copy, repeats)


@suite("logits", "Loss and gradient from logits")
def logits(options: Options) -> dict[str, Any]:
    """Both dtypes; on-policy and half inactive, with fewer accesses; a tiny shape."""
    size = options.choose(cpu=(8, 64, 32000), gpu=(16, 1024, 151936), tiny=(2, 8, 300))
    first, second = options.dtype, "bf16" if options.dtype == "fp32" else "fp32"
    small = (2, 4, 50) if options.tiny else (4, 16, 1000)
    every = (OTHERS, ROWS, "ours, reference")
    cases = [
        case(3, f"{first}, all active", size, first, every),
        case(3, f"{second}, all active", size, second),
        case(2, "bf16, on-policy", size, "bf16", (PLAIN, ROWS), "on-policy"),
        case(2.5, f"{first}, half inactive", size, first, (PLAIN, ROWS), "half inactive"),
        case(3, "fp32, tiny", small, "fp32", every),
    ]
    return {"cases": run_cases(cases, options)}
