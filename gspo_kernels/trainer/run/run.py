"""One run as a person meets it: its directory, what it shows while it goes on, and what it leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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


class Run:
    """The directory, the display and the trackers of a run. The first process writes; all must call.

    Args:
        config: of the run.
        accelerator: accelerate's, with the trackers.
    """

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
        directory, main = self.directory, self.accelerator.is_main_process
        shard_again(policy)

        def draw() -> None:
            records = read_metrics(directory.metrics)
            write_file(directory.plot, lambda path: plot_progress(records, path))

        try:
            write_directory(
                directory.model,
                lambda path: export_model(model, tokenizer, path, main=main),
                self.accelerator,
            )
            on_main(self.accelerator, draw)
        except (OSError, RuntimeError) as error:
            raise RunDirectoryError(
                f"the model or the plot cannot be written: {error}; --resume does it when there is room"
            ) from error
        for tracker in self.accelerator.trackers:
            tracker.finish()
        records = read_metrics(directory.metrics)
        evaluations = [record for record in records if "eval/greedy_accuracy" in record]
        if evaluations:
            title = f"{step} steps of {self.config.objective.name}"
            self.display.accuracy_table(title, evaluations[0], evaluations[-1])
        self.display.line(f"trained model: {directory.model}   plot: {directory.plot}")
        return evaluations[-1] if evaluations else records[-1]
