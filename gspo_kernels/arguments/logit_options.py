"""Arguments of functions that take or compute logits: checks and conversion to ``RowOptions``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gspo_kernels.arguments.values import mask_of_shard
from gspo_kernels.backends.dispatch import resolve
from gspo_kernels.core import bits, checks
from gspo_kernels.core.layout import segment_ids
from gspo_kernels.core.types import LogitTransform, RowOptions, Shard, stats_dtype
from gspo_kernels.distributed.groups import Parallel, group_name
from gspo_kernels.objectives.base import Objective


class LogitOptions(NamedTuple):
    """How logits become log-probs and which backend computes them, as the caller passed it."""

    temperature: float | Tensor = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    kept_mask: Tensor | None = None
    ignore_index: int = -100
    backend: str = "auto"

    def normalize(
        self,
        labels: Tensor,
        cu_seqlens: Tensor | None,
        dtype: torch.dtype,
        width: int,
        parallel: Parallel,
    ) -> RowOptions:
        """Check the options and convert them to the operators' form.

        Args:
            labels: [B, T] or [N], or any tensor of their shape and device.
            cu_seqlens: checked offsets; with them a tensor ``temperature`` has one value per sequence.
            dtype: of the logits.
            width: the number of logit columns of this process.
            parallel: the ranks that have the other columns.

        Raises:
            TypeError, ValueError: a wrong argument, named in the message.
            RuntimeError: the backend doesn't support the tensors' device.
        """
        scalar, row_temperature = 1.0, None
        if isinstance(self.temperature, Tensor):
            passed, device = self.temperature, labels.device
            sequences = labels.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
            checks.tensor("temperature", passed, (sequences,), "one per sequence", device, checks.FLOATS)
            each = passed.detach().to(stats_dtype(dtype))
            if cu_seqlens is not None:
                each = each[segment_ids(cu_seqlens, labels.numel())]
            row_temperature = (
                each.unsqueeze(0) if labels.ndim == 1 else each.unsqueeze(1).expand(labels.shape)
            )
        else:
            scalar = checks.number("temperature", self.temperature, positive=True)
        scale = checks.number("logit_scale", self.logit_scale)
        cap = 0.0 if self.softcap is None else checks.number("softcap", self.softcap, positive=True)
        checks.integer("ignore_index", self.ignore_index, labels.dtype)
        if not isinstance(self.backend, str):
            raise TypeError(f"backend: got {type(self.backend).__name__}, expected a name")
        backend = resolve(self.backend, labels.device)
        shard = _UNSHARDED if parallel.tp_group is None else _shard(parallel, width)
        kept = None if self.kept_mask is None else self._kept_mask(labels, width, shard)
        transform = LogitTransform(scale, cap, scalar, row_temperature, kept)
        return RowOptions(transform, self.ignore_index, backend, shard)

    def _kept_mask(self, labels: Tensor, width: int, shard: Shard) -> Tensor:
        """Return the sampling mask of this process's columns, in rows."""
        shape, device = tuple(labels.shape), labels.device
        if shard.group:  # the mask covers the whole vocabulary
            mask = checks.tensor(
                "kept_mask", self.kept_mask, None, "of the labels' shape and words", device, (torch.int32,)
            )
            min_words = bits.words(shard.start + width if shard.start >= 0 else 1)
            if tuple(mask.shape[:-1]) != shape or mask.shape[-1] < min_words:
                raise ValueError(
                    f"kept_mask: got shape {tuple(mask.shape)}, expected {(*shape, 'ceil(V / 32)')} with "
                    "the V of the whole vocabulary"
                )
            mask = mask_of_shard(mask, shard, width)
        else:
            meaning = f"the labels' shape and ceil(V / 32) words for V = {width}"
            words = (*shape, bits.words(width))
            mask = checks.tensor("kept_mask", self.kept_mask, words, meaning, device, (torch.int32,))
        mask = mask.contiguous()
        return mask.unsqueeze(0) if labels.ndim == 1 else mask


_UNSHARDED = Shard()


def _shard(parallel: Parallel, width: int) -> Shard:
    """Return the place of this process's ``width`` columns in the whole vocabulary."""
    name = group_name("tp_group", parallel.tp_group)
    if parallel.vocab_range is None:
        return Shard(name)
    first, last = parallel.vocab_range
    if last - first != width:
        raise ValueError(
            f"vocab_range: got {parallel.vocab_range}, expected (first, first + {width}) for the {width} "
            "columns that this rank has"
        )
    return Shard(name, first)


def zero_labels(name: str, values: Tensor, width: str) -> Tensor:
    """Check values [B, T, ``width``] or [N, ``width``]; return zeros of the labels' shape, int64."""
    checks.floats(name, values, None, f"[B, T, {width}] or [N, {width}]", None)
    if values.ndim not in (2, 3):
        raise ValueError(f"{name}: got shape {tuple(values.shape)}, expected [B, T, {width}] or [N, {width}]")
    return torch.zeros(values.shape[:-1], dtype=torch.int64, device=values.device)


def check_labels_match(
    name: str, values: Tensor, labels: Tensor, width: str, scattered: bool = False
) -> None:
    """Check labels [B, T] with values [B, T, ``width``], or labels [N] with values [N, ``width``].

    ``scattered``: the values belong to some of the tokens only, so that T or N may differ.
    """
    checks.tensor("labels", labels, None, "[B, T] or [N]", None, checks.INTEGERS)
    if labels.ndim not in (1, 2):
        raise ValueError(f"labels: got shape {tuple(labels.shape)}, expected [B, T] or [N]")
    checks.tensor(name, values, None, f"[B, T, {width}] or [N, {width}]", None, checks.FLOATS)
    shared = labels.ndim - 1 if scattered else labels.ndim
    if values.ndim != labels.ndim + 1 or values.shape[:shared] != labels.shape[:shared]:
        expected = ", ".join(map(str, (*labels.shape, width)))
        raise ValueError(
            f"{name}: got shape {tuple(values.shape)}, expected [{expected}] for labels of shape "
            f"{tuple(labels.shape)}"
        )
    if values.shape[-1] == 0:
        raise ValueError(f"{name}: got shape {tuple(values.shape)}, expected {width} >= 1")
    if values.device != labels.device:
        raise ValueError(f"labels: is on {labels.device}, expected {values.device} like {name}")


def check_inplace(logits: Tensor, inplace_backward: bool) -> None:
    """With ``inplace_backward``, reject logits whose memory can't hold their gradient."""
    if not checks.flag("inplace_backward", inplace_backward):
        return
    if not logits.numel():
        return
    if logits.stride(-1) != 1:
        raise ValueError("inplace_backward: logits need a vocabulary stride of 1")
    reach = 1
    for stride, size in sorted(zip(logits.stride(), logits.shape, strict=True)):
        if size > 1 and stride < reach:
            raise ValueError(
                f"inplace_backward: got True with logits of strides {logits.stride()}, whose rows overlap; "
                "pass logits.contiguous()"
            )
        reach += (size - 1) * stride


def wants_entropy(return_entropy: bool, entropy_coef: float | Tensor | None, objective: Objective) -> bool:
    """Return whether the entropy is needed: by the caller, by an entropy bonus, or by the objective."""
    checks.flag("return_entropy", return_entropy)
    checks.objective(objective, Objective)
    in_the_loss = not isinstance(entropy_coef, int | float) or entropy_coef != 0
    return return_entropy or in_the_loss or "entropy" in objective.needs
