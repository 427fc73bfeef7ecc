"""Clipped ratios in one launch from the log-probs, per sequence or per token, and a KL penalty beside them.

There is one program per sequence. It sums the log-ratios, goes through the tokens once more for what each of
them has of its own, and whoever completes the last sequence reduces the loss and the metrics. The divisor is
known only then, so that gradients are still to be divided by it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.kernels.launch import Tile, launch, row_kernel, without_spills
from gspo_kernels.kernels.rows import element
from gspo_kernels.kernels.sequences import (
    KL,
    LEAST,
    MOST,
    SCRATCH_ROWS,
    arrive,
    clip,
    clip_sequence,
    difference,
    length_of,
    reduce_batch,
    rows_of,
    store_cell,
    store_sequence,
    sum_sequence,
    without_sequences,
)
from gspo_kernels.types import METRICS, KLPenalty, RatioClip, RatioStep

_TOKENS_PER_THREAD = 4
_STEP = Tile(1024, 8)


@triton.jit
def kl_penalty(d, ESTIMATOR: tl.constexpr):
    """``evaluate.kl_penalty`` of an fp64 log-ratio to the reference, and its derivative."""
    if ESTIMATOR == "k1":
        value = d
        slope = tl.full(d.shape, 1.0, tl.float64)
    elif ESTIMATOR == "k2":
        value = 0.5 * d * d
        slope = d
    else:
        # expm1(-d), by Kahan's correction where exp(-d) - 1 would cancel
        power = tl.exp(-d)
        whole = power - 1.0
        corrected = tl.where(whole == 0.0, -d, whole * -d / tl.log(power))
        grown = tl.where(tl.abs(d) < 0.5, corrected, whole)
        # it outgrows d, also where both are infinite
        value = grown + tl.where(d < -1.7976931348623157e308, -1.7976931348623157e308, d)
        slope = -grown
    return value, slope


@triton.jit
def of_tokens(pointer, b, t, stride_b, stride_t, counted):
    """One fp64 number for each token that counts, 0 for the others."""
    return tl.load(element(pointer, b, t, stride_b, stride_t), mask=counted, other=0.0).to(tl.float64)


@row_kernel
def ratio_step_kernel(
    logprobs_ptr,
    mask_ptr,
    old_ptr,
    advantages_ptr,
    weights_ptr,
    lengths_ptr,
    normalizer_ptr,
    cu_seqlens_ptr,
    reference_ptr,
    beta_ptr,
    gradient_ptr,
    loss_ptr,
    divisor_ptr,
    metrics_ptr,
    scratch_ptr,
    counter_ptr,
    N: tl.int32,
    T: tl.int32,
    sequences: tl.int32,
    log_low: tl.float64,
    log_high: tl.float64,
    log_dual: tl.float64,
    divisor_scale: tl.float64,
    mask_stride_b: tl.int64,
    mask_stride_t: tl.int64,
    old_stride_b: tl.int64,
    old_stride_t: tl.int64,
    advantages_stride_b: tl.int64,
    advantages_stride_t: tl.int64,
    weights_stride_b: tl.int64,
    weights_stride_t: tl.int64,
    reference_stride_b: tl.int64,
    reference_stride_t: tl.int64,
    beta_stride_b: tl.int64,
    beta_stride_t: tl.int64,
    lengths_stride: tl.int64,
    COUNT_TOKENS: tl.constexpr,
    DIVISOR: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    ESTIMATOR: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    SEQUENCES_PER_BLOCK: tl.constexpr,
):
    """One sequence, computed in fp64; the module's docstring says how."""
    sequence = tl.program_id(0)
    first, last = rows_of(sequence, cu_seqlens_ptr, N, T)
    low_bound = tl.full([], log_low, tl.float64)
    high_bound = tl.full([], log_high, tl.float64)
    dual_bound = tl.full([], log_dual, tl.float64)
    count, log_ratio = sum_sequence(
        sequence,
        first,
        last,
        T,
        mask_ptr,
        old_ptr,
        logprobs_ptr,
        0,
        mask_stride_b,
        mask_stride_t,
        old_stride_b,
        old_stride_t,
        cu_seqlens_ptr is not None,
        tl.float64,
        TOKENS_PER_BLOCK,
    )
    length = length_of(sequence, count, lengths_ptr, lengths_stride)
    share = tl.full([], 1.0, tl.float64)
    if not COUNT_TOKENS:
        share = share / length
    if not PER_TOKEN:
        ratio, loss, coefficient, low, high = clip_sequence(
            sequence,
            count,
            log_ratio,
            length,
            advantages_ptr,
            weights_ptr,
            low_bound,
            high_bound,
            dual_bound,
            advantages_stride_b,
            weights_stride_b,
            COUNT_TOKENS,
            tl.float64,
        )

    lanes = tl.arange(0, TOKENS_PER_BLOCK)
    ratios = tl.zeros([TOKENS_PER_BLOCK], tl.float64)
    least = tl.full([TOKENS_PER_BLOCK], float("inf"), tl.float64)
    most = tl.full([TOKENS_PER_BLOCK], -float("inf"), tl.float64)
    lows = tl.zeros([TOKENS_PER_BLOCK], tl.int32)
    highs = tl.zeros([TOKENS_PER_BLOCK], tl.int32)
    losses = tl.zeros([TOKENS_PER_BLOCK], tl.float64)
    kls = tl.zeros([TOKENS_PER_BLOCK], tl.float64)
    actives = tl.zeros([TOKENS_PER_BLOCK], tl.int32)
    for start in range(first, last, TOKENS_PER_BLOCK):
        rows = start + lanes
        inside = rows < last
        t = rows
        if cu_seqlens_ptr is None:
            t = rows - first
        # The stride from one sequence to the next is 0 where they are packed.
        b = rows * 0 + sequence
        counted = inside & (
            tl.load(element(mask_ptr, b, t, mask_stride_b, mask_stride_t), mask=inside, other=0) != 0
        )
        new = tl.load(logprobs_ptr + rows, mask=counted, other=0.0).to(tl.float64)
        if PER_TOKEN:
            weight = tl.full([TOKENS_PER_BLOCK], 1.0, tl.float64)
            if weights_ptr is not None:
                weight = of_tokens(weights_ptr, b, t, weights_stride_b, weights_stride_t, counted)
            token_ratio, token_loss, slope, token_low, token_high = clip(
                difference(new, of_tokens(old_ptr, b, t, old_stride_b, old_stride_t, counted)),
                of_tokens(advantages_ptr, b, t, advantages_stride_b, advantages_stride_t, counted),
                weight,
                low_bound,
                high_bound,
                dual_bound,
            )
            ratios += tl.where(counted, token_ratio, 0.0)
            least = tl.minimum(least, tl.where(counted, token_ratio, float("inf")))
            most = tl.maximum(most, tl.where(counted, token_ratio, -float("inf")))
            lows += tl.where(counted & token_low, 1, 0)
            highs += tl.where(counted & token_high, 1, 0)
            losses += tl.where(counted, token_loss, 0.0)
            slope = slope * share
        else:
            slope = tl.zeros([TOKENS_PER_BLOCK], tl.float64) + coefficient
        if reference_ptr is not None:
            reference = of_tokens(reference_ptr, b, t, reference_stride_b, reference_stride_t, counted)
            kl, kl_slope = kl_penalty(difference(new, reference), ESTIMATOR)
            kls += tl.where(counted, kl, 0.0)
            if beta_ptr is not None:
                beta = of_tokens(beta_ptr, b, t, beta_stride_b, beta_stride_t, counted)
                # Zero wins over infinity.
                losses += tl.where((beta == 0) | (kl == 0), 0.0, beta * kl)
                slope += tl.where((beta == 0) | (kl_slope == 0), 0.0, beta * kl_slope) * share
        slope = tl.where(counted, slope, 0.0)
        actives |= tl.where(slope != 0, 1, 0)
        tl.store(gradient_ptr + rows, slope, mask=inside)

    token_losses = tl.sum(losses, axis=0) * share
    if PER_TOKEN:
        ratio = tl.sum(ratios, axis=0)
        loss = token_losses
        low = tl.sum(lows, axis=0)
        high = tl.sum(highs, axis=0)
        store_cell(scratch_ptr, LEAST, sequence, sequences, tl.min(least, axis=0))
        store_cell(scratch_ptr, MOST, sequence, sequences, tl.max(most, axis=0))
    else:
        loss += token_losses
    if reference_ptr is not None:
        store_cell(scratch_ptr, KL, sequence, sequences, tl.sum(kls, axis=0))
    active = tl.max(actives, axis=0)
    store_sequence(scratch_ptr, sequence, sequences, count, log_ratio, length, ratio, loss, low, high, active)
    if arrive(counter_ptr) == sequences - 1:
        reduce_batch(
            scratch_ptr,
            sequences,
            normalizer_ptr,
            tl.full([], divisor_scale, tl.float64),
            loss_ptr,
            divisor_ptr,
            metrics_ptr,
            DIVISOR,
            PER_TOKEN,
            reference_ptr is not None,
            tl.float64,
            SEQUENCES_PER_BLOCK,
        )


def ratio_step(
    logprobs: Tensor,
    mask: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    form: RatioClip,
    *,
    weights: Tensor | None,
    lengths: Tensor | None,
    normalizer: Tensor | None,
    cu_seqlens: Tensor | None,
    kl: KLPenalty | None = None,
    doubt: Callable[[], None] | None = None,
) -> RatioStep:
    """See ``ops.backends.RatioBackend.ratio_step``."""
    B, T = logprobs.shape
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    new = logprobs.new_empty
    loss, metrics = new(()), new(len(METRICS) + (kl is not None))
    divisor = torch.empty((), dtype=torch.float64, device=logprobs.device)
    if sequences == 0:
        without_sequences(form, normalizer, loss, divisor, metrics)
        return RatioStep(loss, metrics, torch.zeros_like(logprobs))
    old = logprobs if old_logprobs is None else old_logprobs
    reference = None if kl is None else kl.ref_logprobs
    beta = None if kl is None or kl.beta is None else kl.beta.expand(logprobs.shape)
    gradient = torch.empty_like(logprobs, dtype=torch.float64)

    def strides(values: Tensor | None) -> tuple[int, int]:
        """From one sequence to the next, and from one token; 0 where there is one value for all."""
        if values is None:
            return (0, 0)
        if values.ndim == 1:
            return (values.stride(0), 0)
        return (values.stride(0) if cu_seqlens is None else 0, values.stride(1))

    launch(
        ratio_step_kernel,
        sequences,
        logprobs.device,
        without_spills(_STEP, True, 255),
        logprobs,
        mask.view(torch.int8),
        old,
        advantages,
        weights,
        lengths,
        normalizer,
        None if cu_seqlens is None else cu_seqlens.to(torch.int32).contiguous(),
        reference,
        beta,
        gradient,
        loss,
        divisor,
        metrics,
        torch.empty(SCRATCH_ROWS * sequences, dtype=torch.float64, device=logprobs.device),
        torch.zeros(1, dtype=torch.int32, device=logprobs.device),
        B * T,
        T,
        sequences,
        form.log_low,
        form.log_high,
        form.log_dual,
        form.divisor_scale,
        *strides(mask),
        *strides(old),
        *strides(advantages),
        *strides(weights),
        *strides(reference),
        *strides(beta),
        0 if lengths is None else lengths.stride(0),
        COUNT_TOKENS=form.count_tokens,
        DIVISOR=form.divisor,
        PER_TOKEN=form.level == "token",
        ESTIMATOR=None if kl is None else kl.estimator,
        TOKENS_PER_BLOCK=32 * _STEP.warps * _TOKENS_PER_THREAD,
        SEQUENCES_PER_BLOCK=32 * _STEP.warps,
    )
    if doubt is not None:
        doubt()
    return RatioStep(loss, metrics, torch.div(gradient, divisor, out=torch.empty_like(logprobs)))
