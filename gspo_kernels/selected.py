"""Log-probabilities of several ids per token, from logits and from hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo_kernels.arguments.logit_options import LogitOptions, check_inplace, check_scores
from gspo_kernels.arguments.terms import mask_rows
from gspo_kernels.core import bits, checks
from gspo_kernels.core.batch_invariance import or_current, refuse_backend
from gspo_kernels.core.layout import as_rows, from_rows
from gspo_kernels.core.types import LoRAHead, RowOptions, SelectedLogprobs
from gspo_kernels.distributed.groups import Parallel
from gspo_kernels.distributed.placements import local_tensors
from gspo_kernels.distributed.validate import agree_across_ranks
from gspo_kernels.hidden.arguments import ProductOptions, check_inputs
from gspo_kernels.hidden.call import LinearOperands
from gspo_kernels.hidden.selected import LinearSelectedLogprobsFunction
from gspo_kernels.logits.selected import SelectedLogprobsFunction, checked_ids


def _tokens_of(ids: Tensor, name: str, scores: Tensor) -> Tensor:
    """Check ids [..., K] along with their scores; return a tensor [...], the shape that labels would have."""
    checks.floats(name, scores, None, "for the tokens of ids", None)
    checks.tensor("ids", ids, None, "[B, T, K] or [N, K]", scores.device, checks.INTEGERS)
    if ids.ndim not in (2, 3) or ids.shape[-1] == 0:
        raise ValueError(f"ids: got shape {tuple(ids.shape)}, expected [B, T, K] or [N, K] with K >= 1")
    return ids[..., 0]


def _row_ids(ids: Tensor, loss_mask: Tensor | None, vocabulary: int, options: RowOptions) -> Tensor:
    """Return checked ids in rows, none where ``loss_mask`` is 0."""
    packed = ids.ndim == 2
    rows = as_rows(ids, packed)
    if loss_mask is not None:
        labels = mask_rows(torch.zeros_like(ids[..., 0]), loss_mask, bits.NO_ID)
        rows = torch.where(labels.unsqueeze(-1) == bits.NO_ID, bits.NO_ID, rows)
    return checked_ids(rows, None, None, vocabulary, options, packed)


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
    """Log-probabilities of K ids per token, and the log of the mass that these leave; both differentiable.

    Each logit is read once in the forward, and read and written once in the backward, whatever K. The
    log-probs are equivalent to ``log_softmax(z, -1).gather(-1, ids)`` in fp32, with z as in
    ``token_logprobs``. The tail is equivalent to ``log(1 - sum of the different ids' probabilities)``, but
    without its cancellation: a remaining mass of 1e-8 or 1e-100 is as exact as one of 1/2.

    Args:
        logits: [B, T, V] or [N, V], fp16, bf16, fp32 or fp64, any strides.
        ids: [B, T, K] or [N, K], int64 or int32, -1 or -100 where a token has fewer. An id may occur several
            times: each place has its own log-prob, the gradients of its places add, and its mass counts once.
        loss_mask: [B, T] or [N], bool or 0/1, or None: a token with 0 has no ids, whatever ``ids`` holds.
        normalize_within: the log-probs are those of a softmax over each token's ids alone; only the logits of
            these ids are read, and there is no tail.
        temperature, logit_scale, softcap, inplace_backward, backend: as in ``token_logprobs``.
        kept_mask: as in ``token_logprobs``. All ``ids`` must be in their token's mask.
        parallel: as in ``token_logprobs``. Ids are the same on all ranks.

    Returns:
        SelectedLogprobs(logprobs, tail) in nats, [.., K] and [..], fp32 (fp64 for fp64 logits).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        RuntimeError: the backend can't serve the tensors' device.
    """
    options = LogitOptions(temperature, logit_scale, softcap, kept_mask, backend=backend)
    Parallel.check(parallel, "selected_logprobs", ("tp_group", "vocab_range"))
    (logits,), parallel = local_tensors(parallel, logits=logits)
    tokens = _tokens_of(ids, "logits", logits)
    check_scores("logits", logits, tokens, "V")
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
    """Log-probabilities of K ids per token from hidden states: the logits exist only a chunk at a time.

    Equivalent to ``selected_logprobs(hidden @ weight.T + bias, ids)`` with the product in fp32.

    Args:
        hidden: [B, T, H] or [N, H], fp16, bf16, fp32 or fp64, any strides.
        weight: [V, H] of the lm_head, or a ``LoRAHead``; the dtype of ``hidden``, or any under autocast.
        ids, loss_mask, normalize_within, kept_mask: as in ``selected_logprobs``. Tokens without any id are
            never projected.
        bias: [V] or None.
        temperature, logit_scale, softcap, logits_dtype, max_chunk_bytes, batch_invariant, backend, parallel:
            as in ``linear_token_logprobs``.

    Returns:
        SelectedLogprobs(logprobs, tail) in nats, [.., K] and [..], fp32 (fp64 for fp64 inputs).

    Raises:
        TypeError, ValueError: a wrong argument, named in the message.
        RuntimeError: the backend can't serve the tensors' device.
    """
    options = LogitOptions(temperature, logit_scale, softcap, kept_mask, backend=backend)
    products = ProductOptions(logits_dtype, max_chunk_bytes, or_current(batch_invariant))
    usable = ("tp_group", "vocab_range", "reduce_hidden_grad", "sequence_parallel")
    Parallel.check(parallel, "linear_selected_logprobs", usable, products.batch_invariant)
    (hidden, weight, bias), parallel = local_tensors(
        parallel, None, products.batch_invariant, hidden=hidden, weight=weight, bias=bias
    )
    tokens = _tokens_of(ids, "hidden", hidden)
    chunking = products.normalize(compact=True, parallel=parallel)
    hidden, weight, bias, base = check_inputs(hidden, weight, bias, tokens, chunking)
    packed, vocabulary = tokens.ndim == 1, weight.shape[0]
    checks.flag("normalize_within", normalize_within)
    row_options = options.normalize(tokens, None, hidden.dtype, vocabulary, parallel)
    row_ids = _row_ids(ids, loss_mask, vocabulary, row_options)
    # a token's largest id serves as its label; it is -100 if the token has no id
    labels = row_ids.amax(-1)
    operands = LinearOperands(as_rows(hidden, packed), weight, bias, labels, row_options, chunking, base)
    logprobs, tail = LinearSelectedLogprobsFunction.apply(*operands, row_ids, normalize_within)
    return _output(logprobs, tail, packed, normalize_within)
