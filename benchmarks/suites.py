"""Suites of losses: from logits, from hidden states, a realistic batch, peak memory, one training step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import problem as gspo
from benchmarks.measure import Case, Contestant, Options, run_cases, suite
from benchmarks.problem import Problem, Verdict

PRODUCTS = {"logits": 1.0, "dHidden": 1.0, "dWeight": 1.0}
# All contestants but ours and packed ones, which each case names itself.
OTHERS = r"(?!ours)(?!.*packed).*"
PLAIN, AUTO, ROWS = "naive PyTorch", r"ours, auto(, 16-bit logits)?", r"ours, (cpp|triton)(, in place)?"
SKIP = (r"ours, auto(, skip .*)?", PLAIN, r"ours, auto, 16-bit logits")
Size = tuple[int, int, int, int]
"""Sequences, length, vocabulary, width."""


def _case(
    task: str,
    name: str,
    size: Size,
    dtype: str,
    wanted: Sequence[str],
    situation: str = "all active",
    floor: dict[str, float] | None = None,
    repeats: int = 5,
) -> Case:
    B, T, V, H = size
    shape = {"dtype": dtype, "sequences": B, "length": T, "V": V} | ({"H": H} if H else {})

    def make(device: torch.device) -> Problem:
        drawn = gspo.draw(task, B * T, V, H, B, gspo.DTYPES[dtype], device)
        return drawn.situation(situation)

    return Case(name, make, shape, wanted, floor or {}, repeats)


def _from_logits(accesses: float, name: str, *args: Any, **options: Any) -> Case:
    # a copy is two accesses per logit
    return _case("logits", name, *args, floor={"copy": accesses / 2}, **options)


_from_hidden = functools.partial(_case, "hidden", floor=PRODUCTS)


def _choose(options: Options, cpu: Any, gpu: Any, tiny: Any) -> tuple[Any, str, bool]:
    """Return the size, the usual dtype, and whether this is a full run on a GPU."""
    on_cpu = options.device.type == "cpu"
    size = tiny if options.tiny else cpu if on_cpu else gpu
    return size, "fp32" if on_cpu else "bf16", not on_cpu and not options.tiny


@suite("logits", "Loss and gradient from logits")
def logits(options: Options) -> dict[str, Any]:
    """Times are compared with a plain copy that moves as many bytes."""
    size, first, _ = _choose(options, (8, 64, 32000, 0), (16, 1024, 151936, 0), (2, 8, 300, 0))
    small = (2, 4, 50, 0) if options.tiny else (4, 16, 1000, 0)
    second = "bf16" if first == "fp32" else "fp32"
    every = (OTHERS, ROWS, "ours, reference")
    cases = [
        _from_logits(3, f"{first}, all active", size, first, every, repeats=9),
        _from_logits(3, f"{second}, all active", size, second, every[:2], repeats=9),
        _from_logits(2, "bf16, on-policy", size, "bf16", (PLAIN, ROWS), "on-policy", repeats=9),
        _from_logits(2.5, f"{first}, half inactive", size, first, (PLAIN, ROWS), "half inactive", repeats=9),
        _from_logits(3, "fp32, tiny", small, "fp32", every, repeats=9),
    ]
    return {"cases": run_cases(cases, options)}


@suite("hidden", "Loss and gradients from hidden states")
def hidden(options: Options) -> dict[str, Any]:
    """Every schedule; half of the sequences inactive; a tenth clipped; a frozen head; on-policy; bf16; a
    larger vocabulary; a tiny shape. On a GPU each case is measured without and with products by tensor maps.
    """
    sizes = (4, 128, 32000, 512), (16, 1024, 151936, 4096), (2, 8, 300, 16)
    size, dtype, on_gpu = _choose(options, *sizes)
    schedules = r"ours, (auto|aligned|deferred|two_pass|least memory)(, 16-bit logits)?"
    of_20 = (20, max(2, size[0] * size[1] // 20), *size[2:])
    maps = ", tensor maps" if options.device.type == "cuda" else ""

    def wanted(*names: str, way: str = "") -> tuple[str, ...]:
        return (*names, f"ours, auto{way}{maps}")

    invariant = wanted(r"ours, auto(, batch-invariant)?", PLAIN, way=", batch-invariant")
    frozen = wanted(r"ours, (auto|frozen|least memory)", PLAIN)
    cases = [
        _from_hidden("all active", size, dtype, wanted(OTHERS, schedules)),
        _from_hidden("batch-invariant", size, dtype, invariant),
        _from_hidden("half inactive", size, dtype, wanted(*SKIP), "half inactive"),
        _from_hidden("10% clipped", of_20, dtype, wanted(r"ours, auto(, skip none)?", PLAIN), "10% clipped"),
        _from_hidden("frozen head", size, dtype, frozen, "frozen head"),
        _from_hidden("on-policy", size, dtype, wanted(r"ours, (auto|known)", PLAIN), "on-policy"),
    ]
    if on_gpu:
        shapes = {"H=2048": (16, 151936, 2048), "H=1024": (8, 151936, 1024), "V=248,320": (16, 248320, 2048)}
        for words, (B, V, H) in shapes.items():
            every = wanted(OTHERS, schedules)
            cases.append(_from_hidden(f"all active, {words}", (B, size[1], V, H), dtype, every))
    elif dtype == "fp32":
        for words, V in (("large", 32000), ("small", 1000)):
            long = size if options.tiny else (4, 512, V, 512)
            cases.append(_from_hidden(f"bf16, {words} vocabulary", long, "bf16", (OTHERS, AUTO)))
    tiny = (2, 4, 50, 8) if options.tiny else (4, 16, 1000, 64)
    cases.append(_from_hidden("tiny", tiny, "fp32", (OTHERS, "ours, auto"), repeats=9))
    return {"cases": run_cases(cases, options)}


@suite("scoring", "Log-probs from hidden states, no gradient")
def scoring(options: Options) -> dict[str, Any]:
    """Times are compared with one ``torch.mm``."""
    sizes = (4, 128, 32000, 512), (16, 1024, 151936, 4096), (2, 8, 300, 16)
    size, dtype, _ = _choose(options, *sizes)
    case = _case("scoring", "all tokens", size, dtype, (".*",), floor={"logits": 1.0})
    return {"cases": run_cases([case], options)}


@suite("large", "Larger problems on a CPU", everything=False)
def large(options: Options) -> dict[str, Any]:
    """From logits, and from hidden states with thousands of tokens or 152k words; it takes minutes."""
    sizes = [(8, 256, 32000, 512), (4, 256, 151936, 896)]
    rows, small = (8, 128, 32000, 0), (4, 128, 8000, 256)
    if options.tiny:
        sizes, rows, small = [(2, 8, 300, 16)], (2, 8, 300, 0), (2, 8, 300, 16)
    cases = [
        _from_logits(3, f"from logits, {dtype}", rows, dtype, (OTHERS, ROWS)) for dtype in ("fp32", "bf16")
    ]
    for size in sizes:
        vocabulary = f"V={size[2]:,}"
        situations = {"all active": (OTHERS, AUTO), "half inactive": SKIP, "frozen head": (AUTO, PLAIN)}
        for name, wanted in situations.items():
            cases.append(_from_hidden(f"{name}, {vocabulary}", size, "fp32", wanted, name, repeats=3))
    cases.append(_from_hidden("all active, bf16", small, "bf16", (OTHERS, AUTO), repeats=3))
    return {"cases": run_cases(cases, options)}


@suite("realistic", "A batch as training meets it")
def realistic(options: Options) -> dict[str, Any]:
    """Log-normal lengths, groups without variance, clipped sequences."""
    sizes = (20, 64, 32000, 512), (40, 1024, 151936, 4096), (8, 16, 300, 16)
    (B, T, V, H), dtype, _ = _choose(options, *sizes)

    def make(device: torch.device) -> Problem:
        return gspo.realistic("hidden", B, T, V, H, gspo.DTYPES[dtype], device)

    shape = {"dtype": dtype, "sequences": B, "length": T, "V": V, "H": H}
    wanted = (OTHERS, r"naive.*packed tokens", r"ours, auto(, skip all)?", r"ours, auto, packed tokens")
    case = Case("realistic", make, shape, wanted, PRODUCTS)
    return {"cases": run_cases([case], options)}


@suite("memory", "Peak memory beyond inputs")
def memory(options: Options) -> dict[str, Any]:
    """A large vocabulary; nothing is timed."""
    sizes = (4, 64, 151936, 64), (8, 1024, 151936, 1024), (2, 8, 300, 16)
    size, dtype, on_gpu = _choose(options, *sizes)
    rows = (*size[:3], 0) if on_gpu or options.tiny else (2, 64, 151936, 0)
    every = (OTHERS, AUTO, r"ours, (deferred|two_pass|least memory)")
    cases = [
        _case("hidden", "from hidden states", size, dtype, every, repeats=0),
        _case("logits", "from logits", rows, dtype, (OTHERS, ROWS), repeats=0),
    ]
    return {"cases": run_cases(cases, options)}


# --- one training step of a small model


@dataclass
class Step:
    """A model and a batch, with the methods of a ``Problem`` that the runner calls."""

    model: Any
    optimizer: Any
    ids: Tensor
    inner: Problem

    task = "hidden"

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.model.lm_head.weight,)

    def layout(self, name: str) -> Step:
        return self  # all contestants of a step take padded sequences

    def leaves(self, copy: bool = False) -> tuple[Tensor, ...]:
        return tuple(self.model.parameters())

    def call(self, compute: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> Tensor:
        hidden = self.model.model(input_ids=self.ids, use_cache=False).last_hidden_state[:, :-1]
        return compute(self.inner, hidden, self.model.lm_head.weight)

    def finish(self, leaves: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> None:
        """Take the optimizer's step; the learning rate is 0, so that every round computes the same."""
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def plain_losses(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
    """Return losses [B] in plain PyTorch, whose errors against fp64 decide what is allowed."""
    logits = gspo.project(hidden, weight, "input", native=False)
    return gspo.losses(problem, gspo.picked(logits, problem.labels))


class StepJudge:
    """Compares a step's loss and gradients with those of the same model in fp64."""

    def __init__(self, step: Step):
        exact = replace(step, model=copy.deepcopy(step.model).double())
        self.exact, self.plain = self._run(exact), self._run(step)
        self.names = [name for name, _ in step.model.named_parameters()]

    @staticmethod
    def _run(step: Step) -> tuple[Tensor, ...]:
        leaves = step.leaves()
        losses = step.call(plain_losses, leaves)
        return (losses.detach(), *torch.autograd.grad(losses.mean(), leaves))

    def verdict(self, contestant: Contestant, loss: Tensor, gradients: tuple[Tensor, ...]) -> Verdict:
        """Judge the loss, and the gradient of the parameter with the worst error."""
        found = {}
        for name, got, plain, exact in zip(
            ("loss", *self.names), (loss, *gradients), self.plain, self.exact, strict=True
        ):
            rounding = torch.finfo(torch.float32 if name == "loss" else plain.dtype).eps
            errors = (plain.double() - exact).abs()
            # signed errors of sequences may cancel in the mean by luck; absolute errors don't
            usual = errors.mean() if name == "loss" else errors.max()
            target = exact.mean() if name == "loss" else exact
            error = (got.double() - target).abs().max().item()
            found[name] = error, float(2 * usual + rounding * exact.abs().max().clamp_min(1e-12))
        worst = max(self.names, key=lambda name: found[name][0] / found[name][1])
        kept = {name: found[name] for name in ("loss", worst)}
        return Verdict({n: e for n, (e, _) in kept.items()}, {n: a for n, (_, a) in kept.items()})


def make(B: int, T: int, V: int, H: int, layers: int, device: torch.device, dtype: torch.dtype) -> Step:
    """Create a step: a Qwen3 with random weights, random tokens, and the problem of its loss."""
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
    """Qwen3 with random weights, AdamW; all contestants share everything but the loss."""
    sizes = (8, 64, 32000, 256, 2), (8, 512, 151936, 1024, 4), (2, 8, 300, 64, 1)
    size, dtype, _ = _choose(options, *sizes)
    shape = {"dtype": dtype, **dict(zip(("sequences", "length", "V", "H", "layers"), size, strict=True))}
    wanted = (PLAIN, "torch.compile.*", "TRL.*", "Liger.*", "ours, auto", "CCE, unfiltered", "verl.*")
    case = Case(
        "step", lambda device: make(*size, device, gspo.DTYPES[dtype]), shape, wanted, judge=StepJudge
    )
    return {"cases": run_cases([case], options)}
