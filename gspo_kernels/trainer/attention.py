"""Several sequences in one row: who may see whom, said in the form that a model's attention takes.

transformers finds packed sequences by ``position_ids`` that restart: only without a cache and a mask, not in
every model (5.23 does not look at them in GPT-OSS), and not where sequences share a prompt. So the mask is
built here, for all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.trainer.errors import ModelError

EXACT_LAYERS = {"full_attention", "sliding_attention"}
"""Layers whose masks are known here; others carry a state along the row, or select tokens."""

MASKED_ATTENTION = {"sdpa", "eager", "flex_attention"}


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside DDP and PEFT wrappers."""
    from accelerate.utils import extract_model_from_parallel

    model = extract_model_from_parallel(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def attention_implementation(model: Any) -> str:
    """Return the name of a model's attention; refuse models that would mix up the sequences of a row."""
    causal = unwrapped(model)
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


def attention_masks(model: Any, branches: Tensor, position_ids: Tensor, longest: int) -> Any:
    """Return who sees whom: what came before in the row, in the same branch or in branch 0.

    Args:
        model: its config says which kinds of attention there are (full, sliding window).
        branches: [rows, T], equal for the tokens of a sequence; 0 for a prompt that all sequences of its row
            share.
        position_ids: [rows, T], positions within a sequence.
        longest: tokens of the longest sequence; a window of that width is no window.

    Returns:
        One mask, or one for each type of layer where they differ: [rows, 1, T, T], bool for SDPA, additive
        for eager attention, a BlockMask for flex attention.
    """
    causal = unwrapped(model)
    config = causal.config.get_text_config()
    default = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    masks: dict[int | None, Any] = {}
    kinds = {}
    for layer in set(getattr(config, "layer_types", None) or (default,)):
        window = config.sliding_window if layer == "sliding_attention" else None
        if window is not None and window >= longest:
            window = None
        if window not in masks:
            rule = _rule(branches, position_ids, window)
            masks[window] = _mask(rule, branches, config._attn_implementation, causal.dtype)
        kinds[layer] = masks[window]
    return kinds if len(masks) > 1 else next(iter(masks.values()))


def _rule(
    branches: Tensor, position_ids: Tensor, window: int | None
) -> Callable[[Any, Any, Any, Any], Tensor]:
    def visible(row: Any, head: Any, query: Any, key: Any) -> Tensor:
        own, other = branches[row, query], branches[row, key]
        seen = (key <= query) & ((other == own) | (other == 0))
        if window is not None:
            seen = seen & (position_ids[row, query] - position_ids[row, key] < window)
        return seen

    return visible


def _mask(
    visible: Callable[[Any, Any, Any, Any], Tensor], like: Tensor, implementation: str, dtype: torch.dtype
) -> Any:
    rows, T = like.shape
    if implementation == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        return create_block_mask(visible, rows, None, T, T, device=str(like.device))
    row = torch.arange(rows, device=like.device)[:, None, None, None]
    index = torch.arange(T, device=like.device)
    seen = visible(row, None, index[:, None], index)
    if implementation == "sdpa":
        return seen
    return torch.zeros((), dtype=dtype, device=seen.device).where(seen, torch.finfo(dtype).min)
