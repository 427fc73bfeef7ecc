"""One run as a person meets it: its directory, what it shows while it goes on, and what it leaves."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor

from gspo_kernels.trainer.config import TrainConfig
from gspo_kernels.trainer.data import Prompts
from gspo_kernels.trainer.input_errors import RunDirectoryError
from gspo_kernels.trainer.run.checkpoint import load_state, save_state
from gspo_kernels.trainer.run.config_file import flat, load_config, require_same_run, save_config, to_mapping
from gspo_kernels.trainer.run.display import Display
from gspo_kernels.trainer.run.export import export_model
from gspo_kernels.trainer.run.files import RunDirectory, write_directory, write_file
from gspo_kernels.trainer.run.health import Health
from gspo_kernels.trainer.run.metrics import (
    Record,
    append_metrics,
    check_format,
    finite,
    keep_until,
    read_metrics,
    write_rollout,
)
from gspo_kernels.trainer.run.plot import plot_progress
from gspo_kernels.trainer.run.processes import on_main, peak_memory, shard_again

_NOTED = b"\nending after this step, with a checkpoint; Ctrl-C once more ends at once\n"


class Run:
    """The directory, the display and the trackers of a run. The first process writes; all must call."""

    def __init__(self, config: TrainConfig, accelerator: Any) -> None:
        if config.save_rollouts:
            check_format(config.rollouts_format)
        self.config = config
        self.accelerator = accelerator
        self.directory = RunDirectory(config.output)
        self.health = Health.of(config)
        self.display = Display(
            config.update.steps, log_every=config.log_every, quiet=not accelerator.is_main_process
        )

    def start(self, *, resume: bool, overwrite: bool) -> dict[str, Any] | None:
        """Make the directory ready, or raise before anything is lost; return the state to go on from."""
        directory, config = self.directory, self.config

        def prepare() -> None:
            directory.prepare(resume=resume, overwrite=overwrite)
            if resume and directory.config.exists():
                require_same_run(load_config(directory.config), config)

        on_main(self.accelerator, prepare)
        checkpoint = directory.latest_checkpoint() if resume else None
        state = None if checkpoint is None else load_state(checkpoint, self.accelerator)
        finished = directory.model.exists() and directory.plot.exists()
        if state is not None and state["step"] >= config.update.steps and finished:
            raise RunDirectoryError(
                f"the run in {directory.path} is finished ({state['step']} steps); "
                "raise update.steps to train on"
            )
        return state

    def begin(self, step: int, resumed: bool, prompts: Mapping[str, Prompts | None]) -> None:
        """Write the configuration, drop metrics after ``step``, and say what is worth knowing."""
        if resumed:
            self.display.line(f"resuming {self.directory.path} after step {step}")
        if self.accelerator.is_main_process:
            keep_until(self.directory.metrics, step if resumed else -1)
            save_config(self.config, self.directory.config)
        self.accelerator.init_trackers("gspo", flat(to_mapping(self.config)))
        for warning in self.config.warnings():
            self.display.warn(warning)
        for name, given in prompts.items():
            if given is None:
                self.display.line(f"no {name} dataset: accuracy on held-out prompts is not measured")
            elif given.dropped:
                self.display.warn(f"{given.dropped} rows of the {name} dataset were dropped: too long")

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write, track and show the metrics of a step, and warn of what they mean."""
        if step > 0:
            peak = max(gather_object([peak_memory(self.accelerator.device)]))
            metrics = {**metrics, "memory/peak_gib": peak / 2**30}
        record = finite({"step": step, **metrics})
        if self.accelerator.is_main_process:
            append_metrics(self.directory.metrics, record)
        self.accelerator.log({name: value for name, value in record.items() if value is not None}, step)
        self.display.step(step, record)
        if step > 0:
            for warning in self.health.check(record):
                self.display.warn(f"step {step}: {warning}")

    def keep_rollout(self, step: int, records: Iterable[Record]) -> None:
        """Write the completions of a step, if that is asked for and there are any."""
        if not self.config.save_rollouts or not self.accelerator.is_main_process:
            return
        if kept := list(records):
            write_rollout(self.directory.rollouts, step, kept, self.config.rollouts_format)

    def save(
        self, step: int, state: Mapping[str, Any], tensors: Mapping[str, Tensor], model: Any, tokenizer: Any
    ) -> None:
        """Write the checkpoint of a step, and in it a model for ``from_pretrained`` if that is asked for."""
        accelerator, options = self.accelerator, self.config.checkpoint

        def write(path: Path) -> None:
            save_state(state, tensors, path, accelerator)
            if options.export:
                export_model(model, tokenizer, path / "model", main=accelerator.is_main_process)

        self.directory.save_checkpoint(step, write, options.keep, accelerator)

    def finish(self, step: int, model: Any, tokenizer: Any, policy: Any) -> Record:
        """Export the model, draw the plot, show what was gained; return the last evaluation's metrics."""
        directory, accelerator = self.directory, self.accelerator
        shard_again(policy)
        write = partial(export_model, model, tokenizer, main=accelerator.is_main_process)
        try:
            write_directory(directory.model, write, accelerator)
            on_main(accelerator, lambda: draw(directory))
        except (OSError, RuntimeError) as error:
            raise RunDirectoryError(
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


def draw(directory: RunDirectory) -> None:
    """Draw ``progress.png`` of the metrics that a run has written so far."""
    records = read_metrics(directory.metrics)
    write_file(directory.plot, lambda path: plot_progress(records, path))


@contextmanager
def noted() -> Iterator[list[int]]:
    """Note SIGTERM and a first SIGINT inside instead of ending; in the main thread, where they arrive."""
    caught: list[int] = []

    def note(number: int, _: object) -> None:
        if number == signal.SIGINT:
            if caught:
                raise KeyboardInterrupt
            os.write(2, _NOTED)  # print might have been interrupted
        caught.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
