"""The losses in the registries of verl 0.9.1 and SkyRL 0.3: called as their workers do, and inside both.

verl divides by counts of the whole batch. SkyRL scales advantages beforehand, and its loss is a plain sum.
"""

import dataclasses
import importlib
import importlib.util
import itertools
import math
import os
import pickle
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.integrations import errors, hooks, skyrl, verl
from gspo_kernels.integrations.errors import IntegrationError
from tests.draws import shifted_seed
from tests.forks import in_processes
from tests.trainer.conftest import tiny_model

# warnings of clip ranges and aggregations, which most configs here would give
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ROOT = Path(__file__).parents[2]
LENGTHS = (8, 3, 5, 6, 1, 4)
MASK = torch.arange(8) < torch.tensor(LENGTHS).unsqueeze(1)
PROMPTS = torch.tensor([0, 0, 1, 2, 2, 2])
STALE = ("ctpo", "fspo", "prime_ipo")  # their bounds are of other kinds
OTHERS = ("gpg", "topr", "vespo", "sapo", "sspo", "dro", "spo", "drpo", "cppo")
NO_RANGE = {f"gk_{name}" for name in (*OTHERS, *STALE)}
"""The names of objectives that take no clip range."""
MODES = tuple(verl.AGGREGATIONS)
INFO = {"dp_size": 2, "batch_num_tokens": sum(LENGTHS), "global_batch_size": 6, "loss_scale_factor": 16}


def needs(framework):
    return pytest.mark.skipif(
        importlib.util.find_spec(framework) is None,
        reason=f"{framework} needs another transformers, so a separate environment: make {framework}",
    )


@pytest.fixture(autouse=True)
def forget_warnings():
    hooks.warn_once.cache_clear()


def batch(seed=0, dtype=torch.float64):
    """Return log-probs, old log-probs, advantages (one per sequence), weights, the engine's log-probs."""
    rng = torch.Generator().manual_seed(shifted_seed(seed))
    start = -torch.rand(MASK.shape, generator=rng, dtype=torch.float64) - 0.2
    shift = torch.tensor([0.3, -0.3, 0.3, -0.3, 0.0, 0.6]).double().unsqueeze(1)
    old = (start - shift - 0.2 * torch.randn(MASK.shape, generator=rng, dtype=torch.float64)).clamp(max=-0.01)
    advantages = torch.tensor([1.0, -0.5, -1.2, 0.8, 0.0, -2.0]).double().unsqueeze(1).expand(MASK.shape)
    weights = 0.5 + torch.rand(MASK.shape, generator=rng, dtype=torch.float64)
    rollout = old - 0.3 * torch.randn(MASK.shape, generator=rng, dtype=torch.float64)
    values = (start, old, advantages, weights, rollout)
    return tuple(torch.where(MASK, each, 0.0).to(dtype) for each in values)


def verl_config(**changed):
    """Return the values of verl's ActorConfig, with its defaults except for the clip ranges."""
    values = {
        "clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5,
        "tau_pos": 1.0, "tau_neg": 1.05, "policy_loss": SimpleNamespace(dro_beta=0.3),
        "global_batch_info": {},
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changed})


def skyrl_config(**changed):
    """Return the values of SkyRL's AlgorithmConfig, with its defaults except for the clip ranges."""
    values = {
        "loss_reduction": "sequence_mean", "eps_clip_low": 0.2, "eps_clip_high": 0.28,
        "sapo": SimpleNamespace(tau_pos=1.0, tau_neg=1.05),
        "cispo": SimpleNamespace(cispo_eps_clip_low=0.1, cispo_eps_clip_high=0.2),
        "dppo": SimpleNamespace(dppo_type="binary_tv", delta_low=0.04, delta_high=0.06),
        "off_policy_correction": None,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changed})


def verl_call(loss_fn, start, old, advantages, config, *, mask=MASK, weights=None, mode="token-mean"):
    """Call a loss as verl's actor does; return loss, gradient and metrics."""
    leaf = start.clone().requires_grad_()
    loss, metrics = loss_fn(
        old_log_prob=old, log_prob=leaf, advantages=advantages, response_mask=mask, loss_agg_mode=mode,
        config=config, rollout_is_weights=weights,
    )  # fmt: skip
    return loss.detach(), *torch.autograd.grad(loss, leaf), metrics


def skyrl_call(loss_fn, start, old, advantages, config, *, mask=MASK, rollout=None):
    """Call a loss as SkyRL's worker does; return loss, gradient and metrics."""
    leaf = start.clone().requires_grad_()
    mask = None if mask is None else mask.long()
    loss, metrics = loss_fn(leaf, old, advantages, config=config, loss_mask=mask, rollout_logprobs=rollout)
    return loss.detach(), *torch.autograd.grad(loss, leaf), metrics


def assert_equal(one, other, guard=0.0):
    torch.testing.assert_close(one, other, rtol=1e-10 + guard, atol=1e-14 + guard)


def scale(advantages, reduction, horizon=16):
    """Scale the advantages of a mini-batch as SkyRL does."""
    tokens = torch.stack([MASK[prompt == PROMPTS].sum() for prompt in PROMPTS.tolist()])
    divisor = {
        "prompt_mean": 3 * tokens.unsqueeze(1),
        "token_mean": MASK.sum(),
        "sequence_mean": len(LENGTHS) * MASK.sum(1, keepdim=True),
        "seq_mean_token_sum_norm": torch.tensor(len(LENGTHS) * horizon),
    }
    return advantages / divisor[reduction]


# ------------------------------------------------------ without the frameworks


def test_every_objective_runs_or_says_why_not():
    """All objectives with a clip range take the config's; losses of SkyRL are proportional to advantages."""
    start, old, advantages, *_ = batch()
    refused = {
        **dict.fromkeys(("gk_agro", "gk_dpo", "gk_trpa"), "ref_logprobs and group_ids"),
        **dict.fromkeys(("gk_clip_cov", "gk_kl_cov", "gk_m2po"), "whole batch"),
        **dict.fromkeys(("gk_real", "gk_rebel"), "needs group_ids"),
        "gk_egsw": "entropy and group_ids", "gk_espo": "token_weights and lengths and ref_logprobs",
        "gk_linear": "token_weights", "gk_tl_grpo": "turn_ids",
    }  # fmt: skip
    changed = skyrl_config(
        eps_clip_low=0.01, eps_clip_high=0.02,
        cispo=SimpleNamespace(cispo_eps_clip_low=0.01, cispo_eps_clip_high=0.02),
        dppo=SimpleNamespace(dppo_type="binary_kl", delta_low=9.0, delta_high=9.0),
    )  # fmt: skip
    assert verl.LOSSES.keys() == {name + end for name in hooks.named_objectives() for end in ("", "_config")}
    assert skyrl.REFUSED.keys() == {*refused, "gk_dro"}
    assert all(reason in skyrl.REFUSED[name] for name, reason in refused.items())
    for losses, call, wide, narrow in (
        (verl.LOSSES, verl_call, verl_config(), verl_config(clip_ratio_low=0.01, clip_ratio_high=0.02)),
        (skyrl.LOSSES, skyrl_call, skyrl_config(), changed),
    ):
        for name, loss_fn in losses.items():
            objective = name.removesuffix("_config")
            if objective in refused:
                with pytest.raises(IntegrationError, match=refused[objective]):
                    call(loss_fn, start, old, advantages, wide)
                continue
            one, other = (call(loss_fn, start, old, advantages, each) for each in (wide, narrow))
            assert one[0].isfinite() and one[1].count_nonzero() > 0, name
            assert one[1][~MASK].count_nonzero() == 0, name
            same = torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
            assert same == (objective in NO_RANGE), name
            if losses is skyrl.LOSSES:
                scaled = call(loss_fn, start, old, 0.1 * advantages, wide)
                assert_equal((10 * scaled[0], 10 * scaled[1]), one[:2])


def test_gspo_by_hand():
    """Two sequences, the first of them clipped at 1.05."""
    start = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -1.0, 0.0]], dtype=torch.float64)
    old = torch.tensor([[-1.1, -2.2, -0.5], [-1.5, -1.2, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    first, second = math.exp(0.3 / 3), math.exp(0.2 / 2)
    advantages = torch.tensor([[2.0], [-1.0]], dtype=torch.float64).expand(2, 3)
    ratios = {"ratio/mean": (first + second) / 2, "ratio/min": second, "ratio/max": first}
    config, scaled = verl_config(clip_ratio_high=0.05), advantages / torch.tensor([[6.0], [4.0]])
    theirs = verl_call(verl.LOSSES["gk_gspo"], start, old, advantages, config, mask=mask)
    assert theirs[2] == pytest.approx(
        {
            "actor/pg_clipfrac": 3 / 5, "actor/ppo_kl": -0.5 / 5, "actor/pg_clipfrac_lower": 0.0,
            "actor/active_fraction": 0.5, **{f"actor/{name}": value for name, value in ratios.items()},
        }
    )  # fmt: skip
    config = skyrl_config(eps_clip_high=0.05)
    got = skyrl_call(skyrl.LOSSES["gk_gspo"], start, old, scaled, config, mask=mask)
    ratios = {name.replace("/", "_"): value for name, value in ratios.items()}
    assert got[2] == pytest.approx({"clip_ratio": 3 / 5, "active_fraction": 0.5, **ratios})
    for loss, gradient, metrics in (theirs, got):
        assert loss.item() == pytest.approx((-1.05 * 2.0 + second) / 2) and not gradient[0].any()
        assert all(type(each) is float for each in metrics.values())


@pytest.mark.parametrize("mode", MODES)
def test_verl_s_ranks_and_micro_batches_add_up(mode):
    """A rank adds up the losses of its micro-batches, and FSDP takes the mean over ranks."""
    start, old, advantages, weights, _ = batch()
    given, whole = (verl_config(global_batch_info={**INFO, "dp_size": size}) for size in (2, 1))
    for name in ("gk_gspo", "gk_gspo_config", "gk_grpo_config", "gk_vespo_config"):
        loss_fn = partial(verl_call, verl.LOSSES[name], mode=mode)
        expected = loss_fn(start, old, advantages, whole, weights=weights)
        parts = [
            loss_fn(start[r], old[r], advantages[r], given, mask=MASK[r], weights=weights[r])
            for r in (slice(0, 1), slice(1, 3), slice(3, 5), slice(5, 6))
        ]
        assert_equal(sum(part[0] for part in parts) / 2, expected[0])
        assert_equal(torch.cat([part[1] for part in parts]) / 2, expected[1])
        alone = loss_fn(start, old, advantages, verl_config(), weights=weights)
        # loss_scale_factor is 16; without it the divisor is T = 8
        scaled = 2.0 if mode == "seq-mean-token-sum-norm" and name != "gk_gspo" else 1.0
        assert_equal(alone[0] / scaled, expected[0])
        if name == "gk_gspo":  # GSPO's own mean over sequences, in every mode
            terms = {"loss_mask": MASK, "rollout_weights": weights, "objective": gk.GSPO(0.2, 0.28)}
            assert_equal(alone[0], gk.policy_loss(start, old, advantages[:, 0], **terms).loss)


REDUCTIONS = {
    "token_mean": {"aggregation": "token_mean"},
    "sequence_mean": {"aggregation": "sequence_mean"},
    "seq_mean_token_sum_norm": {"aggregation": "constant", "aggregation_constant": 16},
    "prompt_mean": {"aggregation": "prompt_mean"},
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_skyrl_s_sum_over_micro_batches_is_the_mean(reduction):
    start, old, advantages, *_ = batch()
    scaled, given = scale(advantages, reduction), skyrl_config(loss_reduction=reduction)
    for name, cls in (("gk_gspo", gk.GSPO), ("gk_grpo", gk.GRPO), ("gk_topr", gk.TOPR)):
        clip = {} if cls is gk.TOPR else {"clip_low": 0.2, "clip_high": 0.28}
        leaf, objective = start.clone().requires_grad_(), cls(**clip, **REDUCTIONS[reduction])
        given_too = {"loss_mask": MASK, "group_ids": PROMPTS if reduction == "prompt_mean" else None}
        expected = gk.policy_loss(leaf, old, advantages[:, 0], objective=objective, **given_too).loss
        parts = [
            skyrl_call(skyrl.LOSSES[name], start[r], old[r], scaled[r], given, mask=MASK[r])
            for r in (slice(0, 1), slice(1, 4), slice(4, 6))
        ]
        assert_equal(sum(part[0] for part in parts), expected.detach())
        assert_equal(torch.cat([part[1] for part in parts]), torch.autograd.grad(expected, leaf)[0])


def test_empty_and_missing_masks():
    """An empty mask counts no token, mask=None counts all."""
    start, old, advantages, *_ = batch()
    loss_fn, same = skyrl.LOSSES["gk_gspo"], advantages[:, :1].expand_as(start)
    empty = [skyrl_call(loss_fn, start, old, advantages, skyrl_config(), mask=MASK & False)]
    for name, info in (("gk_gspo", {}), ("gk_dapo", {**INFO, "batch_num_tokens": 0})):
        config = verl_config(global_batch_info=info)
        empty.append(verl_call(verl.LOSSES[name], start, old, advantages, config, mask=MASK & False))
    assert all(loss == 0 and gradient.count_nonzero() == 0 for loss, gradient, _ in empty)
    masks = (torch.ones_like(MASK), None)
    every, none = (skyrl_call(loss_fn, start, old, same, skyrl_config(), mask=mask) for mask in masks)
    assert_equal(none, every)


NARROW_SKYRL = {"eps_clip_low": 3e-4, "eps_clip_high": 4e-4}
NARROW_VERL = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(
    ("name", "config", "mode", "message"),
    [
        ("gk_gspo", {}, None, "range of 0.28 .* eps_clip_low=0.0003, eps_clip_high=0.0004"),
        ("gk_gspo", NARROW_SKYRL | {"loss_reduction": "token_mean"}, None, "'token_mean', .* by 'sequence"),
        ("gk_gspo", NARROW_SKYRL, None, None),
        ("gk_dapo", {"loss_reduction": "token_mean"}, None, None),
        ("gk_gspo", {}, "seq-mean-token-mean", "clip_ratio_low=0.0003, clip_ratio_high=0.0004"),
        ("gk_gspo", NARROW_VERL, "token-mean", "by 'seq-mean-token-mean', while loss_agg_mode='token-mean'"),
        ("gk_gspo", NARROW_VERL, "seq-mean-token-mean", None),
        ("gk_gspo_config", NARROW_VERL, "token-mean", None),
        ("gk_grpo_config", {}, "token-mean", None),
    ],
)
def test_ranges_and_aggregations_warn_once(name, config, mode, message):
    """Without a mode the loss is SkyRL's."""
    if mode is None:
        call = partial(skyrl_call, skyrl.LOSSES[name], *batch()[:3], skyrl_config(**config))
    else:
        call = partial(verl_call, verl.LOSSES[name], *batch()[:3], verl_config(**config), mode=mode)
    with pytest.warns(UserWarning, match=message) if message else nullcontext():
        call()
    call()


ALONE = {"global_batch_info": {"dp_size": 2}}
NO_BETA = {"policy_loss": SimpleNamespace(dro_beta=None)}
NO_RANGE_GIVEN = {"clip_ratio_low": None, "clip_ratio": None}


@pytest.mark.parametrize(
    ("name", "changes", "mode", "message"),
    [
        ("gk_gspo", None, "token-mean", "config: got None"),
        ("gk_gspo", {}, "mean", "loss_agg_mode: got 'mean'"),
        ("gk_gspo", NO_RANGE_GIVEN, "token-mean", r"\.clip_ratio_low: missing"),
        ("gk_grpo", {"clip_ratio_c": 1.1}, "token-mean", "gk_grpo: dual_clip: got 1.1.*clip_low=0.2"),
        ("gk_dro", NO_BETA, "token-mean", r"\.dro_beta: missing"),
        ("gk_grpo_config", ALONE, "token-mean", "dp_size=2 but no batch_num_tokens"),
        ("gk_grpo_config", ALONE, "seq-mean-token-sum", "dp_size=2 but no global_batch_size"),
        ("gk_grpo_config", ALONE, "token-sum", None),
    ],
)
def test_configs_that_verl_s_loss_refuses(name, changes, mode, message):
    config = None if changes is None else verl_config(**changes)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        verl_call(verl.LOSSES[name], *batch()[:3], config, mode=mode)


def test_objectives_and_calls_that_are_refused():
    start, old, advantages, *_ = batch()
    of_verl, of_skyrl, varied = verl.LOSSES["gk_gspo"], skyrl.LOSSES["gk_gspo"], advantages + start
    empty = SimpleNamespace(loss_reduction="sequence_mean")
    verl_call(verl.LOSSES["gk_gspo_token"], start, old, varied, verl_config())
    for call, message in (
        (lambda: verl.register("mine", gk.GSPO), "objective: got the class GSPO"),
        (lambda: skyrl.register("mine", gk.GSPO), "objective: got the class GSPO"),
        (lambda: verl.register("mine", gk.TLGRPO()), "TLGRPO needs turn_ids"),
        (lambda: skyrl.register("mine", gk.TLGRPO()), "TLGRPO needs turn_ids"),
        (lambda: skyrl.register("mine", gk.DRO()), "DRO is not proportional"),
        (
            lambda: verl.register("mine", gk.GRPO(aggregation="prompt_mean")),
            "divides by the number of prompts",
        ),
        (lambda: verl.VerlPolicyLoss("mine", gk.GSPO(), follow_config=True), "follow_config: got True"),
        (
            lambda: verl_call(of_verl, start, old, varied, verl_config()),
            "advantages: differ within a sequence",
        ),
        (
            lambda: skyrl_call(of_skyrl, start, None, advantages, skyrl_config()),
            "old_log_probs: got NoneType",
        ),
        (lambda: skyrl_call(of_skyrl, start, old, advantages, empty), r"config\.eps_clip_low: missing"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()


def test_skyrl_s_cispo_takes_its_ratio_to_the_rollouts():
    start, old, advantages = batch()[:3]
    rollout, loss_fn = old - 0.05 * start.detach().abs(), skyrl.LOSSES["gk_cispo"]
    cispo = {"cispo_eps_clip_low": 0.1, "cispo_eps_clip_high": 0.2}
    given = skyrl_config(cispo=SimpleNamespace(cispo_anchor="rollout", **cispo))
    got = skyrl_call(loss_fn, start, old, advantages, given, rollout=rollout)
    assert_equal(got, skyrl_call(loss_fn, start, rollout, advantages, skyrl_config()))
    assert abs(got[0] - skyrl_call(loss_fn, start, old, advantages, skyrl_config())[0]) > 1e-4
    with pytest.raises(IntegrationError, match="rollout_logprobs: got None"):
        skyrl_call(loss_fn, start, old, advantages, given)
    given.off_policy_correction = SimpleNamespace(tis_ratio_type="token")
    with pytest.raises(IntegrationError, match="tis_ratio_type: got 'token', expected None"):
        skyrl_call(loss_fn, start, old, advantages, given, rollout=rollout)
    # other objectives do not read it
    skyrl_call(skyrl.LOSSES["gk_grpo"], start, old, advantages, skyrl_config(cispo=given.cispo))


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("gk_grpo_config", gk.GRPO(0.2, 0.28, dual_clip=1.5)),
        ("gk_gspo_token_config", gk.GSPOToken(0.2, 0.28)),
        ("gk_cispo_config", gk.CISPO(0.8, 1.28)),
        ("gk_sapo_config", gk.SAPO(tau_positive=0.5, tau_negative=2.0)),
        ("gk_dro_config", gk.DRO(beta=0.3)),
        ("gk_dppo_config", gk.DPPO(0.2, 0.28, divergence="tv", max_ratio=1.5)),
        ("gk_gmpo_config", gk.GMPO(log_clip_low=0.2, log_clip_high=0.28)),
        ("gk_grpo", gk.GRPO(0.2, 0.28)),
        ("gk_cispo", gk.CISPO(0.9, 1.2)),
        ("gk_sapo", gk.SAPO(tau_positive=0.5, tau_negative=2.0)),
        ("gk_dppo", gk.DPPO(0.04, 0.06, divergence="tv")),
        ("gk_gmpo", gk.GMPO(log_clip_low=0.2, log_clip_high=0.28)),
        ("clip_ratio", gk.GSPO(0.1, 0.1)),
    ],
)
def test_objectives_get_the_options_of_the_config(name, objective):
    """Names that end in _config are verl's, and its mode is the sum; clip_ratio is both ends of its range."""
    start, old, advantages, *_ = batch()
    taus, leaf = {"tau_pos": 0.5, "tau_neg": 2.0}, start.clone().requires_grad_()
    summed = dataclasses.replace(objective, aggregation="sum")
    advantage = advantages if objective.takes_token_advantages else advantages[:, 0]
    want = gk.policy_loss(leaf, old, advantage, loss_mask=MASK, objective=summed).loss
    rows, ends = (start, old, advantages), {"clip_ratio_low": None, "clip_ratio_high": None}
    if name == "clip_ratio":
        config = verl_config(clip_ratio=0.1, **ends)
        got = verl_call(verl.LOSSES["gk_gspo_config"], *rows, config, mode="token-sum")
    elif name.endswith("_config"):
        got = verl_call(verl.LOSSES[name], *rows, verl_config(**taus), mode="token-sum")
    else:
        got = skyrl_call(skyrl.LOSSES[name], *rows, skyrl_config(sapo=SimpleNamespace(**taus)))
    assert_equal(got[:2], (want.detach(), *torch.autograd.grad(want, leaf)))


def test_skyrl_s_correction_weighs_and_masks(monkeypatch):
    """A stand-in replaces SkyRL's own function, which returns weights and a mask."""
    start, old, advantages, weights, rollout = batch()
    kept = torch.arange(8) % 3 != 0

    def correct(ones, old_logprobs, rollout_logprobs, mask, options):
        assert (ones == 1).all() and torch.equal(old_logprobs, old) and torch.equal(rollout_logprobs, rollout)
        return weights, mask * kept, {"is_ratio_mean": 1.5}

    utilities = SimpleNamespace(off_policy_correction_enabled=bool, apply_off_policy_correction=correct)
    monkeypatch.setattr(skyrl, "_utilities", lambda name: utilities)
    rows, grpo = (start, old, advantages), gk.GRPO(0.2, 0.28, aggregation="sum")
    for options, applied in (("", None), ("token", torch.where(kept & MASK, weights, 0.0))):
        given = skyrl_config(off_policy_correction=options)
        loss, _, metrics = skyrl_call(skyrl.LOSSES["gk_grpo"], *rows, given, rollout=rollout)
        terms = {"loss_mask": MASK, "rollout_weights": applied, "objective": grpo}
        assert_equal(loss, gk.policy_loss(*rows, **terms).loss)
        assert metrics.get("is_ratio_mean") == (1.5 if options else None)


def test_an_objective_of_ones_own():
    """The loss for verl uses the objective unchanged; SkyRL passes scaled advantages."""
    start, old, advantages, *_ = batch()
    objective = gk.GSPO(0.1, 0.2, dual_clip=1.3, aggregation="token_mean")
    loss_fn, mode = verl.VerlPolicyLoss("mine", objective), "seq-mean-token-sum"
    with pytest.warns(UserWarning, match="mine: aggregates by 'token-mean', while .* set it too$"):
        loss, _, metrics = verl_call(loss_fn, start, old, advantages, verl_config(), mode=mode)
    expected = gk.policy_loss(start, old, advantages[:, 0], loss_mask=MASK, objective=objective)
    assert_equal(loss, expected.loss)
    dual = (advantages[:, 0] < 0) & ((start - old).sum(1) / MASK.sum(1) > math.log(1.3))
    lower = metrics["actor/pg_clipfrac_lower"]
    assert lower == pytest.approx(MASK[dual].sum() / sum(LENGTHS)) and dual.any()
    clipped = expected.metrics["clip_fraction/tokens"].item()
    assert metrics["actor/pg_clipfrac"] + lower == pytest.approx(clipped)
    ours = pickle.loads(pickle.dumps(skyrl.SkyRLPolicyLoss("mine", objective)))
    scaled, given = scale(advantages, "token_mean"), skyrl_config(loss_reduction="token_mean")
    assert_equal(skyrl_call(ours, start, old, scaled, given)[0], expected.loss)


def known_correction(loss, old_log_probs, rollout_logprobs, loss_mask, off_policy_correction): ...


@pytest.mark.parametrize(
    ("installed", "vanilla", "reason"),
    [
        ("0.7.0", verl.LOSSES["gk_gspo"], "version 0.7.0 is installed"),
        ("99.0", None, "compute_policy_loss_vanilla does not exist in version 99.0"),
        ("99.0", lambda log_prob, *, config: None, r"takes \(log_prob, config\) in version 99.0"),
        ("99.0", verl.LOSSES["gk_gspo"], None),
    ],
)
def test_registering_in_verl(installed, vanilla, reason, monkeypatch):
    """Every registered loss raises an error if verl is too old or calls losses differently."""
    registry = {}
    algos = SimpleNamespace(register_policy_loss=lambda name: partial(registry.setdefault, name))
    algos.compute_policy_loss_vanilla = vanilla
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.core_algos", algos)
    monkeypatch.setattr(errors, "version", lambda name: installed)
    monkeypatch.setattr(errors, "requires", lambda name: ["verl>=0.9.1; extra == 'verl'"])
    verl._register_all()
    assert registry.keys() == verl.LOSSES.keys()
    if reason is None:
        assert registry == verl.LOSSES and verl.register("mine", gk.GSPO()) is registry["mine"]
        return
    for refused in (lambda: registry["gk_gspo"](another=2), lambda: verl.register("mine", gk.GSPO())):
        with pytest.raises(IntegrationError, match=reason):
            refused()


@pytest.mark.parametrize(
    ("takes", "correction", "reason"),
    [
        (None, known_correction, "ppo_utils.ppo_policy_loss does not exist in version 9.0"),
        (lambda log_probs, *, config: None, known_correction, r"takes \(log_probs, config\) in version 9.0"),
        (skyrl.LOSSES["gk_gspo"], lambda loss: None, r"off_policy_correction takes \(loss\) in version 9.0"),
        (skyrl.LOSSES["gk_gspo"], known_correction, None),
    ],
)
def test_registering_in_skyrl(takes, correction, reason, monkeypatch):
    """A newer SkyRL is accepted, unless a function that the adapter uses has different parameters."""
    registered = {"gk_grpo": None}
    registry = SimpleNamespace(list_available=lambda: [*registered], register=registered.__setitem__)
    utilities = SimpleNamespace(
        ppo_policy_loss=takes, apply_off_policy_correction=correction, PolicyLossRegistry=registry
    )
    monkeypatch.setattr(errors, "version", lambda name: "9.0")
    monkeypatch.setattr(skyrl, "_utilities", lambda name: utilities)
    if reason is None:
        skyrl.register_all()
        assert registered == skyrl.LOSSES | {"gk_grpo": None}
        return
    for register in (skyrl.register_all, lambda: skyrl.register("mine", gk.GSPO())):
        with pytest.raises(IntegrationError, match=reason):
            register()
    assert [*registered] == ["gk_grpo"]


# ------------------------------------------------------ inside verl

VERL = {
    "gk_gspo": "gspo", "gk_gspo_config": "gspo", "gk_gspo_token_config": "gspo", "gk_sapo": "sapo",
    "gk_grpo_config": "vanilla", "gk_cispo_config": "cispo", "gk_gpg_config": "gpg", "gk_gmpo": "geo_mean",
    "gk_dro_config": "dro", "gk_dppo_config": "dppo_tv",
}  # fmt: skip


OTHER_METRICS = {("dppo_tv", "actor/pg_clipfrac_lower")}
OTHER_METRICS |= {("geo_mean", "actor/pg_clipfrac"), ("geo_mean", "actor/pg_clipfrac_lower")}


def verls(name):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    return get_policy_loss_fn(name)


@needs("verl")
@pytest.mark.parametrize("info", [{}, INFO], ids=["alone", "global"])
@pytest.mark.parametrize("ours", VERL)
def test_equals_verl(ours, info):
    """Values, gradients and metrics agree in each mode, through verl's own registry and config."""
    from verl.workers.config import ActorConfig, PolicyLossConfig

    # verl's GMPO takes the mean over a micro-batch alone, and counts clipped tokens by their side.
    values = vars(verl_config(global_batch_info={} if ours == "gk_gmpo" else info))
    values["policy_loss"] = PolicyLossConfig(dro_beta=values["policy_loss"].dro_beta)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **values)
    theirs, of_sequences = VERL[ours], ours in ("gk_gspo", "gk_gspo_config")
    start, old, advantages, token_weights, _ = batch()
    per_sequence = token_weights[:, :1].expand(MASK.shape)
    # verl's SAPO takes the mean over sequences in every mode
    for mode in MODES if ours.endswith("_config") or ours == "gk_sapo" else ("seq-mean-token-mean",):
        # verl's means over a sequence divide by |y| + 1e-8.
        guard = 5e-8 if mode == "seq-mean-token-mean" or ours == "gk_sapo" else 0.0
        for weights in (None, per_sequence, token_weights):
            spread = weights is token_weights and of_sequences
            if weights is token_weights and (ours == "gk_gmpo" or (spread and mode != "seq-mean-token-mean")):
                continue
            got, expected = (
                verl_call(verls(name), start, old, advantages, config, weights=weights, mode=mode)
                for name in (ours, theirs)
            )
            assert_equal(got[0], expected[0], guard)
            # our GSPO has one coefficient per sequence, verl's one weight per token
            pick = (lambda x: x.sum(1)) if spread else (lambda x: x)
            assert_equal(pick(got[1]), pick(expected[1]), guard)
            assert got[1].count_nonzero() > 0
            for name, value in expected[2].items():
                if (theirs, name) not in OTHER_METRICS:
                    assert got[2][name] == pytest.approx(value, rel=1e-6, abs=1e-7), name
            if theirs == "vanilla":
                assert got[2]["actor/pg_clipfrac_lower"] > 0 and got[2]["actor/pg_clipfrac"] > 0
    if ours == "gk_gspo_token_config":
        varied, mode = advantages + 0.3 * token_weights - 0.3, "seq-mean-token-mean"
        got, expected = (verl_call(verls(n), start, old, varied, config, mode=mode) for n in (ours, theirs))
        assert_equal(got[:2], expected[:2], 5e-8)


@needs("verl")
def test_verl_finds_the_losses_by_itself(tmp_path):
    """The checkout poses as an installed package with its entry point; workers also use our kernels."""
    info = tmp_path / "gspo_kernels-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gspo_kernels\nVersion: 0.1.0\n")
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, target),) = project["entry-points"]["verl.plugins"].items()
    (info / "entry_points.txt").write_text(f"[verl.plugins]\n{name} = {target}\n")
    code = (
        "import torch, verl; from verl.utils.torch_functional import logprobs_from_logits as f; "
        "from verl.trainer.ppo.core_algos import get_policy_loss_fn; get_policy_loss_fn('gk_gspo_config'); "
        "f(torch.randn(2, 3, 9), torch.zeros(2, 3, dtype=torch.int64))"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    modules = "gspo_kernels.integrations.backends.verl_workers"
    environment = {**os.environ, "VERL_USE_EXTERNAL_MODULES": modules, "PYTHONPATH": path}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
    assert "verl.utils.torch_functional.logprobs_from_logits runs in gspo_kernels" in done.stderr


def verl_engine(model):
    """Return verl's FSDP2 engine, on CPU."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    fp32 = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path=str(model), load_tokenizer=False, use_remove_padding=False,
            enable_gradient_checkpointing=False, override_config={"attn_implementation": "eager"},
        ),
        FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, model_dtype="fp32", mixed_precision=fp32),
        FSDPOptimizerConfig(lr=0.02, optimizer="SGD", betas=None, weight_decay=0.0, total_training_steps=9),
        CheckpointConfig(),
    )  # fmt: skip
    engine.initialize()
    return engine


def jagged(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def verl_data(rank):
    """Return a rank's half of eight sequences, without old log-probs."""
    from verl.utils import tensordict_utils as tu

    rng = torch.Generator().manual_seed(shifted_seed(7))
    lengths = ((3, 5), (2, 1), (4, 6), (1, 4), (2, 3), (5, 2), (3, 6), (2, 4))[rank::2]
    prompts, responses = (
        [torch.randint(3, 64, (each[part],), generator=rng) for each in lengths] for part in range(2)
    )
    ids = [torch.cat(row) for row in zip(prompts, responses, strict=True)]
    ones = [torch.ones_like(response) for response in responses]
    advantages = (1.0, -1.0, 0.5, 2.0, -0.5, 1.5, -2.0, 0.7)[rank::2]
    tensors = {
        "input_ids": ids, "position_ids": [torch.arange(len(each)) for each in ids], "prompts": prompts,
        "responses": responses, "response_mask": ones, "loss_mask": ones,
        "advantages": [a * one for a, one in zip(advantages, ones, strict=True)],
    }  # fmt: skip
    options = {
        "temperature": 1.0, "global_batch_size": 8, "use_remove_padding": False, "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2, "pad_token_id": 0, "calculate_entropy": True,
    }  # fmt: skip
    tensors = {name: jagged(rows) for name, rows in tensors.items()}
    return tu.get_tensordict(tensors, non_tensor_dict=options)


def update_actor(model, loss_mode, config):
    """Compute old log-probs with the engine and update four times; return metrics and final weights."""
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import no_padding_2_padding

    engine, data = verl_engine(model), verl_data(torch.distributed.get_rank())
    with engine.eval_mode():
        scored = engine.infer_batch(data.clone())["model_output"]["log_probs"]
    lengths = data["responses"].offsets().diff().tolist()
    old = [row[:n] for row, n in zip(no_padding_2_padding(scored, data), lengths, strict=True)]
    data["old_log_probs"] = jagged(old)
    policy_loss = PolicyLossConfig(loss_mode=loss_mode)
    actor = FSDPActorConfig(rollout_n=1, ppo_micro_batch_size_per_gpu=2, policy_loss=policy_loss, **config)
    history = []
    with engine.train_mode():
        for _ in range(4):
            metrics = engine.train_batch(data.clone(), loss_function=partial(ppo_loss, actor))["metrics"]
            history.append({
                name: float(each.aggregate() if hasattr(each, "aggregate") else torch.tensor(each).mean())
                for name, each in metrics.items()
            })  # fmt: skip
    parameters = (each.full_tensor().flatten() for each in engine.module.state_dict().values())
    return history, torch.cat(list(parameters))


@needs("verl")
@pytest.mark.slow
def test_actor_updates_in_verl_s_engine(tmp_path):
    """On two ranks with micro-batches and an entropy bonus, weights and metrics equal those of verl's loss.

    So do those of verl's own loss with our log-probs.
    """
    network = tiny_model("qwen3", hidden_size=16, head_dim=8)
    network.save_pretrained(tmp_path)
    start = torch.cat([each.detach().flatten() for each in network.state_dict().values()])
    config = {
        "loss_agg_mode": "seq-mean-token-mean", "clip_ratio_low": 0.03, "clip_ratio_high": 0.04,
        "entropy_coeff": 0.01,
    }  # fmt: skip

    def work(rank):
        from gspo_kernels.integrations.backends import verl as backend

        importlib.import_module("tests.integrations.verl_on_cpu")
        torch.distributed.init_process_group("gloo")
        expected, got = (update_actor(tmp_path, each, config) for each in ("gspo", "gk_gspo"))
        backend.install()
        for history, weights in (got, update_actor(tmp_path, "gspo", config)):
            assert (weights - expected[1]).norm() <= 1e-5 * (expected[1] - start).norm()
            for one, other in zip(expected[0], history, strict=True):
                assert other == pytest.approx({**other, **one}, rel=1e-4, abs=1e-6)
        assert got[0][0]["actor/ratio/min"] == got[0][0]["actor/ratio/max"] == 1.0
        assert any(0 < each["actor/pg_clipfrac"] < 1 for each in got[0])
        assert any(0 < each["actor/active_fraction"] <= 1 for each in got[0])

    in_processes(2, work)


# ------------------------------------------------------ inside SkyRL

FLOAT32 = 4 * torch.finfo(torch.float32).eps
"""The tolerance where SkyRL takes the exponential of log-ratios in fp32, regardless of their dtype."""
SKYRL = {
    "gk_gspo": ("gspo", 0.0), "gk_gspo_token": ("gspo", 0.0), "gk_grpo": ("regular", FLOAT32),
    "gk_cispo": ("cispo", FLOAT32), "gk_sapo": ("sapo", 0.0), "gk_dppo": ("dppo", FLOAT32),
}  # fmt: skip
CORRECTIONS = {
    "none": {},
    "sequence": {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.5},
    "token": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.1},
    "masks": {
        "sequence_mask_metric": "geometric", "geo_mask_low": 0.8, "geo_mask_high": 1.1,
        "token_mask_is_threshold_low": 0.7, "token_mask_is_threshold_high": 1.4,
    },
}  # fmt: skip


def algorithm_config(name, **changed):
    """Return SkyRL's own config with the values of ``skyrl_config``."""
    from skyrl.train.config import AlgorithmConfig

    given = AlgorithmConfig(policy_loss_type=name)
    for option, value in vars(skyrl_config(**changed)).items():
        if isinstance(value, SimpleNamespace):
            for inner, each in vars(value).items():
                setattr(getattr(given, option), inner, each)
        elif value is not None:
            setattr(given, option, value)
    return given


def skyrls(name):
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    skyrl.register_all()
    return PolicyLossRegistry.get(name)


@needs("skyrl")
@pytest.mark.parametrize("ours", SKYRL)
def test_equals_skyrl(ours):
    """Values, gradients and metrics agree through SkyRL's registry, scaling and config."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import apply_loss_reduction_to_advantages_minibatch

    name, guard = SKYRL[ours]
    for seed, (correction, reduction) in enumerate(itertools.product(CORRECTIONS, REDUCTIONS)):
        if name == "dppo" and correction != "none":  # SkyRL's DPPO takes the engine's log-probs as old
            continue
        start, old, advantages, _, rollout = batch(seed)
        scaled = apply_loss_reduction_to_advantages_minibatch(
            advantages, MASK.double(), reduction, 6, 16, [(0, 2), (2, 3), (3, 6)]
        )
        assert_equal(scaled, scale(advantages, reduction))
        options = SimpleNamespace(**CORRECTIONS[correction])
        given = algorithm_config(name, loss_reduction=reduction, off_policy_correction=options)
        rollout = None if name == "dppo" else rollout
        got, expected = (
            skyrl_call(skyrls(each), start, old, scaled, given, rollout=rollout) for each in (ours, name)
        )
        assert expected[1].count_nonzero() > 0
        spread = ours == "gk_gspo" and correction in ("token", "masks")  # one coefficient per sequence
        pick = (lambda x: x.sum(1)) if spread else (lambda x: x)
        assert_equal(pick(got[1]), pick(expected[1]), guard)
        if name == "dppo":
            # r A and sg[r] A logp have the same gradient; tokens with A = 0 may count as clipped or not
            continue
        assert_equal(got[0], expected[0], guard)
        for metric, value in expected[2].items():
            assert got[2][metric] == pytest.approx(value, rel=1e-6, abs=1e-7), metric


class Table(torch.nn.Module):
    """A bigram model with the call of SkyRL's ``HFModelWrapper``, which needs flash-attn."""

    def __init__(self, vocabulary=11):
        super().__init__()
        self.logits = torch.nn.Embedding(vocabulary, vocabulary, dtype=torch.float64)

    def forward(self, sequences, num_actions, **options):
        logprobs = self.logits(sequences).log_softmax(-1)
        chosen = logprobs[:, :-1].gather(-1, sequences[:, 1:, None]).squeeze(-1)
        return chosen[:, -num_actions:], {"entropy": -(logprobs.exp() * logprobs).sum(-1)}


@needs("skyrl")
@pytest.mark.parametrize(("ours", "theirs"), [("gk_gspo_token", "gspo"), ("gk_grpo", "regular")])
def test_a_step_of_skyrl_s_worker(ours, theirs, monkeypatch):
    """Gradients and metrics of its micro-batches, with KL, equal those of its own loss."""
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
    from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase
    from skyrl.train.config import TrainerConfig

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    start, old, advantages, _, rollout = batch()
    prompts = torch.ones(len(LENGTHS), 2, dtype=torch.int64)
    rng = torch.Generator().manual_seed(shifted_seed(3))
    sequences = torch.cat([prompts, torch.randint(11, MASK.shape, generator=rng)], 1)
    table, results = Table(), []
    for name in (ours, theirs):
        config = TrainerConfig(micro_train_batch_size_per_gpu=4)
        config.algorithm = algorithm_config(name, eps_clip_low=0.5, eps_clip_high=0.5)
        config.algorithm.use_kl_loss = True
        model, worker = table, PolicyWorkerBase.__new__(PolicyWorkerBase)
        optimizer = torch.optim.SGD(model.parameters())
        model.zero_grad()
        vars(worker).update(
            cfg=config, model=model, optimizer=optimizer, policy_loss_fn=skyrls(name),
            scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer), mesh_rank=SimpleNamespace(dp_size=1),
            device_mesh=SimpleNamespace(get_group=lambda name: None),
            strategy=SimpleNamespace(
                backward=lambda loss, *_: loss.backward(), all_reduce=lambda values, *_, **__: values
            ),
        )  # fmt: skip
        data = TrainingInputBatch({
            "sequences": sequences, "attention_mask": torch.ones_like(sequences), "loss_mask": MASK.long(),
            "response_mask": MASK.long(), "action_log_probs": old - 2, "base_action_log_probs": start - 2,
            "advantages": scale(advantages, "sequence_mean"), "values": None, "returns": None,
            "rollout_logprobs": rollout - 2,
        })  # fmt: skip
        data.metadata = {"response_length": MASK.shape[1]}
        metrics = worker.forward_backward(data).metrics
        results.append((metrics, model.logits.weight.grad.clone()))
    (got, gradient), (want, expected) = results
    assert_equal(gradient, expected, 1e-6)
    assert want["policy_kl"] > 0 and 0 < want["loss_metrics/clip_ratio"] < 1
    assert got == pytest.approx({**got, **want}, rel=1e-5, abs=1e-6)
