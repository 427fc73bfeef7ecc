"""Rows in shards, in one process: combined statistics, and gradients that need no other shard."""

import itertools

import pytest
import torch

from gspo_kernels.ops.backends import load
from gspo_kernels.ops.shards import ELSEWHERE, IGNORED, put_together
from gspo_kernels.types import LogitRows, LogitTransform, RowGradients
from tests.cases import device_of
from tests.draws import shifted_seed
from tests.kernels.row_calls import PLAIN, Truth

ENDS = (0, 1, 33, 140)
TRANSFORMS = {
    "plain": PLAIN,
    "together": LogitTransform(-1.3, 4.0, 1.0, torch.tensor([[0.5, 1.0, 2.0, 1.3, 0.8, 1.1]]).expand(3, 6)),
}


def shards(logits, labels):
    """Yield the columns of each shard, and the labels as the shard sees them."""
    for start, end in itertools.pairwise(ENDS):
        here = (labels >= start) & (labels < end)
        yield logits[..., start:end], torch.where(here, labels - start, ELSEWHERE)


def in_shards(backend, logits, labels, transform, grad_logprobs, grad_entropy):
    """Return (logprobs, lse, entropy, grad) as the ranks of a group compute them."""
    device, rows = device_of(backend), load(backend)
    if transform.row_temperature is not None:
        transform = transform._replace(row_temperature=transform.row_temperature.to(device))
    pieces = [(x.to(device), y.to(device)) for x, y in shards(logits, labels)]
    found = []
    for x, y in pieces:
        own = rows.logprobs_forward(LogitRows(x, y, transform, IGNORED), True)
        found.append(own._replace(logprobs=own.logprobs.masked_fill(y == ELSEWHERE, 1.0)))
    fields = ("lse", "logprobs", "entropy")
    whole = put_together(*(torch.stack([getattr(own, field) for own in found]) for field in fields))
    grads = []
    for x, y in pieces:
        out = torch.full(x.shape, float("nan"), dtype=x.dtype, device=device)
        given = RowGradients(grad_logprobs.to(device), grad_entropy.to(device))
        rows.logprobs_backward(LogitRows(x, y, transform, IGNORED), whole, given, out, sharded=True)
        grads.append(out.cpu())
    return (*(each.cpu() for each in whole), torch.cat(grads, -1))


@pytest.mark.parametrize(
    ("dtype", "transform"),
    [(torch.float32, "plain"), (torch.bfloat16, "together"), (torch.float64, "together")],
    ids=str,
)
def test_shards_are_as_exact_as_whole_rows(backend, dtype, transform):
    transform = TRANSFORMS[transform]
    rng = torch.Generator().manual_seed(shifted_seed(7))
    drawn = (3 * torch.randn(3, 6, ENDS[-1], generator=rng, dtype=torch.float64)).to(dtype)
    labels = torch.randint(0, ENDS[-1], (3, 6), generator=rng)
    labels[0] = torch.tensor([0, 1, 32, 33, 139, 5])  # every shard's edges
    drawn[1, 0, labels[1, 0]] += 40.0  # a label that has almost all of the probability
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    upstream = [torch.randn(3, 6, generator=rng, dtype=torch.float64).to(stats) for _ in range(2)]

    truth = Truth(drawn, labels, transform, *upstream)
    got = in_shards(backend, drawn, labels, transform, *upstream)
    truth.hold(**dict(zip(("logprobs", "lse", "entropy", "grad"), got, strict=True)))
    assert bool((got[0] <= 0).all())
    with pytest.raises(
        AssertionError, match="logprobs: norm error"
    ):  # a few units in the last place are too many
        truth.hold(logprobs=got[0] * (1 + 8 * torch.finfo(stats).eps))
