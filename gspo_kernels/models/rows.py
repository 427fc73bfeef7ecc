"""Rows of several sequences without padding: batches by tokens, packed rows, shared prefixes, masks.

A token attends to the earlier tokens of its sequence and has its position in it. With shared prefixes (as in
Prefix Grouper, arXiv 2506.05433, for prompts) the row is a tree: a prefix of several sequences is in it once.
Hidden states and gradients equal those of the sequences alone, up to rounding; other models are refused.
"""

from __future__ import annotations

import heapq
import inspect
import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gspo_kernels.core.exact import exact
from gspo_kernels.core.layout import copy_async
from gspo_kernels.models import IntegrationError
from gspo_kernels.models.lm_head import causal_lm_of, head_module, replaced_product
from gspo_kernels.models.rope import own_frequencies, varying_ropes

Tokens = Sequence[Tensor]
"""Token ids of B sequences, [length > 0] each."""


def token_budget_batches(lengths: Sequence[int], budget: int, *, count: int | None = None) -> list[list[int]]:
    """Cut sequences into batches of at most ``budget`` tokens with nearly equal numbers of tokens.

    Sequences are placed longest first, each into the batch with the fewest tokens (Graham 1969). A sequence
    longer than the budget goes alone. A batch is an ascending list of indices into ``lengths``; the one with
    the most tokens comes first, for processes that go through their batches in step. ``count`` is the number
    of batches, some of which may be empty; by default the smallest number that keeps the budget.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    least = -(-sum(min(length, budget) for length in lengths) // budget)
    for number in itertools.count(least) if count is None else [count]:
        batches: list[list[int]] = [[] for _ in range(number)]
        heap = [(0, place) for place in range(number)]
        for i in longest_first:
            tokens, place = heap[0]
            batches[place].append(i)
            heapq.heapreplace(heap, (tokens + lengths[i], place))
        if all(len(batches[place]) < 2 or tokens <= budget for tokens, place in heap):
            break
    batches = [sorted(batch) for batch in batches]
    return sorted(batches, key=lambda batch: (-sum(lengths[i] for i in batch), batch))


class Segment(NamedTuple):
    """Neighbouring tokens of a row, and the earlier segment that they continue."""

    parent: int  # index of the earlier segment; -1: the tokens begin a sequence
    length: int


class Row(NamedTuple):
    """T tokens of several sequences: a forward pass from which N tokens are predicted."""

    inputs: dict[str, Any]  # of a causal language model's forward
    lengths: Tensor  # [1, T] int64 on the CPU, the length P + C of each token's sequence
    predicting: Tensor  # [N] int64, where the hidden states are that predict the completions


def plain_row(prompts: Tokens, completions: Tokens) -> Row:
    """Lay sequences out in one row, one after the other; nothing but their positions tells them apart.

    The last token of a sequence predicts nothing and is left out: T = sum(P_i + C_i - 1).
    """
    pairs, counts = list(zip(prompts, completions, strict=True)), list(map(len, completions))
    sizes, device = [len(p) + len(c) - 1 for p, c in pairs], prompts[0].device
    ids = torch.cat([part for p, c in pairs for part in (p, c[:-1])])
    positions = ranges([0] * len(sizes), sizes, device)
    whole = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    firsts = [end - count for end, count in zip(itertools.accumulate(sizes), counts, strict=True)]
    inputs = {"input_ids": ids[None], "position_ids": positions[None]}
    return Row(inputs, (whole + 1).repeat_interleave(whole)[None], ranges(firsts, counts, device))


def packed_row(model: Any, prompts: Tokens, completions: Tokens) -> Row:
    """Return a `plain_row` in which a mask keeps the sequences apart, or for flash-attention their offsets.

    A model that cannot be packed is an `IntegrationError`.
    """
    row, attention = plain_row(prompts, completions), attention_of(model)
    sizes = [len(p) + len(c) - 1 for p, c in zip(prompts, completions, strict=True)]
    if len(sizes) > 1 and "flash" in attention:
        ends = offsets_from_list(sizes, prompts[0].device)
        row.inputs.update(cu_seq_lens_q=ends, cu_seq_lens_k=ends)
        row.inputs.update(max_length_q=max(sizes), max_length_k=max(sizes))
    elif len(sizes) > 1:
        segments = [Segment(-1, size) for size in sizes]
        row.inputs["attention_mask"] = attention_mask(model, segments, prompts[0].device)
    return row


def tree_row(model: Any, prompts: Tokens, completions: Tokens) -> Row:
    """Lay sequences out as a tree: a prefix that several of them share, a prompt or also the first tokens of
    completions, is in the row once. Prefixes with other frequencies of RoPE are others.
    """
    if "flash" in (name := attention_of(model)):
        raise IntegrationError(f"tree_row: {name} takes no mask; load the model with sdpa")
    pairs, ropes = list(zip(prompts, completions, strict=True)), varying_ropes(model)
    left = iter(torch.cat([part for p, c in pairs for part in (p, c[:-1])]).tolist())
    place_of: dict[tuple[Any, int], int] = {}  # the place of a token, by its predecessor's place
    tokens: list[tuple[int, int, int]] = []  # id, position, and length of a sequence, by place
    before: list[int] = []  # the place of each token's predecessor, or -1
    predicting: list[int] = []
    for prompt, completion in pairs:
        length = len(prompt) + len(completion)
        place, start = -1, tuple(rope.regime(length) for rope in ropes)
        for position, token in enumerate(itertools.islice(left, length - 1)):
            following = place_of.setdefault((start if position == 0 else place, token), len(tokens))
            if following == len(tokens):
                tokens.append((token, position, length))
                before.append(place)
            place = following
            if position >= len(prompt) - 1:  # a prompt's last token predicts the first of every completion
                predicting.append(place)
    rows = torch.tensor(tokens, dtype=torch.int64, device="cpu").T.contiguous()
    row, places = (copy_async(x, prompts[0].device) for x in (rows[:2], rows.new_tensor(predicting)))
    inputs = {"input_ids": row[:1], "position_ids": row[1:]}
    if len(tokens) > 1:  # transformers takes a single token for a step of decoding
        inputs["attention_mask"] = attention_mask(model, _segments(before), row.device)
    return Row(inputs, rows[2:], places)


def _segments(before: Sequence[int]) -> list[Segment]:
    """Cut a tree's row: at a token that does not follow its neighbour, and right after a branching point."""
    jumps = {place: earlier for place, earlier in enumerate(before) if earlier != place - 1}
    starts = sorted({0, *jumps, *(earlier + 1 for earlier in jumps.values())} - {len(before)})
    ends = [*starts[1:], len(before)]
    parents = [bisect_right(starts, before[start]) - 1 for start in starts]
    return [Segment(parent, end - start) for parent, start, end in zip(parents, starts, ends, strict=True)]


def hidden_states(model: Any, prompts: Tokens, completions: Tokens, layout: Any = packed_row) -> Tensor:
    """Run a model once over a `packed_row` or a `tree_row`; return what predicts the completions, [N, H].

    The model may have a PEFT adapter, or be wrapped (DDP): its ``__call__`` runs.
    """
    inputs, lengths, predicting = layout(model, prompts, completions)
    return last_hidden_states(model, inputs, lengths)[0, predicting]


def last_hidden_states(
    model: Any, inputs: dict[str, Any], lengths: Tensor | None = None, call: Callable[..., Any] | None = None
) -> Tensor:
    """Call the whole model and return the input of its head, [1, T, H], which computes nothing itself.

    ``lengths`` [1, T] says how long the sequence of each token is; None: the row is one sequence. ``call`` is
    called in the model's place.
    """
    head = head_module(causal_lm_of(model))
    captured = replaced_product(head, lambda head, hidden: hidden, lambda hidden: hidden.clone())
    with own_frequencies(varying_ropes(model), lengths), captured as results:
        (call or model)(**inputs, use_cache=False)
    (hidden,) = results
    return hidden.full_tensor() if hasattr(hidden, "full_tensor") else hidden  # norms may be cut by tokens


@torch.no_grad()
def check_rows_of(
    model: Any,
    layout: Any = packed_row,
    *,
    call: Callable[..., Any] | None = None,
    device: torch.device | None = None,
) -> None:
    """Refuse a model whose hidden states in a common row differ from those of the sequences alone.

    Attention across sequences changes hidden states by about their own size, rounding by some multiples of
    eps. The positions of the last sequence reach the maximum of the context, to show whether RoPE frequencies
    that depend on the length change shorter sequences in the row. The tokens are fixed, and dropout is off.

    ``layout`` lays sequences out in a row, as `packed_row` does. ``call``: see `last_hidden_states`.
    ``device`` is that of the tokens; None: the model's.

    Raises:
        IntegrationError: they differ by more than a thousandth, or a tenth in 16 bit, where rounding may make
            a router send a token to another expert; or they are not finite.
    """
    config = causal_lm_of(model).config.get_text_config()
    tokens = (torch.arange(24, device=model.device if device is None else device) * 7 + 3) % config.vocab_size
    parts = tokens.split([4, 1, 6, 2, 3, 5, 1, 2])
    prompts, completions = parts[:4], parts[4:]
    prompts = (*[prompts[0]] * 3, prompts[3]) if layout is tree_row else prompts
    rows = [layout(model, prompts, completions)]
    rows += [layout(model, [p], [c]) for p, c in zip(prompts[:3], completions[:3], strict=True)]
    context = getattr(config, "max_position_embeddings", None) or 0
    reach = max((2 * rope.limit for rope in varying_ropes(model)), default=context)
    for places in (rows[0].inputs["position_ids"], rows[0].lengths):
        places[..., -3:] += max(reach - 4, 0)
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False  # not eval(), which some models make more of
    try:
        hidden = [last_hidden_states(model, row.inputs, row.lengths, call)[0, row.predicting] for row in rows]
    finally:
        for module, training in modes:
            module.training = training
    separate = torch.cat(hidden[1:])
    if not separate.isfinite().all():
        raise IntegrationError(f"the hidden states of {_name(model)} are not finite: its weights are damaged")
    bound = 0.1 if _rounds_to_16_bits(separate) else 1e-3
    separate, together = exact(separate), exact(hidden[0][: len(separate)])
    difference = float((together - separate).norm() / separate.norm())
    if not difference <= bound:
        raise _refused(
            model,
            f"its hidden states, with {config._attn_implementation!r} attention, differ from those of the "
            f"sequences alone by {difference:.1%} (rounding: < {bound:.1%})",
        )


def _refused(model: Any, reason: str) -> IntegrationError:
    return IntegrationError(f"{_name(model)} cannot hold several sequences in one row: {reason}")


def _name(model: Any) -> str:
    return type(causal_lm_of(model)).__name__


def _rounds_to_16_bits(values: Tensor) -> bool:
    kind = values.device.type
    rounded = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else values.dtype
    return not {values.dtype, rounded}.isdisjoint((torch.float16, torch.bfloat16))


def ranges(starts: Sequence[int], lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return start, ..., start + length - 1 for each start and its length, one after the other, int64."""
    sizes = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    firsts = torch.tensor(starts, dtype=torch.int64, device="cpu") - (sizes.cumsum(0) - sizes)
    found = torch.arange(sum(lengths), device="cpu") + firsts.repeat_interleave(sizes)
    return copy_async(found, torch.device(device))


def offsets_from_list(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return ``cu_seqlens`` of sequences of these lengths."""
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cpu")
    return copy_async(ends, device)


# transformers recognizes packed sequences by position_ids that restart, but not in every model and not where
# sequences share a prompt. Their mask is built here.


def attention_of(model: Any) -> str:
    """Return the name of a model's attention; refuse models that would mix up the sequences of a row."""
    causal = causal_lm_of(model)
    config = causal.config.get_text_config()
    name = str(config._attn_implementation)
    known = {"full_attention", "sliding_attention"}
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    reason = None
    if "position_ids" not in inspect.signature(causal.forward).parameters:
        reason = "its forward takes no position_ids"
    elif unknown or getattr(causal, "_is_stateful", False):
        reason = f"no mask is known that keeps them apart in its layers ({', '.join(unknown) or 'recurrent'})"
    elif name != "sdpa" and "flash" not in name:
        reason = f"its attention implementation is {name!r}; load it with sdpa or flash_attention_2"
    if reason is not None:
        raise _refused(model, reason)
    return name


def attention_mask(model: Any, segments: Sequence[Segment], device: torch.device) -> Any:
    """Return the `RowMask` of a row; or one by type of layer if the model has several (sliding windows)."""
    config = causal_lm_of(model).config.get_text_config()
    width = getattr(config, "sliding_window", None)
    default = "full_attention" if width is None else "sliding_attention"
    layers = set(getattr(config, "layer_types", None) or (default,))
    windows = {layer: width if layer == "sliding_attention" else None for layer in layers}
    masks = {layer: RowMask(segments, window, device) for layer, window in windows.items()}
    return masks if len(masks) > 1 else masks.popitem()[1]


class RowMask(Tensor):
    """An attention mask without storage, [1, 1, T, T]: SDPA with this mask runs segment by segment.

    The cost is not quadratic in the row, and PyTorch may use its flash kernel, as with torch's CausalBias.
    """

    segments: Sequence[Segment]
    window: int | None

    @staticmethod
    def __new__(cls, segments: Sequence[Segment], window: int | None, device: torch.device) -> RowMask:
        """Make a tensor of the mask's shape, without storage."""
        length = sum(segment.length for segment in segments)
        shape = (1, 1, length, length)
        mask: RowMask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.segments, mask.window = segments, window
        return mask

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise IntegrationError(
            f"this model's attention reads its mask ({function}); only plain SDPA can be packed"
        )


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: RowMask, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    """Run SDPA under a `RowMask` on [1, heads, T, D]: a segment sees itself and those that it continues."""
    options.pop("is_causal", None)  # False, as there is a mask
    # Neighbours of equal length that continue the same segment are one batch, which takes less time.
    runs = [(segment, len(list(same))) for segment, same in groupby(attn_mask.segments)]
    # split instead of slices: the backward of a slice fills a tensor of the whole size.
    sizes = [segment.length * count for segment, count in runs]
    parts = zip(*(x.split(sizes, 2) for x in (query, key, value)), strict=True)
    paths: list[tuple[Tensor, Tensor]] = []  # keys and values of each segment and of those that it continues
    outputs, window = [], attn_mask.window
    for ((parent, size), count), part in zip(runs, parts, strict=True):
        q, k, v = (x.reshape(-1, count, size, x.shape[3]).transpose(0, 1) for x in part)
        if parent >= 0:
            before = (x.expand(count, -1, -1, -1) for x in paths[parent])
            k, v = (torch.cat(pair, 2) for pair in zip(before, (k, v), strict=True))
        paths += zip(k.split(1), v.split(1), strict=True)
        keys, mask, plain = k.shape[2], None, parent < 0 and (window is None or size <= window)
        if not plain:  # the queries are the last positions of a sequence, the keys are all of them
            mask = torch.ones(size, keys, dtype=torch.bool, device=q.device).tril(keys - size)
            mask = mask if window is None else mask.triu(keys - size - window + 1)
        out = scaled_dot_product_attention(q, k, v, mask, dropout_p, plain, **options)
        outputs.append(out.transpose(0, 1).reshape(1, -1, size * count, out.shape[3]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
