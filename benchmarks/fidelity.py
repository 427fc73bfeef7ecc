"""The suite ``fidelity``: errors of log-probs of bf16 models, and the clip decisions that they flip.

GSPO clips 3e-4 below and 4e-4 above 1, which requires a smaller error of log s, the mean of logp - logp_old
over a sequence. Every contestant with log-probs from hidden states is compared with fp64 on the same bf16
hidden states and weight:

- *error of log s*: RMS over random sequences of the error of the mean log-prob;
- *clip decisions*: the share of sequences that the objective clips and fp64 does not, or the reverse, at a
  log-uniform distance of log s from a bound. Old log-probs are exact up to fp32 rounding.

The rounding of new and old log-probs to fp32, averaged over a sequence's tokens, is its *resolution*, up to
5e-7. Sequences closer to a bound than that are excluded (``left_out``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from benchmarks import hidden
from benchmarks.judging import CLIP_HIGH, CLIP_LOW, Problem
from benchmarks.measure import Missing, Options, chosen_contestants, suite
from benchmarks.tables import aligned, number

LENGTHS = (64, 256, 1024)
BOUNDS = (math.log1p(-CLIP_LOW), math.log1p(CLIP_HIGH))
BANDS = ((1e-6, 1e-5), (1e-5, 1e-4), (1e-4, 1e-3))
BELOW = ((1e-8, 1e-7), (1e-7, 4e-7), (4e-7, 1e-6))
OURS = "ours, float32 logits"


@dataclass(frozen=True)
class Drawn:
    """Sequences near a clip bound.

    Attributes:
        rows: [B, T], indices of rows of the pool.
        old_logprobs: [B, T], fp32.
        advantages: [B], +1 near the upper bound and -1 near the lower one: each can only be clipped there.
        distance: [B], |log s - bound| in fp64.
        clipped: [B], whether the objective clips in fp64.
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


def pool(rows: int, vocabulary: int, width: int, device: torch.device | str = "cpu") -> Problem:
    """Draw the rows that sequences are made of, with their exact log-probs."""
    return hidden.draw("scoring", rows, vocabulary, width, 1, torch.bfloat16, device)


def logprobs(rows: Problem, options: Options) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return log-probs [rows] of the pool by contestant, and a reason for each contestant without them."""
    found, missing = {}, dict(options.without)
    for one in chosen_contestants("scoring", (".*",), options, torch.bfloat16):
        if one.name in missing:
            continue
        try:
            call = one.get(options.device)
        except Missing as reason:
            missing[one.name] = str(reason)
            continue
        try:
            found[one.name] = rows.call(call, rows.leaves())[0].float().cpu()
        except Exception as error:
            missing[one.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
    return found, missing


def _half_spacing(x: Tensor) -> Tensor:
    """Return the largest rounding error of fp32 numbers: half of their spacing."""
    size = x.abs()
    return (torch.nextafter(size, torch.full_like(size, torch.inf)) - size).double() / 2


def draw(rows: Problem, count: int, length: int, nearest: float, farthest: float, seed: int) -> Drawn:
    """Draw sequences on both sides of both bounds."""
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(rows.labels.numel(), (count, length), generator=generator)
    exact = rows.logprobs[0].cpu()[picked]
    upper = torch.arange(count) % 2 == 0
    outside = torch.arange(count) // 2 % 2 == 0
    bound = torch.where(upper, BOUNDS[1], BOUNDS[0]).double()
    logs = torch.empty(count, dtype=torch.float64)
    logs.uniform_(math.log(nearest), math.log(farthest), generator=generator)
    log_s = bound + logs.exp() * torch.where(upper == outside, 1.0, -1.0)
    noise = 0.02 * torch.randn(picked.shape, generator=generator, dtype=torch.float64)
    old = (exact - log_s.unsqueeze(1) + noise - noise.mean(1, keepdim=True)).float()
    # the stored, rounded log-probs decide on which side a sequence is
    log_s = (exact - old.double()).mean(1)
    distance = (log_s - bound).abs()
    resolution = (_half_spacing(exact.float()) + _half_spacing(old)).mean(1)
    advantages, clipped = torch.where(upper, 1.0, -1.0), torch.where(upper, log_s > bound, log_s < bound)
    return Drawn(picked, old, advantages, distance, clipped, distance > resolution, resolution)


def wrong(values: Tensor, drawn: Drawn) -> Tensor:
    """Return whether the clip decision with these log-probs of the pool differs from fp64's, [B]."""
    terms = (values[drawn.rows], drawn.old_logprobs, drawn.advantages)
    coefficients = gk.policy_coefficients(*terms, objective=gk.GSPO())
    return (coefficients == 0).all(1) != drawn.clipped


def wrong_in_the_loss(rows: Problem, drawn: Drawn, nearest: int) -> Tensor:
    """Return the same for ``fused_linear_policy_loss``, whose dHidden is zero where it clips, on the
    ``nearest`` sequences that count.
    """
    near = drawn.distance.masked_fill(~drawn.counts, torch.inf).argsort()[:nearest]
    first, weight = rows.inputs
    picked = drawn.rows[near].to(first.device)
    states = first[0][picked].requires_grad_()
    terms = (drawn.old_logprobs[near].to(first.device), drawn.advantages[near].to(first.device))
    out = gk.fused_linear_policy_loss(states, weight, rows.labels[0][picked], *terms)
    (grad,) = torch.autograd.grad(out.loss, states)
    return (grad.flatten(1) == 0).all(1).cpu() != drawn.clipped[near]


def decisions(
    drawn: Drawn, paths: dict[str, Tensor], bands: Sequence[tuple[float, float]], only_counting: bool
) -> list[dict[str, Any]]:
    """Count sequences, and wrong decisions by contestant, in each band of distance from a bound; the outer
    bands include all sequences beyond them.
    """
    mistakes = {name: wrong(values, drawn) for name, values in paths.items()}
    starts = torch.tensor([nearest for nearest, _ in bands[1:]], dtype=torch.float64)
    band = torch.bucketize(drawn.distance, starts, right=True)
    lines = []
    for index, (nearest, farthest) in enumerate(bands):
        inside = (band == index) & (drawn.counts | (not only_counting))
        counts = {name: int((mistake & inside).sum()) for name, mistake in mistakes.items()}
        about = {"length": drawn.rows.shape[1], "nearest": nearest, "farthest": farthest}
        lines.append({**about, "sequences": int(inside.sum()), "wrong": counts})
    return lines


def run(
    options: Options, rows: int = 4096, vocabulary: int = 8192, width: int = 256, sequences: int = 10_200
) -> dict[str, Any]:
    """Measure everything, from fixed seeds: errors by length, and decisions of sequences that count and of
    closer ones (``below``). ``in_the_loss`` has (wrong, sequences) of the fused loss itself.
    """
    source = pool(rows, vocabulary, width, options.device)
    paths, missing = logprobs(source, options)
    exact, generator = source.logprobs[0].cpu(), torch.Generator().manual_seed(1)
    found: dict[str, Any] = {"rows": rows, "vocabulary": vocabulary, "width": width, "missing": missing}
    found |= {"log_s": {}, "counted": [], "below": [], "left_out": 0, "resolution": 0.0}
    for seed, length in enumerate(LENGTHS):
        picked = torch.randint(rows, (1024, length), generator=generator)
        found["log_s"][length] = {
            name: (values.double() - exact)[picked].mean(1).square().mean().sqrt().item()
            for name, values in paths.items()
        }
        near = draw(source, sequences // len(LENGTHS), length, BANDS[0][0], BANDS[-1][1], 10 + seed)
        found["counted"] += decisions(near, paths, BANDS, True)
        found["left_out"] += int((~near.counts).sum())
        found["resolution"] = max(found["resolution"], near.resolution.max().item())
        if length == LENGTHS[0]:
            mistakes = wrong_in_the_loss(source, near, min(256, len(near.rows)))
            found["in_the_loss"] = (int(mistakes.sum()), len(mistakes))
        nearer = draw(source, sequences // 10, length, BELOW[0][0], BELOW[-1][1], 20 + seed)
        found["below"] += decisions(nearer, paths, BELOW, False)
    return found


def table(record: dict[str, Any]) -> list[list[str]]:
    """Return a row per contestant: errors by length, and the shares of wrong decisions."""
    head = ["RMS error of log s", *(f"{length} tokens" for length in record["log_s"]), "wrong", "closer"]
    rows = [head]
    for name in next(iter(record["log_s"].values())):
        shares = [
            sum(line["wrong"][name] for line in lines) / max(1, sum(line["sequences"] for line in lines))
            for lines in (record["counted"], record["below"])
        ]
        errors = [number(errors[name], 2) for errors in record["log_s"].values()]
        rows.append([name, *errors, *(f"{share:.1%}" for share in shares)])
    return rows


@suite("fidelity", "Errors of log s, and flipped clip decisions")
def fidelity(options: Options) -> dict[str, Any]:
    """Run with bf16 hidden states and weight."""
    report = run(options, *((64, 50, 8, 60) if options.tiny else ()))
    print(aligned(table(report)))
    return report
