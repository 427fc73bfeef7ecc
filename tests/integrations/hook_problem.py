"""Ragged batches for loss hooks: six sequences with holes in their masks, one empty, some of them clipped."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

import gspo_kernels as gk
from tests import oracle
from tests.accuracy import Spread, assert_as_exact, differences
from tests.draws import shifted_seed
from tests.objectives.sample_batches import ADVANTAGES, examples, make_batch

GSPO = gk.GSPO(clip_low=0.1, clip_high=0.15)
WHOLE, PARTS, REVERSED = SPLITS = ((0, 1, 2, 3, 4, 5),), ((0, 1), (2, 5, 3), (4,)), ((5,), (4, 3, 2, 1, 0))
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
    seed: int = 0

    @property
    def splits(self):
        """One of ``SPLITS``, another one for the next problem."""
        return SPLITS[self.seed % 3]

    @property
    def token_advantages(self) -> Tensor:
        return self.advantages.unsqueeze(1).expand(self.mask.shape).contiguous()

    def weights(self, high: float) -> Tensor:
        """Token-level TIS: pi_old / mu, at most ``high``."""
        return (self.old - self.rollout).exp().clamp(max=high)

    def part(self, rows, dtype=torch.float64) -> "Problem":
        values = (getattr(self, each.name)[list(rows)] for each in fields(self)[:-1])
        return Problem(*(each if each.dtype == torch.bool else each.to(dtype) for each in values))


def problem(seed: int = 0) -> Problem:
    batch = make_batch(gk.GRPO(), seed=seed)
    rng = torch.Generator().manual_seed(shifted_seed(seed + 100))

    def noise() -> Tensor:
        return 0.3 * torch.randn(batch.loss_mask.shape, generator=rng, dtype=torch.float64)

    old = batch.old_logprobs.nan_to_num(-1.0)
    return Problem(
        batch.logprobs.nan_to_num(-0.5), old, batch.loss_mask, torch.tensor(ADVANTAGES, dtype=torch.float64),
        (old + noise()).clamp(max=-1e-3), old - 0.2 + noise(), seed,
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


def judge(compute, truth, make=problem, row_dims=9, rounded_to=torch.float32):
    """Results of ``compute(problem)`` are as exact as those of ``truth(problem, dtype)`` in fp32.

    Results with ``row_dims`` dimensions or more share errors by row; ``rounded_to`` None: each its dtype.
    """
    got = [compute(make(seed)) for seed in range(8)]
    exact, plain = ([truth(make(n), dtype) for n in range(8)] for dtype in (torch.float64, torch.float32))
    for k in range(len(exact[0])):
        ours, theirs, right = ([each[k] for each in kind] for kind in (got, plain, exact))
        spread = Spread.of(differences(theirs, right), by_row=right[0].ndim >= row_dims)
        rounding = torch.finfo(rounded_to or ours[0].dtype).eps
        assert_as_exact(f"result {k}", differences(ours, right), spread, right, rounding)
