"""Padding-free batches: sequences of any length in one row, each attending to itself only."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gspo_kernels.integrations.layouts import offsets_of, pack
from gspo_kernels.integrations.lm_head import causal_lm_of
from gspo_kernels.trainer.input_errors import ModelError
from gspo_kernels.trainer.rows.attention import Row, attention_masks, implementation_of, ranges

IGNORED = -100
"""Label of positions that predict no completion token."""

Tokens = Sequence[Tensor]
"""Token ids of B sequences, [length > 0] each."""


class LossInputs(NamedTuple):
    """What the loss takes, packed over completion tokens only."""

    hidden: Tensor  # [N, H], the backbone's output at the positions that predict completion tokens
    labels: Tensor  # [N] int64, the completion tokens
    cu_seqlens: Tensor  # int32 [B + 1], offsets of the completions in both


def packed_inputs(prompts: Tokens, completions: Tokens, *, model: Any = None) -> dict[str, Any]:
    """Lay sequences out in one row, as keyword arguments of a causal language model's forward.

    The last token of a sequence predicts nothing and is left out: T = sum(P_i + C_i - 1).

    Args:
        prompts, completions: B tensors of token ids each, [P_i] and [C_i], none empty.
        model: the model they are for; adds what its attention needs: a mask, [1, 1, T, T], or for
            flash-attention the sequences' offsets. Without it, transformers has to find the sequences from
            their positions, which most models do.

    Returns:
        ``input_ids``, ``position_ids`` and ``shift_labels``, [1, T] (``shift_labels[0, t]`` is the completion
        token that position t predicts, -100 where it predicts none), ``use_cache=False``, and ``cu_seqlens``,
        int32 [B + 1], offsets of the sequences in the row. With a model also ``attention_mask``, or
        ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k``; neither for one sequence.

    Raises:
        ModelError: a model that cannot be packed exactly.
        ValueError: empty or mismatched sequences.
    """
    inputs, lengths = _row_of(prompts, completions, model)
    pairs = zip(prompts, completions, strict=True)
    shifted = [part for p, c in pairs for part in (p.new_full((len(p) - 1,), IGNORED), c)]
    inputs["shift_labels"] = torch.cat(shifted).unsqueeze(0)
    return inputs | {"cu_seqlens": offsets_of(torch.tensor(lengths, device=prompts[0].device))}


def _row_of(prompts: Tokens, completions: Tokens, model: Any) -> tuple[dict[str, Any], list[int]]:
    """Return what of `packed_inputs` a model itself takes, and the tokens of each sequence."""
    check_sequences(prompts, completions)
    pairs = list(zip(prompts, completions, strict=True))
    lengths, device = [len(p) + len(c) - 1 for p, c in pairs], prompts[0].device
    inputs: dict[str, Any] = {
        "input_ids": torch.cat([part for p, c in pairs for part in (p, c[:-1])]).unsqueeze(0),
        "position_ids": ranges([0] * len(lengths), lengths, device).unsqueeze(0),
        "use_cache": False,
    }
    implementation = None if model is None else implementation_of(model)
    if implementation is not None and len(lengths) > 1:
        if "flash" in implementation:
            ends = offsets_of(torch.tensor(lengths, device=device))
            inputs["cu_seq_lens_q"] = inputs["cu_seq_lens_k"] = ends
            inputs["max_length_q"] = inputs["max_length_k"] = max(lengths)
        else:
            inputs["attention_mask"] = attention_masks(model, [Row(0, lengths)], device)
    return inputs, lengths


def packed_hidden_states(model: Any, prompts: Tokens, completions: Tokens) -> LossInputs:
    """Run the backbone once over all sequences, without padding.

    Equal to running each sequence alone, values and gradients, up to rounding. Takes and refuses what
    `packed_inputs` does; the model's own ``__call__`` runs, plain, with a PEFT adapter, or wrapped (DDP).
    """
    inputs, lengths = _row_of(prompts, completions, model)
    hidden, counts = last_hidden_states(model, inputs), [len(completion) for completion in completions]
    firsts = [end - count for end, count in zip(itertools.accumulate(lengths), counts, strict=True)]
    return LossInputs(hidden[0, ranges(firsts, counts, hidden.device)], *pack(completions))


def padded_hidden_states(model: Any, prompts: Tokens, completions: Tokens) -> LossInputs:
    """Run the backbone on one row per sequence, padded on the right.

    Attention is causal, so what follows a sequence changes nothing in it, and no mask is needed. For models
    that cannot be packed, and for attention whose cost is quadratic in a packed row.
    """
    check_sequences(prompts, completions)
    rows = [torch.cat([p, c[:-1]]) for p, c in zip(prompts, completions, strict=True)]
    input_ids = pad_sequence(rows, batch_first=True)
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    firsts = [i * input_ids.shape[1] + len(prompt) - 1 for i, prompt in enumerate(prompts)]
    predicting = ranges(firsts, [len(completion) for completion in completions], hidden.device)
    return LossInputs(hidden.flatten(0, 1)[predicting], *pack(completions))


def last_hidden_states(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return what enters the head, [rows, T, H], from a call of the whole model.

    The call goes through ``model.__call__``, so that the hooks of wrappers and adapters run, and projects one
    position only.
    """
    causal = causal_lm_of(model)
    captured: list[Any] = []
    # Some models call their decoder, others the model around it; the outermost that is called ends last.
    handles = [
        module.register_forward_hook(lambda module, args, output: captured.append(output))
        for module in {causal.base_model, causal.get_decoder()} - {causal}
    ]
    try:
        model(**(inputs | {"use_cache": False, "logits_to_keep": 1}))
    finally:
        for handle in handles:
            handle.remove()
    hidden = getattr(captured[-1], "last_hidden_state", None) if captured else None
    if hidden is None or hidden.shape[:2] != inputs["input_ids"].shape:
        name = type(causal).__name__
        raise ModelError(f"{name}: its backbone did not return one hidden state for each input token")
    return hidden


def check_packing(model: Any) -> None:
    """Refuse a model whose packed hidden states differ from those of the sequences alone.

    Runs a few tokens, once; before the model is wrapped for several devices.
    """
    prompts, completions = probe(model, [4, 1, 6, 2], [3, 5, 1, 2])
    compare_with_alone(model, lambda: packed_hidden_states(model, prompts, completions), prompts, completions)


def probe(model: Any, prompts: list[int], completions: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return token ids of these lengths that differ from sequence to sequence."""
    vocabulary = causal_lm_of(model).config.get_text_config().vocab_size
    tokens = (torch.arange(sum(prompts) + sum(completions), device=model.device) * 7 + 3) % vocabulary
    first, rest = tokens.split([sum(prompts), sum(completions)])
    return list(first.split(prompts)), list(rest.split(completions))


@torch.no_grad()
def compare_with_alone(
    model: Any, together: Callable[[], LossInputs], prompts: list[Tensor], completions: list[Tensor]
) -> None:
    """Refuse a model for which ``together()`` is not what each sequence gives alone.

    Leaking attention changes hidden states by as much as they are large, rounding by some multiples of eps;
    the line is drawn at sqrt(eps), relative to the largest.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.autocast(model.device.type, enabled=False):
        ours = together().hidden
        pairs = zip(prompts, completions, strict=True)
        reference = torch.cat([packed_hidden_states(model, [p], [c]).hidden for p, c in pairs])
    for module, mode in modes:
        module.training = mode
    bound = torch.finfo(reference.dtype).eps ** 0.5 * reference.abs().max().item()
    difference = (ours - reference).abs().max().item()
    if not difference <= bound:
        raise ModelError(
            f"{type(causal_lm_of(model)).__name__} cannot hold several sequences in one row: its hidden "
            f"states differ from those of the sequences alone by {difference:.3g} (rounding: < {bound:.3g})"
        )


def token_budget_batches(lengths: Sequence[int], budget: int, *, count: int | None = None) -> list[list[int]]:
    """Cut sequences into micro-batches of at most ``budget`` tokens with nearly equal numbers of tokens.

    Longest first, each to the batch with the fewest tokens (Graham 1969); the same input gives the same
    batches. They come with the most tokens first, so that processes that go through them in step wait little.
    A sequence longer than the budget goes alone.

    Args:
        lengths, budget: tokens of each sequence, and of a batch; at least 1, or a ValueError says so.
        count: number of batches, for processes whose collectives must match: the largest
            ``len(token_budget_batches(lengths, budget))`` of all of them. Batches are empty where there are
            fewer sequences. By default, the smallest number that keeps the budget.

    Returns:
        Indices into ``lengths``, ascending within a batch.
    """
    if budget < 1 or any(length < 1 for length in lengths):
        raise ValueError(f"lengths and budget: expected positive numbers, got {list(lengths)} and {budget}")
    alone = [[i] for i, length in enumerate(lengths) if length > budget]
    order = sorted((i for i, length in enumerate(lengths) if length <= budget), key=lambda i: -lengths[i])
    for number in itertools.count(-(-sum(lengths[i] for i in order) // budget)):
        batches = _balanced(lengths, order, number)
        if all(sum(lengths[i] for i in batch) <= budget for batch in batches):
            break
    if count is not None:
        if count < len(alone) + number:
            raise ValueError(f"count: got {count}, but budget {budget} needs {len(alone) + number} batches")
        batches = _balanced(lengths, order, count - len(alone))
    return sorted(alone + batches, key=lambda batch: (-sum(lengths[i] for i in batch), batch))


def _balanced(lengths: Sequence[int], order: list[int], count: int) -> list[list[int]]:
    heap = [(0, number) for number in range(count)]
    batches: list[list[int]] = [[] for _ in range(count)]
    for i in order:
        tokens, number = heapq.heappop(heap)
        batches[number].append(i)
        heapq.heappush(heap, (tokens + lengths[i], number))
    return [sorted(batch) for batch in batches]


def check_sequences(prompts: Tokens, completions: Tokens) -> None:
    """Raise a ValueError that names what cannot be packed."""
    counts = f"completions: got {len(completions)} for {len(prompts)} prompts"
    if len(prompts) != len(completions) or not prompts:
        raise ValueError(f"{counts}, expected one each, at least one")
    for name, sequences in (("prompts", prompts), ("completions", completions)):
        for i, tokens in enumerate(sequences):
            if tokens.dim() != 1 or len(tokens) == 0:
                raise ValueError(f"{name}[{i}]: got shape {tuple(tokens.shape)}, expected [length > 0]")
