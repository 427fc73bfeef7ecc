"""A call that looks like an earlier one is not checked again: what it gives must be the same."""

import inspect
import random

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import signature
from tests.cases import shifted_seed

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
    ("memory", "most"), ("schedule", "two_pass"), ("normalizer", 2), ("normalizer", -1),
    ("objective", gk.GSPO(clip_low=0.1)), ("objective", gk.GSPO(clip_high=9.0)), ("objective", gk.DAPO()),
    ("objective", gk.GSPO), ("logits_dtype", 1),
]  # fmt: skip
"""Options that a call may have in place of its own, right and wrong ones."""

HIDDEN = torch.randn(1, 200, 90, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(70, 90, generator=torch.Generator().manual_seed(1))


def sized(function, template, B, T):
    """Return those arguments of a template that a function takes, for B sequences of T tokens."""
    packed, V, H, given = template
    tokens = (B * T,) if packed else (B, T)
    shapes = {"hidden": (*tokens, H), "weight": (V, H), "logits": (*tokens, V), "logprobs": tokens}
    shapes |= {"labels": tokens, "old_logprobs": tokens}
    by_tokens = {"loss_mask", "token_weights", "entropy"} | given.get("by_tokens", set())
    for name in given["tensors"]:
        shapes[name] = tokens if name in by_tokens else (B,)
    values = {name: torch.ones(shape) for name, shape in shapes.items()}
    values["labels"] = torch.zeros(tokens, dtype=torch.int64)
    values["cu_seqlens"] = torch.arange(B + 1) * T if packed else None
    values["old_logprobs"] = None if given["on_policy"] else -values["old_logprobs"]
    parameters = inspect.signature(getattr(gk, function)).parameters
    return {name: value for name, value in (values | given["options"]).items() if name in parameters}


def draw(rng, function):
    """Draw a call of small sizes, which often coincide, and calls like it: of other numbers of tokens or
    sequences, and with another shape, dtype, option or need of a gradient of one argument.
    """
    names = ("loss_mask", "token_weights", "rollout_weights", "entropy")
    optional = [name for name in names if rng.random() < 0.3]
    options = {"objective": rng.choice([gk.GSPO(), gk.GRPO(), gk.Linear(), gk.CISPO()])}
    options["skip_inactive"] = rng.choice(["backward", "none", "all"])
    options |= {"kl_beta": rng.choice([0, 0.1])} if rng.random() < 0.2 else {}
    by_tokens = {name for name in ("advantages", "rollout_weights") if rng.random() < 0.5}
    given = {"tensors": ["advantages", *optional], "options": options, "by_tokens": by_tokens}
    given["on_policy"] = rng.random() < 0.2
    template = rng.random() < 0.5, rng.randint(1, 4), rng.randint(1, 4), given
    B, T = rng.randint(1, 4), rng.choice([1, 1, 2, 3])
    calls = [sized(function, template, *size) for size in ((B, T), (B, T + 1), (B + 1, T))]
    for _ in range(6):
        values = sized(function, template, B, rng.choice([T, T + 1, T + 2]))
        name = rng.choice([name for name, value in values.items() if isinstance(value, torch.Tensor)])
        change = rng.choice(["size", "dtype", "ndim", "gradient", "absence", "option"])
        tensor = values[name]
        if change == "size":
            other = list(tensor.shape)
            other[rng.randrange(len(other))] = rng.randint(1, 6)
            values[name] = tensor.new_zeros(other)
        elif change == "ndim":
            values[name] = rng.choice([tensor.unsqueeze(0), tensor.sum()])
        elif change == "dtype":
            values[name] = tensor.half()
        elif change == "absence":
            values[name] = None if name in optional else tensor
        elif change == "gradient" and tensor.is_floating_point():
            tensor.requires_grad_()
        else:
            taken = inspect.signature(getattr(gk, function)).parameters
            values |= rng.choice([{name: value} for name, value in OPTIONS if name in taken])
        calls.append(values)
    return calls


def outcome(function, values):
    """Return what a function gives, its output and the gradients of that, or its error."""
    leaf, weight = values[LEAVES[function]].detach().clone(), values.get("weight")
    leaves = [leaf, *([weight] if weight is not None and weight.requires_grad else [])]
    values = values | {LEAVES[function]: leaf.requires_grad_() if leaf.is_floating_point() else leaf}
    try:
        first, *others = [x for x in getattr(gk, function)(**values)[:3] if x is not None]
        return [x.tolist() for x in (first, *others, *torch.autograd.grad(first.sum(), leaves))]
    except (TypeError, ValueError) as error:
        return repr(error)


@pytest.mark.parametrize("name", LEAVES)
def test_calls_that_look_alike_are_checked_anew(name):
    """In any order of calls, right and wrong ones; some right ones are indeed recalled."""
    rng = random.Random(shifted_seed(0))
    calls = [call for _ in range(60) for call in draw(rng, name)]
    signature._DECISIONS.clear()
    after_others = [outcome(name, values) for values in calls]
    assert 60 < len(signature._DECISIONS) < 300
    errors = 0
    for values, got in zip(calls, after_others, strict=True):
        signature._DECISIONS.clear()
        want = outcome(name, values)
        assert got == want or repr(got) == repr(want), values
        errors += isinstance(want, str)
    assert 100 < errors < 480


def test_only_so_many_decisions_are_kept(monkeypatch):
    monkeypatch.setattr(signature, "_MAX_DECISIONS", 3)
    signature._DECISIONS.clear()
    for softcap in range(1, 9):
        gk.linear_token_logprobs(
            torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=torch.int64), softcap=softcap
        )
    assert len(signature._DECISIONS) <= 3


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

    class Switching(gk.GRPO):
        @property
        def needs(self):
            if switches:
                gk.set_batch_invariant(switches.pop())
            return ()

    def call():
        hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
        labels = torch.zeros(1, 200, dtype=torch.int64)
        options = {"objective": Switching(0.9, 9.0), "max_chunk_bytes": 4 * 50 * 90}
        out = gk.fused_linear_policy_loss(hidden, weight, labels, None, torch.ones(1), **options)
        return [x.tolist() for x in torch.autograd.grad(out.loss, (hidden, weight))]

    switches, wanted = [], {}
    try:
        for mode in (False, True):
            with gk.set_batch_invariant(mode):
                wanted[mode] = call()
        for mode in (False, True):
            signature._DECISIONS.clear()
            switches.append(not mode)
            with gk.set_batch_invariant(mode):
                call()
            for each in (mode, not mode):
                with gk.set_batch_invariant(each):
                    assert call() == wanted[each]
    finally:
        gk.set_batch_invariant(False)
    assert wanted[True] != wanted[False] and not switches
