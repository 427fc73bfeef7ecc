"""One row per sequence, padded on the right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gspo_kernels.trainer.rows.packing import LossInputs, check_sequences, offsets, ranges


def padded_hidden_states(model: Any, prompts: Sequence[Tensor], completions: Sequence[Tensor]) -> LossInputs:
    """Run the backbone on one row per sequence, padded on the right; arguments as `packed_hidden_states`.

    Attention is causal, so what follows a sequence changes nothing in it, and no mask is needed. For models
    that cannot be packed, and for attention whose cost is quadratic in a packed row.
    """
    check_sequences(prompts, completions)
    pairs = list(zip(prompts, completions, strict=True))
    rows = [torch.cat([prompt, completion[:-1]]) for prompt, completion in pairs]
    input_ids = pad_sequence(rows, batch_first=True)
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    lengths = [len(completion) for completion in completions]
    firsts = [i * input_ids.shape[1] + len(prompt) - 1 for i, prompt in enumerate(prompts)]
    predicting = ranges(firsts, lengths, hidden.device)
    return LossInputs(
        hidden.flatten(0, 1)[predicting], torch.cat(list(completions)), offsets(lengths, hidden.device)
    )
