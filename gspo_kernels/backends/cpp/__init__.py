"""The C++ CPU backend: ``protocol.RatioBackend`` over ``gspo_kernels._C``, built from csrc/."""

from __future__ import annotations

import functools
import importlib
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.core.types import (
    MASK_DTYPES,
    METRICS,
    KLPenalty,
    LogitRows,
    LogitTransform,
    Normalizers,
    PairStats,
    RatioClip,
    RatioOperands,
    RatioStep,
    Recheck,
    RowGradients,
    RowPair,
    RowStats,
    SequenceRatioStats,
    allocate_pair_stats,
    stats_dtype,
    wrong_mask,
)

_LOGGER = logging.getLogger("gspo_kernels")
_DIVISORS = ("sequences", "tokens", "one")
_OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@functools.cache
def _load_error() -> str | None:
    """Load the extension. Return None, or the reason why it can't be loaded."""
    try:
        importlib.import_module(f"{__name__.rsplit('.', 2)[0]}._C")
    except ModuleNotFoundError:
        note = Path(__file__).parents[2] / "_C.unavailable"
        reason = note.read_text().strip() if note.is_file() else "it has not been built"
        return f"the C++ extension gspo_kernels._C is missing: {reason}"
    except (ImportError, OSError, RuntimeError) as error:
        reason = f"the C++ extension gspo_kernels._C does not load: {error}"
        _LOGGER.warning("falling back to PyTorch on the CPU: %s", reason)
        return reason
    return None


def unavailable(device: torch.device) -> str | None:
    """See ``protocol.Backend.unavailable``."""
    if device.type != "cpu":
        return f"the cpp backend supports CPU tensors only, not {device.type}"
    return _load_error()


def logprobs_forward(rows: LogitRows, entropy: bool) -> RowStats:
    """See ``protocol.RowBackend.logprobs_forward``."""
    stats = _empty_stats(rows, entropy)
    operators().logprobs_forward(*_row_arguments(rows), *stats)
    return stats


def logprobs_backward(
    rows: LogitRows, stats: RowStats, grads: RowGradients, out: Tensor, sharded: bool = False
) -> None:
    """See ``protocol.RowBackend.logprobs_backward``."""
    if grads.grad_entropy is not None and stats.entropy is None:
        raise ValueError("stats.entropy: got None, expected a tensor because grad_entropy is given")
    _check_out(rows.logits, out)
    dtype = stats_dtype(rows.logits.dtype)
    operators().logprobs_backward(
        *_row_arguments(rows),
        _vector(stats.logprobs, rows.logits),
        stats.lse.contiguous(),
        _vector(stats.entropy, rows.logits),
        *[None if grad is None else grad.detach().to(dtype) for grad in grads],
        sharded,
        out,
    )


def logprobs_and_grad(rows: LogitRows, coefficients: Tensor, out: Tensor) -> RowStats:
    """See ``protocol.RowBackend.logprobs_and_grad``."""
    _check_out(rows.logits, out)
    stats = _empty_stats(rows, entropy=False)
    operators().logprobs_and_grad(
        *_row_arguments(rows), _vector(coefficients, rows.logits), stats.logprobs, stats.lse, out
    )
    return stats


def one_pass_pays(rows: LogitRows, *, all_rows_active: bool, has_ratio: bool) -> bool:
    """Return True, as one pass is always faster and bitwise identical."""
    return True


def logprobs_and_rows(rows: LogitRows, out: Tensor) -> tuple[RowStats, Tensor]:
    """See ``protocol.OnePassBackend.logprobs_and_rows``."""
    _check_out(rows.logits, out)
    wide = stats_dtype(rows.logits.dtype)
    dtypes = (wide, torch.bfloat16) if wide == torch.float32 else (wide,)
    if out.dtype not in dtypes:
        raise TypeError(f"out: got {out.dtype}, expected {' or '.join(map(str, dtypes))}")
    stats = _empty_stats(rows, entropy=False)
    factors = torch.empty_like(stats.logprobs)
    operators().logprobs_and_rows(*_row_arguments(rows), stats.logprobs, stats.lse, factors, out)
    return stats, factors


_PIECE = 2**22
"""Elements of logits to convert at a time if student and teacher have different dtypes."""


def divergence(
    rows: RowPair, known: Normalizers | PairStats | None, grad: Tensor | None, out: Tensor | None
) -> PairStats:
    """See ``protocol.RowBackend.divergence``."""
    logits, teacher_logits, teacher_transform = rows.logits, rows.teacher_logits, rows.teacher_transform
    if out is not None:
        _check_out(logits, out)
    if logits.dtype != teacher_logits.dtype:
        return _divergence_of_two_dtypes(rows, known, grad, out)
    stats = allocate_pair_stats(logits, known)
    operators().divergence(
        *_row_arguments(rows),
        teacher_logits.detach(),
        _vector(teacher_transform.row_temperature, logits),
        *teacher_transform[:3],
        rows.beta,
        known is not None,
        isinstance(known, PairStats),
        _vector(grad, logits),
        *stats,
        out,
    )
    return stats


def _divergence_of_two_dtypes(
    rows: RowPair, known: Normalizers | PairStats | None, grad: Tensor | None, out: Tensor | None
) -> PairStats:
    """Compute ``divergence`` of a few rows at a time, converted to the promoted dtype."""
    B, T, V = rows.logits.shape
    wide = torch.promote_types(rows.logits.dtype, rows.teacher_logits.dtype)
    stats = allocate_pair_stats(rows.logits)
    step = max(1, _PIECE // max(V, 1))
    for b in range(B):
        for start in range(0, T, step):
            at = (slice(b, b + 1), slice(start, start + step))
            piece = rows._replace(
                logits=rows.logits[at].to(wide),
                teacher_logits=rows.teacher_logits[at].to(wide),
                labels=rows.labels[at],
                transform=rows.transform.rows(lambda values: values[at]),  # noqa: B023
                teacher_transform=rows.teacher_transform.rows(lambda values: values[at]),  # noqa: B023
            )
            piece_stats = divergence(
                piece,
                None if known is None else type(known)(*(each[at] for each in known)),
                None if grad is None else grad[at],
                None if out is None else out[at],
            )
            for values, piece_values in zip(stats, piece_stats, strict=True):
                values[at] = piece_values
    return stats


_NO_MASK, _RECHECK = range(2)
"""Results of the C++ ``ratio_step``: the mask has values other than 0 and 1; values must be rechecked."""


def ratio_step(
    logprobs: Tensor,
    mask: Tensor,
    operands: RatioOperands,
    ratio_clip: RatioClip,
    kl: KLPenalty | None = None,
    recheck: Recheck = None,
) -> RatioStep:
    """See ``protocol.RatioBackend.ratio_step``."""
    new = logprobs.new_empty
    step = RatioStep(new(()), new(len(METRICS) + (kl is not None)), torch.empty_like(logprobs))
    beta = None if kl is None or kl.beta is None else kl.beta.to(torch.float64).expand(logprobs.shape)
    verdict = operators().ratio_step(
        logprobs.detach() if logprobs.requires_grad else logprobs,
        mask.contiguous(),
        *_sequence_arguments(operands, ratio_clip),
        None if kl is None else _numbers(kl.ref_logprobs),
        _numbers(beta),
        0 if kl is None else int(kl.estimator[1:]),
        *step,
    )
    if verdict == _NO_MASK:
        raise wrong_mask(mask)
    if verdict == _RECHECK and recheck is not None:
        recheck()
    return step


def sequence_ratio_forward(
    rows: LogitRows,
    mask: Tensor | None,
    operands: RatioOperands,
    ratio_clip: RatioClip,
    recheck: Recheck = None,
) -> SequenceRatioStats:
    """See ``protocol.RatioBackend.sequence_ratio_forward``."""
    labels = rows.labels
    if mask is not None:
        _, merged, _ = merge_mask(mask, labels, rows.ignore_index)
        assert merged is not None
        labels, rows = merged, rows._replace(labels=merged)
    stats = _empty_stats(rows, entropy=False)
    new = stats.logprobs.new_empty
    loss, divisor = new(()), new(())
    coefficients, metrics = new(operands.advantages.shape), new(len(METRICS))
    valid = operators().sequence_ratio_forward(
        *_row_arguments(rows),
        *_sequence_arguments(operands, ratio_clip),
        *stats[:2],
        loss,
        coefficients,
        divisor,
        metrics,
    )
    if not valid and recheck is not None:
        recheck()
    merged = labels.new_empty(0) if mask is None else labels
    return SequenceRatioStats(loss, stats.logprobs, stats.lse, coefficients, divisor, metrics, merged)


def merge_mask(mask: Tensor, labels: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor | None, bool]:
    """See ``protocol.Backend.merge_mask``."""
    mask, merged = (mask if mask.dtype in MASK_DTYPES else mask.double()).contiguous(), None
    counted = torch.empty_like(mask, dtype=torch.bool)
    if labels is not None:
        wide = labels.to(torch.int64).contiguous()
        merged = torch.empty_like(wide)
        binary = operators().merge_mask(mask, wide, ignore_index, counted, merged)
        return counted, merged.to(labels.dtype), binary
    return counted, None, operators().merge_mask(mask, None, ignore_index, counted, None)


def scale_(values: Tensor, factor: Tensor) -> None:
    """See ``protocol.Backend.scale_``."""
    if factor.item() != 1.0:
        values.mul_(factor)


@functools.cache
def operators() -> torch._ops._OpNamespace:
    """Return the operators of the extension, or raise a RuntimeError if it is missing."""
    reason = _load_error()
    if reason is not None:
        raise RuntimeError(reason)
    return torch.ops.gspo_kernels_cpp


def _empty_stats(rows: LogitRows, entropy: bool) -> RowStats:
    # empty_like is twice as fast as empty with a shape
    like = functools.partial(torch.empty_like, rows.labels, memory_format=torch.contiguous_format)
    kind = stats_dtype(rows.logits.dtype)
    return RowStats(like(dtype=kind), like(dtype=torch.float64), like(dtype=kind) if entropy else None)


def _vector(values: Tensor | None, logits: Tensor) -> Tensor | None:
    """Return one value per row, contiguous and in the dtype of statistics."""
    return None if values is None else values.detach().to(stats_dtype(logits.dtype)).contiguous()


def _numbers(values: Tensor | None) -> Tensor | None:
    """Return the values detached, contiguous, and in fp32 or fp64."""
    if values is None:
        return None
    exact = values.dtype in (torch.float32, torch.float64)
    values = (values if exact else values.to(torch.float64)).contiguous()
    return values.detach() if values.requires_grad else values


def _sequence_arguments(operands: RatioOperands, ratio_clip: RatioClip) -> tuple[Any, ...]:
    *tensors, cu_seqlens = operands
    old_logprobs, *of_sequences = [_numbers(x) for x in tensors]
    return (
        old_logprobs,
        None if cu_seqlens is None else cu_seqlens.to(torch.int64).contiguous(),
        *of_sequences,
        *ratio_clip[:4],
        _DIVISORS.index(ratio_clip.divisor),
        ratio_clip.divisor_scale,
        ratio_clip.level == "token",
    )


def _row_arguments(rows: LogitRows | RowPair) -> tuple[Tensor | float | None, ...]:
    logits, labels = rows.logits, rows.labels
    if labels.shape != logits.shape[:2]:
        raise ValueError(f"labels: got shape {tuple(labels.shape)}, expected {tuple(logits.shape[:2])}")
    options = row_options(rows.transform, rows.ignore_index, stats_dtype(logits.dtype))
    return (logits.detach(), labels.to(torch.int64).contiguous(), *options)


def row_options(
    transform: LogitTransform, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor | float | None, ...]:
    """Return the logit transform in the operators' form; ``dtype`` is the statistics'."""
    temperature = transform.row_temperature
    return (
        None if temperature is None else temperature.detach().to(dtype).contiguous(),
        None if transform.kept is None else transform.kept.contiguous(),
        transform.logit_scale,
        transform.softcap,
        transform.temperature,
        ignore_index,
    )


def _check_out(logits: Tensor, out: Tensor) -> None:
    if out.shape != logits.shape or (out.shape[-1] > 1 and out.stride(-1) != 1):
        raise ValueError(
            f"out: got shape {tuple(out.shape)} with strides {out.stride()}, "
            f"expected shape {tuple(logits.shape)} with vocabulary stride 1"
        )
    if out.dtype not in _OUT_DTYPES:
        raise TypeError(f"out: got {out.dtype}, expected a float dtype of 16, 32 or 64 bits")
