"""Per-token log-probabilities, from logits and from hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels.arguments.decisions import keep, recall, signature
from gspo_kernels.arguments.lengths import take_prefetched
from gspo_kernels.arguments.logit_options import LogitOptions, check_inplace, check_scores
from gspo_kernels.arguments.terms import mask_rows
from gspo_kernels.core import checks
from gspo_kernels.core.batch_invariance import or_current, refuse_backend
from gspo_kernels.core.layout import as_rows, from_rows
from gspo_kernels.core.torch_internals import applied
from gspo_kernels.core.types import LoRAHead, TokenLogprobs
from gspo_kernels.distributed.groups import Parallel
from gspo_kernels.distributed.placements import local_tensors
from gspo_kernels.distributed.validate import agree_across_ranks
from gspo_kernels.hidden.arguments import ProductOptions, check_inputs
from gspo_kernels.hidden.call import LinearOperands
from gspo_kernels.hidden.logprobs import LinearTokenLogprobsFunction
from gspo_kernels.logits.logprobs import TokenLogprobsFunction


@agree_across_ranks
def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    loss_mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    kept_mask: Tensor | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    inplace_backward: bool = False,
    backend: str = "auto",
    parallel: Parallel = Parallel(),
) -> TokenLogprobs:
    """Log-probability of each label, differentiable, without keeping anything of the logits' size.

    Equivalent to ``log_softmax(z, -1).gather(-1, labels)`` in fp32, with ``z = logit_scale * logits;
    z = softcap * tanh(z / softcap); z = z / temperature``.

    Args:
        logits: [B, T, V] or [N, V], fp16, bf16, fp32 or fp64, any strides. On a GPU they are copied unless
            the vocabulary stride is 1.
        labels: [B, T] or [N], int64 or int32: the token that each position predicts (not shifted here).
        loss_mask: the labels' shape, bool or 0/1, or None: positions with 0 are left out, as with
            ``ignore_index``, whatever their label.
        temperature: a number, or a tensor [B] with one per sequence ([N] for packed logits: one per token).
        logit_scale: factor on the logits.
        softcap: bound of the tanh soft-capping, or None.
        kept_mask: the ids that the sampler could have drawn, as a bitmask, int32 [B, T, ceil(V / 32)] or
            [N, ceil(V / 32)]: bit v % 32 of word v // 32 is for id v. ``kept_mask`` makes it of ids,
            ``sampling_mask`` of logits. Log-prob and entropy are those of the softmax over these ids alone.
            All other logits have no effect, whatever they hold, and a gradient of exactly 0. None: all ids.
        ignore_index: positions with this label are left out: their log-prob and entropy are 0.0, they have no
            gradient, and their logits are never read.
        return_entropy: also return the differentiable entropy.
        inplace_backward: the backward overwrites the logits with their gradient instead of allocating it.
            Nothing else may need the logits afterwards; a second backward raises.
        backend: "auto", "triton", "cpp" or "reference".
        parallel: ``tp_group`` and ``vocab_range`` of ``Parallel`` where ranks share the vocabulary.

    Returns:
        TokenLogprobs(logprobs, entropy) in nats, the labels' shape, fp32 (fp64 for fp64 logits).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message; or a label that is not in the
            ``kept_mask`` of its position, which the message names. On GPUs values are checked only with
            GSPO_KERNELS_VALIDATE=1; without it the log-prob of such a label is NaN.
        RuntimeError: the backend can't serve the tensors' device.
    """
    key = signature(
        "token_logprobs", labels, None, parallel, (labels, logits),
        (temperature, logit_scale, softcap, kept_mask, ignore_index, return_entropy, inplace_backward,
         backend),
    )  # fmt: skip
    row_options = recall(key)
    if row_options is None:
        options = LogitOptions(temperature, logit_scale, softcap, kept_mask, ignore_index, backend)
        Parallel.check(parallel, "token_logprobs", ("tp_group", "vocab_range"))
        (logits,), parallel = local_tensors(parallel, logits=logits)
        check_scores("logits", logits, labels, "V")
        vocabulary = logits.shape[-1]
        checks.flag("return_entropy", return_entropy)
        check_inplace(logits, inplace_backward)
        row_options = options.normalize(labels, None, logits.dtype, vocabulary, parallel)
        row_labels = mask_rows(labels, loss_mask, ignore_index)
        keep(key, row_options)
    else:
        row_labels = mask_rows(labels, loss_mask, ignore_index)
        if inplace_backward:
            check_inplace(logits, inplace_backward)
    refuse_backend(row_options.backend)
    packed = labels.ndim == 1
    logprobs, entropy = applied(TokenLogprobsFunction)(
        as_rows(logits, packed), row_labels, return_entropy, inplace_backward, row_options
    )
    return TokenLogprobs(from_rows(logprobs, packed), from_rows(entropy, packed) if return_entropy else None)


@agree_across_ranks
def linear_token_logprobs(
    hidden: Tensor,
    weight: Tensor | LoRAHead,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    loss_mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    kept_mask: Tensor | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    logits_dtype: str = "float32",
    max_chunk_bytes: int | None = None,
    memory: str = "auto",
    batch_invariant: bool | None = None,
    backend: str = "auto",
    parallel: Parallel = Parallel(),
) -> TokenLogprobs:
    """Log-probability of each label from hidden states: the logits exist only a chunk at a time.

    Equivalent to ``token_logprobs(hidden @ weight.T + bias, labels)`` with the product in fp32.

    Args:
        hidden: [B, T, H] or [N, H], fp16, bf16, fp32 or fp64, any strides.
        weight: [V, H] of the lm_head, or a ``LoRAHead``; the dtype of ``hidden``, or any under autocast.
        labels: [B, T] or [N], int64 or int32: the token that each position predicts (not shifted here).
        bias: [V] or None.
        loss_mask: as in ``token_logprobs``; positions with 0 are never projected.
        temperature: a number, or a tensor [B] with one per sequence ([N] for packed hidden states: one per
            token).
        logit_scale: factor on the logits, bias included.
        softcap: bound of the tanh soft-capping, or None.
        kept_mask: as in ``token_logprobs``.
        ignore_index: positions with this label are left out: their log-prob and entropy are 0.0, they have no
            gradient, and they are never projected.
        return_entropy: also return the differentiable entropy.
        logits_dtype: "float32": matrix products of 16-bit inputs give fp32 logits. "input": logits are
            rounded to the inputs' dtype, as other trainers do.
        max_chunk_bytes: bytes of logits that exist at once; a chunk has at least one row. The default is
            4,096 rows on a GPU, and on the CPU 1,024 to 2,048 rows, as many as fit 256 MiB; but at least
            64 MiB and at most 1/16 of the memory. The backend "cpp" writes no logits at all, except for
            rounded 16-bit logits, with a ``LoRAHead`` and with a ``tp_group``; its results have the bits that
            written logits give.
        memory: "auto", or "least" for 256 MiB of logits at once; not along with ``max_chunk_bytes``.
        batch_invariant: whether results keep their bits whatever is computed along with them; None: as set by
            ``set_batch_invariant``, whose documentation says what the mode promises.
        backend: "auto", "triton", "cpp" or "reference".
        parallel: see ``Parallel``; all fields but ``cp_group``, which log-probs don't need.

    Returns:
        TokenLogprobs(logprobs, entropy) in nats, the labels' shape, fp32 (fp64 for fp64 inputs).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        RuntimeError: the backend can't serve the tensors' device.
    """
    options = LogitOptions(temperature, logit_scale, softcap, kept_mask, ignore_index, backend)
    products = ProductOptions(logits_dtype, max_chunk_bytes, or_current(batch_invariant), memory)
    key = signature(
        "linear_token_logprobs", labels, None, parallel, (hidden, weight, bias, labels),
        (return_entropy, *options, *products),
    )  # fmt: skip
    if torch._C._is_any_autocast_enabled():
        key = None  # inputs are cast
    if (decided := recall(key)) is not None:
        base = None
        chunking, row_options = decided
        row_labels = mask_rows(labels, loss_mask, ignore_index)
    else:
        usable = ("tp_group", "vocab_range", "reduce_hidden_grad", "sequence_parallel")
        Parallel.check(parallel, "linear_token_logprobs", usable, products.batch_invariant)
        (hidden, weight, bias), parallel = local_tensors(
            parallel, None, products.batch_invariant, hidden=hidden, weight=weight, bias=bias
        )
        chunking = products.normalize(compact=True, parallel=parallel)
        hidden, weight, bias, base = check_inputs(hidden, weight, bias, labels, chunking)
        checks.flag("return_entropy", return_entropy)
        row_options = options.normalize(labels, None, hidden.dtype, len(weight), parallel)
        row_labels = mask_rows(labels, loss_mask, ignore_index)
        keep(key, (chunking, row_options))
    packed = labels.ndim == 1
    assert isinstance(weight, Tensor)
    lengths = take_prefetched(labels, loss_mask, None, None, ignore_index) if labels.is_cuda else None
    chunking = chunking._replace(lengths=lengths)
    operands = LinearOperands(as_rows(hidden, packed), weight, bias, row_labels, row_options, chunking, base)
    logprobs, entropy = LinearTokenLogprobsFunction.apply(*operands, return_entropy, True)
    return TokenLogprobs(from_rows(logprobs, packed), from_rows(entropy, packed) if return_entropy else None)
