"""Several sequences in one row: who may see whom, said in the form that a model's attention takes.

transformers finds packed sequences by ``position_ids`` that restart: only without a cache and a mask, not in
every model (5.23 does not look at them in GPT-OSS), and not where sequences share a prompt. So the mask is
built here, for all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only

from gspo_kernels.integrations.lm_head import causal_lm_of
from gspo_kernels.trainer.input_errors import ModelError

EXACT_LAYERS = {"full_attention", "sliding_attention"}
"""Layers whose masks are known here; others carry a state along the row, or select tokens."""

MASKED_ATTENTION = {"sdpa", "eager", "flex_attention"}


class Row(NamedTuple):
    """What a row of the backbone holds: what all of its sequences begin with, and what is their own."""

    prefix: int  # shared tokens, at the front; 0 for sequences that share nothing
    lengths: Sequence[int]  # own tokens of each sequence, in the order of the row

    @property
    def tokens(self) -> int:
        """T of this row alone."""
        return self.prefix + sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prefix + max(self.lengths)

    def position_ids(self) -> Tensor:
        """[T], positions within a sequence."""
        return ranges([0] + [self.prefix] * len(self.lengths), [self.prefix, *self.lengths])

    def branches(self) -> Tensor:
        """[T], 0 in the shared prefix, i + 1 in what sequence i has of its own."""
        sizes = torch.tensor([self.prefix, *self.lengths])
        return torch.arange(len(sizes)).repeat_interleave(sizes)


def ranges(starts: Sequence[int], lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return start, start + 1, ... for each pair, one after the other, int64."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    firsts = torch.tensor(starts, dtype=torch.int64) - (sizes.cumsum(0) - sizes)
    return (torch.arange(sum(lengths)) + firsts.repeat_interleave(sizes)).to(device)


def positions_of(rows: Sequence[Row], device: torch.device) -> Tensor:
    """Return ``position_ids``, [rows, T], 0 in the padding of shorter rows."""
    return pad_sequence([row.position_ids() for row in rows], batch_first=True).to(device)


def implementation_of(model: Any) -> str:
    """Return the name of a model's attention; refuse models that would mix up the sequences of a row."""
    causal = causal_lm_of(model)
    config = causal.config.get_text_config()
    name = str(config._attn_implementation)
    accepted = inspect.signature(causal.forward).parameters
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - EXACT_LAYERS)
    reason = None
    if "position_ids" not in accepted or "logits_to_keep" not in accepted:
        reason = "its forward takes no position_ids or no logits_to_keep"
    elif getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        reason = "its adapter puts tokens of its own before every row"
    elif strange or getattr(causal, "_is_stateful", False):
        reason = f"no mask is known that keeps them apart in its layers ({', '.join(strange) or 'recurrent'})"
    elif name not in MASKED_ATTENTION and "flash" not in name:
        reason = f"how its attention implementation {name!r} takes a mask is not known"
    if reason is not None:
        raise ModelError(f"{type(causal).__name__} cannot hold several sequences in one row: {reason}")
    return name


def attention_masks(model: Any, rows: Sequence[Row], device: torch.device) -> Any:
    """Return who sees whom: a token sees what came before it in its sequence, shared prefix included.

    Returns:
        One mask, or one for each type of layer where they differ (sliding windows): [rows, 1, T, T], a
        `SegmentMask` for SDPA, additive for eager attention, a BlockMask for flex attention.
    """
    causal = causal_lm_of(model)
    name, dtype = causal.config.get_text_config()._attn_implementation, causal.dtype

    def mask(window: int | None) -> Any:
        if name == "sdpa":
            return SegmentMask(rows, window, device)
        if name == "flex_attention":
            from torch.nn.attention.flex_attention import create_block_mask

            T = max(row.tokens for row in rows)
            return create_block_mask(_rule(rows, window, device), len(rows), None, T, T, device=str(device))
        seen = dense_mask(rows, window, device)
        return torch.zeros((), dtype=dtype, device=device).where(seen, torch.finfo(dtype).min)

    return by_layer(model, max(row.longest for row in rows), mask)


def by_layer(model: Any, longest: int, make: Callable[[int | None], Any]) -> Any:
    """Return the mask that ``make`` has for layers with a sliding window, or None for layers without.

    A window counts where sequences of up to ``longest`` tokens reach beyond it. Layers that differ get a dict
    with a mask for each type.
    """
    config = causal_lm_of(model).config.get_text_config()
    width = getattr(config, "sliding_window", None)
    default = "full_attention" if width is None else "sliding_attention"
    layers = set(getattr(config, "layer_types", None) or (default,))
    window = None if width is None or width >= longest else width
    windows = {layer: window if layer == "sliding_attention" else None for layer in layers}
    masks = {each: make(each) for each in set(windows.values())}
    kinds = {layer: masks[each] for layer, each in windows.items()}
    return kinds if len(masks) > 1 else next(iter(masks.values()))


def _rule(
    rows: Sequence[Row], window: int | None, device: torch.device
) -> Callable[[Any, Any, Any, Any], Tensor]:
    position_ids = positions_of(rows, device)
    # Padding is a branch of its own, so that nothing sees it and no row of the mask is empty.
    branches = pad_sequence([row.branches() for row in rows], batch_first=True, padding_value=-1).to(device)

    def visible(row: Any, head: Any, query: Any, key: Any) -> Tensor:
        own, other = branches[row, query], branches[row, key]
        seen = (key <= query) & ((other == own) | (other == 0))
        if window is not None:
            seen = seen & (position_ids[row, query] - position_ids[row, key] < window)
        return seen

    return visible


def dense_mask(rows: Sequence[Row], window: int | None, device: torch.device) -> Tensor:
    """Return [rows, 1, T, T] bool, true where a query (third axis) sees a key."""
    T = max(row.tokens for row in rows)
    number = torch.arange(len(rows), device=device)[:, None, None, None]
    index = torch.arange(T, device=device)
    return _rule(rows, window, device)(number, None, index[:, None], index)


class AttentionMask(Tensor):
    """A mask without entries: SDPA given this one runs its ``attend``.

    It travels as an argument, like every mask, and needs no change to the model; recomputation under gradient
    checkpointing finds it again. torch's own CausalBias works in the same way.
    """

    attend: ClassVar[Callable[..., Tensor]]
    """SDPA under this mask, of queries, keys and values of [rows, heads, T, D]."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: AttentionMask,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Take the arguments of SDPA; ``is_causal`` is in the mask already."""
    return attn_mask.attend(query, key, value, dropout_p, **options)


class SegmentMask(AttentionMask):
    """`dense_mask` without its T x T entries: SDPA runs segment by segment.

    The cost is that of the sequences, not quadratic in the row, and a sequence that shares nothing needs no
    mask at all, so that PyTorch may use its flash kernel. Any other operation sees the dense mask.
    """

    rows: Sequence[Row]
    window: int | None

    @staticmethod
    def __new__(cls, rows: Sequence[Row], window: int | None, device: torch.device) -> SegmentMask:
        """Make a tensor of the dense mask's shape, without storage."""
        T = max(row.tokens for row in rows)
        shape = (len(rows), 1, T, T)
        mask: SegmentMask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.rows, mask.window = rows, window
        return mask

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(
            cls, lambda mask: dense_mask(mask.rows, mask.window, mask.device), (args, kwargs or {})
        )
        return function(*args, **kwargs)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, **options: Any) -> Tensor:
        """See `AttentionMask.attend`: each sequence with its own and the shared keys; 0 in padding."""
        window, T = self.window, self.shape[-1]
        outputs, ones = [], [1] * len(self.rows)
        cut = (_cut(x, ones, 0) for x in (query, key, value))
        for row, *qkv in zip(self.rows, *cut, strict=True):
            # Neighbours of one length are a batch, which takes less time than as many calls.
            runs = [(row.prefix, 1)] if row.prefix else []
            runs += [(size, len(list(same))) for size, same in groupby(row.lengths) if size > 0]
            padding = T - row.tokens
            sizes = [size * count for size, count in runs] + [padding] * (padding > 0)
            parts = [_cut(x, sizes, 2) for x in qkv]
            segments = []
            for i, (size, count) in enumerate(runs):
                q, k, v = (x[i].reshape(-1, count, size, x[i].shape[3]).transpose(0, 1) for x in parts)
                shared = row.prefix > 0 and i > 0
                if shared:
                    before = (part[0].expand(count, -1, -1, -1) for part in parts[1:])
                    k, v = (torch.cat(pair, 2) for pair in zip(before, (k, v), strict=True))
                plain = not shared and (window is None or size <= window)
                mask = None if plain else causal_mask(size, k.shape[2], window, query.device)
                found = scaled_dot_product_attention(q, k, v, mask, dropout_p, plain, **options)
                segments.append(found.transpose(0, 1).reshape(1, -1, size * count, found.shape[3]))
            if padding:
                segments.append(value.new_zeros(1, query.shape[1], padding, value.shape[3]))
            outputs.append(_joined(segments, 2))
        return _joined(outputs, 0)


def _cut(x: Tensor, sizes: list[int], dim: int) -> Sequence[Tensor]:
    """Split, instead of slices, whose backward fills the whole; and one piece is no copy, there or back."""
    return (x,) if len(sizes) == 1 else x.split(sizes, dim)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """The inverse."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return [queries, keys] bool for the last positions of a sequence."""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return seen if window is None else seen.triu(keys - queries - window + 1)
