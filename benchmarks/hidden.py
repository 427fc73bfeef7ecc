"""The suites ``hidden``, ``realistic`` and ``scoring``: from hidden states, relative to bare matmuls."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import gspo_kernels as gk
from benchmarks.contestants import OTHERS, PLAIN, from_logprobs, our_loss, package
from benchmarks.judging import CLIP_HIGH, CLIP_LOW, DTYPES, Problem, losses, picked, posed, project
from benchmarks.measure import Case, Options, contestant, run_cases, suite
from gspo_kernels.hidden.plan import SCHEDULE_NAMES

FROM_HIDDEN = ("hidden", "scoring")
PRODUCTS = {"logits": 1.0, "dHidden": 1.0, "dWeight": 1.0}
AUTO = r"ours, auto(, 16-bit logits)?"
SKIP = (r"ours, auto(, skip .*)?", PLAIN, r"ours, auto, 16-bit logits")
GROUP = 4
"""Sequences of a group in ``realistic``."""

# --- problems and the floor


def draw(
    task: str,
    tokens: int,
    vocabulary: int,
    width: int,
    sequences: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    lengths: Sequence[int] | None = None,
    advantages: Sequence[float] | None = None,
    clipped: Sequence[bool] | None = None,
) -> Problem:
    """Draw standard normal hidden states and a weight from a fixed seed; other arguments as in ``posed``."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, device=device).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator, device=device)
    inputs = (hidden, weight.mul_(3 / width**0.5).to(dtype))
    return posed(task, inputs, sequences, generator, lengths, advantages, clipped)


def realistic(
    sequences: int,
    longest: int,
    vocabulary: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Problem:
    """Draw a realistic batch from a fixed seed: groups of 4 sequences of log-normal length, at most
    ``longest``. 40% of the groups have zero advantages, and sequences with 15% of the tokens are clipped.
    """
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(sequences, generator=generator) * 0.8 + math.log(0.35 * longest)
    sizes = drawn.exp().round().clamp(1, longest).int().tolist()
    groups = sequences // GROUP
    rewards = torch.randn(groups, GROUP, generator=generator)
    values = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
    # of 64 draws of ``flat`` groups, take the one whose share of tokens is closest to 40%
    tokens = torch.tensor(sizes).view(groups, GROUP).sum(1)
    flat = round(0.4 * groups)
    draws = [torch.randperm(groups, generator=generator)[:flat] for _ in range(64)]
    values[min(draws, key=lambda some: abs(tokens[some].sum() / tokens.sum() - 0.4))] = 0.0
    advantages = values.flatten()
    target, clipped, total = 0.15 * sum(sizes), [False] * sequences, 0
    for index in torch.randperm(sequences, generator=generator).tolist():
        # clip a sequence if the total is then closer to the target
        if advantages[index] != 0 and abs(total + sizes[index] - target) < abs(total - target):
            clipped[index], total = True, total + sizes[index]
    shape = (sequences * longest, vocabulary, width, sequences)
    return draw("hidden", *shape, dtype, device, sizes, advantages.tolist(), clipped)


def products(problem: Problem) -> dict[str, Callable[[], Any]]:
    """Return the matmuls of the counted tokens in the inputs' dtype, into preallocated memory."""
    hidden, weight = problem.layout("padded" if problem.mask.all() else "packed").inputs
    hidden = hidden.flatten(0, -2)
    logits = hidden.new_empty(len(hidden), len(weight))
    torch.mm(hidden, weight.t(), out=logits)
    found = {"logits": lambda: torch.mm(hidden, weight.t(), out=logits)}
    if problem.task != "scoring":
        scores = torch.softmax(logits, -1)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)
        found["dHidden"] = lambda: torch.mm(scores, weight, out=grad_hidden)
        found["dWeight"] = lambda: torch.mm(scores.t(), hidden, out=grad_weight)
    return found


# --- contestants

ROUNDED = {"precision": "input", "only_16_bit": True}
_our_hidden = functools.partial(our_loss, gk.fused_linear_policy_loss, task="hidden")
_our_hidden("auto")
for _schedule in SCHEDULE_NAMES:
    _our_hidden(_schedule, schedule=_schedule)
_our_hidden("least memory", memory="least")
_our_hidden("auto, skip all", skip_inactive="all")
_our_hidden("auto, skip none", skip_inactive="none")
_our_hidden("auto, 16-bit logits", about=ROUNDED, logits_dtype="input")
_our_hidden("auto, batch-invariant", batch_invariant=True)
_our_hidden("auto, tensor maps", tensor_maps="exponentials")
_our_hidden("auto, batch-invariant, tensor maps", tensor_maps="batch-invariant", batch_invariant=True)
_our_hidden("auto, packed tokens", about={"layout": "packed"})
_our_scores = functools.partial(our_loss, gk.linear_token_logprobs, task="scoring")
_our_scores("float32 logits")
_our_scores("16-bit logits", about=ROUNDED, logits_dtype="input")
_our_scores("float32 logits, reference backend", backend="reference")


def naive(problem: Problem, hidden: Tensor, weight: Tensor, precision: str = "input") -> Tensor:
    """Compute log-probs by log_softmax and gather, and from them the loss."""
    logprobs = picked(project(hidden, weight, precision, native=True), problem.labels)
    return logprobs if problem.task == "scoring" else losses(problem, logprobs).mean()


contestant(PLAIN, *FROM_HIDDEN)(lambda device: naive)
contestant("naive PyTorch, packed tokens", "hidden", layout="packed")(lambda device: naive)
contestant("naive PyTorch, fp32 logits", *FROM_HIDDEN, precision="float32", only_16_bit=True)(
    lambda device: functools.partial(naive, precision="float32")
)


@contestant("torch.compile of naive", *FROM_HIDDEN)
def _load_compiled(device: torch.device) -> Any:
    torch._dynamo.reset()
    return torch.compile(naive, dynamic=False)


@from_logprobs("torch linear_cross_entropy", *FROM_HIDDEN)
def _load_torch_linear(device: torch.device) -> Any:
    """Use the default chunks; needs torch 2.13 or newer."""
    function, chunks = torch.nn.functional.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions()
    return lambda hidden, weight, labels: -function(hidden, weight, labels, reduction="none", options=chunks)


@contestant("torch linear_cross_entropy, by sequence", "hidden")
def _load_torch_sequences(device: torch.device) -> Any:
    """Use a mean per sequence, a CuTe kernel in torch 2.15; its fallback on a GPU is an error."""
    function, chunks = torch.nn.functional.linear_cross_entropy, torch.nn.LinearCrossEntropyOptions()
    module = package("torch.nn.modules.linear_cross_entropy", device)
    fell_back = RuntimeError("torch's CuTe kernel did not run")
    plain = patch.object(module, "_linear_cross_entropy_batch_chunked_accumulator", side_effect=fell_back)

    def call(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
        labels = problem.labels.masked_fill(problem.mask == 0, -100)
        with plain if device.type == "cuda" else nullcontext():
            means = [-function(h, weight, y, options=chunks) for h, y in zip(hidden, labels, strict=True)]
        return losses(problem, torch.stack(means).float().unsqueeze(1).expand_as(labels)).mean()

    return call


@from_logprobs("TRL chunked log-probs", *FROM_HIDDEN)
def _load_trl(device: torch.device) -> Any:
    """Call TRL's function as ``GRPOTrainer`` does: with its chunk size and with the entropy."""
    function = package("trl.kernels", device).ChunkedLogProbFunction
    chunk = package("trl.trainer.utils", device)._CHUNKED_LOGPROB_CHUNK_SIZE
    terms = (1.0, chunk, None, 1.0, ("log_probs", "entropy"))
    return lambda hidden, weight, labels: function.apply(hidden, weight, None, labels, *terms)[0]


@contestant("Liger LigerFusedLinearGRPOLoss", "hidden", roundings=lambda problem: len(problem.advantages))
def _load_liger(device: torch.device) -> Any:
    """Disable ``compiled``, which would only compile the arithmetic on values per token."""
    loss = package("liger_kernel.chunked_loss", device).LigerFusedLinearGRPOLoss(
        beta=0.0, compiled=False, use_ref_model=False, epsilon_low=CLIP_LOW,
        epsilon_high=CLIP_HIGH, loss_type="grpo", importance_sampling_level="sequence",
    )  # fmt: skip

    def call(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
        terms = (problem.labels, problem.mask, problem.advantages)
        value, _ = loss(hidden, weight, *terms, old_per_token_logps=problem.old_logprobs)
        return value

    return call


def chunks_of(size: int) -> Callable[[Problem], int]:
    """Return a function that counts a problem's chunks of ``size`` tokens."""
    return lambda problem: -(-problem.labels.numel() // size)


@from_logprobs("Liger scaled fused linear CE", *FROM_HIDDEN, roundings=chunks_of(512))
def _load_liger_scaled(device: torch.device) -> Any:
    """Compute no entropy. On sm_90 Liger runs its CuTe kernels, elsewhere chunks of 512 tokens."""
    module = package("liger_kernel.ops.fused_linear_scaled_cross_entropy", device)
    function = module.LigerFusedLinearScaledCrossEntropyFunction
    return lambda hidden, weight, labels: -function.apply(hidden, weight, labels)


for _name, _filter in {"CCE, filtered as by default": "high", "CCE, unfiltered": None}.items():
    # CCE sums dHidden and dWeight in 16 bits, with one rounding per block of 128 tokens or entries
    @from_logprobs(_name, *FROM_HIDDEN, roundings=chunks_of(128))
    def _load_cce(device: torch.device, filter_eps: str | None = _filter) -> Any:
        function = package("cut_cross_entropy", device, gpu_only=True).linear_cross_entropy
        options = {"reduction": "none", "filter_eps": filter_eps, "impl": "cce"}
        return lambda hidden, weight, labels: -function(hidden, weight, labels, **options)


@from_logprobs("QuACK linear_cross_entropy", *FROM_HIDDEN)
def _load_quack_linear(device: torch.device) -> Any:
    """Use the function that returns a value per token, unlike QuACK's chunked ones. It writes all logits."""
    function = package("quack.linear_cross_entropy", device, gpu_only=True).linear_cross_entropy_func
    options = {"reduction": "none", "inplace_backward": True}
    return lambda hidden, weight, labels: -function(hidden, weight, None, labels, **options)


@from_logprobs(
    "verl linear_cross_entropy", *FROM_HIDDEN, roundings=lambda problem: -(-problem.vocabulary // 9504)
)
def _load_verl(device: torch.device) -> Any:
    module = package("verl.utils.kernel.linear_cross_entropy", device, gpu_only=True)
    return lambda hidden, weight, labels: module.linear_cross_entropy(hidden, weight, labels, 1.0)[0]


# --- suites


def case(
    task: str,
    name: str,
    size: tuple[int, int, int, int],
    dtype: str,
    wanted: Sequence[str],
    situation: str = "all active",
    repeats: int = 5,
) -> Case:
    """Return a case of (sequences, length, vocabulary, width)."""
    B, T, V, H = size

    def make(device: torch.device) -> Problem:
        return draw(task, B * T, V, H, B, DTYPES[dtype], device).situation(situation)

    floor = {"logits": 1.0} if task == "scoring" else PRODUCTS
    shape = {"dtype": dtype, "sequences": B, "length": T, "V": V, "H": H}
    return Case(name, make, shape, wanted, floor, products, repeats)


SIZES = {"cpu": (4, 128, 32000, 512), "gpu": (16, 1024, 151936, 4096), "tiny": (2, 8, 300, 16)}
from_hidden = functools.partial(case, "hidden")


@suite("hidden", "Loss and gradients from hidden states")
def hidden(options: Options) -> dict[str, Any]:
    """Every schedule; half of the sequences inactive; a tenth clipped; a frozen head; on-policy; bf16; a
    larger vocabulary; a tiny shape. On a GPU each case is measured without and with tensor maps.
    """
    size, dtype = options.choose(**SIZES), options.dtype
    schedules = r"ours, (auto|aligned|deferred|two_pass|least memory)(, 16-bit logits)?"
    of_20 = (20, max(2, size[0] * size[1] // 20), *size[2:])
    maps = ", tensor maps" if options.device.type == "cuda" else ""

    def wanted(*names: str, way: str = "") -> tuple[str, ...]:
        return (*names, f"ours, auto{way}{maps}")

    invariant = wanted(r"ours, auto(, batch-invariant)?", PLAIN, way=", batch-invariant")
    frozen = wanted(r"ours, (auto|frozen|least memory)", PLAIN)
    cases = [
        from_hidden("all active", size, dtype, wanted(OTHERS, schedules)),
        from_hidden("batch-invariant", size, dtype, invariant),
        from_hidden("half inactive", size, dtype, wanted(*SKIP), "half inactive"),
        from_hidden("10% clipped", of_20, dtype, wanted(r"ours, auto(, skip none)?", PLAIN), "10% clipped"),
        from_hidden("frozen head", size, dtype, frozen, "frozen head"),
        from_hidden("on-policy", size, dtype, wanted(r"ours, (auto|known)", PLAIN, "torch l.*"), "on-policy"),
    ]
    if dtype == "bf16" and not options.tiny:
        shapes = {"H=2048": (16, 151936, 2048), "H=1024": (8, 151936, 1024), "V=248,320": (16, 248320, 2048)}
        for words, (B, V, H) in shapes.items():
            every = wanted(OTHERS, schedules)
            cases.append(from_hidden(f"all active, {words}", (B, size[1], V, H), dtype, every))
    elif dtype == "fp32":
        for words, V in (("large", 32000), ("small", 1000)):
            long = size if options.tiny else (4, 512, V, 512)
            cases.append(from_hidden(f"bf16, {words} vocabulary", long, "bf16", (OTHERS, AUTO)))
    tiny = (2, 4, 50, 8) if options.tiny else (4, 16, 1000, 64)
    cases.append(from_hidden("tiny", tiny, "fp32", (OTHERS, "ours, auto"), repeats=9))
    return {"cases": run_cases(cases, options)}


@suite("scoring", "Log-probs from hidden states, no gradient")
def scoring(options: Options) -> dict[str, Any]:
    """Times are compared with one ``torch.mm``."""
    tokens = case("scoring", "all tokens", options.choose(**SIZES), options.dtype, (".*",))
    return {"cases": run_cases([tokens], options)}


@suite("realistic", "A batch as training meets it")
def realistic_batch(options: Options) -> dict[str, Any]:
    """Log-normal lengths, groups without variance, clipped sequences."""
    sizes = {"cpu": (20, 64, 32000, 512), "gpu": (40, 1024, 151936, 4096), "tiny": (8, 16, 300, 16)}
    (B, T, V, H), dtype = options.choose(**sizes), options.dtype

    def make(device: torch.device) -> Problem:
        return realistic(B, T, V, H, DTYPES[dtype], device)

    shape = {"dtype": dtype, "sequences": B, "length": T, "V": V, "H": H}
    wanted = (OTHERS, r"naive.*packed tokens", r"ours, auto(, skip all)?", r"ours, auto, packed tokens")
    return {"cases": run_cases([Case("realistic", make, shape, wanted, PRODUCTS, products)], options)}
