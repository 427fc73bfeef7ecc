"""Write the tables of docs/scaling.md, by arithmetic: ``python docs/generate_scaling.py``.

Memory is that of the bundled trainer under FSDP; time is that of the loss on H100s.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from gspo_kernels.hidden.chunk import default_chunk_bytes

PAGE = Path(__file__).with_name("scaling.md")
NODE = 8
"""GPUs that NVLink connects."""
MODEL_OPERATIONS = 4e14
"""Per second, of a model's forward and backward: 40% of an H100's data sheet."""


OPERATIONS, BANDWIDTH = 6.7e14, 0.85 * 3.35e12
"""An H100's, per second: what large 16-bit products are taken to reach, 85% of its memory's data sheet."""


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


def loss(tokens: int, width: int, vocabulary: int, tensor: int, context: int) -> float:
    """Return seconds of the loss and its gradients over ``tensor`` times ``context`` ranks.

    Chunks have up to 4,096 rows, all with a gradient, 16-bit operands, and fp32 logits and sums. Products
    take as long as their operations, and what is between them as long as its bytes. Launches are ignored.
    """
    tokens, vocabulary = -(-tokens // context), -(-vocabulary // tensor)
    rows = min(4096, tokens)
    product = 2 * rows * width * vocabulary / OPERATIONS
    logits = rows * vocabulary / BANDWIDTH
    # log-probs read fp32 logits; the gradient reads them and writes 16-bit rows
    seconds = 3 * product + 10 * logits
    if tensor > 1:
        # dHidden is summed while the chunk's dWeight is multiplied
        seconds += gather(12 * rows, tensor) + max(reduce(4 * rows * width, tensor) - product, 0.0)
    if context > 1:
        # the schedule two_pass: coefficients come after all ranks' sums, and then logits once more
        seconds += product + 4 * logits
    chunks = -(-tokens // rows)
    return (
        chunks * seconds
        + (gather(56, tensor) if tensor > 1 else 0)
        + (2 * reduce(80, context) if context > 1 else 0)
    )


def thousand_table() -> str:
    """70 billion parameters, H = 8,192, from 8 to 1,024 GPUs."""
    lines = [
        "| GPUs | tensor x context x data | longest sequence | tokens of a step | loss, ms | of the step |",
        "|---|---|---|---|---|---|",
    ]
    parameters = 70e9
    for tensor, context, data in ((8, 1, 1), (8, 1, 8), (8, 2, 8), (8, 8, 2), (8, 8, 16)):
        gpus = tensor * context * data
        longest = 65536 * context
        found = loss(longest, 8192, 151936, tensor, context)
        model = 6.0 * parameters * longest / (tensor * context) / MODEL_OPERATIONS
        lines.append(
            f"| {gpus:,} | {tensor} x {context} x {data} | {longest:,} | {longest * data:,} | "
            f"{1e3 * found:.0f} | {found / (model + found):.1%} |"
        )
    return "\n".join(lines)


GIB = 2**30
GPU = 80 * GIB
TOKENS = 8192
"""``update.micro_batch_tokens`` of examples/seven_billion.yaml."""
AT_ONCE, LENGTH = 64, 3072
"""Completions that the model samples at the same time, and tokens of one with its prompt."""
SERVED_SHARE = 0.4
"""``--gpu-memory-utilization`` of a server on the GPUs that train."""


class Shape(NamedTuple):
    """What of a model memory depends on."""

    layers: int
    layer: int  # parameters of one
    rest: int  # of embeddings, head and last norm
    width: int
    mlp: int
    heads: int
    head_dim: int
    kv: int  # width of all keys, or of all values, of a token
    vocabulary: int

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.layers * self.layer + self.rest


def shape_of(config: Any) -> Shape:
    """Count a model of transformers without making its weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = model.model.layers
    layer = sum(p.numel() for p in layers[0].parameters())
    rest = sum(p.numel() for p in model.parameters()) - len(layers) * layer
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(
        layers=len(layers),
        layer=layer,
        rest=rest,
        width=config.hidden_size,
        mlp=config.intermediate_size,
        heads=config.num_attention_heads,
        head_dim=head_dim,
        kv=config.num_key_value_heads * head_dim,
        vocabulary=config.vocab_size,
    )


def qwen2_5_7b(**changes: int) -> Any:
    """The configuration of Qwen2.5-7B, or with changes of another size."""
    from transformers import Qwen2Config

    size = {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }
    return Qwen2Config(**(size | changes), tie_word_embeddings=False)


def recomputed_layer(model: Shape, tokens: int) -> int:
    """Bytes that one layer of this kind keeps for its backward pass, in bf16.

    Per token: gate, its activation, up and their product; the layer's input, normed inputs and outputs of
    attention and MLP, and queries; two inputs of norms in fp32; keys and values; cosines, sines and row
    statistics.
    """
    row = 8 * model.mlp + 20 * model.width + 4 * model.kv + 4 * model.head_dim + 4 * model.heads + 8
    return tokens * row


def training(model: Shape, gpus: int, tokens: int = TOKENS) -> dict[str, tuple[str, float]]:
    """Return bytes on each GPU by what they are for, with the words of their formula.

    FSDP2 with whole layers as units, bf16 products, recomputed activations.
    """
    P, R, L = model.parameters, model.rest, model.layer
    head = model.vocabulary * model.width
    chunk = default_chunk_bytes(4 * model.vocabulary, GPU, "cuda")
    rows = chunk // (4 * model.vocabulary)
    return {
        "weights": ("4 P / n", 4 * P / gpus),
        "gradients": ("4 P / n", 4 * P / gpus),
        "AdamW's two moments": ("8 P / n", 8 * P / gpus),
        "bf16 weights in use: embeddings, head, two layers": ("2 (R + 2 L)", 2 * (R + 2 * L)),
        "gradients of embeddings and head before they are shared out": ("(2 + 4) R", 6 * R),
        "inputs of the layers, bf16": ("2 l T H", 2 * model.layers * tokens * model.width),
        "one layer, computed again": ("T (8 I + 20 H + ...)", recomputed_layer(model, tokens)),
        f"the loss's chunk of logits, {rows:,} rows": (f"4 V x {rows:,}", rows * 4 * model.vocabulary),
        "the loss's fp32 sums for the head, two at most": ("2 x 4 V H", 8 * head),
    }


def sampling(model: Shape) -> dict[str, tuple[str, float]]:
    """Return what the model's own generation takes on each GPU besides shards and moments."""
    cache = AT_ONCE * LENGTH * model.layers * 2 * model.kv * 2
    return {
        "all weights in bf16": ("2 P", 2 * model.parameters),
        f"keys and values of {AT_ONCE} completions of {LENGTH:,} tokens": ("4 l K per token", cache),
    }


def memory_table(model: Shape | None = None) -> str:
    """The memory of a model, by default of Qwen2.5-7B, in GiB."""
    model = model or shape_of(qwen2_5_7b())

    def gib(value: float) -> str:
        return f"{value / GIB:.1f}"

    eight, six, own = training(model, 8), training(model, 6), sampling(model)
    lines = [
        f"P = {model.parameters / 1e9:.2f} billion parameters, R = {model.rest / 1e9:.2f} of them in "
        f"embeddings and head, L = {model.layer / 1e9:.3f} in each of l = {model.layers} layers; "
        f"H = {model.width:,}, I = {model.mlp:,}, V = {model.vocabulary:,}, K = {model.kv}; "
        f"n GPUs, T = {TOKENS:,} tokens in a micro-batch.",
        "",
        "| GiB on each GPU | bytes | n = 8 | n = 6 |",
        "|---|---|---:|---:|",
    ]
    lines += [f"| {what} | {words} | {gib(v)} | {gib(six[what][1])} |" for what, (words, v) in eight.items()]
    sums = [sum(value for _, value in each.values()) for each in (eight, six)]
    lines += [f"| **all of it at the same time** | | **{gib(sums[0])}** | **{gib(sums[1])}** |"]
    reference = 4 * model.parameters
    lines += [f"| a reference (`kl.beta` > 0, DPO) | 4 P / n | {gib(reference / 8)} | {gib(reference / 6)} |"]
    lines += ["", "| GiB on each GPU, while the model samples itself | bytes | |", "|---|---|---:|"]
    lines += [f"| {what} | {words} | {gib(value)} |" for what, (words, value) in own.items()]
    held = 16 * model.parameters / 8  # gradients are given up after each update; counted, to be sure
    lines += [f"| **with what n = 8 keeps** | | **{gib(held + sum(v for _, v in own.values()))}** |"]
    served = SERVED_SHARE * GPU - 2 * model.parameters
    both = sums[0] + SERVED_SHARE * GPU
    lines += [
        "",
        "| GiB on a GPU of 80, where a server samples | weights, bf16 | left for keys and values "
        "| with training |",
        "|---|---:|---:|---:|",
        f"| the same GPUs, `--gpu-memory-utilization {SERVED_SHARE}` | {gib(2 * model.parameters)} | "
        f"{gib(served)} | {gib(both)} |",
        f"| two other GPUs, one half of each layer on each | {gib(model.parameters)} | "
        f"{gib(0.9 * GPU - model.parameters)} | {gib(sums[1])} on the six |",
    ]
    return "\n".join(lines)


TABLES = {
    "memory": memory_table,
    "thousand": thousand_table,
}


def page(text: str) -> str:
    """Return the page with its tables as they should be."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = before + begin + table() + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
