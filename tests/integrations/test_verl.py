"""verl's hook: signature, config, divisors; with verl installed also its numbers and its actor."""

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
from gspo_kernels.integrations import configured
from gspo_kernels.integrations import verl as adapter
from gspo_kernels.integrations.errors import IntegrationError
from tests.draws import shifted_seed

ROOT = Path(__file__).parents[2]
needs_verl = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None,
    reason="verl is missing; it needs transformers < 5.11, so an environment of its own",
)
MODES = tuple(adapter.AGGREGATIONS)
LENGTHS = (8, 3, 5, 6, 1, 4)
MASK = torch.arange(8) < torch.tensor(LENGTHS).unsqueeze(1)
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


def config(**changed):
    """What verl's ActorConfig holds, with its defaults but for the clip ranges."""
    values = {
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": 1.5,
        "tau_pos": 1.0,
        "tau_neg": 1.05,
        "policy_loss": SimpleNamespace(dro_beta=0.3),
        "global_batch_info": {},
    }
    return SimpleNamespace(**{**values, **changed})


def batch(seed=0, dtype=torch.float64):
    """Log-probs, old ones, advantages one per sequence, and weights per token; NaN where not counted."""
    rng = torch.Generator().manual_seed(shifted_seed(seed))
    start = -torch.rand(MASK.shape, generator=rng, dtype=torch.float64) - 0.2
    shift = torch.tensor([0.3, -0.3, 0.3, -0.3, 0.0, 0.6]).double().unsqueeze(1)
    old = (start - shift - 0.2 * torch.randn(MASK.shape, generator=rng, dtype=torch.float64)).clamp(max=-0.01)
    advantages = torch.tensor([1.0, -0.5, -1.2, 0.8, 0.0, -2.0]).double().unsqueeze(1).expand(MASK.shape)
    weights = 0.5 + torch.rand(MASK.shape, generator=rng, dtype=torch.float64)
    return tuple(torch.where(MASK, each, 0.0).to(dtype) for each in (start, old, advantages, weights))


def values(loss_fn, start, old, advantages, weights=None, mask=MASK, mode="token-mean", config=None):
    """Loss, gradient and metrics, called as verl's actor does."""
    start = start.clone().requires_grad_()
    loss, metrics = loss_fn(
        old_log_prob=old, log_prob=start, advantages=advantages, response_mask=mask,
        loss_agg_mode=mode, config=config, rollout_is_weights=weights,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, start)
    return loss.detach(), gradient, metrics


def quietly(*arguments, **keywords):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return values(*arguments, **keywords)


def assert_equal(one, other, guard=0.0):
    torch.testing.assert_close(one, other, rtol=1e-10 + guard, atol=1e-14 + guard)


# ---------------------------------------------------------------------- without verl


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


SIGNATURE = {
    "old_log_prob": inspect.Parameter.empty,
    "log_prob": inspect.Parameter.empty,
    "advantages": inspect.Parameter.empty,
    "response_mask": inspect.Parameter.empty,
    "loss_agg_mode": "token-mean",
    "config": None,
    "rollout_is_weights": None,
}
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


INFO = {"dp_size": 2, "batch_num_tokens": sum(LENGTHS), "global_batch_size": 6, "loss_scale_factor": 16}


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


def entry_points():
    """The plugin's line of pyproject.toml, as an installed package has it."""
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, target),) = project["entry-points"]["verl.plugins"].items()
    return name, target


def test_the_entry_point_leads_here():
    _, target = entry_points()
    assert importlib.import_module(target) is adapter


# ------------------------------------------------------------------------- with verl


def verl_config(**changed):
    from verl.workers.config import ActorConfig, PolicyLossConfig

    values = vars(config(**changed))
    values["policy_loss"] = PolicyLossConfig(dro_beta=values["policy_loss"].dro_beta)
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **values)


def verls(name):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    return get_policy_loss_fn(name)


EVERY = dict.fromkeys(MODES)
MEAN = {"seq-mean-token-mean": None}
PAIRS = {
    "gk_gspo": ("gspo", MEAN),
    "gk_gspo_config": ("gspo", EVERY),
    "gk_gspo_token_config": ("gspo", EVERY),
    "gk_grpo_config": ("vanilla", EVERY),
    "gk_cispo_config": ("cispo", EVERY),
    "gk_gpg_config": ("gpg", EVERY),
    "gk_dro_config": ("dro", EVERY),
    "gk_dppo_config": ("dppo_tv", EVERY),
    "gk_sapo": ("sapo", MEAN),
}
CASES = [
    (ours, theirs, mode, weights)
    for ours, (theirs, modes) in PAIRS.items()
    for mode in modes
    for weights in ("none", "sequence", "token")
    # GSPO takes the mean of token weights; see test_token_weights
    if weights != "token" or ours not in ("gk_gspo", "gk_gspo_config")
]


@needs_verl
def test_the_signature_is_still_verls():
    for name in ("vanilla", "gspo"):
        theirs = inspect.signature(verls(name)).parameters
        assert list(theirs) == list(SIGNATURE)


@needs_verl
@pytest.mark.parametrize("info", [{}, INFO], ids=["alone", "global"])
@pytest.mark.parametrize(("ours", "theirs", "mode", "weights"), CASES)
def test_equals_verl(ours, theirs, mode, info, weights):
    """Values, gradients and metrics, through verl's own registry and config."""
    for seed in range(2):
        start, old, advantages, token_weights = batch(seed)
        by_sequence = token_weights[:, :1].expand(MASK.shape)
        given = {"none": None, "sequence": by_sequence, "token": token_weights}[weights]
        call = {"mode": mode, "config": verl_config(global_batch_info=info)}
        got = quietly(verls(ours), start, old, advantages, given, **call)
        expected = values(verls(theirs), start, old, advantages, given, **call)
        assert_equal(got[:2], expected[:2], guard=5e-8 if mode == "seq-mean-token-mean" else 0.0)
        assert got[1].count_nonzero() > 0
        for name, value in expected[2].items():
            if (theirs, name) != ("dppo_tv", "actor/pg_clipfrac_lower"):
                assert got[2][name] == pytest.approx(value, rel=1e-6, abs=1e-7), name
        if theirs == "vanilla":
            assert 0 < got[2]["actor/pg_clipfrac_lower"] < got[2]["actor/pg_clipfrac"]


@needs_verl
def test_token_weights():
    """GSPO has one coefficient per sequence, and verl's keeps one weight per token: equal values and sums."""
    start, old, advantages, weights = batch()
    call = {"mode": "seq-mean-token-mean", "config": verl_config()}
    got = quietly(verls("gk_gspo"), start, old, advantages, weights, **call)
    expected = values(verls("gspo"), start, old, advantages, weights, **call)
    assert_equal((got[0], got[1].sum(1)), (expected[0], expected[1].sum(1)), guard=5e-8)
    assert (got[1] - expected[1]).abs().max() > 1e-3


@needs_verl
def test_advantages_per_token_equal_verls():
    start, old, advantages, weights = batch()
    call = {"mode": "seq-mean-token-mean", "config": verl_config()}
    varied = advantages + 0.3 * weights - 0.3
    got = quietly(verls("gk_gspo_token"), start, old, varied, **call)
    expected = values(verls("gspo"), start, old, varied, **call)
    assert_equal(got[:2], expected[:2], guard=5e-8)


@needs_verl
def test_geo_mean():
    """verl divides by the rows of the micro-batch, whatever the mode and the global batch."""
    start, old, advantages, weights = batch()
    call = {"mode": "seq-mean-token-mean", "config": verl_config()}
    weights = weights[:, :1].expand(MASK.shape)
    got = quietly(verls("gk_gmpo"), start, old, advantages, weights, **call)
    assert_equal(got[:2], values(verls("geo_mean"), start, old, advantages, weights, **call)[:2], 5e-8)


@needs_verl
@pytest.mark.parametrize(("ours", "theirs"), [("gk_gspo", "gspo"), ("gk_grpo_config", "vanilla")])
def test_fp32_is_as_near_to_fp64_as_verls(ours, theirs):
    call = {"mode": "seq-mean-token-mean", "config": verl_config()}
    exact = values(verls(theirs), *batch()[:3], **call)
    single = batch(dtype=torch.float32)[:3]
    for index in range(2):
        of_theirs = values(verls(theirs), *single, **call)[index]
        of_ours = quietly(verls(ours), *single, **call)[index]
        assert of_ours.dtype == torch.float32
        largest = exact[index].abs().max()
        budget = 2 * (of_theirs - exact[index]).abs().max() + torch.finfo(torch.float32).eps * largest
        assert (of_ours - exact[index]).abs().max() <= budget


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment in which this checkout counts as an installed package, with its entry point."""
    folder = tmp_path_factory.mktemp("installed")
    info = folder / "gspo_kernels-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gspo_kernels\nVersion: 0.1.0\n")
    name, target = entry_points()
    (info / "entry_points.txt").write_text(f"[verl.plugins]\n{name} = {target}\n")
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@needs_verl
def test_verl_finds_the_plugin_by_itself(installed):
    code = (
        "import verl; from verl.trainer.ppo.core_algos import get_policy_loss_fn; "
        "print(get_policy_loss_fn('gk_gspo').name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=installed,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.stdout.strip() == "gk_gspo", done.stderr


SEQUENCE = {"loss_agg_mode": "seq-mean-token-mean", "clip_ratio_low": 0.03, "clip_ratio_high": 0.04}
TOKEN = {"loss_agg_mode": "token-mean", "clip_ratio_low": 0.03, "clip_ratio_high": 0.04, "clip_ratio_c": 1.06}
TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.05, "entropy_coeff": 0.01}


def update_actor(folder, installed, world, runs):
    """Four updates in verl's FSDP2 engine per (loss, config); histories of metrics and final weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = folder / "model"
    torch.manual_seed(shifted_seed(0))
    network = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            max_position_embeddings=64,
        )
    )  # fmt: skip
    network.save_pretrained(model)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = str(Path(__file__).with_name("verl_actor.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, *map(str, (model, folder, rank, world, port)), json.dumps(runs)],
            env=installed,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=900)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), said[0][-3000:]
    before = {name: value.detach() for name, value in network.state_dict().items()}
    return before, [torch.load(folder / f"{index}.pt") for index in range(len(runs))]


def moved(weights, since):
    return torch.cat([(weights[name] - since[name]).flatten() for name in sorted(weights)])


@needs_verl
def test_actor_updates_in_verls_engine(tmp_path_factory, installed):
    """Old log-probs, micro-batches, entropy, KL, optimizer: weights and metrics as with verl's own losses,
    in one process and in two."""
    runs = [
        ("gspo", {**SEQUENCE, **TERMS}),
        ("gk_gspo", {**SEQUENCE, **TERMS}),
        ("vanilla", TOKEN),
        ("gk_grpo_config", TOKEN),
    ]
    before, alone = update_actor(tmp_path_factory.mktemp("alone"), installed, 1, runs)
    _, together = update_actor(tmp_path_factory.mktemp("together"), installed, 2, runs[1::2])
    for (theirs, weights), (ours, own) in zip(alone[::2], alone[1::2], strict=True):
        steps = moved(weights, before)
        assert (moved(own, before) - steps).norm() <= 1e-5 * steps.norm()
        for one, other in zip(theirs, ours, strict=True):
            assert other == pytest.approx({**other, **one}, rel=1e-4, abs=1e-6)
        assert ours[0]["actor/ratio/min"] == ours[0]["actor/ratio/max"] == 1.0
        assert 0 < ours[2]["actor/pg_clipfrac"] < 1 and 0 < ours[2]["actor/active_fraction"] <= 1
    for (_, one), (_, two) in zip(alone[::2], together, strict=True):
        steps = moved(one, before)
        assert (moved(two, before) - steps).norm() <= 1e-5 * steps.norm()
