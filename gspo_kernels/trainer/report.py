"""What a person sees of a run: metrics, the terminal, warnings in plain words, the plot."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.utils import gather_object

from gspo_kernels.plots import plot_progress
from gspo_kernels.trainer.checkpoint import RunDirectory, write_directory, write_text
from gspo_kernels.trainer.config import InputError, TrainConfig, flat, reason
from gspo_kernels.trainer.data import Prompts, shortened
from gspo_kernels.trainer.model import export_model
from gspo_kernels.trainer.processes import on_main
from gspo_kernels.trainer.rollout import Rollout
from gspo_kernels.trainer.update import Batch

Metrics = dict[str, Any]

STEP = (
    "reward {reward/mean:.3f}  equal groups {groups_without_variance:.0%}  "
    "ratio {ratio/min:.4f}..{ratio/max:.4f}  "
    "clipped {clip_fraction/low:.0%} low {clip_fraction/high:.0%} high  "
    "entropy {entropy:.2f}  kl {kl:.1e}  {tokens_per_second:,.0f} tok/s  {memory/peak_gib:.1f} GiB"
)
EVALUATION = "eval reward: greedy {eval/greedy_reward:.3f}, sampled {eval/sampled_reward:.3f}"


class Report:
    """A writer of a run's metrics and completions to files, trackers and stdout.

    The first process writes; all processes must call.
    """

    def __init__(self, config: TrainConfig, accelerator: Any, directory: RunDirectory) -> None:
        self.config, self.accelerator, self.directory = config, accelerator, directory
        # Limit of the gap between sampling and training, in nats per token. Rounding causes 1e-6 in fp32, and
        # 0.01 in bf16 if the engine rounds its logits. If sampling alone excludes tokens, there is no limit.
        rollout = config.rollout
        excludes = not rollout.keep_sampling_mask and (rollout.top_p < 1 or rollout.top_k > 0)
        self.mismatch_limit = math.inf if excludes else 0.1 if config.update.precision == "bf16" else 1e-3
        self.streaks: dict[str, int] = {}  # consecutive steps with a symptom
        self.unwritten = b""  # metrics to write when the disk has space again
        self.last: Metrics = {}  # of the last step, for processes of nodes without the file
        self.failing: set[str] = set()
        self.started: tuple[float, int] | None = None  # time and number of the first step in this process

    def say(self, text: str, *, warning: bool = False) -> None:
        """Print a text in the first process."""
        if self.accelerator.is_main_process:
            print(f"warning: {text}" if warning else text, flush=True)

    @contextmanager
    def output_to(self, what: str) -> Iterator[None]:
        """Continue the run if an output fails, as on a full disk; print the first of consecutive failures."""
        try:
            yield
            self.failing.discard(what)
        except Exception as error:
            if what not in self.failing:
                self.say(f"{what} cannot be written; the run continues: {reason(error)}", warning=True)
            self.failing.add(what)

    def begin(self, step: int | None, *, changed: Sequence[str], evaluates: bool) -> Metrics:
        """Start trackers, print notes, write the configuration; drop what was written after ``step``.

        Returns the metrics of that step; None: the run starts.
        """
        config, directory, last = self.config, self.directory, -1 if step is None else step
        if step is not None:
            self.say(f"resuming {directory.path} after step {step}")
        if not evaluates:
            self.say("no eval dataset: the eval reward is not measured")
        if changed:
            self.say(f"settings changed: {'; '.join(changed)}", warning=True)
        if config.update.minibatches * config.update.epochs == 1:
            use = "use 2 to 8 minibatches unless on-policy updates are intended"
            self.say(f"one minibatch and one epoch: ratios are 1 and nothing is clipped; {use}", warning=True)
        if self.mismatch_limit == math.inf:
            two = "top_p or top_k excludes tokens from sampling, but not from the trained log-probs"
            self.say(f"{two}; rollout.keep_sampling_mask excludes them from both", warning=True)
        settings = config.model_dump(mode="json")

        def write() -> Metrics:
            records = [each for each in read_metrics(directory.metrics) if each["step"] <= last]
            write_text(directory.metrics, "".join(json.dumps(each) + "\n" for each in records))
            for path in directory.rollouts.glob("step_*.jsonl"):
                if path.stem[5:].isdigit() and int(path.stem[5:]) > last:
                    path.unlink()
            write_text(directory.config_file, yaml.safe_dump(settings, sort_keys=False))
            return (records or [{}])[-1]

        before = on_main(write)
        name = directory.path.resolve().name
        options = {
            "tensorboard": {"purge_step": last + 1},
            "wandb": {"name": os.environ.get("WANDB_NAME", name), "dir": str(directory.trackers)},
            "trackio": {"name": name},
            "mlflow": {"run_name": name},
        }
        plain = {k: v if isinstance(v, int | float) else str(v) for k, v in flat(settings).items()}
        self.accelerator.init_trackers(os.environ.get("WANDB_PROJECT", "gspo"), init_kwargs=options)
        for tracker in self.accelerator.trackers:
            if step is None or tracker.name != "tensorboard":  # where each call adds a run
                tracker.store_init_configuration(plain)
        return before

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write, track and print a step, and the warnings that are due.

        Without a terminal, only every tenth step is printed.
        """
        steps = self.config.update.steps
        if step > 0:
            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
            if self.accelerator.device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(self.accelerator.device)
            metrics = {**metrics, "memory/peak_gib": max(gather_object([peak])) / 2**30}
        self.last = record = finite({"step": step, **metrics})
        if self.accelerator.is_main_process:
            self.unwritten += json.dumps(record, allow_nan=False).encode() + b"\n"
            with self.output_to("metrics.jsonl"), self.directory.metrics.open("ab", buffering=0) as file:
                end = file.tell()
                if file.write(self.unwritten) < len(self.unwritten):  # no partial line
                    file.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.unwritten = b""
        measured = {name: value for name, value in record.items() if value is not None}
        for tracker in self.accelerator.trackers if self.accelerator.is_main_process else ():
            with self.output_to(f"the tracker {tracker.name}"):
                tracker.log(measured, step=step)
        now = time.monotonic()
        self.started = self.started or (now - metrics.get("seconds", 0.0), max(step - 1, 0))
        if step > 0 and (sys.stdout.isatty() or step % 10 == 0 or step == steps):
            start, before = self.started
            left = (now - start) / max(step - before, 1) * (steps - step)
            self.say(f"step {step}/{steps}  {metrics_line(record, STEP)}  {left:.0f} s left")
        if "eval/greedy_reward" in record:
            self.say(f"step {step}/{steps}  {metrics_line(record, EVALUATION)}")
        for warning in self.symptoms(record) if step > 0 else ():
            self.say(f"step {step}: {warning}", warning=True)

    def symptoms(self, metrics: Mapping[str, float | None]) -> list[str]:
        """Return the warnings that are due after a step, one each time that a symptom sets in.

        A step without a value of a symptom's metric does not change its count, unless that is the symptom.
        """
        # comparisons with NaN are false
        m = defaultdict(lambda: math.nan, {k: value for k, value in metrics.items() if value is not None})
        m["limit"], due = self.mismatch_limit, []
        for name, (is_present, text) in SYMPTOMS.items():
            present = is_present(m)
            if name in metrics and (present or metrics[name] is not None):
                self.streaks[name] = self.streaks.get(name, 0) + 1 if present else 0
                if self.streaks[name] == PATIENCE:
                    due.append(f"for {PATIENCE} steps in a row {text}.")
        return due

    def save_rollout(
        self, step: int, rollout: Rollout, batch: Batch, prompts: Prompts, tokenizer: Any, digest: str
    ) -> None:
        """Write the completions of a step as JSON lines; ``digest`` identifies the weights that sampled them.

        The advantage is a list if the batch has one per token, and None if the batch has other rows.
        """
        if not self.accelerator.is_main_process or not rollout.samples:
            return
        advantages, by_name = batch.advantages.cpu(), rollout.rewards.by_name
        per_token = len(advantages) != len(batch.lengths)
        values = [x.tolist() for x in (advantages.split(batch.lengths) if per_token else advantages)]
        values = values if len(values) == len(rollout.samples) else [None] * len(rollout.samples)
        with self.output_to("rollouts/"):
            lines = []
            for index, sample in enumerate(rollout.samples):
                completion, row = sample.completion, prompts.rows[sample.row]
                record = {
                    "step": step,
                    "weights_digest": digest,
                    "row": sample.row,
                    "columns": {name: row.get(name) for name in prompts.columns},
                    "prompt": tokenizer.decode(sample.prompt),
                    "prompt_ids": sample.prompt,
                    "completion": sample.text,
                    **finite({"reward": rollout.rewards.total[index].item()}),
                    "rewards": finite({name: each[index].item() for name, each in by_name.items()}),
                    "advantage": values[index],
                    "token_ids": sample.ids.tolist(),
                    "logprobs": None if completion.logprobs is None else completion.logprobs.tolist(),
                    "sampling_mask": None if completion.mask is None else completion.mask.to_lists(),
                }
                lines.append(json.dumps(record, default=str) + "\n")
            self.directory.rollouts.mkdir(exist_ok=True)
            write_text(self.directory.rollouts / f"step_{step:06d}.jsonl", "".join(lines))

    def show_rollout(self, rollout: Rollout, tokenizer: Any) -> None:
        """Print the last three completions of a step."""
        for sample, total in list(zip(rollout.samples, rollout.rewards.total.tolist(), strict=True))[-3:]:
            prompt = shortened(tokenizer.decode(sample.prompt))
            self.say(f"[reward {total:.3f}] {prompt} -> {shortened(sample.text)}")

    def finish(self, step: int, model: Any, tokenizer: Any) -> Metrics:
        """Export the model, draw the plot, print the gain; return the metrics of the last step."""
        directory = self.directory
        try:
            write_directory(directory.model, partial(export_model, model, tokenizer))
            on_main(lambda: plot_run(directory.path))
        except (OSError, RuntimeError) as error:
            space = "--resume writes them when there is space"
            raise InputError(f"the model or the plot cannot be written: {error}; {space}") from error
        for tracker in self.accelerator.trackers:
            with self.output_to(f"the tracker {tracker.name}"):
                tracker.finish()
        records = read_metrics(directory.metrics) + list(map(json.loads, self.unwritten.splitlines()))
        evaluations = [record for record in records if "eval/greedy_reward" in record]
        if evaluations:
            first, last = (metrics_line(evaluations[i], EVALUATION) for i in (0, -1))
            steps = f"{step} step{'s' if step > 1 else ''} of {self.config.objective.name}"
            self.say(f"before: {first}\nafter {steps}: {last}")
        self.say(f"trained model: {directory.model}   plot: {directory.plot}")
        return self.last or (records or [{}])[-1]


class _LenientStream:
    """A text stream that escapes characters outside its encoding, and drops text that nobody can read."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        encoding = self.encoding or "utf-8"
        self._try(self.stream.write, text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    close = flush  # a reward must not close it

    def _try(self, method: Callable[..., object], *arguments: str) -> None:
        try:
            method(*arguments)
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):  # the reader or the terminal is closed
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())


@contextmanager
def lenient_output() -> Iterator[None]:
    """Let stdout and stderr raise nothing in the body; they may also be None, as in a daemon."""
    streams = sys.stdout, sys.stderr
    with Path(os.devnull).open("w") as nowhere:
        lenient: list[Any] = [_LenientStream(stream or nowhere) for stream in streams]
        sys.stdout, sys.stderr = lenient
        try:
            yield
        finally:
            sys.stdout, sys.stderr = streams
            for stream in lenient:
                stream.flush()


def metrics_line(metrics: Mapping[str, Any], template: str) -> str:
    """Fill ``{name:format}`` with metrics; a metric that is missing or None becomes a dash."""
    values = {"kl": metrics.get("kl/ref", metrics.get("kl/old")), **metrics}
    measured = {name: value for name, value in values.items() if value is not None}
    pattern = r"\{([^:{}]+):([^{}]+)\}"
    return re.sub(pattern, lambda m: format(measured[m[1]], m[2]) if m[1] in measured else "-", template)


def finite(metrics: Mapping[str, Any]) -> Metrics:
    """Return the metrics with None instead of NaN and infinities, which are not JSON."""
    return {k: value if value is not None and math.isfinite(value) else None for k, value in metrics.items()}


def read_metrics(path: Path) -> list[Metrics]:
    """Read all complete lines; a crash may have cut the last one."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


PATIENCE = 5
"""The number of consecutive steps with a symptom before a warning."""

SYMPTOMS: dict[str, tuple[Callable[[Mapping[str, float]], bool], str]] = {
    "groups_without_variance": (
        lambda m: m["groups_without_variance"] >= 1.0,
        "all rewards are equal within every group, so all advantages are 0 and nothing can be learned. Make "
        "the task easier or harder, add a reward with partial credit, or raise rollout.group_size or "
        "rollout.temperature",
    ),
    "clip_fraction/after_first": (
        lambda m: m["clip_fraction/after_first"] >= 0.95,
        "nearly every sequence is clipped after the first minibatch: the steps are too large, or the data is "
        "stale. Lower update.learning_rate, use fewer minibatches, or a wider range",
    ),
    "minibatch_2/ratio/max": (
        lambda m: (
            m["ratio/min"] == m["ratio/max"] == 1.0
            and m["clip_fraction/after_first"] >= 0.0
            and not m["groups_without_variance"] >= 1.0
        ),
        "every ratio is exactly 1, also after the first minibatch: the updates do not change the policy. "
        "Raise update.learning_rate",
    ),
    "completions/finished": (
        lambda m: m["completions/finished"] <= 0.05,
        "nearly all completions are truncated at rollout.max_new_tokens. Raise it, or check that the model "
        "knows its end token",
    ),
    "reward/mean": (
        lambda m: math.isnan(m["reward/mean"]),
        "no reward applies to any completion (every value is None)",
    ),
    "updates_left_out": (
        lambda m: m["updates_left_out"] >= 1.0,
        "gradients are not finite, and the optimizer updates were skipped",
    ),
    "mismatch/mean": (
        lambda m: abs(m["mismatch/ratio"] - 1.0) >= m["limit"] or m["mismatch/mean"] >= m["limit"],
        "the log-probs of sampling and training differ by more than rounding: stale data (older weights), "
        "other experts, another temperature or other tokens. `gspo mismatch` finds the cause; off_policy can "
        "correct for the difference",
    ),
}
"""For the metric that shows a symptom: a test of the step's metrics; its meaning and its remedy."""


def plot_run(run: str | Path) -> Path:
    """Draw ``progress.png`` from the metrics of a run, which may be in progress; return its path."""
    directory = RunDirectory(run)
    if not directory.holds_a_run():
        raise InputError(f"there is no run in {run}")
    unfinished = directory.path / ".unfinished-progress.png"
    plot_progress(read_metrics(directory.metrics), unfinished)
    return unfinished.replace(directory.plot)
