"""A prompt encoded once for all of its completions (Prefix Grouper, arXiv 2506.05433).

A group is one row: the prompt, then its completions side by side, each with positions that go on from the
prompt's. A mask lets a completion see the prompt and itself only, so that every hidden state and every
gradient is what the completion would have had alone behind its prompt; the prompt's gradient is the sum over
its completions, as it is without sharing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gspo_kernels.integrations.layouts import pack
from gspo_kernels.trainer.input_errors import ModelError
from gspo_kernels.trainer.rows.attention import Row, attention_masks, implementation_of, positions_of, ranges
from gspo_kernels.trainer.rows.packing import (
    LossInputs,
    Tokens,
    check_sequences,
    compare_with_alone,
    last_hidden_states,
    probe,
)


def shared_prefix_tokens(prompt: int, completions: Sequence[int]) -> int:
    """Return how many tokens a group's row has: the prompt's once, and all but the last of each completion.

    The last one predicts nothing.
    """
    return prompt + sum(length - 1 for length in completions)


def shared_prefix_hidden_states(model: Any, prompts: Tokens, completions: Sequence[Tokens]) -> LossInputs:
    """Run the backbone over each prompt once, followed by all of its completions.

    Equal to running every completion behind its own copy of the prompt, values and gradients, up to rounding.
    Groups, a prompt [P_g] and its completions [C_i] each, none empty, are the rows of a batch, padded to the
    longest. The model is plain, with a PEFT adapter, or wrapped (DDP); its own ``__call__`` runs.

    Raises:
        ModelError: a model that a mask does not describe exactly, or whose attention takes none.
        ValueError: empty or mismatched sequences.
    """
    if len(prompts) != len(completions):
        raise ValueError(f"completions: got {len(completions)} groups for {len(prompts)} prompts")
    for prompt, group in zip(prompts, completions, strict=True):
        check_sequences([prompt] * len(group), group)
    if "flash" in (name := implementation_of(model)):
        needs = "and a shared prompt needs one; load the model with attn_implementation='sdpa'"
        raise ModelError(f"{name} takes no mask, {needs}")
    device = prompts[0].device
    pairs = list(zip(prompts, completions, strict=True))
    rows = [Row(len(prompt), [len(completion) - 1 for completion in group]) for prompt, group in pairs]
    tokens = [torch.cat([prompt, *(completion[:-1] for completion in group)]) for prompt, group in pairs]
    inputs = {
        "input_ids": pad_sequence(tokens, batch_first=True),
        "position_ids": positions_of(rows, device),
        "attention_mask": attention_masks(model, rows, device),
    }
    hidden = last_hidden_states(model, inputs)
    predicting = _predicting(rows, hidden.shape[1], device)
    return LossInputs(hidden.flatten(0, 1)[predicting], *pack(list(chain(*completions))))


def check_shared_prefix(model: Any) -> None:
    """Refuse a model whose hidden states behind a shared prompt differ from those of the sequences alone.

    Runs a few tokens, once; before the model is wrapped for several devices.
    """
    prompts, completions = probe(model, [5, 2], [3, 1, 4, 2, 5])
    groups, each = [completions[:3], completions[3:]], [prompts[0]] * 3 + [prompts[1]] * 2
    compare_with_alone(model, lambda: shared_prefix_hidden_states(model, prompts, groups), each, completions)


def _predicting(rows: Sequence[Row], T: int, device: torch.device) -> Tensor:
    """Return which of the [rows * T] positions predicts each completion token, [N].

    The prompt's last one predicts the first token of every completion, the completion's own all others.
    """
    starts, lengths = [], []
    for number, row in enumerate(rows):
        first = number * T + row.prefix
        for length in row.lengths:
            starts += [number * T + row.prefix - 1, first]
            lengths += [1, length]
            first += length
    return ranges(starts, lengths, device)
