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
from textwrap import indent
from typing import Any

import torch
import yaml
from accelerate.utils import gather_object

from gspo_kernels.plots import plot_progress
from gspo_kernels.trainer.batch import Batch, Rollout
from gspo_kernels.trainer.checkpoint import RunDirectory, write_directory, write_text
from gspo_kernels.trainer.config import InputError, TrainConfig, flat, reason
from gspo_kernels.trainer.data import Prompts
from gspo_kernels.trainer.processes import on_main
from gspo_kernels.trainer.rollout import sampling_of

Metrics = dict[str, Any]

STEP = (
    "reward {reward/mean:.3f}  no-variance groups {groups_without_variance:.0%}  "
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
        self.config = config
        self.accelerator = accelerator
        self.directory = directory
        self.health = Health(config)
        self.unwritten = b""  # metrics that wait for room on the disk
        self.last: Metrics = {}  # of the last step, which another node's process cannot read from a file
        self.failing: set[str] = set()
        self.started: tuple[float, int] | None = None  # time and number of the first step in this process

    def say(self, text: str, *, warning: bool = False) -> None:
        """Print a text."""
        if self.accelerator.is_main_process:
            print(f"warning: {text}" if warning else text, flush=True)

    @contextmanager
    def output_to(self, what: str) -> Iterator[None]:
        """Let no output end the run, as on a full disk or by a tracker's error; it is said once."""
        try:
            yield
        except Exception as error:
            if what not in self.failing:
                self.say(f"{what} cannot be written, and the run goes on: {reason(error)}", warning=True)
            self.failing.add(what)

    def begin(self, step: int | None, *, changed: Sequence[str], evaluates: bool) -> None:
        """Start trackers, print notes, write the configuration, drop metrics after ``step`` (None: all)."""
        if step is not None:
            self.say(f"resuming {self.directory.path} after step {step}")
        if not evaluates:
            self.say("no eval dataset: the reward on held-out prompts is not measured")
        config = self.config
        if changed:
            self.say(f"settings changed: {'; '.join(changed)}", warning=True)
        if config.update.minibatches * config.update.epochs == 1:
            use = "use 2 to 8 minibatches unless on-policy updates are meant"
            self.say(f"one minibatch and one epoch: ratios are 1 and nothing is clipped; {use}", warning=True)
        if self.health.mismatch == math.inf:
            two = "sampling cuts off tokens that training counts, so their log-probs are of two distributions"
            self.say(f"{two}; rollout.keep_sampling_mask trains on the sampler's", warning=True)
        settings = config.model_dump(mode="json")
        if self.accelerator.is_main_process:
            last, before = -1 if step is None else step, read_metrics(self.directory.metrics)
            records = [each for each in before if each["step"] <= last]
            write_text(self.directory.metrics, "".join(json.dumps(each) + "\n" for each in records))
            write_text(self.directory.config, yaml.safe_dump(settings, sort_keys=False))
        name = self.directory.path.resolve().name
        options = {
            "tensorboard": {"purge_step": 0 if step is None else step + 1},
            "wandb": {"name": os.environ.get("WANDB_NAME", name), "dir": str(self.directory.trackers)},
            "trackio": {"name": name},
            "mlflow": {"run_name": name},
        }
        plain = {k: v if isinstance(v, int | float) else str(v) for k, v in flat(settings).items()}
        project = os.environ.get("WANDB_PROJECT", "gspo")
        self.accelerator.init_trackers(project, init_kwargs=options)
        for tracker in self.accelerator.trackers:
            if step is None or tracker.name != "tensorboard":  # each call would be another run there
                tracker.store_init_configuration(plain)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write, track and print a step; print the warnings that are due.

        Without a terminal, only every tenth step is printed.
        """
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
                if file.write(self.unwritten) < len(self.unwritten):  # no half of a line stays
                    file.truncate(end)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.unwritten = b""
        with self.output_to("a tracker"):
            self.accelerator.log({name: value for name, value in record.items() if value is not None}, step)
        steps, line = self.config.update.steps, metrics_line(record, STEP) if step > 0 else ""
        if "eval/greedy_reward" in record:
            self.say(f"step {step}/{steps}  {metrics_line(record, EVALUATION)}")
        now = time.monotonic()
        self.started = self.started or (now - metrics.get("seconds", 0.0), max(step - 1, 0))
        if step > 0 and (sys.stdout.isatty() or step % 10 == 0 or step == steps):
            start, before = self.started
            left = (now - start) / max(step - before, 1) * (steps - step)
            self.say(f"step {step}/{steps}  {line}  {left:.0f} s left")
        for warning in self.health.check(record) if step > 0 else ():
            self.say(f"step {step}: {warning}", warning=True)

    def save_rollout(
        self, step: int, rollout: Rollout, batch: Batch, prompts: Prompts, tokenizer: Any, digest: str
    ) -> None:
        """Write the completions of a step; ``digest`` is that of the weights that sampled them."""
        if not self.accelerator.is_main_process or not rollout.samples:
            return
        with self.output_to("rollouts/"):
            common = {"step": step, "weights_digest": digest}
            records = _records(rollout, batch, prompts, tokenizer)
            lines = [json.dumps(common | record, default=str) + "\n" for record in records]
            self.directory.rollouts.mkdir(exist_ok=True)
            write_text(self.directory.rollouts / f"step_{step:06d}.jsonl", "".join(lines))

    def show_rollout(self, step: int, rollout: Rollout, tokenizer: Any) -> None:
        """Print the last three completions of a step; trackers get the last 16."""
        if not self.accelerator.is_main_process or not rollout.samples:
            return
        pairs = zip(rollout.samples, rollout.rewards.total.tolist(), strict=True)
        rows = [(tokenizer.decode(sample.prompt), sample.text, total) for sample, total in pairs][-16:]
        columns = ["prompt", "completion", "reward"]
        for prompt, completion, reward in rows[-3:]:
            self.say(f"[reward {reward:.3f}] {excerpt(prompt)} -> {excerpt(completion)}")
        for tracker in self.accelerator.trackers:
            with self.output_to("a tracker"):
                if hasattr(tracker, "log_table"):  # wandb and clearml
                    tracker.log_table("completions", columns, [list(row) for row in rows], step=step)
                elif tracker.name == "tensorboard":  # Markdown, with texts as they are
                    blocks = (f"reward {reward:.3f}\n\n{indent(p + c, ' ' * 4)}" for p, c, reward in rows)
                    tracker.writer.add_text("completions", "\n\n".join(blocks), step)

    def finish(self, step: int, write_model: Callable[..., None]) -> Metrics:
        """Export the model, draw the plot, print the gain; return the last evaluation's metrics."""
        directory, accelerator = self.directory, self.accelerator
        try:
            write_directory(directory.model, partial(write_model, accelerator=accelerator), accelerator)
            on_main(accelerator, lambda: plot_run(directory.path))
        except (OSError, RuntimeError) as error:
            room = "--resume does it when there is room"
            raise InputError(f"the model or the plot cannot be written: {error}; {room}") from error
        for tracker in accelerator.trackers:
            with self.output_to("a tracker"):
                tracker.finish()
        records = read_metrics(directory.metrics) + list(map(json.loads, self.unwritten.splitlines()))
        evaluations = [record for record in records if "eval/greedy_reward" in record]
        if evaluations:
            first, last = (metrics_line(evaluations[i], EVALUATION) for i in (0, -1))
            steps = f"{step} step{'s' if step > 1 else ''} of {self.config.objective.name}"
            self.say(f"before: {first}\nafter {steps}: {last}")
        self.say(f"trained model: {directory.model}   plot: {directory.plot}")
        return self.last or (evaluations or records or [{}])[-1]


def excerpt(text: str, longest: int = 400) -> str:
    """Return a text without its middle if it is long."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]} [...] {text[-half:]}"


class _LenientStream:
    """A text stream that drops or escapes what the stream below it cannot write."""

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

    close = flush  # so that no reward closes it

    def _try(self, method: Callable[..., object], *arguments: str) -> None:
        try:
            method(*arguments)
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):  # nobody will ever read it
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())


@contextmanager
def lenient_output() -> Iterator[None]:
    """Let no stdout or stderr end the body: without a reader, on a closed terminal, without a character, or
    None, as in a process that was started without streams.
    """
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


def _records(rollout: Rollout, batch: Batch, prompts: Prompts, tokenizer: Any) -> Iterator[Metrics]:
    """Yield each completion with its columns, rewards, advantage and log-probs, as JSON values.

    The advantage is a list, one per token, where the batch has them so; None if the batch has other rows.
    """
    rewards, advantages = rollout.rewards, batch.advantages.cpu()
    per_token = len(advantages) != len(batch.lengths)
    values = [x.tolist() for x in (advantages.split(batch.lengths) if per_token else advantages)]
    values = values if len(values) == len(rollout.samples) else [None] * len(rollout.samples)
    for index, sample in enumerate(rollout.samples):
        completion, row = sample.completion, prompts.rows[sample.row]
        yield {
            "row": sample.row,
            "columns": {name: row.get(name) for name in prompts.columns},
            "prompt": tokenizer.decode(sample.prompt),
            "prompt_ids": sample.prompt,
            "completion": sample.text,
            **finite({"reward": rewards.total[index].item()}),
            "rewards": finite({name: values[index].item() for name, values in rewards.by_name.items()}),
            "advantage": values[index],
            "token_ids": sample.ids.tolist(),
            "logprobs": None if completion.logprobs is None else completion.logprobs.tolist(),
            "sampling_mask": None if completion.mask is None else completion.mask.to_lists(),
        }


def metrics_line(metrics: Mapping[str, Any], template: str) -> str:
    """Fill ``{name:format}`` with metrics; a metric that is missing or None becomes a dash."""
    values = {"kl": metrics.get("kl/ref", metrics.get("kl/old")), **metrics}
    measured = {name: value for name, value in values.items() if value is not None}
    pattern = r"\{([^:{}]+):([^{}]+)\}"
    return re.sub(pattern, lambda m: format(measured[m[1]], m[2]) if m[1] in measured else "-", template)


def finite(metrics: Mapping[str, Any]) -> Metrics:
    """Return the metrics with None in place of NaN and infinities, which JSON does not have."""
    return {k: value if value is not None and math.isfinite(value) else None for k, value in metrics.items()}


def read_metrics(path: Path) -> list[Metrics]:
    """Read all complete lines; a line cut short by a crash is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):
            records.append(json.loads(line))
    return records


# Warnings.

PATIENCE = 5
"""The number of consecutive steps with a symptom after which a warning is due."""


class Health:
    """A counter of symptoms over consecutive steps; it warns of a symptom once, each time it sets in.

    A step without the metric that shows a symptom leaves the symptom's count as it is.
    """

    def __init__(self, config: TrainConfig) -> None:
        # What rounding does not explain of the gap between sampling and training, in nats per token. Rounding
        # causes 1e-6 in fp32, and 0.01 in bf16, where the engine rounds its logits. Tokens that sampling cuts
        # off, and that training counts, make a gap without bound.
        cut_off = sampling_of(config.rollout).cuts and not config.rollout.keep_sampling_mask
        self.mismatch = math.inf if cut_off else 0.1 if config.update.precision == "bf16" else 1e-3
        self.streaks: dict[str, int] = {}

    def check(self, metrics: Mapping[str, float | None]) -> list[str]:
        """Return the warnings that are due after a step with these metrics."""
        # no comparison with NaN is true
        m = defaultdict(lambda: math.nan, {k: value for k, value in metrics.items() if value is not None})
        equal, limit = m["groups_without_variance"] >= 1.0, self.mismatch
        present = {
            "groups_without_variance": equal,
            "clip_fraction/after_first": m["clip_fraction/after_first"] >= 0.95,
            "minibatch_2/ratio/max": m["ratio/min"] == m["ratio/max"] == 1.0 and not equal,
            "completions/finished": m["completions/finished"] <= 0.05,
            "reward/mean": math.isnan(m["reward/mean"]),
            "updates_left_out": m["updates_left_out"] >= 1.0,
            "mismatch/mean": abs(m["mismatch/ratio"] - 1.0) >= limit or m["mismatch/mean"] >= limit,
        }
        for name in metrics.keys() & present.keys():
            self.streaks[name] = self.streaks.get(name, 0) + 1 if present[name] else 0
        due = [name for name in present if name in metrics and self.streaks[name] == PATIENCE]
        return [f"for {PATIENCE} steps in a row {SYMPTOMS[name]}." for name in due]


SYMPTOMS = {
    "groups_without_variance": "all rewards are equal within every group, so all advantages are 0 and "
    "nothing can be learned. Make the task easier or harder, add a reward with partial credit, or raise "
    "rollout.group_size or rollout.temperature",
    "clip_fraction/after_first": "nearly every sequence is clipped after the first minibatch: the steps are "
    "too large, or the data is stale. Lower update.learning_rate, use fewer minibatches, or a wider range",
    "minibatch_2/ratio/max": "every ratio is exactly 1, also after the first minibatch: the updates do not "
    "change the policy. Raise update.learning_rate",
    "completions/finished": "hardly a completion ends by itself: nearly all are truncated at "
    "rollout.max_new_tokens. Raise it, or check that the model knows its end token",
    "reward/mean": "no reward applies to any completion (every value is None)",
    "updates_left_out": "gradients are not finite, the optimizer updates were left out",
    "mismatch/mean": "sampling and training disagree about the probability of the same tokens by more than "
    "rounding explains: stale data (older weights), other experts, another temperature or other tokens. "
    "`gspo mismatch` narrows it down; off_policy can weigh the difference",
}
"""The meaning of each symptom and its remedy, by the metric that shows it."""


def plot_run(run: str | Path) -> Path:
    """Draw ``progress.png`` from the metrics that a run has written so far; return its path."""
    directory = RunDirectory(run)
    if not directory.holds_a_run():
        raise InputError(f"there is no run in {run}")
    unfinished = directory.path / ".unfinished-progress.png"
    plot_progress(read_metrics(directory.metrics), unfinished)
    return unfinished.replace(directory.plot)
