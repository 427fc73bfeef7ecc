"""Decoding inside transformers' ``generate``: a prompt is read once, and a vocabulary hardly more often."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.cache_utils import Cache, DynamicLayer

from gspo_kernels.bits import columns
from gspo_kernels.linear.products import SMALL
from gspo_kernels.sampling import sampling_mask
from gspo_kernels.trainer.input_errors import ModelError
from gspo_kernels.trainer.rollout import Completion, Sampling, SamplingMask

_BLOCK = 256
"""Tokens whose probabilities are summed up, where a vocabulary has more than a few."""
_FEW = 16 * _BLOCK


@dataclass
class Decoding:
    """What ``generate`` takes as ``custom_generate``: the loop over the tokens of b completions.

    A prompt that several completions continue goes through the model once. Completions that have ended leave
    the batch as soon as they are half of it.

    Attributes:
        prompts: b lists of token ids, those that ``generate`` gets padded.
        sampling: how tokens are drawn.
        uniforms: [b, C] in [0, 1), which decide the tokens; None: the most likely one each time.
        end_ids: int64, tokens that end a completion, on the model's device.
    """

    prompts: list[list[int]]
    sampling: Sampling
    uniforms: Tensor | None
    end_ids: Tensor

    def __post_init__(self) -> None:
        shape, device = (len(self.prompts), self.sampling.max_new_tokens), self.end_ids.device
        # [b, C] each; behind an end token may be others.
        self.completion_ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(shape, device=device)
        self._counts = torch.zeros(shape, dtype=torch.int64)
        self._kept: list[tuple[Tensor, Tensor]] = []

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        generation_config: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        **inputs: Any,
    ) -> None:
        """Complete prompts, [b, P]; how tokens are chosen and when completions end is said here."""
        b, C = self.completion_ids.shape
        rows, cache = torch.arange(b, device=input_ids.device), inputs.get("past_key_values")
        firsts = owners = rows
        if isinstance(cache, Cache):  # other state cannot be repeated
            length = input_ids.shape[1] + C
            cache.layers = [_Reserved(length) if type(x) is DynamicLayer else x for x in cache.layers]
            places: dict[tuple[int, ...], int] = {}
            owners = rows.new_tensor([places.setdefault(tuple(ids), len(places)) for ids in self.prompts])
            firsts = rows.new_tensor([self.prompts.index(list(ids)) for ids in places])
        inputs = _rows_of(inputs, firsts)
        outputs = model._prefill(input_ids[firsts], generation_config, inputs)
        going = torch.ones_like(rows, dtype=torch.bool)
        with model._optimize_model_for_decode():
            for place in range(C):
                inputs = model._update_model_kwargs_for_generation(outputs, inputs)
                logits = outputs.logits[:, -1].float()
                if place == 0:
                    inputs, logits = _rows_of(inputs, owners), logits[owners]
                if self.uniforms is None:
                    tokens = logits.argmax(-1)
                else:
                    tokens, probs, kept = draw(logits, self.sampling, self.uniforms[rows, place, None])
                    self.logprobs[rows, place] = probs.log().to(self.logprobs.dtype)
                    if kept is not None and self.sampling.return_mask:
                        self._keep(rows, place, kept)
                self.completion_ids[rows, place] = tokens
                going &= ~torch.isin(tokens, self.end_ids)
                left = int(going.sum())
                if left == 0 or place == C - 1:
                    return
                if 2 * left <= len(going):
                    own = going.nonzero().flatten()
                    inputs, rows, tokens, going = _rows_of(inputs, own), rows[own], tokens[own], going[own]
                following = model.prepare_inputs_for_generation(tokens.unsqueeze(1), **inputs)
                outputs = model(**following, return_dict=True)

    def _keep(self, rows: Tensor, place: int, kept: Tensor) -> None:
        owners, ids = kept.nonzero(as_tuple=True)
        self._counts[rows.cpu(), place] = kept.sum(-1).cpu()
        self._kept.append((rows[owners].cpu(), ids.to("cpu", torch.int32)))

    def completions(self) -> list[Completion]:
        """Return what was decoded; a `ModelError` says that probabilities are not numbers."""
        table_ids, table = self.completion_ids.cpu(), self.logprobs.cpu()
        ends = torch.isin(table_ids, self.end_ids.cpu())
        finished, masks = ends.any(1), self._masks()
        lengths = torch.where(finished, ends.to(torch.int8).argmax(1) + 1, table.shape[1])
        inside = torch.arange(table.shape[1]) < lengths.unsqueeze(1)
        if bool((table.isnan() & inside).any()):
            raise ModelError(
                "the model's probabilities are not numbers (NaN): its weights or its logits are not finite"
            )
        # Copies, as a part of a tensor would travel to other processes with the whole.
        return [
            Completion(
                table_ids[row, :length].clone(),
                bool(finished[row]),
                None if self.uniforms is None else table[row, :length].clone(),
                mask=masks[row].first(length) if masks else None,
            )
            for row, length in enumerate(lengths.tolist())
        ]

    def _masks(self) -> list[SamplingMask]:
        if not self._kept:
            return []
        owners, ids = (torch.cat(each) for each in zip(*self._kept, strict=True))
        ids = ids[owners.sort(stable=True).indices]  # by completion, and each in the order of its places
        split = ids.split(self._counts.sum(1).tolist())
        return [SamplingMask(own, counts) for own, counts in zip(split, self._counts, strict=True)]


def packs() -> bool:
    """Whether oneDNN is there, and has products for this processor that were measured."""
    return torch.backends.mkldnn.is_available() and "AVX" in torch.backends.cpu.get_cpu_capability()


@contextmanager
def packed_head(model: Any) -> Iterator[None]:
    """Let oneDNN lay out the head's weight once, in a copy, where torch's products do it for every token.

    With the instructions of AVX-512 and of AVX2 an fp32 product then takes 0.4 to 0.8 of the time.
    """
    head = model.get_output_embeddings()
    weight: Any = getattr(head, "weight", None)
    plain = type(head) is torch.nn.Linear and not isinstance(weight, DTensor)  # that is cut over processes
    fp32 = plain and weight.is_cpu and weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if not fp32 or not packs() or weight.numel() < SMALL:
        yield
        return

    packed, bias = torch.ops.mkldnn._reorder_linear_weight(weight.detach()), head.bias
    head.forward = lambda hidden: torch.ops.mkldnn._linear_pointwise(hidden, packed, bias, "none", [], "")
    try:
        yield
    finally:
        del head.forward


def _rows_of(inputs: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """Return a model's inputs for some of its rows, each perhaps several times; the cache is changed."""
    for value in inputs.values():
        if isinstance(value, Cache):
            value.reorder_cache(rows)
    return {
        # [b, T], or what several kinds of positions have, [kinds, b, T]
        name: value.index_select(-2, rows) if isinstance(value, Tensor) and value.dim() > 1 else value
        for name, value in inputs.items()
    }


class _Reserved(DynamicLayer):
    """Keys and values in memory for a whole length, where transformers copies all of them in every step."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length
        self._room: tuple[Tensor, ...] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Any, Any]:
        """Append [b, heads, new, width] keys and values; return all."""
        start = self.get_seq_length()
        if self._room is None:  # the first tokens, or other rows than before
            start, (key_states, value_states) = 0, super().update(key_states, value_states)
            given = (key_states, value_states)
            self._room = tuple(x.new_empty(*x.shape[:2], self.length, x.shape[3]) for x in given)
        end = start + key_states.shape[-2]
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, start:end] = states
        self.keys, self.values = (room[:, :, :end] for room in self._room)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take other rows, and room for these with the next tokens."""
        super().reorder_cache(beam_idx)
        self._room = None


def draw(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw tokens, [b], from [b, V] logits, which are lost.

    Return them with their probabilities, and [b, V] bool, what could have been drawn; None: everything.

    By inversion: a uniform number, [b, 1], picks the token whose interval of the cumulative probabilities it
    lies in. So one random number per token is enough, from a stream of the row's own, and the token's
    probability is at hand.
    """
    if sampling.temperature != 1.0:
        logits -= logits.amax(-1, keepdim=True)  # differences keep more digits
        logits /= sampling.temperature
    kept = None
    if sampling.cuts:
        mask = sampling_mask(logits, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
        kept = columns(mask, logits.shape[1])
        logits.masked_fill_(~kept, -torch.inf)
    # One pass where a maximum, a difference and an exponential are three.
    tokens, probs = by_inversion(logits.softmax(-1), uniforms)
    return tokens.squeeze(-1), probs.squeeze(-1), kept


def by_inversion(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens in whose intervals of the cumulative weights the numbers lie, and their shares.

    First among the sums of blocks, then within one: cumulative sums of a large vocabulary take ten times as
    long as its softmax.

    Args:
        weights: [b, V], what probabilities are proportional to.
        uniforms: [b, 1] in [0, 1).
    """
    V = weights.shape[1]
    if V <= _FEW:
        tokens, _, total = _interval(weights, uniforms)
    else:
        blocks, rest, total = _interval(_by_block(weights), uniforms)
        # NaN leads beyond the end.
        tokens = (blocks * _BLOCK + _interval(_inside(weights, blocks), rest)[0]).clamp(max=V - 1)
    return tokens, weights.gather(-1, tokens) / total


def _interval(weights: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return in which of [b, n] weights a share of their sum lies, how far in it, and the sum; all [b, 1]."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # The factor keeps the product below the total where it would round up to it.
    places = shares * total * (1.0 - 2.0**-40)
    # To the right: the first sum above the place, so never a weight of 0.
    index = torch.searchsorted(cumulative, places, right=True).clamp(max=weights.shape[1] - 1)
    weight = weights.gather(-1, index)
    before = cumulative.gather(-1, index) - weight
    return index, ((places - before) / weight).clamp(0.0, 1.0), total


def _by_block(weights: Tensor) -> Tensor:
    """Return the sum of each block of [b, V] weights, [b, blocks]; the last one may be shorter."""
    V = weights.shape[1]
    whole = V - V % _BLOCK
    sums = weights[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1)
    return sums if whole == V else torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True)], 1)


def _inside(weights: Tensor, blocks: Tensor) -> Tensor:
    """Return [b, _BLOCK], of each row the block whose number is in [b, 1], with 0 where it is shorter."""
    columns = blocks * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    V = weights.shape[1]
    return weights.gather(-1, columns.clamp(max=V - 1)).masked_fill(columns >= V, 0.0)
