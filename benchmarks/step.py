"""The suite ``step``: one training step of a small model, relative to plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.contestants import PLAIN
from benchmarks.judging import DTYPES, Problem, Verdict, losses, picked, project
from benchmarks.measure import Case, Contestant, Options, run_cases, suite


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
        """Take an optimizer step with a learning rate of 0, to keep rounds identical."""
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


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
        logprobs = picked(hidden @ model.lm_head.weight.double().t(), ids[:, 1:])
    ones = torch.ones(B, T, device=device)
    old = (logprobs + 0.05 * sign.unsqueeze(1)).float()
    inner = Problem("hidden", (), ids[:, 1:].contiguous(), old, sign.float(), ones, logprobs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    return Step(model, optimizer, ids, inner)


class StepJudge:
    """Compares a step's loss and gradients with those of the same model in fp64."""

    def __init__(self, step: Step):
        exact = replace(step, model=copy.deepcopy(step.model).double())
        self.exact, self.plain = self._run(exact), self._run(step)
        self.names = [name for name, _ in step.model.named_parameters()]

    @staticmethod
    def _run(step: Step) -> tuple[Tensor, ...]:
        def plain(problem: Problem, hidden: Tensor, weight: Tensor) -> Tensor:
            logits = project(hidden, weight, "input", native=False)
            return losses(problem, picked(logits, problem.labels))

        leaves = step.leaves()
        found = step.call(plain, leaves)  # in plain PyTorch, whose errors decide what is allowed
        return (found.detach(), *torch.autograd.grad(found.mean(), leaves))

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


@suite("step", "One training step of a small model")
def step(options: Options) -> dict[str, Any]:
    """Qwen3 with random weights, AdamW; all contestants share everything but the loss."""
    sizes = {"cpu": (8, 64, 32000, 256, 2), "gpu": (8, 512, 151936, 1024, 4), "tiny": (2, 8, 300, 64, 1)}
    size, dtype = options.choose(**sizes), options.dtype
    shape = {"dtype": dtype, **dict(zip(("sequences", "length", "V", "H", "layers"), size, strict=True))}
    wanted = (PLAIN, "torch.compile.*", "TRL.*", "Liger.*", "ours, auto", "CCE, unfiltered", "verl.*")
    case = Case("step", lambda device: make(*size, device, DTYPES[dtype]), shape, wanted, judge=StepJudge)
    return {"cases": run_cases([case], options)}
