"""A prompt encoded once for all of its completions (Prefix Grouper, arXiv 2506.05433).

A group is one row: the prompt, then its completions side by side, each with positions that go on from the
prompt's. A mask lets a completion see the prompt and itself only, so that every hidden state and every
gradient is what the completion would have had alone behind its prompt; the prompt's gradient is the sum over
its completions, as it is without sharing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gspo_kernels.trainer.attention import attention_implementation, attention_masks
from gspo_kernels.trainer.errors import ModelError
from gspo_kernels.trainer.packing import (
    Packed,
    check_sequences,
    compare_with_alone,
    last_hidden_states,
    offsets,
    probe,
    ranges,
)


def shared_prefix_tokens(prompt: int, completions: Sequence[int]) -> int:
    """Return how many tokens a group's row has: the prompt's once, and all but the last of each completion.

    The last one predicts nothing.
    """
    return prompt + sum(length - 1 for length in completions)


def shared_prefix_hidden_states(
    model: Any, prompts: Sequence[Tensor], completions: Sequence[Sequence[Tensor]]
) -> Packed:
    """Run the backbone over each prompt once, followed by all of its completions.

    Equal to running every completion behind its own copy of the prompt, values and gradients, up to rounding.
    Groups are the rows of a batch, padded to the longest of T tokens; the mask has [groups, T, T] entries.

    Args:
        model: causal language model, plain, with a PEFT adapter, or wrapped (DDP); its own ``__call__`` runs.
        prompts: one tensor of token ids per group, [P_g], P_g > 0.
        completions: for each group its completions' token ids, [C_i], C_i > 0.

    Returns:
        The completions in the order given, group by group.

    Raises:
        ModelError: a model that a mask does not describe exactly, or whose attention takes none.
        ValueError: empty or mismatched sequences.
    """
    if len(prompts) != len(completions):
        raise ValueError(f"completions: got {len(completions)} groups for {len(prompts)} prompts")
    for prompt, group in zip(prompts, completions, strict=True):
        check_sequences([prompt] * len(group), group)
    if "flash" in (name := attention_implementation(model)):
        raise ModelError(
            f"{name} takes no mask, and a shared prompt needs one; load the model with "
            "attn_implementation='sdpa'"
        )
    groups = [_Group(prompt, group) for prompt, group in zip(prompts, completions, strict=True)]
    position_ids = pad_sequence([group.position_ids for group in groups], batch_first=True)
    # Padding is a branch of its own.
    branches = pad_sequence([group.branches for group in groups], batch_first=True, padding_value=-1)
    longest = max(group.longest for group in groups)
    inputs = {
        "input_ids": pad_sequence([group.input_ids for group in groups], batch_first=True),
        "position_ids": position_ids,
        "attention_mask": attention_masks(model, branches, position_ids, longest),
    }
    hidden = last_hidden_states(model, inputs).flatten(0, 1)
    T = branches.shape[1]
    predicting = torch.cat([group.predicting + number * T for number, group in enumerate(groups)])
    each = [completion for group in completions for completion in group]
    return Packed(
        hidden[predicting], torch.cat(each), offsets([len(completion) for completion in each], hidden.device)
    )


def check_shared_prefix(model: Any) -> None:
    """Refuse a model whose hidden states behind a shared prompt differ from those of the sequences alone.

    Runs a few tokens, once; before the model is wrapped for several devices.
    """
    prompts, completions = probe(model, [5, 2], [3, 1, 4, 2, 5])
    groups = [completions[:3], completions[3:]]
    compare_with_alone(
        model,
        lambda: shared_prefix_hidden_states(model, prompts, groups),
        [prompts[0]] * 3 + [prompts[1]] * 2,
        completions,
    )


class _Group:
    """A prompt and its completions as one row of T = P + sum(C_i - 1) tokens.

    Attributes:
        input_ids, position_ids: [T].
        branches: [T], 0 in the prompt, i + 1 in completion i.
        predicting: [sum(C_i)], the position that predicts each completion token; the prompt's last one
            predicts the first token of every completion.
        longest: tokens of the longest sequence.
    """

    def __init__(self, prompt: Tensor, completions: Sequence[Tensor]) -> None:
        device, P = prompt.device, len(prompt)
        lengths = [len(completion) - 1 for completion in completions]
        starts = offsets([P, *lengths]).tolist()[1:-1]
        branches = torch.arange(len(lengths) + 1).repeat_interleave(torch.tensor([P, *lengths]))
        self.input_ids = torch.cat([prompt, *(completion[:-1] for completion in completions)])
        self.position_ids = ranges([0] + [P] * len(lengths), [P, *lengths], device)
        self.branches = branches.to(device)
        self.predicting = ranges(
            [first for start in starts for first in (P - 1, start)],
            [length for own in lengths for length in (1, own)],
            device,
        )
        self.longest = P + max(lengths)
