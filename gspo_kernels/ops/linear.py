"""Operators over hidden states: logits exist only a chunk of rows at a time.

Matrix products belong to the vendor library through torch, rows to the backend. Counted rows are compacted
first: masked tokens are never projected, and in the backward neither are rows whose gradient is zero.

16-bit inputs: the product leaves in fp32 (``logits_dtype="float32"``). On CUDA the rows that enter the
gradient products are 16-bit and unscaled (p - onehot); coefficients, normalised to at most 1, multiply the
hidden rows and the result, so that nothing underflows. On CPU 16-bit weights are raised to fp32 in slabs, as
fp32 products are faster there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.ops.backends import load
from gspo_kernels.ops.library import operator
from gspo_kernels.ops.logprobs import OPTIONS, check_labels, fake_stats, restore_options, save_options
from gspo_kernels.ops.values import check_temperature
from gspo_kernels.types import LogitTransform, RowStats, stats_dtype

DEFAULT_CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 2 * 2**30}
"""Logits that exist at once unless ``max_chunk_bytes`` says so: fits a laptop, feeds a GPU."""

_SLAB_ROWS = 8192


def chunk_rows(vocabulary: int, itemsize: int, max_chunk_bytes: int, device: str) -> int:
    """How many rows of logits fit the budget (0: the device's default); at least one."""
    budget = max_chunk_bytes or DEFAULT_CHUNK_BYTES.get(device, DEFAULT_CHUNK_BYTES["cuda"])
    return max(1, budget // max(1, vocabulary * itemsize))


@dataclass(frozen=True)
class Head:
    """The projection from hidden states to logits, and how its products are computed."""

    weight: Tensor
    bias: Tensor | None
    logits_dtype: str

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.weight.shape[0]

    @property
    def native(self) -> bool:
        """Products in the inputs' own dtype: fp32 and fp64 always, 16-bit where fp32 logits aren't wanted."""
        return self.weight.dtype in (torch.float32, torch.float64) or self.logits_dtype == "input"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return self.weight.dtype if self.native else torch.float32

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, H] -> [n, V]."""
        if self.native:
            return torch.nn.functional.linear(hidden, self.weight, self.bias)
        if hidden.is_cuda:
            out = torch.mm(hidden, self.weight.t(), out_dtype=torch.float32)
        else:
            out = torch.empty(hidden.shape[0], self.vocabulary, dtype=torch.float32, device=hidden.device)
            raised = hidden.float()
            for slab in self._slabs():
                torch.mm(raised, self.weight[slab].float().t(), out=out[:, slab])
        return out if self.bias is None else out.add_(self.bias)

    def grad_hidden(self, rows: Tensor) -> Tensor:
        """[n, V] -> [n, H] in the statistics' dtype."""
        if rows.dtype == self.weight.dtype:
            if rows.is_cuda and rows.dtype in (torch.float16, torch.bfloat16):
                return torch.mm(rows, self.weight, out_dtype=torch.float32)
            return torch.mm(rows, self.weight).to(stats_dtype(rows.dtype))
        out = torch.zeros(rows.shape[0], self.weight.shape[1], dtype=rows.dtype, device=rows.device)
        for slab in self._slabs():
            out.addmm_(rows[:, slab], self.weight[slab].to(rows.dtype))
        return out

    def rows_dtype(self) -> torch.dtype:
        """The dtype of the rows that enter the gradient products."""
        on_gpu = self.weight.is_cuda
        return self.weight.dtype if on_gpu or self.weight.dtype == torch.float64 else torch.float32

    def _slabs(self) -> Iterator[slice]:
        for start in range(0, self.vocabulary, _SLAB_ROWS):
            yield slice(start, min(start + _SLAB_ROWS, self.vocabulary))


@dataclass(frozen=True)
class Rows:
    """The counted rows of a call, compacted, in chunks."""

    hidden: Tensor
    labels: Tensor
    row_temperature: Tensor | None
    index: Tensor | None
    chunk: int

    @staticmethod
    def of(
        hidden: Tensor, labels: Tensor, row_temperature: Tensor | None, keep: Tensor | None, chunk: int
    ) -> Rows:
        """Rows of hidden [B, T, H] where ``keep`` [B, T] holds; None: all, with no look at the device."""
        index = None if keep is None or bool(keep.all()) else keep.flatten().nonzero().squeeze(1)
        return Rows(hidden, labels, row_temperature, index, chunk)

    def __iter__(self) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """Pairs of (position among the flattened rows, hidden rows [n, H])."""
        count = self.labels.numel() if self.index is None else self.index.numel()
        length = self.labels.shape[1]
        flat = self.hidden.flatten(0, 1) if self.hidden.is_contiguous() else None
        for start in range(0, count, self.chunk):
            stop = min(start + self.chunk, count)
            if self.index is None and flat is not None:
                yield slice(start, stop), flat[start:stop]
                continue
            where = (
                torch.arange(start, stop, device=self.labels.device)
                if self.index is None
                else self.index[start:stop]
            )
            rows = flat[where] if flat is not None else self.hidden[where // length, where % length]
            yield where, rows

    def transform(self, options: LogitTransform, where: slice | Tensor) -> LogitTransform:
        """The logit transform of some rows, as [1, n]."""
        if self.row_temperature is None:
            return options
        return options._replace(row_temperature=self.row_temperature.flatten()[where].unsqueeze(0))


LINEAR = (
    f"Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, {OPTIONS}, "
    "str logits_dtype, int max_chunk_bytes, bool compact"
)
"""The operands of ``Call.of``."""


@dataclass(frozen=True)
class Call:
    """One call of a linear operator."""

    hidden: Tensor
    head: Head
    labels: Tensor
    transform: LogitTransform
    ignore_index: int
    backend: str
    chunk: int
    compact: bool

    @classmethod
    def split(cls, args: tuple[Any, ...]) -> tuple[Call, tuple[Any, ...]]:
        """The operands of ``LINEAR`` that lead an operator's arguments, and the rest."""
        count = LINEAR.count(",") + 1
        return cls.of(*args[:count]), args[count:]

    @staticmethod
    def of(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        logit_scale: float,
        softcap: float,
        temperature: float,
        row_temperature: Tensor | None,
        ignore_index: int,
        backend: str,
        logits_dtype: str,
        max_chunk_bytes: int,
        compact: bool,
    ) -> Call:
        head = Head(weight, bias, logits_dtype)
        chunk = chunk_rows(head.vocabulary, head.dtype.itemsize, max_chunk_bytes, weight.device.type)
        transform = LogitTransform(logit_scale, softcap, temperature, row_temperature)
        return Call(hidden, head, labels, transform, ignore_index, backend, chunk, compact)

    def rows(self, keep: Tensor | None = None) -> Rows:
        counted = self.labels != self.ignore_index if self.compact else None
        if keep is not None:
            counted = keep if counted is None else counted & keep
        return Rows.of(self.hidden, self.labels, self.transform.row_temperature, counted, self.chunk)

    def new_rows(self, fill: float = 0.0) -> Tensor:
        return torch.full(
            self.labels.shape, fill, dtype=stats_dtype(self.hidden.dtype), device=self.labels.device
        )


@operator(f"linear_token_logprobs({LINEAR}, bool entropy) -> (Tensor, Tensor, Tensor)")
def linear_token_logprobs(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, log-sum-exp and entropy (empty unless asked for) of hidden [B, T, H] at labels [B, T]."""
    call, (entropy,) = Call.split(args)
    check_labels(call.labels, call.head.vocabulary, call.ignore_index)
    check_temperature(call.transform.row_temperature)
    backend, rows = load(call.backend), call.rows()
    logprobs, lse = call.new_rows(), call.new_rows().to(torch.float64)
    entropies = call.new_rows() if entropy else logprobs.new_empty(0)
    for where, hidden in rows:
        logits = call.head.logits(hidden)
        stats = backend.logprobs_forward(
            logits.unsqueeze(0),
            call.labels.flatten()[where].unsqueeze(0),
            rows.transform(call.transform, where),
            ignore_index=call.ignore_index,
            entropy=entropy,
        )
        logprobs.view(-1)[where], lse.view(-1)[where] = stats.logprobs.squeeze(0), stats.lse.squeeze(0)
        if stats.entropy is not None:
            entropies.view(-1)[where] = stats.entropy.squeeze(0)
    return logprobs, lse, entropies


@linear_token_logprobs.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_stats(labels, hidden.dtype, args[-1])


def _at(stats: RowStats, where: slice | Tensor) -> RowStats:
    return stats.each(lambda stat: stat.flatten()[where])


def _power_of_two(largest: Tensor) -> Tensor:
    """About ``largest``, so that dividing by it rounds nothing; 1 where that is 0 or infinite."""
    top = math.frexp(torch.finfo(largest.dtype).max)[1] - 1
    power = torch.exp2(torch.log2(largest).ceil().clamp(1 - top, top))
    return torch.where((largest > 0) & largest.isfinite(), power, 1.0)


class GradientAccumulator:
    """dHidden, dWeight and dBias of a chunked call; accumulates in the statistics' dtype and casts once."""

    def __init__(self, call: Call, needs: tuple[bool, bool, bool]):
        self.call, self.needs = call, needs
        hidden, head = call.hidden, call.head
        accumulate = stats_dtype(hidden.dtype)
        device = hidden.device
        self.hidden = torch.zeros(hidden.shape, dtype=hidden.dtype, device=device) if needs[0] else None
        self.weight = torch.zeros(head.weight.shape, dtype=accumulate, device=device) if needs[1] else None
        self.bias = torch.zeros(head.vocabulary, dtype=accumulate, device=device) if needs[2] else None

    def add(
        self,
        logits: Tensor,
        hidden: Tensor,
        where: slice | Tensor,
        labels: Tensor,
        stats: RowStats,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None,
        transform: LogitTransform,
        skip: bool,
    ) -> None:
        """Add one chunk; overwrites the logits.

        Args:
            logits: [n, V].
            hidden: [n, H].
            where: position of the rows among the flattened rows of the call.
            labels: [1, n].
            stats: [n] each.
            grad_logprobs, grad_entropy: [n], or None.
            transform: with a ``row_temperature`` of [1, n].
            skip: leave rows without gradient out of the products.
        """
        active = grad_logprobs != 0
        if grad_entropy is not None:
            active = active | (grad_entropy != 0)
        if skip and not bool(active.all()):
            keep = active.nonzero().squeeze(1)
            if keep.numel() == 0:
                return
            position = (
                torch.arange(where.start, where.stop, device=keep.device)
                if isinstance(where, slice)
                else where
            )
            temperature = transform.row_temperature
            self.add(
                logits[keep],
                hidden[keep],
                position[keep],
                labels[:, keep],
                stats.each(lambda stat: stat[keep]),
                grad_logprobs[keep],
                None if grad_entropy is None else grad_entropy[keep],
                transform
                if temperature is None
                else transform._replace(row_temperature=temperature[:, keep]),
                False,
            )
            return

        call = self.call
        accumulate = stats_dtype(hidden.dtype)
        largest = grad_logprobs.abs().amax()
        if grad_entropy is not None:
            largest = torch.maximum(largest, grad_entropy.abs().amax())
        scale = _power_of_two(largest)
        unit = (grad_logprobs / scale).to(accumulate)
        # with an entropy gradient a row has two coefficients, so they go into the rows themselves
        in_rows = grad_entropy is not None
        dtype = call.head.rows_dtype()
        rows = (
            logits if logits.dtype == dtype else torch.empty(logits.shape, dtype=dtype, device=logits.device)
        )
        load(call.backend).logprobs_backward(
            logits.unsqueeze(0),
            labels,
            stats.each(lambda stat: stat.unsqueeze(0)),
            (unit if in_rows else torch.ones_like(unit)).unsqueeze(0),
            None if grad_entropy is None else (grad_entropy / scale).unsqueeze(0),
            None,
            transform,
            ignore_index=call.ignore_index,
            out=rows.unsqueeze(0),
        )
        factor = None if in_rows else unit.unsqueeze(1)
        if self.hidden is not None:
            grad = call.head.grad_hidden(rows)
            # an overflowed coefficient makes infinities, and leaves zeros alone
            grad = torch.where(grad == 0, 0.0, grad * (scale if factor is None else factor * scale))
            self.hidden.view(-1, hidden.shape[1])[where] = grad.to(self.hidden.dtype)
        if self.weight is not None:
            # selected: the hidden state of a row without gradient may be anything
            raised = torch.where(active.unsqueeze(1), hidden.to(accumulate), 0.0)
            self._add_weight(rows, raised if factor is None else raised * factor, scale)
        if self.bias is not None:
            total = rows.to(accumulate)
            self.bias += (total if factor is None else total * factor).sum(0) * scale

    def _add_weight(self, rows: Tensor, hidden: Tensor, scale: Tensor) -> None:
        assert self.weight is not None
        if rows.is_cuda and rows.dtype in (torch.float16, torch.bfloat16):
            product = torch.mm(rows.t(), hidden.to(rows.dtype), out_dtype=torch.float32)
            self.weight.addcmul_(product, scale.to(product.dtype))
        else:
            self.weight.addmm_(rows.t(), hidden * scale)

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients in the parameters' dtypes; empty where not needed."""
        head, hidden = self.call.head, self.call.hidden
        # one empty tensor each: an operator's outputs may not be the same tensor
        return (
            hidden.new_empty(0) if self.hidden is None else self.hidden,
            head.weight.new_empty(0) if self.weight is None else self.weight.to(head.weight.dtype),
            hidden.new_empty(0) if self.bias is None or head.bias is None else self.bias.to(head.bias.dtype),
        )


def fake_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty gradients of what is needed."""
    return (
        hidden.new_empty(hidden.shape if needs[0] else (0,)),
        weight.new_empty(weight.shape if needs[1] else (0,)),
        hidden.new_empty(0) if bias is None or not needs[2] else bias.new_empty(bias.shape),
    )


@operator(
    f"linear_token_logprobs_backward({LINEAR}, Tensor logprobs, Tensor lse, Tensor entropy, "
    "Tensor grad_logprobs, Tensor? grad_entropy, bool need_hidden, bool need_weight, "
    "bool need_bias, bool skip) -> (Tensor, Tensor, Tensor)"
)
def linear_token_logprobs_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias (empty where not needed), recomputing logits chunk by chunk.

    ``skip`` leaves rows without gradient out of every product.
    """
    call, rest = Call.split(args)
    logprobs, lse, entropy, grad_logprobs, grad_entropy, *needs, skip = rest
    active = None
    if skip:
        active = grad_logprobs != 0 if grad_entropy is None else (grad_logprobs != 0) | (grad_entropy != 0)
    rows, backend = call.rows(active), load(call.backend)
    gradients = GradientAccumulator(call, tuple(needs))
    stats = RowStats(logprobs, lse, entropy if entropy.numel() == lse.numel() else None)
    # A product over other rows may round otherwise, and exp(z - lse) of a peaked row shows the last bit of z.
    # 16-bit gradients don't.
    exact = call.head.weight.dtype in (torch.float32, torch.float64)
    anew = active is not None and exact and not torch.equal(active, call.labels != call.ignore_index)
    for where, hidden in rows:
        logits, labels = call.head.logits(hidden), call.labels.flatten()[where].unsqueeze(0)
        transform = rows.transform(call.transform, where)
        at_rows = _at(stats, where)
        if anew:
            found = backend.logprobs_forward(
                logits.unsqueeze(0),
                labels,
                transform,
                ignore_index=call.ignore_index,
                entropy=grad_entropy is not None,
            )
            at_rows = _at(RowStats(*found), slice(None))
        gradients.add(
            logits,
            hidden,
            where,
            labels,
            at_rows,
            grad_logprobs.flatten()[where],
            None if grad_entropy is None else grad_entropy.flatten()[where],
            transform,
            False,
        )
    return gradients.result()


@linear_token_logprobs_backward.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_gradients(hidden, weight, bias, args[-4:-1])


class LinearTokenLogprobsFunction(torch.autograd.Function):
    """Differentiable log-probs and entropy of hidden states; the backward recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        entropy: bool,
        skip: bool,
        *options: Any,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        logprobs, lse, entropies = linear_token_logprobs(hidden, weight, bias, labels, *options, entropy)
        ctx.has_bias = bias is not None
        tensors = (hidden, weight, *(() if bias is None else (bias,)), labels, logprobs, lse, entropies)
        save_options(ctx, options, *tensors)
        ctx.entropy, ctx.skip = entropy, skip
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
        saved, options = restore_options(ctx)
        hidden, weight, *rest = saved
        bias = rest.pop(0) if ctx.has_bias else None
        labels, logprobs, lse, entropies = rest
        nothing = (None,) * (3 + len(options))
        if not ctx.entropy:
            grad_entropy = None
        if grad_logprobs is None:
            if grad_entropy is None:
                return (None, None, None, *nothing)
            grad_logprobs = torch.zeros_like(grad_entropy)
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.has_bias and ctx.needs_input_grad[2])
        gradients = linear_token_logprobs_backward(
            hidden,
            weight,
            bias,
            labels,
            *options,
            logprobs,
            lse,
            entropies,
            grad_logprobs,
            grad_entropy,
            *needs,
            ctx.skip,
        )
        return (*(grad if need else None for grad, need in zip(gradients, needs, strict=True)), *nothing)
