"""How distillation losses are called: autograd, compilers, autocast, and arguments that are refused."""

import pytest
import torch

import gspo_kernels as gk
from tests.cases import generator
from tests.test_distillation import COUNTED, Problem


def test_several_backwards_and_upstream_factors():
    for linear in (False, True):
        problem = Problem(linear=linear)
        leaves = [value.clone().requires_grad_() for value in problem.inputs.values()]
        given = dict(zip(problem.inputs, leaves, strict=True)) | problem.teacher
        function = gk.fused_linear_distillation_loss if linear else gk.distillation_loss
        out = function(**given)
        first, second = (torch.autograd.grad(3.0 * out.loss, leaves, retain_graph=True) for _ in range(2))
        (alone,) = torch.autograd.grad(function(**given).loss, leaves[:1])
        torch.testing.assert_close(first[0], 3 * alone)
        assert all((a - b).abs().max() <= 1e-6 * b.abs().max() for a, b in zip(first, second, strict=True))
        with torch.no_grad():
            assert torch.equal(function(**given).divergence, out.divergence)
        only = {**given, **{name: value.detach() for name, value in given.items() if name != "bias"}}
        if linear:
            (grad,) = torch.autograd.grad(function(**only).loss, only["bias"])
            torch.testing.assert_close(grad, first[2] / 3)


def test_the_teacher_gets_no_gradient_and_autocast_casts_both():
    problem = Problem(linear=True)
    leaves = {name: value.requires_grad_() for name, value in (problem.inputs | problem.teacher).items()}
    with torch.autocast("cpu", torch.bfloat16):
        out = gk.fused_linear_distillation_loss(**leaves)
    low = {name: value.detach().bfloat16() for name, value in leaves.items()}
    assert torch.equal(out.divergence, gk.fused_linear_distillation_loss(**low).divergence)
    out.loss.backward()
    assert {name for name, leaf in leaves.items() if leaf.grad is not None} == set(problem.inputs)


@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
def test_compiled_equals_eager(linear):
    problem = Problem(linear=linear, options="transformed", V=61)

    def step(*leaves):
        given = dict(zip(problem.inputs, leaves, strict=True)) | problem.teacher
        function = gk.fused_linear_distillation_loss if linear else gk.distillation_loss
        whole = function(**given, loss_mask=COUNTED, beta=0.3, **problem.options)
        over = function(**given, beta=1.0, top_k=4, aggregation="sequence_mean")
        return whole.loss + over.loss

    torch._dynamo.reset()
    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = [value.clone().requires_grad_() for value in problem.inputs.values()]
        loss = function(*leaves)
        loss.backward()
        results.append([loss, *(leaf.grad for leaf in leaves)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-8)


LOGITS, IDS = torch.zeros(2, 3, 9), torch.zeros(2, 3, 4, dtype=torch.int64)
WRONG = {
    "beta: got 1.5": {"beta": 1.5},
    "beta: got str": {"beta": "forward"},
    "top_k: got 10": {"top_k": 10},
    "top_k: got -1": {"top_k": -1},
    "top_k_of: got 'both'": {"top_k": 2, "top_k_of": "both"},
    "top_k_of: got 'student' without": {"top_k_of": "student"},
    "add_tail: got False, but": {"add_tail": False},
    "ids: got a tensor, expected None along with teacher_logits": {"ids": IDS},
    "teacher_logits: got None": {"teacher_logits": None},
    r"teacher_logits: got shape \(2, 3, 8\)": {"teacher_logits": torch.zeros(2, 3, 8)},
    "top_k: got 2, expected 0 along with ids": {
        "teacher_logits": None, "ids": IDS, "teacher_logprobs": IDS.float(), "top_k": 2,
    },
    "teacher_logprobs: got shape": {
        "teacher_logits": None, "ids": IDS, "teacher_logprobs": torch.zeros(2, 3, 5),
    },
    "ids: got 9": {"teacher_logits": None, "ids": IDS + 9, "teacher_logprobs": IDS.float()},
    "teacher_logit_scale or teacher_softcap: got one": {
        "teacher_logits": None, "ids": IDS, "teacher_logprobs": IDS.float(), "teacher_softcap": 2.0,
    },
    "aggregation: got 'mean'": {"aggregation": "mean"},
    "loss_mask: got shape": {"loss_mask": torch.ones(2, 4)},
    "loss_mask: expected only 0 and 1": {"loss_mask": torch.full((2, 3), 2)},
    "^teacher_temperature: got -1": {"teacher_temperature": -1.0},
    "^teacher_temperature: got shape": {"teacher_temperature": torch.ones(3)},
    "^teacher_softcap: got 0": {"teacher_softcap": 0.0},
    "temperature: expected only positive": {"temperature": torch.tensor([1.0, 0.0])},
    "inplace_backward: got int": {"inplace_backward": 1},
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message):
    with pytest.raises((TypeError, ValueError), match=message):
        gk.distillation_loss(LOGITS, **({"teacher_logits": LOGITS} | WRONG[message]))


def test_wrong_heads():
    given = {
        "hidden": torch.zeros(2, 3, 4), "weight": torch.zeros(9, 4), "teacher_hidden": torch.zeros(2, 3, 5),
        "teacher_weight": torch.zeros(9, 5),
    }  # fmt: skip
    for message, change in {
        r"teacher_weight: got shape \(8, 5\), expected \(9, 5\)": {"teacher_weight": torch.zeros(8, 5)},
        r"teacher_hidden: got shape \(2, 4, 5\)": {"teacher_hidden": torch.zeros(2, 4, 5)},
        "teacher_weight: got None": {"teacher_weight": None},
        "teacher_weight: got a tensor, expected None without": {"teacher_hidden": None, "ids": IDS,
                                                                "teacher_logprobs": IDS.float()},
        "teacher_bias: got shape": {"teacher_bias": torch.zeros(8)},
        "teacher_weight: got torch.bfloat16": {"teacher_weight": torch.zeros(9, 5).bfloat16()},
        "teacher_weight: got torch.float64 with batch_invariant": {
            "teacher_hidden": torch.zeros(2, 3, 5).double(), "teacher_weight": torch.zeros(9, 5).double(),
            "batch_invariant": True,
        },
    }.items():  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=message):
            gk.fused_linear_distillation_loss(**(given | change))


def test_gradients_keep_their_bits_in_batch_invariant_mode():
    """Whatever the chunks, and of each row whatever rows there are."""
    rng = generator(3)
    hidden, teacher = torch.randn(200, 70, generator=rng), torch.randn(200, 90, generator=rng)
    weight, teacher_weight = torch.randn(60, 70, generator=rng), torch.randn(60, 90, generator=rng)
    shown = []
    for rows, chosen in ((200, slice(None)), (33, slice(None)), (150, slice(41, 43))):
        leaves = [hidden[chosen].clone().requires_grad_(), weight.clone().requires_grad_()]
        ends = torch.tensor([0, len(leaves[0])])
        out = gk.fused_linear_distillation_loss(
            *leaves, teacher[chosen], teacher_weight, cu_seqlens=ends.int(), normalizer=7.0,
            max_chunk_bytes=rows * 60 * 8, batch_invariant=True,
        )  # fmt: skip
        shown.append((out.divergence, *torch.autograd.grad(0.3 * out.loss, leaves)))
    (whole, whole_grad, whole_weight), (parts, parts_grad, parts_weight), (few, few_grad, _) = shown
    assert torch.equal(parts, whole) and torch.equal(parts_grad, whole_grad)
    assert torch.equal(parts_weight, whole_weight)
    assert torch.equal(few, whole[41:43]) and torch.equal(few_grad, whole_grad[41:43])
