"""Our matmuls and torch's: with exponentials in the epilogue, and batch-invariant ones."""

from __future__ import annotations

import importlib
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from benchmarks import hidden
from benchmarks.measure import Options, peak_of, suite, time_probe
from benchmarks.tables import Row, aligned, number
from gspo_kernels.core.types import LogitTransform
from gspo_kernels.doctor import gpu_matmuls
from gspo_kernels.hidden.matmul.batch_invariant import batch_invariant_mm

Call = Callable[[], Any]
SINGLE = torch.finfo(torch.float32).eps


def mm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Multiply 16-bit matrices into any dtype; in fp32 on a CPU, where torch does not support it."""
    if out.dtype == a.dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return out.copy_(a.float() @ b.float())


def product_table(lines: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a table with a row per product."""
    rows: list[Row] = [["", "ms", "TFLOP/s", "peak MiB", "error / allowed"]]
    for line in lines:
        if line["reason"]:
            rows.append([line["name"], line["reason"]])
            continue
        timed, peak = "seconds" in line, line.get("peak_bytes")
        seconds = statistics.median(line["seconds"]) if timed else 0.0
        speed = [number(1e3 * seconds), number(line["operations"] / seconds / 1e12)] if timed else ["", ""]
        rows.append([line["name"], *speed, number(peak and peak / 2**20), number(line.get("share"), 2)])
    return rows


class Lines:
    """The record of a suite, one line per matmul, saved after each."""

    def __init__(self, options: Options):
        self.options, self.record = options, {"lines": list[dict[str, Any]](), "table": list[Row]()}

    def add(self, name: str, reason: str = "", **about: Any) -> None:
        """Add a line; with a ``reason`` the product was not timed or is wrong."""
        self.record["lines"].append({"name": name, "reason": reason, **about})
        self.record["table"] = product_table(self.record["lines"])
        self.options.save(self.record)

    def add_times(self, shape: str, calls: Mapping[str, Call], operations: float) -> None:
        """Time calls of so many floating-point operations in turns; the first round does not count."""
        device, seconds = self.options.device, dict[str, list[float]]()
        for repeat in range((self.options.repeats or 5) + 1):
            for name in list(calls)[:: 1 if repeat % 2 else -1]:
                each = time_probe(calls[name], device)
                seconds.setdefault(name, []).extend([each] if repeat else [])
        for name in calls:
            peak = peak_of(calls[name], device)[1]
            about = {"seconds": seconds[name], "peak_bytes": peak, "operations": operations}
            self.add(f"{shape}: {name}", **about)

    def finish(self) -> dict[str, Any]:
        """Print the table and return the record."""
        print(aligned(self.record["table"]))
        return self.record


# --- products in a fixed order


def fixed_by(tensor_maps: bool, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Multiply in a fixed order, on a GPU with or without tensor maps."""
    gk.enable_tensor_maps(tensor_maps)
    return batch_invariant_mm(a, b, out)


@suite("fixed", "Products in a fixed order", everything=False)
def fixed(options: Options) -> dict[str, Any]:
    """Compare 256 rows with fp64 and with the bits of these rows alone, then time next to ``torch.mm``."""
    device, lines = options.device, Lines(options)
    N, V, H = (130, 300, 16) if options.tiny else (4096, 151936, 4096)
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    ways = {"": False} | ({", tensor maps": True} if device.type == "cuda" else {})
    hidden, weight, rows = draw(N, H), draw(V, H), draw(N, V)
    for name, a, b in (
        ("logits", hidden, weight.t()), ("dHidden", rows, weight), ("dWeight", rows.t(), hidden)
    ):  # fmt: skip
        out, few = torch.empty(len(a), b.shape[1], device=device), a[:256]
        exact = few.double() @ b.double()
        calls: dict[str, Call] = {"mm": partial(mm, a, b, out)}
        for way, tensor_maps in ways.items():
            product = partial(fixed_by, tensor_maps)
            error, allowed = (
                float((each(few, b, torch.empty(exact.shape, device=device)) - exact).norm() / exact.norm())
                for each in (product, mm)
            )
            alone = product(few, b, torch.empty(exact.shape, device=device))
            same = torch.equal(product(a, b, out)[:256], alone)
            reason = "" if same else "256 rows alone have other bits"
            lines.add(f"{name}{way}: right", reason, share=error / (2 * allowed + SINGLE))
            calls[f"fixed{way}"] = partial(product, a, b, out)
        lines.add_times(name, calls, 2.0 * N * V * H)
    return lines.finish()


# --- the product with exponentials in its epilogue


def load_product(device: torch.device) -> Call | None:
    """Return the package's matmul: (hidden, weight, labels, store=True) -> e [N, V], factors and residuals
    [N], and log-probs [N], or only log-probs without ``store``; None without tensor maps.
    """
    if device.type != "cuda":
        return None
    module = importlib.import_module("gspo_kernels.backends.triton.exponentials")

    def product(hidden: Tensor, weight: Tensor, labels: Tensor, store: bool = True) -> tuple[Any, ...]:
        out = None
        if store:
            out = hidden.new_empty(len(hidden), -(-len(weight) // 8) * 8)[:, : len(weight)]
        head = module.exponentials(hidden, weight, None, labels[None], LogitTransform(), -100, out)
        return (out, head.factors, head.label_residual, head.stats.logprobs[0])

    return product


def head(N: int, V: int, H: int, device: torch.device) -> tuple[Tensor, ...]:
    """Draw hidden states, a weight and labels, among them the first and the last one."""
    problem = hidden.draw("scoring", N, V, H, 1, torch.bfloat16, device)
    labels = problem.labels[0]
    labels[:2] = torch.tensor([0, V - 1])
    return problem.inputs[0][0], problem.inputs[1], labels


def make_special(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    """Make log-probs of labels about -60, -100, -125 and -200 nats, and two rows infinite."""
    for row, nats in enumerate((60.0, 100.0, 125.0, 200.0), start=2):
        direction = weight[labels[row]].float()
        hidden[row] = (-nats * direction / direction.square().sum()).to(hidden.dtype)
    hidden[6, 0], hidden[7, 0] = torch.inf, torch.nan


def faults(found: Sequence[Tensor], hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[float, str]:
    """Compare up to 256 rows with fp64: return the worst share of what is allowed, and what is wrong."""
    rows = slice(0, 256)
    e, factors, label_residual, logprobs = (one[rows] for one in found)
    logits = hidden[rows].double() @ weight.double().t()
    logp, label = logits.log_softmax(-1), labels[rows, None]
    own = logp.gather(1, label)[:, 0]
    there = own.isfinite()
    if not torch.equal(there, logprobs.isfinite()):
        return torch.inf, "other log-probs than fp64's are finite"
    wanted = -logp.exp().scatter_add(1, label, -torch.ones_like(own)[:, None])
    got = e.double().scatter_add(1, label, label_residual.double()[:, None]) * factors.double()[:, None]
    rounding = logits[there].abs().max() * SINGLE * hidden.shape[1] ** 0.5 + 8 * SINGLE
    off = ((got - wanted).abs() / (wanted.abs() + 2.0**-60))[there]
    at_label = off.gather(1, label[there])
    shares = {
        "rows": off.scatter(1, label[there], 0.0).max() / (torch.finfo(e.dtype).eps / 2 + 2 * rounding),
        "labels": at_label.max() / (4 * rounding),
        "log-probs": (logprobs.double() - own)[there].abs().max() / rounding,
    }
    worst = max(shares, key=lambda name: float(shares[name]))
    share = float(shares[worst])
    return share, "" if share <= 1 else f"{worst} are off by {share:.2g} of what is allowed"


@suite("exponentials", "The product with exponentials in its epilogue", everything=False)
def exponentials(options: Options) -> dict[str, Any]:
    """Judge the product on ragged, special and repeated rows; then time it next to ``torch.mm``."""
    device, lines = options.device, Lines(options)
    product = load_product(device)
    if product is None:
        lines.add("ours", "skipped: it loads and stores by the tensor maps of a GPU")
        return lines.finish()
    gk.enable_tensor_maps(True)
    for line in gpu_matmuls(device):
        lines.add("gspo doctor", line.strip())
    reasons, shares = [], []
    for N, V, H in (
        ((20, 300, 32), (300, 1001, 48)) if options.tiny else ((300, 32008, 1024), (257, 50257, 512))
    ):
        operands = head(N, V, H, device)
        for special in (False, True):
            if special:
                make_special(*operands)
            found = [one.clone() for one in product(*operands)]
            share, reason = faults(found, *operands)
            for _ in range(2 if options.tiny else 20):
                pairs = zip(found, product(*operands), strict=True)
                # special rows may hold NaN, which is no other result
                if not all(torch.equal(*(one.nan_to_num(7.0) for one in pair)) for pair in pairs):
                    reason = reason or "another run gives other bits"
            reasons += [f"{reason} at N={N}, V={V}, H={H}"] if reason else []
            shares.append(share)
    lines.add("right", "; ".join(reasons), share=max(shares))
    widths, counts, V = ((32,), (20,), 300) if options.tiny else ((4096, 1024, 2048), (4096, 8192), 151936)
    for N, H in itertools.product(counts, widths):
        operands = head(N, V, H, device)
        hidden, weight, _ = operands
        outs = torch.empty(N, V, dtype=hidden.dtype, device=device), torch.empty(N, V, device=device)
        calls: dict[str, Call] = {f"mm to {out.dtype}": partial(mm, hidden, weight.t(), out) for out in outs}
        if not reasons:
            calls["ours"] = partial(product, *operands)
            calls["ours, statistics"] = partial(product, *operands, store=False)
        lines.add_times(f"N={N:,}, H={H:,}", calls, 2.0 * N * V * H)
        del outs, calls
    return lines.finish()
