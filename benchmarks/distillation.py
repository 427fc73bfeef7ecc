"""The suite ``distillation``: divergence of a student from a teacher, and the student's gradient.

Means over tokens, as everyone's own trainer calls them, from hidden states of two widths and from logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from benchmarks import problem as gspo
from benchmarks.contestants import package
from benchmarks.judge import Verdict
from benchmarks.measure import Case, run_cases
from benchmarks.registry import Contestant, Options, contestant, suite

FROM_HIDDEN, FROM_LOGITS = "distillation", "divergence"
NAMES = {0.5: "Jensen-Shannon", 1.0: "reverse KL"}


@dataclass(frozen=True)
class Pair:
    """A student, a teacher, and what a ``Problem`` offers to those who measure.

    Attributes:
        task: ``FROM_HIDDEN`` or ``FROM_LOGITS``.
        inputs: the student's (hidden [N, H], weight [V, H]) or (logits [N, V],), of one dtype.
        teacher: the teacher's, with a width of its own.
        beta: 0, 0.5 or 1.
    """

    task: str
    inputs: tuple[Tensor, ...]
    teacher: tuple[Tensor, ...]
    beta: float

    def layout(self, name: str) -> Pair:
        return self

    def leaves(self, copy: bool = False) -> tuple[Tensor, ...]:
        return tuple(
            each.detach().clone().requires_grad_() if copy else each.detach().requires_grad_()
            for each in self.inputs
        )

    def call(self, compute: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> Tensor:
        return compute(self, *leaves)

    def finish(self, leaves: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> None:
        """Nothing is updated."""


def draw(
    task: str, N: int, V: int, H: int, teacher_H: int, dtype: str, beta: float, device: torch.device
) -> Pair:
    """Logits with a standard deviation of 3; half of the variance is common to both sides from logits."""
    rng = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=rng, device=device).mul_(size).to(gspo.DTYPES[dtype])

    if task == FROM_LOGITS:
        shared = torch.randn(N, V, generator=rng, device=device)
        sides = [((shared + normal(N, V).float()) * 3 / 2**0.5).to(gspo.DTYPES[dtype]) for _ in range(2)]
        return Pair(task, (sides[0],), (sides[1],), beta)
    sides = [(normal(N, width), normal(V, width, size=3 / width**0.5)) for width in (H, teacher_H)]
    return Pair(task, *sides, beta)


# --- contestants


def _naive(pair: Pair, *leaves: Tensor, precision: str = "input") -> Tensor:
    """Both log-softmaxes and the definition.

    ``precision``: "input" rounds the logits to the inputs' dtype; "statistics" also what follows from them.
    """
    with torch.no_grad():
        log_q = _logits(pair.teacher, precision).log_softmax(-1)
    log_p = _logits(leaves, precision).log_softmax(-1)

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return (log_a.exp() * (log_a - log_b)).sum(-1).mean()

    if pair.beta in (0, 1):
        return kl(log_p, log_q) if pair.beta else kl(log_q, log_p)
    log_m = torch.logaddexp(log_p + math.log(1 - pair.beta), log_q + math.log(pair.beta))
    return pair.beta * kl(log_q, log_m) + (1 - pair.beta) * kl(log_p, log_m)


def _logits(side: tuple[Tensor, ...], precision: str) -> Tensor:
    if precision == "statistics":
        return side[0] if len(side) == 1 else torch.nn.functional.linear(*side)
    if len(side) == 2:
        return gspo.project(*side, precision, native=True)
    return side[0].to(torch.promote_types(side[0].dtype, torch.float32))


@contestant("naive PyTorch divergence", FROM_HIDDEN, FROM_LOGITS)
def _load_naive(device: torch.device) -> Callable[..., Tensor]:
    return _naive


@contestant("torch.compile of the divergence", FROM_HIDDEN, FROM_LOGITS)
def _load_compiled(device: torch.device) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(_naive, dynamic=False)


@contestant("ours, fused_linear_distillation_loss", FROM_HIDDEN, precision="float32", ours=True)
def _load_ours(device: torch.device) -> Callable[..., Tensor]:
    def call(pair: Pair, hidden: Tensor, weight: Tensor) -> Tensor:
        offsets = torch.tensor([0, len(hidden)], dtype=torch.int32, device=hidden.device)
        given = (hidden, weight, *pair.teacher)
        return gk.fused_linear_distillation_loss(*given, beta=pair.beta, cu_seqlens=offsets).loss

    return call


@contestant("ours, distillation_loss", FROM_LOGITS, precision="float32", ours=True)
def _load_ours_logits(device: torch.device) -> Callable[..., Tensor]:
    def call(pair: Pair, logits: Tensor) -> Tensor:
        offsets = torch.tensor([0, len(logits)], dtype=torch.int32, device=logits.device)
        return gk.distillation_loss(logits, *pair.teacher, beta=pair.beta, cu_seqlens=offsets).loss

    return call


def _register_liger(name: str, compiled: bool) -> None:
    @contestant(name, FROM_HIDDEN, precision="statistics")
    def load(device: torch.device) -> Callable[..., Tensor]:
        module = package("liger_kernel.chunked_loss", device)

        def call(pair: Pair, hidden: Tensor, weight: Tensor) -> Tensor:
            loss = module.LigerFusedLinearJSDLoss(
                weight_hard_loss=0.0, weight_soft_loss=1.0, beta=pair.beta, compiled=compiled
            )
            labels = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
            return loss(hidden, weight, *pair.teacher, labels)

        return call


_register_liger("Liger LigerFusedLinearJSDLoss, compiled", True)
_register_liger("Liger LigerFusedLinearJSDLoss", False)


@contestant("TRL ChunkedDivergenceFunction", FROM_HIDDEN, precision="float32")
def _load_trl(device: torch.device) -> Callable[..., Tensor]:
    function = package("trl.kernels.chunked_divergence", device).ChunkedDivergenceFunction

    def call(pair: Pair, hidden: Tensor, weight: Tensor) -> Tensor:
        their_hidden, their_weight = pair.teacher
        found, _ = function.apply(hidden, weight, None, their_hidden, their_weight, None, pair.beta)
        return found.mean()

    return call


@contestant("TRL generalized_jsd_loss", FROM_LOGITS, precision="statistics")
def _load_trl_logits(device: torch.device) -> Callable[..., Tensor]:
    trainer = package("trl.experimental.gkd.gkd_trainer", device).GKDTrainer

    def call(pair: Pair, logits: Tensor) -> Tensor:
        labels = torch.zeros(1, len(logits), dtype=torch.int64, device=logits.device)
        given = (logits[None], pair.teacher[0][None], labels)
        return trainer.generalized_jsd_loss(*given, beta=pair.beta)

    return call


# --- the suite


class DistillationJudge:
    """Loss and gradients against fp64: twice plain PyTorch's error at the same precision, and a rounding."""

    def __init__(self, pair: Pair):
        self.pair = pair
        self.exact = self._plain(torch.float64, "float32")
        self._allowed: dict[str, dict[str, float]] = {}

    def _plain(self, dtype: torch.dtype, precision: str) -> dict[str, Tensor]:
        sides = [tuple(each.to(dtype) for each in side) for side in (self.pair.inputs, self.pair.teacher)]
        pair = Pair(self.pair.task, *sides, self.pair.beta)
        leaves = pair.leaves()
        loss = _naive(pair, *leaves, precision=precision)
        return self._named(loss.detach(), torch.autograd.grad(loss, leaves))

    def _named(self, loss: Tensor, gradients: tuple[Tensor, ...]) -> dict[str, Tensor]:
        names = ("logits",) if self.pair.task == FROM_LOGITS else ("hidden", "weight")
        return {"loss": loss, **dict(zip(names, gradients, strict=True))}

    def verdict(self, contestant: Contestant, loss: Tensor, gradients: tuple[Tensor, ...]) -> Verdict:
        """Norms of the errors."""
        precision = contestant.precision_for(self.pair.task)
        own = self.pair.inputs[0].dtype
        if precision not in self._allowed:
            plain = self._plain(torch.float32 if precision == "float32" else own, precision)
            self._allowed[precision] = {
                name: 2 * float((plain[name].double() - value).norm())
                + (4 * torch.finfo(torch.float32).eps if name == "loss" else torch.finfo(own).eps)
                * float(value.norm())
                for name, value in self.exact.items()
            }
        found = self._named(loss, gradients)
        errors = {name: float((found[name].double() - value).norm()) for name, value in self.exact.items()}
        return Verdict(errors, self._allowed[precision])


@suite("distillation", "Distillation: divergence and the student's gradient", everything=False)
def distillation(options: Options) -> dict[str, Any]:
    """The yardstick is plain PyTorch; a teacher twice as wide as the student."""
    on_cpu = options.device.type == "cpu"
    N, V, H, teacher_H = (1024, 32000, 512, 1024) if on_cpu else (8192, 151936, 2048, 4096)
    rows = 256 if on_cpu else 4096
    if options.tiny:
        N, V, H, teacher_H, rows = 16, 300, 16, 32, 16
    cases = []
    for task, dtype, beta in (
        (FROM_HIDDEN, "fp32", 0.5),
        (FROM_HIDDEN, "fp32", 1.0),
        (FROM_HIDDEN, "bf16", 0.5),
        (FROM_LOGITS, "fp32", 0.5),
        (FROM_LOGITS, "bf16", 0.5),
    ):
        tokens = N if task == FROM_HIDDEN else rows
        shape = {"dtype": dtype, "tokens": tokens, "V": V}
        if task == FROM_HIDDEN:
            shape |= {"H": H, "H of the teacher": teacher_H}
        given = (task, tokens, V, H, teacher_H, dtype, beta)
        name = f"{NAMES[beta]} from {'logits' if task == FROM_LOGITS else 'hidden states'}, {dtype}"

        def make(device: torch.device, given: tuple[Any, ...] = given) -> Pair:
            return draw(*given, device)

        cases.append(
            Case(
                name,
                make,
                shape,
                (".*",),
                repeats=3,
                judge=DistillationJudge,
                yardstick="naive PyTorch divergence",
            )
        )
    return {"cases": run_cases(cases, options)}
