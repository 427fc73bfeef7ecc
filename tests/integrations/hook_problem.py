"""Ragged batches for loss hooks: six sequences with holes in their masks, one empty, some of them clipped."""

from dataclasses import dataclass

import torch
from torch import Tensor

import gspo_kernels as gk
from tests import oracle
from tests.accuracy import Spread, assert_as_exact, differences
from tests.draws import shifted_seed
from tests.objectives.sample_batches import ADVANTAGES, examples, make_batch

GSPO = gk.GSPO(clip_low=0.1, clip_high=0.15)
SPLITS = ((0, 1, 2, 3, 4, 5),), ((0, 1), (2, 5, 3), (4,)), ((5,), (4, 3, 2, 1, 0))
"""Micro-batches, by sequence; one of them without a token."""


@dataclass
class Problem:
    """[B, T] in fp64; masked positions hold plain numbers, because frameworks multiply by the mask."""

    logprobs: Tensor
    old: Tensor
    mask: Tensor
    advantages: Tensor
    rollout: Tensor
    reference: Tensor

    @property
    def token_advantages(self) -> Tensor:
        return self.advantages.unsqueeze(1).expand(self.mask.shape).contiguous()

    def weights(self, high: float) -> Tensor:
        """Token-level TIS: pi_old / mu, at most ``high``."""
        return (self.old - self.rollout).exp().clamp(max=high)

    def part(self, rows, dtype=torch.float64) -> "Problem":
        rows = list(rows)
        return Problem(
            *(each[rows] if each.dtype == torch.bool else each[rows].to(dtype) for each in self.all())
        )

    def all(self):
        return self.logprobs, self.old, self.mask, self.advantages, self.rollout, self.reference


def problem(seed: int = 0) -> Problem:
    batch = make_batch(gk.GRPO(), seed=seed)
    rng = torch.Generator().manual_seed(shifted_seed(seed + 100))

    def noise() -> Tensor:
        return 0.3 * torch.randn(batch.loss_mask.shape, generator=rng, dtype=torch.float64)

    old = batch.old_logprobs.nan_to_num(-1.0)
    return Problem(
        batch.logprobs.nan_to_num(-0.5), old, batch.loss_mask, torch.tensor(ADVANTAGES, dtype=torch.float64),
        (old + noise()).clamp(max=-1e-3), old - 0.2 + noise(),
    )  # fmt: skip


def fitting(*aggregations: str) -> list:
    """Every registered objective that looks at no more than a sequence and needs nothing optional."""
    return [
        one
        for one in examples(max_scope="sequence")
        if not one.needs and (not aggregations or one.aggregation in aggregations)
    ]


def expected(given: Problem, objective, dtype=torch.float64, **terms) -> tuple[Tensor, Tensor]:
    """The whole batch's loss and its gradient, by the oracle."""
    logprobs = given.logprobs.to(dtype).requires_grad_()
    loss = oracle.policy_loss(
        logprobs, given.old.to(dtype), given.advantages.to(dtype), given.mask, objective, **terms
    )
    loss.backward()
    return loss.detach(), logprobs.grad


def expected32(given: Problem, objective, **terms) -> list[Tensor]:
    """The same in fp32: plain PyTorch's own error."""
    return [each.double() for each in expected(given, objective, torch.float32, **terms)]


def assert_close(compute, reference, plain, seeds=range(8)):
    """Loss and gradient of each problem: as exact as plain fp32."""
    kinds = [[function(problem(seed)) for seed in seeds] for function in (compute, reference, plain)]
    for name, *values in zip(("loss", "gradient"), *(zip(*kind, strict=True) for kind in kinds), strict=True):
        got, want, rough = values
        spread = Spread.of(differences(rough, want), by_row=False)
        assert_as_exact(name, differences(got, want), spread, want, torch.finfo(torch.float32).eps)
