"""Counts of ``normalizer``. tests/objectives adds up micro-batches with it."""

import pytest
import torch

import gspo_kernels as gk

MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
PER_TOKEN = gk.GRPO(aggregation="token_mean")
COUNTS = {gk.GSPO(): 3, PER_TOKEN: 8, gk.GRPO(aggregation="sum"): 1, gk.DrGRPO(aggregation_constant=5.0): 3}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_what_is_counted(dtype):
    mask, offsets = MASK.to(dtype), torch.tensor([0, 4, 8, 12, 16])
    for objective, expected in COUNTS.items():
        assert gk.normalizer(objective, mask) == expected
        assert gk.normalizer(objective, mask.flatten(), cu_seqlens=offsets) == expected
        assert gk.normalizer(objective, torch.zeros_like(mask)) == 1
    # lengths take the place of counted tokens
    assert gk.normalizer(PER_TOKEN, mask, lengths=torch.tensor([5.0, 7.0, 1.5, 4.0])) == 10.5
    pairs = {"advantages": torch.tensor([1.0, 0.0, 1.0, 0.0]), "group_ids": torch.tensor([0, 0, 1, 1])}
    assert gk.normalizer(gk.DPO(), torch.ones(4, 2), **pairs) == 2
