"""The problems that contestants solve, their fp64 answers, and the judge of answers.

Hidden states are standard normal, and the weight is scaled so that logits have a standard deviation of 3. If
logits are the inputs, they are drawn with this deviation. Tokens are drawn from the policy. Old log-probs put
every sequence's ratio 5% away from 1: to the side where its advantage can't be clipped, or to the other side
if the problem says that it is clipped. So the noise of bf16 logits turns no contestant's gradient on or off.

Only a contestant with a right answer is timed: ``error <= 2 x the error of plain PyTorch at the same
precision + one rounding of the largest value``, for loss and gradients (scoring: log-probs), against fp64 on
the very problem that is timed. No budget exceeds what the precision of the logits explains. A contestant that
sums gradients in 16 bits gets half a rounding more for each further rounding of its sums.
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
_GROUP = 4
_LARGEST_LOGIT = 21.0
"""Seven standard deviations of the logits."""
_KEPT = 2**27
"""The most elements of fp64 gradients that are kept in memory."""
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
        """Return fresh leaves for autograd, the first a copy if ``copy``. A frozen weight has no gradient."""
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

    loss: Tensor | None
    gradients: dict[str, Tensor]


def gspo(log_s: Tensor, advantages: Tensor) -> Tensor:
    """Return losses [B]: -min(s A, clip(s) A) with s = exp(mean_t(logp - logp_old)) (arXiv 2507.18071)."""
    ratio = log_s.exp()
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def losses(problem: Problem, logprobs: Tensor) -> Tensor:
    """Return the losses [B] of a problem from log-probs that may require a gradient."""
    dtype = logprobs.dtype if logprobs.dtype == torch.float64 else torch.float32
    old = logprobs.detach() if problem.old_logprobs is None else problem.old_logprobs
    differences, advantages = (logprobs - old) * problem.mask, problem.advantages.to(dtype)
    if problem.cu_seqlens is None:
        return gspo(differences.sum(-1) / problem.mask.sum(-1), advantages)
    lengths = problem.cu_seqlens.diff()
    sums = torch.segment_reduce(differences, "sum", lengths=lengths.long())
    return gspo(sums / lengths, advantages)


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


def draw(
    task: str,
    tokens: int,
    vocabulary: int,
    width: int,
    sequences: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    lengths: Sequence[int] | None = None,
    advantages: Sequence[float] | None = None,
    clipped: Sequence[bool] | None = None,
) -> Problem:
    """Draw a problem of some shape, from a fixed seed.

    Args:
        tokens: B * T, padding included.
        width: of hidden states; ignored for the task "logits".
        lengths: how many of a sequence's T tokens count, from the first on; default T.
        advantages, clipped: of each sequence; default: both signs, and none clipped.
    """
    if tokens % sequences:
        raise ValueError(f"{tokens} tokens are not {sequences} sequences of equal length")
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.empty(0, 0, device=device)
    if task == "logits":
        first = torch.empty(tokens, vocabulary, dtype=dtype, device=device)
        for rows in row_chunks(tokens, vocabulary, device):
            part = torch.randn(first[rows].shape, generator=generator, device=device)
            first[rows] = part.mul_(3)
    else:
        first = torch.randn(tokens, width, generator=generator, device=device).to(dtype)
        weight = torch.randn(vocabulary, width, generator=generator, device=device)
        weight = weight.mul_(3 / width**0.5).to(dtype)
    labels = torch.empty(tokens, dtype=torch.int64, device=device)
    logprobs = torch.empty(tokens, dtype=torch.float64, device=device)
    raised = weight.double()
    for rows in row_chunks(tokens, vocabulary, device):
        logits = first[rows].double() @ raised.t() if weight.numel() else first[rows].double()
        every = logits.log_softmax(-1)
        labels[rows] = torch.multinomial(every.exp(), 1, generator=generator).squeeze(1)
        logprobs[rows] = every.gather(1, labels[rows].unsqueeze(1)).squeeze(1)
    shape = (sequences, tokens // sequences)
    sizes = torch.tensor(lengths or [shape[1]] * sequences, device=device)
    mask = (torch.arange(shape[1], device=device) < sizes.unsqueeze(1)).double()
    index = torch.arange(sequences, device=device)
    sign = 1.0 - 2.0 * (index // 2 % 2)
    signed = sign * torch.linspace(0.5, 1.5, sequences, device=device)
    if advantages is not None:
        signed = torch.tensor(advantages, device=device)
        sign = torch.where(signed < 0, -1.0, 1.0)
    beyond = torch.tensor(clipped or [False] * sequences, device=device)
    noise = 0.02 * torch.randn(shape, generator=generator, dtype=torch.float64, device=device)
    noise = noise - ((noise * mask).sum(1) / mask.sum(1)).unsqueeze(1)
    log_ratio = noise + _DISTANCE * torch.where(beyond, sign, -sign).double().unsqueeze(1)
    logprobs = logprobs.view(shape)
    inputs = (first.view(*shape, -1), weight) if weight.numel() else (first.view(*shape, -1),)
    old = (logprobs - log_ratio).float()
    return Problem(task, inputs, labels.view(shape), old, signed.float(), mask.float(), logprobs)


def realistic(
    task: str,
    sequences: int,
    longest: int,
    vocabulary: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Problem:
    """Draw a batch like those of training, from a fixed seed: groups of 4 sequences of log-normal length, at
    most ``longest``. 40% of the groups have no advantages, and sequences with 15% of the tokens are clipped.
    """
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(sequences, generator=generator) * 0.8 + math.log(0.35 * longest)
    sizes = drawn.exp().round().clamp(1, longest).int().tolist()
    groups = sequences // _GROUP
    rewards = torch.randn(groups, _GROUP, generator=generator)
    values = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
    # of 64 draws of ``flat`` groups, the one whose share of tokens is nearest to 40%
    tokens = torch.tensor(sizes).view(groups, _GROUP).sum(1)
    flat = round(0.4 * groups)
    draws = [torch.randperm(groups, generator=generator)[:flat] for _ in range(64)]
    values[min(draws, key=lambda some: abs(tokens[some].sum() / tokens.sum() - 0.4))] = 0.0
    advantages = values.flatten()
    target, clipped, total = 0.15 * sum(sizes), [False] * sequences, 0
    for index in torch.randperm(sequences, generator=generator).tolist():
        # clip a sequence if that brings the total nearer to the target
        if advantages[index] != 0 and abs(total + sizes[index] - target) < abs(total - target):
            clipped[index], total = True, total + sizes[index]
    shape = (sequences * longest, vocabulary, width, sequences)
    return draw(task, *shape, dtype, device, sizes, advantages.tolist(), clipped)


def logit_gradients(problem: Problem, rows: slice, raised: Tensor | None, c: Tensor) -> Tensor:
    """Return dLoss/dlogits of some rows of the padded problem, fp64 [n, V]: c * (onehot - p)."""
    part = problem.inputs[0].flatten(0, 1)[rows].double()
    chunk = (part if raised is None else part @ raised.t()).softmax(-1).neg_()
    ones = torch.ones(len(chunk), 1, dtype=torch.float64, device=chunk.device)
    chunk.scatter_add_(1, problem.labels.flatten()[rows, None], ones)
    return chunk.mul_(c.flatten()[rows, None])


def exact(problem: Problem) -> Answer:
    """Return the fp64 answer without dLogits, which ``logit_gradients`` computes a chunk at a time."""
    if problem.task == "scoring":
        return Answer(problem.logprobs, {})
    found, c = coefficients(problem, problem.logprobs)
    if problem.task == "logits":
        return Answer(found, {})
    first, raised = problem.inputs[0].flatten(0, 1), problem.inputs[1].double()
    hidden = torch.zeros(first.shape, dtype=torch.float64, device=first.device)
    weight = torch.zeros_like(raised) if problem.trains_weight else None
    for rows in row_chunks(len(first), len(raised), first.device):
        if not c.flatten()[rows].any():
            continue
        chunk = logit_gradients(problem, rows, raised, c)
        torch.mm(chunk, raised, out=hidden[rows])
        if weight is not None:
            weight.addmm_(chunk.t(), first[rows].double())
    gradients = {"hidden": hidden.view(problem.inputs[0].shape)}
    return Answer(found, gradients | ({} if weight is None else {"weight": weight}))


def plain(problem: Problem, precision: str) -> tuple[Answer, Callable[[slice], Tensor] | None]:
    """Compute plain PyTorch's answer, a chunk of rows at a time: it measures what a precision may cost.

    Returns:
        The answer without dLogits, and for the task "logits" a function: slice of rows -> their dLogits.
    """
    first, *others = problem.inputs
    rows_of, labels = first.flatten(0, 1), problem.labels.flatten()
    raised = others[0].detach().float().requires_grad_(problem.trains_weight) if others else None

    def scores(part: Tensor, rows: slice) -> Tensor:
        if raised is not None:
            return picked(project(part, raised, precision, native=False), labels[rows])
        return picked(part if precision == "input" else part.float(), labels[rows]).float()

    chunks = list(row_chunks(len(rows_of), problem.vocabulary, first.device))
    with torch.no_grad():
        logprobs = torch.cat([scores(rows_of[rows], rows) for rows in chunks]).view(problem.labels.shape)
    if problem.task == "scoring":
        return Answer(logprobs, {}), None
    found, c = coefficients(problem, logprobs)

    def gradient(rows: slice) -> tuple[Tensor, ...]:
        part = rows_of[rows].detach().requires_grad_()
        wanted = (part, raised) if raised is not None and problem.trains_weight else (part,)
        with torch.enable_grad():
            return torch.autograd.grad(scores(part, rows), wanted, c.flatten()[rows])

    if raised is None:
        return Answer(found, {}), lambda rows: gradient(rows)[0]
    hidden, weight = torch.empty_like(rows_of), None
    for rows in chunks:
        hidden[rows], *rest = gradient(rows)
        if rest:
            weight = rest[0] if weight is None else weight.add_(rest[0])
    gradients = {"hidden": hidden.view(first.shape)}
    if weight is not None:
        gradients["weight"] = weight.to(others[0].dtype)
    return Answer(found, gradients), None


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
    if got is None or got.shape != wanted.shape:
        return math.inf
    found = (got.double() - wanted).abs().max().item() if wanted.numel() else 0.0
    return math.inf if math.isnan(found) else found


class Judge:
    """Compares results of a padded problem with fp64."""

    def __init__(self, problem: Problem):
        self.problem, self.exact = problem, exact(problem)
        self._plain: dict[str, tuple[dict[str, float], dict[str, float]]] = {}
        self._rows: list[Tensor] = []

    def verdict(
        self, contestant: Any, result: Tensor | None, gradients: tuple[Tensor | None, ...]
    ) -> Verdict:
        """Judge a loss (scoring: log-probs) and the gradients of the leaves, in the contestant's layout."""
        counted = self.problem.mask.bool()
        exact, found = self.exact.loss, {}
        assert exact is not None
        if self.problem.task == "scoring":
            got = result
            if got is not None and contestant.layout != "packed":
                got = got[counted] if got.shape == exact.shape else None
            found["logprobs"] = _distance(got, exact[counted])
        else:
            found["loss"] = _distance(result, exact.mean())
        for name, gradient in zip(self.problem.names, gradients, strict=True):
            if name == "logits":
                found[name] = self._logits(gradient, contestant.layout)
                continue
            wanted = self.exact.gradients.get(name)
            if wanted is None:
                continue
            if name == "hidden" and contestant.layout == "packed":
                wanted = wanted[counted]
            found[name] = _distance(gradient, wanted)
        errors, largest = self._of_plain(contestant.precision_for(self.problem.task))
        return Verdict(
            found,
            {name: self._allowed(name, errors[name], largest[name], contestant) for name in found},
        )

    def _logits(self, gradient: Tensor | None, layout: str) -> float:
        logits = self.problem.inputs[0]
        if gradient is not None and layout == "next":
            gradient = gradient[:, :-1]
        if gradient is None or gradient.shape != logits.shape:
            return math.inf
        flat = gradient.flatten(0, -2)
        return max(_distance(flat[rows], wanted) for rows, wanted in self._logit_gradients())

    def _logit_gradients(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield fp64 dLogits by slices of rows; keep them in memory if they are few enough."""
        logits = self.problem.inputs[0]
        _, c = coefficients(self.problem, self.problem.logprobs)
        slices = list(row_chunks(c.numel(), self.problem.vocabulary, logits.device))
        if not self._rows and logits.numel() <= _KEPT:
            self._rows = [logit_gradients(self.problem, rows, None, c) for rows in slices]
        for index, rows in enumerate(slices):
            yield rows, self._rows[index] if self._rows else logit_gradients(self.problem, rows, None, c)

    def _of_plain(self, precision: str) -> tuple[dict[str, float], dict[str, float]]:
        """Return the errors of plain PyTorch, and the largest values of the fp64 answer."""
        if precision in self._plain:
            return self._plain[precision]
        answer, rows_of = plain(self.problem, precision)
        exact = self.exact.loss
        assert answer.loss is not None and exact is not None
        name = "logprobs" if self.problem.task == "scoring" else "loss"
        # signed errors of sequences may cancel in the mean by luck; absolute errors don't
        difference = (answer.loss.double() - exact).abs()
        if name == "logprobs":
            difference = difference * self.problem.mask
        errors = {name: (difference.max() if name == "logprobs" else difference.mean()).item()}
        largest = {name: (exact * self.problem.mask if name == "logprobs" else exact).abs().max().item()}
        for key, wanted in self.exact.gradients.items():
            errors[key], largest[key] = _distance(answer.gradients[key], wanted), wanted.abs().max().item()
        if rows_of is not None:
            errors["logits"] = largest["logits"] = 0.0
            for rows, wanted in self._logit_gradients():
                errors["logits"] = max(errors["logits"], _distance(rows_of(rows), wanted))
                largest["logits"] = max(largest["logits"], wanted.abs().max().item())
        self._plain[precision] = errors, largest
        return self._plain[precision]

    def _allowed(self, name: str, error: float, largest: float, contestant: Any) -> float:
        dtype = self.problem.inputs[0].dtype
        width = 0 if self.problem.task == "logits" else self.problem.inputs[0].shape[-1]
        precision, terms = contestant.precision_for(self.problem.task), self.problem.vocabulary
        of_input = torch.finfo(dtype).eps if precision == "input" else _SINGLE
        # the error of logits, and of summing V exponentials in fp32
        of_logits = _LARGEST_LOGIT * (_SINGLE * width**0.5 + of_input) + _SINGLE * terms**0.5
        rounding = _SINGLE if name in ("loss", "logprobs") else torch.finfo(dtype).eps
        budget = min(2 * error + rounding * largest, (4 * of_logits + rounding) * max(largest, 1e-30))
        if name in ("hidden", "weight"):
            budget += (contestant.roundings(self.problem) - 1) * rounding / 2 * largest
        return budget
