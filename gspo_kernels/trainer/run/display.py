"""What a person sees of a run: live progress on a terminal, plain lines elsewhere, a table at the end."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

Metrics = Mapping[str, float | None]

POLICY = (
    "reward {reward/mean:.3f}  no-variance groups {groups_without_variance:.0%}  "
    "ratio {ratio/min:.4f}..{ratio/max:.4f}  "
    "clipped {clip_fraction/low:.0%} low {clip_fraction/high:.0%} high  "
    "entropy {entropy:.2f}  kl {kl:.1e}  {tokens_per_second:,.0f} tok/s  {memory/peak_gib:.1f} GiB"
)
DPO = (
    "DPO phase  pairs {pairs:.0f} in {groups_with_pairs:.0%} of the groups  "
    "loss {loss:.4f} (0.6931: no preference yet)  gradient norm {grad_norm:.2g}  {memory/peak_gib:.1f} GiB"
)
EVALUATION = "held-out accuracy: greedy {eval/greedy_accuracy:.1%}, sampled {eval/sampled_accuracy:.1%}"


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _line(metrics: Metrics, template: str) -> str:
    """Fill ``{name:format}`` with metrics; what is missing or not a number is a dash."""
    return re.sub(r"\{([^:{}]+):([^{}]+)\}", lambda m: _text(metrics.get(m[1]), m[2]), template)


def _shortened(text: str, longest: int = 400) -> str:
    """Leave the middle of a long text out."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} [...] {text[-half:]}"


def summary_line(metrics: Metrics) -> str:
    """Return the metrics of one step that matter while watching, in one line."""
    if metrics.get("phase") == 1.0:
        return _line(metrics, DPO)
    kl = metrics.get("kl/ref", metrics.get("kl/old"))
    return ("policy phase  " if "phase" in metrics else "") + _line({**metrics, "kl": kl}, POLICY)


def evaluation_line(metrics: Metrics) -> str:
    """Return the held-out accuracies of one evaluation, in one line."""
    return _line(metrics, EVALUATION)


class Display:
    """Progress of one run. Use as a context manager around the loop."""

    def __init__(
        self, steps: int, *, console: Console | None = None, log_every: int = 10, quiet: bool = False
    ) -> None:
        """Show up to ``steps`` steps; without a terminal one line every ``log_every`` steps."""
        self.console = console or Console(quiet=quiet)
        self.steps = steps
        self.log_every = log_every
        self.started = time.monotonic()
        self.first_step: int | None = None
        self.live: Progress | None = None
        if self.console.is_terminal:
            text = TextColumn("\n{task.fields[metrics]}\n{task.fields[accuracy]}", style="cyan")
            columns = (*Progress.get_default_columns(), MofNCompleteColumn(), text)
            self.live = Progress(*columns, console=self.console, transient=True)
            self.task = self.live.add_task("training", total=steps, metrics="", accuracy="")

    def __enter__(self) -> Display:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live is not None:
            self.live.stop()

    def step(self, step: int, metrics: Metrics) -> None:
        """Show one step's metrics; an evaluation among them as well."""
        if self.first_step is None:
            self.first_step = step
        evaluated = "eval/greedy_accuracy" in metrics
        updated = "reward/mean" in metrics or "phase" in metrics
        if self.live is not None:
            fields = {"metrics": summary_line(metrics)} if updated else {}
            if evaluated:
                fields["accuracy"] = evaluation_line(metrics)
            self.live.update(self.task, completed=step, **fields)  # type: ignore[arg-type]
            return
        if evaluated:
            self.line(f"step {step}/{self.steps}  {evaluation_line(metrics)}")
        if updated and (step % self.log_every == 0 or step == self.steps):
            done = max(step - self.first_step, 1)
            left = (time.monotonic() - self.started) / done * (self.steps - step)
            self.line(f"step {step}/{self.steps}  {summary_line(metrics)}  {left:.0f} s left")

    def samples(self, step: int, shown: Sequence[tuple[Any, str, float]]) -> None:
        """Print completions of one step: (prompt, completion, reward)."""
        if not shown:
            return
        table = Table(title=f"completions of step {step}", title_justify="left", show_lines=True)
        for heading in ("prompt", "completion"):
            table.add_column(heading, ratio=1)
        table.add_column("reward", justify="right")
        for prompt, completion, reward in shown:
            text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content"))
            table.add_row(escape(_shortened(text)), escape(_shortened(completion)), f"{reward:.3f}")
        self.console.print(table)

    def line(self, text: str) -> None:
        """Print a line above the live display."""
        self.console.print(escape(text), soft_wrap=True, highlight=False)

    def warn(self, text: str) -> None:
        """Print a warning above the live display."""
        self.console.print(f"[yellow]warning:[/yellow] {escape(text)}", soft_wrap=True, highlight=False)

    def accuracy_table(self, title: str, before: Metrics, after: Metrics) -> None:
        """Print held-out accuracies before and after, and what was gained."""
        table = Table(title=title, title_justify="left")
        table.add_column("held-out accuracy")
        for heading in ("before", "after", "gain"):
            table.add_column(heading, justify="right")
        for label in ("greedy", "sampled"):
            first, last = before.get(f"eval/{label}_accuracy"), after.get(f"eval/{label}_accuracy")
            gain = None if first is None or last is None else 100 * (last - first)
            table.add_row(
                label, _text(first, ".1%"), _text(last, ".1%"), "-" if gain is None else f"{gain:+.1f} points"
            )
        self.console.print(table)
