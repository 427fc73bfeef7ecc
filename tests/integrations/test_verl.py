"""The hook for verl, without verl."""

import importlib
import importlib.util
import inspect
import math
import sys
import types
import warnings
from types import SimpleNamespace

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import objectives
from gspo_kernels.integrations import configured
from gspo_kernels.integrations import verl as adapter
from gspo_kernels.integrations.errors import IntegrationError
from tests.integrations.verl_cases import (
    INFO,
    LENGTHS,
    MASK,
    MODES,
    SIGNATURE,
    assert_equal,
    batch,
    config,
    entry_points,
    quietly,
    values,
)

REFUSED = {
    "gk_agro": "ref_logprobs and group_ids",
    "gk_clip_cov": "whole batch",
    "gk_dpo": "ref_logprobs and group_ids",
    "gk_egsw": "entropy and group_ids",
    "gk_espo": "token_weights and lengths and ref_logprobs",
    "gk_kl_cov": "whole batch",
    "gk_linear": "token_weights",
    "gk_rebel": "group_ids",
    "gk_tl_grpo": "turn_ids",
    "gk_trpa": "ref_logprobs and group_ids",
}
NO_RANGE = {"gk_gpg", "gk_topr", "gk_vespo", "gk_sapo", "gk_sspo", "gk_dro"}
SERVED = sorted(name for name in adapter.LOSSES if name.removesuffix("_config") not in REFUSED)


@pytest.fixture(autouse=True)
def warn_anew():
    configured.warn_once.cache_clear()


def test_every_objective_has_two_names():
    assert len(adapter.LOSSES) == 2 * len(objectives.__all__)
    assert {"gk_gspo", "gk_gspo_config", "gk_dr_grpo", "gk_gspo_token"} <= set(adapter.LOSSES)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_hook_cannot_serve_says_why(name):
    start, old, advantages, _ = batch()
    with pytest.raises(IntegrationError, match=REFUSED[name]):
        quietly(adapter.LOSSES[name], start, old, advantages, config=config())


@pytest.mark.parametrize("name", SERVED)
def test_every_other_objective_runs_and_takes_the_clip_range_from_the_config(name):
    start, old, advantages, weights = batch()
    arguments = (adapter.LOSSES[name], start, old, advantages, weights)
    loss, gradient, metrics = quietly(*arguments, config=config())
    assert loss.isfinite() and gradient.isfinite().all() and gradient[~MASK].count_nonzero() == 0
    assert gradient.count_nonzero() > 0 and all(isinstance(each, float) for each in metrics.values())
    narrow = quietly(*arguments, config=config(clip_ratio_low=0.01, clip_ratio_high=0.02))
    same = torch.equal(narrow[0], loss) and torch.equal(narrow[1], gradient)
    assert same == (name.removesuffix("_config") in NO_RANGE)


"""Of verl 0.9.1's losses."""


def test_the_signature_is_verls():
    ours = inspect.signature(adapter.LOSSES["gk_gspo"]).parameters
    assert {name: each.default for name, each in ours.items()} == SIGNATURE


def test_gspo_by_hand():
    start = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -1.0, 0.0]], dtype=torch.float64)
    old = torch.tensor([[-1.1, -2.2, -0.5], [-1.5, -1.2, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    advantages = torch.tensor([[2.0], [-1.0]], dtype=torch.float64).expand(2, 3)
    given = config(clip_ratio_low=0.2, clip_ratio_high=0.05)
    loss, gradient, metrics = quietly(
        adapter.LOSSES["gk_gspo"], start, old, advantages, mask=mask, config=given
    )
    first, second = math.exp(0.3 / 3), math.exp(0.2 / 2)
    assert loss.item() == pytest.approx((-1.05 * 2.0 + second) / 2)
    assert gradient[0].tolist() == [0, 0, 0]
    assert gradient[1].tolist() == pytest.approx([second / 4, second / 4, 0])
    assert metrics == pytest.approx(
        {
            "actor/pg_clipfrac": 3 / 5,
            "actor/ppo_kl": -0.5 / 5,
            "actor/pg_clipfrac_lower": 0.0,
            "actor/ratio/mean": (first + second) / 2,
            "actor/ratio/min": second,
            "actor/ratio/max": first,
            "actor/active_fraction": 0.5,
        }
    )


@pytest.mark.parametrize("mode", MODES)
def test_gspo_is_the_mean_over_sequences_whatever_the_mode(mode):
    start, old, advantages, weights = batch()
    expected = gk.policy_loss(
        start, old, advantages[:, 0], loss_mask=MASK, rollout_weights=weights, objective=gk.GSPO(0.2, 0.28)
    )
    got = quietly(adapter.LOSSES["gk_gspo"], start, old, advantages, weights, mode=mode, config=config())
    assert_equal(got[0], expected.loss)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["gk_gspo", "gk_gspo_config", "gk_grpo_config", "gk_vespo_config"])
def test_ranks_and_micro_batches_add_up(name, mode):
    """Micro-batches' losses add up on a rank, and FSDP takes the mean over ranks."""
    start, old, advantages, weights = batch()
    given = config(global_batch_info=INFO)
    whole = config(global_batch_info={**INFO, "dp_size": 1})
    loss_fn = adapter.LOSSES[name]
    expected = quietly(loss_fn, start, old, advantages, weights, mode=mode, config=whole)
    parts = [
        quietly(loss_fn, start[rows], old[rows], advantages[rows], weights[rows], MASK[rows], mode, given)
        for rows in (slice(0, 1), slice(1, 3), slice(3, 5), slice(5, 6))
    ]
    assert_equal(sum(part[0] for part in parts) / 2, expected[0])
    assert_equal(torch.cat([part[1] for part in parts]) / 2, expected[1])
    alone = quietly(loss_fn, start, old, advantages, weights, mode=mode, config=config())
    scaled = 2.0 if mode == "seq-mean-token-sum-norm" and name != "gk_gspo" else 1.0  # 16 instead of T = 8
    assert_equal(alone[0] / scaled, expected[0])


@pytest.mark.parametrize(
    ("mode", "missing"), [("token-mean", "batch_num_tokens"), ("seq-mean-token-sum", "global_batch_size")]
)
def test_ranks_without_totals_are_refused(mode, missing):
    start, old, advantages, _ = batch()
    given = config(global_batch_info={"dp_size": 2})
    with pytest.raises(IntegrationError, match=f"dp_size=2 but no {missing}"):
        quietly(adapter.LOSSES["gk_grpo_config"], start, old, advantages, mode=mode, config=given)
    quietly(adapter.LOSSES["gk_grpo_config"], start, old, advantages, mode="token-sum", config=given)


def test_warnings_come_once():
    start, old, advantages, _ = batch()
    wide, narrow = config(), config(clip_ratio_low=3e-4, clip_ratio_high=4e-4)
    with pytest.warns(UserWarning) as caught:
        for _ in range(2):
            values(adapter.LOSSES["gk_gspo"], start, old, advantages, mode="token-mean", config=wide)
    told = [str(each.message) for each in caught]
    assert len(told) == 2
    assert "gk_gspo: aggregates by 'seq-mean-token-mean', while loss_agg_mode='token-mean'" in told[0]
    assert "clip range of 0.28" in told[1] and "clip_ratio_low=0.0003, clip_ratio_high=0.0004" in told[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values(adapter.LOSSES["gk_gspo"], start, old, advantages, mode="seq-mean-token-mean", config=narrow)
        values(adapter.LOSSES["gk_gspo_config"], start, old, advantages, config=narrow)
        values(adapter.LOSSES["gk_grpo_config"], start, old, advantages, config=wide)


def test_advantages_per_token():
    start, old, advantages, weights = batch()
    varied = advantages + 0.1 * weights
    with pytest.raises(ValueError, match="advantages: differ within a sequence, but GSPO"):
        quietly(adapter.LOSSES["gk_gspo"], start, old, varied, config=config())
    quietly(adapter.LOSSES["gk_gspo_token"], start, old, varied, config=config())


def test_without_a_counted_token():
    start, old, advantages, _ = batch()
    for name, info in (("gk_gspo", {}), ("gk_dapo", {**INFO, "batch_num_tokens": 0})):
        given = config(global_batch_info=info)
        loss, gradient, _ = quietly(
            adapter.LOSSES[name], start, old, advantages, mask=~MASK & False, config=given
        )
        assert loss == 0 and gradient.count_nonzero() == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"clip_ratio_low": None, "clip_ratio": None}, "config.clip_ratio_low: missing"),
        ({"clip_ratio_c": 1.1}, "gk_grpo: dual_clip: got 1.1.*clip_low=0.2, clip_high=0.28, dual_clip=1.1"),
    ],
)
def test_configs_that_cannot_be_served(changed, message):
    start, old, advantages, _ = batch()
    with pytest.raises(IntegrationError, match=message):
        quietly(adapter.LOSSES["gk_grpo"], start, old, advantages, config=config(**changed))


def test_other_wrong_calls():
    start, old, advantages, _ = batch()
    call = (adapter.LOSSES["gk_gspo"], start, old, advantages)
    with pytest.raises(IntegrationError, match="config: got None"):
        quietly(*call)
    with pytest.raises(ValueError, match="loss_agg_mode: got 'mean'"):
        quietly(*call, mode="mean", config=config())
    given = config(policy_loss=SimpleNamespace(dro_beta=None))
    with pytest.raises(IntegrationError, match=r"config\.policy_loss\.dro_beta: missing"):
        quietly(adapter.LOSSES["gk_dro"], start, old, advantages, config=given)
    with pytest.raises(TypeError, match="objective: got the class GSPO"):
        adapter.register("mine", gk.GSPO)
    with pytest.raises(ValueError, match="follow_config: got True"):
        adapter.VerlPolicyLoss("mine", gk.GSPO(), follow_config=True)


def test_one_range_for_both_sides():
    """verl falls back to clip_ratio where a side is None."""
    start, old, advantages, _ = batch()
    one = config(clip_ratio=0.1, clip_ratio_low=None, clip_ratio_high=None)
    two = config(clip_ratio_low=0.1, clip_ratio_high=0.1)
    got = [quietly(adapter.LOSSES["gk_gspo"], start, old, advantages, config=each) for each in (one, two)]
    assert torch.equal(got[0][1], got[1][1])


def test_an_objective_of_ones_own_is_taken_as_it_is():
    start, old, advantages, _ = batch()
    objective = gk.GSPO(0.1, 0.2, dual_clip=1.3, aggregation="token_mean")
    loss = adapter.VerlPolicyLoss("mine", objective)
    with pytest.warns(UserWarning, match="mine: aggregates by 'token-mean', while .* set it too$"):
        got = values(loss, start, old, advantages, mode="seq-mean-token-sum", config=config())
    expected = gk.policy_loss(start, old, advantages[:, 0], loss_mask=MASK, objective=objective)
    assert_equal(got[0], expected.loss)
    clipped = got[2]["actor/pg_clipfrac"] + got[2]["actor/pg_clipfrac_lower"]
    means = (start - old).sum(1) / MASK.sum(1)
    dual = (advantages[:, 0] < 0) & (means > math.log(1.3))
    assert got[2]["actor/pg_clipfrac_lower"] == pytest.approx(MASK[dual].sum() / sum(LENGTHS)) and dual.any()
    assert clipped == pytest.approx(expected.metrics["clip_fraction/tokens"].item())


def fake_verl(monkeypatch):
    """verl's registry at a version that isn't supported."""
    registry = {}
    algos = types.ModuleType("verl.trainer.ppo.core_algos")
    algos.register_policy_loss = lambda name: lambda function: registry.setdefault(name, function)
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.core_algos", algos)
    for name in ("verl", "verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return registry


def test_at_another_version_every_name_says_so(monkeypatch):
    registry = fake_verl(monkeypatch)

    def require(*arguments):
        raise IntegrationError("verl: version 0.7.0 is installed, this adapter needs verl>=0.9.1,<0.10")

    monkeypatch.setattr(adapter, "require_package", require)
    adapter._register_all()
    assert set(registry) == set(adapter.LOSSES)
    with pytest.raises(IntegrationError, match=r"version 0\.7\.0 is installed"):
        registry["gk_gspo"](old_log_prob=1, another_keyword=2)
    with pytest.raises(IntegrationError, match=r"version 0\.7\.0 is installed"):
        adapter.register("mine", gk.GSPO())


def test_registering(monkeypatch):
    registry = fake_verl(monkeypatch)
    monkeypatch.setattr(adapter, "require_package", lambda *arguments: "0.9.1")
    adapter._register_all()
    assert registry == adapter.LOSSES
    assert adapter.register("mine", gk.GSPO()) is registry["mine"]


def test_the_entry_point_leads_here():
    _, target = entry_points()
    assert importlib.import_module(target) is adapter
