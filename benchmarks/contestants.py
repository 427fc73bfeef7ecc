"""The contestants: this package, plain PyTorch, and others' kernels as their own trainers call them."""

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
from benchmarks.measure import Missing, contestant
from benchmarks.problem import Problem
from gspo_kernels.linear.products.exponentials import unavailable_on
from gspo_kernels.linear.schedule import SCHEDULES
from gspo_kernels.ops import backends

Call = Callable[..., Tensor]
FROM_HIDDEN = ("hidden", "scoring")


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
                return (
                    logprobs if problem.task == "scoring" else gspo.losses(problem, logprobs.float()).mean()
                )

            return call

        return load

    return register


# --- this package


def tensor_maps_missing(device: torch.device, product: str) -> str | None:
    """Enable products by tensor maps; return why one of them does not serve a device, or None."""
    gk.enable_tensor_maps(True)
    if device.type != "cuda":
        return "its products need the tensor maps of a GPU"
    if product == "exponentials":
        return unavailable_on(device)
    why_not: str | None = package("gspo_kernels.kernels.products", device).TENSOR_MAPS.why_not(device)
    return why_not


def _our_loss(
    function: Callable[..., Any],
    name: str,
    task: str,
    about: dict[str, Any] | None = None,
    tensor_maps: str = "",
    **options: Any,
) -> None:
    """Register one of our losses with options; ``tensor_maps`` names the product that takes them."""

    @contestant(f"ours, {name}", task, ours=True, **{"precision": "float32", **(about or {})})
    def load(device: torch.device) -> Call:
        backend = options.get("backend", "reference")
        reason = backends.why_not(backend, device)
        if reason is None and backend == "triton" and device.type == "cpu":
            reason = "under Triton's interpreter times mean nothing"
        if reason is None and tensor_maps:
            reason = tensor_maps_missing(device, tensor_maps)
        if reason is not None:
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


ROUNDED = {"precision": "input", "only_16_bit": True}
for _backend in backends.BACKENDS:
    _our_loss(gk.fused_policy_loss, _backend, "logits", backend=_backend)
    _our_loss(
        gk.fused_policy_loss, f"{_backend}, in place", "logits", {"overwrites": True},
        backend=_backend, inplace_backward=True,
    )  # fmt: skip
_our_hidden = functools.partial(_our_loss, gk.fused_linear_policy_loss, task="hidden")
_our_hidden("auto")
for _schedule in SCHEDULES:
    _our_hidden(_schedule, schedule=_schedule)
_our_hidden("least memory", memory="least")
_our_hidden("auto, skip all", skip_inactive="all")
_our_hidden("auto, skip none", skip_inactive="none")
_our_hidden("auto, 16-bit logits", about=ROUNDED, logits_dtype="input")
_our_hidden("auto, batch-invariant", batch_invariant=True)
_our_hidden("auto, tensor maps", tensor_maps="exponentials")
_our_hidden("auto, batch-invariant, tensor maps", tensor_maps="batch-invariant", batch_invariant=True)
_our_hidden("auto, packed tokens", about={"layout": "packed"})
_our_scores = functools.partial(_our_loss, gk.linear_token_logprobs, task="scoring")
_our_scores("float32 logits")
_our_scores("16-bit logits", about=ROUNDED, logits_dtype="input")
_our_scores("float32 logits, reference backend", backend="reference")


# --- plain PyTorch


def naive(problem: Problem, *leaves: Tensor, precision: str = "input") -> Tensor:
    """Compute log-probs by log_softmax and gather, and from them the loss."""
    from_logits = problem.task == "logits"
    logits = leaves[0].float() if from_logits else gspo.project(*leaves, precision, native=True)
    logprobs = gspo.picked(logits, problem.labels)
    return logprobs if problem.task == "scoring" else gspo.losses(problem, logprobs).mean()


_OF_NAIVE = {"logits": "float32", "hidden": "input", "scoring": "input"}


@contestant("naive PyTorch", "logits", *FROM_HIDDEN, precision=_OF_NAIVE)
def _load_naive(device: torch.device) -> Call:
    return naive


@contestant("naive PyTorch, fp32 logits", *FROM_HIDDEN, precision="float32", only_16_bit=True)
def _load_naive_fp32(device: torch.device) -> Call:
    return functools.partial(naive, precision="float32")


@contestant("naive PyTorch, packed tokens", "hidden", layout="packed")
def _load_naive_packed(device: torch.device) -> Call:
    return naive


@contestant("torch.compile of naive", "logits", *FROM_HIDDEN, precision=_OF_NAIVE)
def _load_compiled(device: torch.device) -> Call:
    torch._dynamo.reset()
    return torch.compile(naive, dynamic=False)


@from_logprobs("torch linear_cross_entropy", *FROM_HIDDEN)
def _load_torch_linear(device: torch.device) -> Call:
    """Use chunks, as torch's default options choose them; needs torch 2.13 or newer."""
    function, chunks = torch.nn.functional.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions()
    return lambda hidden, weight, labels: -function(hidden, weight, labels, reduction="none", options=chunks)


# --- TRL


@from_logprobs("TRL chunked log-probs", *FROM_HIDDEN)
def _load_trl(device: torch.device) -> Call:
    """Call TRL's function as ``GRPOTrainer`` does: with its chunk size and with the entropy."""
    function = package("trl.kernels", device).ChunkedLogProbFunction
    chunk = package("trl.trainer.utils", device)._CHUNKED_LOGPROB_CHUNK_SIZE
    terms = (1.0, chunk, None, 1.0, ("log_probs", "entropy"))
    return lambda hidden, weight, labels: function.apply(hidden, weight, None, labels, *terms)[0]


@from_logprobs("TRL selective_log_softmax", "logits", flat=False)
def _load_trl_logits(device: torch.device) -> Call:
    """TRL processes 16-bit logits one sequence at a time."""
    return package("trl.trainer.utils", device).selective_log_softmax


# --- Liger


@contestant("Liger LigerFusedLinearGRPOLoss", "hidden", roundings=lambda problem: len(problem.advantages))
def _load_liger(device: torch.device) -> Call:
    """Leave ``compiled`` off: it would only compile the arithmetic on values per token."""
    loss = package("liger_kernel.chunked_loss", device).LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=False, use_ref_model=False, epsilon_low=gspo.CLIP_LOW,
        epsilon_high=gspo.CLIP_HIGH, loss_type="grpo", importance_sampling_level="sequence",
    )  # fmt: skip

    def call(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
        terms = (problem.labels, problem.mask, problem.advantages)
        value, _ = loss(hidden, weight, *terms, old_per_token_logps=problem.old_logprobs)
        return value

    return call


@contestant("Liger triton_grpo_loss", "logits", precision="float32", overwrites=True, layout="next")
def _load_liger_triton(device: torch.device) -> Call:
    """Liger's logits have one more position per sequence. By default its backward overwrites them."""
    function = package("liger_kernel.transformers.grpo_loss", device, gpu_only=True).triton_grpo_loss

    def call(problem: Problem, logits: Tensor) -> Tensor:
        terms = (problem.old_logprobs, None, problem.labels, problem.advantages, problem.mask)
        loss, _ = function(
            logits, *terms, temperature=1.0, beta=0.0, eps_low=gspo.CLIP_LOW, eps_high=gspo.CLIP_HIGH,
            loss_type="grpo", importance_sampling_level="sequence", reduce=True,
        )  # fmt: skip
        return loss

    return call


def chunks_of(size: int) -> Callable[[Problem], int]:
    """Return a function that counts a problem's chunks of ``size`` tokens."""
    return lambda problem: -(-problem.labels.numel() // size)


@from_logprobs("Liger scaled fused linear CE", *FROM_HIDDEN, roundings=chunks_of(512))
def _load_liger_scaled(device: torch.device) -> Call:
    """Compute no entropy. On sm_90 Liger runs its CuTe kernels, elsewhere chunks of 512 tokens."""
    module = package("liger_kernel.ops.fused_linear_scaled_cross_entropy", device)
    function = module.LigerFusedLinearScaledCrossEntropyFunction
    return lambda hidden, weight, labels: -function.apply(hidden, weight, labels)


# --- CCE, QuACK, verl


def _register_cce(name: str, filter_eps: str | None) -> None:
    # CCE sums dHidden and dWeight in 16 bits, with one rounding per block of 128 tokens or entries
    @from_logprobs(name, *FROM_HIDDEN, roundings=chunks_of(128))
    def load(device: torch.device) -> Call:
        function = package("cut_cross_entropy", device, gpu_only=True).linear_cross_entropy
        options = {"reduction": "none", "filter_eps": filter_eps, "impl": "cce"}
        return lambda hidden, weight, labels: -function(hidden, weight, labels, **options)


_register_cce("CCE, filtered as by default", "high")
_register_cce("CCE, unfiltered", None)


@from_logprobs("QuACK cross_entropy", "logits", precision="float32", overwrites=True)
def _load_quack(device: torch.device) -> Call:
    function = package("quack.cross_entropy", device, gpu_only=True).cross_entropy
    return lambda logits, labels: -function(logits, labels, reduction="none", inplace_backward=True)


@from_logprobs("QuACK linear_cross_entropy", *FROM_HIDDEN)
def _load_quack_linear(device: torch.device) -> Call:
    """Use the function that returns a value per token, unlike QuACK's chunked ones. It writes all logits."""
    function = package("quack.linear_cross_entropy", device, gpu_only=True).linear_cross_entropy_func
    options = {"reduction": "none", "inplace_backward": True}
    return lambda hidden, weight, labels: -function(hidden, weight, None, labels, **options)


@from_logprobs(
    "verl linear_cross_entropy", *FROM_HIDDEN, roundings=lambda problem: -(-problem.vocabulary // 9504)
)
def _load_verl(device: torch.device) -> Call:
    module = package("verl.utils.kernel.linear_cross_entropy", device, gpu_only=True)
    return lambda hidden, weight, labels: module.linear_cross_entropy(hidden, weight, labels, 1.0)[0]


@from_logprobs("verl logprobs_from_logits", "logits", precision="float32", overwrites=True)
def _load_verl_logits(device: torch.device) -> Call:
    """Use flash-attention's cross-entropy, which overwrites the logits."""
    package("flash_attn", device, gpu_only=True)
    module = package("verl.utils.torch_functional", device, gpu_only=True)
    return module.logprobs_from_logits
