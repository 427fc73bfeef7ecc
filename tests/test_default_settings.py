"""``torch.set_default_dtype`` and ``set_default_device``, which many scripts call, change no result."""

from contextlib import contextmanager

import pytest
import torch

import gspo_kernels as gk
from tests.cases import KIND, forward, generator, make_case
from tests.objectives.sample_batches import coefficients, examples, make_batch, name_of

DEFAULTS = (torch.bfloat16, torch.device("meta"))


@contextmanager
def default(setting):
    """Set the default dtype or device. On "meta" nothing can be computed, so no tensor may land there."""
    dtype = torch.get_default_dtype()
    if isinstance(setting, torch.dtype):
        torch.set_default_dtype(setting)
    else:
        torch.set_default_device(setting)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)


def losses(backend):
    """Return one call of each entry and way, by name."""
    found, fixed = {}, {"batch_invariant": backend != "reference"}
    for entry, kind in KIND.items():
        for dtype, terms in ((torch.float32, "all"), (torch.bfloat16, "on_policy")):
            case = make_case(kind, "packed", terms, dtype=dtype, lengths=(3, 1), vocabulary=21)
            linear = entry == "fused_linear_policy_loss"
            for options in ({}, {"max_chunk_bytes": 3 * 21 * 4}, fixed) if linear else ({},):
                found[f"{entry} {dtype} {terms} {options}"] = (case, entry, options)

    def call(case, entry, options):
        leaves, output = forward(case, entry, gk.GSPO(), backend, **options)
        output.loss.backward()
        gradients = [leaf.grad for leaf in leaves.values()]
        return [output.loss.detach(), output.logprobs, *gradients, *output.metrics.values()]

    return {name: lambda arguments=arguments: call(*arguments) for name, arguments in found.items()}


def other_functions():
    """Return one call of each objective, and of each function without a policy loss."""
    rng = generator(0)
    z, t, h, w = (torch.randn(*size, generator=rng) for size in ((2, 5, 9), (2, 5, 9), (2, 5, 4), (9, 4)))
    old, mask, ids = -z[..., 0].abs(), z[..., 1] > -1, z.argsort(-1)[..., :3]
    rewards, pairs, both = z[..., 2].flatten().round(), torch.arange(10) // 5, (z, t)
    found = {
        name_of(each): lambda each=each, batch=batch: [coefficients(batch, each)]
        for each in examples()
        for batch in [make_batch(each)]
    }
    found |= {
        f"rollout_weights {level} {mode}": lambda options={"level": level, "mode": mode}: [
            gk.rollout_weights(old, old - z[..., 3].abs(), loss_mask=mask, low=0.5, high=2.0, **options)
        ]
        for level in ("token", "sequence")
        for mode in ("truncate", "mask")
    }
    found |= {
        "selected": lambda: [*gk.selected_logprobs(z.bfloat16(), ids)],
        "linear selected": lambda: [*gk.linear_selected_logprobs(h, w, ids)],
        "sampling mask": lambda: [gk.sampling_mask(z, top_k=4, top_p=0.8, min_p=0.01)],
        "distillation": lambda: [gk.distillation_loss(*both).loss, gk.distillation_loss(*both, top_k=3).loss],
        "linear distillation": lambda: [gk.fused_linear_distillation_loss(h, w, h + 1, w).loss],
        "group_normalized": lambda: [gk.advantages.group_normalized(rewards, group_size=5)],
        "by ids": lambda: [gk.advantages.group_normalized(rewards, group_ids=pairs, scale="batch")],
        "off_policy_mask": lambda: [gk.off_policy_mask(old, old, z[:, 0, 0], delta=0.1)],
        "normalizer": lambda: [gk.normalizer(gk.DAPO(), mask)],
    }
    return found


@pytest.mark.parametrize("setting", DEFAULTS, ids=str)
def test_losses(setting, backend):
    assert_unchanged(losses(backend), setting)


@pytest.mark.parametrize("setting", DEFAULTS, ids=str)
def test_other_functions(setting):
    assert_unchanged(other_functions(), setting)


def assert_unchanged(calls, setting):
    for name, call in calls.items():
        expected = call()
        with default(setting):
            results = call()
        for one, other in zip(results, expected, strict=True):
            if other is None:
                assert one is None
                continue
            assert one.dtype == other.dtype and one.device == other.device, name
            assert torch.equal(one.nan_to_num(), other.nan_to_num()), name
