"""The hook for verl 0.9.1, without verl; by verl's own code where its sources are; and inside verl."""

import importlib
import importlib.util
import inspect
import json
import math
import os
import socket
import subprocess
import sys
import types
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import objectives
from gspo_kernels.integrations import verl as adapter
from gspo_kernels.integrations.errors import IntegrationError
from tests.draws import shifted_seed
from tests.integrations import peers
from tests.integrations.registry_cases import (  # noqa: F401
    LENGTHS,
    MASK,
    NO_RANGE,
    assert_equal,
    clipped_by_hand,
    quiet,
    warn_anew,
)
from tests.integrations.registry_cases import batch as all_of_batch

ROOT = Path(__file__).parents[2]
MODES = tuple(adapter.AGGREGATIONS)
LOSSES = adapter.LOSSES
INFO = {"dp_size": 2, "batch_num_tokens": sum(LENGTHS), "global_batch_size": 6, "loss_scale_factor": 16}
GUARD = 5e-8
"""Of verl's means over a sequence, which divide by |y| + 1e-8."""
REFUSED = {
    "gk_agro": "ref_logprobs and group_ids",
    "gk_clip_cov": "whole batch",
    "gk_dpo": "ref_logprobs and group_ids",
    "gk_egsw": "entropy and group_ids",
    "gk_espo": "token_weights and lengths and ref_logprobs",
    "gk_kl_cov": "whole batch",
    "gk_linear": "token_weights",
    "gk_m2po": "whole batch",
    "gk_real": "group_ids",
    "gk_rebel": "group_ids",
    "gk_tl_grpo": "turn_ids",
    "gk_trpa": "ref_logprobs and group_ids",
}


def config(**changed):
    """What verl's ActorConfig holds, with its defaults but for the clip ranges."""
    values = {
        "clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5,
        "tau_pos": 1.0, "tau_neg": 1.05, "policy_loss": SimpleNamespace(dro_beta=0.3),
        "global_batch_info": {},
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changed})


def batch(*arguments):
    return all_of_batch(*arguments)[:4]


def values(loss_fn, start, old, advantages, weights=None, mask=MASK, mode="token-mean", config=None):
    """Loss, gradient and metrics, called as verl's actor does."""
    start = start.clone().requires_grad_()
    loss, metrics = loss_fn(
        old_log_prob=old, log_prob=start, advantages=advantages, response_mask=mask,
        loss_agg_mode=mode, config=config, rollout_is_weights=weights,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, start)
    return loss.detach(), gradient, metrics


quietly = quiet(values)


# ------------------------------------------------------ without verl


def test_every_objective_has_two_names_and_runs_or_says_why_not():
    assert len(LOSSES) == 2 * len(objectives.__all__)
    assert {"gk_gspo", "gk_gspo_config", "gk_dr_grpo", "gk_gspo_token"} <= set(LOSSES)
    start, old, advantages, weights = batch()
    for name, loss_fn in LOSSES.items():
        call, objective = (loss_fn, start, old, advantages, weights), name.removesuffix("_config")
        if objective in REFUSED:
            with pytest.raises(IntegrationError, match=REFUSED[objective]):
                quietly(*call, config=config())
            continue
        loss, gradient, metrics = quietly(*call, config=config())
        assert loss.isfinite() and gradient.isfinite().all() and gradient[~MASK].count_nonzero() == 0, name
        assert gradient.count_nonzero() > 0 and all(isinstance(each, float) for each in metrics.values())
        narrow = quietly(*call, config=config(clip_ratio_low=0.01, clip_ratio_high=0.02))
        same = torch.equal(narrow[0], loss) and torch.equal(narrow[1], gradient)
        assert same == (objective in NO_RANGE), name


def test_the_signature_is_verls():
    nothing, parameters = inspect.Parameter.empty, inspect.signature(LOSSES["gk_gspo"]).parameters
    assert {name: each.default for name, each in parameters.items()} == {
        "old_log_prob": nothing, "log_prob": nothing, "advantages": nothing, "response_mask": nothing,
        "loss_agg_mode": "token-mean", "config": None, "rollout_is_weights": None,
    }  # fmt: skip
    if importlib.util.find_spec("verl") is not None:
        for name in ("vanilla", "gspo"):
            assert [*inspect.signature(verls(name)).parameters] == [*parameters]


def test_gspo_by_hand():
    start, old, mask, loss, gradient, (first, second) = clipped_by_hand()
    advantages = torch.tensor([[2.0], [-1.0]], dtype=torch.float64).expand(2, 3)
    given = config(clip_ratio_high=0.05)
    got = quietly(LOSSES["gk_gspo"], start, old, advantages, mask=mask, config=given)
    assert got[0].item() == pytest.approx(loss)
    torch.testing.assert_close(got[1], gradient)
    assert got[2] == pytest.approx(
        {
            "actor/pg_clipfrac": 3 / 5, "actor/ppo_kl": -0.5 / 5, "actor/pg_clipfrac_lower": 0.0,
            "actor/ratio/mean": (first + second) / 2, "actor/ratio/min": second, "actor/ratio/max": first,
            "actor/active_fraction": 0.5,
        }
    )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_ranks_and_micro_batches_add_up(mode):
    """Micro-batches' losses add up on a rank, and FSDP takes the mean over ranks."""
    start, old, advantages, weights = batch()
    given, whole = (config(global_batch_info={**INFO, "dp_size": size}) for size in (2, 1))
    for name in ("gk_gspo", "gk_gspo_config", "gk_grpo_config", "gk_vespo_config"):
        expected = quietly(LOSSES[name], start, old, advantages, weights, mode=mode, config=whole)
        parts = [
            quietly(LOSSES[name], start[r], old[r], advantages[r], weights[r], MASK[r], mode, given)
            for r in (slice(0, 1), slice(1, 3), slice(3, 5), slice(5, 6))
        ]
        assert_equal(sum(part[0] for part in parts) / 2, expected[0])
        assert_equal(torch.cat([part[1] for part in parts]) / 2, expected[1])
        alone = quietly(LOSSES[name], start, old, advantages, weights, mode=mode, config=config())
        # 16 instead of T = 8
        scaled = 2.0 if mode == "seq-mean-token-sum-norm" and name != "gk_gspo" else 1.0
        assert_equal(alone[0] / scaled, expected[0])
        if name == "gk_gspo":  # the mean over sequences, whatever the mode
            objective = gk.GSPO(0.2, 0.28)
            terms = {"loss_mask": MASK, "rollout_weights": weights, "objective": objective}
            assert_equal(alone[0], gk.policy_loss(start, old, advantages[:, 0], **terms).loss)


def test_warnings_come_once():
    start, old, advantages, _ = batch()
    wide, narrow = config(), config(clip_ratio_low=3e-4, clip_ratio_high=4e-4)
    with pytest.warns(UserWarning) as caught:
        for _ in range(2):
            values(LOSSES["gk_gspo"], start, old, advantages, mode="token-mean", config=wide)
    told = [str(each.message) for each in caught]
    assert len(told) == 2
    assert "gk_gspo: aggregates by 'seq-mean-token-mean', while loss_agg_mode='token-mean'" in told[0]
    assert "clip range of 0.28" in told[1] and "clip_ratio_low=0.0003, clip_ratio_high=0.0004" in told[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values(LOSSES["gk_gspo"], start, old, advantages, mode="seq-mean-token-mean", config=narrow)
        values(LOSSES["gk_gspo_config"], start, old, advantages, config=narrow)
        values(LOSSES["gk_grpo_config"], start, old, advantages, config=wide)


def test_without_a_counted_token():
    start, old, advantages, _ = batch()
    for name, info in (("gk_gspo", {}), ("gk_dapo", {**INFO, "batch_num_tokens": 0})):
        given = config(global_batch_info=info)
        loss, gradient, _ = quietly(LOSSES[name], start, old, advantages, mask=MASK & False, config=given)
        assert loss == 0 and gradient.count_nonzero() == 0


def test_wrong_calls():
    start, old, advantages, weights = batch()

    def refused(message, name="gk_gspo", advantages=advantages, error=IntegrationError, **call):
        with pytest.raises(error, match=message):
            quietly(LOSSES[name], start, old, advantages, **call)

    varied = advantages + 0.1 * weights
    refused("advantages: differ within a sequence, but GSPO", "gk_gspo", varied, ValueError, config=config())
    quietly(LOSSES["gk_gspo_token"], start, old, varied, config=config())
    refused("config: got None")
    refused("loss_agg_mode: got 'mean'", error=ValueError, mode="mean", config=config())
    missing = config(clip_ratio_low=None, clip_ratio=None)
    refused(r"config\.clip_ratio_low: missing", config=missing)
    refused(
        "gk_grpo: dual_clip: got 1.1.*clip_low=0.2, clip_high=0.28, dual_clip=1.1",
        "gk_grpo", config=config(clip_ratio_c=1.1),
    )  # fmt: skip
    missing = config(policy_loss=SimpleNamespace(dro_beta=None))
    refused(r"config\.policy_loss\.dro_beta: missing", "gk_dro", config=missing)
    alone = config(global_batch_info={"dp_size": 2})
    for mode, total in (("token-mean", "batch_num_tokens"), ("seq-mean-token-sum", "global_batch_size")):
        refused(f"dp_size=2 but no {total}", "gk_grpo_config", mode=mode, config=alone)
    quietly(LOSSES["gk_grpo_config"], start, old, advantages, mode="token-sum", config=alone)
    with pytest.raises(TypeError, match="objective: got the class GSPO"):
        adapter.register("mine", gk.GSPO)
    with pytest.raises(ValueError, match="follow_config: got True"):
        adapter.VerlPolicyLoss("mine", gk.GSPO(), follow_config=True)


def test_one_range_for_both_sides():
    """verl falls back to clip_ratio where a side is None."""
    start, old, advantages, _ = batch()
    one = config(clip_ratio=0.1, clip_ratio_low=None, clip_ratio_high=None)
    two = config(clip_ratio_low=0.1, clip_ratio_high=0.1)
    got = [quietly(LOSSES["gk_gspo"], start, old, advantages, config=each) for each in (one, two)]
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


def test_registering(monkeypatch):
    """In verl's registry; at another version every name says so."""
    registry = {}
    algos = types.ModuleType("verl.trainer.ppo.core_algos")
    algos.register_policy_loss = lambda name: lambda function: registry.setdefault(name, function)
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.core_algos", algos)
    for name in ("verl", "verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(adapter, "require_package", lambda *arguments: "0.9.1")
    adapter._register_all()
    assert registry == LOSSES
    assert adapter.register("mine", gk.GSPO()) is registry["mine"]
    registry.clear()

    def require(*arguments):
        raise IntegrationError("verl: version 0.7.0 is installed, this adapter needs verl>=0.9.1,<0.10")

    monkeypatch.setattr(adapter, "require_package", require)
    adapter._register_all()
    assert set(registry) == set(LOSSES)
    with pytest.raises(IntegrationError, match=r"version 0\.7\.0 is installed"):
        registry["gk_gspo"](old_log_prob=1, another_keyword=2)
    with pytest.raises(IntegrationError, match=r"version 0\.7\.0 is installed"):
        adapter.register("mine", gk.GSPO())
    assert importlib.import_module(entry_point()[1]) is adapter


def entry_point():
    """The plugin's line of pyproject.toml, as an installed package has it."""
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, target),) = project["entry-points"]["verl.plugins"].items()
    return name, target


# ------------------------------------------------------ by verl's own code


@pytest.fixture(scope="module")
def sources():
    """verl's SAPO and GMPO, which go their own way about modes and weights, and what they call."""
    path = peers.source("verl", "verl/utils/torch_functional.py")
    return peers.extract(
        peers.source("verl", "verl/trainer/ppo/core_algos.py"), "agg_loss", "compute_policy_loss_sapo",
        "compute_policy_loss_geo_mean", ActorConfig=SimpleNamespace, AlgoConfig=type("AlgoConfig", (), {}),
        verl_F=SimpleNamespace(**peers.extract(path, "masked_sum", "masked_mean")),
    )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_sapo_is_the_mean_over_sequences_in_every_mode(mode, sources):
    """So ``gk_sapo`` is verl's whatever the mode, and ``gk_sapo_config``, which follows it, in one."""
    start, old, advantages, weights = batch()
    call = {"mode": mode, "config": config()}
    expected = values(sources["compute_policy_loss_sapo"], start, old, advantages, weights, **call)
    got = quietly(LOSSES["gk_sapo"], start, old, advantages, weights, **call)
    assert_equal(got[:2], expected[:2], GUARD)
    follows = quietly(LOSSES["gk_sapo_config"], start, old, advantages, weights, **call)
    if mode == "seq-mean-token-mean":
        assert_equal(follows[:2], expected[:2], GUARD)
    else:
        assert abs(follows[0] - expected[0]) > 1e-3


def test_geo_mean_takes_the_geometric_mean_of_weights_per_token(sources):
    """One weight per sequence: the same. One per token: this package takes their mean, verl the geometric."""
    start, old, advantages, weights = batch()
    call = {"mode": "seq-mean-token-mean", "config": config()}
    theirs, ours = sources["compute_policy_loss_geo_mean"], LOSSES["gk_gmpo"]
    for same in (None, weights[:, :1].expand(MASK.shape)):
        got = quietly(ours, start, old, advantages, same, **call)
        assert_equal(got[:2], values(theirs, start, old, advantages, same, **call)[:2], GUARD)
    weights = torch.where(MASK, weights, 1.0)
    expected = values(theirs, start, old, advantages, weights, **call)
    assert abs(quietly(ours, start, old, advantages, weights, **call)[0] - expected[0]) > 1e-4
    geometric = ((weights.log() * MASK).sum(1) / MASK.sum(1)).exp().unsqueeze(1).expand(MASK.shape)
    assert_equal(quietly(ours, start, old, advantages, geometric, **call)[:2], expected[:2], GUARD)


# ------------------------------------------------------ inside verl

needs_verl = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None,
    reason="verl is missing; it needs transformers < 5.11, so an environment of its own",
)
PAIRS = {
    "gk_gspo": "gspo", "gk_gspo_config": "gspo", "gk_gspo_token_config": "gspo", "gk_sapo": "sapo",
    "gk_grpo_config": "vanilla", "gk_cispo_config": "cispo", "gk_gpg_config": "gpg",
    "gk_dro_config": "dro", "gk_dppo_config": "dppo_tv",
}  # fmt: skip


def verl_config(**changed):
    from verl.workers.config import ActorConfig, PolicyLossConfig

    values = vars(config(**changed))
    values["policy_loss"] = PolicyLossConfig(dro_beta=values["policy_loss"].dro_beta)
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **values)


def verls(name):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    return get_policy_loss_fn(name)


@needs_verl
@pytest.mark.parametrize("info", [{}, INFO], ids=["alone", "global"])
@pytest.mark.parametrize("ours", PAIRS)
def test_equals_verl(ours, info):
    """Values, gradients and metrics in each mode, through verl's own registry and config."""
    theirs, spreads = PAIRS[ours], ours in ("gk_gspo", "gk_gspo_config")
    for mode in MODES if ours.endswith("_config") else ("seq-mean-token-mean",):
        start, old, advantages, token_weights = batch()
        guard = GUARD if mode == "seq-mean-token-mean" else 0.0
        for weights in (None, token_weights[:, :1].expand(MASK.shape), token_weights):
            if spreads and weights is token_weights and mode != "seq-mean-token-mean":
                continue
            call = {"mode": mode, "config": verl_config(global_batch_info=info)}
            got = quietly(verls(ours), start, old, advantages, weights, **call)
            expected = values(verls(theirs), start, old, advantages, weights, **call)
            assert_equal(got[0], expected[0], guard)
            if spreads and weights is token_weights:
                # GSPO has one coefficient per sequence, and verl's keeps one weight per token
                assert_equal(got[1].sum(1), expected[1].sum(1), guard)
                assert (got[1] - expected[1]).abs().max() > 1e-3
            else:
                assert_equal(got[1], expected[1], guard)
            assert got[1].count_nonzero() > 0
            for name, value in expected[2].items():
                if (theirs, name) != ("dppo_tv", "actor/pg_clipfrac_lower"):
                    assert got[2][name] == pytest.approx(value, rel=1e-6, abs=1e-7), name
            if theirs == "vanilla":
                assert 0 < got[2]["actor/pg_clipfrac_lower"] < got[2]["actor/pg_clipfrac"]
    if ours == "gk_gspo_token_config":
        varied = advantages + 0.3 * token_weights - 0.3
        call = {"mode": "seq-mean-token-mean", "config": verl_config(global_batch_info=info)}
        got, expected = (quietly(verls(n), start, old, varied, **call) for n in (ours, theirs))
        assert_equal(got[:2], expected[:2], GUARD)


@needs_verl
@pytest.mark.parametrize(("ours", "theirs"), [("gk_gspo", "gspo"), ("gk_grpo_config", "vanilla")])
def test_fp32_is_as_near_to_fp64_as_verls(ours, theirs):
    call = {"mode": "seq-mean-token-mean", "config": verl_config()}
    exact = values(verls(theirs), *batch()[:3], **call)
    single = batch(0, torch.float32)[:3]
    for index in range(2):
        plain = values(verls(theirs), *single, **call)[index]
        got = quietly(verls(ours), *single, **call)[index]
        assert got.dtype == torch.float32
        budget = torch.finfo(torch.float32).eps * exact[index].abs().max()
        assert (got - exact[index]).abs().max() <= 2 * (plain - exact[index]).abs().max() + budget


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment in which this checkout counts as an installed package, with its entry point."""
    folder = tmp_path_factory.mktemp("installed")
    info = folder / "gspo_kernels-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gspo_kernels\nVersion: 0.1.0\n")
    name, target = entry_point()
    (info / "entry_points.txt").write_text(f"[verl.plugins]\n{name} = {target}\n")
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


SEQUENCE = {"loss_agg_mode": "seq-mean-token-mean", "clip_ratio_low": 0.03, "clip_ratio_high": 0.04}
SEQUENCE |= {"use_kl_loss": True, "kl_loss_coef": 0.05, "entropy_coeff": 0.01}
TOKEN = {"loss_agg_mode": "token-mean", "clip_ratio_low": 0.03, "clip_ratio_high": 0.04, "clip_ratio_c": 1.06}


def update_actor(folder, installed, world, runs):
    """Four updates in verl's FSDP2 engine per (loss, config): weights before, [(metrics, weights)] after."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(shifted_seed(0))
    network = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            max_position_embeddings=64,
        )
    )  # fmt: skip
    network.save_pretrained(folder / "model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = str(Path(__file__).with_name("verl_actor.py"))
    output = {"env": installed, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = []
    for rank in range(world):
        arguments = map(str, (folder / "model", folder, rank, world, port))
        ranks.append(subprocess.Popen([sys.executable, script, *arguments, json.dumps(runs)], **output))
    try:
        logs = [rank.communicate(timeout=900)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), logs[0][-3000:]
    before = {name: value.detach() for name, value in network.state_dict().items()}
    return before, [torch.load(folder / f"{index}.pt") for index in range(len(runs))]


def moved(weights, since):
    return torch.cat([(weights[name] - since[name]).flatten() for name in sorted(weights)])


@needs_verl
def test_actor_updates_in_verls_engine(tmp_path_factory, installed):
    """Old log-probs, micro-batches, entropy, KL, optimizer: weights and metrics as with verl's own losses.

    In one process and in two, and with verl's own loss over our log-probs. verl finds the losses by itself.
    """

    def close(one, other):
        return (moved(one, before) - moved(other, before)).norm() <= 1e-5 * moved(other, before).norm()

    runs = [("gspo", SEQUENCE), ("gk_gspo", SEQUENCE), ("vanilla", TOKEN), ("gk_grpo_config", TOKEN)]
    before, alone = update_actor(tmp_path_factory.mktemp("alone"), installed, 1, runs)
    for (theirs, weights), (ours, own) in zip(alone[::2], alone[1::2], strict=True):
        assert close(own, weights)
        for one, other in zip(theirs, ours, strict=True):
            assert other == pytest.approx({**other, **one}, rel=1e-4, abs=1e-6)
        assert ours[0]["actor/ratio/min"] == ours[0]["actor/ratio/max"] == 1.0
        assert 0 < ours[2]["actor/pg_clipfrac"] < 1 and 0 < ours[2]["actor/active_fraction"] <= 1
    _, together = update_actor(tmp_path_factory.mktemp("together"), installed, 2, runs[1::2])
    assert all(close(two[1], one[1]) for one, two in zip(alone[::2], together, strict=True))
    scored = {**installed, "VERL_USE_EXTERNAL_MODULES": "gspo_kernels.integrations.backends.verl_workers"}
    _, ((ours, own),) = update_actor(tmp_path_factory.mktemp("scored"), scored, 1, runs[:1])
    assert close(own, alone[0][1])
    for one, other in zip(alone[0][0], ours, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6)
