"""Layout conversions: exact round trips, the shift to predictions, gradients, errors, tokens of a rank."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_kernels.integrations import layouts
from tests.draws import shifted_seed

DOUBLE = torch.float64


@pytest.mark.parametrize("width", [(), (3,)])
def test_there_and_back(width):
    """Lists, nested tensors and padding on either side convert to packed rows and back without loss."""
    rng = torch.Generator().manual_seed(shifted_seed(0))
    for lengths in ([3], [2, 5, 1], [4, 0, 3], [0, 1], [1, 1, 1, 2, 7]):
        sequences = [torch.randn(length, *width, generator=rng, dtype=DOUBLE) for length in lengths]
        packed = layouts.pack(sequences)
        assert packed.cu_seqlens.dtype == torch.int32 and packed.cu_seqlens.diff().tolist() == lengths
        back = layouts.unpack(*packed)
        assert all(torch.equal(one, other) for one, other in zip(sequences, back, strict=True))

        nested = torch.nested.nested_tensor(sequences, layout=torch.jagged)
        values, offsets = layouts.from_nested(nested)
        assert torch.equal(values, packed.values) and torch.equal(offsets, packed.cu_seqlens)
        back = layouts.to_nested(*packed)
        assert back.is_nested and back.offsets().dtype == torch.int64
        assert torch.equal(back.values(), nested.values()) and torch.equal(back.offsets(), nested.offsets())

        for side, length in itertools.product(("left", "right"), (None, max(lengths) + 2)):
            padded, mask = layouts.to_padded(*packed, length=length, side=side, fill=7.0)
            assert padded.shape == (len(lengths), length or max(lengths), *width)
            for row, kept, sequence in zip(padded, mask, sequences, strict=True):
                n = len(sequence)
                here = row[len(row) - n :] if side == "left" else row[:n]
                assert torch.equal(here, sequence) and torch.equal(row[kept], sequence)
                assert (row[~kept] == 7.0).all()
            values, offsets = layouts.from_padded(padded, mask)
            assert torch.equal(values, packed.values) and torch.equal(offsets, packed.cu_seqlens)
            assert torch.equal(layouts.to_padded_like(values, mask, fill=7.0), padded)


def test_position_ids_that_restart():
    for lengths in ([3], [2, 5, 1], [1, 1, 2]):
        positions = torch.cat([torch.arange(length) for length in lengths])
        for rows in (positions, positions.unsqueeze(0)):
            offsets = layouts.offsets_from_position_ids(rows)
            assert torch.equal(offsets, layouts.offsets_of(torch.tensor(lengths)))
    assert layouts.offsets_from_position_ids(positions[:0]).tolist() == [0]


def test_a_mask_with_holes_keeps_what_it_marks():
    padded = torch.arange(12.0).view(2, 6)
    mask = torch.tensor([[0, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 1]])
    values, offsets = layouts.from_padded(padded, mask)
    assert values.tolist() == [1, 3, 4, 6, 11] and offsets.tolist() == [0, 3, 5]
    assert torch.equal(layouts.to_padded_like(values, mask), padded * mask)


@given(st.lists(st.lists(st.integers(3, 99), max_size=5), min_size=1, max_size=4).filter(any))
@settings(max_examples=25, deadline=None)
def test_labels_are_the_next_tokens(lists):
    """This holds in packed rows and with padding on either side; no label comes from the next sequence."""
    expected = [[*each[1:], -100] if each else [] for each in lists]
    ids, offsets = layouts.pack([torch.tensor(each, dtype=torch.int64) for each in lists])
    packed = layouts.to_predictions(ids, cu_seqlens=offsets, fill=-100)
    assert packed.dtype == torch.int64
    assert [each.tolist() for each in layouts.unpack(packed, offsets)] == expected
    for side in ("left", "right"):
        padded, mask = layouts.to_padded(ids, offsets, side=side, length=6)
        labels = layouts.to_predictions(padded, attention_mask=mask.long(), fill=-100)
        assert [row[kept].tolist() for row, kept in zip(labels, mask, strict=True)] == expected
        assert (labels[~mask] == -100).all()
        back = layouts.to_tokens(labels, attention_mask=mask, fill=0)
        first = mask & ~torch.nn.functional.pad(mask, (1, -1))
        assert torch.equal(back, torch.where(first, 0, padded))
    back = layouts.to_tokens(packed, cu_seqlens=offsets, fill=0)
    assert [each.tolist() for each in layouts.unpack(back, offsets)] == [
        [0, *each[1:]] if each else [] for each in lists
    ]


def test_without_an_attention_mask_a_row_is_a_sequence():
    ids = torch.arange(1, 7).view(2, 3)
    assert layouts.to_predictions(ids, fill=-100).tolist() == [[2, 3, -100], [5, 6, -100]]
    mask = torch.tensor([[False, True, True], [True, False, True]])
    assert layouts.to_predictions(mask, fill=0).dtype == torch.bool
    assert layouts.to_predictions(torch.zeros(2, 0), fill=0).shape == (2, 0)


@pytest.mark.parametrize(
    ("prompts", "responses"), [([2], [3]), ([1, 3, 2], [4, 1, 5]), ([2, 2, 1], [3, 0, 1])]
)
def test_responses_in_whole_sequences(prompts, responses):
    whole = [p + r for p, r in zip(prompts, responses, strict=True)]
    ids, offsets = layouts.pack([torch.arange(n) + 10 * i for i, n in enumerate(whole)])
    index = layouts.response_predictions(offsets, layouts.offsets_of(torch.tensor(responses)))
    labels = layouts.to_predictions(ids, cu_seqlens=offsets, fill=-100)
    expected = torch.cat([each[p:] for each, p in zip(layouts.unpack(ids, offsets), prompts, strict=True)])
    assert torch.equal(labels[index], expected)


def test_gradients_pass_through_every_bridge():
    lengths, rng = [3, 1, 4], torch.Generator().manual_seed(shifted_seed(3))
    offsets = layouts.offsets_of(torch.tensor(lengths))
    values = torch.randn(8, dtype=DOUBLE, generator=rng).requires_grad_()
    padded = torch.randn(3, 5, dtype=DOUBLE, generator=rng).requires_grad_()
    mask = torch.arange(5) < torch.tensor(lengths).unsqueeze(1)
    for bridge, given_values in (
        (lambda x: torch.cat(layouts.unpack(x, offsets)), values),
        (lambda x: layouts.to_nested(x, offsets).values(), values),
        (lambda x: layouts.from_nested(layouts.to_nested(x, offsets)).values, values),
        (lambda x: layouts.to_padded(x, offsets, side="left")[0], values),
        (lambda x: layouts.to_predictions(x, cu_seqlens=offsets, fill=0.0), values),
        (lambda x: layouts.to_tokens(x, cu_seqlens=offsets, fill=0.0), values),
        (lambda x: layouts.pack([x[:2], x[2:]]).values, values),
        (lambda x: layouts.from_padded(x, mask).values, padded),
        (lambda x: layouts.to_predictions(x, attention_mask=mask, fill=0.0), padded),
    ):
        torch.autograd.gradcheck(bridge, given_values)


OFFSETS = torch.tensor([0, 2, 5], dtype=torch.int32)
FIVE = torch.arange(5.0)
JAGGED = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layouts.offsets_of(torch.tensor([1.0])), "lengths: got torch.float32"),
        (lambda: layouts.offsets_of(torch.tensor([[1]])), "lengths: got shape"),
        (lambda: layouts.offsets_of(torch.tensor([1, -2])), "lengths: got -2"),
        (lambda: layouts.offsets_from_position_ids(torch.tensor([1, 2])), "start at 1"),
        (lambda: layouts.offsets_from_position_ids(torch.tensor([0, 2])), "position_ids: got 2 after 0"),
        (lambda: layouts.offsets_from_position_ids(torch.zeros(3, 1, 4).long()), "position_ids"),
        (lambda: layouts.pack([]), "sequences: expected at least one"),
        (lambda: layouts.pack(FIVE), "sequences: got a Tensor, expected a list"),
        (lambda: layouts.pack([FIVE, FIVE.double()]), "sequences: number 1 is torch.float64"),
        (lambda: layouts.unpack(FIVE, None), "cu_seqlens: got NoneType"),
        (lambda: layouts.unpack(FIVE, OFFSETS + 1), "cu_seqlens: starts at 1"),
        (lambda: layouts.to_nested(FIVE[:4], OFFSETS), "cu_seqlens: ends at 5"),
        (lambda: layouts.from_nested(FIVE), "nested: expected a nested tensor"),
        (lambda: layouts.from_nested(JAGGED.transpose(1, 2)), "nested: expected .* without holes"),
        (lambda: layouts.from_padded(FIVE, FIVE), "padded: got shape"),
        (lambda: layouts.from_padded(FIVE[None], FIVE), "mask: got shape"),
        (lambda: layouts.to_padded_like(FIVE, torch.ones(2, 2)), "mask: marks 4 tokens"),
        (lambda: layouts.to_padded_like(FIVE, FIVE), "mask: got shape"),
        (lambda: layouts.to_padded(FIVE, OFFSETS, length=2), "length: got 2"),
        (lambda: layouts.to_padded(FIVE, OFFSETS, side="top"), "side: got 'top'"),
        (lambda: layouts.to_predictions(FIVE, fill=0), "tokens: got shape"),
        (
            lambda: layouts.to_predictions(FIVE, cu_seqlens=OFFSETS, attention_mask=FIVE, fill=0),
            "attention_mask: goes with padded",
        ),
        (
            lambda: layouts.to_predictions(FIVE[None], attention_mask=FIVE[None] % 3, fill=0),
            "attention_mask: has holes",
        ),
        (lambda: layouts.response_predictions(OFFSETS, OFFSETS), "a response is as"),
        (lambda: layouts.response_predictions(OFFSETS, OFFSETS[:2]), "response_cu_seqlens: got"),
        (lambda: layouts.tokens_of_rank([0, 3], 0, 2), "cu_seqlens: got list"),
        (lambda: layouts.tokens_of_rank(OFFSETS + 1, 0, 2), "cu_seqlens: starts at 1"),
        (lambda: layouts.tokens_of_rank(OFFSETS, 2, 2), "rank: got 2 of 2"),
        (lambda: layouts.tokens_of_rank(OFFSETS, 0, 0), "rank: got 0 of 0"),
        (lambda: layouts.tokens_of_rank(OFFSETS, 0, 2, order="ring"), "order: got 'ring'"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@given(
    lengths=st.lists(st.integers(0, 20), max_size=6),
    ranks=st.integers(1, 5),
    order=st.sampled_from(["zigzag", "contiguous", "stream"]),
)
@settings(max_examples=60, deadline=None)
def test_every_token_has_one_rank(lengths, ranks, order):
    cu_seqlens = layouts.offsets_of(torch.tensor(lengths, dtype=torch.int64))
    parts = [layouts.tokens_of_rank(cu_seqlens, rank, ranks, order=order) for rank in range(ranks)]
    assert sorted(torch.cat([part.values for part in parts]).tolist()) == list(range(sum(lengths)))
    for part in parts:
        assert part.cu_seqlens.dtype == torch.int32 and len(part.cu_seqlens) == len(cu_seqlens)
        for i, own in enumerate(layouts.unpack(*part)):
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
    assert part.values.tolist() == positions and part.cu_seqlens.tolist() == offsets
