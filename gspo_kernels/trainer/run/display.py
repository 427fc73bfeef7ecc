"""What a person sees of a run: live progress on a terminal, plain lines elsewhere, a table at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

Metrics = Mapping[str, float | None]


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _shortened(text: str, longest: int = 400) -> str:
    """Leave the middle of a long text out."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} [...] {text[-half:]}"


def summary_line(metrics: Metrics) -> str:
    """Return the metrics of one step that matter while watching, in one line."""
    if metrics.get("phase") == 1.0:
        return preference_line(metrics)
    low, high = metrics.get("ratio/min"), metrics.get("ratio/max")
    return ("policy phase  " if "phase" in metrics else "") + (
        f"reward {_text(metrics.get('reward/mean'), '.3f')}  "
        f"no-variance groups {_text(metrics.get('groups_without_variance'), '.0%')}  "
        f"ratio {_text(low, '.4f')}..{_text(high, '.4f')}  "
        f"clipped {_text(metrics.get('clip_fraction/low'), '.0%')} low "
        f"{_text(metrics.get('clip_fraction/high'), '.0%')} high  "
        f"entropy {_text(metrics.get('entropy'), '.2f')}  "
        f"kl {_text(metrics.get('kl/ref', metrics.get('kl/old')), '.1e')}  "
        f"{_text(metrics.get('tokens_per_second'), ',.0f')} tok/s  "
        f"{_text(metrics.get('memory/peak_gib'), '.1f')} GiB"
    )


def preference_line(metrics: Metrics) -> str:
    """Return the metrics of a step of DPO, in one line."""
    return (
        f"DPO phase  pairs {_text(metrics.get('pairs'), '.0f')} "
        f"in {_text(metrics.get('groups_with_pairs'), '.0%')} of the groups  "
        f"loss {_text(metrics.get('loss'), '.4f')} (0.6931: no preference yet)  "
        f"gradient norm {_text(metrics.get('grad_norm'), '.2g')}  "
        f"{_text(metrics.get('memory/peak_gib'), '.1f')} GiB"
    )


def evaluation_line(metrics: Metrics) -> str:
    """Return the held-out accuracies of one evaluation, in one line."""
    return (
        f"held-out accuracy: greedy {_text(metrics.get('eval/greedy_accuracy'), '.1%')}, "
        f"sampled {_text(metrics.get('eval/sampled_accuracy'), '.1%')}"
    )


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
        self.live = (
            Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("\n{task.fields[metrics]}\n{task.fields[accuracy]}", style="cyan"),
                console=self.console,
                transient=True,
            )
            if self.console.is_terminal
            else None
        )
        self.task = (
            self.live.add_task("training", total=steps, metrics="", accuracy="") if self.live else None
        )

    def __enter__(self) -> Display:
        """Start the live display."""
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the live display and leave what it showed last."""
        if self.live is not None:
            self.live.stop()

    def step(self, step: int, metrics: Metrics) -> None:
        """Show one step's metrics; an evaluation among them as well."""
        if self.first_step is None:
            self.first_step = step
        evaluated = "eval/greedy_accuracy" in metrics
        updated = "reward/mean" in metrics or "phase" in metrics
        if self.live is not None and self.task is not None:
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
