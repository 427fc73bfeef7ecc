"""Counts of ``normalizer``. tests/objectives adds up micro-batches with it."""

import pytest
import torch

import gspo_kernels as gk
from tests.cases import generator

MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]])
PER_TOKEN = gk.GRPO(aggregation="token_mean")
PER_PROMPT = gk.GRPO(aggregation="prompt_mean")
COUNTS = {gk.GSPO(): 3, PER_TOKEN: 8, gk.GRPO(aggregation="sum"): 1, gk.DrGRPO(aggregation_constant=5.0): 3}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_counts(dtype):
    mask, offsets = MASK.to(dtype), torch.tensor([0, 4, 8, 12, 16])
    for objective, expected in COUNTS.items():
        assert gk.normalizer(objective, mask) == expected
        assert gk.normalizer(objective, mask.flatten(), cu_seqlens=offsets) == expected
        assert gk.normalizer(objective, torch.zeros_like(mask)) == 1
    # lengths take the place of counted tokens
    assert gk.normalizer(PER_TOKEN, mask, lengths=torch.tensor([5.0, 7.0, 1.5, 4.0])) == 10.5
    # two prompts have tokens: of 3 + 1 and of 4; the third has none
    ids = torch.tensor([7, 3, 7, 1])
    assert gk.normalizer(PER_PROMPT, mask, group_ids=ids).tolist() == [8, 2, 8, 8]
    pairs = {"advantages": torch.tensor([1.0, 0.0, 1.0, 0.0]), "group_ids": torch.tensor([0, 0, 1, 1])}
    assert gk.normalizer(gk.DPO(), torch.ones(4, 2), **pairs) == 2


@pytest.mark.parametrize("objective", [PER_PROMPT, gk.GSPO(0.2, 0.2, aggregation="prompt_mean")])
def test_micro_batches_that_cut_prompts_add_up(objective):
    rng = generator(3)
    logp, old, ref = -torch.rand(3, *MASK.shape, generator=rng, dtype=torch.float64)
    entropy, ids = torch.rand(MASK.shape, generator=rng, dtype=torch.float64), torch.tensor([4, 4, 9, 4])
    given = {"old_logprobs": old, "loss_mask": MASK, "ref_logprobs": ref, "entropy": entropy}
    given |= {"advantages": torch.tensor([1.0, 0.5, -0.3, -2.0])}
    shared = {"kl_beta": 0.2, "entropy_coef": 0.1, "objective": objective}
    whole = gk.policy_loss(logp, **given, **shared, group_ids=ids).loss
    divisors = gk.normalizer(objective, MASK, group_ids=ids)
    parts = [slice(0, 1), slice(1, 3), slice(3, 4)]
    each = [{name: value[part] for name, value in given.items()} for part in parts]
    losses = [
        gk.policy_loss(logp[part], **terms, **shared, normalizer=divisors[part]).loss
        for part, terms in zip(parts, each, strict=True)
    ]
    assert sum(losses).item() == pytest.approx(whole.item(), rel=1e-12)
