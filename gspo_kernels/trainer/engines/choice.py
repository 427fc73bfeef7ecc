"""What samples for a run, and how the policy's weights reach it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from gspo_kernels.trainer.config import TrainConfig
from gspo_kernels.trainer.engines.embedded import TransformersEngine
from gspo_kernels.trainer.engines.server import VLLMServer
from gspo_kernels.trainer.engines.teacher import ServedTeacher
from gspo_kernels.trainer.engines.vllm import VLLMEngine
from gspo_kernels.trainer.engines.weights import WeightTransfer
from gspo_kernels.trainer.input_errors import ConfigError
from gspo_kernels.trainer.rollout import RolloutEngine
from gspo_kernels.trainer.run.models import end_token_ids, padding_token_id
from gspo_kernels.trainer.run.processes import on_all, whole_weights
from gspo_kernels.trainer.updates import PolicyUpdater


def server_of(config: TrainConfig, engine: RolloutEngine | None, accelerator: Any) -> VLLMServer | None:
    """Return the server that the configuration names, which answers every process, or None.

    A `ConfigError` says that there is an ``engine`` already, an `EngineError` that the server does not serve.
    """
    server, url = _server(config, "engine"), config.engine.url
    if server is not None and engine is not None:
        raise ConfigError(f"engine.url: got {url!r} beside an engine; only one of them can sample")
    if server is not None:
        on_all(accelerator, server.check)
    return server


def teacher_of(config: TrainConfig, tokenizer: Any, model: Any, accelerator: Any) -> ServedTeacher | None:
    """Return the teacher behind the server that the configuration names, or None.

    Raises:
        EngineError: the server does not serve.
        ModelError: it has another tokenizer.
    """
    server = _server(config, "distillation")
    if server is None:
        return None
    teacher = ServedTeacher(server, config.distillation, model.get_input_embeddings().num_embeddings)
    on_all(accelerator, lambda: teacher.check(tokenizer))
    raise ConfigError(
        f"distillation.url: got {config.distillation.url!r}, expected none: no loss takes a divergence along "
        "with an objective; distillation.teacher makes advantages of a teacher's log-probs"
    )


def _server(config: TrainConfig, section: Literal["engine", "distillation"]) -> VLLMServer | None:
    options = getattr(config, section)
    if options.url is None:
        return None
    timeout, at_once = config.engine.timeout, config.rollout.batch_size
    return VLLMServer(options.url, model=options.model, timeout=timeout, at_once=at_once, section=section)


def engine_of(
    server: VLLMServer | None,
    engine: RolloutEngine | None,
    model: Any,
    tokenizer: Any,
    updater: PolicyUpdater,
    config: TrainConfig,
) -> tuple[RolloutEngine, Callable[[], AbstractContextManager[None]]]:
    """Return what samples, and a context in which it has the policy's weights of now.

    That is the server, or the engine that was given, or the model's own generation.
    """
    whole = partial(whole_weights, updater.accelerator, updater.policy)
    if engine is not None:
        return engine, whole
    end_ids = end_token_ids(model, tokenizer)
    if server is None:
        pad_id = padding_token_id(tokenizer)
        return TransformersEngine(model, end_ids, pad_id, config.rollout.batch_size), whole
    folder = Path(config.engine.weights or config.output)
    dtype = torch.bfloat16 if config.update.precision == "bf16" else torch.float32
    weights = WeightTransfer(server, updater, model, tokenizer, folder, dtype)
    return VLLMEngine(server, end_ids, model.get_input_embeddings().num_embeddings), weights
