"""Per-token log-probabilities of labels and of selected ids, from logits and from hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels.arguments.cache import look_up, store
from gspo_kernels.arguments.head import HeadOptions, LinearOperands, check_inputs
from gspo_kernels.arguments.logit_options import LogitOptions, check_inplace, check_labels_match
from gspo_kernels.arguments.prefetch import take_prefetched
from gspo_kernels.arguments.terms import mask_rows
from gspo_kernels.backends.dispatch import refuse_backend
from gspo_kernels.core import bits, checks
from gspo_kernels.core.batch_invariance import mode_of
from gspo_kernels.core.layout import as_rows, from_rows
from gspo_kernels.core.torch_internals import applied
from gspo_kernels.core.types import LoRAHead, RowOptions, SelectedLogprobs, TokenLogprobs
from gspo_kernels.distributed.groups import Parallel
from gspo_kernels.distributed.placements import local_tensors
from gspo_kernels.distributed.validate import agree_across_ranks
from gspo_kernels.hidden.logprobs import LinearSelectedLogprobsFunction, LinearTokenLogprobsFunction
from gspo_kernels.logits.logprobs import TokenLogprobsFunction
from gspo_kernels.logits.selected import SelectedLogprobsFunction, checked_ids


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
    """Differentiable log-probability of each label, without saving tensors of the logits' size.

    Equivalent to ``log_softmax(z, -1).gather(-1, labels)`` in fp32, with ``z = logit_scale * logits;
    z = softcap * tanh(z / softcap); z = z / temperature``.

    Args:
        logits: [B, T, V] or [N, V], fp16, bf16, fp32 or fp64, any strides. On a GPU they are copied unless
            the vocabulary stride is 1.
        labels: [B, T] or [N], int64 or int32: the token predicted at each position (not shifted here).
        loss_mask: the labels' shape, bool or 0/1, or None. Positions with 0 are masked like ``ignore_index``.
        temperature: a number, or a tensor [B] with one per sequence ([N] for packed logits: one per token).
        logit_scale: factor on the logits.
        softcap: bound of the tanh soft-capping, or None.
        kept_mask: the ids that the sampler could have drawn, as a bitmask, int32 [B, T, ceil(V / 32)] or
            [N, ceil(V / 32)]: bit v % 32 of word v // 32 is for id v. Created from ids by ``kept_mask``, from
            logits by ``sampling_mask``. The softmax is over these ids only; all other logits have no effect
            and a gradient of exactly 0. Default: all ids.
        ignore_index: label of masked positions. Their log-prob and entropy are 0.0, they have no gradient,
            and their logits are not read.
        return_entropy: also return the differentiable entropy.
        inplace_backward: overwrite the logits with their gradient in the backward instead of allocating it.
            The logits must not be used afterwards; a second backward raises an error.
        backend: "auto", "triton", "cpp" or "reference".
        parallel: ``tp_group`` and ``vocab_range`` of ``Parallel`` if ranks share the vocabulary.

    Returns:
        TokenLogprobs(logprobs, entropy) in nats, the labels' shape, fp32 (fp64 for fp64 logits).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message, or a label that is not in the
            ``kept_mask`` of its position. On GPUs values are checked only with GSPO_KERNELS_VALIDATE=1;
            otherwise the log-prob of such a label is NaN.
        RuntimeError: the backend doesn't support the tensors' device.
    """
    key, row_options = look_up(
        "token_logprobs", labels, None, parallel, (labels, logits),
        (temperature, logit_scale, softcap, kept_mask, ignore_index, return_entropy, inplace_backward,
         backend),
    )  # fmt: skip
    if row_options is None:
        options = LogitOptions(temperature, logit_scale, softcap, kept_mask, ignore_index, backend)
        Parallel.check(parallel, "token_logprobs", ("tp_group", "vocab_range"))
        (logits,), parallel = local_tensors(parallel, logits=logits)
        check_labels_match("logits", logits, labels, "V")
        vocabulary = logits.shape[-1]
        checks.flag("return_entropy", return_entropy)
        check_inplace(logits, inplace_backward)
        row_options = options.normalize(labels, None, logits.dtype, vocabulary, parallel)
        row_labels = mask_rows(labels, loss_mask, ignore_index)
        store(key, row_options)
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
    """Differentiable log-probability of each label from hidden states, with one chunk of logits at a time.

    Equivalent to ``token_logprobs(hidden @ weight.T + bias, labels)`` with the product in fp32.

    Args:
        hidden: [B, T, H] or [N, H], fp16, bf16, fp32 or fp64, any strides.
        weight: [V, H] of the lm_head, or a ``LoRAHead``; the dtype of ``hidden``, or any under autocast.
        labels: [B, T] or [N], int64 or int32: the token predicted at each position (not shifted here).
        bias: [V] or None.
        loss_mask: as in ``token_logprobs``; positions with 0 are not projected.
        temperature: a number, or a tensor [B] with one per sequence ([N] for packed hidden states: one per
            token).
        logit_scale: factor on the logits, including the bias.
        softcap: bound of the tanh soft-capping, or None.
        kept_mask: as in ``token_logprobs``.
        ignore_index: label of masked positions. Their log-prob and entropy are 0.0, they have no gradient,
            and they are not projected.
        return_entropy: also return the differentiable entropy.
        logits_dtype: "float32" for fp32 logits of 16-bit inputs, or "input" to round logits to the inputs'
            dtype, as other trainers do.
        max_chunk_bytes: bytes of logits at a time; a chunk has at least one row. The default is 4,096 rows on
            a GPU, and on the CPU 1,024 to 2,048 rows, as many as fit 256 MiB; at least 64 MiB and at most
            1/16 of the memory. The backend "cpp" writes no logits, with bitwise identical results, except for
            rounded 16-bit logits, with a ``LoRAHead`` and with a ``tp_group``.
        memory: "auto", or "least" for 256 MiB of logits at a time; not supported with ``max_chunk_bytes``.
        batch_invariant: whether results are bitwise identical in any batch; the default and the guarantees
            are those of ``set_batch_invariant``.
        backend: "auto", "triton", "cpp" or "reference".
        parallel: see ``Parallel``; all fields except ``cp_group``.

    Returns:
        TokenLogprobs(logprobs, entropy) in nats, the labels' shape, fp32 (fp64 for fp64 inputs).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        RuntimeError: the backend doesn't support the tensors' device.
    """
    options = LogitOptions(temperature, logit_scale, softcap, kept_mask, ignore_index, backend)
    head_options = HeadOptions(logits_dtype, max_chunk_bytes, mode_of(batch_invariant), memory)
    key, decided = None, None
    if not torch._C._is_any_autocast_enabled():  # which casts inputs
        key, decided = look_up(
            "linear_token_logprobs", labels, None, parallel, (hidden, weight, bias, labels),
            (return_entropy, *options, *head_options),
        )  # fmt: skip
    if decided is not None:
        base = None
        chunking, row_options = decided
        row_labels = mask_rows(labels, loss_mask, ignore_index)
    else:
        usable = ("tp_group", "vocab_range", "reduce_hidden_grad", "sequence_parallel")
        Parallel.check(parallel, "linear_token_logprobs", usable, head_options.batch_invariant)
        (hidden, weight, bias), parallel = local_tensors(
            parallel, None, head_options.batch_invariant, hidden=hidden, weight=weight, bias=bias
        )
        chunking = head_options.normalize(compact=True, parallel=parallel)
        hidden, weight, bias, base = check_inputs(hidden, weight, bias, labels, chunking)
        checks.flag("return_entropy", return_entropy)
        row_options = options.normalize(labels, None, hidden.dtype, len(weight), parallel)
        row_labels = mask_rows(labels, loss_mask, ignore_index)
        store(key, (chunking, row_options))
    packed = labels.ndim == 1
    assert isinstance(weight, Tensor)
    lengths = take_prefetched(labels, loss_mask, None, None, ignore_index) if labels.is_cuda else None
    chunking = chunking._replace(lengths=lengths)
    operands = LinearOperands(as_rows(hidden, packed), weight, bias, row_labels, row_options, chunking, base)
    logprobs, entropy = LinearTokenLogprobsFunction.apply(return_entropy, True, *operands)
    return TokenLogprobs(from_rows(logprobs, packed), from_rows(entropy, packed) if return_entropy else None)


def _tokens_of(ids: Tensor, name: str, values: Tensor) -> Tensor:
    """Check ids [..., K] and the dtype of logits or hidden states; return a tensor of the labels' shape."""
    checks.floats(name, values, None, "for the tokens of ids", None)
    checks.tensor("ids", ids, None, "[B, T, K] or [N, K]", values.device, checks.INTEGERS)
    if ids.ndim not in (2, 3) or ids.shape[-1] == 0:
        raise ValueError(f"ids: got shape {tuple(ids.shape)}, expected [B, T, K] or [N, K] with K >= 1")
    return ids[..., 0]


def _row_ids(ids: Tensor, loss_mask: Tensor | None, vocabulary: int, options: RowOptions) -> Tensor:
    """Return checked ids in rows, padding where ``loss_mask`` is 0."""
    packed = ids.ndim == 2
    rows = as_rows(ids, packed)
    if loss_mask is not None:
        labels = mask_rows(torch.zeros_like(ids[..., 0]), loss_mask, bits.NO_ID)
        rows = torch.where(labels.unsqueeze(-1) == bits.NO_ID, bits.NO_ID, rows)
    return checked_ids(rows, None, None, vocabulary, options, packed, "ids", "")


def _output(logprobs: Tensor, tail: Tensor, packed: bool, within: bool) -> SelectedLogprobs:
    return SelectedLogprobs(from_rows(logprobs, packed), None if within else from_rows(tail, packed))


@agree_across_ranks
def selected_logprobs(
    logits: Tensor,
    ids: Tensor,
    *,
    loss_mask: Tensor | None = None,
    normalize_within: bool = False,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    kept_mask: Tensor | None = None,
    inplace_backward: bool = False,
    backend: str = "auto",
    parallel: Parallel = Parallel(),
) -> SelectedLogprobs:
    """Differentiable log-probabilities of K ids per token, and of all remaining ids together (tail).

    Each logit is read once in the forward, and read and written once in the backward, for any K. The
    log-probs are equivalent to ``log_softmax(z, -1).gather(-1, ids)`` in fp32, with z as in
    ``token_logprobs``. The tail is equivalent to ``log(1 - sum of the distinct ids' probabilities)`` without
    its cancellation: a remaining mass of 1e-8 or 1e-100 is as accurate as one of 1/2.

    Args:
        logits: [B, T, V] or [N, V], fp16, bf16, fp32 or fp64, any strides.
        ids: [B, T, K] or [N, K], int64 or int32, padded with -1 or -100. Ids may be repeated: each place has
            a log-prob, their gradients add, and the mass counts once.
        loss_mask: [B, T] or [N], bool or 0/1, or None. The ids of tokens with 0 are ignored.
        normalize_within: compute log-probs of a softmax over each token's ids, without a tail; only the
            logits of these ids are read.
        temperature, logit_scale, softcap, inplace_backward, backend: as in ``token_logprobs``.
        kept_mask: as in ``token_logprobs``. All ``ids`` must be in their token's mask.
        parallel: as in ``token_logprobs``. Ids must be the same on all ranks.

    Returns:
        SelectedLogprobs(logprobs, tail) in nats, [.., K] and [..], fp32 (fp64 for fp64 logits).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        RuntimeError: the backend doesn't support the tensors' device.
    """
    options = LogitOptions(temperature, logit_scale, softcap, kept_mask, backend=backend)
    Parallel.check(parallel, "selected_logprobs", ("tp_group", "vocab_range"))
    (logits,), parallel = local_tensors(parallel, logits=logits)
    tokens = _tokens_of(ids, "logits", logits)
    check_labels_match("logits", logits, tokens, "V")
    packed, vocabulary = tokens.ndim == 1, logits.shape[-1]
    checks.flag("normalize_within", normalize_within)
    check_inplace(logits, inplace_backward)
    row_options = options.normalize(tokens, None, logits.dtype, vocabulary, parallel)
    refuse_backend(row_options.backend)
    row_ids = _row_ids(ids, loss_mask, vocabulary, row_options)
    rows = as_rows(logits, packed)
    logprobs, tail = SelectedLogprobsFunction.apply(
        rows, row_ids, inplace_backward, row_options, normalize_within
    )
    return _output(logprobs, tail, packed, normalize_within)


@agree_across_ranks
def linear_selected_logprobs(
    hidden: Tensor,
    weight: Tensor | LoRAHead,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    loss_mask: Tensor | None = None,
    normalize_within: bool = False,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    kept_mask: Tensor | None = None,
    logits_dtype: str = "float32",
    max_chunk_bytes: int | None = None,
    batch_invariant: bool | None = None,
    backend: str = "auto",
    parallel: Parallel = Parallel(),
) -> SelectedLogprobs:
    """Differentiable log-probabilities of K ids per token from hidden states, a chunk of logits at a time.

    Equivalent to ``selected_logprobs(hidden @ weight.T + bias, ids)`` with the product in fp32.

    Args:
        hidden: [B, T, H] or [N, H], fp16, bf16, fp32 or fp64, any strides.
        weight: [V, H] of the lm_head, or a ``LoRAHead``; the dtype of ``hidden``, or any under autocast.
        ids, loss_mask, normalize_within, kept_mask: as in ``selected_logprobs``. Tokens without ids are not
            projected.
        bias: [V] or None.
        temperature, logit_scale, softcap, logits_dtype, max_chunk_bytes, batch_invariant, backend, parallel:
            as in ``linear_token_logprobs``.

    Returns:
        SelectedLogprobs(logprobs, tail) in nats, [.., K] and [..], fp32 (fp64 for fp64 inputs).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        RuntimeError: the backend doesn't support the tensors' device.
    """
    options = LogitOptions(temperature, logit_scale, softcap, kept_mask, backend=backend)
    head_options = HeadOptions(logits_dtype, max_chunk_bytes, mode_of(batch_invariant))
    usable = ("tp_group", "vocab_range", "reduce_hidden_grad", "sequence_parallel")
    Parallel.check(parallel, "linear_selected_logprobs", usable, head_options.batch_invariant)
    (hidden, weight, bias), parallel = local_tensors(
        parallel, None, head_options.batch_invariant, hidden=hidden, weight=weight, bias=bias
    )
    tokens = _tokens_of(ids, "hidden", hidden)
    chunking = head_options.normalize(compact=True, parallel=parallel)
    hidden, weight, bias, base = check_inputs(hidden, weight, bias, tokens, chunking)
    packed, vocabulary = tokens.ndim == 1, weight.shape[0]
    checks.flag("normalize_within", normalize_within)
    row_options = options.normalize(tokens, None, hidden.dtype, vocabulary, parallel)
    row_ids = _row_ids(ids, loss_mask, vocabulary, row_options)
    # the label is the largest id, or -100 for tokens without ids
    labels = row_ids.amax(-1)
    operands = LinearOperands(as_rows(hidden, packed), weight, bias, labels, row_options, chunking, base)
    logprobs, tail = LinearSelectedLogprobsFunction.apply(row_ids, normalize_within, *operands)
    return _output(logprobs, tail, packed, normalize_within)
