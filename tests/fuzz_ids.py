"""Random calls of what takes no label: selected ids, and distillation losses; see ``tests.fuzz``."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from tests.cases import device_of
from tests.test_distillation import direct, over_ids

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SINGLE = torch.finfo(torch.float32)


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
        self.inputs, self.teacher = self._side(), self._side("teacher_")
        self.budget = {"max_chunk_bytes": dice.choice((1, 2, 5)) * self.vocabulary * 8} if self.linear else {}
        self.upstream = self._normal(*self.tokens, 1)
        (self._distillation if self.distills else self._selection)()

    def __str__(self) -> str:
        shapes = {name: (value.dtype, tuple(value.shape)) for name, value in self.inputs.items()}
        return f"{'distillation' if self.distills else 'selected ids'} {shapes} {self.options} {self.form}"

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng, dtype=torch.float64)

    def _side(self, prefix: str = "") -> dict[str, Tensor]:
        size, width = self.dice.choice((0.1, 2.0, 10.0)), self.dice.choice((1, 3, 16))
        if not self.linear:
            return {f"{prefix}logits": (size * self._normal(*self.tokens, self.vocabulary)).to(self.dtype)}
        found = {
            f"{prefix}hidden": self._normal(*self.tokens, width).to(self.dtype),
            f"{prefix}weight": (size / width**0.5 * self._normal(self.vocabulary, width)).to(self.dtype),
        }
        if self.dice.random() < 0.5:
            found[f"{prefix}bias"] = self._normal(self.vocabulary).to(self.dtype)
        return found

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
        self.form = {"beta": self.dice.choice((0.0, 0.1, 0.5, 1.0))}
        if self.dice.random() < 0.4:
            self.form["top_k"] = min(self.vocabulary, self.dice.choice((1, 3, 30)))
            self.form["add_tail"] = self.dice.random() < 0.5
            self.form["top_k_of"] = self.dice.choice(("teacher", "student"))
        self.form["loss_mask"] = torch.rand(self.tokens, generator=self.rng) < 0.8
        if self.dice.random() < 0.3 and self.dtype != torch.float64:
            self.teacher = {name: value.float() for name, value in self.teacher.items()}

    def _z(self, side: dict[str, Tensor], prefix: str, transformed: bool) -> Tensor:
        x = side.get(f"{prefix}logits")
        if x is None:
            x = side[f"{prefix}hidden"] @ side[f"{prefix}weight"].T + side.get(f"{prefix}bias", 0.0)
        options = self.options if transformed else {}
        z = x * options.get("logit_scale", 1.0)
        if "softcap" in options:
            z = options["softcap"] * torch.tanh(z / options["softcap"])
        heat = self.options.get("temperature", 1.0)
        return z / (heat.to(z.dtype).view(-1, 1, 1) if torch.is_tensor(heat) else heat)

    def formulas(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Values, and the gradients of their sum times ``upstream``."""
        leaves = {name: value.to(dtype, copy=True).requires_grad_() for name, value in self.inputs.items()}
        z = self._z(leaves, "", True)
        if self.distills:
            zt = self._z({name: value.to(dtype) for name, value in self.teacher.items()}, "teacher_", False)
            beta, top_k, mask = self.form["beta"], self.form.get("top_k", 0), self.form["loss_mask"]
            if top_k:
                ids = (z if self.form["top_k_of"] == "student" else zt).topk(top_k).indices
                found = over_ids(z, zt, ids, beta, self.form["add_tail"])
            else:
                found = direct(z.log_softmax(-1), zt.log_softmax(-1), beta)
            values = {"divergence": torch.where(mask, found, 0.0)}
            loss = (values["divergence"].unsqueeze(-1) * self.upstream.to(dtype)).sum()
        else:
            values, loss = self._of_ids(z)
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
            theirs = {name: moved(value) for name, value in self.teacher.items()}
            function = gk.fused_linear_distillation_loss if self.linear else gk.distillation_loss
            weights = moved(self.upstream.squeeze(-1).float())
            out = function(**leaves, **theirs, **options, token_weights=weights, aggregation="sum")
            out.loss.backward()
            values = {"divergence": out.divergence}
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
    exact, rough = drawn.formulas(torch.float64), drawn.formulas(torch.float32)
    finer = torch.finfo(torch.float64).eps / SINGLE.eps if drawn.dtype == torch.float64 else 1.0
    reach = float(drawn.upstream.abs().sum(-1).max()) if drawn.upstream.numel() else 0.0
    answers = drawn.ours(backend)
    if backend == "reference" and not drawn.distills and drawn.form["ids"].shape[-1] == 1:
        answers.pop("tail", None)  # a label's log-prob near 0 is rounded there, and so is what it leaves
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
