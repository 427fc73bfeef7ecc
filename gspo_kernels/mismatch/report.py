"""A report: numbers, worst tokens, what each switch does and advice, as JSON, a picture and a short text."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gspo_kernels.mismatch.advice import advise
from gspo_kernels.mismatch.measure import Comparison, Split
from gspo_kernels.mismatch.picture import draw
from gspo_kernels.mismatch.samples import Samples
from gspo_kernels.mismatch.switches import Switched
from gspo_kernels.trainer.run.files import write_text

_WORST = 10
_CONTEXT = 12
"""Tokens before a worst token that are shown with it."""


@dataclass(frozen=True)
class Worst:
    """A token on which both sides differ most.

    Attributes:
        sequence, position: which completion, and where in it, from 0.
        token: its id.
        text: it in letters; None without a tokenizer.
        context: what stands before it; None without a tokenizer.
        training, sampling: log-probs in nats.
    """

    sequence: int
    position: int
    token: int
    text: str | None
    context: str | None
    training: float
    sampling: float


@dataclass(frozen=True)
class Report:
    """Everything that is said.

    Attributes:
        comparison: training beside the sampler.
        splits: by what, in bins.
        worst: tokens that differ most, the worst one first.
        switched: what each switch does.
        advice: sentences.
        about: what was compared, for the file.
    """

    comparison: Comparison
    splits: dict[str, list[Split]]
    worst: list[Worst]
    switched: list[Switched]
    advice: list[str]
    about: dict[str, Any]

    def write(self, folder: Path) -> list[Path]:
        """Write mismatch.json and mismatch.png, and return their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / "mismatch.json", folder / "mismatch.png"]
        write_text(paths[0], json.dumps(_plain(self.as_dict()), indent=1, allow_nan=False) + "\n")
        draw(self.comparison, self.switched, self.splits, paths[1])
        return paths

    def as_dict(self) -> dict[str, Any]:
        """The report as the file has it; "per_token" and "log_s" are whole, numbers are in nats."""
        return {
            "about": self.about,
            "clip": list(self.comparison.clip),
            "summary": self.comparison.summary(),
            "advice": self.advice,
            "switches": [
                {"name": each.name, "change": each.change, "moved": each.moved, **each.comparison.summary()}
                for each in self.switched
            ],
            "corrections": self.comparison.corrections(),
            "range_of_99_percent": list(self.comparison.range_that_holds(0.99)),
            "splits": {name: [asdict(split) for split in splits] for name, splits in self.splits.items()},
            "worst": [asdict(token) for token in self.worst],
            "log_s": self.comparison.log_s.tolist(),
            "cu_seqlens": self.comparison.cu_seqlens.tolist(),
            "per_token": {
                "training": self.comparison.training.tolist(),
                "sampling": self.comparison.sampling.tolist(),
            },
        }

    def text(self) -> str:
        """A table and the advice, for a terminal."""
        numbers = self.comparison.summary()
        lines = [
            f"{numbers['tokens/count']:,} tokens in {numbers['sequences/count']:,} sequences",
            "",
            f"tokens     |training - sampling|  mean {_nats(numbers['tokens/mean'])}   "
            f"median {_nats(numbers['tokens/quantile_0.5'])}   "
            f"99% {_nats(numbers['tokens/quantile_0.99'])}   max {_nats(numbers['tokens/max'])}",
            f"           ratio outside [0.9, 1.1]: {numbers['tokens/ratio_beyond_tenth']:.2%}   "
            f"impossible to one side: {numbers['tokens/impossible']:,}",
            f"sequences  log s  RMS {_nats(numbers['sequences/rms_log_s'])}   "
            f"mean {_nats(numbers['sequences/mean_log_s'])}   "
            f"largest {_nats(numbers['sequences/max_abs_log_s'])}",
            f"           outside of GSPO's range: {numbers['sequences/outside']:.1%}   "
            f"(below {numbers['sequences/outside_low']:.1%}, above {numbers['sequences/outside_high']:.1%})",
        ]
        if self.switched:
            width = max(len(each.name) for each in self.switched) + 2
            lines += ["", f"{'one thing switched':<{width}}{'mean |d|':>10}{'RMS log s':>11}{'outside':>9}"]
            lines += [_line("as it is", self.comparison, width)]
            lines += [_line(each.name, each.comparison, width) for each in self.switched]
        if self.worst:
            lines += ["", "worst tokens        training   sampling  difference   token"]
            lines += [
                f"  {w.sequence:>5}:{w.position:<8}{w.training:>12.4f}{w.sampling:>11.4f}"
                f"{w.training - w.sampling:>12.1e}   {_shown(w)}"
                for w in self.worst[:5]
            ]
        said = [textwrap.fill(sentence, 100, subsequent_indent="  ") for sentence in self.advice]
        return "\n".join([*lines, "", *(f"- {sentence}" for sentence in said)])


def make_report(
    samples: Samples,
    comparison: Comparison,
    entropy: Tensor | None,
    switched: Sequence[Switched],
    tokenizer: Any,
    about: dict[str, Any],
) -> Report:
    """Put a report together; ``tokenizer`` may be None."""
    splits = {"By place in the completion": comparison.by_position()}
    if entropy is not None:
        splits["By entropy, nats"] = comparison.by_entropy(entropy)
    splits["By training's log-prob, nats"] = comparison.by_logprob()
    return Report(
        comparison=comparison,
        splits=splits,
        worst=_worst(samples, comparison, tokenizer),
        switched=list(switched),
        advice=advise(comparison, switched),
        about=about,
    )


def _worst(samples: Samples, comparison: Comparison, tokenizer: Any) -> list[Worst]:
    sizes = comparison.difference.abs().nan_to_num(math.inf)
    order = sizes.argsort(descending=True, stable=True)[:_WORST]
    found = []
    for token in (int(t) for t in order if sizes[t] > 0):
        sequence = int((comparison.cu_seqlens[1:] <= token).sum())
        position = int(comparison.places[token])
        ids = samples.completions[sequence].tolist()
        before = [] if samples.prompts is None else samples.prompts[sequence].tolist()
        text = context = None
        if tokenizer is not None:
            text = tokenizer.decode([ids[position]])
            context = tokenizer.decode((before + ids[:position])[-_CONTEXT:])
        numbers = float(comparison.training[token]), float(comparison.sampling[token])
        found.append(Worst(sequence, position, ids[position], text, context, *numbers))
    return found


def _line(name: str, comparison: Comparison, width: int) -> str:
    numbers = comparison.summary()
    lost = f"   {numbers['tokens/impossible']:,} impossible" if numbers["tokens/impossible"] else ""
    return (
        f"{name:<{width}}{_nats(numbers['tokens/mean']):>10}{_nats(numbers['sequences/rms_log_s']):>11}"
        f"{numbers['sequences/outside']:>9.1%}{lost}"
    )


def _nats(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _shown(worst: Worst) -> str:
    return f"{worst.token}" if worst.text is None else f"{worst.text!r} after {worst.context!r}"


def _plain(value: Any) -> Any:
    """JSON knows no infinities: null."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
