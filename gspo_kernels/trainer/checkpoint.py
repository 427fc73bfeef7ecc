"""The directory of a run and its checkpoints: write them, resume from one, export one.

A checkpoint is written into a hidden directory, flushed to disk and renamed, so the newest directory with a
final name is complete. Each process writes and reads its shards by `torch.distributed.checkpoint`. Nothing is
deleted or overwritten in a directory without a run's marker file, which the process of the run locks.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch import Tensor

from gspo_kernels.trainer.config import InputError, TrainConfig, changed_settings, from_mapping, load_config
from gspo_kernels.trainer.model import add_adapters, export_model, load_model, load_tokenizer
from gspo_kernels.trainer.processes import on_all, on_main, process_state

REPLACED = ".unfinished-replaced-"
"""Prefix of the former directory while one of the same name replaces it."""


class RunDirectory:
    """The paths, checkpoints and lock of a run; leaving the context releases the lock."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()  # a reward may change the working directory
        self.marker = self.path / ".gspo_run"
        self._lock: IO[str] | None = None
        self.config_file = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.rollouts = self.path / "rollouts"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.plot = self.path / "progress.png"
        self.trackers = self.path / "trackers"
        self.written = [self.metrics, self.plot, self.config_file]
        self.written += [self.checkpoints, self.model, self.rollouts, self.trackers]

    def holds_a_run(self) -> bool:
        """Return whether a run has written to this directory."""
        return self.marker.exists() and any(path.exists() for path in self.written)

    def claim(
        self,
        *,
        resume: bool = False,
        overwrite: bool = False,
        force: bool = False,
        others: Sequence[str] = (),
    ) -> None:
        """Mark and lock the directory, or raise before any of its files is changed.

        ``others`` are names of more files that the caller will write.
        """
        if resume and overwrite:
            raise InputError("resume and overwrite exclude each other")
        if force and not resume:
            raise InputError("force has no effect without resume")
        if resume and not self.holds_a_run():
            raise InputError(f"there is no run in {self.path} to resume")
        written = *self.written, *map(self.path.joinpath, others)
        present = ", ".join(path.name for path in written if path.exists())
        if present and not self.marker.exists():
            raise InputError(f"{self.path} has {present}, and no run wrote that; choose another --output")
        self.__exit__()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = self.marker.open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.__exit__()
            raise InputError(f"another process works on the run in {self.path}") from error
        if self.holds_a_run() and not (resume or overwrite):
            self.__exit__()
            choices = "continue with --resume, replace it with --overwrite, or choose another --output"
            raise InputError(f"{self.path} already has a run: {choices}")

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def open(
        self, config: TrainConfig, inputs: Mapping[str, str], *, resume: bool, overwrite: bool, force: bool
    ) -> tuple[Path | None, list[str]]:
        """Prepare the directory for a run, or raise before anything is lost.

        ``inputs`` are digests of data and weights, by name, that a resumed run must have unchanged. Returns
        the checkpoint to resume from, or None; and the changed settings that ``force`` accepted.
        """

        def prepare() -> list[str]:
            self.claim(resume=resume, overwrite=overwrite, force=force)
            for replaced in self.checkpoints.glob(f"{REPLACED}*") if resume else ():
                final = self.checkpoints / replaced.name.removeprefix(REPLACED)
                if not final.exists():  # a kill prevented the rename of the new one
                    replaced.rename(final)
            changed: list[str] = []
            if resume and self.config_file.exists():
                changed = changed_settings(load_config(self.config_file, cls=type(config)), config)
            checkpoint = self.latest_checkpoint() if resume else None
            before = inputs if checkpoint is None else load_state(checkpoint).get("inputs", {})
            pairs = ((name, before.get(name), digest) for name, digest in inputs.items())
            changed += [f"{name}: {old} -> {new}" for name, old, new in pairs if old != new]
            if changed and not force:
                what = f"other settings, data or weights ({'; '.join(changed)})"
                raise InputError(f"the run was started with {what}; --force accepts them")
            for path in () if resume else self.written:
                if path.exists():  # renamed first: a kill must not leave half of it
                    path.rename(self.path / f".unfinished-{os.getpid()}-{path.name}")
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            for parent in (self.path, self.checkpoints):
                for unfinished in parent.glob(".unfinished-*"):
                    unfinished.unlink() if unfinished.is_file() else shutil.rmtree(unfinished)
            return changed

        changed = on_main(prepare)
        checkpoint = self.latest_checkpoint() if resume else None
        step = 0 if checkpoint is None else int(checkpoint.name[5:])
        if step > config.update.steps:
            taken = f"expected at least {step}, the steps that the run has taken"
            raise InputError(f"update.steps: got {config.update.steps}, {taken}")
        if step == config.update.steps and self.model.exists() and self.plot.exists():
            finished = f"the run in {self.path} is finished ({step} steps)"
            raise InputError(f"{finished}; raise update.steps to train on")
        return checkpoint, changed

    def latest_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint, or None."""
        return next(reversed(self._whole_checkpoints()), None)

    def save_checkpoint(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor], keep: int) -> None:
        """Write a checkpoint of the state's step; delete all but the newest ``keep`` checkpoints.

        All processes must call, with their shards of the tensors.
        """
        step = state["step"]

        def write(path: Path) -> None:
            with _os_errors():
                dcp.save(dict(tensors), checkpoint_id=path / "tensors")
            if process_state().is_main_process:
                torch.save(dict(state), path / "state.pt")

        try:
            write_directory(self.checkpoints / f"step_{step:06d}", write)
        except (OSError, RuntimeError) as error:  # torch.save raises both
            last = self.latest_checkpoint()
            then = f"--resume continues from {last.name if last else 'the start'} when there is space"
            raise InputError(f"the checkpoint of step {step} cannot be written: {error}; {then}") from error
        if process_state().is_main_process:
            for old in self._whole_checkpoints()[:-keep]:
                shutil.rmtree(old)

    def _whole_checkpoints(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step_*"), key=lambda path: int(path.name[5:]))


def load_state(path: Path) -> dict[str, Any]:
    """Read the state of a checkpoint, without the tensors; a damaged file is an `InputError`."""
    with _reading(path):
        state: dict[str, Any] = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    return state


def load_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Load a checkpoint into tensors of these names, whole or shards; all processes must call.

    The weights must be those of the checkpoint; state of the optimizer that one of them lacks is skipped.
    """
    with _reading(path):
        saved = dcp.FileSystemReader(path / "tensors").read_metadata().state_dict_metadata
    for name in sorted(name for name in {**saved, **tensors} if name.startswith("weights/")):
        before = getattr(saved.get(name), "size", "nothing")
        now = getattr(tensors.get(name), "shape", "nothing")
        if before != now:
            other = f"it has {name[8:]} as {before}, the model as {now}"
            raise InputError(f"the checkpoint is of another model: {other}")
    with _reading(path):
        dcp.load({n: each for n, each in tensors.items() if n in saved}, checkpoint_id=path / "tensors")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        with _os_errors():
            yield
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        remedy = "remove it to continue from the one before"
        raise InputError(f"the checkpoint {path} is damaged ({error}); {remedy}") from error


@contextmanager
def _os_errors() -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in one process
            yield
    except dcp.CheckpointException as error:  # not an Exception, but a BaseException
        causes = [cause for cause, _ in error.failures.values()]
        raise OSError(f"{type(causes[0]).__name__}: {causes[0]}") from error


def saved_config(directory: RunDirectory) -> TrainConfig:
    """Return the configuration of a run, without a recipe's keys."""
    saved = yaml.safe_load(directory.config_file.read_text(encoding="utf-8"))
    config: TrainConfig = from_mapping({k: v for k, v in saved.items() if k in TrainConfig.model_fields})
    return config


def load_checkpoint(run: str | Path, step: int | None = None) -> tuple[Any, Any]:
    """Return tokenizer and model, with its adapters, of a checkpoint, by default a run's newest."""
    directory = RunDirectory(run)
    if not directory.holds_a_run():
        raise InputError(f"there is no run in {run}")
    present = directory._whole_checkpoints()
    wanted = [path for path in present if step is None or path.name == f"step_{step:06d}"]
    if not wanted:
        steps = ", ".join(path.name for path in present) or "none"
        name = "yet" if step is None else f"step_{step:06d}"
        raise InputError(f"there is no checkpoint {name} in {run}; it has {steps}")
    config = saved_config(directory)
    tokenizer, model = load_tokenizer(config.model), load_model(config.model)
    if config.lora.rank > 0:
        add_adapters(model, config.lora)
    trained = {f"weights/model.{n}": p.detach() for n, p in model.named_parameters() if p.requires_grad}
    load_tensors(wanted[-1], trained)
    return tokenizer, model


def export_checkpoint(run: str | Path, to: Path, *, step: int | None = None, half: bool = False) -> None:
    """Export a checkpoint's model, by default the newest, to a new directory; ``half``: in bfloat16."""
    if to.exists():
        raise InputError(f"{to} exists already; choose a new directory")
    tokenizer, model = load_checkpoint(run, step)
    dtype = torch.bfloat16 if half else torch.float32
    write_directory(to, lambda path: export_model(model, tokenizer, path, dtype=dtype))


def write_directory(final: Path, write: Callable[[Path], None]) -> None:
    """Create a directory that ``write`` fills in each process, atomically; all processes must call."""
    unfinished = final.parent / f".unfinished-{final.name}"

    def begin() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)

    def finish() -> None:
        os.sync()  # before the name is visible
        replaced = final.parent / f"{REPLACED}{final.name}"
        if final.exists():
            final.rename(replaced)
        unfinished.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)

    on_main(begin)
    try:
        on_all(lambda: write(unfinished))
        on_main(finish)
    except Exception:
        if process_state().is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    unfinished = path.parent / f".unfinished-{path.name}"
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


@contextmanager
def defer_signals() -> Iterator[list[int]]:
    """Yield a list of received SIGTERM, SIGHUP and first SIGINT, which do not end the body.

    A closed terminal sends SIGHUP, which stays ignored under nohup. Only the main thread can set handlers.
    """
    caught: list[int] = []
    handled = [signal.SIGTERM, signal.SIGINT]
    handled += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    handled = handled if threading.current_thread() is threading.main_thread() else []

    def note(number: int, _: object) -> None:
        if number == signal.SIGINT:
            if caught:
                raise KeyboardInterrupt
            with suppress(OSError):  # the signal may have interrupted a print
                os.write(
                    2, b"\nstopping after this step, with a checkpoint; press Ctrl-C again to stop now\n"
                )
        caught.append(number)

    previous = {number: signal.signal(number, note) for number in handled}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
