"""The way of the policy's weights to vLLM: through a directory, once after every change."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gspo_kernels.trainer.engines.vllm import Service
from gspo_kernels.trainer.input_errors import EngineError
from gspo_kernels.trainer.run.export import export_model
from gspo_kernels.trainer.run.processes import on_all, on_main, shard_again


@dataclass
class WeightTransfer:
    """Writes weights as ``from_pretrained`` reads them, and lets the service load them.

    The first process writes what all gather; all must enter. Each time the directory has a new name, so that
    a service that does not see it fails, and never loads what it has cached. One that a killed process left
    behind in a run's own directory goes when the run is resumed or replaced.

    Attributes:
        service: who gets them.
        accelerator: accelerate's.
        policy: what is trained, perhaps sharded.
        model: transformers' model inside, with adapters if there are any, which are added to its weights.
        tokenizer: written beside the weights.
        folder: where directories are made; the service must see it under the same path.
        dtype: of the weights as they are written.
        updates: says how many updates the weights had so far.
    """

    service: Service
    accelerator: Any
    policy: Any
    model: Any
    tokenizer: Any
    folder: Path
    dtype: torch.dtype
    updates: Callable[[], int]
    _sent: int | None = field(default=None, init=False)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Inside, the service has the weights of now; an `EngineError` says why it does not."""
        updates = self.updates()
        if updates != self._sent:
            self._send()
            self._sent = updates
        yield

    def _send(self) -> None:
        path = on_main(self.accelerator, self._new_directory)
        assert path is not None
        try:
            shard_again(self.policy)
            on_all(self.accelerator, lambda: self._write(path))
            on_main(self.accelerator, lambda: self.service.reload(path))
        finally:
            if self._main:
                shutil.rmtree(path, ignore_errors=True)

    @property
    def _main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    def _new_directory(self) -> Path:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = Path(tempfile.mkdtemp(prefix=".unfinished-weights-", dir=self.folder.resolve()))
            path.chmod(0o755)  # the server may belong to another user
            return path
        except OSError as error:
            raise self._unwritten(error) from error

    def _write(self, path: Path) -> None:
        own = self.model.config
        self.model.config = copy.deepcopy(own)  # writing notes in it what was written
        try:
            export_model(self.model, self.tokenizer, path, main=self._main, dtype=self.dtype)
        except (OSError, RuntimeError) as error:
            raise self._unwritten(error) from error
        finally:
            self.model.config = own

    def _unwritten(self, error: Exception) -> EngineError:
        return EngineError(
            f"engine.weights: the weights for {self.service.name} cannot be written to {self.folder}: {error}"
        )
