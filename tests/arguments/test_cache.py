"""Calls with a cached decision return the same results."""

import inspect
import itertools

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.arguments import cache

LEAVES = {
    "fused_linear_policy_loss": "hidden",
    "linear_token_logprobs": "hidden",
    "fused_policy_loss": "logits",
    "token_logprobs": "logits",
    "policy_loss": "logprobs",
}
OPTIONS = [
    ("softcap", True), ("softcap", 1.0), ("temperature", 0), ("temperature", 2), ("ignore_index", 1.0),
    ("ignore_index", 1), ("return_entropy", True), ("return_entropy", 1), ("inplace_backward", True),
    ("memory", "most"), ("schedule", "two_pass"), ("normalizer", 2), ("normalizer", -1), ("cu_seqlens", None),
    ("objective", gk.GSPO(clip_low=0.1)), ("objective", gk.DAPO()), ("objective", gk.GSPO),
]  # fmt: skip
"""Options that a call may have in place of its own, right and wrong ones."""


def calls(function, packed, B, T):
    """Yield a right call of B sequences of T tokens, and ones that differ from it in one argument."""
    tokens, ones = ((B * T,) if packed else (B, T)), torch.ones
    values = {"logits": ones(*tokens, 3), "hidden": ones(*tokens, 2), "weight": ones(3, 2)}
    values |= {"labels": torch.zeros(tokens, dtype=torch.int64), "loss_mask": ones(tokens)}
    values |= {"logprobs": -ones(tokens), "old_logprobs": -ones(tokens), "objective": gk.GRPO()}
    values |= {"advantages": ones(B), "rollout_weights": ones(B)}
    values["cu_seqlens"] = torch.arange(B + 1) * T if packed else None
    taken = inspect.signature(getattr(gk, function)).parameters
    values = {name: value for name, value in values.items() if name in taken}
    yield values
    for name, tensor in values.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        axes = itertools.product(range(tensor.ndim), range(1, 4))
        shapes = {(*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]) for axis, size in axes}
        others = [tensor.new_zeros(shape) for shape in sorted(shapes)]
        others += [tensor.unsqueeze(0), tensor.sum(), tensor.half()]
        others += [tensor.clone().requires_grad_()] if tensor.is_floating_point() else []
        yield from (values | {name: other} for other in others)
    yield from (values | {name: value} for name, value in OPTIONS if name in taken)


def outcome(function, values):
    """Return what a function gives, its output and the gradients of that, or its error."""
    leaf, weight = values[LEAVES[function]].detach().clone(), values.get("weight")
    leaves = [leaf, *([weight] if weight is not None and weight.requires_grad else [])]
    try:
        values = values | {LEAVES[function]: leaf.requires_grad_()}
        first, *others = [x for x in getattr(gk, function)(**values)[:3] if x is not None]
        return repr([x.tolist() for x in (first, *others, *torch.autograd.grad(first.sum(), leaves))])
    except (TypeError, ValueError) as error:
        return repr(error)


@pytest.mark.parametrize("name", LEAVES)
def test_cached_decisions_keep_value_checks(name):
    """In any order of calls, right and wrong ones, of sizes that often coincide."""
    sizes = [(True, 2, 1), (True, 1, 2), (False, 2, 1), (False, 2, 2)]
    each = [call for size in sizes for call in calls(name, *size)]
    after_others = [outcome(name, call) for call in each]
    for call, got in zip(each, after_others, strict=True):
        cache._DECISIONS.clear()
        assert got == outcome(name, call), call
    errors = sum("Error" in got for got in after_others)
    assert 0.2 * len(each) < errors < 0.9 * len(each)


@pytest.mark.parametrize("function", [gk.token_logprobs, gk.fused_policy_loss])
def test_strides_are_checked_in_every_call(function):
    """Strides are no part of a signature."""
    labels, terms = torch.zeros(2, 3, dtype=torch.int64), (torch.zeros(2, 3), torch.ones(2))
    terms = terms if function is gk.fused_policy_loss else ()
    function(torch.zeros(2, 3, 5), labels, *terms, inplace_backward=True)
    with pytest.raises(ValueError, match="inplace_backward:"):
        function(torch.zeros(5).expand(2, 3, 5), labels, *terms, inplace_backward=True)


def test_the_mode_may_change_while_a_call_is_checked():
    """As another thread changes it: what the call decides is not found by calls in another mode."""
    rng = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*size, 90, generator=rng) for size in ((1, 200), (70,))]

    class Switching(gk.GRPO):
        @property
        def needs(self):
            if switches:
                gk.set_batch_invariant(switches.pop())
            return ()

    def call(objective):
        leaves, labels = [x.clone().requires_grad_() for x in inputs], torch.zeros(1, 200, dtype=torch.int64)
        options = {"objective": objective, "max_chunk_bytes": 4 * 50 * 90}
        out = gk.fused_linear_policy_loss(*leaves, labels, None, torch.ones(1), **options)
        return [x.tolist() for x in torch.autograd.grad(out.loss, leaves)]

    switches, wanted = [], {}
    for mode in (False, True):
        with gk.set_batch_invariant(mode):
            wanted[mode] = call(gk.GRPO(0.9, 9.0))
    assert wanted[True] != wanted[False]
    try:
        for mode in (False, True):
            objective = Switching(0.9, 8.0 + mode)  # not seen before, and clips nothing
            switches.append(not mode)
            with gk.set_batch_invariant(mode):
                call(objective)
            for each in (mode, not mode):
                with gk.set_batch_invariant(each):
                    assert call(objective) == wanted[each]
    finally:
        gk.set_batch_invariant(False)
    assert not switches
