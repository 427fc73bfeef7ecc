"""Calls of a fused transformers model whose sequences lie in one row."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from gspo_kernels import checks
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.head_call import LOW_PRECISION, replaced_product
from gspo_kernels.integrations.lm_head import head_module
from gspo_kernels.layout import segment_ids
from gspo_kernels.ops.library import checked_values
from gspo_kernels.parallel.groups import Parallel


def shares_sequences(ours: dict[str, Any]) -> bool:
    """Whether other ranks have tokens of the same sequences.

    Raises:
        ValueError: ``parallel`` has other fields than ``cp_group``, for which a fused call has no use.
    """
    parallel = ours.get("parallel", Parallel())
    parallel.only("a fused call", "cp_group")
    return parallel.cp_group is not None


def lay_out_packed(
    model: Any, own: Any, labels: Tensor, ours: dict[str, Any], kwargs: dict[str, Any]
) -> Tensor:
    """Check and complete a packed call; labels and per-token terms [1, N] become [N].

    With a ``cp_group`` attention spans ranks, and what it sees is the caller's to say.
    """
    cu_seqlens = ours["cu_seqlens"]
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
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
    N, shared = labels.shape[1], shares_sequences(ours)
    segments = segment_ids(cu_seqlens, N)
    given = kwargs.get("position_ids")
    if given is None:
        positions = torch.arange(N, device=labels.device) - cu_seqlens.long()[segments]
        kwargs["position_ids"] = positions.unsqueeze(0)
    elif (
        not shared
        and checked_values(labels.device)
        and (
            given.shape != labels.shape
            or not torch.equal(given.diff() == 1, segments.diff().unsqueeze(0) == 0)
        )
    ):
        raise IntegrationError("position_ids: do not restart where cu_seqlens says that sequences begin")
    own_attention = shared or mask is not None or "cu_seq_lens_q" in kwargs
    if not own_attention and not model._gspo_fused.packing_checked:
        _check_packing(model, own, labels.device)
        model._gspo_fused.packing_checked = True
    for term, value in ours.items():
        if isinstance(value, Tensor) and value.shape == labels.shape:
            ours[term] = value.squeeze(0)
    return labels.squeeze(0)


@torch.no_grad()
def _check_packing(model: Any, own: Any, device: torch.device) -> None:
    """Refuse a model in which packed sequences see each other; the same few tokens in every process."""
    tokens = torch.arange(1, 7, device=device).unsqueeze(0) % model.config.get_text_config().vocab_size
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device=device)
    training = [module for module in model.modules() if module.training]
    for module in training:  # dropout would differ
        module.training = False
    try:
        with replaced_product(head_module(model), lambda hidden: hidden, lambda hidden: hidden) as hidden:
            for part in (slice(0, 6), slice(3, 6)):
                own(
                    input_ids=tokens[:, part],
                    position_ids=positions[:, part],
                    use_cache=False,
                    return_dict=True,
                )
    finally:
        for module in training:
            module.training = True
    packed, alone = (x.double() for x in (hidden[0][:, 3:], hidden[1]))
    # more than rounding is refused; at 16 bits a router may send a token to another expert
    tolerance = 0.1 if hidden[0].dtype in LOW_PRECISION else 1e-3
    difference = float((packed - alone).norm() / alone.norm())
    if not difference <= tolerance:
        raise IntegrationError(
            f"cu_seqlens: packed sequences see each other in {type(model).__name__} with "
            f"{model.config._attn_implementation!r} attention (hidden states change by {difference:.1%}); "
            "pass padded rows, or a 4-D attention_mask"
        )


def score_packed(ours: dict[str, Any], labels: Tensor) -> None:
    """Expand values that are one per sequence to one per token, as scoring takes them."""
    cu_seqlens, temperature = ours.pop("cu_seqlens"), ours.get("temperature")
    if isinstance(temperature, Tensor):
        shape = (cu_seqlens.shape[0] - 1,)
        checks.floats("temperature", temperature, shape, "one per sequence", labels.device)
        ours["temperature"] = temperature[segment_ids(cu_seqlens, labels.numel())]
