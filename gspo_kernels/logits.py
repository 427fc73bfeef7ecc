"""The arguments of entries that take logits, or make them: checks, and the options in the operators' form."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gspo_kernels import bits, checks
from gspo_kernels.invariance import is_batch_invariant, refuse_backend
from gspo_kernels.layout import as_rows, segment_ids
from gspo_kernels.objectives.base import Objective
from gspo_kernels.ops.backends import resolve
from gspo_kernels.ops.values import mask_of_ids, mask_of_shard
from gspo_kernels.parallel.groups import Parallel
from gspo_kernels.types import RowOptions, Shard, stats_dtype

R = TypeVar("R")


class LogitArguments(NamedTuple):
    """How logits become log-probs and who computes them, as the caller said it."""

    temperature: float | Tensor = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    kept_ids: Tensor | None = None
    kept_mask: Tensor | None = None
    ignore_index: int = -100
    backend: str = "auto"
    tp_group: Any = None
    vocab_range: tuple[int, int] | None = None

    def checked(self, labels: Tensor, sequences: int, width: int) -> RowOptions:
        """Checked, with the backend settled that serves the labels' device.

        What differs from row to row is still missing; see ``with_rows``. ``width`` is how many columns of
        logits this process has.

        Raises:
            TypeError, ValueError: a wrong argument, named in the message.
            RuntimeError: the backend can't serve the tensors' device.
        """
        scalar = 1.0
        if isinstance(self.temperature, Tensor):
            checks.floats("temperature", self.temperature, (sequences,), "one per sequence", labels.device)
        else:
            scalar = checks.number("temperature", self.temperature, positive=True)
        scale = checks.number("logit_scale", self.logit_scale)
        cap = 0.0 if self.softcap is None else checks.number("softcap", self.softcap, positive=True)
        self._check_kept(labels, width)
        checks.integer("ignore_index", self.ignore_index)
        if not isinstance(self.backend, str):
            raise TypeError(f"backend: got {type(self.backend).__name__}, expected a name")
        serving = resolve(self.backend, labels.device)
        refuse_backend(is_batch_invariant(), serving)
        return RowOptions(scale, cap, scalar, None, None, self.ignore_index, serving, self._shard(width))

    def _shard(self, width: int) -> Shard:
        """Which columns they are."""
        if self.tp_group is None:
            if self.vocab_range is not None:
                raise ValueError(f"vocab_range: got {self.vocab_range} without a tp_group, expected None")
            return Shard()
        from gspo_kernels.parallel.groups import group_name

        name = group_name("tp_group", self.tp_group)
        if self.vocab_range is None:
            return Shard(name)
        first, last = (checks.integer("vocab_range", end) for end in self.vocab_range)
        if first < 0 or last - first != width:
            raise ValueError(
                f"vocab_range: got {self.vocab_range}, expected (first, first + {width}) for the {width} "
                "columns that this rank has"
            )
        return Shard(name, first)

    def _check_kept(self, labels: Tensor, vocabulary: int) -> None:
        where, device = tuple(labels.shape), labels.device
        if self.kept_ids is not None:
            if self.kept_mask is not None:
                raise ValueError(
                    "kept_mask: got a mask, expected None along with kept_ids: they say the same"
                )
            ids = checks.tensor("kept_ids", self.kept_ids, None, "of the labels' shape and K", device)
            checks.dtype("kept_ids", ids, checks.INTEGERS)
            if tuple(ids.shape[:-1]) != where or ids.ndim != labels.ndim + 1:
                raise ValueError(
                    f"kept_ids: got shape {tuple(ids.shape)}, expected {(*where, 'K')} for labels of shape "
                    f"{where}"
                )
        if self.kept_mask is not None:
            if self.tp_group is not None:
                self._check_whole_mask(labels)
                return
            shape = (*where, bits.words(vocabulary))
            meaning = f"the labels' shape and ceil(V / 32) words for V = {vocabulary}"
            mask = checks.tensor("kept_mask", self.kept_mask, shape, meaning, device)
            checks.dtype("kept_mask", mask, (torch.int32,))

    def _check_whole_mask(self, labels: Tensor) -> None:
        """A mask of the whole vocabulary, of which this process has some columns."""
        mask = checks.tensor(
            "kept_mask", self.kept_mask, None, "of the labels' shape and words", labels.device
        )
        checks.dtype("kept_mask", mask, (torch.int32,))
        last = 1 if self.vocab_range is None else checks.integer("vocab_range", self.vocab_range[1])
        if tuple(mask.shape[:-1]) != tuple(labels.shape) or mask.shape[-1] < bits.words(last):
            raise ValueError(
                f"kept_mask: got shape {tuple(mask.shape)}, expected {(*labels.shape, 'ceil(V / 32)')} with "
                "the V of the whole vocabulary"
            )

    def with_rows(
        self,
        options: RowOptions,
        row_labels: Tensor,
        packed: bool,
        cu_seqlens: Tensor | None,
        dtype: torch.dtype,
        vocabulary: int,
    ) -> RowOptions:
        """The options with a temperature per sequence as one per row, and with the rows' sampling masks;
        ``cu_seqlens`` has been checked.
        """
        kept = self.kept_mask
        if options.shard.group and (kept is not None or self.kept_ids is not None):
            kept = mask_of_shard(self.kept_ids, kept, options.shard, vocabulary)
        elif self.kept_ids is not None:
            kept = mask_of_ids(self.kept_ids, vocabulary)
        if kept is not None:
            options = options._replace(kept=as_rows(kept.contiguous(), packed))
        if not isinstance(self.temperature, Tensor):
            return options
        values = self.temperature.detach().to(stats_dtype(dtype))
        if cu_seqlens is not None:
            values = values[segment_ids(cu_seqlens, row_labels.numel())]
        values = values.unsqueeze(0) if packed else values.unsqueeze(1).expand(row_labels.shape)
        return options._replace(row_temperature=values)


_USES = {
    "logit_arguments": ("tp_group", "vocab_range"),
    "product_arguments": ("reduce_hidden_grad", "sequence_parallel"),
    "terms": ("cp_group",),
}


def spread(function: str, parallel: object, arguments: dict[str, Any]) -> dict[str, Any]:
    """A function's arguments with each field of ``parallel`` where it is looked at."""
    if not isinstance(parallel, Parallel):
        raise TypeError(f"parallel: got {type(parallel).__name__}, expected a Parallel")
    uses = {name: fields for name, fields in _USES.items() if name in arguments}
    usable = [field for fields in uses.values() for field in fields]
    if "divergence_arguments" in arguments:
        usable = [field for field in usable if field not in ("cp_group", "sequence_parallel")]
    parallel.only(function, *usable)
    for name, fields in uses.items():
        arguments[name] = arguments[name]._replace(**{field: getattr(parallel, field) for field in fields})
    return arguments


def with_local_tensors(arguments: dict[str, Any]) -> dict[str, Any]:
    """A public function's arguments, with what this process has of DTensors, and the groups of the rest."""
    if "logit_arguments" in arguments and any(hasattr(value, "device_mesh") for value in arguments.values()):
        from gspo_kernels.parallel.placements import resolved

        return resolved(arguments)
    return arguments


def takes_dtensors(implementation: Callable[..., R]) -> Callable[..., R]:
    """Have a public function take DTensors."""

    @functools.wraps(implementation)
    def call(**arguments: Any) -> R:
        return implementation(**with_local_tensors(arguments))

    return call


def check_scores(name: str, scores: Tensor, labels: Tensor, width: str, scattered: bool = False) -> None:
    """Labels [B, T] with scores [B, T, ``width``], or [N] with [N, ``width``].

    ``scattered``: scores are those of some columns of the labels.
    """
    checks.tensor("labels", labels, None, "[B, T] or [N]", None)
    checks.dtype("labels", labels, checks.INTEGERS)
    if labels.ndim not in (1, 2):
        raise ValueError(f"labels: got shape {tuple(labels.shape)}, expected [B, T] or [N]")
    checks.floats(name, scores, None, f"[B, T, {width}] or [N, {width}]", None)
    shared = labels.ndim - 1 if scattered else labels.ndim
    if scores.ndim != labels.ndim + 1 or scores.shape[:shared] != labels.shape[:shared]:
        raise ValueError(
            f"{name}: got shape {tuple(scores.shape)}, expected {(*labels.shape, width)} for labels of shape "
            f"{tuple(labels.shape)}"
        )
    if scores.device != labels.device:
        raise ValueError(f"labels: is on {labels.device}, expected {scores.device} like {name}")


def check_logits(logits: Tensor, labels: Tensor) -> None:
    """[B, T, V] with [B, T], or [N, V] with [N]."""
    check_scores("logits", logits, labels, "V")
    if logits.shape[-1] == 0:
        raise ValueError("logits: the vocabulary is empty, expected V >= 1")


def check_inplace(logits: Tensor, inplace_backward: bool) -> None:
    """Refuse logits that can't hold their own gradient."""
    if not checks.flag("inplace_backward", inplace_backward):
        return
    if any(stride == 0 and size > 1 for stride, size in zip(logits.stride(), logits.shape, strict=True)):
        raise ValueError(
            "inplace_backward: logits are expanded (stride 0), so their gradient doesn't fit in them"
        )
    if logits.numel() and logits.stride(-1) != 1:
        raise ValueError("inplace_backward: logits need a vocabulary stride of 1")


def wants_entropy(return_entropy: bool, entropy_coef: float | Tensor | None, objective: Objective) -> bool:
    """Whether the entropy must be computed: asked for, in the loss, or looked at by the objective."""
    checks.flag("return_entropy", return_entropy)
    checks.objective(objective, Objective)
    in_the_loss = isinstance(entropy_coef, Tensor) or entropy_coef != 0
    return return_entropy or in_the_loss or "entropy" in objective.needs
