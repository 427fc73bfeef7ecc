"""The way of the policy's weights to vLLM: through a directory, once after every change."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gspo_kernels.trainer.engines.server import VLLMServer
from gspo_kernels.trainer.input_errors import EngineError
from gspo_kernels.trainer.run.export import export_model
from gspo_kernels.trainer.run.processes import on_all, on_main, shard_again
from gspo_kernels.trainer.updates import PolicyUpdater


@dataclass
class WeightTransfer:
    """Writes weights as ``from_pretrained`` reads them, and lets the server load them.

    The first process writes what all gather; all must enter. Each time the directory has a new name, so that
    a server that does not see it fails, and never loads what it has cached. One that a killed process left
    behind in a run's own directory goes when the run is resumed or replaced.

    Attributes:
        server: who gets them.
        updater: whose weights they are.
        model: transformers' model inside, with adapters if there are any, which are added to its weights.
        tokenizer: written beside the weights.
        folder: where directories are made; the server must see it under the same path.
        dtype: of the weights as they are written.
    """

    server: VLLMServer
    updater: PolicyUpdater
    model: Any
    tokenizer: Any
    folder: Path
    dtype: torch.dtype
    _sent: int | None = field(default=None, init=False)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, the server has the weights of now; an `EngineError` says why it does not."""
        updates = self.updater.updates
        if updates != self._sent:
            self._send()
            self._sent = updates
        yield

    def _send(self) -> None:
        accelerator = self.updater.accelerator
        path = on_main(accelerator, self._new_directory)
        assert path is not None
        try:
            shard_again(self.updater.policy)
            on_all(accelerator, lambda: self._write(path))
            on_main(accelerator, lambda: self.server.reload(path))
        finally:
            if accelerator.is_main_process:
                shutil.rmtree(path, ignore_errors=True)

    def _new_directory(self) -> Path:
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            path = Path(tempfile.mkdtemp(prefix=".unfinished-weights-", dir=self.folder.resolve()))
            path.chmod(0o755)  # the server may belong to another user
        return path

    def _write(self, path: Path) -> None:
        own, main = self.model.config, self.updater.accelerator.is_main_process
        self.model.config = copy.deepcopy(own)  # writing notes in it what was written
        try:
            with self._writing():
                export_model(self.model, self.tokenizer, path, main=main, dtype=self.dtype)
        finally:
            self.model.config = own

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            raise EngineError(
                f"engine.weights: the weights for {self.server.name} cannot be written to {self.folder}: "
                f"{error}"
            ) from error
