"""QuACK's version of the product with exponentials in its epilogue, beside ours and ``torch.mm``.

The epilogue is a Python function that QuACK (0.6.5, with cutlass-dsl 4.8) turns into the end of its own
product: the exponentials, their sums by tiles of columns, and each label's logit. What follows in ours, from
sums to log-probs and the label's element, is left out, and so is the flagging of rows. A ragged last tile
also sums columns beyond the last, whose logits are 0: a branch against that makes the compiler spill.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.contestants import package
from benchmarks.products import SINGLE, TILES, Call, Exponentials, Lines, head, mm
from benchmarks.registry import Missing, Options, suite

LOG2_E = 1.4426950408889634
MARGIN = 8
"""How far the offset lies above the label, in powers of two."""
CONFIGURATIONS = {
    "128 x 192, ping-pong": {"tile_m": 128, "tile_n": 192, "cluster_m": 2, "pingpong": True},
    "128 x 256, cooperative": {"tile_m": 128, "tile_n": 256, "cluster_m": 2, "pingpong": False},
}
"""Tiles of Hopper."""


class QuackProduct:
    """The product by QuACK. Each configuration is compiled at its first call."""

    def __init__(self, device: torch.device):
        frontend = package("quack.epilogue.frontend", device, gpu_only=True)
        maths, ops = (package(f"quack.epilogue.{name}", device) for name in ("math", "ops"))
        self._config = package("quack.gemm_config", device).GemmConfig
        if torch.cuda.get_device_capability(device)[0] != 9:
            raise Missing("its tiles are chosen for Hopper")
        label = ops.ColVecLoad("label")
        declared = {
            "ops": {"offset": ops.ColVecLoad("offset")},
            "reduces": {"sums": ops.ColVecReduce("sums")},
            "outs": {"logit": ops.ColVecSelect("logit", idx_op=label)},
            "extra_ops": (label,),
        }

        def rows(acc: Any, offset: Any) -> dict[str, Any]:
            e = maths.pexp2(acc * LOG2_E - offset)
            return {"D": e, "sums": e, "logit": acc}

        def statistics(acc: Any, offset: Any) -> dict[str, Any]:
            return {"sums": maths.pexp2(acc * LOG2_E - offset), "logit": acc}

        self._epilogues = {
            True: frontend.gemm_epilogue(**declared)(rows),
            False: frontend.gemm_epilogue(**declared)(statistics),
        }

    def prepare(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, offsets: Tensor, name: str, store: bool
    ) -> tuple[Call, dict[str, Tensor]]:
        """Return the launch, and what it writes: "D" [N, V] where it stores, "sums" and "logit"."""
        out = {}
        if store:
            out["D"] = hidden.new_empty(len(hidden), -(-len(weight) // 8) * 8)[:, : len(weight)]
        config = self._config(**CONFIGURATIONS[name], is_dynamic_persistent=False)
        operands = {"offset": offsets[None], "label": labels}
        plan = self._epilogues[store].plan(hidden, weight.mT, out=out, config=config, **operands)
        return partial(plan.run, hidden, weight.mT, out=out, **operands), out | plan.scratch


def fault(
    found: dict[str, Tensor], hidden: Tensor, weight: Tensor, labels: Tensor, offsets: Tensor, width: int
) -> str:
    """Compare with fp64; return what is wrong. ``width``: columns of a tile."""
    logits = hidden.double() @ weight.double().t()
    exact = torch.exp2(logits * LOG2_E - offsets.double()[:, None])
    rounding = SINGLE * (float(logits.abs().max()) * hidden.shape[1] ** 0.5 + 8)
    own = logits.gather(1, labels[:, None])[:, 0]
    beyond = -len(weight) % width * torch.exp2(-offsets.double())
    shares = {
        "sums": ((found["sums"].double().sum(-1) / (exact.sum(1) + beyond) - 1).abs() / (4 * rounding)).max(),
        "logits of labels": ((found["logit"].double() - own).abs() / rounding).max(),
    }
    if "D" in found:
        allowed = torch.finfo(found["D"].dtype).eps / 2 + 4 * rounding
        shares["exponentials"] = ((found["D"].double() / exact - 1).abs() / allowed).max()
    wrong = [f"{name} are off by {float(share):.2g} of what is allowed" for name, share in shares.items()
             if not share <= 1]  # fmt: skip
    return "; ".join(wrong)


@suite("quack", "The product with exponentials by QuACK", everything=False)
def quack(options: Options) -> dict[str, Any]:
    """Judge QuACK's product with ragged columns, then time it beside ours and ``torch.mm``."""
    device, lines = options.device, Lines(options)
    try:
        product, ours = QuackProduct(device), Exponentials(device)
    except Missing as missing:
        lines.add("QuACK", f"skipped: {missing}")
        return lines.finish()
    right = []
    for name, about in CONFIGURATIONS.items():
        reasons, width = [], int(about["tile_n"])
        for store in (True, False):
            operands = head(300, 32013, 1024, device)
            offsets = offsets_of(*operands)
            call, found = product.prepare(*operands, offsets, name, store)
            call()
            reasons += [reason] if (reason := fault(found, *operands, offsets, width)) else []
        lines.add(f"{name}: right", "; ".join(reasons))
        right += [] if reasons else [name]
    V, tile = 151936, next(iter(TILES))
    for H in (4096, 1024):
        operands = head(4096, V, H, device)
        hidden, weight, _ = operands
        offsets, out = offsets_of(*operands), torch.empty(4096, V, dtype=hidden.dtype, device=device)
        calls: dict[str, Call] = {"mm": partial(mm, hidden, weight.t(), out)}
        for store, words in ((True, ""), (False, ", statistics")):
            calls[f"ours{words}"] = partial(ours, *operands, tile, store=store)
            for name in right:
                calls[f"{name}{words}"] = product.prepare(*operands, offsets, name, store)[0]
        lines.add_times(f"N=4,096, H={H:,}", calls, 2.0 * 4096 * V * H)
        del out, calls
    return lines.finish()


def offsets_of(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return offsets near the labels' logits, in powers of two."""
    own = (hidden.float() * weight[labels].float()).sum(1)
    return (own * LOG2_E).round() + MARGIN
