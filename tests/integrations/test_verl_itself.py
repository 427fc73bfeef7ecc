"""The hook inside the real verl."""

import importlib
import importlib.util
import inspect
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.draws import shifted_seed
from tests.integrations.verl_cases import (
    INFO,
    MASK,
    MODES,
    ROOT,
    SIGNATURE,
    assert_equal,
    batch,
    config,
    entry_points,
    quietly,
    values,
)

needs_verl = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None,
    reason="verl is missing; it needs transformers < 5.11, so an environment of its own",
)


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


@needs_verl
def test_verls_own_loss_over_our_log_probs(tmp_path_factory, installed):
    """``gspo`` as verl has it, entropy bonus and KL loss included: the same weights whoever scores tokens."""
    runs = [("gspo", {**SEQUENCE, **TERMS})]
    behind = {**installed, "VERL_USE_EXTERNAL_MODULES": "gspo_kernels.integrations.backends.verl_workers"}
    before, ((theirs, weights),) = update_actor(tmp_path_factory.mktemp("theirs"), installed, 1, runs)
    _, ((ours, own),) = update_actor(tmp_path_factory.mktemp("ours"), behind, 1, runs)
    steps = moved(weights, before)
    assert (moved(own, before) - steps).norm() <= 1e-5 * steps.norm()
    for one, other in zip(theirs, ours, strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6)
