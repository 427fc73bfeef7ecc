"""Write the tables of docs/scaling.md, by arithmetic: ``python docs/generate_scaling.py``."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.estimate import BANDWIDTH, OPERATIONS, Step

PAGE = Path(__file__).with_name("scaling.md")
NODE = 8
"""GPUs that NVLink connects."""
MODEL_OPERATIONS = 4e14
"""Per second, of a model's forward and backward: 40% of an H100's data sheet."""


class Link(NamedTuple):
    """Bytes per second and direction, and seconds until the first byte arrives."""

    bandwidth: float
    latency: float


INSIDE, BETWEEN = Link(0.8 * 450e9, 10e-6), Link(0.8 * 50e9, 25e-6)


def link(ranks: int) -> Link:
    """The slowest that a group of so many ranks goes over."""
    return INSIDE if ranks <= NODE else BETWEEN


def gather(size: float, ranks: int) -> float:
    """Seconds until every rank has every other's bytes."""
    over = link(ranks)
    return math.log2(ranks) * over.latency + size * (ranks - 1) / over.bandwidth


def reduce(size: float, ranks: int) -> float:
    """Seconds until every rank has the sum, by a ring."""
    over = link(ranks)
    return 2 * math.log2(ranks) * over.latency + 2 * size * (ranks - 1) / ranks / over.bandwidth


class Loss(NamedTuple):
    """The loss and its gradients of one rank: seconds of work, and seconds of waiting for others."""

    work: float
    waits: float

    @property
    def seconds(self) -> float:
        """Of both."""
        return self.work + self.waits


def loss(step: Step, tensor: int = 1, context: int = 1) -> Loss:
    """Of ``step.tokens`` tokens of a group of ``tensor`` times ``context`` ranks."""
    part = replace(step, tokens=-(-step.tokens // context), vocabulary=-(-step.vocabulary // tensor))
    rows = min(part.chunk_rows, part.tokens)
    part = replace(part, chunk_rows=rows)
    product = part.operations / OPERATIONS
    work, waits = part.over_products(True) * 3 * product * part.chunks, 0.0
    if tensor > 1:
        # dHidden is summed while the chunk's dWeight is multiplied
        beyond = max(reduce(4.0 * rows * part.width, tensor) - product, 0.0)
        waits += gather(56, tensor) + part.chunks * (gather(12.0 * rows, tensor) + beyond)
    if context > 1:
        # the schedule two_pass: coefficients come after all ranks' sums, and then logits once more
        work += part.chunks * (product + 4.0 * rows * part.vocabulary / BANDWIDTH)
        waits += 2 * reduce(80, context)
    return Loss(work, waits)


def tensor_table() -> str:
    """16,384 tokens, the vocabulary over 1 to 16 ranks."""
    lines = [
        "| ranks | work, ms | waits, ms | tokens per second | of ideal |",
        "|---|---|---|---|---|",
    ]
    alone = loss(Step())
    for ranks in (1, 2, 4, 8, 16):
        found = loss(Step(), tensor=ranks)
        share = alone.seconds / ranks / found.seconds
        where = "" if ranks <= NODE else ", two nodes"
        rate = Step().tokens / found.seconds
        times = f"{1e3 * found.work:.1f} | {1e3 * found.waits:.2f}"
        lines.append(f"| {ranks}{where} | {times} | {rate:,.0f} | {share:.0%} |")
    return "\n".join(lines)


def context_table() -> str:
    """One sequence of 1,048,576 tokens over 1 to 64 ranks."""
    lines = [
        "| ranks | tokens of a rank | work, ms | waits, ms | tokens per second |",
        "|---|---|---|---|---|",
    ]
    long = Step(tokens=2**20)
    for ranks in (1, 2, 4, 8, 16, 32, 64):
        found = loss(long, context=ranks)
        rate = long.tokens / found.seconds
        lines.append(
            f"| {ranks} | {long.tokens // ranks:,} | {1e3 * found.work:,.0f} | {1e3 * found.waits:.2f} | "
            f"{rate:,.0f} |"
        )
    return "\n".join(lines)


def thousand_table() -> str:
    """70 billion parameters, H = 8,192, from 8 to 1,024 GPUs."""
    lines = [
        "| GPUs | tensor x context x data | longest sequence | tokens of a step | loss, ms | of the step |",
        "|---|---|---|---|---|---|",
    ]
    parameters = 70e9
    for tensor, context, data in ((8, 1, 1), (8, 1, 8), (8, 2, 8), (8, 8, 2), (8, 8, 16)):
        gpus = tensor * context * data
        step = Step(tokens=65536 * context, width=8192)
        found = loss(step, tensor, context)
        tokens = step.tokens * data
        model = 6.0 * parameters * step.tokens / (tensor * context) / MODEL_OPERATIONS
        whole = model + found.seconds
        lines.append(
            f"| {gpus:,} | {tensor} x {context} x {data} | {step.tokens:,} | {tokens:,} | "
            f"{1e3 * found.seconds:.0f} | {found.seconds / whole:.1%} |"
        )
    return "\n".join(lines)


TABLES = {"tensor": tensor_table, "context": context_table, "thousand": thousand_table}


def page(text: str) -> str:
    """The page with its tables written anew."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = before + begin + table() + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
