"""Who computes: this package, plain PyTorch, and the others' kernels as their own trainers call them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from benchmarks import problem as gspo
from benchmarks.problem import Problem
from benchmarks.registry import Missing, contestant
from gspo_kernels.linear.schedule import SCHEDULES
from gspo_kernels.ops import backends

Call = Callable[..., Tensor]
EVERYTHING = ("logits", "hidden", "scoring")


def package(module: str, device: torch.device, gpu_only: bool = False) -> Any:
    """A module of another package, or ``Missing`` with the reason."""
    root = module.split(".", 1)[0]
    if importlib.util.find_spec(root) is None:
        raise Missing(f"{root} is not installed")
    if gpu_only and device.type != "cuda":
        raise Missing("its kernels need a GPU")
    return importlib.import_module(module)


# --- this package


def _ours_available(backend: str, device: torch.device) -> None:
    reason = backends.why_not(backend, device)
    if reason is None and backend == "triton" and device.type == "cpu":
        reason = "under Triton's interpreter times mean nothing"
    if reason is not None:
        raise Missing(reason)


def _arguments(problem: Problem) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of our losses after the leaves."""
    packed = problem.cu_seqlens is not None
    layout = {"cu_seqlens": problem.cu_seqlens} if packed else {"loss_mask": problem.mask}
    return (problem.labels, problem.old_logprobs, problem.advantages), layout


def _register_logits(backend: str) -> None:
    for in_place in (False, True):

        @contestant(
            f"ours, {backend}{', in place' if in_place else ''}",
            "logits",
            precision="float32",
            overwrites=in_place,
            ours=True,
        )
        def load(device: torch.device, in_place: bool = in_place) -> Call:
            _ours_available(backend, device)

            def call(problem: Problem, logits: Tensor) -> Tensor:
                terms, layout = _arguments(problem)
                return gk.fused_policy_loss(
                    logits, *terms, **layout, inplace_backward=in_place, backend=backend
                ).loss

            return call


for _backend in backends.BACKENDS:
    _register_logits(_backend)


def _hidden(options: dict[str, Any]) -> Call:
    def call(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
        terms, layout = _arguments(problem)
        return gk.fused_linear_policy_loss(hidden, weight, *terms, **layout, **options).loss

    return call


def _register_hidden(name: str, about: dict[str, Any] | None = None, **options: Any) -> None:
    about = {"precision": "float32", **(about or {})}

    @contestant(f"ours, {name}", "hidden", ours=True, **about)
    def load(device: torch.device) -> Call:
        _ours_available(options.get("backend", "auto") if "backend" in options else "reference", device)
        return _hidden(options)


_register_hidden("auto")
for _schedule in SCHEDULES:
    _register_hidden(_schedule, schedule=_schedule)
_register_hidden("auto, skip all", skip_inactive="all")
_register_hidden("auto, skip none", skip_inactive="none")
_register_hidden("auto, 16-bit logits", {"precision": "input", "only_16_bit": True}, logits_dtype="input")
_register_hidden("auto, reference backend", backend="reference")
_register_hidden("auto, batch-invariant", batch_invariant=True)
_register_hidden("auto, packed tokens", {"layout": "packed"})


def _register_scoring(name: str, about: dict[str, Any], **options: Any) -> None:
    @contestant(f"ours, {name}", "scoring", ours=True, **about)
    def load(device: torch.device) -> Call:
        _ours_available(options.get("backend", "reference"), device)

        def call(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
            return gk.linear_token_logprobs(hidden, weight, problem.labels, **options).logprobs

        return call


_register_scoring("float32 logits", {"precision": "float32"})
_register_scoring("16-bit logits", {"precision": "input", "only_16_bit": True}, logits_dtype="input")
_register_scoring("float32 logits, reference backend", {"precision": "float32"}, backend="reference")


# --- plain PyTorch


def _naive(problem: Problem, *leaves: Tensor, precision: str = "input") -> Tensor:
    """log_softmax and gather."""
    from_logits = problem.task == "logits"
    logits = leaves[0].float() if from_logits else gspo.project(*leaves, precision, native=True)
    logprobs = gspo.picked(logits, problem.labels)
    return logprobs if problem.task == "scoring" else gspo.losses(problem, logprobs).mean()


_OF_NAIVE = {"logits": "float32", "hidden": "input", "scoring": "input"}


@contestant("naive PyTorch", *EVERYTHING, precision=_OF_NAIVE)
def _load_naive(device: torch.device) -> Call:
    return _naive


@contestant("naive PyTorch, fp32 logits", "hidden", "scoring", precision="float32", only_16_bit=True)
def _load_naive_fp32(device: torch.device) -> Call:
    return functools.partial(_naive, precision="float32")


@contestant("naive PyTorch, packed tokens", "hidden", layout="packed")
def _load_naive_packed(device: torch.device) -> Call:
    return _naive


@contestant("torch.compile of naive", *EVERYTHING, precision=_OF_NAIVE)
def _load_compiled(device: torch.device) -> Call:
    torch._dynamo.reset()

    return torch.compile(_naive, dynamic=False)


@contestant("torch linear_cross_entropy", "hidden", "scoring")
def _load_torch_linear(device: torch.device) -> Call:
    """In chunks, as its options choose them; torch 2.13 or newer."""
    function, chunks = torch.nn.functional.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions()

    def call(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
        flat, labels = hidden.flatten(0, -2), problem.labels.flatten()
        return _finish(problem, -function(flat, weight, labels, reduction="none", options=chunks))

    return call


# --- TRL


@contestant("TRL chunked log-probs", "hidden", "scoring")
def _load_trl(device: torch.device) -> Call:
    """As ``GRPOTrainer`` calls them, entropy included, with its chunk size."""
    function = package("trl.kernels", device).ChunkedLogProbFunction
    chunk = package("trl.trainer.utils", device)._CHUNKED_LOGPROB_CHUNK_SIZE

    def call(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
        logprobs, *_ = function.apply(
            hidden.flatten(0, -2), weight, None, problem.labels.flatten(), 1.0, chunk, None, 1.0,
            ("log_probs", "entropy"),
        )  # fmt: skip
        return _finish(problem, logprobs)

    return call


@contestant("TRL selective_log_softmax", "logits")
def _load_trl_logits(device: torch.device) -> Call:
    function = package("trl.trainer.utils", device).selective_log_softmax

    def call(problem: Problem, logits: Tensor) -> Tensor:
        return _finish(problem, function(logits, problem.labels))

    return call


def _finish(problem: Problem, logprobs: Tensor) -> Tensor:
    """The loss in plain PyTorch, from somebody's log-probs."""
    shaped = logprobs.view(problem.labels.shape)
    return shaped if problem.task == "scoring" else gspo.losses(problem, shaped.float()).mean()


# --- Liger


def _sequences(problem: Problem) -> int:
    return len(problem.advantages)


@contestant("Liger LigerFusedLinearGRPOLoss", "hidden", roundings=_sequences)
def _load_liger(device: torch.device) -> Call:
    """Not ``compiled``, which would only compile the arithmetic on per-token values."""
    loss = package("liger_kernel.chunked_loss", device).LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=False,
        use_ref_model=False,
        epsilon_low=gspo.CLIP_LOW,
        epsilon_high=gspo.CLIP_HIGH,
        loss_type="grpo",
        importance_sampling_level="sequence",
    )

    def call(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
        value, _ = loss(
            hidden,
            weight,
            problem.labels,
            problem.mask,
            problem.advantages,
            old_per_token_logps=problem.old_logprobs,
        )
        return value

    return call


@contestant("Liger triton_grpo_loss", "logits", precision="float32", overwrites=True, layout="next")
def _load_liger_triton(device: torch.device) -> Call:
    """Its logits have one more position per sequence; the backward overwrites them, as by default."""
    function = package("liger_kernel.transformers.grpo_loss", device, gpu_only=True).triton_grpo_loss

    def call(problem: Problem, logits: Tensor) -> Tensor:
        loss, _ = function(
            logits,
            problem.old_logprobs,
            None,
            problem.labels,
            problem.advantages,
            problem.mask,
            temperature=1.0,
            beta=0.0,
            eps_low=gspo.CLIP_LOW,
            eps_high=gspo.CLIP_HIGH,
            loss_type="grpo",
            importance_sampling_level="sequence",
            reduce=True,
        )
        return loss

    return call


@contestant(
    "Liger scaled fused linear CE",
    "hidden",
    "scoring",
    roundings=lambda problem: -(-problem.labels.numel() // 512),
)
def _load_liger_scaled(device: torch.device) -> Call:
    """Without entropy; on sm_90 its CuTe kernels, elsewhere chunks of 512 tokens."""
    module = package("liger_kernel.ops.fused_linear_scaled_cross_entropy", device)
    function = module.LigerFusedLinearScaledCrossEntropyFunction

    def call(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
        nll = function.apply(hidden.flatten(0, -2), weight, problem.labels.flatten())
        return _finish(problem, -nll)

    return call


# --- CCE, QuACK, verl


def _register_cce(name: str, filter_eps: str | None) -> None:
    # its sums of dHidden and dWeight are 16-bit, a rounding for each block of 128 tokens or entries
    @contestant(name, "hidden", "scoring", roundings=lambda problem: -(-problem.labels.numel() // 128))
    def load(device: torch.device) -> Call:
        function = package("cut_cross_entropy", device, gpu_only=True).linear_cross_entropy

        def call(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
            flat, labels = hidden.flatten(0, -2), problem.labels.flatten()
            nll = function(flat, weight, labels, reduction="none", filter_eps=filter_eps, impl="cce")
            return _finish(problem, -nll)

        return call


_register_cce("CCE, filtered as by default", "high")
_register_cce("CCE, unfiltered", None)


@contestant("QuACK cross_entropy", "logits", precision="float32", overwrites=True)
def _load_quack(device: torch.device) -> Call:
    function = package("quack.cross_entropy", device, gpu_only=True).cross_entropy

    def call(problem: Problem, logits: Tensor) -> Tensor:
        flat, labels = logits.flatten(0, -2), problem.labels.flatten()
        nll = function(flat, labels, reduction="none", inplace_backward=True)
        return _finish(problem, -nll)

    return call


@contestant("QuACK linear_cross_entropy", "hidden", "scoring")
def _load_quack_linear(device: torch.device) -> Call:
    """The one that returns a value per token, unlike the chunked ones; it writes all logits."""
    function = package("quack.linear_cross_entropy", device, gpu_only=True).linear_cross_entropy_func

    def call(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
        flat, labels = hidden.flatten(0, -2), problem.labels.flatten()
        nll = function(flat, weight, None, labels, reduction="none", inplace_backward=True)
        return _finish(problem, -nll)

    return call


@contestant(
    "verl linear_cross_entropy", "hidden", "scoring", roundings=lambda problem: -(-problem.vocabulary // 9504)
)
def _load_verl(device: torch.device) -> Call:
    module = package("verl.utils.kernel.linear_cross_entropy", device, gpu_only=True)

    def call(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
        flat, labels = hidden.flatten(0, -2), problem.labels.flatten()
        logprobs, _ = module.linear_cross_entropy(flat, weight, labels, 1.0)
        return _finish(problem, logprobs)

    return call


@contestant("verl logprobs_from_logits", "logits", precision="float32", overwrites=True)
def _load_verl_logits(device: torch.device) -> Call:
    """flash-attention's cross-entropy, which overwrites the logits."""
    package("flash_attn", device, gpu_only=True)
    function = package("verl.utils.torch_functional", device, gpu_only=True).logprobs_from_logits

    def call(problem: Problem, logits: Tensor) -> Tensor:
        return _finish(problem, function(logits, problem.labels))

    return call
