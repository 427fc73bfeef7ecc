"""The suites of losses: from logits, from hidden states, a padded batch, one training step, peak memory."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import problem as gspo
from benchmarks.judge import Verdict
from benchmarks.measure import Case, run_cases
from benchmarks.problem import Problem
from benchmarks.registry import Contestant, Options, suite

PRODUCTS = {"logits": 1.0, "dHidden": 1.0, "dWeight": 1.0}
THREE_PRODUCTS = "the three products"
# Everyone but our own variants, of which each case names those that it is about.
OTHERS = r"(?!ours)(?!.*packed).*"
HALF = (r"ours, auto", r"ours, auto, skip .*", r"naive PyTorch", r"ours, auto, 16-bit logits")


def shape_of(B: int, T: int, V: int, H: int | None, dtype: str) -> dict[str, Any]:
    """What tables say of a problem."""
    shape: dict[str, Any] = {"dtype": dtype, "sequences": B, "length": T, "V": V}
    return shape if H is None else {**shape, "H": H}


def _drawn(
    task: str, B: int, T: int, V: int, H: int, dtype: str, situation: str = "all active"
) -> Callable[[torch.device], Problem]:
    def make(device: torch.device) -> Problem:
        drawn = gspo.draw(task, B * T, V, H, B, gspo.DTYPES[dtype], device)
        return drawn.situation(situation)

    return make


def _case(
    task: str,
    name: str,
    size: Sequence[int],
    dtype: str,
    wanted: Sequence[str],
    situation: str = "all active",
    floor: dict[str, float] | None = None,
    floor_name: str = "",
    repeats: int = 5,
) -> Case:
    B, T, V, H = size
    make = _drawn(task, B, T, V, H, dtype, situation)
    shape = shape_of(B, T, V, H or None, dtype)
    return Case(name, make, shape, wanted, floor or {}, floor_name, repeats)


# --- from logits


@suite("logits", "Loss and gradient from logits")
def logits(options: Options) -> dict[str, Any]:
    """Forward, backward and both; the floor is the least traffic at the rate of a plain copy."""
    on_cpu = options.device.type == "cpu"
    size = (8, 64, 32000, 0) if on_cpu else (16, 1024, 151936, 0)
    small = (4, 16, 1000, 0)
    if options.tiny:
        size, small = (2, 8, 300, 0), (2, 4, 50, 0)
    ours, plain = r"ours, (cpp|triton)(, in place)?", r"naive PyTorch"
    first, second = ("fp32", "bf16") if on_cpu else ("bf16", "fp32")

    def case(name: str, dtype: str, situation: str, accesses: float, *wanted: str, size: Any = size) -> Case:
        # a copy is two accesses per logit
        floor, words = {"copy": accesses / 2}, f"{accesses:g} accesses per logit, at the rate of a copy"
        return _case("logits", name, size, dtype, wanted, situation, floor, words, 9)

    cases = [
        case(f"{first}, all active", first, "all active", 3, OTHERS, ours, r"ours, reference"),
        case(f"{second}, all active", second, "all active", 3, OTHERS, ours),
        case("bf16, on-policy", "bf16", "on-policy", 2, plain, ours),
        case(f"{first}, half inactive", first, "half inactive", 2.5, plain, ours),
        case("fp32, tiny", "fp32", "all active", 3, OTHERS, ours, r"ours, reference", size=small),
    ]
    return {"cases": run_cases(cases, options)}


# --- from hidden states


@suite("hidden", "Loss and gradients from hidden states")
def hidden(options: Options) -> dict[str, Any]:
    """Every schedule; half of the sequences inactive; a frozen head; on-policy; bf16; a tiny shape."""
    on_cpu = options.device.type == "cpu"
    size = (4, 128, 32000, 512) if on_cpu else (16, 1024, 151936, 4096)
    size, dtype = ((2, 8, 300, 16) if options.tiny else size), "fp32" if on_cpu else "bf16"
    case = functools.partial(_case, "hidden", floor=PRODUCTS, floor_name=THREE_PRODUCTS)
    schedules = r"ours, (auto|known|aligned|deferred|frozen|two_pass)(, 16-bit logits)?"
    cases = [
        case("all active", size, dtype, (OTHERS, schedules)),
        case("batch-invariant", size, dtype, (r"ours, auto(, batch-invariant)?", r"naive PyTorch")),
        case("half inactive", size, dtype, HALF, "half inactive"),
        case("frozen head", size, dtype, (r"ours, (auto|frozen)", r"naive PyTorch"), "frozen head"),
        case("on-policy", size, dtype, (r"ours, (auto|known)", r"naive PyTorch"), "on-policy"),
    ]
    if not on_cpu and not options.tiny:
        narrow = (*size[:3], 2048)
        cases.append(case("all active, H=2048", narrow, dtype, (OTHERS, r"ours, auto")))
    if on_cpu:
        for words, V in (("large", 32000), ("small", 1000)) if not options.tiny else (("large", 300),):
            long = (4, 512, V, 512) if not options.tiny else size
            ours = r"ours, auto(, 16-bit logits)?"
            cases.append(case(f"bf16, {words} vocabulary", long, "bf16", (OTHERS, ours)))
    tiny = (4, 16, 1000, 64) if not options.tiny else (2, 4, 50, 8)
    cases.append(case("tiny", tiny, "fp32", (OTHERS, r"ours, auto(, reference backend)?"), repeats=9))
    return {"cases": run_cases(cases, options)}


@suite("scoring", "Log-probs from hidden states, no gradient")
def scoring(options: Options) -> dict[str, Any]:
    """The floor is one product."""
    on_cpu = options.device.type == "cpu"
    size = (4, 128, 32000, 512) if on_cpu else (16, 1024, 151936, 4096)
    size, dtype = ((2, 8, 300, 16) if options.tiny else size), "fp32" if on_cpu else "bf16"
    floor = {"floor": {"logits": 1.0}, "floor_name": "one product"}
    cases = [_case("scoring", "all tokens", size, dtype, (".*",), **floor)]
    if not on_cpu and not options.tiny:
        cases.append(_case("scoring", "all tokens, H=2048", (*size[:3], 2048), dtype, (".*",), **floor))
    return {"cases": run_cases(cases, options)}


@suite("large", "Larger problems on a CPU", everything=False)
def large(options: Options) -> dict[str, Any]:
    """From logits and hidden states at thousands of tokens, or 152k words. For a CPU; it takes minutes."""
    sizes = ((8, 256, 32000, 512), (4, 256, 151936, 896))
    rows, small = (8, 128, 32000, 0), (4, 128, 8000, 256)
    if options.tiny:
        sizes, rows, small = ((2, 8, 300, 16),), (2, 8, 300, 0), (2, 8, 300, 16)
    ours = (OTHERS, r"ours, (cpp|triton)(, in place)?")
    copies = {"floor": {"copy": 1.5}, "floor_name": "3 accesses per logit, at the rate of a copy"}
    cases = [
        _case("logits", f"from logits, {dtype}", rows, dtype, ours, **copies) for dtype in ("fp32", "bf16")
    ]
    auto = r"ours, auto(, 16-bit logits)?"
    head = functools.partial(_case, "hidden", floor=PRODUCTS, floor_name=THREE_PRODUCTS, repeats=3)
    for size in sizes:
        vocabulary = f"V={size[2]:,}"
        cases += [
            head(f"all active, {vocabulary}", size, "fp32", (OTHERS, auto)),
            head(f"half inactive, {vocabulary}", size, "fp32", HALF, "half inactive"),
            head(f"frozen head, {vocabulary}", size, "fp32", (auto, "naive PyTorch"), "frozen head"),
        ]
    cases.append(head("all active, bf16", small, "bf16", (OTHERS, auto)))
    return {"cases": run_cases(cases, options)}


# --- a batch as training meets it


@suite("realistic", "A batch as training meets it")
def realistic(options: Options) -> dict[str, Any]:
    """Log-normal lengths, groups without variance, clipped sequences; the floor is that of counted tokens."""
    on_cpu = options.device.type == "cpu"
    B, T, V, H = (20, 64, 32000, 512) if on_cpu else (40, 1024, 151936, 4096)
    if options.tiny:
        B, T, V, H = 8, 16, 300, 16
    dtype = "fp32" if on_cpu else "bf16"

    def make(device: torch.device) -> Problem:
        return gspo.realistic("hidden", B, T, V, H, gspo.DTYPES[dtype], device)

    wanted = (OTHERS, r"naive.*packed tokens", r"ours, auto(, skip all)?", r"ours, auto, packed tokens")
    case = Case(
        "realistic",
        make,
        shape_of(B, T, V, H, dtype),
        wanted,
        PRODUCTS,
        "three products of the counted tokens",
    )
    about = gspo.about(gspo.realistic("hidden", B, T, 50, 4, torch.float32))
    return {"about": about, "cases": run_cases([case], options)}


# --- peak memory


@suite("memory", "Peak memory beyond inputs")
def memory(options: Options) -> dict[str, Any]:
    """A large vocabulary; nothing is timed."""
    on_cpu = options.device.type == "cpu"
    size = (4, 64, 151936, 64) if on_cpu else (8, 1024, 151936, 1024)
    size, dtype = ((2, 8, 300, 16) if options.tiny else size), "fp32" if on_cpu else "bf16"
    every = (OTHERS, r"ours, auto(, 16-bit logits)?", r"ours, (deferred|two_pass)")
    head = _case("hidden", "from hidden states", size, dtype, every, repeats=0)
    small = size if not on_cpu or options.tiny else (2, 64, 151936, 0)
    rows = _case(
        "logits",
        "from logits",
        (*small[:3], 0),
        dtype,
        (OTHERS, r"ours, (cpp|triton)(, in place)?"),
        repeats=0,
    )
    return {"cases": run_cases([head, rows], options)}


# --- one training step of a small model


@dataclass
class Step:
    """A model, a batch, and what a ``Problem`` offers to those who measure; leaves are the parameters."""

    model: Any
    optimizer: Any
    ids: Tensor
    inner: Problem

    task = "hidden"

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.model.lm_head.weight,)

    def layout(self, name: str) -> Step:
        if name != "padded":
            raise ValueError(f"a step has no layout {name!r}")
        return self

    def leaves(self, copy: bool = False) -> tuple[Tensor, ...]:
        return tuple(self.model.parameters())

    def call(self, compute: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> Tensor:
        hidden = self.model.model(input_ids=self.ids, use_cache=False).last_hidden_state[:, :-1]
        return compute(self.inner, hidden, self.model.lm_head.weight)

    def finish(self, leaves: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> None:
        """The optimizer's step; its learning rate is 0, so that every round computes the same."""
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def naive(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
    """[B] losses in plain PyTorch, whose errors against fp64 decide what is allowed."""
    logits = gspo.project(hidden, weight, "input", native=False)
    return gspo.losses(problem, gspo.picked(logits, problem.labels))


class StepJudge:
    """Holds a step's loss and gradients against the same model in fp64."""

    def __init__(self, step: Step):
        exact = replace(step, model=copy.deepcopy(step.model).double())
        self.exact, self.plain = self._run(exact), self._run(step)
        self.names = [name for name, _ in step.model.named_parameters()]

    @staticmethod
    def _run(step: Step) -> tuple[Tensor, ...]:
        leaves = step.leaves()
        losses = step.call(naive, leaves)
        return (losses.detach(), *torch.autograd.grad(losses.mean(), leaves))

    def verdict(self, contestant: Contestant, loss: Tensor, gradients: tuple[Tensor, ...]) -> Verdict:
        """Judge the loss and the parameter that is worst."""
        found = {}
        for name, got, plain, exact in zip(
            ("loss", *self.names), (loss, *gradients), self.plain, self.exact, strict=True
        ):
            rounding = torch.finfo(torch.float32 if name == "loss" else plain.dtype).eps
            errors = (plain.double() - exact).abs()
            # in the mean, errors of sequences cancel by luck; their sizes don't
            usual = errors.mean() if name == "loss" else errors.max()
            target = exact.mean() if name == "loss" else exact
            error = (got.double() - target).abs().max().item()
            found[name] = error, float(2 * usual + rounding * exact.abs().max().clamp_min(1e-12))
        worst = max(self.names, key=lambda name: found[name][0] / found[name][1])
        kept = {name: found[name] for name in ("loss", worst)}
        return Verdict({n: e for n, (e, _) in kept.items()}, {n: a for n, (_, a) in kept.items()})


def make(B: int, T: int, V: int, H: int, layers: int, device: torch.device, dtype: torch.dtype) -> Step:
    """A Qwen3 with random weights, and tokens drawn at random: its loss is what a step computes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=V, hidden_size=H, intermediate_size=3 * H, num_hidden_layers=layers,
        num_attention_heads=max(1, H // 64), num_key_value_heads=max(1, H // 128), head_dim=min(64, H),
        tie_word_embeddings=False, max_position_embeddings=T + 1,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(device, dtype).train()
    ids = torch.randint(V, (B, T + 1), device=device)
    sign = (1.0 - 2.0 * (torch.arange(B, device=device) % 2)).double()
    with torch.no_grad():
        hidden = copy.deepcopy(model).double().model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        logprobs = gspo.picked(hidden @ model.lm_head.weight.double().t(), ids[:, 1:])
    ones = torch.ones(B, T, device=device)
    old = (logprobs + 0.05 * sign.unsqueeze(1)).float()
    inner = Problem("hidden", (), ids[:, 1:].contiguous(), old, sign.float(), ones, logprobs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    return Step(model, optimizer, ids, inner)


@suite("step", "One training step of a small model")
def step(options: Options) -> dict[str, Any]:
    """Qwen3 with random weights, AdamW; everything but the loss is the same for all."""
    on_cpu = options.device.type == "cpu"
    B, T, V, H, layers = (8, 64, 32000, 256, 2) if on_cpu else (16, 1024, 151936, 1024, 12)
    if options.tiny:
        B, T, V, H, layers = 2, 8, 300, 64, 1
    dtype = "fp32" if on_cpu else "bf16"
    shape = {"dtype": dtype, "sequences": B, "length": T, "V": V, "H": H, "layers": layers}
    wanted = (
        "naive PyTorch",
        "torch.compile.*",
        "TRL.*",
        "Liger.*",
        "ours, auto",
        "CCE, unfiltered",
        "verl.*",
    )
    case = Case(
        "step",
        lambda device: make(B, T, V, H, layers, device, gspo.DTYPES[dtype]),
        shape,
        wanted,
        judge=StepJudge,
    )
    return {"cases": run_cases([case], options)}
