"""What a person sees of a run: metrics, the terminal, warnings in plain words, the plot."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from gspo_kernels.trainer.batch import Rollout
from gspo_kernels.trainer.checkpoint import RunDirectory, write_directory, write_file, write_text
from gspo_kernels.trainer.config import InputError, TrainConfig, flat, to_mapping
from gspo_kernels.trainer.processes import on_main, peak_memory
from gspo_kernels.trainer.update import config_warnings

Metrics = dict[str, Any]

SHOWN = 3
"""Completions that are printed after each evaluation."""


class Report:
    """Where the metrics and completions of a run go. The first process writes; all must call."""

    def __init__(self, config: TrainConfig, accelerator: Any, directory: RunDirectory) -> None:
        self.config = config
        self.accelerator = accelerator
        self.directory = directory
        self.health = Health(config)
        self.display = Display(config.update.steps, quiet=not accelerator.is_main_process)

    def begin(self, step: int, *, resumed: bool, changed: Sequence[str], evaluates: bool) -> None:
        """Drop metrics after ``step``, start trackers, and say what is worth knowing."""
        if resumed:
            self.display.line(f"resuming {self.directory.path} after step {step}")
        if changed:
            self.display.warn(f"settings changed: {'; '.join(changed)}")
        if not evaluates:
            self.display.line("no eval dataset: accuracy on held-out prompts is not measured")
        if self.accelerator.is_main_process:
            kept = [each for each in read_metrics(self.directory.metrics) if resumed and each["step"] <= step]
            write_text(self.directory.metrics, "".join(json.dumps(record) + "\n" for record in kept))
        self.accelerator.init_trackers("gspo", flat(to_mapping(self.config)))
        for warning in config_warnings(self.config):
            self.display.warn(warning)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write, track and show the metrics of a step, and warn of what they mean."""
        if step > 0:
            peak = max(gather_object([peak_memory(self.accelerator.device)]))
            metrics = {**metrics, "memory/peak_gib": peak / 2**30}
        record = finite({"step": step, **metrics})
        if self.accelerator.is_main_process:
            with self.directory.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, allow_nan=False) + "\n")
        self.accelerator.log({name: value for name, value in record.items() if value is not None}, step)
        self.display.step(step, record)
        for warning in self.health.check(record) if step > 0 else ():
            self.display.warn(f"step {step}: {warning}")

    def rollout(self, step: int, rollout: Rollout, tokenizer: Any, *, show: bool) -> None:
        """Write the completions of a step where that is asked for; show the last few where it is time."""
        if not self.accelerator.is_main_process:
            return
        if self.config.save_rollouts:
            records = [json.dumps(_record(rollout, i, tokenizer)) for i in range(len(rollout.samples))]
            self.directory.rollouts.mkdir(exist_ok=True)
            path = self.directory.rollouts / f"step_{step:06d}.jsonl"
            write_text(path, "".join(f"{record}\n" for record in records))
        if show:
            last = list(zip(rollout.samples, rollout.rewards.total.tolist(), strict=True))[-SHOWN:]
            self.display.samples(step, [(tokenizer.decode(s.prompt), s.text, reward) for s, reward in last])

    def finish(self, step: int, write_model: Callable[..., None]) -> Metrics:
        """Export the model, draw the plot, show what was gained; return the last evaluation's metrics."""
        directory, accelerator = self.directory, self.accelerator
        try:
            write_directory(directory.model, partial(write_model, accelerator=accelerator), accelerator)
            on_main(accelerator, lambda: plot_run(directory.path))
        except (OSError, RuntimeError) as error:
            raise InputError(
                f"the model or the plot cannot be written: {error}; --resume does it when there is room"
            ) from error
        for tracker in accelerator.trackers:
            tracker.finish()
        records = read_metrics(directory.metrics)
        evaluations = [record for record in records if "eval/greedy_accuracy" in record]
        if evaluations:
            title = f"{step} steps of {self.config.objective.name}"
            self.display.accuracy_table(title, evaluations[0], evaluations[-1])
        self.display.line(f"trained model: {directory.model}   plot: {directory.plot}")
        return evaluations[-1] if evaluations else records[-1]


def _record(rollout: Rollout, index: int, tokenizer: Any) -> Metrics:
    """Return what is worth keeping of a completion, as JSON takes it."""
    sample, rewards = rollout.samples[index], rollout.rewards
    completion = sample.completion
    return {
        "row": sample.row,
        "prompt": tokenizer.decode(sample.prompt),
        "completion": sample.text,
        **finite({"reward": rewards.total[index].item()}),
        "rewards": finite({name: values[index].item() for name, values in rewards.by_name.items()}),
        "token_ids": sample.ids.tolist(),
        "logprobs": None if completion.logprobs is None else completion.logprobs.tolist(),
        "sampling_mask": None if completion.mask is None else completion.mask.to_lists(),
    }


def finite(metrics: Mapping[str, Any]) -> Metrics:
    """Return the metrics with everything that JSON has no number for replaced by None."""
    return {k: value if value is not None and math.isfinite(value) else None for k, value in metrics.items()}


def read_metrics(path: Path) -> list[Metrics]:
    """Read all whole lines; a line cut short by a crash is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


# The terminal.

POLICY = (
    "reward {reward/mean:.3f}  no-variance groups {groups_without_variance:.0%}  "
    "ratio {ratio/min:.4f}..{ratio/max:.4f}  "
    "clipped {clip_fraction/low:.0%} low {clip_fraction/high:.0%} high  "
    "entropy {entropy:.2f}  kl {kl:.1e}  {tokens_per_second:,.0f} tok/s  {memory/peak_gib:.1f} GiB"
)
EVALUATION = "held-out accuracy: greedy {eval/greedy_accuracy:.1%}, sampled {eval/sampled_accuracy:.1%}"


def metrics_line(metrics: Mapping[str, Any], template: str = POLICY) -> str:
    """Fill ``{name:format}`` with metrics; what is missing or not a number is a dash."""
    values = {"kl": metrics.get("kl/ref", metrics.get("kl/old")), **metrics}
    return re.sub(r"\{([^:{}]+):([^{}]+)\}", lambda m: _text(values.get(m[1]), m[2]), template)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _shortened(text: str, longest: int = 400) -> str:
    """Leave the middle of a long text out."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} [...] {text[-half:]}"


class Display:
    """Progress of one run on a terminal, or plain lines elsewhere. Use as a context manager around the loop."""

    def __init__(self, steps: int, *, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(quiet=quiet)
        self.steps = steps
        self.started = time.monotonic()
        self.first_step: int | None = None
        self.live: Progress | None = None
        if self.console.is_terminal:
            columns = *Progress.get_default_columns(), MofNCompleteColumn()
            self.live = _Lines(*columns, console=self.console, transient=True)
            self.task = self.live.add_task("training", total=steps)

    def __enter__(self) -> Display:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live is not None:
            self.live.stop()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show one step's metrics; an evaluation among them as well."""
        if self.first_step is None:
            self.first_step, self.started = step, time.monotonic()
        if "eval/greedy_accuracy" in metrics:
            self.line(f"step {step}/{self.steps}  {metrics_line(metrics, EVALUATION)}")
        if self.live is not None:
            self.live.update(self.task, completed=step, metrics=metrics_line(metrics) if step else "")
        elif step > 0 and (step % 10 == 0 or step == self.steps):
            done = max(step - self.first_step, 1)
            left = (time.monotonic() - self.started) / done * (self.steps - step)
            self.line(f"step {step}/{self.steps}  {metrics_line(metrics)}  {left:.0f} s left")

    def samples(self, step: int, shown: Sequence[tuple[str, str, float]]) -> None:
        """Print completions of one step: (prompt, completion, reward)."""
        table = Table(title=f"completions of step {step}", title_justify="left", show_lines=True)
        for heading in ("prompt", "completion"):
            table.add_column(heading, ratio=1)
        table.add_column("reward", justify="right")
        for prompt, completion, reward in shown:
            table.add_row(escape(_shortened(prompt)), escape(_shortened(completion)), f"{reward:.3f}")
        self.console.print(table)

    def line(self, text: str) -> None:
        """Print a line above the live display."""
        self.console.print(escape(text), soft_wrap=True, highlight=False)

    def warn(self, text: str) -> None:
        """Print a warning above the live display."""
        self.console.print(f"[yellow]warning:[/yellow] {escape(text)}", soft_wrap=True, highlight=False)

    def accuracy_table(self, title: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Print held-out accuracies before and after, and what was gained."""
        table = Table(title=title, title_justify="left")
        table.add_column("held-out accuracy")
        for heading in ("before", "after", "gain"):
            table.add_column(heading, justify="right")
        for label in ("greedy", "sampled"):
            first, last = before.get(f"eval/{label}_accuracy"), after.get(f"eval/{label}_accuracy")
            gain = "-" if first is None or last is None else f"{100 * (last - first):+.1f} points"
            table.add_row(label, _text(first, ".1%"), _text(last, ".1%"), gain)
        self.console.print(table)


class _Lines(Progress):
    """A progress bar with the metrics of the last step under it, which wrap at any width."""

    def get_renderables(self) -> Any:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            yield f"[cyan]{escape(task.fields.get('metrics', ''))}[/cyan]"


# Warnings.

PATIENCE = 5
"""Steps in a row after which a symptom is worth a warning."""

MISMATCH = {"fp32": 1e-3, "bf16": 0.1}
"""By ``update.precision``: a gap between sampling and training that rounding does not explain, in nats per
token. Rounding makes about 1e-6 in fp32, and 0.01 in bf16, where the engine rounds its logits."""


class Health:
    """Counts symptoms over consecutive steps and says what they mean, once each time that they set in.

    A step that does not measure what shows a symptom leaves its count alone.
    """

    def __init__(self, config: TrainConfig) -> None:
        rollout = config.rollout
        cuts = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
        # Sampling cuts tokens off that training counts: a mismatch without a bound, worth one warning.
        self.cuts = cuts and not rollout.keep_sampling_mask
        self.mismatch = math.inf if self.cuts else MISMATCH[config.update.precision]
        self.streaks: dict[str, int] = {}

    def check(self, metrics: Mapping[str, float | None]) -> list[str]:
        """Return the warnings that are due after a step with these metrics."""
        due = []
        ratio = metrics.get("mismatch/ratio")
        if self.cuts and ratio is not None and "cut" not in self.streaks:
            self.streaks["cut"] = 1
            due.append(
                f"sampling cuts off {1.0 - ratio:.1%} of the probability that training counts, in the mean "
                "over tokens, so their log-probs are of two distributions. rollout.keep_sampling_mask trains "
                "on the one that was sampled from"
            )
        for metric, (present, message) in self._symptoms(metrics).items():
            if metric in metrics:
                self.streaks[metric] = self.streaks.get(metric, 0) + 1 if present else 0
                if self.streaks[metric] == PATIENCE:
                    due.append(f"for {PATIENCE} steps in a row {message}.")
        return due

    def _symptoms(self, metrics: Mapping[str, float | None]) -> dict[str, tuple[bool, str]]:
        """Return by the metric that shows it: whether a symptom is there, what it means and what helps."""
        finished, ratio = metrics.get("completions/finished"), metrics.get("mismatch/ratio")
        gaps = (metrics.get("mismatch/mean"), None if ratio is None else abs(ratio - 1.0))
        equal = _at_least(metrics.get("groups_without_variance"), 1.0)
        return {
            "groups_without_variance": (
                equal,
                "all rewards are equal within every group, so all advantages are 0 and nothing can be "
                "learned. Make the task easier or harder, add a reward with partial credit, or raise "
                "rollout.group_size or rollout.temperature",
            ),
            "clip_fraction/after_first": (
                _at_least(metrics.get("clip_fraction/after_first"), 0.95),
                "nearly every sequence is clipped after the first minibatch, so the later ones hardly learn. "
                "Lower update.learning_rate, use fewer minibatches, or widen the objective's clip range",
            ),
            "minibatch_2/ratio/max": (
                metrics.get("ratio/min") == metrics.get("ratio/max") == 1.0 and not equal,
                "every ratio is exactly 1, also after the first minibatch: the updates do not change the "
                "policy. Raise update.learning_rate",
            ),
            "completions/finished": (
                finished is not None and finished <= 0.05,
                "hardly a completion ends by itself: nearly all are truncated at rollout.max_new_tokens. "
                "Raise it, or check that the model knows its end token",
            ),
            "reward/mean": (
                metrics.get("reward/mean") is None,
                "no reward applies to any completion (every value is None)",
            ),
            "updates_left_out": (
                _at_least(metrics.get("updates_left_out"), 1.0),
                "gradients are not finite, the optimizer updates were left out",
            ),
            "mismatch/mean": (
                any(_at_least(gap, self.mismatch) for gap in gaps),
                "sampling and training disagree about the probability of the same tokens: mismatch/mean, or "
                f"the distance of mismatch/ratio from 1, is at least {self.mismatch:g}, which rounding does "
                "not explain. Look whether sampling uses older weights, another temperature or other tokens "
                "than training; off_policy can weigh the difference",
            ),
        }


def _at_least(value: float | None, bound: float) -> bool:
    return value is not None and value >= bound


# The plot: what a run learned, whether its updates were sound, and where its time went.

INK, GRID = "#30343b", "#e4e6ea"
BLUE, ORANGE = "#2166ac", "#d95f0e"
COLUMNS = 3

Lines = dict[str, str | None]
"""What a panel draws: by metric its label."""


def plot_run(run: str | Path) -> Path:
    """Draw ``progress.png`` of the metrics that a run has written so far; return where it lies."""
    directory = RunDirectory(run)
    if not directory.holds_a_run():
        raise InputError(f"there is no run in {run}")
    records = read_metrics(directory.metrics)
    write_file(directory.plot, lambda path: plot_progress(records, path))
    return directory.plot


def plot_progress(records: Sequence[Metrics], path: Path) -> None:
    """Draw the metrics of a run into a PNG file; what was not measured gets no panel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = _panels(records)
    rows = max(-(-len(shown) // COLUMNS), 1)
    height = 3.4 * rows
    figure = Figure(figsize=(15, height), dpi=110, facecolor="white")
    # Automatic layouts draw all text once more, which takes longer than the rest.
    figure.subplots_adjust(0.05, 0.6 / height, 0.985, 1 - 0.4 / height, wspace=0.22, hspace=0.42)
    FigureCanvasAgg(figure)
    last = records[-1]["step"] if records else 0
    axes = figure.subplots(rows, min(COLUMNS, max(len(shown), 1)), squeeze=False).flatten()
    for ax, (title, draw) in zip(axes, shown, strict=False):
        ax.set_title(title, loc="left", fontsize=11, color=INK, pad=8, y=1.0)
        draw(ax)
        ax.set_xlim(0, max(last, 1))
        ax.set_xlabel("step", color=INK)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.grid(color=GRID, linewidth=0.8)
        ax.set_axisbelow(True)
        ax.tick_params(which="both", colors=INK, length=0)
        ax.spines[["top", "right", "left", "bottom"]].set_visible(False)
        if ax.get_legend_handles_labels()[1]:
            ax.legend(frameon=False, loc="best", fontsize=9, labelcolor=INK)
    for ax in axes[len(shown) :]:
        ax.set_axis_off()
    if not shown:
        axes[0].text(0.5, 0.5, "no step was taken", transform=axes[0].transAxes, ha="center", color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _panels(records: Sequence[Metrics]) -> list[tuple[str, Callable[[Any], None]]]:
    """Return the title of every panel that has something to show, and what draws it."""
    records = [record | _derived(record) for record in records]
    evaluations = [record for record in records if "eval/greedy_accuracy" in record]
    kl, whose = "kl/old", "policy that sampled"
    if any(record.get("kl/ref") is not None for record in records):
        kl, whose = "kl/ref", "reference"
    rewards = sorted({key for record in records for key in record if key.startswith("reward/")})
    several = {key: key.removeprefix("reward/") for key in rewards if key != "reward/mean"}
    reward = {"reward/mean": "weighted sum", **several} if 1 < len(several) <= 6 else {"reward/mean": None}
    candidates: list[tuple[str, Sequence[Metrics], Lines, str]] = [
        ("Mean reward of the rollouts", records, reward, ""),
        ("Accuracy on held-out prompts", evaluations, _accuracies(evaluations), "share"),
        (
            "Shares of a rollout",
            records,
            {
                "groups_without_variance": "groups without variance",
                "completions/truncated": "truncated completions",
            },
            "share",
        ),
        ("Clipped share by minibatch", records, _clipped(records), "share"),
        (
            "Largest and smallest ratio of a step",
            records,
            {"ratio/max": "largest", "ratio/min": "smallest"},
            "",
        ),
        (f"KL to the {whose}, nats per token", records, {kl: None}, ""),
        ("Entropy, nats per token", records, {"entropy": None}, ""),
        ("Tokens per completion", records, {"completions/length": None}, "zero"),
        ("Gradient norm before clipping", records, {"grad_norm": None}, "zero"),
        (
            "Sampling against training, nats per token",
            records,
            {"mismatch/mean": "mean", "mismatch/max": "largest"},
            "log",
        ),
        ("Completion tokens per second", records, {"tokens_per_second": None}, "zero"),
        (
            "Seconds per step",
            records,
            {"seconds/rollout": "rollout", "seconds/update": "update"},
            "zero",
        ),
    ]
    return [
        (title, partial(_draw, records=[r for r in chosen if any(k in r for k in lines)], lines=lines, scale=scale))
        for title, chosen, lines, scale in candidates
        if any(record.get(key) is not None for record in chosen for key in lines)
    ]


def _derived(record: Metrics) -> Metrics:
    """Return what is drawn of a record and not in it: truncated completions, clipped shares of both sides."""
    finished = record.get("completions/finished")
    found = {} if finished is None else {"completions/truncated": 1.0 - finished}
    for key, low in record.items():
        if key.startswith("minibatch_") and key.endswith("/clip_fraction/low"):
            high = record.get(key.removesuffix("low") + "high")
            clipped = None if low is None or high is None else low + high
            found[key.replace("clip_fraction/low", "clipped")] = clipped
    return found


def _accuracies(evaluations: Sequence[Metrics]) -> Lines:
    lines: Lines = {}
    for name in ("greedy", "sampled"):
        values = [v for r in evaluations if (v := r.get(f"eval/{name}_accuracy")) is not None]
        gain = f"  {values[0]:.0%} to {values[-1]:.0%}" if values else ""
        lines[f"eval/{name}_accuracy"] = f"{name}{gain}"
    return lines


def _clipped(steps: Sequence[Metrics]) -> Lines:
    keys = {key for record in steps for key in record if key.endswith("/clipped")}
    numbers = sorted(int(key.split("/")[0].removeprefix("minibatch_")) for key in keys)
    named = numbers if len(numbers) <= 8 else [numbers[0], numbers[-1]]
    return {f"minibatch_{n}/clipped": f"minibatch {n}" if n in named else None for n in numbers}


def smoothed(values: Sequence[float | None], width: int) -> list[float]:
    """Return the mean over the last ``width`` values that are there, NaN before the first."""
    means = []
    for end in range(1, len(values) + 1):
        window = [value for value in values[max(0, end - width) : end] if value is not None]
        means.append(sum(window) / len(window) if window else float("nan"))
    return means


def _draw(ax: Any, records: Sequence[Metrics], lines: Lines, scale: str) -> None:
    """Draw metrics, smoothed and above their faint selves; a share is one only if all values are."""
    x, drawn = [record["step"] for record in records], []
    for number, (key, label) in enumerate(lines.items()):
        color = (BLUE, ORANGE)[number] if number < 2 else f"C{number}"
        values = [record.get(key) for record in records]
        drawn += [value for value in values if value is not None]
        ax.plot(x, [math.nan if v is None else v for v in values], color=color, alpha=0.25, linewidth=1)
        mean = smoothed(values, max(1, len(records) // 30))
        ax.plot(x, mean, color=color, linewidth=1.8, label=label)
    if scale == "zero":
        ax.set_ylim(0.0, 1.05 * ax.get_ylim()[1])
    elif scale == "log":
        ax.set_yscale("log", nonpositive="mask")
    elif scale == "share" and all(0.0 <= value <= 1.0 for value in drawn):
        ax.set_ylim(-0.02, 1.02)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    else:
        ax.ticklabel_format(useOffset=False)
