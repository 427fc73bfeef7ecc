"""prime-rl's hook as published after 0.9.0, and its own code where that is there."""

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.integrations import errors, hooks
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.prime_rl import PolicyLoss
from tests.draws import shifted_seed
from tests.integrations import hook_problem, peers
from tests.integrations.hook_problem import SPLITS, assert_close, expected, expected32, problem
from tests.test_docs import run

GSPO = gk.GSPO(clip_low=0.1, clip_high=0.15, aggregation="token_mean")


class LossInputs(NamedTuple):
    """The published fields; those of the sampling mask came after 0.9.0."""

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = None
    trainer_mask_logprobs: torch.Tensor | None = None
    inference_mask_logprobs: torch.Tensor | None = None


def step(
    loss_fn, given, splits=SPLITS[1], dtype=torch.float32, *, weights=None, reference=False, compute=None
):
    """Loss and gradient: every sequence alone, divided by the global number of tokens; ranks are summed."""
    gradient, total = torch.zeros_like(given.logprobs), 0.0
    tokens = int(given.mask.sum())
    for rows in splits:
        part, rows = given.part(rows, dtype), list(rows)
        logprobs = part.logprobs.requires_grad_()
        scale = None if weights is None else [*weights[rows].to(dtype)]
        reference_logprobs = [*part.reference] if reference else None
        if compute is None:
            loss = logprobs.new_zeros(())
            for i in range(len(rows)):
                inputs = LossInputs(
                    logprobs[i], part.old[i], reference_logprobs and reference_logprobs[i],
                    part.token_advantages[i], part.mask[i], scale and scale[i],
                )  # fmt: skip
                loss = loss + loss_fn(inputs).loss / tokens
        else:
            loss, _ = compute(
                [*logprobs], [*part.old], reference_logprobs, [*part.token_advantages], [*part.mask], scale,
                None, None, loss_fn, tokens, 1, 1,
            )  # fmt: skip
        loss.backward()
        total += loss.detach().double()
        gradient[rows] += logprobs.grad.double()
    return total, gradient


@pytest.mark.parametrize("objective", [GSPO, gk.GRPO(aggregation="token_mean", dual_clip=1.5)])
@pytest.mark.parametrize("splits", SPLITS)
def test_sequences_add_up_to_the_mean_over_the_batch_s_tokens(objective, splits):
    assert_close(
        lambda given: step(PolicyLoss(objective), given, splits),
        lambda given: expected(given, objective),
        lambda given: expected32(given, objective),
    )


def test_weights_scale_every_token_of_the_loss_and_of_the_kl():
    weights = 0.5 + torch.rand(
        6, 7, generator=torch.Generator().manual_seed(shifted_seed(3)), dtype=torch.float64
    )

    def terms(given):
        return {"rollout_weights": weights, "ref_logprobs": given.reference, "kl_beta": 0.1 * weights}

    for objective in (GSPO, gk.GRPO(aggregation="token_mean")):
        loss_fn = PolicyLoss(objective, kl_beta=0.1)
        assert_close(
            lambda given, loss_fn=loss_fn: step(loss_fn, given, weights=weights, reference=True),
            lambda given, objective=objective: expected(given, objective, **terms(given)),
            lambda given, objective=objective: expected32(given, objective, **terms(given)),
        )


def test_every_fitting_objective_runs_and_reports():
    given = problem()
    objectives = hook_problem.fitting("token_mean")
    assert len(objectives) >= 8
    for objective in objectives:
        part = LossInputs(given.logprobs[0], given.old[0], None, given.token_advantages[0], given.mask[0])
        loss, metrics = PolicyLoss(objective)(part)
        assert loss.ndim == 0 and loss.isfinite()
        assert all(each.ndim == 0 and not each.requires_grad for each in metrics.values())
        whole = gk.policy_loss(
            given.logprobs, given.old, given.advantages, loss_mask=given.mask, objective=objective
        )
        torch.testing.assert_close(step(PolicyLoss(objective), given, dtype=torch.float64)[0], whole.loss)


def test_a_sequence_without_tokens_has_a_zero_loss_that_can_go_backward():
    given = problem()
    logprobs = given.logprobs[5].requires_grad_()
    part = LossInputs(logprobs, given.old[5], None, given.token_advantages[5], given.mask[5])
    loss, _ = PolicyLoss()(part)
    loss.backward()
    assert loss == 0 and (logprobs.grad == 0).all()


@pytest.mark.parametrize(
    ("objective", "reason"),
    [
        (
            gk.GSPO(),
            "aggregation='sequence_mean' divides by the number of sequences, but prime-rl divides by the",
        ),
        (gk.DrGRPO(aggregation_constant=8.0), "aggregation='constant' divides"),
        (gk.AGRO(), "needs ref_logprobs and group_ids"),
    ],
)
def test_what_does_not_fit_is_refused_at_construction(objective, reason):
    with pytest.raises(IntegrationError, match=reason):
        PolicyLoss(objective)


def test_a_missing_reference_is_named():
    given = problem()
    part = LossInputs(given.logprobs[0], given.old[0], None, given.token_advantages[0], given.mask[0])
    with pytest.raises(ValueError, match="ref_logprobs: got None, but kl_beta asks"):
        PolicyLoss(kl_beta=0.1)(part)


def real(*names, **known):
    """Definitions of prime-rl's own file of losses."""
    types = ("Float", "Bool", "Int", "Any", "Loss", "LossFn", "IPOLossConfig", "CustomLossConfig")
    return peers.extract(
        peers.source("prime_rl", "prime_rl/trainer/rl/loss.py"),
        *names,
        torch=torch,
        Tensor=torch.Tensor,
        dataclass=dataclasses.dataclass,
        field=dataclasses.field,
        **dict.fromkeys(types, peers.Anything),
        **known,
    )


def has_loss_objects():
    return "class IPOLoss:" in peers.source("prime_rl", "prime_rl/trainer/rl/loss.py").read_text()


def test_inside_prime_rl_s_compute_loss():
    own = real("LossInputs", "compute_loss")
    published = [each.name for each in dataclasses.fields(own["LossInputs"])]
    assert published == [*LossInputs._fields][: 8 if has_loss_objects() else 6]
    compute, weights = own["compute_loss"], torch.linspace(0.5, 1.5, 42, dtype=torch.float64).view(6, 7)
    for options in ({}, {"reference": True}, {"weights": weights}, {"weights": weights, "reference": True}):
        loss_fn = PolicyLoss(GSPO, kl_beta=0.1 if "reference" in options else 0.0)
        want = step(loss_fn, problem(), dtype=torch.float64, **options)
        got = step(loss_fn, problem(), dtype=torch.float64, compute=compute, **options)
        torch.testing.assert_close(got, want)


def test_as_prime_rl_s_custom_loss():
    if not has_loss_objects():
        pytest.skip("this prime-rl has no loss objects")
    loss_fn = PolicyLoss(GSPO)
    own = real(
        "LossInputs", "LossOutputs", "compute_loss", "CustomLoss", import_object={"my_loss.loss": loss_fn}.get
    )
    custom = own["CustomLoss"](SimpleNamespace(import_path="my_loss.loss", kwargs={}))
    got = step(custom, problem(), dtype=torch.float64, compute=own["compute_loss"])
    torch.testing.assert_close(got, step(loss_fn, problem(), dtype=torch.float64))


@pytest.mark.parametrize(("installed", "served"), [("0.7.0", True), ("0.9.1.dev40", True), ("0.10.0", False)])
def test_versions(monkeypatch, installed, served):
    """0.9.1.dev is the main branch after 0.9.0, with another default and loss objects."""
    for module in (hooks, errors):
        monkeypatch.setattr(module, "version", lambda name: installed)
    with contextlib.nullcontext() if served else pytest.raises(IntegrationError, match="is installed"):
        PolicyLoss()


def test_it_is_one_of_prime_rl_s_loss_objects():
    """Which have ``loss`` and are not called."""
    given = problem()
    part = LossInputs(given.logprobs[0], given.old[0], None, given.token_advantages[0], given.mask[0])
    loss_fn = PolicyLoss(GSPO)
    assert torch.equal(loss_fn.loss(part).loss, loss_fn(part).loss)


@dataclasses.dataclass
class Inputs:
    """As prime-rl's own, which is a dataclass."""

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = None


def ipo(inputs):
    """Its gradient's source: the ratio of tokens whose probability moved by at most 0.3, at most 1e4."""
    logp, old = inputs.trainer_logprobs, inputs.inference_logprobs
    kept = inputs.loss_mask & ((logp.exp() - old.exp()).abs() <= 0.3)
    ratio = (logp - old).exp().clamp(max=1e4).detach()
    weights = 1.0 if inputs.loss_weights is None else inputs.loss_weights
    return -torch.where(kept, weights * inputs.advantages * ratio * logp, 0.0).sum()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("theirs", [False, True])
def test_prime_rl_s_default_from_the_parts_of_the_page(weighted, theirs):
    """The same gradients as IPO's formula, and as prime-rl's own loss; DPPO's value is another one."""
    page, reference, inputs_type = run("docs/integrations/prime_rl.md"), ipo, Inputs
    if theirs:
        if not has_loss_objects():
            pytest.skip("this prime-rl has another default")
        helpers = ("_safe_mean", "_mismatch_kl_from_log_ratio", "_capped_importance_ratio")
        own = real("LossInputs", "LossOutputs", *helpers, "IPOLoss")
        config = SimpleNamespace(eps=0.3, max_importance_ratio=1e4, adv_tau=1.0, score_centering=False)
        inputs_type, objects = own["LossInputs"], own["IPOLoss"](config)

        def reference(inputs):
            return objects.loss(inputs).loss

    rng = torch.Generator().manual_seed(shifted_seed(8))
    logprobs = -3 * torch.rand(64, generator=rng, dtype=torch.float64)
    inference = (logprobs + 0.7 * torch.randn(64, generator=rng, dtype=torch.float64)).clamp(max=-1e-3)
    inference[:2] = torch.tensor([-14.0, -1e-3], dtype=torch.float64)
    logprobs[:2] = torch.tensor([-1.5, -12.0], dtype=torch.float64)
    mask = torch.rand(64, generator=rng) > 0.2
    mask[:2] = True
    moved = (logprobs.exp() - inference.exp()).abs()[mask]
    assert bool((moved > 0.3).any()) and bool((moved <= 0.3).any())
    assert bool(
        ((logprobs - inference)[mask & ((logprobs.exp() - inference.exp()).abs() <= 0.3)] > 9.3).any()
    )
    weights = 0.5 + torch.rand(64, generator=rng, dtype=torch.float64) if weighted else None
    for advantage in (1.0, -0.5):
        gradients = []
        for loss_fn in (reference, lambda inputs: page["loss"](inputs).loss):
            leaf = logprobs.clone().requires_grad_()
            advantages = torch.full_like(leaf, advantage)
            inputs = inputs_type(leaf, inference, None, advantages, mask, weights)
            gradients.append(torch.autograd.grad(loss_fn(inputs), leaf)[0])
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-10, atol=1e-14)
