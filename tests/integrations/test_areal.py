"""AReaL's hook as published in 1.0.4 (wheel of the package registry), and its own loss where it is there."""

import inspect
from argparse import Namespace
from dataclasses import dataclass

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.integrations.areal import PolicyLoss, RolloutCorrection
from gspo_kernels.integrations.errors import IntegrationError
from tests.cases import offsets
from tests.integrations import hook_problem, peers
from tests.integrations.hook_problem import GSPO, SPLITS, assert_close, expected, expected32, problem


def data_of(part, packed) -> dict:
    """What the engine passes: packed without padding (here full rows), or padded."""
    data = {
        "logprobs": part.rollout, "prox_logp": part.old, "advantages": part.token_advantages,
        "loss_mask": part.mask.to(part.old.dtype),
    }  # fmt: skip
    if packed:
        data = {name: value.flatten() for name, value in data.items()}
        data["cu_seqlens"] = offsets((part.mask.shape[1],) * part.mask.shape[0])
    return data


def step(loss_fn, given, splits=SPLITS[1], dtype=torch.float32, *, packed=True, weight=None):
    """Loss and gradient as ``train_batch`` adds them up: every micro-batch weighs ``weight`` of the sum."""
    weight = loss_fn.weight if weight is None else weight
    data = [data_of(given.part(rows, dtype), packed) for rows in splits]
    total_weight = sum(weight(each) for each in data)
    gradient, total = torch.zeros_like(given.logprobs), 0.0
    for rows, each in zip(splits, data, strict=True):
        if weight(each) == 0:
            continue
        logprobs = given.part(rows, dtype).logprobs.requires_grad_()
        scores = logprobs.flatten() if packed else logprobs
        extra = {"vocab_min_logits": scores.detach(), "vocab_max_logits": scores.detach()}
        loss = loss_fn(scores, -scores, each, **extra) * (weight(each) / total_weight)
        loss.backward()
        total += loss.detach().double()
        gradient[list(rows)] += logprobs.grad.double()
    return total, gradient


def test_the_published_signature():
    assert [*inspect.signature(PolicyLoss()).parameters] == [
        "logprobs", "entropy", "input_data", "vocab_min_logits", "vocab_max_logits",
    ]  # fmt: skip
    assert [*inspect.signature(PolicyLoss().weight).parameters] == ["input_data"]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize(
    "objective",
    [
        GSPO,
        gk.GRPO(dual_clip=1.5),
        gk.GRPO(aggregation="token_mean"),
        gk.GRPO(aggregation="sequence_mean_token_sum"),
    ],
)
def test_any_split_adds_up(objective, splits, packed):
    assert_close(
        lambda given: step(PolicyLoss(objective), given, splits, packed=packed),
        lambda given: expected(given, objective),
        lambda given: expected32(given, objective),
    )


def test_the_correction_weighs_the_policy_term():
    loss_fn = PolicyLoss(GSPO, correction=RolloutCorrection(high=1.1))
    assert_close(
        lambda given: step(loss_fn, given),
        lambda given: expected(given, GSPO, rollout_weights=given.weights(1.1)),
        lambda given: expected32(given, GSPO, rollout_weights=given.weights(1.1)),
    )


def test_every_fitting_objective_splits():
    given = problem()
    for objective in hook_problem.fitting():
        whole = step(PolicyLoss(objective), given, SPLITS[0], torch.float64)
        parts = step(PolicyLoss(objective), given, SPLITS[1], torch.float64)
        # AReaL's weights are fp32
        for got, want, least in zip(parts, whole, (1e-6, 1e-9), strict=True):
            # parts of a loss cancel, those of a gradient lie side by side
            torch.testing.assert_close(got, want, rtol=1e-6, atol=least, msg=str(objective))


def test_counting_tokens_instead_of_sequences_would_be_wrong():
    def tokens(data):
        return data["loss_mask"].count_nonzero()

    errors = []
    for seed in range(8):  # in one batch the parts may count as many tokens as their sequences would
        given = problem(seed)
        right, wrong = (step(PolicyLoss(GSPO), given, SPLITS[1], weight=each)[0] for each in (None, tokens))
        torch.testing.assert_close(right, expected(given, GSPO)[0])
        errors.append(float((wrong - right).abs()))
    assert max(errors) > 1e-3


def test_one_advantage_per_sequence_is_the_mean_of_its_tokens():
    given = problem()
    data = data_of(given, True)
    data["advantages"] = data["advantages"] + torch.linspace(-1, 1, 42).double()
    loss = PolicyLoss(GSPO)(given.logprobs.flatten(), given.logprobs.flatten(), data)
    varying = torch.where(given.mask, data["advantages"].view(6, 7), 0.0)
    given.advantages = varying.sum(1) / given.mask.sum(1).clamp(min=1)
    torch.testing.assert_close(loss, expected(given, GSPO)[0])


def test_old_logprobs_are_the_rollout_s_where_there_are_no_proximal_ones():
    given = problem()
    data = data_of(given, True)
    data["prox_logp"] = None
    loss = PolicyLoss(GSPO)(given.logprobs.flatten(), given.logprobs.flatten(), data)
    given.old = given.rollout
    torch.testing.assert_close(loss, expected(given, GSPO)[0])


def test_metrics_are_logged_as_numbers():
    seen, given = [], problem()
    step(PolicyLoss(GSPO, log=seen.append), given, SPLITS[0])
    (metrics,) = seen
    assert {"ratio/min", "clip_fraction/tokens", "entropy", "vocab_min_logits", "vocab_max_logits"} <= {
        *metrics
    }
    assert all(type(value) is float for value in metrics.values())


def test_wrong_setups_are_refused():
    given = problem()
    data = data_of(given, True)
    call = (given.logprobs.flatten(), given.logprobs.flatten())
    with pytest.raises(IntegrationError, match="KLCov looks at a whole batch, but AReaL"):
        PolicyLoss(gk.KLCov())
    with pytest.raises(TypeError, match="log: got str"):
        PolicyLoss(log="stats")
    with pytest.raises(ValueError, match="teacher_logp: distillation is not part"):
        PolicyLoss()(*call, data | {"teacher_logp": data["logprobs"]})
    with pytest.raises(ValueError, match="prox_logp: got None, but the correction needs it"):
        PolicyLoss(correction=RolloutCorrection(high=2.0))(*call, data | {"prox_logp": None})


REJECTION = {"low": 0.9, "high": 1.2}


@pytest.mark.parametrize(
    ("objective", "correction", "options"),
    [
        (
            gk.GSPO(clip_low=0.1, clip_high=0.15, aggregation="token_mean"), None,
            {"eps_clip": 0.1, "eps_clip_higher": 0.15, "importance_sampling_level": "sequence"},
        ),
        (gk.GRPO(aggregation="token_mean"), None, {"eps_clip": 0.2}),
        (
            gk.GRPO(aggregation="token_mean"), RolloutCorrection(**REJECTION),
            {"eps_clip": 0.2, "action": "clamp"},
        ),
        (
            gk.GRPO(aggregation="token_mean"), RolloutCorrection(mode="mask", **REJECTION),
            {"eps_clip": 0.2, "action": "mask"},
        ),
    ],
)  # fmt: skip
def test_equals_areal(objective, correction, options):
    names = peers.extract(
        peers.source("areal", "areal/utils/functional/functional.py"), "ppo_actor_loss_fn",
        "_compute_sequence_level_ratio_and_advantages", "apply_rejection_sampling", "RejectionSamplingResult",
        "_check_bounds", torch=torch, RejectionSamplingConfig=peers.Anything, dataclass=dataclass,
    )  # fmt: skip
    options = dict(options)
    if action := options.pop("action", None):
        options["rejection_sampling"] = Namespace(
            action=action, level="token", metric="ratio", agg="mean", lower=0.9, upper=1.2
        )

    def theirs(logprobs, entropy, data, **_):
        return names["ppo_actor_loss_fn"](
            logprobs, data["prox_logp"], data["logprobs"], data["advantages"],
            loss_mask=data["loss_mask"].bool(), cu_seqlens=data["cu_seqlens"], **options,
        )[0]  # fmt: skip

    def tokens(data):  # as AReaL's actor
        return data["loss_mask"].count_nonzero()

    assert_close(
        lambda given: step(PolicyLoss(objective, correction=correction), given),
        lambda given: step(theirs, given, dtype=torch.float64, weight=tokens),
        lambda given: step(theirs, given, weight=tokens),
    )
