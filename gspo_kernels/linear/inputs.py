"""The arguments of entries that take hidden states and the head's weight."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels import checks
from gspo_kernels.linear.chunks import Chunking
from gspo_kernels.logits import check_scores

LOGITS_DTYPES = ("float32", "input")


def check_inputs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """[B, T, H] with [B, T], or [N, H] with [N]; returns the three as autocast, if on, wants them."""
    check_scores("hidden", hidden, labels, "H")
    checks.floats("weight", weight, None, "[V, H]", labels.device)
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight: got shape {tuple(weight.shape)}, expected [V, H] with H = {hidden.shape[-1]}"
        )
    if 0 in weight.shape:
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, expected V >= 1 and H >= 1")
    if bias is not None:
        checks.floats("bias", bias, (weight.shape[0],), "[V]", labels.device)
    if torch.is_autocast_enabled(hidden.device.type):
        low = torch.get_autocast_dtype(hidden.device.type)
        # as F.linear does it: fp64 stays out of autocast
        if torch.float64 not in (hidden.dtype, weight.dtype):
            return hidden.to(low), weight.to(low), None if bias is None else bias.to(low)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.dtype != hidden.dtype:
            raise TypeError(
                f"{name}: got {value.dtype}, expected {hidden.dtype} like hidden; "
                "mixed dtypes need torch.autocast"
            )
    return hidden, weight, bias


def check_chunking(logits_dtype: str, max_chunk_bytes: int | None, compact: bool) -> Chunking:
    """How logits are to be made, checked; a budget of None becomes 0, the default."""
    checks.choice("logits_dtype", logits_dtype, LOGITS_DTYPES)
    if max_chunk_bytes is not None and checks.integer("max_chunk_bytes", max_chunk_bytes) < 1:
        raise ValueError(f"max_chunk_bytes: got {max_chunk_bytes}, expected at least 1")
    return Chunking(logits_dtype, max_chunk_bytes or 0, compact)
