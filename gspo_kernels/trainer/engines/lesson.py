"""What a teacher behind a server says of a rollout, as the loss takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.bits import NO_ID
from gspo_kernels.trainer.engines.teacher import ServedTeacher, TeacherLogprobs
from gspo_kernels.trainer.recipes.options import DistillationConfig
from gspo_kernels.trainer.rows.experience import Experience
from gspo_kernels.trainer.run.processes import on_all


def lesson_of(
    teacher: ServedTeacher,
    accelerator: Any,
    config: DistillationConfig,
    experience: Experience,
    micro_batches: Sequence[Tensor],
) -> Lesson:
    """Have the server score the rows of this process's micro-batches, and gather what all were told."""
    rows = torch.cat([experience.group_ids.new_zeros(0), *micro_batches])

    def ask() -> tuple[list[int], TeacherLogprobs]:
        return rows.tolist(), teacher.score(*experience.tokens(rows))

    shape, device = (len(experience.loss_mask), config.top_k), experience.loss_mask.device
    ids, logprobs = torch.full(shape, NO_ID, device=device), torch.zeros(shape, device=device)
    for own, said in on_all(accelerator, ask):
        places = experience.places(torch.tensor(own, dtype=torch.int64, device=device))
        ids[places], logprobs[places] = said.ids.to(device), said.logprobs.to(device)
    return Lesson(ids, logprobs, config)


class Lesson:
    """What a server's teacher says of a rollout's tokens, and what is measured of a minibatch that learns
    it.
    """

    def __init__(self, ids: Tensor, logprobs: Tensor, config: DistillationConfig) -> None:
        self._ids, self._logprobs, self._config = ids, logprobs, config
        self._sums = logprobs.new_zeros(3, dtype=torch.float64)

    def teacher(self, places: Tensor) -> gk.Teacher:
        """Return that of some tokens."""
        config = self._config
        return gk.Teacher(
            ids=self._ids[places],
            logprobs=self._logprobs[places],
            coef=config.coef,
            beta=config.beta,
            add_tail=config.add_tail,
        )

    def note(self, metrics: Mapping[str, Tensor], mask: Tensor) -> None:
        """Take the metrics of a micro-batch's loss, of the tokens in a mask."""
        count = mask.sum()
        self._sums += torch.stack([metrics["loss/divergence"], metrics["divergence"] * count, count])

    def metrics(self, accelerator: Any) -> dict[str, float]:
        """Return those of all processes' micro-batches since the last time."""
        loss, far, count = accelerator.reduce(self._sums, "sum").tolist()
        self._sums = torch.zeros_like(self._sums)
        parts = {"loss": loss / accelerator.num_processes, "divergence": far / max(count, 1.0)}
        return {f"distillation/{name}": value for name, value in parts.items()}
