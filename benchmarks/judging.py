"""A GSPO problem, its fp64 answer, and the judge of answers.

Suites draw the inputs, whose logits have a standard deviation of 3. Tokens are drawn from the policy. Old
log-probs put every sequence's ratio 5% away from 1, on the side where it is clipped or not, as specified by
the problem. The noise of bf16 logits therefore does not change clip decisions.

Only a contestant with a correct answer is timed: ``error <= 2 x the error of plain PyTorch at the same
precision + one rounding of the largest value``, for loss and gradients (scoring: log-probs), against fp64 on
the timed problem. No budget exceeds the effect of the precision of logits. A contestant that accumulates
gradients in 16 bits gets half a rounding more for each further rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CLIP_LOW, CLIP_HIGH = 3e-4, 4e-4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DISTANCE = 0.05
_LARGEST_LOGIT = 21.0
"""Seven standard deviations of the logits."""
_SINGLE = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Problem:
    """B sequences of up to T tokens. In the packed layout [B, T] becomes [N], split by ``cu_seqlens``.

    Attributes:
        task: one of ``measure.TASKS``.
        inputs: (logits [B, T, V],), or (hidden [B, T, H], weight [V, H]) of one dtype.
        labels: [B, T].
        old_logprobs: [B, T], fp32, or None: on-policy.
        advantages: [B], fp32.
        mask: [B, T], fp32, 1 where a token counts; every sequence has such a token.
        logprobs: [B, T], fp64: the exact log-probs of these inputs.
        trains_weight: whether the weight receives a gradient.
        cu_seqlens: [B + 1], int32, where tokens are packed.
    """

    task: str
    inputs: tuple[Tensor, ...]
    labels: Tensor
    old_logprobs: Tensor | None
    advantages: Tensor
    mask: Tensor
    logprobs: Tensor
    trains_weight: bool = True
    cu_seqlens: Tensor | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the leaves."""
        return ("logits",) if self.task == "logits" else ("hidden", "weight")

    @property
    def vocabulary(self) -> int:
        return self.inputs[-1].shape[-1 if self.task == "logits" else 0]

    def situation(self, name: str) -> Problem:
        """Return the problem with every second advantage zero, with every tenth sequence clipped, with a head
        without gradient, or on-policy.
        """
        if name == "half inactive":
            odd = torch.arange(len(self.advantages), device=self.advantages.device) % 2
            return replace(self, advantages=self.advantages * odd)
        if name == "10% clipped" and self.old_logprobs is not None:
            tenth = torch.arange(len(self.advantages), device=self.advantages.device) % 10 == 9
            other_side = (2 * self.logprobs - self.old_logprobs).float()
            return replace(self, old_logprobs=torch.where(tenth[:, None], other_side, self.old_logprobs))
        if name == "frozen head":
            return replace(self, trains_weight=False)
        return replace(self, old_logprobs=None) if name == "on-policy" else self

    def layout(self, name: str) -> Problem:
        """Return it unchanged ("padded"), without padding ("packed"), or with one more position ("next")."""
        if name == "packed":
            counted = self.mask.bool()
            lengths = F.pad(counted.sum(1).cumsum(0), (1, 0)).int()
            old = None if self.old_logprobs is None else self.old_logprobs[counted]
            return replace(
                self, inputs=(self.inputs[0][counted], *self.inputs[1:]), labels=self.labels[counted],
                old_logprobs=old, mask=self.mask[counted], logprobs=self.logprobs[counted],
                cu_seqlens=lengths,
            )  # fmt: skip
        if name == "next":
            return replace(self, inputs=(F.pad(self.inputs[0], (0, 0, 0, 1)), *self.inputs[1:]))
        return self

    def leaves(self, copy: bool = False) -> tuple[Tensor, ...]:
        """Return new leaves for autograd, the first a copy if ``copy``. A frozen weight has no gradient."""
        first, *weight = (tensor.detach() for tensor in self.inputs)
        first = first.clone() if copy else first
        wants = self.task != "scoring"
        return (
            first.requires_grad_(wants),
            *(tensor.requires_grad_(wants and self.trains_weight) for tensor in weight),
        )

    def call(self, compute: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> Tensor:
        """Return the loss, or for the task "scoring" the log-probs."""
        if self.task == "scoring":
            with torch.no_grad():
                return compute(self, *leaves)
        return compute(self, *leaves)

    def finish(self, leaves: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
        """Do nothing. A training step takes its optimizer's step here."""


@dataclass(frozen=True)
class Answer:
    """The values to compare: [B] losses (or their mean) and gradients by leaf; for scoring, log-probs."""

    loss: Tensor
    gradients: dict[str, Tensor]


def losses(problem: Problem, logprobs: Tensor) -> Tensor:
    """Return GSPO's losses [B] from log-probs that may require a gradient: -min(s A, clip(s) A) with
    s = exp(mean_t(logp - logp_old)) (arXiv 2507.18071).
    """
    dtype = logprobs.dtype if logprobs.dtype == torch.float64 else torch.float32
    old = logprobs.detach() if problem.old_logprobs is None else problem.old_logprobs
    differences, advantages = (logprobs - old) * problem.mask, problem.advantages.to(dtype)
    if problem.cu_seqlens is None:
        ratio = (differences.sum(-1) / problem.mask.sum(-1)).exp()
    else:
        lengths = problem.cu_seqlens.diff()
        ratio = (torch.segment_reduce(differences, "sum", lengths=lengths.long()) / lengths).exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def coefficients(problem: Problem, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses [B], and the gradient of their mean by the log-probs, [B, T]."""
    logprobs = logprobs.detach().requires_grad_()
    found = losses(problem, logprobs)
    (gradient,) = torch.autograd.grad(found.mean(), logprobs)
    return found.detach(), gradient


def picked(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probs of labels, written as in plain PyTorch."""
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def project(hidden: Tensor, weight: Tensor, precision: str, native: bool) -> Tensor:
    """Return logits in fp32 (fp64 for fp64 inputs).

    Args:
        hidden, weight: one dtype, or the weight in fp32 already.
        precision: "input": 16-bit products are rounded to 16 bits; "float32": they stay as they are.
        native: multiply 16-bit operands with a product that rounds to 16 bits. Otherwise cast them to fp32
            and round the result: the same precision, also where a CPU has no fast 16-bit products.
    """
    dtype = hidden.dtype
    if dtype == torch.float64 or (native and precision == "input"):
        return F.linear(hidden, weight).to(torch.promote_types(dtype, torch.float32))
    logits = F.linear(hidden.float(), weight.float())
    return logits.to(dtype).float() if precision == "input" else logits


def row_chunks(rows: int, vocabulary: int, device: torch.device) -> Iterator[slice]:
    """Yield slices of rows whose fp64 logits take 256 MiB, on a GPU 2 GiB."""
    step = max(1, 2 ** (25 if device.type == "cpu" else 28) // vocabulary)
    yield from (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def posed(
    task: str,
    inputs: tuple[Tensor, ...],
    sequences: int,
    generator: torch.Generator,
    lengths: Sequence[int] | None = None,
    advantages: Sequence[float] | None = None,
    clipped: Sequence[bool] | None = None,
) -> Problem:
    """Draw labels and old log-probs for inputs of N tokens: (logits [N, V],), or (hidden [N, H], weight).

    Args:
        lengths: how many of a sequence's T tokens count, from the first on; default T.
        advantages, clipped: of each sequence; default: both signs, and none clipped.
    """
    first, *weight = inputs
    tokens, device = len(first), first.device
    if tokens % sequences:
        raise ValueError(f"{tokens} tokens are not {sequences} sequences of equal length")
    labels = torch.empty(tokens, dtype=torch.int64, device=device)
    logprobs = torch.empty(tokens, dtype=torch.float64, device=device)
    raised = weight[0].double() if weight else None
    for rows in row_chunks(tokens, len(weight[0]) if weight else first.shape[1], device):
        logits = first[rows].double() if raised is None else first[rows].double() @ raised.t()
        every = logits.log_softmax(-1)
        labels[rows] = torch.multinomial(every.exp(), 1, generator=generator).squeeze(1)
        logprobs[rows] = every.gather(1, labels[rows].unsqueeze(1)).squeeze(1)
    shape = (sequences, tokens // sequences)
    sizes = torch.tensor(lengths or [shape[1]] * sequences, device=device)
    mask = (torch.arange(shape[1], device=device) < sizes.unsqueeze(1)).double()
    if advantages is None:
        sign = 1.0 - 2.0 * (torch.arange(sequences, device=device) // 2 % 2)
        signed = sign * torch.linspace(0.5, 1.5, sequences, device=device)
    else:
        signed = torch.tensor(advantages, device=device)
        sign = torch.where(signed < 0, -1.0, 1.0)
    beyond = torch.tensor(clipped or [False] * sequences, device=device)
    noise = 0.02 * torch.randn(shape, generator=generator, dtype=torch.float64, device=device)
    noise = noise - ((noise * mask).sum(1) / mask.sum(1)).unsqueeze(1)
    log_ratio = noise + _DISTANCE * torch.where(beyond, sign, -sign).double().unsqueeze(1)
    logprobs = logprobs.view(shape)
    old = (logprobs - log_ratio).float()
    return Problem(
        task,
        (first.view(*shape, -1), *weight),
        labels.view(shape),
        old,
        signed.float(),
        mask.float(),
        logprobs,
    )


def answer(problem: Problem, precision: str) -> Answer:
    """Compute plain PyTorch's answer, a chunk of rows at a time.

    Args:
        precision: "exact" is fp64; "input" and "float32" measure what a precision may cost, see ``project``.
    """
    exact = precision == "exact"
    wide, kept = (torch.float64, torch.float64) if exact else (torch.float32, problem.inputs[0].dtype)
    first, *others = problem.inputs
    first, labels = first.flatten(0, 1), problem.labels.flatten()
    raised = others[0].detach().to(wide).requires_grad_(problem.trains_weight) if others else None

    def scores(part: Tensor, rows: slice) -> Tensor:
        if raised is not None:
            return picked(project(part, raised, precision, native=False), labels[rows])
        return picked(part if precision == "input" else part.to(wide), labels[rows]).to(wide)

    chunks, logprobs = list(row_chunks(len(first), problem.vocabulary, first.device)), problem.logprobs
    if not exact:
        with torch.no_grad():
            logprobs = torch.cat([scores(first[rows], rows) for rows in chunks]).view_as(problem.labels)
    if problem.task == "scoring":
        return Answer(logprobs, {})
    found, c = coefficients(problem, logprobs)
    gradient, weight = torch.empty_like(first, dtype=kept), None
    for rows in chunks:
        part = first[rows].detach().to(kept).requires_grad_()
        wanted = (part, raised) if raised is not None and problem.trains_weight else (part,)
        gradient[rows], *rest = torch.autograd.grad(scores(part, rows), wanted, c.flatten()[rows])
        if rest:
            weight = rest[0] if weight is None else weight.add_(rest[0])
    gradients = {problem.names[0]: gradient.view_as(problem.inputs[0])}
    return Answer(found, gradients if weight is None else gradients | {"weight": weight.to(kept)})


@dataclass
class Verdict:
    """The largest absolute errors against fp64 and the allowed ones, by name; infinite if one is missing."""

    errors: dict[str, float]
    allowed: dict[str, float]

    @property
    def share(self) -> float:
        """The worst error as a share of what was allowed."""
        return max((error / self.allowed[name] for name, error in self.errors.items()), default=math.inf)

    @property
    def complaint(self) -> str:
        """What is wrong, empty if nothing."""
        return "; ".join(
            f"{name} is off by {error:.1e}, allowed {self.allowed[name]:.1e}"
            for name, error in self.errors.items()
            if not error <= self.allowed[name]
        )


def _distance(got: Tensor | None, wanted: Tensor) -> float:
    """Return the largest absolute error, infinite for NaN and other shapes; fp64 copies are of some rows."""
    if got is None or got.shape != wanted.shape:
        return math.inf
    pairs = zip(got.split(64), wanted.split(64), strict=True) if wanted.ndim else [(got, wanted)]
    errors = torch.stack([(some.double() - exact).abs().max() for some, exact in pairs])
    return math.inf if errors.isnan().any() else errors.max().item()


class Judge:
    """Compares results of a padded problem with fp64."""

    def __init__(self, problem: Problem):
        self.problem, self.exact = problem, answer(problem, "exact")
        self._value = "logprobs" if problem.task == "scoring" else "loss"
        values = {self._value: self.exact.loss} | self.exact.gradients
        self._largest = {name: max(map(abs, value.aminmax())).item() for name, value in values.items()}
        self._plain: dict[str, dict[str, float]] = {}

    def verdict(
        self, contestant: Any, result: Tensor | None, gradients: tuple[Tensor | None, ...]
    ) -> Verdict:
        """Judge a loss (scoring: log-probs) and the gradients of the leaves, in the contestant's layout."""
        exact, layout = self.exact, contestant.layout
        value = exact.loss if self._value == "logprobs" else exact.loss.mean()
        found = {self._value: _distance(result, value)}
        for name, gradient in zip(self.problem.names, gradients, strict=True):
            wanted = exact.gradients.get(name)
            if wanted is None:
                continue
            if layout == "packed" and name == "hidden":
                wanted = wanted[self.problem.mask.bool()]
            if layout == "next" and gradient is not None:
                gradient = gradient[:, :-1]
            found[name] = _distance(gradient, wanted)
        return Verdict(found, {name: self._allowed(name, contestant) for name in found})

    def _errors_of_plain(self, precision: str) -> dict[str, float]:
        """Return the errors of plain PyTorch at a precision."""
        if precision not in self._plain:
            plain = answer(self.problem, precision)
            # signed errors of sequences may cancel in the mean by luck; absolute errors don't
            error = (plain.loss.double() - self.exact.loss).abs()
            value = (error.max() if self._value == "logprobs" else error.mean()).item()
            pairs = ((name, _distance(plain.gradients[name], g)) for name, g in self.exact.gradients.items())
            self._plain[precision] = {self._value: value, **dict(pairs)}
        return self._plain[precision]

    def _allowed(self, name: str, contestant: Any) -> float:
        """Return the error that a contestant may have."""
        first, largest = self.problem.inputs[0], self._largest[name]
        width = 0 if self.problem.task == "logits" else first.shape[-1]
        error = self._errors_of_plain(contestant.precision)[name]
        of_input = torch.finfo(first.dtype).eps if contestant.precision == "input" else _SINGLE
        # the error of logits, and of summing V exponentials in fp32
        of_logits = (
            _LARGEST_LOGIT * (_SINGLE * width**0.5 + of_input) + _SINGLE * self.problem.vocabulary**0.5
        )
        rounding = _SINGLE if name == self._value else torch.finfo(first.dtype).eps
        budget = min(2 * error + rounding * largest, (4 * of_logits + rounding) * max(largest, 1e-30))
        if name in ("hidden", "weight"):
            budget += (contestant.roundings(self.problem) - 1) * rounding / 2 * largest
        return budget
