"""Packed rows in fused calls: several sequences in one row [1, N], with ``cu_seqlens`` and positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.core import checks
from gspo_kernels.core.layout import queued, segment_ids
from gspo_kernels.core.operators import checked_values
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.fused_arguments import signature
from gspo_kernels.integrations.hooks import warn_once
from gspo_kernels.models.rope import VaryingRope
from gspo_kernels.models.rows import Row, Tokens, check_rows_of, plain_row


def check_one_per_row(model: Any, kwargs: dict[str, Any]) -> None:
    """Raise IntegrationError if positions of a call without ``cu_seqlens`` say that its rows are packed."""
    positions = kwargs.get("position_ids")
    if positions is None or kwargs.get("attention_mask") is not None:
        return
    counted = _text_positions(model, positions)
    if counted is None:  # rows and columns of images count back, too; only sequences begin at 0 on all axes
        counted = positions.amax(0).clamp(max=1)
    if checked_values(positions.device) and bool((counted.diff() < 0).any()):
        raise IntegrationError(
            "position_ids: restart within a row, which then holds several sequences; pass cu_seqlens with "
            "one row [1, N]"
        )


def check_frequencies(
    model: Any, ropes: Sequence[VaryingRope], labels: Tensor, cu_seqlens: Tensor | None, shared: bool
) -> None:
    """Refuse packed sequences that would change each other's RoPE frequencies; warn of padded ones."""
    rope = min(ropes, key=lambda rope: rope.limit, default=None)
    if rope is None or (labels.shape[1] <= rope.limit and not shared):
        return
    reason = (
        f"the RoPE of {type(model).__name__} ({rope.kind}) takes its frequencies from the largest position "
        f"of a call, others beyond {rope.limit} tokens"
    )
    if shared:
        raise IntegrationError(f"parallel: {reason}, and each rank of cp_group sees other positions")
    if cu_seqlens is not None and cu_seqlens.shape[0] > 2:
        raise IntegrationError(
            f"cu_seqlens: {reason}, so packed sequences change each other; pass one sequence per call, or at "
            f"most {rope.limit} tokens"
        )
    if labels.shape[0] > 1:
        warn_once(f"{reason}: log-probs depend on padding and on longer rows; pass rows of one length")


def lay_out_packed(
    model: Any, labels: Tensor, options: dict[str, Any], kwargs: dict[str, Any], shared: bool
) -> Tensor:
    """Check and complete a packed call; labels and per-token terms [1, N] become [N].

    If ranks share sequences, attention spans ranks, and the caller must keep sequences apart. Scoring, where
    no advantages are passed, takes no ``cu_seqlens``, so a temperature per sequence becomes one per token.
    """
    cu_seqlens, temperature = queued(options["cu_seqlens"], labels.device), options.get("temperature")
    if "position_ids" not in signature(type(model).forward).parameters:
        raise IntegrationError(
            f"cu_seqlens: {type(model).__name__} takes no position_ids, so it can't keep packed sequences "
            "apart; pass padded rows"
        )
    mask = kwargs.get("attention_mask")
    if (mask is not None and mask.ndim == 2) or kwargs["use_cache"]:
        raise IntegrationError(
            "cu_seqlens: with a 2-D attention_mask or use_cache=True packed sequences attend to each other; "
            "pass neither"
        )
    N, axes = labels.shape[1], _rope_axes(model)
    segments, positions = segment_ids(cu_seqlens, N), kwargs.get("position_ids")
    places = (torch.arange(N, device=labels.device) - cu_seqlens.long()[segments]).unsqueeze(0)
    positions = places if positions is None else positions
    shapes = [tuple(labels.shape), *((n, *labels.shape) for n in (axes, axes + 1) if axes)]
    if tuple(positions.shape) not in shapes:
        raise IntegrationError(
            f"position_ids: got shape {tuple(positions.shape)}, expected {' or '.join(map(str, shapes))}"
        )
    counted = _text_positions(model, positions)
    if counted is not None and not shared and checked_values(labels.device):
        inside = segments.diff().unsqueeze(0) == 0
        if not torch.equal(counted.diff() == 1, inside):
            raise IntegrationError("position_ids: do not restart where cu_seqlens says that sequences begin")
    if axes and positions.shape[0] != axes + 1:
        # transformers keeps sequences apart by the places of their tokens, before the positions on each axis
        counted = places if counted is None else counted
        positions = torch.cat([counted.unsqueeze(0), positions.expand(axes, -1, -1)])
    kwargs["position_ids"] = positions
    for name, value in options.items():
        if isinstance(value, Tensor) and value.shape == labels.shape:
            options[name] = value.squeeze(0)
    if "advantages" not in options:
        del options["cu_seqlens"]
        if isinstance(temperature, Tensor):
            shape = (cu_seqlens.shape[0] - 1,)
            checks.floats("temperature", temperature, shape, "one per sequence", labels.device)
            options["temperature"] = temperature[segments]
    return labels.squeeze(0)


def check_packing(model: Any, forward: Any, device: torch.device) -> None:
    """Run a few tokens packed and one by one; raise IntegrationError if their hidden states differ."""
    axes = _rope_axes(model)

    def row_of_a_packed_call(model: Any, prompts: Tokens, completions: Tokens) -> Row:
        row = plain_row(model, prompts, completions)
        if axes:
            row.inputs["position_ids"] = row.inputs["position_ids"].repeat(axes + 1, 1, 1)
        return row

    try:
        check_rows_of(model, row_of_a_packed_call, call=forward, device=device)
    except IntegrationError as error:
        raise IntegrationError(f"cu_seqlens: {error}; pass padded rows, or a 4-D attention_mask") from None


def _rope_axes(model: Any) -> int:
    """Return the number of axes of a model's M-RoPE (Qwen-VL: time, row, column), or 0 for other models."""
    sections = (vars(module).get("mrope_section") for module in model.modules())
    return next((len(each) for each in sections if each), 0)


def _text_positions(model: Any, positions: Tensor) -> Tensor | None:
    """Return the positions that count tokens, [B, T]; None for M-RoPE's [axes, B, T], which have none.

    transformers takes [1 + axes, B, T] too, where those that count tokens come first.
    """
    if positions.ndim < 3:
        return positions
    return positions[0] if positions.shape[0] == _rope_axes(model) + 1 else None
