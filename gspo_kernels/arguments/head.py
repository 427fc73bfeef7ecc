"""The arguments of functions that take hidden states and the head's weight."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gspo_kernels.arguments.logit_options import check_labels_match
from gspo_kernels.arguments.prefetch import lengths_on_host
from gspo_kernels.backends import cpp
from gspo_kernels.core import checks
from gspo_kernels.core.layout import copy_async
from gspo_kernels.core.operators import matrix_operator
from gspo_kernels.core.torch_internals import constant_when_traced, tensors_to_save
from gspo_kernels.core.types import LoRAHead, RowOptions, stats_dtype
from gspo_kernels.distributed.groups import Parallel

LOGITS_DTYPES = ("float32", "input")
MEMORY = ("auto", "least")
LEAST_BYTES = 256 * 2**20
"""Chunk size of ``two_pass`` and of ``memory="least"``: 441 rows of 151,936 logits, enough for matmuls at
full speed, or up to 16,384 rows of ``gradients.BLOCK_COLUMNS``."""
MIN_SYNC_WORK = 1.75e12
"""Minimum of rows * V * H for a host-device sync to save time. A sync costs about 1 ms of overlap. Skipping a
tenth of the rows saves 0.4 * rows * V * H operations in two matmuls, 1 ms at 700 TFLOP/s."""


class Chunking(NamedTuple):
    """How a call over hidden states computes its logits.

    Attributes:
        logits_dtype: "float32", or "input" to round 16-bit products to the inputs' dtype.
        max_chunk_bytes: the most bytes of logits at a time; 0 selects the default.
        compact: skip masked rows in every product, which needs a host-device sync to count the other rows.
        reduce_hidden_grad: sum dHidden over the ranks that share the vocabulary.
        scattered: each of these ranks has the hidden states of some tokens (sequence parallelism).
        batch_invariant: see ``core.batch_invariance``.
        lengths: int64 [2, B] on the CPU, see ``prefetch.take_prefetched``; None if only the device has them.
        where: int64 [n], the rows to project, if the loss mask is on the CPU; see ``with_host_lengths``.
    """

    logits_dtype: str
    max_chunk_bytes: int
    compact: bool
    reduce_hidden_grad: bool = True
    scattered: bool = False
    batch_invariant: bool = False
    lengths: Tensor | None = None
    where: Tensor | None = None


class LinearOperands(NamedTuple):
    """The arguments of every operator over hidden states: hidden [B, T, H] (packed: [1, N, H]), weight
    [V, H], bias [V] or None, labels [B, T] and options. Scattered hidden has this rank's T.

    With a low-rank adapter ``base`` is the frozen weight [V, H], ``weight`` is the adapter's B [V, r], and
    hidden states have r more columns, which B multiplies.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    options: RowOptions
    chunking: Chunking
    base: Tensor | None = None

    def with_count(self) -> LinearOperands:
        """Return operands on a GPU with the number of active rows, to sync once for forward and backward."""
        chunking = self.chunking
        counted = not chunking.compact or chunking.lengths is not None
        if counted or not self.labels.is_cuda or torch.compiler.is_compiling():
            return self
        count = int((self.labels != self.options.ignore_index).sum())
        lengths = torch.tensor([[count], [0]], dtype=torch.int64, device="cpu")
        return self._replace(chunking=chunking._replace(lengths=lengths))


class HeadOptions(NamedTuple):
    """The head's options as the caller passed them; ``batch_invariant`` is resolved by ``mode_of``."""

    logits_dtype: str = "float32"
    max_chunk_bytes: int | None = None
    batch_invariant: bool = False
    memory: str = "auto"

    def normalize(self, compact: bool, parallel: Parallel) -> Chunking:
        """Check the options; a budget of None becomes 0, the default."""
        checks.choice("logits_dtype", self.logits_dtype, LOGITS_DTYPES)
        budget = self.max_chunk_bytes
        if budget is not None and checks.integer("max_chunk_bytes", budget) < 1:
            raise ValueError(f"max_chunk_bytes: got {budget}, expected at least 1")
        checks.choice("memory", self.memory, MEMORY)
        if self.memory == "least":
            if budget is not None:
                raise ValueError(
                    f"max_chunk_bytes: got {budget}, expected None with memory='least', which sets it"
                )
            budget = LEAST_BYTES
        reduces, scattered = parallel.reduce_hidden_grad, parallel.sequence_parallel
        if parallel.tp_group is None and (scattered or not reduces):
            name = "sequence_parallel" if scattered else "reduce_hidden_grad"
            raise ValueError(f"{name}: got {scattered}, expected {not scattered} without a tp_group")
        invariant = checks.flag("batch_invariant", self.batch_invariant)
        # batch-invariant segments consist of counted tokens only
        return Chunking(self.logits_dtype, budget or 0, compact or invariant, reduces, scattered, invariant)


def with_host_lengths(
    chunking: Chunking,
    mask: Tensor | None,
    offsets: Tensor | None,
    tokens: Tensor,
    head: Tensor,
    parallel: Parallel,
) -> Chunking:
    """Take lengths from a mask or offsets on the CPU, to avoid a host-device sync for tokens on a GPU.

    Labels equal to ``ignore_index`` are not visible on the host. These rows are projected, without a
    gradient, if they are in the mask, or without a mask on the CPU if skipping them isn't worth a sync.
    Batch-invariant calls and ranks that share the vocabulary still sync.

    Args:
        chunking: the options to update.
        mask, offsets: ``loss_mask`` and ``cu_seqlens`` as the caller passed them; checked.
        tokens: labels, or any tensor of their shape, [B, T] or [N], and device.
        head: the weight [V, H].
        parallel: which ranks share the vocabulary.
    """
    mask = mask if chunking.compact else None
    masked = mask is not None and mask.is_cpu
    if not (masked or (offsets is not None and offsets.is_cpu)):
        return chunking
    if chunking.batch_invariant or parallel.tp_group is not None or torch.compiler.is_compiling():
        return chunking
    few = tokens.numel() * head.numel() < MIN_SYNC_WORK
    if (offsets is not None and not offsets.is_cpu) or (chunking.compact and not masked and not few):
        return chunking
    lengths, where = lengths_on_host(tokens, mask if masked else None, offsets)
    where = None if where is None else copy_async(where, tokens.device)
    return chunking._replace(compact=False, lengths=lengths, where=where)


def check_inputs(
    hidden: Tensor, weight: Tensor | LoRAHead, bias: Tensor | None, labels: Tensor, chunking: Chunking
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Check hidden [B, T, H] with labels [B, T], or [N, H] with [N]; return hidden, weight, bias and base.

    Autocast, if enabled, casts them. With a ``LoRAHead``, base is its frozen weight and hidden and weight are
    those of ``LinearOperands``; otherwise base is None.
    """
    check_labels_match("hidden", hidden, labels, "H", chunking.scattered)
    lora = weight if isinstance(weight, LoRAHead) else None
    weight = weight.weight if isinstance(weight, LoRAHead) else weight
    if isinstance(weight, torch.nn.Module):
        raise TypeError(
            f"weight: got the module {type(weight).__name__}, expected a tensor [V, H] or a LoRAHead; "
            "gspo_kernels.integrations.transformers.lm_head_of(model).weight is one, with LoRA on the head"
        )
    checks.tensor("weight", weight, None, "[V, H]", labels.device, checks.FLOATS)
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight: got shape {tuple(weight.shape)}, expected [V, H] with H = {hidden.shape[-1]}"
        )
    if 0 in weight.shape:
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, expected V >= 1 and H >= 1")
    if bias is not None:
        checks.tensor("bias", bias, (weight.shape[0],), "[V]", labels.device, checks.FLOATS)
    # as F.linear does it: fp64 stays out of autocast
    autocast = torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(hidden.device.type)
    if autocast and torch.float64 not in (hidden.dtype, weight.dtype):
        low = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(low), weight.to(low), None if bias is None else bias.to(low)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.dtype != hidden.dtype:
            raise TypeError(
                f"{name}: got {value.dtype}, expected {hidden.dtype} like hidden; "
                "mixed dtypes need torch.autocast"
            )
    if chunking.batch_invariant:
        trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (weight, bias))
        reason = batch_invariant_unavailable(weight, trained)
        if lora is not None:
            reason = "a LoRAHead is not supported"
        if reason is not None:
            raise ValueError(f"batch_invariant: got True, but {reason}")
    if lora is None:
        return hidden, weight, bias, None
    return *_with_adapter(hidden, weight, lora, chunking), bias, weight


def batch_invariant_unavailable(weight: Tensor, trained: bool) -> str | None:
    """Return None if ``batch_invariant_mm`` supports a weight, ``trained`` or not; otherwise the reason."""
    if weight.dtype == torch.float64:
        return "fp64 matmuls are not batch-invariant"
    if weight.is_cpu:
        return _missing_on_the_cpu()
    if not weight.is_cuda:
        return f"batch-invariant matmuls run on CPU and GPU, not on {weight.device}"
    if trained and weight.dtype == torch.float16:
        return (
            "the gradient of an fp16 weight is summed in a unit that depends on the other rows of the batch; "
            "use bf16 or fp32"
        )
    return None


@constant_when_traced
def _missing_on_the_cpu() -> str | None:
    return cpp.unavailable(torch.device("cpu"))


def _with_adapter(
    hidden: Tensor, weight: Tensor, lora: LoRAHead, chunking: Chunking
) -> tuple[Tensor, Tensor]:
    """Return hidden states with the columns ``scale * hidden @ A.T`` appended, and B; dA is computed from
    these columns. Both are in the statistics' dtype, to keep an fp32 adapter of a 16-bit weight unrounded.
    """
    A, (V, H) = checks.tensor("weight.A", lora.A, None, "[r, H]", hidden.device, checks.FLOATS), weight.shape
    checks.tensor("weight.A", A, (len(A) if A.ndim else 0, H), "[r, H]", hidden.device, checks.FLOATS)
    checks.tensor("weight.B", lora.B, (V, len(A)), "[V, r]", hidden.device, checks.FLOATS)
    scale = checks.number("weight.scale", lora.scale)
    if torch.is_grad_enabled() and lora.weight.requires_grad:
        raise ValueError("weight.weight: needs a gradient, expected a frozen weight with A and B")
    if any(hasattr(each, "device_mesh") for each in lora[:3]):
        raise ValueError("weight: got a LoRAHead of DTensors, expected plain tensors")
    if chunking.scattered or not chunking.reduce_hidden_grad:
        raise ValueError(
            "weight: got a LoRAHead, but with sequence_parallel or without reduce_hidden_grad a rank would "
            "have a part of dA only; expected the product of base and adapter as one weight"
        )
    dtype = stats_dtype(hidden.dtype)
    return LowRankFunction.apply(hidden, A.to(dtype), scale), lora.B.to(dtype)


@matrix_operator
def append_low_rank(hidden: Tensor, A: Tensor, scale: float) -> Tensor:
    """Return hidden states [..., H] in A's dtype, with the columns ``scale * hidden @ A.T`` appended."""
    hidden = hidden.to(A.dtype)
    return torch.cat([hidden, scale * (hidden @ A.t())], -1)


@append_low_rank.register_fake
def _(hidden: Tensor, A: Tensor, _: float) -> Tensor:
    return A.new_empty(*hidden.shape[:-1], hidden.shape[-1] + len(A))


class LowRankGradients(NamedTuple):
    """The gradients of hidden, in its dtype, and A."""

    hidden: Tensor
    A: Tensor


@matrix_operator
def low_rank_backward(grad: Tensor, hidden: Tensor, A: Tensor, scale: float) -> LowRankGradients:
    """Return the gradients of ``append_low_rank``; rows without gradient are ignored, even if NaN."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    of_rows, of_low = grad.reshape(-1, grad.shape[-1]).split([rows.shape[1], len(A)], 1)
    of_low = scale * of_low
    active = torch.where((of_low != 0).any(1, keepdim=True), rows, 0.0).to(A.dtype)
    of_hidden = torch.addmm(of_rows, of_low, A).to(hidden.dtype)
    return LowRankGradients(of_hidden.view(hidden.shape), of_low.t() @ active)


@low_rank_backward.register_fake
def _(_: Tensor, hidden: Tensor, A: Tensor, __: float) -> LowRankGradients:
    return LowRankGradients(hidden.new_empty(hidden.shape), A.new_empty(A.shape))


class LowRankFunction(torch.autograd.Function):
    """``append_low_rank``, differentiable."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, A: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(*tensors_to_save(ctx, (hidden, A)))
        ctx.scale = scale
        return append_low_rank(hidden, A, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return *low_rank_backward(grad, *ctx.saved_tensors, ctx.scale), None


def check_teachers_head(
    hidden: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    tokens: Tensor,
    vocabulary: int,
    chunking: Chunking,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Check the teacher's hidden, weight and bias; return them detached, and cast if autocast is enabled.

    ``vocabulary`` is the size of the student's; ``tokens`` has the labels' shape.
    """
    if hidden is None:
        for name, value in (("teacher_weight", weight), ("teacher_bias", bias)):
            if value is not None:
                raise ValueError(f"{name}: got a tensor, expected None without teacher_hidden")
        return None, None, None
    if weight is None:
        raise ValueError("teacher_weight: got None, expected [V, H] along with teacher_hidden")
    checks.tensor(
        "teacher_hidden", hidden, None, "like hidden except for the width", tokens.device, checks.FLOATS
    )
    if hidden.shape[:-1] != tokens.shape:
        raise ValueError(
            f"teacher_hidden: got shape {tuple(hidden.shape)}, expected {(*tokens.shape, 'H of teacher')} "
            "for the tokens of hidden"
        )
    checks.tensor("teacher_weight", weight, None, "[V, H of the teacher]", tokens.device, checks.FLOATS)
    if tuple(weight.shape) != (vocabulary, hidden.shape[-1]):
        raise ValueError(
            f"teacher_weight: got shape {tuple(weight.shape)}, expected {(vocabulary, hidden.shape[-1])}, "
            "the student's vocabulary and the width of teacher_hidden"
        )
    if bias is not None:
        checks.tensor("teacher_bias", bias, (vocabulary,), "[V]", tokens.device, checks.FLOATS)
        bias = bias.detach()
    reason = batch_invariant_unavailable(weight, trained=False) if chunking.batch_invariant else None
    if reason is not None:
        raise ValueError(f"teacher_weight: got {weight.dtype} with batch_invariant=True, but {reason}")
    try:
        return check_inputs(hidden.detach(), weight.detach(), bias, tokens, chunking)[:3]
    except TypeError as error:
        raise TypeError(f"teacher_{error}") from None
