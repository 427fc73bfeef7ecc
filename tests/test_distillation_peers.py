"""The same divergences and gradients as TRL's and Liger's, and the advantages of on-policy distillation."""

import importlib.util
import math

import pytest
import torch

import gspo_kernels as gk
from tests.cases import generator
from tests.test_distillation import BETAS, Problem

TOLERANCE = {"rtol": 2e-4, "atol": 2e-6}


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is missing")


def compared(ours, theirs, names):
    """Losses, and the gradients of the student's leaves."""
    results = []
    for function in (ours, theirs):
        leaves = [value.clone().requires_grad_() for value in names]
        loss = function(*leaves)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, **TOLERANCE)


@needs("trl")
@pytest.mark.parametrize("beta", BETAS)
def test_trl(beta):
    """``ChunkedDivergenceFunction`` from hidden states, with scale and cap on each side; GKD from logits."""
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    problem = Problem(linear=True)
    hidden, weight, bias = problem.teacher.values()
    options = {"temperature": 1.3, "logit_scale": 0.7, "softcap": 9.0}
    their_options = {"teacher_logit_scale": 0.9, "teacher_softcap": 8.0}

    def ours(*own):
        return gk.fused_linear_distillation_loss(
            own[0],
            own[1],
            hidden,
            weight,
            bias=own[2],
            teacher_bias=bias,
            beta=beta,
            **options,
            **their_options,
        ).loss

    def theirs(*own):
        found, _ = ChunkedDivergenceFunction.apply(
            own[0].flatten(0, 1), *own[1:], hidden.flatten(0, 1), weight, bias, beta, 1.3, 0.7, 9.0, 0.9, 8.0
        )
        return found.mean()

    compared(ours, theirs, problem.inputs.values())
    from_logits = Problem()
    labels = torch.tensor([[1, -100, 2], [3, 4, -100]])
    (teacher_logits,) = from_logits.teacher.values()
    compared(
        lambda logits: (
            gk.distillation_loss(
                logits, teacher_logits, beta=beta, temperature=1.3, loss_mask=labels >= 0
            ).loss
        ),
        lambda logits: GKDTrainer.generalized_jsd_loss(logits, teacher_logits, labels, beta, 1.3),
        from_logits.inputs.values(),
    )


@needs("liger_kernel")
@pytest.mark.parametrize("beta", BETAS)
def test_liger(beta):
    """``LigerFusedLinearJSDLoss`` without its cross-entropy; labels mask."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    problem = Problem(linear=True)
    labels = torch.tensor([[1, -100, 2], [3, 4, -100]])
    hidden, weight, bias = problem.teacher.values()
    loss = LigerFusedLinearJSDLoss(0.0, 1.0, beta, temperature=1.3, compiled=False, chunk_size=2)

    def ours(*own):
        return gk.fused_linear_distillation_loss(
            own[0], own[1], hidden, weight, bias=own[2], teacher_bias=bias, beta=beta, temperature=1.3,
            loss_mask=labels >= 0,
        ).loss  # fmt: skip

    def theirs(*own):
        return loss(
            own[0].flatten(0, 1), own[1], hidden.flatten(0, 1), weight, labels.flatten(), own[2], bias
        )

    compared(ours, theirs, problem.inputs.values())


# --- sampled tokens


def test_advantages_are_teacher_minus_student():
    student = torch.tensor([[-1.0, -math.inf, -2.0, math.nan]], requires_grad=True)
    teacher = torch.tensor([[-0.5, -math.inf, -math.inf, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    found = gk.advantages.reverse_kl(student, teacher, loss_mask=mask, coef=2.0)
    assert found.tolist() == [[1.0, 0.0, -math.inf, 0.0]] and not found.requires_grad
    for message, arguments in {
        "teacher_logprobs: got shape": (student, teacher[:, :3]),
        "logprobs: got torch.int64": (mask, teacher),
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            gk.advantages.reverse_kl(*arguments)
    with pytest.raises(ValueError, match="loss_mask: got shape"):
        gk.advantages.reverse_kl(student, teacher, loss_mask=mask[:, :3])
    with pytest.raises(ValueError, match="coef: got 0"):
        gk.advantages.reverse_kl(student, teacher, coef=0)


def test_their_policy_gradient_is_the_reverse_kls_in_expectation():
    """Every token of a small vocabulary as a sample, weighted by its probability."""
    V, rng = 11, generator(0)
    logits = torch.randn(1, 1, V, generator=rng, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(1, 1, V, generator=rng, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(gk.distillation_loss(logits, teacher, beta=1.0).loss, logits)
    every, labels = logits.expand(1, V, V), torch.arange(V).unsqueeze(0)
    old = gk.token_logprobs(every, labels).logprobs.detach()
    advantages = gk.advantages.reverse_kl(old, gk.token_logprobs(teacher.expand(1, V, V), labels).logprobs)
    out = gk.fused_policy_loss(
        every, labels, old, advantages, rollout_weights=old.exp(), objective=gk.GRPO(aggregation="sum")
    )
    (grad,) = torch.autograd.grad(out.loss, logits)
    torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-12)
