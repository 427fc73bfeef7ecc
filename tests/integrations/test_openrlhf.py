"""OpenRLHF's hook as published in 0.11.2 (wheel of the registry), and its own loss where that is there."""

import inspect

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.integrations import openrlhf as adapter
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.openrlhf import PolicyLoss, RolloutCorrection
from tests.integrations import hook_problem, peers
from tests.integrations.hook_problem import GSPO, SPLITS, assert_close, expected, expected32, problem

OBJECTIVES = (
    GSPO,
    gk.GSPO(clip_low=0.1, clip_high=0.15, aggregation="token_mean"),
    gk.GRPO(dual_clip=1.5),
    gk.GRPO(aggregation="token_mean"),
    gk.GRPO(aggregation="sequence_mean_token_sum"),
    gk.GRPO(aggregation="constant", aggregation_constant=16.0),
)


def corrects(loss_fn) -> bool:
    """Whether OpenRLHF would pass log-probs of the engine."""
    return getattr(loss_fn, "correction", None) is not None or hasattr(loss_fn, "is_correction_level")


def step(loss_fn, given, splits, dp_size=1, dtype=torch.float32, info=None):
    """Loss and gradient of one optimizer step, as OpenRLHF and DeepSpeed add them up."""
    gradient, total = torch.zeros_like(given.logprobs), 0.0
    accumulation = len(splits) // dp_size
    if info is None:
        info = {
            "dp_size": dp_size,
            "batch_num_tokens": given.mask.sum().double() / accumulation,
            "global_batch_size": given.mask.any(1).sum().double() / accumulation,
        }
    for rows in splits:
        part = given.part(rows, dtype)
        logprobs = part.logprobs.requires_grad_()
        loss, *_ = loss_fn(
            logprobs,
            part.old,
            part.token_advantages,
            action_mask=part.mask,
            rollout_log_probs=part.rollout if corrects(loss_fn) else None,
            **info,
        )
        scaled = loss / accumulation / dp_size
        scaled.backward()
        total += scaled.detach().double()
        gradient[list(rows)] += logprobs.grad.double()
    return total, gradient


def test_the_published_signature():
    parameters = inspect.signature(PolicyLoss.forward).parameters
    assert [*parameters][1:] == [
        "log_probs", "old_log_probs", "advantages", "action_mask", "rollout_log_probs", "dp_size",
        "batch_num_tokens", "global_batch_size",
    ]  # fmt: skip
    clipped = []
    for given in map(problem, range(8)):  # a batch may have no sequence that is clipped, or all
        output = PolicyLoss(GSPO)(given.logprobs, given.old, given.token_advantages, given.mask)
        loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio = output
        assert loss.ndim == clip_ratio.ndim == ppo_kl.ndim == 0
        assert vllm_kl is None and is_filter_ratio is None
        clipped.append(float(clip_ratio))
    assert any(0 < share < 1 for share in clipped)


@pytest.mark.parametrize(
    "objective", OBJECTIVES, ids=lambda each: f"{type(each).__name__}-{each.aggregation}"
)
@pytest.mark.parametrize(
    ("splits", "dp_size"), [(SPLITS[0], 1), (SPLITS[1], 1), (SPLITS[1], 3), (SPLITS[2], 2)]
)
def test_any_split_over_micro_batches_and_ranks_adds_up_to_the_step(objective, splits, dp_size):
    assert_close(
        lambda given: step(PolicyLoss(objective), given, splits, dp_size),
        lambda given: expected(given, objective),
        lambda given: expected32(given, objective),
    )


@pytest.mark.parametrize("objective", OBJECTIVES[:4])
def test_the_correction_weighs_the_policy_term(objective):
    loss_fn = PolicyLoss(objective, correction=RolloutCorrection(high=1.1))
    assert_close(
        lambda given: step(loss_fn, given, SPLITS[1], 3),
        lambda given: expected(given, objective, rollout_weights=given.weights(1.1)),
        lambda given: expected32(given, objective, rollout_weights=given.weights(1.1)),
    )
    given = problem()
    *_, vllm_kl, bounded = loss_fn(
        given.logprobs, given.old, given.token_advantages, given.mask, rollout_log_probs=given.rollout
    )
    torch.testing.assert_close(vllm_kl, (given.rollout - given.old)[given.mask].mean())
    assert bounded == ((given.old - given.rollout).exp() > 1.1)[given.mask].float().mean()


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "icepop", "low": 0.9, "high": 1.2},
        {"mode": "sequence_mask", "low": 0.9, "high": 1.2},
        {"mode": "k3", "high": 0.02},
        {"mode": "k2", "level": "sequence", "reduce": "max", "high": 0.02},
        {"mode": "k1", "level": "sequence", "low": -0.2, "high": 0.2},
        {"level": "sequence", "low": 0.9, "high": 1.2},
        {"low": 0.9, "high": 1.2},
    ],
)
def test_the_share_of_what_is_bounded_has_the_unit_of_the_correction(options):
    """Two of six sequences are far off, with all of their tokens: a third of the sequences."""
    given = problem()
    far = torch.tensor([0.3, -0.3, 0.05, -0.05, 0.1, 0.0]).unsqueeze(1)
    rollout = given.old - far - 0.02 * (torch.arange(given.mask.shape[1]) % 2)
    *_, share = PolicyLoss(GSPO, correction=RolloutCorrection(**options))(
        given.logprobs, given.old, given.token_advantages, given.mask, rollout_log_probs=rollout
    )
    tokens = options.get("level") is None and options.get("mode") != "sequence_mask"
    assert given.mask[:2].any(1).all()
    expected = given.mask[:2].sum() / given.mask.sum() if tokens else torch.tensor(2 / 6)
    torch.testing.assert_close(share, expected)


def test_every_fitting_objective_splits():
    given = problem()
    objectives = hook_problem.fitting()
    assert len(objectives) >= 20
    for objective in objectives:
        whole = step(PolicyLoss(objective), given, SPLITS[0], dtype=torch.float64)
        parts = step(PolicyLoss(objective), given, SPLITS[1], 3, dtype=torch.float64)
        for got, want in zip(parts, whole, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14, msg=str(objective))


def test_without_the_totals_a_micro_batch_stands_alone():
    given = problem()
    loss = PolicyLoss(GSPO)(given.logprobs, given.old, given.token_advantages, given.mask, dp_size=4)[0]
    torch.testing.assert_close(loss, expected(given, GSPO)[0])


@pytest.mark.parametrize(
    ("objective", "reason"),
    [
        (gk.REBEL(), "needs group_ids, which OpenRLHF"),
        (gk.EGSW(), "needs entropy and group_ids"),
        (gk.ClipCov(), "looks at a whole batch"),
        (gk.TLGRPO(), "needs turn_ids"),
        (gk.GRPO(aggregation="sum"), "divides by nothing"),
    ],
)
def test_what_does_not_fit_is_refused_at_construction(objective, reason):
    with pytest.raises(IntegrationError, match=reason):
        PolicyLoss(objective)


def test_wrong_arguments_are_named():
    given = problem()
    with pytest.raises(TypeError, match="instance such as GSPO"):
        PolicyLoss(gk.GSPO)
    with pytest.raises(TypeError, match="correction: got float"):
        PolicyLoss(correction=0.5)
    with pytest.raises(ValueError, match="needs at least one bound"):
        RolloutCorrection()
    call = (given.logprobs, given.old, given.token_advantages, given.mask)
    with pytest.raises(ValueError, match=r"rollout_log_probs: .* made with a correction; set both or none"):
        PolicyLoss(GSPO, correction=RolloutCorrection(high=2.0))(*call)
    with pytest.raises(
        ValueError, match=r"rollout_log_probs: .* made without a correction; set both or none"
    ):
        PolicyLoss(GSPO)(*call, given.rollout)
    varying = given.token_advantages + torch.arange(7)
    with pytest.raises(ValueError, match="advantages: differ within a sequence, but GSPO"):
        PolicyLoss(GSPO)(given.logprobs, given.old, varying, given.mask)
    PolicyLoss(gk.GSPOToken())(given.logprobs, given.old, varying, given.mask)


def test_masked_advantages_may_be_anything():
    given = problem()
    advantages = given.token_advantages.masked_fill(~given.mask, float("nan"))
    loss = PolicyLoss(GSPO)(given.logprobs, given.old, advantages, given.mask)[0]
    assert loss == PolicyLoss(GSPO)(given.logprobs, given.old, given.token_advantages, given.mask)[0]


def test_another_version_is_refused(monkeypatch):
    for module in ("hooks", "errors"):
        monkeypatch.setattr(f"gspo_kernels.integrations.{module}.version", lambda name: "0.10.4")
    with pytest.raises(IntegrationError, match=r"openrlhf: version 0.10.4 is installed, this adapter needs"):
        PolicyLoss()
    assert adapter.SUPPORTED == ">=0.11.2,<0.12"


def real_loss(**options):
    utils = peers.extract(
        peers.source("openrlhf", "openrlhf/models/utils.py"), "masked_mean", torch=torch,
        Optional=peers.Anything, Union=peers.Anything, Tuple=peers.Anything,
    )  # fmt: skip
    names = peers.extract(
        peers.source("openrlhf", "openrlhf/models/loss.py"), "aggregate_loss", "PolicyLoss",
        torch=torch, nn=torch.nn, Optional=peers.Anything, masked_mean=utils["masked_mean"],
    )  # fmt: skip
    return names["PolicyLoss"](**options)


TIS = {"is_correction_level": "token", "is_correction_threshold": [0.9, 1.2]}


@pytest.mark.parametrize(
    ("objective", "correction", "options"),
    [
        (GSPO, None, {"policy_loss_type": "gspo", "clip_eps_low": 0.1, "clip_eps_high": 0.15}),
        (gk.GRPO(aggregation="token_mean"), None, {}),
        (gk.GRPO(dual_clip=1.5), None, {"dual_clip": 1.5, "token_level_loss": False}),
        (
            gk.GRPO(aggregation="token_mean"),
            RolloutCorrection(low=0.9, high=1.2),
            {**TIS, "is_correction_mode": "clip"},
        ),
        (
            gk.GRPO(aggregation="token_mean"),
            RolloutCorrection(mode="icepop", low=0.9, high=1.2),
            {**TIS, "is_correction_mode": "mask"},
        ),
        (
            gk.GRPO(aggregation="token_mean"),
            RolloutCorrection(mode="sequence_mask", low=1.0, high=1.25),
            {
                "is_correction_level": "seq",
                "is_correction_mode": "mask",
                "is_correction_threshold": [1.0, 1.25],
            },
        ),
    ],
)
def test_equals_openrlhf(objective, correction, options):
    theirs, given = real_loss(**options), problem()
    signature = inspect.signature(theirs.forward)
    ours = PolicyLoss(objective, correction=correction)
    assert [*signature.parameters] == [*inspect.signature(ours.forward).parameters]
    norm = peers.extract(
        peers.source("openrlhf", "openrlhf/utils/loss_utils.py"), "_optimizer_step_loss_norm",
        torch=torch, dist=torch.distributed,
    )["_optimizer_step_loss_norm"]  # fmt: skip
    splits = SPLITS[1]

    def info(each):
        return norm([each.mask[list(rows)] for rows in splits], None, 1, len(splits))

    # a sequence without a token has a ratio of NaN there, and counts as filtered
    rows = given.mask.any(1).nonzero().flatten().tolist()
    for dtype in (torch.float64, torch.float32):
        inputs = given.part(rows, dtype)
        call = (inputs.logprobs, inputs.old, inputs.token_advantages, inputs.mask.to(dtype))
        rollout = inputs.rollout if corrects(ours) else None
        for got, want in zip(ours(*call, rollout)[1:], theirs(*call, rollout)[1:], strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(got.double(), want.double(), rtol=1e-6, atol=1e-7)
    assert_close(
        lambda given: step(ours, given, splits, info=info(given)),
        lambda given: step(theirs, given, splits, dtype=torch.float64, info=info(given)),
        lambda given: step(theirs, given, splits, info=info(given)),
    )
