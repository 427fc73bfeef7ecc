"""Layout bridges: there and back without loss, the shift that is promised, gradients, and clear errors."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gspo_kernels as gk
from gspo_kernels.integrations import layouts
from tests.draws import shifted_seed

LENGTHS = [[3], [2, 5, 1], [4, 0, 3], [0, 1], [1, 1, 1, 2, 7]]
DOUBLE = torch.float64


def sequences(lengths, width=(), seed=0):
    rng = torch.Generator().manual_seed(shifted_seed(seed))
    return [torch.randn(length, *width, generator=rng, dtype=DOUBLE) for length in lengths]


def restarting(lengths):
    return torch.cat([torch.arange(length) for length in lengths])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("width", [(), (3,)])
def test_there_and_back(lengths, width):
    """Lists, nested tensors, padding on either side."""
    given = sequences(lengths, width)
    packed = layouts.pack(given)
    assert packed.cu_seqlens.dtype == torch.int32 and packed.cu_seqlens.diff().tolist() == lengths
    back = layouts.unpack(*packed)
    assert all(torch.equal(one, other) for one, other in zip(given, back, strict=True))

    nested = torch.nested.nested_tensor(given, layout=torch.jagged)
    values, offsets = layouts.from_nested(nested)
    assert torch.equal(values, packed.values) and torch.equal(offsets, packed.cu_seqlens)
    back = layouts.to_nested(*packed)
    assert back.is_nested and back.offsets().dtype == torch.int64
    assert torch.equal(back.values(), nested.values()) and torch.equal(back.offsets(), nested.offsets())

    for side, length in itertools.product(("left", "right"), (None, max(lengths) + 2)):
        padded, mask = layouts.to_padded(*packed, length=length, side=side, fill=7.0)
        assert padded.shape == (len(lengths), length or max(lengths), *width)
        for row, kept, sequence in zip(padded, mask, given, strict=True):
            n = len(sequence)
            here = row[len(row) - n :] if side == "left" else row[:n]
            assert torch.equal(here, sequence) and torch.equal(row[kept], sequence)
            assert (row[~kept] == 7.0).all()
        values, offsets = layouts.from_padded(padded, mask)
        assert torch.equal(values, packed.values) and torch.equal(offsets, packed.cu_seqlens)
        assert torch.equal(layouts.to_padded_like(values, mask, fill=7.0), padded)


def test_position_ids_that_restart():
    for lengths in ([3], [2, 5, 1], [1, 1, 2]):
        positions = restarting(lengths)
        for rows in (positions, positions.unsqueeze(0)):
            offsets = layouts.offsets_from_position_ids(rows)
            assert torch.equal(offsets, layouts.offsets_of(torch.tensor(lengths)))
    assert layouts.offsets_from_position_ids(positions[:0]).tolist() == [0]


def test_a_mask_with_holes_keeps_what_it_marks():
    padded = torch.arange(12.0).view(2, 6)
    mask = torch.tensor([[0, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 1]])
    values, offsets = layouts.from_padded(padded, mask)
    assert values.tolist() == [1, 3, 4, 6, 11] and offsets.tolist() == [0, 3, 5]
    back = layouts.to_padded_like(values, mask)
    assert torch.equal(back, padded * mask)


def shifted_by_hand(lists, fill):
    return [[*each[1:], fill] if each else [] for each in lists]


IDS = st.lists(st.lists(st.integers(3, 99), max_size=5), min_size=1, max_size=4).filter(any)


@given(IDS)
@settings(max_examples=40, deadline=None)
def test_labels_are_the_next_tokens(lists):
    """In all four layouts, and nothing crosses from one sequence to the next."""
    expected = shifted_by_hand(lists, -100)
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
    response_offsets = layouts.offsets_of(torch.tensor(responses))
    index = layouts.response_predictions(offsets, response_offsets)
    labels = layouts.to_predictions(ids, cu_seqlens=offsets, fill=-100)
    expected = torch.cat([each[p:] for each, p in zip(layouts.unpack(ids, offsets), prompts, strict=True)])
    assert torch.equal(labels[index], expected)
    values = torch.arange(float(sum(responses))) + 1
    scattered = values.new_zeros(len(ids)).index_copy(0, index, values)
    assert torch.equal(scattered[index], values) and scattered.count_nonzero() == len(values)


def test_gradients_pass_through_every_bridge():
    """Each value's gradient is the weight that it met, once."""
    lengths, rng = [3, 1, 4], torch.Generator().manual_seed(shifted_seed(3))
    offsets = layouts.offsets_of(torch.tensor(lengths))
    values = torch.randn(8, dtype=DOUBLE, generator=rng).requires_grad_()
    padded = torch.randn(3, 5, dtype=DOUBLE, generator=rng).requires_grad_()
    mask = torch.arange(5) < torch.tensor(lengths).unsqueeze(1)
    bridges = (
        lambda x: torch.cat(layouts.unpack(x, offsets)),
        lambda x: layouts.to_nested(x, offsets).values(),
        lambda x: layouts.from_nested(layouts.to_nested(x, offsets)).values,
        lambda x: layouts.to_padded(x, offsets, side="left")[0],
        lambda x: layouts.to_predictions(x, cu_seqlens=offsets, fill=0.0),
        lambda x: layouts.to_tokens(x, cu_seqlens=offsets, fill=0.0),
        lambda x: x[layouts.response_predictions(offsets, layouts.offsets_of(torch.tensor([2, 0, 1])))],
    )
    for bridge in bridges:
        torch.autograd.gradcheck(bridge, values)
    torch.autograd.gradcheck(lambda x: layouts.from_padded(x, mask).values, padded)
    torch.autograd.gradcheck(lambda x: layouts.to_predictions(x, attention_mask=mask, fill=0.0), padded)
    torch.autograd.gradcheck(lambda x: layouts.pack([x[:2], x[2:]]).values, values)


def loss_and_gradient(hidden, function):
    loss = function(hidden)
    (gradient,) = torch.autograd.grad(loss, hidden)
    return loss.detach(), gradient


@pytest.mark.parametrize("schedule", ["aligned", "two_pass"])
def test_one_loss_in_every_layout(schedule):
    """From verl's nested whole sequences, padded on either side, and responses only: the same numbers."""
    prompts, responses = [2, 1, 3], [4, 2, 3]
    whole = torch.tensor(prompts) + torch.tensor(responses)
    rng = torch.Generator().manual_seed(shifted_seed(1))
    hidden = torch.randn(int(whole.sum()), 6, dtype=DOUBLE, generator=rng).requires_grad_()
    weight = torch.randn(11, 6, dtype=DOUBLE, generator=rng)
    ids = torch.randint(11, (len(hidden),), generator=rng)
    old = -2.0 - torch.rand(sum(responses), dtype=DOUBLE, generator=rng)
    advantages = torch.tensor([1.0, -1.0, 0.5], dtype=DOUBLE)
    offsets, response_offsets = (layouts.offsets_of(n) for n in (whole, torch.tensor(responses)))
    labels = layouts.to_predictions(ids, cu_seqlens=offsets, fill=-100)
    index = layouts.response_predictions(offsets, response_offsets)
    options = {"objective": gk.GSPO(clip_low=0.5, clip_high=0.5), "schedule": schedule}

    def only_responses(hidden):
        out = gk.fused_linear_policy_loss(
            hidden[index], weight, labels[index], old, advantages, cu_seqlens=response_offsets, **options
        )
        return out.loss

    def packed(hidden):
        nested = layouts.to_nested(hidden, offsets)
        values, cu_seqlens = layouts.from_nested(nested)
        mask = torch.zeros(len(ids)).index_fill(0, index, 1)
        given = old.new_full((len(ids),), torch.nan).index_copy(0, index, old)
        return gk.fused_linear_policy_loss(
            values, weight, labels, given, advantages, cu_seqlens=cu_seqlens, loss_mask=mask, **options
        ).loss

    def padded(hidden, side):
        mask = torch.zeros(len(ids)).index_fill(0, index, 1)
        given = old.new_full((len(ids),), torch.nan).index_copy(0, index, old)
        rows, attended = layouts.to_padded(hidden, offsets, side=side, length=9)
        ids_BT, given_BT, mask_BT = (layouts.to_padded_like(each, attended) for each in (ids, given, mask))
        labels_BT = layouts.to_predictions(ids_BT, attention_mask=attended, fill=-100)
        return gk.fused_linear_policy_loss(
            rows, weight, labels_BT, given_BT, advantages, loss_mask=mask_BT, **options
        ).loss

    logp = torch.log_softmax(hidden.detach() @ weight.T, -1)[index].gather(1, labels[index].unsqueeze(1))
    ratios = [
        (a - b).mean().exp()
        for a, b in zip(*(x.split(responses) for x in (logp.squeeze(1), old)), strict=True)
    ]
    by_hand = -sum(min(s * a, s.clamp(0.5, 1.5) * a) for s, a in zip(ratios, advantages, strict=True)) / 3
    expected = loss_and_gradient(hidden, only_responses)
    torch.testing.assert_close(expected[0], by_hand, rtol=1e-12, atol=1e-14)
    assert expected[1].count_nonzero() > 0
    for function in (packed, lambda x: padded(x, "left"), lambda x: padded(x, "right")):
        torch.testing.assert_close(loss_and_gradient(hidden, function), expected, rtol=1e-12, atol=1e-14)


OFFSETS = torch.tensor([0, 2, 5], dtype=torch.int32)
FIVE = torch.arange(5.0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: layouts.offsets_of(torch.tensor([1.0])), TypeError, "lengths: got torch.float32"),
        (lambda: layouts.offsets_of(torch.tensor([[1]])), ValueError, "lengths: got shape"),
        (lambda: layouts.offsets_of(torch.tensor([1, -2])), ValueError, "lengths: got -2"),
        (lambda: layouts.offsets_from_position_ids(torch.tensor([1, 2])), ValueError, "start at 1"),
        (lambda: layouts.offsets_from_position_ids(torch.tensor([0, 2])), ValueError, "ids: expected to"),
        (lambda: layouts.offsets_from_position_ids(torch.zeros(3, 1, 4).long()), ValueError, "position_ids"),
        (lambda: layouts.pack([]), ValueError, "sequences: expected at least one"),
        (lambda: layouts.pack(FIVE), TypeError, "sequences: expected a list"),
        (lambda: layouts.pack([FIVE, FIVE.double()]), ValueError, "sequences: number 1 is torch.float64"),
        (lambda: layouts.unpack(FIVE, None), TypeError, "cu_seqlens: got NoneType"),
        (lambda: layouts.unpack(FIVE, OFFSETS + 1), ValueError, "cu_seqlens: starts at 1"),
        (lambda: layouts.to_nested(FIVE[:4], OFFSETS), ValueError, "cu_seqlens: ends at 5"),
        (lambda: layouts.from_nested(FIVE), TypeError, "nested: expected a nested tensor"),
        (lambda: layouts.from_padded(FIVE, FIVE), ValueError, "padded: got shape"),
        (lambda: layouts.from_padded(FIVE[None], FIVE), ValueError, "mask: got shape"),
        (lambda: layouts.to_padded_like(FIVE, torch.ones(2, 2)), ValueError, "mask: marks 4 tokens"),
        (lambda: layouts.to_padded_like(FIVE, FIVE), ValueError, "mask: expected a tensor"),
        (lambda: layouts.to_padded(FIVE, OFFSETS, length=2), ValueError, "length: got 2"),
        (lambda: layouts.to_padded(FIVE, OFFSETS, side="top"), ValueError, "side: got 'top'"),
        (lambda: layouts.to_predictions(FIVE, fill=0), ValueError, "tokens: got shape"),
        (
            lambda: layouts.to_predictions(FIVE, cu_seqlens=OFFSETS, attention_mask=FIVE, fill=0),
            ValueError,
            "attention_mask: goes with padded",
        ),
        (
            lambda: layouts.to_predictions(FIVE[None], attention_mask=FIVE[None] % 3, fill=0),
            ValueError,
            "attention_mask: has holes",
        ),
        (lambda: layouts.response_predictions(OFFSETS, OFFSETS), ValueError, "a response is as"),
        (lambda: layouts.response_predictions(OFFSETS, OFFSETS[:2]), ValueError, "response_cu_seqlens: got"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_nested_tensors_that_are_not_whole_are_refused():
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    with pytest.raises(ValueError, match="nested"):
        layouts.from_nested(nested.transpose(1, 2))


class TestTokensOfRank:
    @given(
        lengths=st.lists(st.integers(0, 20), max_size=6),
        ranks=st.integers(1, 5),
        order=st.sampled_from(["zigzag", "contiguous", "stream"]),
    )
    @settings(max_examples=100, deadline=None)
    def test_every_token_has_one_rank(self, lengths, ranks, order):
        cu_seqlens = layouts.offsets_of(torch.tensor(lengths, dtype=torch.int64))
        parts = [layouts.tokens_of_rank(cu_seqlens, rank, ranks, order=order) for rank in range(ranks)]
        assert sorted(torch.cat([part.values for part in parts]).tolist()) == list(range(sum(lengths)))
        for part in parts:
            assert part.cu_seqlens.dtype == torch.int32 and len(part.cu_seqlens) == len(cu_seqlens)
            for i, own in enumerate(layouts.unpack(*part)):
                assert ((own >= cu_seqlens[i]) & (own < cu_seqlens[i + 1])).all()
                assert (own.diff() > 0).all()

    def test_zigzag(self):
        cu_seqlens = torch.tensor([0, 8, 8, 12])
        first, second = (layouts.tokens_of_rank(cu_seqlens, rank, 2) for rank in range(2))
        assert first.values.tolist() == [0, 1, 6, 7, 8, 11]
        assert second.values.tolist() == [2, 3, 4, 5, 9, 10]
        assert first.cu_seqlens.tolist() == second.cu_seqlens.tolist() == [0, 4, 4, 6]

    def test_other_orders(self):
        cu_seqlens = torch.tensor([0, 8, 8, 12])
        piece = layouts.tokens_of_rank(cu_seqlens, 1, 2, order="contiguous")
        assert piece.values.tolist() == [4, 5, 6, 7, 10, 11] and piece.cu_seqlens.tolist() == [0, 4, 4, 6]
        piece = layouts.tokens_of_rank(cu_seqlens, 1, 2, order="stream")
        assert piece.values.tolist() == [6, 7, 8, 9, 10, 11] and piece.cu_seqlens.tolist() == [0, 2, 2, 6]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (([0, 3], 0, 2), "cu_seqlens: got list"),
            ((torch.tensor([1, 3]), 0, 2), "cu_seqlens: starts at 1"),
            ((torch.tensor([0, 3]), 2, 2), "rank: got 2 of 2"),
            ((torch.tensor([0, 3]), 0, 0), "rank: got 0 of 0"),
        ],
    )
    def test_errors(self, arguments, message):
        with pytest.raises((TypeError, ValueError), match=message):
            layouts.tokens_of_rank(*arguments)
        with pytest.raises(ValueError, match="order: got 'ring'"):
            layouts.tokens_of_rank(torch.tensor([0, 3]), 0, 2, order="ring")
