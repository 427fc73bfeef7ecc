"""A call that looks like an earlier one is not checked again: what it gives must be the same."""

import math
import random

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import signature
from tests.cases import shifted_seed


def sized(template, B, T):
    """Return the arguments of a template for B sequences of T tokens."""
    packed, V, H, given = template
    tokens = (B * T,) if packed else (B, T)
    shapes = {"hidden": (*tokens, H), "weight": (V, H), "labels": tokens, "old_logprobs": tokens}
    by_tokens = {"loss_mask", "token_weights"} | given.get("by_tokens", set())
    for name in given["tensors"]:
        shapes[name] = tokens if name in by_tokens else (B,)
    values = {name: torch.ones(shape) for name, shape in shapes.items()}
    values["labels"] = torch.zeros(tokens, dtype=torch.int64)
    values["cu_seqlens"] = torch.arange(B + 1) * T if packed else None
    values["old_logprobs"] = None if given["on_policy"] else -values["old_logprobs"]
    return values | given["options"]


def draw(rng):
    """Draw a call of small sizes, which often coincide, and calls like it: of other numbers of tokens or
    sequences, and with another shape, dtype, option or need of a gradient of one argument.
    """
    optional = [name for name in ("loss_mask", "token_weights", "rollout_weights") if rng.random() < 0.3]
    options = {"objective": rng.choice([gk.GSPO(), gk.GRPO(), gk.Linear(), gk.CISPO()])}
    options["skip_inactive"] = rng.choice(["backward", "none", "all"])
    options |= {"kl_beta": rng.choice([0, 0.1])} if rng.random() < 0.2 else {}
    by_tokens = {name for name in ("advantages", "rollout_weights") if rng.random() < 0.5}
    given = {"tensors": ["advantages", *optional], "options": options, "by_tokens": by_tokens}
    given["on_policy"] = rng.random() < 0.2
    template = rng.random() < 0.5, rng.randint(1, 4), rng.randint(1, 4), given
    B, T = rng.randint(1, 4), rng.choice([1, 1, 2, 3])
    calls = [sized(template, B, T), sized(template, B, T + 1), sized(template, B + 1, T)]
    for _ in range(6):
        values = sized(template, B, rng.choice([T, T + 1, T + 2]))
        name = rng.choice([name for name, value in values.items() if isinstance(value, torch.Tensor)])
        change = rng.choice(["size", "dtype", "ndim", "gradient", "option"])
        tensor = values[name]
        if change == "size":
            other = list(tensor.shape)
            other[rng.randrange(len(other))] = rng.randint(1, 6)
            values[name] = tensor.new_zeros(other)
        elif change == "ndim":
            values[name] = rng.choice([tensor.unsqueeze(0), tensor.sum()])
        elif change == "dtype":
            values[name] = tensor.half()
        elif change == "gradient":
            values["weight"].requires_grad_()
        else:
            values |= rng.choice(
                [
                    {"softcap": True},
                    {"softcap": 1.0},
                    {"temperature": 0},
                    {"temperature": 2},
                    {"ignore_index": 1.0},
                    {"ignore_index": 1},
                    {"memory": "most"},
                    {"schedule": "two_pass"},
                    {"objective": gk.GSPO(clip_low=0.1)},
                    {"objective": gk.DAPO()},
                    {"objective": gk.GSPO},
                    {"logits_dtype": 1},
                ]
            )
        calls.append(values)
    return calls


def outcome(values):
    """Return what a call gives: loss and gradients, or its error."""
    hidden, weight = values["hidden"].detach(), values["weight"]
    leaves = [hidden, *([weight] if weight.requires_grad else [])]
    values = values | {"hidden": hidden.requires_grad_() if hidden.is_floating_point() else hidden}
    try:
        loss = gk.fused_linear_policy_loss(**values).loss
        return [x.tolist() for x in (loss, *torch.autograd.grad(loss, leaves))]
    except (TypeError, ValueError) as error:
        return repr(error)


def test_calls_that_look_alike_are_checked_as_if_they_were_the_first():
    """In any order of calls, right and wrong ones; some right ones are indeed recalled."""
    rng = random.Random(shifted_seed(0))
    calls = [call for _ in range(60) for call in draw(rng)]
    signature._DECISIONS.clear()
    after_others = [outcome(values) for values in calls]
    assert 60 < len(signature._DECISIONS) < 300
    errors = 0
    for values, got in zip(calls, after_others, strict=True):
        signature._DECISIONS.clear()
        want = outcome(values)
        assert got == want or repr(got) == repr(want), values
        errors += isinstance(want, str)
    assert 100 < errors < 400


def test_options_of_an_objective_tell_calls_apart():
    """A ratio of e is clipped by one objective, and not by another one of its class."""
    weight, labels = torch.zeros(2, 3), torch.zeros(1, 2, dtype=torch.int64)
    old = torch.full((1, 2), -math.log(2) - 1)
    losses = []
    for clip_high in (0.5, 9.0, 0.5):
        hidden = torch.ones(1, 2, 3, requires_grad=True)
        objective = gk.GSPO(clip_high=clip_high)
        loss = gk.fused_linear_policy_loss(
            hidden, weight, labels, old, torch.ones(1), objective=objective
        ).loss
        losses.append(loss.item())
    assert losses == pytest.approx([-1.5, -math.e, -1.5])


def test_only_so_many_decisions_are_kept(monkeypatch):
    monkeypatch.setattr(signature, "_MAX_DECISIONS", 3)
    signature._DECISIONS.clear()
    for softcap in range(1, 9):
        gk.linear_token_logprobs(
            torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=torch.int64), softcap=softcap
        )
    assert len(signature._DECISIONS) <= 3


@pytest.mark.parametrize("sizes", [(3, 4), (9, 9), (20, 1)])
def test_the_number_of_tokens_is_no_part_of_a_signature(sizes):
    """Packed calls of other numbers of tokens find one decision."""
    signature._DECISIONS.clear()
    for tokens in (7, 30, 31, 100):
        gk.linear_token_logprobs(
            torch.ones(tokens, sizes[0] + 200), torch.ones(sizes[1] + 300, sizes[0] + 200),
            torch.zeros(tokens, dtype=torch.int64),
        )  # fmt: skip
    assert len(signature._DECISIONS) == 1
