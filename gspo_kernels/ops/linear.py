"""Operators over hidden states: logits exist only a chunk of rows at a time.

Matrix products belong to the vendor library through torch, rows to the backend. Counted rows are compacted
first: masked tokens are never projected, and rows whose gradient is zero enter no gradient product.

16-bit inputs: the product leaves in fp32 (``logits_dtype="float32"``). On CUDA the rows that enter the
gradient products are 16-bit and unscaled (p - onehot), written into the memory of the fp32 logits;
coefficients, normalised to at most 1, multiply the hidden rows and the result, so that nothing underflows. On
CPU 16-bit weights are raised to fp32 in slabs, as fp32 products are faster there.

The C++ backend makes rows of a chunk's logits along with their statistics: the same exponentials serve both,
and what is missing to p - onehot is a factor per row, which multiplies where the coefficient does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from gspo_kernels.ops.backends import OnePassBackend, load
from gspo_kernels.ops.library import operator
from gspo_kernels.ops.logprobs import OPTIONS, check_labels, fake_stats, restore_options, save_options
from gspo_kernels.ops.memory import Workspace, chunk_rows
from gspo_kernels.ops.values import check_temperature
from gspo_kernels.types import LogitTransform, RowStats, stats_dtype

_LOGITS_SLAB, _HIDDEN_SLAB = 2048, 8192
"""Rows of the weight that a product on the CPU takes at a time, for logits and, if it is 16-bit, for dHidden.
Logits leave in columns that stay in cache: with MKL on two AVX2 cores a twentieth faster, of 16 rows a
quarter, bit for bit the same."""


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

    @property
    def rows_dtype(self) -> torch.dtype:
        """The dtype of the rows that enter the gradient products."""
        on_gpu = self.weight.is_cuda
        return self.weight.dtype if on_gpu or self.weight.dtype == torch.float64 else torch.float32

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of logits, and of the row that enters the gradient products unless it fits there."""
        rows = self.rows_dtype.itemsize
        return self.vocabulary * (self.dtype.itemsize + (rows if rows > self.dtype.itemsize else 0))

    @property
    def writes_into(self) -> bool:
        """Whether ``logits`` can use memory that exists: CUDA's product of 16-bit inputs in fp32 can't."""
        return self.native or not self.weight.is_cuda

    def logits(self, hidden: Tensor, out: Tensor | None) -> Tensor:
        """[n, H] -> [n, V], in ``out`` where ``writes_into``."""
        if out is None:
            product = torch.mm(hidden, self.weight.t(), out_dtype=torch.float32)
            return product if self.bias is None else product.add_(self.bias)
        if self.weight.is_cuda or out.dtype in (torch.float16, torch.bfloat16):
            if self.bias is None:
                return torch.mm(hidden, self.weight.t(), out=out)
            return torch.addmm(self.bias, hidden, self.weight.t(), out=out)
        hidden = hidden.to(out.dtype)
        for slab in self._slabs(_LOGITS_SLAB):
            product = torch.mm(hidden, self.weight[slab].to(out.dtype).t(), out=out[:, slab])
            if self.bias is not None:
                product += self.bias[slab]
        return out

    def grad_hidden(self, rows: Tensor) -> Tensor:
        """[n, V] -> [n, H] in the statistics' dtype."""
        if rows.dtype == self.weight.dtype:
            if rows.is_cuda and rows.dtype in (torch.float16, torch.bfloat16):
                return torch.mm(rows, self.weight, out_dtype=torch.float32)
            return torch.mm(rows, self.weight).to(stats_dtype(rows.dtype))
        out = torch.zeros(rows.shape[0], self.weight.shape[1], dtype=rows.dtype, device=rows.device)
        for slab in self._slabs(_HIDDEN_SLAB):
            out.addmm_(rows[:, slab], self.weight[slab].to(rows.dtype))
        return out

    def _slabs(self, rows: int) -> Iterator[slice]:
        for start in range(0, self.vocabulary, rows):
            yield slice(start, min(start + rows, self.vocabulary))


@dataclass(frozen=True)
class Chunk:
    """Rows that are projected together.

    Attributes:
        where: their positions among the flattened rows of the call.
        hidden: [n, H].
        labels: [1, n].
        transform: with a ``row_temperature`` of [1, n] or None.
    """

    where: slice | Tensor
    hidden: Tensor
    labels: Tensor
    transform: LogitTransform

    def __len__(self) -> int:
        return self.labels.shape[1]

    def select(self, keep: Tensor) -> Chunk:
        """Some of the rows, by index."""
        where = self.where
        if isinstance(where, slice):
            where = torch.arange(where.start, where.stop, device=keep.device)
        temperature = self.transform.row_temperature
        transform = self.transform
        if temperature is not None:
            transform = transform._replace(row_temperature=temperature[:, keep])
        return Chunk(where[keep], self.hidden[keep], self.labels[:, keep], transform)


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
    chunk_rows: int
    compact: bool

    @classmethod
    def split(cls, args: tuple[Any, ...]) -> tuple[Call, tuple[Any, ...]]:
        """The operands of ``LINEAR`` that lead an operator's arguments, checked, and the rest."""
        count = LINEAR.count(",") + 1
        call = cls.of(*args[:count])
        check_labels(call.labels, call.head.vocabulary, call.ignore_index)
        check_temperature(call.transform.row_temperature)
        return call, args[count:]

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
        transform = LogitTransform(logit_scale, softcap, temperature, row_temperature)
        rows = chunk_rows(head.row_bytes, max_chunk_bytes, weight.device)
        return Call(hidden, head, labels, transform, ignore_index, backend, rows, compact)

    @property
    def counted(self) -> Tensor:
        """Tokens that have a log-prob."""
        return self.labels != self.ignore_index

    def index(self, keep: Tensor | None) -> slice | Tensor:
        """Positions of the rows where ``keep`` holds; None: all. Looks at the device."""
        if keep is None or bool(keep.all()):
            return slice(0, self.labels.numel())
        return keep.flatten().nonzero().squeeze(1)

    def chunks(self, where: slice | Tensor) -> Iterator[Chunk]:
        """The rows at some positions in chunks of about the same size."""
        first, count = (
            (where.start, where.stop - where.start) if isinstance(where, slice) else (0, len(where))
        )
        pieces = -(-count // self.chunk_rows)
        for piece in range(pieces):
            at = slice(first + count * piece // pieces, first + count * (piece + 1) // pieces)
            yield self.chunk(at if isinstance(where, slice) else where[at])

    def chunk(self, where: slice | Tensor) -> Chunk:
        """The rows at some positions."""
        transform, labels = self.transform, self.labels.flatten()[where]
        if transform.row_temperature is not None:
            rows = transform.row_temperature.flatten()[where]
            transform = transform._replace(row_temperature=rows.unsqueeze(0))
        if self.hidden.is_contiguous():
            hidden = self.hidden.flatten(0, 1)[where]
        else:
            if isinstance(where, slice):
                where = torch.arange(where.start, where.stop, device=self.labels.device)
            length = self.labels.shape[1]
            hidden = self.hidden[where // length, where % length]
        return Chunk(where, hidden, labels.unsqueeze(0), transform)

    def one_pass(self, entropy: bool) -> bool:
        """Whether the backend writes rows along with statistics."""
        wide = self.head.rows_dtype == stats_dtype(self.head.dtype)
        return wide and not entropy and hasattr(load(self.backend), "logprobs_and_rows")

    def rows_memory(self, logits: Tensor, out: Tensor | None) -> Tensor:
        """Memory for the rows that come from logits [n, V]: ``out``, or that of the logits where they fit."""
        dtype = self.head.rows_dtype
        if out is not None:
            return out
        if logits.dtype == dtype:
            return logits
        if logits.element_size() > dtype.itemsize:
            return logits.view(dtype)[:, : logits.shape[1]]
        return torch.empty(logits.shape, dtype=dtype, device=logits.device)

    def new_rows(self, fill: float = 0.0) -> Tensor:
        """[B, T] in the statistics' dtype."""
        return torch.full(
            self.labels.shape, fill, dtype=stats_dtype(self.hidden.dtype), device=self.labels.device
        )


class Projected(NamedTuple):
    """A chunk on its way from logits to the gradient products.

    Attributes:
        values: [n, V], the logits; or already rows, d logprob/dlogits but for a factor of each.
        stats: [n] each.
        factors: [n] in the statistics' dtype, or None where ``values`` are the logits.
    """

    values: Tensor
    stats: RowStats
    factors: Tensor | None = None

    def select(self, keep: Tensor) -> Projected:
        """Some of the rows, by ascending index, in the same memory."""
        factors = None if self.factors is None else self.factors[keep]
        return Projected(move_up(self.values, keep), self.stats.each(lambda stat: stat[keep]), factors)


class Scores:
    """Log-probs, log-sum-exp and entropy of a call, filled chunk by chunk; one chunk of logits at a time.

    ``known`` are those of an earlier pass, [B, T] each.
    """

    def __init__(self, call: Call, entropy: bool, known: RowStats | None = None):
        self.call, self.backend = call, load(call.backend)
        if known is None:
            known = RowStats(
                call.new_rows(), call.new_rows().to(torch.float64), call.new_rows() if entropy else None
            )
        self.logprobs, self.lse, self.entropy = known
        self._most = min(call.chunk_rows, call.labels.numel())
        self._logits: Tensor | None = None
        self._workspace = Workspace()

    def expect(self, rows: int) -> None:
        """Make room for chunks of so many rows instead of as many as the budget allows."""
        self._most = rows

    def close(self) -> None:
        """The chunk's memory is no longer needed."""
        self._logits = None
        self._workspace.close()

    def logits(self, chunk: Chunk) -> Tensor:
        """[n, V], in memory that the next call of this writes over."""
        head, rows = self.call.head, len(chunk)
        if not head.writes_into:
            return head.logits(chunk.hidden, None)
        if self._logits is None:
            size = (max(rows, self._most), head.vocabulary)
            if head.weight.is_cpu:
                self._logits = self._workspace.rows(*size, head.dtype)
            else:
                self._logits = torch.empty(size, dtype=head.dtype, device=head.weight.device)
        return head.logits(chunk.hidden, self._logits[:rows])

    def statistics(self, logits: Tensor, chunk: Chunk, entropy: bool) -> RowStats:
        """Of a chunk's logits, [n] each."""
        stats = self.backend.logprobs_forward(
            logits.unsqueeze(0),
            chunk.labels,
            chunk.transform,
            ignore_index=self.call.ignore_index,
            entropy=entropy,
        )
        return RowStats(*stats).each(lambda stat: stat.squeeze(0))

    def score(self, chunk: Chunk, entropy: bool, out: Tensor | None = None) -> Projected:
        """Project a chunk whose gradient is wanted, too: where one pass does both, its rows come with the
        statistics, in ``out`` or in the memory of the logits.
        """
        logits = self.logits(chunk)
        if not self.call.one_pass(entropy):
            return Projected(logits, self.statistics(logits, chunk, entropy))
        rows = self.call.rows_memory(logits, out)
        stats, factors = cast(OnePassBackend, self.backend).logprobs_and_rows(
            logits.unsqueeze(0),
            chunk.labels,
            chunk.transform,
            ignore_index=self.call.ignore_index,
            out=rows.unsqueeze(0),
        )
        return Projected(rows, stats.each(lambda stat: stat.squeeze(0)), factors.squeeze(0))

    def add(self, chunk: Chunk, out: Tensor | None = None) -> Projected:
        """``score`` a chunk and keep its statistics."""
        projected = self.score(chunk, self.entropy is not None, out)
        self.keep(projected.stats, chunk)
        return projected

    def add_forward(self, chunk: Chunk) -> None:
        """Project a chunk and keep its statistics; its logits are not needed."""
        self.keep(self.statistics(self.logits(chunk), chunk, self.entropy is not None), chunk)

    def keep(self, stats: RowStats, chunk: Chunk) -> None:
        """Keep a chunk's statistics."""
        self.logprobs.view(-1)[chunk.where] = stats.logprobs
        self.lse.view(-1)[chunk.where] = stats.lse
        if self.entropy is not None and stats.entropy is not None:
            self.entropy.view(-1)[chunk.where] = stats.entropy

    def at(self, where: slice | Tensor) -> RowStats:
        """The statistics of some rows, [n] each."""
        return RowStats(self.logprobs, self.lse, self.entropy).each(lambda stat: stat.view(-1)[where])


@operator(f"linear_token_logprobs({LINEAR}, bool entropy) -> (Tensor, Tensor, Tensor)")
def linear_token_logprobs(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, log-sum-exp and entropy (empty unless asked for) of hidden [B, T, H] at labels [B, T]."""
    call, (entropy,) = Call.split(args)
    scores = Scores(call, entropy)
    for chunk in call.chunks(call.index(call.counted if call.compact else None)):
        scores.add_forward(chunk)
    scores.close()
    missing = scores.logprobs.new_empty(0)
    return scores.logprobs, scores.lse, missing if scores.entropy is None else scores.entropy


@linear_token_logprobs.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return fake_stats(labels, hidden.dtype, args[-1])


@operator(f"unwritten_token_logprobs({LINEAR}, bool entropy) -> (Tensor, Tensor)")
def unwritten_token_logprobs(*args: Any) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of hidden [B, T, H] at labels [B, T]; no logits are written. Triton only."""
    from gspo_kernels.kernels import linear_logprobs_forward

    call, (entropy,) = Call.split(args)
    rows = call.chunk(call.index(call.counted))
    stats = linear_logprobs_forward(
        rows.hidden,
        call.head.weight,
        call.head.bias,
        rows.labels.squeeze(0),
        rows.transform,
        ignore_index=call.ignore_index,
        entropy=entropy,
    )
    logprobs, entropies = call.new_rows(), call.new_rows() if entropy else stats.logprobs.new_empty(0)
    logprobs.view(-1)[rows.where] = stats.logprobs
    if stats.entropy is not None:
        entropies.view(-1)[rows.where] = stats.entropy
    return logprobs, entropies


@unwritten_token_logprobs.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    logprobs, _, entropy = fake_stats(labels, hidden.dtype, args[-1])
    return logprobs, entropy


def check_unwritten(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, logits_dtype: str, backend: str
) -> None:
    """Refuse what can't be scored without writing logits."""
    trained = [x for x in (hidden, weight, bias) if x is not None and x.requires_grad]
    reason: str | None
    if trained and torch.is_grad_enabled():
        reason = "there is no gradient; call it under torch.no_grad()"
    elif logits_dtype != "float32":
        reason = f"logits_dtype={logits_dtype!r} rounds what is not written"
    elif backend != "triton":
        reason = f"it takes the Triton backend, and this call's is {backend!r}"
    else:
        from gspo_kernels.kernels import linear_logprobs_unavailable

        reason = linear_logprobs_unavailable(hidden, weight)
    if reason is not None:
        raise ValueError(f"max_chunk_bytes: got 0 (logits are never written), but {reason}")


def power_of_two(largest: Tensor) -> Tensor:
    """About ``largest``, so that dividing by it rounds nothing; 1 where that is 0, infinite or NaN."""
    top = math.frexp(torch.finfo(largest.dtype).max)[1] - 1
    power = torch.exp2(torch.log2(largest).ceil().clamp(1 - top, top))
    return torch.where((largest > 0) & largest.isfinite(), power, 1.0)


def times(values: Tensor, factor: Tensor) -> Tensor:
    """The product, where an exact zero of either beats an overflow of the other."""
    return torch.where((values == 0) | (factor == 0), 0.0, values * factor)


def times_(values: Tensor, factor: Tensor) -> Tensor:
    """The same in place, for few factors beside many values (on the CPU, to look at each costs more)."""
    zero = factor == 0
    if not (factor.is_cpu and bool(factor.isfinite().all())):
        zero = zero | (values == 0)
    values.mul_(factor)
    return values if factor.is_cpu and not bool(zero.any()) else values.masked_fill_(zero, 0.0)


def bounded_for_sums(coefficients: Tensor) -> Tensor:
    """Coefficients so bounded that no product overflows: infinities of both signs would add to NaN."""
    most = torch.finfo(coefficients.dtype).max * 2.0**-24
    return coefficients.clamp(-most, most)


def move_up(values: Tensor, keep: Tensor) -> Tensor:
    """Rows ``keep`` (ascending) of [n, V], moved to the front of the same memory a few at a time."""
    if keep.numel() == 0 or int(keep[-1]) + 1 == keep.numel():
        return values[: keep.numel()]
    step = max(1, values.shape[0] // 32, 2**20 // (values.shape[1] * values.element_size()))
    for start in range(0, keep.numel(), step):
        rows = keep[start : start + step]
        # what is overwritten here lies before every row that is still to be read
        values[start : start + rows.numel()] = values[rows]
    return values[: keep.numel()]


class Rows(NamedTuple):
    """What enters the gradient products: d logprob/dlogits is each row times its factor.

    Attributes:
        values: [n, V].
        factors: [n], or None for 1.
    """

    values: Tensor
    factors: Tensor | None

    def scaled(self, unit: Tensor) -> Tensor:
        """What is to multiply a product over ``values`` for coefficients ``unit`` [n]."""
        return unit if self.factors is None else times(self.factors, unit)


class HeadSums:
    """dWeight [V, H] and dBias [V] summed over chunks, where they are wanted; in the statistics' dtype."""

    def __init__(self, head: Head, trained: tuple[bool, bool]):
        dtype, device = stats_dtype(head.weight.dtype), head.weight.device
        self._weight = torch.empty(head.weight.shape, dtype=dtype, device=device) if trained[0] else None
        self._bias = torch.zeros(head.vocabulary, dtype=dtype, device=device) if trained[1] else None
        self._empty = True

    def clear(self) -> None:
        """Begin anew."""
        self._empty = True
        if self._bias is not None:
            self._bias.zero_()

    def add(self, rows: Rows, hidden: Tensor, unit: Tensor, active: Tensor, scale: Tensor) -> None:
        """Add those of rows times ``unit`` [n] times ``scale``, 0-d, with hidden states [n, H]."""
        values, unit = rows.values, rows.scaled(unit)
        if self._weight is not None:
            chosen = hidden.to(self._weight.dtype)
            if not (active.is_cpu and bool(active.all())):
                # selected: the hidden state of a row without gradient may be anything
                chosen = torch.where(active.unsqueeze(1), chosen, 0.0)
            chosen = chosen * unit.unsqueeze(1)
            if values.dtype != self._weight.dtype:
                product = _transposed_product(values, chosen)
                if self._empty:
                    torch.mul(product, scale, out=self._weight)
                else:
                    self._weight.addcmul_(product, scale)
            elif self._empty:
                # not to zeros: they would cost as much as the memory that the sum fills
                torch.mm(values.t(), chosen * scale, out=self._weight)
            else:
                self._weight.addmm_(values.t(), chosen * scale)
        if self._bias is not None:
            self._bias += _transposed_product(values, unit.unsqueeze(1)).squeeze(1) * scale
        self._empty = False

    def add_sums(self, sums: HeadSums, coefficient: Tensor) -> None:
        """Add other sums times a coefficient that has come late."""
        weight, bias = sums.result()
        for total, own in ((self._weight, weight), (self._bias, bias)):
            if total is None or own is None:
                continue
            factor = bounded_for_sums(coefficient.to(total.dtype))
            if self._empty and total is self._weight:
                torch.mul(own, factor, out=total)
            else:
                total.addcmul_(own, factor)
        self._empty = False

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        """The two sums."""
        if self._empty and self._weight is not None:
            self._weight.zero_()
            self._empty = False
        return self._weight, self._bias


def _transposed_product(rows: Tensor, operand: Tensor) -> Tensor:
    """[n, V].T @ [n, k] in the operand's dtype."""
    if rows.dtype == operand.dtype:
        return torch.mm(rows.t(), operand)
    return torch.mm(rows.t(), operand.to(rows.dtype), out_dtype=operand.dtype)


class Gradients:
    """dHidden, dWeight and dBias of a chunked call.

    Attributes:
        hidden: [B, T, H] in hidden's dtype, or None.
        scales: None, or [B, T] in the statistics' dtype: dHidden is ``scales * hidden``. Rows of ``hidden``
            are then normalised by powers of two, so that fp16 loses nothing whatever the coefficients.
        sums: of dWeight and dBias.
    """

    def __init__(self, call: Call, needs: tuple[bool, ...], normalised: bool):
        hidden = call.hidden
        self.call, self.backend = call, load(call.backend)
        self.hidden = (
            torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device) if needs[0] else None
        )
        self.scales = call.new_rows(1.0) if normalised else None
        self.accumulate = stats_dtype(hidden.dtype)
        self.trained = needs[1], needs[2]
        self.sums = HeadSums(call.head, self.trained)

    def add(
        self,
        projected: Projected,
        chunk: Chunk,
        grad: Tensor,
        grad_entropy: Tensor | None,
        skip: bool,
    ) -> None:
        """Add one chunk, given its coefficients; overwrites its logits.

        Args:
            projected: of the chunk.
            chunk: the rows.
            grad, grad_entropy: dLoss/dlogprobs and dLoss/dentropy, [n], or None.
            skip: leave rows without gradient out of the products.
        """
        active = grad != 0
        if grad_entropy is not None:
            active = active | (grad_entropy != 0)
        if skip and not bool(active.all()):
            keep = active.nonzero().squeeze(1)
            if keep.numel() == 0:
                return
            projected, chunk, grad = projected.select(keep), chunk.select(keep), grad[keep]
            active = active[keep]
            grad_entropy = None if grad_entropy is None else grad_entropy[keep]
        if grad_entropy is None:
            self.add_rows(self.rows(projected, chunk), chunk, grad, active)
            return
        # a row then has two coefficients, so they go into the rows themselves
        largest = torch.maximum(grad.abs().amax(), grad_entropy.abs().amax())
        scale = power_of_two(largest.to(self.accumulate))
        rows = self._write(projected, chunk, grad / scale, grad_entropy / scale, None)
        self.add_rows(Rows(rows, None), chunk, scale.expand(len(chunk)), active)

    def rows(self, projected: Projected, chunk: Chunk, out: Tensor | None = None) -> Rows:
        """What enters the gradient products, in ``out`` or, where it fits, in the memory of the logits."""
        if projected.factors is not None:
            return Rows(projected.values, projected.factors)
        ones = projected.stats.logprobs.new_ones(()).expand(len(chunk))
        return Rows(self._write(projected, chunk, ones, None, out), None)

    def _write(
        self,
        projected: Projected,
        chunk: Chunk,
        grad: Tensor,
        grad_entropy: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        """d(grad * logprob + grad_entropy * entropy)/dlogits."""
        assert projected.factors is None
        logits = projected.values
        rows = self.call.rows_memory(logits, out)
        self.backend.logprobs_backward(
            logits.unsqueeze(0),
            chunk.labels,
            projected.stats.each(lambda stat: stat.unsqueeze(0)),
            grad.unsqueeze(0),
            None if grad_entropy is None else grad_entropy.unsqueeze(0),
            None,
            chunk.transform,
            ignore_index=self.call.ignore_index,
            out=rows.unsqueeze(0),
        )
        return rows

    def add_rows(self, rows: Rows, chunk: Chunk, coefficients: Tensor, active: Tensor) -> None:
        """Add rows times coefficients [n], the inactive ones of which are zero."""
        coefficients = coefficients.to(self.accumulate)
        bounded = bounded_for_sums(coefficients)
        scale = power_of_two(bounded.abs().amax())
        self.add_hidden(rows, chunk, coefficients)
        self.sums.add(rows, chunk.hidden, bounded / scale, active, scale)

    def add_hidden(self, rows: Rows, chunk: Chunk, coefficients: Tensor) -> None:
        """Add the dHidden of rows times coefficients [n]; no row's depends on another's."""
        if self.hidden is None:
            return
        scale = power_of_two(coefficients.abs())
        unit = rows.scaled(coefficients / scale)
        values = times_(self.call.head.grad_hidden(rows.values), unit.unsqueeze(1))
        if self.scales is None:
            values = times_(values, scale.unsqueeze(1))
        else:
            power = power_of_two(values.abs().amax(1))
            values.div_(power.unsqueeze(1))
            self.scales.view(-1)[chunk.where] = power * scale
        self.hidden.view(-1, values.shape[1])[chunk.where] = values.to(self.hidden.dtype)

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients in the parameters' dtypes; empty where not needed."""
        head, hidden = self.call.head, self.call.hidden
        weight, bias = self.sums.result()
        # one empty tensor each: an operator's outputs may not be the same tensor
        return (
            hidden.new_empty(0) if self.hidden is None else self.hidden,
            hidden.new_empty(0) if weight is None else weight.to(head.weight.dtype),
            hidden.new_empty(0) if bias is None or head.bias is None else bias.to(head.bias.dtype),
        )


def recompute(
    scores: Scores,
    gradients: Gradients,
    index: slice | Tensor,
    anew: bool,
    grad: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """Project the rows at ``index`` once more and add their gradient.

    Args:
        scores: with the statistics of the first pass.
        gradients: to add to.
        index: positions of the rows with a gradient.
        anew: take the statistics anew: a product over other rows may round otherwise, and exp(z - lse) of a
            peaked row shows the last bit of z.
        grad, grad_entropy: dLoss/dlogprobs and dLoss/dentropy of all rows, flat, or None.
    """
    for chunk in scores.call.chunks(index):
        if anew:
            projected = scores.score(chunk, grad_entropy is not None)
        else:
            projected = Projected(scores.logits(chunk), scores.at(chunk.where))
        entropy = None if grad_entropy is None else grad_entropy[chunk.where]
        gradients.add(projected, chunk, grad[chunk.where], entropy, skip=False)
        del projected


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
    keep = call.counted if call.compact else None
    if skip:
        keep = grad_logprobs != 0 if grad_entropy is None else (grad_logprobs != 0) | (grad_entropy != 0)
        keep = keep & call.counted
    anew = skip and exact(call) and keep is not None and not torch.equal(keep, call.counted)
    known = RowStats(logprobs, lse, entropy if entropy.numel() == lse.numel() else None)
    scores = Scores(call, False, known)
    gradients = Gradients(call, tuple(needs), normalised=False)
    grad_entropy = None if grad_entropy is None else grad_entropy.flatten()
    recompute(scores, gradients, call.index(keep), anew, grad_logprobs.flatten(), grad_entropy)
    scores.close()
    return gradients.result()


def exact(call: Call) -> bool:
    """Whether gradients show the last bit of the logits; 16-bit ones don't."""
    return call.head.weight.dtype in (torch.float32, torch.float64)


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
        hidden, weight = saved[:2]
        bias = saved[2] if ctx.has_bias else None
        labels, logprobs, lse, entropies = saved[-4:]
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
