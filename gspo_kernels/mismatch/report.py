"""The report of a comparison: JSON, a plot, and a short text with advice."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gspo_kernels.mismatch.measure import Comparison
from gspo_kernels.mismatch.scoring import Samples, Switched
from gspo_kernels.plots import BLUE, INK, ORANGE, style

FILES = ("mismatch.json", "mismatch.png")
EXPLAINED = 0.5  # a switch explains a difference if it removes this share of the mean
_HARMLESS = 0.01  # share of sequences outside of the clip range up to which no correction is advised


@dataclass(frozen=True)
class MismatchReport:
    """A comparison, the effect of each switch on it, and the tokens that differ most."""

    comparison: Comparison
    # Tokens that differ most, each with "sequence", "position", "token", "training" and "sampling" in nats;
    # with a tokenizer also its "text", and the "context" before it.
    worst: list[dict[str, Any]]
    switched: Sequence[Switched]
    about: dict[str, Any]  # description of the comparison, for the file
    stale: str = ""  # a warning if the weights are not those that sampled

    def write(self, folder: Path) -> list[Path]:
        """Write ``FILES``, and return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / name for name in FILES]
        text = json.dumps(_finite(self.as_dict()), indent=1, allow_nan=False)
        paths[0].write_text(text + "\n", encoding="utf-8")
        draw(self.comparison, self.switched, paths[1])
        return paths

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the file, with all values of "per_token" and "log_s", in nats."""
        comparison = self.comparison
        return {
            "about": self.about,
            "clip": list(comparison.clip),
            "summary": comparison.summary(),
            "advice": advise(comparison, self.switched, self.stale),
            "switches": [
                {"name": each.name, "change": each.change, "moved": each.moved, **each.comparison.summary()}
                for each in self.switched
            ],
            "corrections": comparison.corrections(),
            "range_of_99_percent": list(comparison.range_that_holds(0.99)),
            "worst": self.worst,
            "log_s": comparison.log_s.tolist(),
            "cu_seqlens": comparison.cu_seqlens.tolist(),
            "per_token": {side: getattr(comparison, side).tolist() for side in ("training", "sampling")},
        }

    def text(self) -> str:
        """Return a table and the advice, for a terminal."""
        n = self.comparison.summary()
        lines = [
            f"tokens: {n['tokens/count']:,}   sequences: {n['sequences/count']:,}",
            "",
            f"tokens     |training - sampling|  mean {_nats(n['tokens/mean'])}   "
            f"median {_nats(n['tokens/quantile_0.5'])}   "
            f"99% {_nats(n['tokens/quantile_0.99'])}   max {_nats(n['tokens/max'])}",
            f"           ratio outside [0.9, 1.1]: {n['tokens/ratio_beyond_tenth']:.2%}   "
            f"impossible to one side: {n['tokens/impossible']:,}",
            f"sequences  log s  RMS {_nats(n['sequences/rms_log_s'])}   "
            f"mean {_nats(n['sequences/mean_log_s'])}   largest {_nats(n['sequences/max_abs_log_s'])}",
            f"           outside of GSPO's range: {n['sequences/outside']:.1%}   "
            f"(below {n['sequences/outside_low']:.1%}, above {n['sequences/outside_high']:.1%})",
        ]
        if self.switched:
            width = max(len(each.name) for each in self.switched) + 2
            lines += ["", f"{'one setting changed':<{width}}{'mean |d|':>10}{'RMS log s':>11}{'outside':>9}"]
            lines += [_line("unchanged", self.comparison, width)]
            lines += [_line(each.name, each.comparison, width) for each in self.switched]
        if self.worst:
            lines += ["", "worst tokens        training   sampling  difference   token"]
        for w in self.worst[:5]:
            shown = f"{w['text']!r} after {w['context']!r}" if "text" in w else str(w["token"])
            numbers = f"{w['training']:>12.4f}{w['sampling']:>11.4f}{w['training'] - w['sampling']:>12.1e}"
            lines.append(f"  {w['sequence']:>5}:{w['position']:<8}{numbers}   {shown}")
        sentences = advise(self.comparison, self.switched, self.stale)
        wrapped = [textwrap.fill(f"- {sentence}", 100, subsequent_indent="  ") for sentence in sentences]
        return "\n".join([*lines, "", *wrapped])


def make_report(
    samples: Samples,
    comparison: Comparison,
    switched: Sequence[Switched],
    tokenizer: Any,
    about: dict[str, Any],
    stale: str = "",
) -> MismatchReport:
    """Create a report; ``tokenizer`` may be None."""
    sizes = comparison.difference.abs().nan_to_num(math.inf)
    order = sizes.argsort(descending=True, stable=True)[:10]
    worst: list[dict[str, Any]] = []
    for token in (int(t) for t in order if sizes[t] > 0):
        sequence = int((comparison.cu_seqlens[1:] <= token).sum())
        position = token - int(comparison.cu_seqlens[sequence])
        ids = samples.completions[sequence].tolist()
        worst.append({"sequence": sequence, "position": position, "token": ids[position]})
        for side in ("training", "sampling"):
            worst[-1][side] = float(getattr(comparison, side)[token])
        if tokenizer is not None:
            before = [] if samples.prompts is None else samples.prompts[sequence].tolist()
            context = (before + ids[:position])[-12:]
            worst[-1] |= {"text": tokenizer.decode([ids[position]]), "context": tokenizer.decode(context)}
    return MismatchReport(comparison, worst, switched, about, stale)


def explanation(switched: Sequence[Switched], before: float) -> Switched | None:
    """Return the first switch with the smallest difference to the sampler, if it explains the difference.

    Differences within one percent count as equal. Switches that make sampled tokens impossible are ignored.
    """
    possible = [each for each in switched if bool(each.comparison.possible.all())]
    left = [each.comparison.summary()["tokens/mean"] for each in possible]
    if not possible or not before > 0 or min(left) > (1 - EXPLAINED) * before:
        return None
    return next(each for each, mean in zip(possible, left, strict=True) if mean <= min(left) + 0.01 * before)


def advise(comparison: Comparison, switched: Sequence[Switched], stale: str = "") -> list[str]:
    """Return sentences about the size of the difference, its cause, and remedies."""
    if stale:
        return [stale]
    numbers = comparison.summary()
    outside, impossible = numbers["sequences/outside"], numbers["tokens/impossible"]
    low, high = comparison.clip
    if outside == 0 and not impossible:
        advice = [f"No sequence leaves the clip range ({low:g}, {high:g}): either may give old log-probs."]
    else:
        advice = [
            f"{outside:.1%} of the sequences leave the clip range ({low:g}, {high:g}) although nothing was "
            "trained. Take old log-probs by the loss's path, as the bundled trainer does, never those of the "
            "engine."
        ]
    if impossible:
        why = "a mask, or a vocabulary, that only one of them has"
        advice.append(f"{impossible:.0f} tokens are impossible to one side (a log-prob of -inf): {why}.")
    cause = explanation(switched, mean := numbers["tokens/mean"])
    if cause is not None:
        left = cause.comparison.summary()["tokens/mean"] / mean
        advice.append(f"Where it comes from: with {cause.name}, {left:.1%} of the mean difference is left.")
        advice.append(_remedy(cause.change))
    elif switched and outside > _HARMLESS:
        advice.append("No single switch explains it: stale data (older weights), other experts or tokenizer.")
    if outside > _HARMLESS:
        advice += _correction(comparison, "Correct" if cause is None else "Where that can't be had, correct")
    return advice


def _remedy(change: dict[str, Any]) -> str:
    if "top_p" in change:
        return (
            "Sample with top_p=1 and top_k=0, or give the losses the same mask (kept_mask=, from "
            "gk.sampling_mask; in the bundled trainer rollout.keep_sampling_mask): log-probs over the whole "
            "vocabulary are smaller by the log of the probability that was cut off."
        )
    if "recorded" in change:
        return (
            "The sampler's log-probs are over the whole vocabulary: let it give them after its cuts (vLLM: "
            "logprobs_mode=processed_logprobs), or train without rollout.keep_sampling_mask."
        )
    if "temperature" in change:
        return "Ask the sampler for log-probs after temperature (vLLM: logprobs_mode=processed_logprobs)."
    if change.keys() <= {"weights", "head", "decode"}:
        return (
            "Sample in the precision that trains where memory allows; fp16 rounds eight times finer than "
            "bf16. Otherwise the difference is noise around 0, which rollout weights bound."
        )
    if "softmax" in change:
        return "Let the sampler take its log-softmax in fp32."
    return "Let both sides compute this in the same way."


def _correction(comparison: Comparison, correct: str) -> list[str]:
    token, sequence, total = comparison.corrections().values()
    low, high = comparison.range_that_holds(0.99)
    if low == 0 or high == 0:
        mean = comparison.summary()["sequences/mean_log_s"]
        advice = [f"The difference has one sign (mean log s {mean:.1e}): no clip range makes up for it."]
    else:
        advice = [
            "If old log-probs must be the engine's, take GRPO, M2PO or PrimeIPO, or for GSPO a clip range of "
            f"({low:.2g}, {high:.2g}), which holds 99% of the untrained sequences."
        ]
    level, best = ("token", token) if token["ess"] >= sequence["ess"] else ("sequence", sequence)
    rest = (
        f"{best['ess']:.1%} of the batch's effective size and {best['gradient_norm']:.2f} of its gradient's"
    )
    call = f'gk.rollout_weights(..., level="{level}", mode="truncate", high=2.0)'
    advice.append(f"{correct} with {call}, which leaves {rest} norm.")
    if min(total["gradient_norm"] / best["gradient_norm"], total["ess"] / best["ess"]) < 0.9:
        advice.append(
            f'The sum over a sequence (reduce="sum") would leave {total["ess"]:.1%} and '
            f"{total['gradient_norm']:.2f}: it grows with the length."
        )
    return advice


def draw(comparison: Comparison, switched: Sequence[Switched], path: Path) -> None:
    """Plot the differences of tokens and sequences, and those that each switch leaves, to a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 4.8), dpi=110, facecolor="white", layout="constrained")
    tokens, sequences, switches = figure.subplots(1, 3)
    style(tokens, "Tokens: |training - sampling|", "nats")
    style(sequences, f"Sequences: {comparison.summary()['sequences/outside']:.1%} outside", "log s, nats")
    style(switches, "One thing switched", "mean |training - sampling|, nats")
    sizes = comparison.difference[comparison.possible].abs()
    if positive := sizes[sizes > 0].tolist():
        low, high = math.log10(min(positive)), math.log10(max(positive))
        # two decades at least, or tick labels overlap; a little wider than the values, against rounding
        ends = max(min(low, high - 2), high - 8) - 1e-6, high + 1e-6
        edges = torch.logspace(*ends, 41, dtype=torch.float64, device="cpu")
        tokens.hist(positive, bins=edges.tolist(), color=BLUE)
        tokens.set_xscale("log")
    tokens.set_ylabel(f"tokens ({len(sizes) - len(positive):,} of {len(sizes):,} are equal)", color=INK)
    log_s = comparison.log_s[comparison.log_s.isfinite()]
    low, high = math.log1p(-min(comparison.clip[0], 0.999)), math.log1p(comparison.clip[1])
    if len(log_s):
        widest = max(-low, high, float(log_s.abs().max())) * 1.05
        sequences.axvspan(low, high, color=ORANGE, alpha=0.25, linewidth=0, label="clip range")
        sequences.hist(log_s.tolist(), bins=41, range=(-widest, widest), color=BLUE)
        sequences.legend(frameon=False)
    rows = [("unchanged", comparison), *((each.name, each.comparison) for each in switched)]
    means = [each.summary()["tokens/mean"] for _, each in rows]
    if switched and any(mean > 0 for mean in means):
        floor, colors = min(mean for mean in means if mean > 0) / 3, [ORANGE] + [BLUE] * len(switched)
        # points, because bars on a logarithmic axis have no baseline
        switches.scatter([max(mean, floor) for mean in means], range(len(rows)), color=colors)
        for row, mean in enumerate(means):
            switches.annotate(f"  {_nats(mean)}", (max(mean, floor), row), fontsize=8, va="center")
        switches.margins(x=0.15)
        switches.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
        switches.invert_yaxis()
        switches.set_xscale("log")
    figure.savefig(path)


def _line(name: str, comparison: Comparison, width: int) -> str:
    n = comparison.summary()
    lost = f"   {n['tokens/impossible']:,} impossible" if n["tokens/impossible"] else ""
    numbers = f"{_nats(n['tokens/mean']):>10}{_nats(n['sequences/rms_log_s']):>11}"
    return f"{name:<{width}}{numbers}{n['sequences/outside']:>9.1%}{lost}"


def _nats(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON does not have, by None."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
