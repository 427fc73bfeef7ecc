"""Clipped ratios in one launch from the log-probs, per sequence or per token, with a KL penalty.

There is one program per sequence. It sums the log-ratios, then reads the tokens once more for their ratios,
penalties and gradients. The program that finishes the last sequence reduces the loss and the metrics. A
divisor that counts sequences or tokens is known only then, so another launch divides the gradients by it,
for which the host takes a fifth of the time of PyTorch's division.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo_kernels.backends.triton.columns import element
from gspo_kernels.backends.triton.launch import Tile, launch, typed_kernel, without_spills
from gspo_kernels.backends.triton.sequences import (
    KL,
    LARGEST,
    SCRATCH_ROWS,
    SMALLEST,
    RatioConstants,
    clip,
    clip_sequence,
    divisor_of,
    fill_without_sequences,
    length_of,
    log_ratio_of,
    reduce_batch,
    rows_of,
    signal_and_count,
    store_cell,
    store_sequence,
    strides_of,
    sum_sequence,
)
from gspo_kernels.core.types import METRICS, KLPenalty, RatioClip, RatioOperands, RatioStep, Recheck

_TOKENS_PER_THREAD = 4
_STEP = Tile(1024, 8)


@triton.jit
def kl_penalty(d, ESTIMATOR: tl.constexpr):
    """Return ``evaluate.kl_penalty`` of an fp64 log-ratio to the reference, and its derivative."""
    if ESTIMATOR == "k1":
        value = d
        slope = tl.full(d.shape, 1.0, tl.float64)
    elif ESTIMATOR == "k2":
        value = 0.5 * d * d
        slope = d
    else:
        # expm1(-d), by Kahan's correction where exp(-d) - 1 would cancel
        power = tl.exp(-d)
        exact = power - 1.0
        corrected = tl.where(exact == 0.0, -d, exact * -d / tl.log(power))
        grown = tl.where(tl.abs(d) < 0.5, corrected, exact)
        # exp(-d) outgrows d, also where both are infinite: the sum is then +inf, not NaN
        value = grown + tl.where(d < -1.7976931348623157e308, -1.7976931348623157e308, d)
        slope = -grown
    return value, slope


@triton.jit
def _load_tokens(pointer, b, t, stride_b, stride_t, counted):
    """Load one number per token as fp64, 0 for tokens that don't count."""
    return tl.load(element(pointer, b, t, stride_b, stride_t), mask=counted, other=0.0).to(tl.float64)


@typed_kernel
def ratio_step_kernel(
    logprobs_ptr, mask_ptr, old_ptr, advantages_ptr, weights_ptr, lengths_ptr, normalizer_ptr,
    cu_seqlens_ptr, reference_ptr, beta_ptr,
    gradient_ptr, loss_ptr, divisor_ptr, metrics_ptr, scratch_ptr, counter_ptr,
    mask_b: tl.int64, mask_t: tl.int64, old_b: tl.int64, old_t: tl.int64,
    advantages_b: tl.int64, advantages_t: tl.int64, weights_b: tl.int64, weights_t: tl.int64,
    lengths_b: tl.int64, lengths_t: tl.int64, reference_b: tl.int64, reference_t: tl.int64,
    beta_b: tl.int64, beta_t: tl.int64,
    T: tl.int32, tokens: tl.int32, sequences: tl.int32,
    log_low: tl.float64, log_high: tl.float64, log_dual: tl.float64, divisor_scale: tl.float64,
    RATIO: tl.constexpr,
):  # fmt: skip
    """Compute one sequence in fp64. See ``sequences`` for the outputs."""
    ESTIMATOR: tl.constexpr = RATIO.ESTIMATOR
    TOKENS_PER_BLOCK: tl.constexpr = RATIO.TOKENS_PER_BLOCK
    KNOWN: tl.constexpr = normalizer_ptr is not None or RATIO.DIVISOR == "one"
    if KNOWN:
        divisor = divisor_of(1.0, 1.0, normalizer_ptr, divisor_scale, RATIO)
    sequence = tl.program_id(0)
    first, last = rows_of(sequence, cu_seqlens_ptr, tokens, T)
    count, log_ratio = sum_sequence(
        sequence, first, last, T,
        mask_ptr, mask_b, mask_t, 0, old_ptr, old_b, old_t, logprobs_ptr,
        False, cu_seqlens_ptr is not None, tl.float64, TOKENS_PER_BLOCK,
    )  # fmt: skip
    length = length_of(sequence, count, lengths_ptr, lengths_b)
    share = tl.full([], 1.0, tl.float64)
    if not RATIO.COUNT_TOKENS:
        share = share / length
    if not RATIO.PER_TOKEN:
        s, loss, coefficient, low, high = clip_sequence(
            sequence, count, log_ratio, length, advantages_ptr, advantages_b, weights_ptr, weights_b,
            log_low, log_high, log_dual, RATIO,
        )  # fmt: skip

    lanes = tl.arange(0, TOKENS_PER_BLOCK)
    ratios = tl.zeros([TOKENS_PER_BLOCK], tl.float64)
    smallest = tl.full([TOKENS_PER_BLOCK], float("inf"), tl.float64)
    largest = tl.full([TOKENS_PER_BLOCK], -float("inf"), tl.float64)
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
        counted = inside & (tl.load(element(mask_ptr, b, t, mask_b, mask_t), mask=inside, other=0) != 0)
        new = tl.load(logprobs_ptr + rows, mask=counted, other=0.0).to(tl.float64)
        if RATIO.PER_TOKEN:
            weight = tl.full([TOKENS_PER_BLOCK], 1.0, tl.float64)
            if weights_ptr is not None:
                weight = _load_tokens(weights_ptr, b, t, weights_b, weights_t, counted)
            token_ratio, token_loss, slope, token_low, token_high = clip(
                log_ratio_of(new, _load_tokens(old_ptr, b, t, old_b, old_t, counted)),
                _load_tokens(advantages_ptr, b, t, advantages_b, advantages_t, counted),
                weight,
                log_low,
                log_high,
                log_dual,
            )
            ratios += tl.where(counted, token_ratio, 0.0)
            smallest = tl.minimum(smallest, tl.where(counted, token_ratio, float("inf")))
            largest = tl.maximum(largest, tl.where(counted, token_ratio, -float("inf")))
            lows += tl.where(counted & token_low, 1, 0)
            highs += tl.where(counted & token_high, 1, 0)
            losses += tl.where(counted, token_loss, 0.0)
            slope = slope * share
        else:
            slope = tl.zeros([TOKENS_PER_BLOCK], tl.float64) + coefficient
        if reference_ptr is not None:
            reference = _load_tokens(reference_ptr, b, t, reference_b, reference_t, counted)
            kl, kl_slope = kl_penalty(log_ratio_of(new, reference), ESTIMATOR)
            kls += tl.where(counted, kl, 0.0)
            if beta_ptr is not None:
                beta = _load_tokens(beta_ptr, b, t, beta_b, beta_t, counted)
                # Zero wins over infinity.
                losses += tl.where((beta == 0) | (kl == 0), 0.0, beta * kl)
                slope += tl.where((beta == 0) | (kl_slope == 0), 0.0, beta * kl_slope) * share
        slope = tl.where(counted, slope, 0.0)
        actives |= tl.where(slope != 0, 1, 0)
        if KNOWN:
            slope = slope / divisor
        tl.store(gradient_ptr + rows, slope.to(gradient_ptr.dtype.element_ty), mask=inside)

    token_losses = tl.sum(losses, axis=0) * share
    if RATIO.PER_TOKEN:
        s = tl.sum(ratios, axis=0)
        loss = token_losses
        low = tl.sum(lows, axis=0)
        high = tl.sum(highs, axis=0)
        store_cell(scratch_ptr, SMALLEST, sequence, sequences, tl.min(smallest, axis=0))
        store_cell(scratch_ptr, LARGEST, sequence, sequences, tl.max(largest, axis=0))
    else:
        loss += token_losses
    if reference_ptr is not None:
        store_cell(scratch_ptr, KL, sequence, sequences, tl.sum(kls, axis=0))
    active = tl.max(actives, axis=0)
    store_sequence(scratch_ptr, sequence, sequences, count, log_ratio, length, s, loss, low, high, active)
    if signal_and_count(counter_ptr) == sequences - 1:
        with_kl = reference_ptr is not None
        reduce_batch(
            scratch_ptr, loss_ptr, divisor_ptr, metrics_ptr, sequences, normalizer_ptr, divisor_scale,
            with_kl, RATIO,
        )  # fmt: skip


@typed_kernel
def divide_kernel(gradient_ptr, divisor_ptr, result_ptr, tokens: tl.int32, BLOCK: tl.constexpr):
    """Divide a block of gradients, in fp64, by the loss's divisor."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < tokens
    gradient = tl.load(gradient_ptr + n, mask=inside, other=0.0) / tl.load(divisor_ptr)
    tl.store(result_ptr + n, gradient.to(result_ptr.dtype.element_ty), mask=inside)


def ratio_step(
    logprobs: Tensor,
    mask: Tensor,
    operands: RatioOperands,
    ratio_clip: RatioClip,
    kl: KLPenalty | None = None,
    recheck: Recheck = None,
) -> RatioStep:
    """See ``protocol.RatioBackend.ratio_step``."""
    old, advantages, weights, lengths, normalizer, cu_seqlens = operands
    old = logprobs if old is None else old
    B, T = logprobs.shape
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    # one kind of operation makes all tensors: the first of each kind takes as long as twenty more of it
    new = functools.partial(torch.empty, dtype=logprobs.dtype, device=logprobs.device)
    loss, metrics, result = new(()), new((len(METRICS) + (kl is not None),)), new((B, T))
    divisor, known = new((), dtype=torch.float64), normalizer is not None or ratio_clip.divisor == "one"
    if sequences == 0:
        fill_without_sequences(ratio_clip, normalizer, loss, divisor, metrics)
        return RatioStep(loss, metrics, torch.zeros_like(logprobs))
    reference = None if kl is None else kl.ref_logprobs
    beta = None if kl is None or kl.beta is None else kl.beta.expand(logprobs.shape)
    gradient = result if known else new((B, T), dtype=torch.float64)
    given = (mask, old, advantages, weights, lengths, reference, beta)
    launch(
        ratio_step_kernel, sequences, logprobs.device, without_spills(_STEP, True, 255),
        logprobs, mask, old, advantages, weights, lengths, normalizer,
        None if cu_seqlens is None else cu_seqlens.to(torch.int32).contiguous(),
        reference, beta,
        gradient, loss, divisor, metrics,
        new((SCRATCH_ROWS * sequences,), dtype=torch.float64),
        torch.zeros(1, dtype=torch.int32, device=logprobs.device),
        *(stride for each in given for stride in strides_of(each, cu_seqlens is not None)),
        T, B * T, sequences, *ratio_clip[:3], ratio_clip.divisor_scale,
        RATIO=RatioConstants(
            STATS=tl.float64,
            COUNT_TOKENS=ratio_clip.count_tokens,
            DIVISOR=ratio_clip.divisor,
            PER_TOKEN=ratio_clip.level == "token",
            ESTIMATOR=None if kl is None else kl.estimator,
            TOKENS_PER_BLOCK=32 * _STEP.warps * _TOKENS_PER_THREAD,
            SEQUENCES_PER_BLOCK=32 * _STEP.warps,
        ),
    )  # fmt: skip
    if not known:
        launch(
            divide_kernel, -(-B * T // _STEP.block), logprobs.device, _STEP,
            gradient, divisor, result, B * T, BLOCK=_STEP.block,
        )  # fmt: skip
    if recheck is not None:
        recheck()
    return RatioStep(loss, metrics, result)
