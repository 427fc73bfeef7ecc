"""The suite ``rows``: forward and backward of a backbone over one prompt and its completions.

Each completion behind a prompt of its own, padded or packed into one row, against a row in which the prompt
stands once. The loss is the mean square of the hidden states that predict completion tokens, so that the head
takes no part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import problem as gspo
from benchmarks.judge import Verdict
from benchmarks.measure import Case, run_cases
from benchmarks.registry import Contestant, Options, contestant, suite

PADDED = "padded rows"
SIZES = ((128, 64, 64), (512, 64, 64), (1024, 64, 64), (64, 16, 256), (512, 16, 256))
"""Tokens of the prompt, of the shortest and of the longest completion."""


@dataclass
class Rows:
    """A model, a prompt and completions, and what a ``Problem`` offers to those who measure."""

    model: Any
    prompt: Tensor
    group: list[Tensor]

    task = "rows"

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.model.model.embed_tokens.weight,)

    def layout(self, name: str) -> Rows:
        return self

    def leaves(self, copy: bool = False) -> tuple[Tensor, ...]:
        return tuple(self.model.model.parameters())

    def call(self, compute: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> Tensor:
        return compute(self).square().mean()

    def finish(self, leaves: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]) -> None:
        """Nothing is updated."""


def make(prompt: int, lengths: list[int], H: int, layers: int, device: torch.device, dtype: str) -> Rows:
    """A Qwen3 with random weights, and tokens drawn at random."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024, hidden_size=H, intermediate_size=3 * H, num_hidden_layers=layers,
        num_attention_heads=max(1, H // 64), num_key_value_heads=max(1, H // 128), head_dim=min(64, H),
        max_position_embeddings=1 << 16,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(device, gspo.DTYPES[dtype]).train()
    first, *group = (torch.randint(1, 1024, (length,), device=device) for length in (prompt, *lengths))
    return Rows(model, first, group)


# --- contestants: rows -> hidden states [N, H] that predict the completions


def padded(rows: Rows) -> Tensor:
    """Rows padded on the right."""
    sequences = [torch.cat([rows.prompt, completion[:-1]]) for completion in rows.group]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    hidden = rows.model.model(input_ids=ids, use_cache=False).last_hidden_state[:, len(rows.prompt) - 1 :]
    return torch.cat([row[: len(completion)] for row, completion in zip(hidden, rows.group, strict=True)])


@contestant(PADDED, "rows")
def _load_padded(device: torch.device) -> Callable[..., Tensor]:
    return padded


@contestant("packed, mask by transformers", "rows")
def _load_packed_by_positions(device: torch.device) -> Callable[..., Tensor]:
    """As transformers does it: sequences are found by their positions, the mask has T x T entries."""
    from gspo_kernels.trainer.batch import packed_inputs

    def call(rows: Rows) -> Tensor:
        row = packed_inputs(rows.model, [rows.prompt] * len(rows.group), rows.group)
        del row["attention_mask"]
        counted = row["position_ids"][0] >= len(rows.prompt) - 1
        found: Tensor = rows.model.model(**row, use_cache=False).last_hidden_state[0, counted]
        return found

    return call


@contestant("ours, packed rows of a backbone", "rows", ours=True)
def _load_packed(device: torch.device) -> Callable[..., Tensor]:
    from gspo_kernels.trainer.batch import packed_hidden_states

    return lambda rows: packed_hidden_states(rows.model, [rows.prompt] * len(rows.group), rows.group).hidden


@contestant("ours, a shared prompt", "rows", ours=True)
def _load_shared(device: torch.device) -> Callable[..., Tensor]:
    from gspo_kernels.trainer.batch import shared_prefix_hidden_states

    return lambda rows: (
        shared_prefix_hidden_states(rows.model, [rows.prompt] * len(rows.group), rows.group).hidden
    )


class RowsJudge:
    """Holds all gradients together against those of padding in fp64."""

    def __init__(self, rows: Rows) -> None:
        exact = replace(rows, model=copy.deepcopy(rows.model).double())
        self.exact = torch.autograd.grad(exact.call(padded, ()), exact.leaves())
        plain = self._distance(torch.autograd.grad(rows.call(padded, ()), rows.leaves()))
        size = float(torch.stack([one.norm() for one in self.exact]).norm())
        self.allowed = 2 * plain + torch.finfo(rows.inputs[0].dtype).eps * size

    def _distance(self, gradients: tuple[Tensor, ...]) -> float:
        errors = [(got.double() - wanted).norm() for got, wanted in zip(gradients, self.exact, strict=True)]
        return float(torch.stack(errors).norm())

    def verdict(self, contestant: Contestant, loss: Tensor, gradients: tuple[Tensor, ...]) -> Verdict:
        """The norm of the error over all parameters."""
        return Verdict({"gradients": self._distance(gradients)}, {"gradients": self.allowed})


@suite("rows", "Rows of the backbone: padded, packed, a shared prompt", everything=False)
def rows(options: Options) -> dict[str, Any]:
    """Qwen3 with random weights; transformers' own mask only where a prompt has 512 tokens."""
    on_cpu = options.device.type == "cpu"
    H, layers, group = (256, 4, 8) if on_cpu else (1024, 12, 16)
    sizes = SIZES
    if options.tiny:
        H, layers, group, sizes = 64, 1, 3, ((8, 4, 4), (8, 2, 6))
    dtype = "fp32" if on_cpu else "bf16"
    cases = []
    for prompt, shortest, longest in sizes:
        lengths = torch.linspace(shortest, longest, group).round().int().tolist()
        shape = {
            "dtype": dtype, "H": H, "layers": layers, "prompt": prompt, "completions": group,
            "tokens padded": group * (prompt + longest - 1), "packed": sum(prompt + n - 1 for n in lengths),
            "shared": prompt + sum(n - 1 for n in lengths),
        }  # fmt: skip
        masked = (".*",) if (prompt, shortest) == (512, 64) or options.tiny else ("(?!.*transformers).*",)
        name = f"prompt {prompt}, completions {shortest} to {longest}"

        def draw(device: torch.device, prompt: int = prompt, lengths: list[int] = lengths) -> Rows:
            return make(prompt, lengths, H, layers, device, dtype)

        cases.append(Case(name, draw, shape, masked, judge=RowsJudge, yardstick=PADDED))
    return {"cases": run_cases(cases, options)}
