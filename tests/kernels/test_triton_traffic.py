"""How often the kernels read and write each logit, counted in the interpreter's loads and stores.

An access counts where its mask lets it through. That says what the kernels ask for: whether a second walk
of a row is served by a cache is for a device to measure.
"""

import math

import pytest
import torch

pytest.importorskip("triton")

from gspo_kernels import kernels
from gspo_kernels.ops.selected import SelectedGradients, score, write_gradient
from gspo_kernels.types import LogitTransform, RatioClip, Shard
from tests.kernels.accesses import counted

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="accesses are counted under the interpreter"
)

GSPO = RatioClip(math.log(1 - 3e-4), math.log(1 + 4e-4), math.inf, False, "sequences", 1.0)
PLAIN = LogitTransform()
IGNORE = -100
V = 4096 * 2 + 77


@pytest.fixture(params=(torch.bfloat16, torch.float32))
def batch(request):
    logits = torch.randn(2, 3, V).to(request.param)
    labels = torch.tensor([[0, V - 1, IGNORE], [5000, IGNORE, 4096]])
    return logits, labels


COUNTED = [1, 1, 0, 1, 0, 1]


def walks(traffic, gradients=0):
    """How often the folds walk each row of logits, besides ``gradients`` that read each logit once.

    Of 16-bit rows, two neighbouring threads ask for the 16 bytes of memory that they share. The ends of a row
    nobody shares.
    """
    reads = traffic.reads[0].view(6, -1) - torch.tensor(gradients).view(-1, 1)
    found = reads[:, 0]
    most = 2 if traffic.tensors[0].element_size() == 2 else 1
    assert (reads >= found[:, None]).all() and (reads <= most * found[:, None]).all()
    assert (reads[:, -1] == found).all()
    return found.tolist()


def test_the_forward_reads_each_counted_logit_once(batch):
    logits, labels = batch
    with counted(logits) as traffic:
        kernels.logprobs_forward(logits, labels, PLAIN, ignore_index=IGNORE, entropy=True)
    assert walks(traffic) == COUNTED
    assert traffic.per_row(traffic.writes, 0) == [0] * 6


def test_the_sequence_forward_reads_each_counted_logit_once(batch):
    logits, labels = batch
    old = torch.zeros(2, 3)
    with counted(logits, old) as traffic:
        kernels.sequence_ratio_forward(
            logits,
            labels,
            old,
            torch.ones(2),
            GSPO,
            PLAIN,
            ignore_index=IGNORE,
            weights=None,
            lengths=None,
            normalizer=None,
            cu_seqlens=None,
        )
    assert walks(traffic) == COUNTED
    assert traffic.reads[1].tolist() == COUNTED
    assert traffic.per_row(traffic.writes, 0) == [0] * 6


@pytest.mark.parametrize("in_place", (False, True))
def test_the_backward_reads_once_and_writes_once(batch, in_place):
    logits, labels = batch
    stats = kernels.logprobs_forward(logits, labels, PLAIN, ignore_index=IGNORE, entropy=False)
    grad = torch.tensor([[1.0, 0.0, 1.0], [-1.0, 0.0, 2.0]])
    out = logits if in_place else torch.empty_like(logits)
    with counted(logits, out) as traffic:
        kernels.logprobs_backward(
            logits, labels, stats, grad, None, None, PLAIN, ignore_index=IGNORE, out=out
        )
    # Row 1 has no gradient: written, not read, like the masked rows.
    assert traffic.per_row(traffic.reads, 0) == [1, 0, 0, 1, 0, 1]
    assert traffic.per_row(traffic.writes, 1) == [1] * 6


@pytest.mark.parametrize("in_place", (False, True))
def test_forward_and_gradient_walk_twice_and_write_once(batch, in_place):
    """The second walk over a row is meant for the cache; rows without gradient are walked once."""
    logits, labels = batch
    coefficients = torch.tensor([[1.0, 0.0, 1.0], [-1.0, 0.0, 2.0]])
    out = logits if in_place else torch.empty_like(logits)
    with counted(logits, out) as traffic:
        kernels.logprobs_and_grad(logits, labels, coefficients, PLAIN, ignore_index=IGNORE, out=out)
    assert walks(traffic, gradients=[1, 0, 0, 1, 0, 1]) == COUNTED
    assert traffic.per_row(traffic.writes, 1) == [1] * 6


def test_a_sampling_mask_adds_its_words(batch):
    """A 32nd of the elements, and no logit is read twice."""
    logits, labels = batch
    kept = torch.full((2, 3, -(-V // 32)), -1, dtype=torch.int32)
    masked = PLAIN._replace(kept=kept)
    with counted(logits, kept) as traffic:
        stats = kernels.logprobs_forward(logits, labels, masked, ignore_index=IGNORE, entropy=True)
    assert walks(traffic) == COUNTED
    assert (traffic.reads[1].view(6, -1)[torch.tensor(COUNTED) == 1] > 0).all()
    out, grad = torch.empty_like(logits), torch.ones(2, 3)
    with counted(logits, out) as traffic:
        kernels.logprobs_backward(
            logits, labels, stats, grad, None, None, masked, ignore_index=IGNORE, out=out
        )
    assert traffic.per_row(traffic.reads, 0) == COUNTED
    assert traffic.per_row(traffic.writes, 1) == [1] * 6


@pytest.mark.parametrize("K", (2, 20, 1024))
def test_more_ids_read_no_more_logits(batch, K):
    """By the kernels; K logits and K gradients beside them are gathered and scattered."""
    logits, _ = batch
    ids = torch.randint(0, V, (2, 3, K))
    ids[0, 2] = -100
    rows = [1, 1, 0, 1, 1, 1]
    with counted(logits) as traffic:
        found = score(logits, ids, "triton", PLAIN, False, Shard())
    assert walks(traffic) == rows
    out, grads = torch.empty_like(logits), SelectedGradients(torch.ones(2, 3, K), torch.ones(2, 3))
    with counted(logits, out) as traffic:
        write_gradient(out, logits, ids, found, grads, "triton", PLAIN, False, Shard())
    assert traffic.per_row(traffic.reads, 0) == rows
    assert traffic.per_row(traffic.writes, 1) == [1] * 6


@pytest.mark.parametrize("beta", (0.0, 0.3, 1.0))
def test_both_sides_of_a_divergence_are_read_once_in_the_backward(batch, beta):
    """The forward's second walk is meant for the cache."""
    logits, labels = batch
    teacher, out = logits.flip(0).clone(), torch.empty_like(logits)
    given = (logits, teacher, labels, PLAIN, PLAIN, beta)
    with counted(logits, teacher) as traffic:
        known = kernels.divergence(*given, ignore_index=IGNORE, known=None, grad=None, out=None)
    twice = [2 * row for row in COUNTED]
    assert [traffic.per_row(traffic.reads, side) for side in range(2)] == [twice, twice]
    grad = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.5]])
    moving = [row * int(factor != 0) for row, factor in zip(COUNTED, grad.flatten().tolist(), strict=True)]
    with counted(logits, teacher, out) as traffic:
        kernels.divergence(*given, ignore_index=IGNORE, known=known, grad=grad, out=out)
    assert [traffic.per_row(traffic.reads, side) for side in range(2)] == [moving, moving]
    assert traffic.per_row(traffic.writes, 2) == [1] * 6


def test_scaling_by_one_touches_nothing():
    values = torch.randn(20000)
    with counted(values) as traffic:
        kernels.scale_(values, torch.tensor(1.0))
    assert traffic.reads[0].sum() == 0 and traffic.writes[0].sum() == 0
    with counted(values) as traffic:
        kernels.scale_(values, torch.tensor(0.5))
    assert (traffic.reads[0] == 1).all() and (traffic.writes[0] == 1).all()
