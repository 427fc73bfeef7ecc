"""The suite ``bandwidth``: every kernel that walks rows of logits, beside a copy that moves as many bytes.

A kernel's bytes are those that it must move, each logit read and each gradient written once: a second walk of
a row that a cache serves is free. Kernel and copy take turns, so that both see the same clocks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Clock
from benchmarks.registry import Options, suite
from benchmarks.resident import give_memory_back
from benchmarks.tables import Row, aligned, number
from gspo_kernels.types import LogitTransform, RatioClip, RowStats

SECONDS = 40.0
"""How long the suite may take; kernels that were not reached are listed."""

PLAIN = LogitTransform()
WARM = LogitTransform(temperature=0.7)
BENT = LogitTransform(1.0, 30.0, 0.7)
_FORM = RatioClip(math.log1p(-3e-4), math.log1p(4e-4), math.inf, False, "sequences", 1.0)
_IGNORE = -100


@dataclass(frozen=True)
class Walk:
    """One kernel on one kind of rows.

    Attributes:
        name: how the table calls it.
        dtype: of the logits.
        reads, writes: bytes per logit that it must move.
        call: what launches it, given the rows.
        vocabulary: of the full size.
    """

    name: str
    dtype: torch.dtype
    reads: int
    writes: int
    call: Callable[[Rows], Any]
    vocabulary: int = 151936


class Rows:
    """Logits [B, T, V] with what a kernel is given beside them."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device):
        B, T, V = shape
        generator = torch.Generator(device).manual_seed(0)
        self.logits = torch.empty(shape, dtype=dtype, device=device)
        for sequence in self.logits:
            sequence.normal_(std=3.0, generator=generator)
        self.labels = torch.randint(V, (B, T), generator=generator, device=device)
        self.old = torch.full((B, T), -4.0, device=device)
        self.ones = torch.ones(B, T, device=device)
        self.advantages = torch.ones(B, device=device)
        self._gradient: Tensor | None = None
        # statistics of no row in particular: a walk takes as long whatever they are
        self.stats = RowStats(self.old, -self.old.double(), -self.old)

    @property
    def gradient(self) -> Tensor:
        """Memory of the logits' shape beside them."""
        if self._gradient is None:
            self._gradient = torch.empty_like(self.logits)
        return self._gradient

    def forward(self, transform: LogitTransform = PLAIN, entropy: bool = False) -> None:
        """Statistics of the rows."""
        from gspo_kernels import kernels

        kernels.logprobs_forward(self.logits, self.labels, transform, ignore_index=_IGNORE, entropy=entropy)

    def ratio(self) -> None:
        """The whole forward of GSPO."""
        from gspo_kernels import kernels

        options = dict.fromkeys(("weights", "lengths", "normalizer", "cu_seqlens"))
        terms = (self.logits, self.labels, self.old, self.advantages, _FORM, PLAIN)
        kernels.sequence_ratio_forward(*terms, ignore_index=_IGNORE, **options)

    def backward(
        self, out: Tensor | None = None, transform: LogitTransform = PLAIN, entropy: bool = False
    ) -> None:
        """The gradient, given statistics."""
        from gspo_kernels import kernels

        gradients = (self.ones, self.ones if entropy else None, None)
        kernels.logprobs_backward(
            self.logits, self.labels, self.stats, *gradients, transform, ignore_index=_IGNORE,
            out=self.gradient if out is None else out,
        )  # fmt: skip

    def in_one_pass(self, out: Tensor | None = None) -> None:
        """Statistics and the gradient."""
        from gspo_kernels import kernels

        kernels.logprobs_and_grad(
            self.logits, self.labels, self.ones, PLAIN, ignore_index=_IGNORE,
            out=self.gradient if out is None else out,
        )  # fmt: skip

    def scale(self) -> None:
        """A gradient times an upstream one; half, so that it may be repeated."""
        from gspo_kernels import kernels

        kernels.scale_(self.logits, torch.full((), 0.5, device=self.logits.device))

    @property
    def narrow(self) -> Tensor:
        """bf16 rows in the memory of fp32 logits."""
        return self.logits.view(torch.bfloat16)[..., : self.logits.shape[-1]]


BF16, FP32 = torch.bfloat16, torch.float32
WALKS = (
    Walk("forward with ratio, bf16", BF16, 2, 0, Rows.ratio),
    Walk("forward with ratio, fp32", FP32, 4, 0, Rows.ratio),
    Walk("forward with ratio, bf16, rows anywhere", BF16, 2, 0, Rows.ratio, 151669),
    Walk("log-probs, bf16", BF16, 2, 0, Rows.forward),
    Walk("log-probs, fp32", FP32, 4, 0, Rows.forward),
    Walk("log-probs, bf16, temperature", BF16, 2, 0, lambda rows: rows.forward(WARM)),
    Walk("log-probs, bf16, softcap", BF16, 2, 0, lambda rows: rows.forward(BENT)),
    Walk("log-probs, bf16, entropy", BF16, 2, 0, lambda rows: rows.forward(entropy=True)),
    Walk("backward, bf16", BF16, 2, 2, Rows.backward),
    Walk("backward, bf16, entropy", BF16, 2, 2, lambda rows: rows.backward(entropy=True)),
    Walk("backward, bf16, in place", BF16, 2, 2, lambda rows: rows.backward(rows.logits)),
    Walk("backward, bf16, rows anywhere", BF16, 2, 2, Rows.backward, 151669),
    Walk("backward, fp32", FP32, 4, 4, Rows.backward),
    Walk("backward, fp32 to bf16 in place", FP32, 4, 2, lambda rows: rows.backward(rows.narrow)),
    Walk("one pass on-policy, bf16", BF16, 2, 2, Rows.in_one_pass),
    Walk("one pass on-policy, bf16, rows anywhere", BF16, 2, 2, Rows.in_one_pass, 151669),
    Walk("one pass on-policy, bf16, in place", BF16, 2, 2, lambda rows: rows.in_one_pass(rows.logits)),
    Walk("one pass, fp32 to bf16 in place", FP32, 4, 2, lambda rows: rows.in_one_pass(rows.narrow)),
    Walk("scale, bf16", BF16, 2, 2, Rows.scale),
)


def measure(walk: Walk, options: Options) -> dict[str, Any]:
    """Seconds of the kernel and of the copy, in turns."""
    device = options.device
    shape = (2, 3, 300) if options.tiny else (8, 1024, walk.vocabulary)
    line: dict[str, Any] = {"name": walk.name, "rows": shape[0] * shape[1], "vocabulary": shape[2]}
    rows = Rows(shape, walk.dtype, device)
    moved = rows.logits.numel() * (walk.reads + walk.writes)
    # read once and written once: half of the bytes each
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def both(clock: Clock) -> None:
        clock.mark()
        target.copy_(source)
        clock.mark()
        walk.call(rows)
        clock.mark()

    both(Clock(device))
    clocks = [Clock(device) for _ in range(options.repeats or (2 if options.tiny else 9))]
    for clock in clocks:
        both(clock)
    copies, kernels = zip(*(clock.seconds() for clock in clocks), strict=True)
    line["bytes"] = moved
    line["seconds"], line["copy_seconds"] = statistics.median(kernels), statistics.median(copies)
    line["lowest"], line["highest"] = min(kernels), max(kernels)
    line["bandwidth"], line["copy_bandwidth"] = moved / line["seconds"], moved / line["copy_seconds"]
    line["share_of_a_copy"] = line["copy_seconds"] / line["seconds"]
    return line


@suite("bandwidth", "Bandwidth of every kernel", everything=False)
def bandwidth(options: Options) -> dict[str, Any]:
    """Needs a GPU, or Triton's interpreter and a tiny size."""
    start = time.perf_counter()
    lines: list[dict[str, Any]] = []
    for walk in WALKS:
        if options.cases and not any(part in walk.name for part in options.cases):
            continue
        if time.perf_counter() - start > SECONDS and not options.tiny:
            lines.append({"name": walk.name, "missing": "left out: no time left"})
            continue
        try:
            lines.append(measure(walk, options))
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0][:200]
            lines.append({"name": walk.name, "missing": f"{type(error).__name__}: {reason}"})
        give_memory_back()
    rows: list[Row] = [["kernel", "GB/s", "a copy's GB/s", "share of a copy"]]
    for line in lines:
        if "missing" in line:
            rows.append([line["name"], line["missing"], "", ""])
        else:
            rates = [number(line[which] / 1e9) for which in ("bandwidth", "copy_bandwidth")]
            rows.append([line["name"], *rates, number(line["share_of_a_copy"])])
    print(aligned(rows))
    return {"lines": lines, "table": rows}
