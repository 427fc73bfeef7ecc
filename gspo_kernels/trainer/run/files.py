"""The directory of a run, and checkpoints that are either whole or not there.

A checkpoint is written into a hidden directory beside its final place, flushed to disk and renamed.
Whatever happens in between, the newest directory with a final name can be loaded.

The directory of a run holds a marker: nothing without one is ever deleted or written over. The process that
works on it locks the marker, and the system gives the lock up with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from gspo_kernels.trainer.input_errors import RunDirectoryError
from gspo_kernels.trainer.run.processes import ALONE, on_all, on_main

_NAME = re.compile(r"step_(\d{6,})")


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
        files = (self.config, self.metrics, self.plot, *map(self.path.joinpath, others))
        written = (*files, self.checkpoints, self.model, self.rollouts, self.trackers)
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
            for folder in (self.checkpoints, self.model, self.rollouts, self.trackers):
                if folder.exists():  # at once, so that a kill leaves no half of it
                    folder.rename(self.path / f".unfinished-removed-{folder.name}")
            for path in (self.metrics, self.plot, self.config):
                path.unlink(missing_ok=True)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for parent in (self.path, self.checkpoints):
            for unfinished in parent.glob(".unfinished-*"):
                unfinished.unlink() if unfinished.is_file() else shutil.rmtree(unfinished)

    def latest_checkpoint(self) -> Path | None:
        """Return the newest whole checkpoint, or None."""
        found = self._whole_checkpoints()
        return found[-1] if found else None

    def save_checkpoint(
        self, step: int, write: Callable[[Path], None], keep: int, accelerator: Any = ALONE
    ) -> Path:
        """Let ``write`` fill the checkpoint of ``step``; drop all but the newest ``keep``.

        As `write_directory`, in all processes.

        Raises:
            RunDirectoryError: it cannot be written (a full disk); earlier checkpoints are as they were.
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
        if not self.checkpoints.is_dir():
            return []
        found = [
            (int(m[1]), path) for path in self.checkpoints.iterdir() if (m := _NAME.fullmatch(path.name))
        ]
        return [path for _, path in sorted(found)]


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
        if final.exists():
            replaced = final.parent / f".unfinished-replaced-{final.name}"
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
            unfinished.rename(final)
            shutil.rmtree(replaced)
        else:
            unfinished.rename(final)
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
