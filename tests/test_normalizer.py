"""The divisor of a whole batch makes the gradients of its micro-batches add up to the batch's."""

import pytest
import torch

import gspo_kernels as gk

MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (gk.GSPO(), 3),
        (gk.GRPO(aggregation="token_mean"), 8),
        (gk.GRPO(aggregation="sum"), 1),
        (gk.DrGRPO(aggregation_constant=5.0), 3),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_what_is_counted(objective, expected, dtype):
    mask = MASK.to(dtype)
    assert gk.normalizer(objective, mask) == expected
    offsets = torch.tensor([0, 4, 8, 12, 16])
    assert gk.normalizer(objective, mask.flatten(), cu_seqlens=offsets) == expected
    assert gk.normalizer(objective, torch.zeros_like(mask)) == 1


def test_lengths_take_the_place_of_counted_tokens():
    lengths = torch.tensor([5.0, 7.0, 1.5, 4.0])
    assert gk.normalizer(gk.GRPO(aggregation="token_mean"), MASK, lengths=lengths) == 10.5


def test_pairs():
    advantages, groups = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])
    every = torch.ones(4, 2)
    assert gk.normalizer(gk.DPO(), every, advantages=advantages, group_ids=groups) == 2
    with pytest.raises(ValueError, match="group_ids: got None"):
        gk.normalizer(gk.DPO(), every, advantages=advantages)
    with pytest.raises(ValueError, match="advantages: GSPO counts no pairs"):
        gk.normalizer(gk.GSPO(), every, advantages=advantages)


@pytest.mark.parametrize(
    ("mask", "options", "error", "message"),
    [
        (MASK[0], {}, ValueError, "loss_mask: got shape"),
        (MASK, {"lengths": torch.ones(3)}, ValueError, "lengths: got shape"),
        (MASK * 2, {}, ValueError, "loss_mask: expected only 0 and 1"),
        (MASK.flatten(), {"cu_seqlens": torch.tensor([0, 4])}, ValueError, "cu_seqlens: ends at 4"),
        (MASK.tolist(), {}, TypeError, "loss_mask: got list"),
    ],
)
def test_refused(mask, options, error, message):
    with pytest.raises(error, match=message):
        gk.normalizer(gk.GSPO(), mask, **options)
    with pytest.raises(TypeError, match="objective: got"):
        gk.normalizer(gk.GSPO, MASK)
