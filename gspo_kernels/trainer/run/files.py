"""The directory of a run, and checkpoints that are either whole or not there.

A checkpoint is written into a hidden directory beside its final place, flushed to disk and renamed.
Whatever happens in between, the newest directory with a final name can be loaded.

The directory of a run holds a marker: nothing without one is ever deleted or written over. The process that
works on it locks the marker, and the system gives the lock up with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from gspo_kernels.trainer.input_errors import RunDirectoryError
from gspo_kernels.trainer.run.processes import ALONE, on_all, on_main


class RunDirectory:
    """Names of everything that a run writes, and the checkpoints among it; gives up its lock on exit."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.marker = self.path / ".gspo_run"
        self._lock: IO[str] | None = None
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.rollouts = self.path / "rollouts"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.plot = self.path / "progress.png"
        self.trackers = self.path / "trackers"
        self._files = self.metrics, self.plot, self.config
        self._folders = self.checkpoints, self.model, self.rollouts, self.trackers

    def holds_a_run(self) -> bool:
        """Whether a run has written here."""
        begun = (self.config, self.metrics, self.checkpoints, self.model)
        return self.marker.exists() and any(path.exists() for path in begun)

    def claim(self, *, resume: bool = False, overwrite: bool = False, others: Sequence[str] = ()) -> None:
        """Mark and lock the directory, or raise before anything in it was touched.

        Args:
            resume, overwrite: what may be done with a run that is there.
            others: names of what will be written beside the files of a run.
        """
        if resume and overwrite:
            raise RunDirectoryError("resume and overwrite exclude each other")
        if resume and not self.holds_a_run():
            raise RunDirectoryError(f"there is no run in {self.path} to resume")
        written = *self._files, *map(self.path.joinpath, others), *self._folders
        strange = [path.name for path in written if path.exists()]
        if strange and not self.marker.exists():
            raise RunDirectoryError(
                f"{self.path} holds {', '.join(strange)}, and no run wrote that; choose another --output"
            )
        self.release()
        self.path.mkdir(parents=True, exist_ok=True)
        lock = self.marker.open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise RunDirectoryError(f"another process works on the run in {self.path}") from error
        self._lock = lock
        if self.holds_a_run() and not (resume or overwrite):
            self.release()
            raise RunDirectoryError(
                f"{self.path} already holds a run: go on with --resume, replace it with --overwrite, or "
                "choose another --output"
            )

    def release(self, *_: object) -> None:
        """Let other processes work on the run."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    __exit__ = release

    def prepare(self, *, resume: bool, overwrite: bool) -> None:
        """Claim the directory and make it usable.

        With ``overwrite`` exactly the files of the earlier run are removed, and nothing else that lies there.
        """
        self.claim(resume=resume, overwrite=overwrite)
        if self.holds_a_run() and not resume:
            for folder in self._folders:
                if folder.exists():  # at once, so that a kill leaves no half of it
                    folder.rename(self.path / f".unfinished-removed-{folder.name}")
            for path in self._files:
                path.unlink(missing_ok=True)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for parent in (self.path, self.checkpoints):
            for unfinished in parent.glob(".unfinished-*"):
                unfinished.unlink() if unfinished.is_file() else shutil.rmtree(unfinished)

    def latest_checkpoint(self) -> Path | None:
        """Return the newest whole checkpoint, or None."""
        return next(reversed(self._whole_checkpoints()), None)

    def save_checkpoint(
        self, step: int, write: Callable[[Path], None], keep: int, accelerator: Any = ALONE
    ) -> Path:
        """Let ``write`` fill a step's checkpoint, as `write_directory`; drop all but the newest ``keep``.

        A `RunDirectoryError` says that it cannot be written (a full disk); earlier ones are as they were.
        """
        final = self.checkpoints / f"step_{step:06d}"
        try:
            write_directory(final, write, accelerator)
        except (OSError, RuntimeError) as error:  # torch.save raises both
            last = self.latest_checkpoint()
            raise RunDirectoryError(
                f"the checkpoint of step {step} cannot be written: {error}; --resume goes on from "
                f"{last.name if last else 'the start'} when there is room"
            ) from error
        if accelerator.is_main_process:
            for old in self._whole_checkpoints()[:-keep]:
                shutil.rmtree(old)
        return final

    def _whole_checkpoints(self) -> list[Path]:
        found = [path for path in self.checkpoints.glob("step_*") if path.name[5:].isdecimal()]
        return sorted(found, key=lambda path: int(path.name[5:]))


def write_directory(final: Path, write: Callable[[Path], None], accelerator: Any = ALONE) -> None:
    """Create the directory ``final`` with what ``write`` puts into it, all or nothing.

    All processes of the accelerator call, and ``write`` runs in each. Where it fails in one, all raise.
    """
    unfinished = final.parent / f".unfinished-{final.name}"

    def begin() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)

    def finish() -> None:
        for path in unfinished.rglob("*"):
            _flush(path)
        _flush(unfinished)
        replaced = final.parent / f".unfinished-replaced-{final.name}"
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():
            final.rename(replaced)
        unfinished.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
        _flush(final.parent)

    on_main(accelerator, begin)
    try:
        on_all(accelerator, lambda: write(unfinished))
        on_main(accelerator, finish)
    except Exception:
        if accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Create a file with what ``write`` puts into it, all or nothing."""
    unfinished = path.parent / f".unfinished-{path.name}"
    write(unfinished)
    _flush(unfinished)
    unfinished.replace(path)


def write_text(path: Path, text: str) -> None:
    """Write a text file, all or nothing."""
    write_file(path, lambda unfinished: unfinished.write_text(text, encoding="utf-8"))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
