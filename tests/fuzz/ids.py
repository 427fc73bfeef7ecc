"""Random calls of what takes no label: selected ids, and distillation losses; see ``tests.fuzz``."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from tests import oracle
from tests.cases import device_of, offsets, scores_of
from tests.fuzz import DTYPES, SINGLE
from tests.fuzz.teachers import draw_form, draw_scored, draw_side, near_a_tie


class Draw:
    """One call, drawn from a seed."""

    def __init__(self, seed: int, largest: int):
        self.dice, self.rng = random.Random(seed), torch.Generator().manual_seed(seed)
        dice = self.dice
        self.linear, self.distills, self.dtype = dice.random() < 0.5, dice.random() < 0.5, dice.choice(DTYPES)
        self.vocabulary = min(largest, max(2, round(math.exp(dice.uniform(0.5, math.log(5000))))))
        self.tokens = dice.choice(((0, 3), (1, 1), (2, 3), (3, 2)))
        self.options: dict[str, Any] = {}
        if dice.random() < 0.5:
            self.options["temperature"] = dice.choice(
                (0.7, 0.5 + torch.rand(self.tokens[0], generator=self.rng))
            )
        if dice.random() < 0.3:
            self.options["softcap"] = dice.choice((3.0, 30.0))
        if dice.random() < 0.3:
            self.options["logit_scale"] = dice.choice((0.3, 1.7, -0.4))
        shape = (self.linear, self.tokens, self.vocabulary)
        self.inputs, self.teacher = (draw_side(dice, self._normal, *shape, self.dtype) for _ in range(2))
        self.budget = {"max_chunk_bytes": dice.choice((1, 2, 5)) * self.vocabulary * 8} if self.linear else {}
        self.upstream = self._normal(*self.tokens, 1)
        (self._distillation if self.distills else self._selection)()

    def __str__(self) -> str:
        shapes = {name: (value.dtype, tuple(value.shape)) for name, value in self.inputs.items()}
        kind = "distillation" if self.distills else "selected ids"
        beside = f"teacher {[*self.teacher]} {self.how} packed {self.packed}" if self.distills else ""
        return f"{kind} {shapes} {self.options} {self.form} {beside}"

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng, dtype=torch.float64)

    def _selection(self) -> None:
        K, V = self.dice.choice((1, 2, 5, 20)), self.vocabulary
        ids = torch.randint(0, V, (*self.tokens, K), generator=self.rng)
        ids[torch.rand(ids.shape, generator=self.rng) < 0.2] = -100
        self.form: dict[str, Any] = {"ids": ids, "normalize_within": self.dice.random() < 0.3}
        if self.dice.random() < 0.3:
            others = torch.randint(0, V, (*self.tokens, 7), generator=self.rng)
            self.form["kept_ids"] = torch.cat([ids, others], -1)
        self.upstream = self._normal(*self.tokens, K + 1)

    def _distillation(self) -> None:
        dice, self.how = self.dice, {}
        self.mask = torch.rand(self.tokens, generator=self.rng) < 0.8
        self.packed = dice.random() < 0.3 and self.tokens[0] > 0
        if dice.random() < 0.3:
            self.teacher = draw_scored(dice, self.rng, self.tokens, self.vocabulary)
            self.form = draw_form(dice, self.vocabulary, over_ids=False) | {"add_tail": dice.random() < 0.5}
            return
        self.form = draw_form(dice, self.vocabulary)
        if dice.random() < 0.3 and self.dtype != torch.float64:
            self.teacher = {name: value.float() for name, value in self.teacher.items()}
        if dice.random() < 0.3:
            self.how = {"temperature": dice.choice((0.6, 1.3)), "logit_scale": dice.choice((0.4, -1.3))}
        if near_a_tie(self.inputs, self.options, self.teacher | self.how | self.form, self.mask):
            del self.form["top_k"], self.form["top_k_of"], self.form["add_tail"]

    def formulas(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Values, and the gradients of their sum times ``upstream``."""
        leaves = {name: value.to(dtype, copy=True).requires_grad_() for name, value in self.inputs.items()}
        scores = scores_of(leaves)
        if self.distills:
            scored = "ids" in self.teacher
            theirs = {} if scored else {name: value.to(dtype) for name, value in self.teacher.items()}
            found = oracle.divergences(
                scores, theirs and scores_of(theirs), self.mask, cu_seqlens=None, student=self.options,
                teacher=self.how, **self.form, **(self.teacher if scored else {}),
            )  # fmt: skip
            values = {"divergence": found}
            loss = (found.unsqueeze(-1) * self.upstream.to(dtype)).sum()
            loss = loss + 0.0 * sum(leaf[:0].sum() for leaf in leaves.values())
        else:
            rows = [oracle.transformed(row, i, **self.options) for i, row in enumerate(scores)]
            values, loss = self._of_ids(torch.stack(rows) if rows else scores)
        grads = torch.autograd.grad(loss, list(leaves.values()))
        named = {f"grad {name}": grad for name, grad in zip(leaves, grads, strict=True)}
        return {name: value.detach() for name, value in {**values, **named}.items()}

    def _of_ids(self, z: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        ids, within = self.form["ids"], self.form["normalize_within"]
        present, V = ids >= 0, self.vocabulary

        def held(chosen: Tensor) -> Tensor:
            found = torch.zeros(*z.shape[:-1], V + 1, dtype=torch.bool)
            return found.scatter_(-1, torch.where(chosen >= 0, chosen, V), True)[..., :V]

        chosen = held(ids)
        kept = held(self.form["kept_ids"]) if "kept_ids" in self.form else torch.ones_like(chosen)
        some = present.any(-1, keepdim=True)
        over = z.masked_fill(some & ~(chosen if within else kept), -math.inf)
        logp = (z - over.logsumexp(-1, keepdim=True)).gather(-1, ids.clamp(min=0))
        values = {"logprobs": torch.where(present, logp, 0.0)}
        loss = (values["logprobs"] * self.upstream[..., :-1].to(z.dtype)).sum()
        if not within:
            left = kept & ~chosen
            known = some.squeeze(-1) & left.any(-1)
            rest = z.masked_fill(known.unsqueeze(-1) & ~left, -math.inf).logsumexp(-1)
            values["tail"] = torch.where(known, rest - over.logsumexp(-1), 0.0)
            loss = loss + (values["tail"] * self._of_tail(known).to(z.dtype)).sum()
        return values, loss

    def _of_tail(self, known: Tensor) -> Tensor:
        self.known = known
        return torch.where(known, self.upstream[..., -1], 0.0)

    def ours(self, backend: str) -> dict[str, Tensor]:
        device = device_of(backend)

        def moved(value: Any) -> Any:
            return value.to(device) if torch.is_tensor(value) else value

        leaves = {name: moved(value.clone()).requires_grad_() for name, value in self.inputs.items()}
        options = {name: moved(value) for name, value in {**self.options, **self.form}.items()}
        options |= {"backend": backend, **self.budget}
        if self.distills:
            theirs = {name if name == "ids" else f"teacher_{name}": x for name, x in self.teacher.items()}
            given = (
                leaves | theirs | {"loss_mask": self.mask, "token_weights": self.upstream.squeeze(-1).float()}
            )
            if self.packed:
                heads = ("weight", "bias", "teacher_weight", "teacher_bias")
                given = {name: x if name in heads else x.flatten(0, 1) for name, x in given.items()}
                rows, length = self.tokens
                given["cu_seqlens"] = offsets((length,) * rows)
            options |= {f"teacher_{name}": value for name, value in self.how.items()}
            function = gk.fused_linear_distillation_loss if self.linear else gk.distillation_loss
            out = function(**{n: moved(x) for n, x in given.items()}, **options, aggregation="sum")
            out.loss.backward()
            values = {"divergence": out.divergence.view(self.tokens)}
        else:
            function = gk.linear_selected_logprobs if self.linear else gk.selected_logprobs
            out = function(**leaves, **options)
            upstream = moved(self.upstream.to(out.logprobs.dtype))
            loss = (out.logprobs * upstream[..., :-1]).sum()
            values = {"logprobs": out.logprobs}
            if out.tail is not None:
                known = moved(self.known)
                values["tail"] = torch.where(known, out.tail, 0.0)
                loss = loss + torch.where(known, out.tail * upstream[..., -1], 0.0).sum()
            loss.backward()
        grads = {f"grad {name}": leaf.grad for name, leaf in leaves.items()}
        return {name: value.detach().cpu() for name, value in {**values, **grads}.items()}


def attempt(drawn: Draw, backend: str) -> None:
    """Run and judge one call: 16 times plain fp32's error, and roundings of the inputs' dtype in between."""
    drawn.upstream = drawn.upstream.float().double()
    # a label's log-prob near 0 is rounded there, and so is what it leaves
    rounds = backend == "reference" and not drawn.distills and drawn.form["ids"].shape[-1] == 1
    if rounds:
        drawn.upstream[..., -1] = 0.0
    exact, rough = drawn.formulas(torch.float64), drawn.formulas(torch.float32)
    finer = torch.finfo(torch.float64).eps / SINGLE.eps if drawn.dtype == torch.float64 else 1.0
    reach = float(drawn.upstream.abs().sum(-1).max()) if drawn.upstream.numel() else 0.0
    answers = drawn.ours(backend)
    if rounds:
        answers.pop("tail", None)
    steep = abs(drawn.options.get("logit_scale", 1.0)) / 0.5
    for name, got in answers.items():
        want = exact[name]
        assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
        if not want.numel():
            continue
        largest, eps = float(want.abs().max()), torch.finfo(got.dtype).eps
        allowed = 16 * finer * float((rough[name].double() - want).abs().max())
        allowed += 64 * finer * SINGLE.eps * (largest + reach) + eps * largest + 2e-7 * (eps > 1e-4)
        if name.startswith("grad ") and drawn.linear and drawn.upstream.numel():
            others = {"grad hidden": "weight", "grad weight": "hidden"}.get(name)
            partner = float(drawn.inputs[others].double().abs().max()) if others else 1.0
            # rows of 16 bits, whose size is the divergence's slope at most, enter the products
            far = float(exact.get("divergence", want.new_ones(1)).abs().max()) + 10.0
            allowed += 8 * eps * reach * steep * partner * far
        found = float((got.double() - want).abs().nan_to_num(math.inf).max())
        assert found <= allowed, f"{name}: error {found:.3e}, allowed {allowed:.3e}, largest {largest:.3e}"
