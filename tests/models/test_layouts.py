"""Offsets, the shift to predictions with gradients and errors, tokens of context-parallel ranks."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_kernels.models import layouts
from tests.draws import shifted_seed


@given(st.lists(st.lists(st.integers(3, 99), max_size=5), min_size=1, max_size=4).filter(any))
@settings(max_examples=25, deadline=None)
def test_labels_are_the_next_tokens(lists):
    """This holds in packed rows and with padding on either side; no label comes from the next sequence."""
    expected = [[*each[1:], -100] if each else [] for each in lists]
    lengths = torch.tensor([len(each) for each in lists])
    offsets, ids = layouts.offsets_of(lengths), torch.tensor([*chain(*lists)])
    assert offsets.dtype == torch.int32 and offsets.diff().tolist() == lengths.tolist()
    packed = layouts.to_predictions(ids, cu_seqlens=offsets, fill=-100)
    assert packed.dtype == torch.int64 and packed.tolist() == [*chain(*expected)]
    columns, lengths = torch.arange(6), lengths.unsqueeze(1)
    for mask in (columns < lengths, columns >= 6 - lengths):
        padded = torch.zeros(len(lists), 6, dtype=torch.int64).masked_scatter(mask, ids)
        labels = layouts.to_predictions(padded, attention_mask=mask.long(), fill=-100)
        assert [row[kept].tolist() for row, kept in zip(labels, mask, strict=True)] == expected
        assert (labels[~mask] == -100).all()


def test_without_an_attention_mask_a_row_is_a_sequence():
    ids = torch.arange(1, 7).view(2, 3)
    assert layouts.to_predictions(ids, fill=-100).tolist() == [[2, 3, -100], [5, 6, -100]]
    mask = torch.tensor([[False, True, True], [True, False, True]])
    assert layouts.to_predictions(mask, fill=0).dtype == torch.bool
    assert layouts.to_predictions(torch.zeros(2, 0), fill=0).shape == (2, 0)


def test_gradients_pass_through_the_shift():
    rng = torch.Generator().manual_seed(shifted_seed(3))
    offsets, mask = torch.tensor([0, 3, 4, 8]), torch.arange(5) < torch.tensor([3, 1, 4]).unsqueeze(1)
    for shape, options in (((8,), {"cu_seqlens": offsets}), ((3, 5, 2), {"attention_mask": mask})):
        values = torch.randn(shape, dtype=torch.float64, generator=rng).requires_grad_()
        torch.autograd.gradcheck(lambda x, o=options: layouts.to_predictions(x, fill=0.0, **o), values)


OFFSETS, FIVE = torch.tensor([0, 2, 5], dtype=torch.int32), torch.arange(5.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layouts.offsets_of(torch.tensor([1.0])), "lengths: got torch.float32"),
        (lambda: layouts.offsets_of(torch.tensor([[1]])), "lengths: got shape"),
        (lambda: layouts.offsets_of(torch.tensor([1, -2])), "lengths: got -2"),
        (lambda: layouts.to_predictions(FIVE, fill=0), "tokens: got shape"),
        (lambda: layouts.to_predictions(FIVE, cu_seqlens=OFFSETS + 1, fill=0), "cu_seqlens: starts at 1"),
        (lambda: layouts.to_predictions(FIVE[:4], cu_seqlens=OFFSETS, fill=0), "cu_seqlens: ends at 5"),
        (
            lambda: layouts.to_predictions(FIVE, cu_seqlens=OFFSETS, attention_mask=FIVE, fill=0),
            "attention_mask: goes with padded",
        ),
        (lambda: layouts.to_predictions(FIVE[None], attention_mask=FIVE, fill=0), "attention_mask: got"),
        (
            lambda: layouts.to_predictions(FIVE[None], attention_mask=FIVE[None] % 3, fill=0),
            "attention_mask: has holes",
        ),
        (lambda: layouts.tokens_of_rank([0, 3], 0, 2), "cu_seqlens: got list"),
        (lambda: layouts.tokens_of_rank(OFFSETS + 1, 0, 2), "cu_seqlens: starts at 1"),
        (lambda: layouts.tokens_of_rank(OFFSETS, 2, 2), "rank: got 2 of 2"),
        (lambda: layouts.tokens_of_rank(OFFSETS, 0, 0), "rank: got 0 of 0"),
        (lambda: layouts.tokens_of_rank(OFFSETS, 0, 2, order="ring"), "order: got 'ring'"),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@given(
    lengths=st.lists(st.integers(0, 20), max_size=6),
    ranks=st.integers(1, 5),
    order=st.sampled_from(["zigzag", "contiguous", "stream"]),
)
@settings(max_examples=40, deadline=None)
def test_every_token_has_one_rank(lengths, ranks, order):
    cu_seqlens = layouts.offsets_of(torch.tensor(lengths, dtype=torch.int64))
    parts = [layouts.tokens_of_rank(cu_seqlens, rank, ranks, order=order) for rank in range(ranks)]
    assert sorted(torch.cat([part.positions for part in parts]).tolist()) == list(range(sum(lengths)))
    for positions, offsets in parts:
        assert offsets.dtype == torch.int32 and len(offsets) == len(cu_seqlens)
        for i, own in enumerate(positions.split(offsets.diff().tolist())):
            assert ((own >= cu_seqlens[i]) & (own < cu_seqlens[i + 1])).all()
            assert (own.diff() > 0).all()


@pytest.mark.parametrize(
    ("order", "rank", "positions", "offsets"),
    [
        ("zigzag", 0, [0, 1, 6, 7, 8, 11], [0, 4, 4, 6]),
        ("zigzag", 1, [2, 3, 4, 5, 9, 10], [0, 4, 4, 6]),
        ("contiguous", 1, [4, 5, 6, 7, 10, 11], [0, 4, 4, 6]),
        ("stream", 1, [6, 7, 8, 9, 10, 11], [0, 2, 2, 6]),
    ],
)
def test_the_tokens_of_a_rank(order, rank, positions, offsets):
    part = layouts.tokens_of_rank(torch.tensor([0, 8, 8, 12]), rank, 2, order=order)
    assert part.positions.tolist() == positions and part.cu_seqlens.tolist() == offsets
