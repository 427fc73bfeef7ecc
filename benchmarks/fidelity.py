"""``python -m benchmarks.fidelity`` asks whether log-probs of bf16 models leave GSPO's clip decisions intact.

GSPO clips 3e-4 below and 4e-4 above 1, so log s, the mean of logp - logp_old over a sequence, must be known
better than that. Two measurements, both against fp64 on the same bf16 hidden states and weight:

- *error of log s*: RMS over random sequences of the error of the mean log-prob;
- *clip decisions*: share of sequences that the objective clips and fp64 doesn't, or the reverse. Sequences
  are random rows of a pool; old log-probs put their log s at a distance from a bound that is log-uniform.
  They are exact but for their storage in fp32, so that errors of the new log-probs alone count.

How near a bound fp32 can decide follows from the data: a stored log-prob is off by up to half the spacing of
fp32 numbers there, and the mean of these halves, over new and old ones, is a sequence's *resolution*, up to
5e-7. Sequences nearer than theirs have no side for anyone who stores log-probs in fp32, and do not count.
A second table goes below that, to show where decisions do turn into coin tosses.

"ours, float32" is the default of ``linear_token_logprobs`` and the losses; "input" rounds logits to bf16, as
"bf16 logits" does in plain PyTorch (fp32 products rounded, which is what bf16 products are).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import gspo_kernels as gk
from benchmarks import problem as gspo
from benchmarks.problem import Problem

LENGTHS = (64, 256, 1024)
BOUNDS = (math.log1p(-gspo.CLIP_LOW), math.log1p(gspo.CLIP_HIGH))
BANDS = ((1e-6, 1e-5), (1e-5, 1e-4), (1e-4, 1e-3))
BELOW = ((1e-8, 1e-7), (1e-7, 4e-7), (4e-7, 1e-6))
OURS = "ours, float32"


@dataclass(frozen=True)
class Drawn:
    """Sequences near a clip bound.

    Attributes:
        rows: [B, T] of the pool.
        old_logprobs: [B, T], fp32.
        advantages: [B], +1 near the upper bound and -1 near the lower one: each can only be clipped there.
        distance: [B], |log s - bound| in fp64.
        clipped: [B], whether fp64 clips.
        counts: [B], whether the distance is above the sequence's resolution.
        resolution: [B].
    """

    rows: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    distance: Tensor
    clipped: Tensor
    counts: Tensor
    resolution: Tensor


def pool(rows: int, vocabulary: int, width: int) -> Problem:
    """Rows that sequences are made of, with their exact log-probs."""
    return gspo.draw(rows, vocabulary, width, 1, torch.bfloat16)


def logprobs(rows: Problem) -> dict[str, Tensor]:
    """[rows] log-probs of the pool by each path."""
    hidden, labels = rows.hidden[0], rows.labels[0]
    raised = F.linear(hidden.float(), rows.weight.float())

    def plain(logits: Tensor) -> Tensor:
        return logits.float().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)

    def ours(logits_dtype: str) -> Tensor:
        return gk.linear_token_logprobs(hidden, rows.weight, labels, logits_dtype=logits_dtype).logprobs

    return {
        OURS: ours("float32"),
        "ours, input": ours("input"),
        "fp32 logits": plain(raised),
        "bf16 logits": plain(raised.bfloat16()),
    }


def log_s_errors(rows: Problem, paths: dict[str, Tensor], sequences: int) -> dict[int, dict[str, float]]:
    """RMS error of a sequence's mean log-prob, by length and path."""
    generator = torch.Generator().manual_seed(1)
    errors = {}
    for length in LENGTHS:
        picked = torch.randint(rows.labels.numel(), (sequences, length), generator=generator)
        errors[length] = {
            name: (values.double() - rows.logprobs[0])[picked].mean(1).square().mean().sqrt().item()
            for name, values in paths.items()
        }
    return errors


def _half_spacing(x: Tensor) -> Tensor:
    """How far an fp32 number may be from what it stands for."""
    size = x.abs()
    return (torch.nextafter(size, torch.full_like(size, torch.inf)) - size).double() / 2


def draw(rows: Problem, count: int, length: int, nearest: float, farthest: float, seed: int) -> Drawn:
    """Sequences on both sides of both bounds."""
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(rows.labels.numel(), (count, length), generator=generator)
    exact = rows.logprobs[0][picked]
    upper = torch.arange(count) % 2 == 0
    outside = torch.arange(count) // 2 % 2 == 0
    bound = torch.where(upper, BOUNDS[1], BOUNDS[0]).double()
    logs = torch.empty(count, dtype=torch.float64).uniform_(
        math.log(nearest), math.log(farthest), generator=generator
    )
    log_s = bound + logs.exp() * torch.where(upper == outside, 1.0, -1.0)
    noise = 0.02 * torch.randn(picked.shape, generator=generator, dtype=torch.float64)
    old = (exact - log_s.unsqueeze(1) + noise - noise.mean(1, keepdim=True)).float()
    # what was stored decides, not what was intended
    log_s = (exact - old.double()).mean(1)
    distance = (log_s - bound).abs()
    resolution = (_half_spacing(exact.float()) + _half_spacing(old)).mean(1)
    return Drawn(
        picked,
        old,
        torch.where(upper, 1.0, -1.0),
        distance,
        torch.where(upper, log_s > bound, log_s < bound),
        distance > resolution,
        resolution,
    )


def wrong(values: Tensor, drawn: Drawn) -> Tensor:
    """[B]: whether the objective, given these log-probs of the pool, decides otherwise than fp64."""
    coefficients = gk.policy_coefficients(
        values[drawn.rows], drawn.old_logprobs, drawn.advantages, objective=gk.GSPO()
    )
    return (coefficients == 0).all(1) != drawn.clipped


def wrong_in_the_loss(rows: Problem, drawn: Drawn, nearest: int) -> Tensor:
    """The same of ``fused_linear_policy_loss`` itself, whose dHidden is zero where it clips."""
    near = drawn.distance.masked_fill(~drawn.counts, torch.inf).argsort()[:nearest]
    hidden = rows.hidden[0][drawn.rows[near]].requires_grad_()
    labels = rows.labels[0][drawn.rows[near]]
    out = gk.fused_linear_policy_loss(
        hidden, rows.weight, labels, drawn.old_logprobs[near], drawn.advantages[near]
    )
    (grad,) = torch.autograd.grad(out.loss, hidden)
    return (grad.flatten(1) == 0).all(1) != drawn.clipped[near]


@dataclass(frozen=True)
class Decisions:
    """A line of a table: sequences ``nearest`` to ``farthest`` from a bound, and wrong ones by path."""

    length: int
    nearest: float
    farthest: float
    sequences: int
    wrong: dict[str, int]


def decisions(
    drawn: Drawn, paths: dict[str, Tensor], bands: Sequence[tuple[float, float]], only_counting: bool
) -> list[Decisions]:
    """By band of distance; every drawn sequence is in one."""
    mistakes = {name: wrong(values, drawn) for name, values in paths.items()}
    lines = []
    for index, (nearest, farthest) in enumerate(bands):
        inside = drawn.distance >= (nearest if index else 0.0)
        if index + 1 < len(bands):
            inside &= drawn.distance < farthest
        if only_counting:
            inside &= drawn.counts
        counts = {name: int((mistake & inside).sum()) for name, mistake in mistakes.items()}
        lines.append(Decisions(drawn.rows.shape[1], nearest, farthest, int(inside.sum()), counts))
    return lines


@dataclass(frozen=True)
class Report:
    """What the benchmark found.

    Attributes:
        log_s: RMS error of log s by length and path.
        counted: decisions that count; below: nearer ones, for show.
        left_out: sequences drawn for ``counted`` but nearer than their resolution.
        resolution: largest of the sequences.
        in_the_loss: (wrong, sequences) of the fused loss on the nearest that count.
    """

    rows: int
    vocabulary: int
    width: int
    log_s: dict[int, dict[str, float]]
    counted: list[Decisions]
    below: list[Decisions]
    left_out: int
    resolution: float
    in_the_loss: tuple[int, int]


def run(rows: int = 4096, vocabulary: int = 8192, width: int = 256, sequences: int = 10_200) -> Report:
    """Everything, from fixed seeds."""
    source = pool(rows, vocabulary, width)
    paths = logprobs(source)
    counted, below, left_out, resolution = [], [], 0, 0.0
    in_the_loss = (0, 0)
    for seed, length in enumerate(LENGTHS):
        near = draw(source, sequences // len(LENGTHS), length, BANDS[0][0], BANDS[-1][1], 10 + seed)
        counted += decisions(near, paths, BANDS, True)
        left_out += int((~near.counts).sum())
        resolution = max(resolution, near.resolution.max().item())
        if length == LENGTHS[0]:
            mistakes = wrong_in_the_loss(source, near, min(256, len(near.rows)))
            in_the_loss = (int(mistakes.sum()), len(mistakes))
        nearer = draw(source, sequences // 10, length, BELOW[0][0], BELOW[-1][1], 20 + seed)
        below += decisions(nearer, paths, BELOW, False)
    errors = log_s_errors(source, paths, 1024)
    return Report(rows, vocabulary, width, errors, counted, below, left_out, resolution, in_the_loss)


def table(report: Report) -> str:
    """Lines of text."""
    names = list(next(iter(report.log_s.values())))
    columns = "".join(f"{name:>15}" for name in names)
    lines = [f"{'RMS error of log s':<36}{columns}"]
    for length, errors in report.log_s.items():
        lines.append(f"{f'{length} tokens':<36}" + "".join(f"{errors[name]:>15.1e}" for name in names))
    for title, found in (
        ("wrong clip decisions", report.counted),
        ("nearer, shown but not counted", report.below),
    ):
        lines += ["", f"{title:<36}{columns}"]
        for line in found:
            where = f"{line.length} tokens, {line.nearest:.0e} to {line.farthest:.0e}"
            shares = "".join(f"{line.wrong[name] / max(1, line.sequences):>15.2%}" for name in names)
            lines.append(f"{where:<36}{shares}  of {line.sequences}")
        total = sum(line.sequences for line in found)
        shares = "".join(
            f"{sum(line.wrong[name] for line in found) / max(1, total):>15.2%}" for name in names
        )
        lines.append(f"{'all':<36}{shares}  of {total}")
    lines += [
        "",
        f"{report.left_out} sequences are nearer to the bound than the resolution of their stored log-probs "
        f"(at most {report.resolution:.1e}) and do not count",
        f"fused_linear_policy_loss itself, on the {report.in_the_loss[1]} nearest of {LENGTHS[0]} tokens: "
        f"{report.in_the_loss[0]} wrong",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fidelity", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--rows", type=int, default=4096, help="of the pool that sequences are made of")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--sequences", type=int, default=10_200)
    parser.add_argument("--json", type=Path, help="also write device, versions and all figures to this file")
    arguments = parser.parse_args(argv)
    report = run(arguments.rows, arguments.vocabulary, arguments.width, arguments.sequences)
    print(f"bf16, V={report.vocabulary}, H={report.width}, {report.rows} rows\n\n{table(report)}")
    if arguments.json:
        record = {
            "benchmark": "fidelity",
            "device": f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "torch": torch.__version__,
            **asdict(report),
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
