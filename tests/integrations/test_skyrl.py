"""SkyRL's hook: sums of scaled advantages; with SkyRL installed its numbers, registry and worker step."""

import importlib.util
import inspect
import itertools
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import objectives
from gspo_kernels.integrations import skyrl as adapter
from gspo_kernels.integrations.errors import IntegrationError
from tests.draws import shifted_seed
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

needs_skyrl = pytest.mark.skipif(
    importlib.util.find_spec("skyrl") is None,
    reason="skyrl is missing; it pins transformers and torch, so an environment of its own",
)
FLOAT32 = 4 * torch.finfo(torch.float32).eps
"""SkyRL takes the exponential of log-ratios in fp32, whatever their dtype."""


def config(**changed):
    """What SkyRL's AlgorithmConfig holds, clip ranges aside with its defaults."""
    values = {
        "loss_reduction": "sequence_mean",
        "eps_clip_low": 0.2,
        "eps_clip_high": 0.28,
        "sapo": SimpleNamespace(tau_pos=1.0, tau_neg=1.05),
        "cispo": SimpleNamespace(cispo_eps_clip_low=0.1, cispo_eps_clip_high=0.2),
        "dppo": SimpleNamespace(dppo_type="binary_tv", delta_low=0.04, delta_high=0.06),
        "off_policy_correction": None,
    }
    return SimpleNamespace(**{**values, **changed})


def batch(*arguments):
    start, old, advantages, _, rollout = all_of_batch(*arguments)
    return start, old, advantages, rollout


def values(loss_fn, start, old, advantages, config, mask=MASK, rollout=None):
    """Loss, gradient and metrics, called as SkyRL's worker does."""
    start = start.clone().requires_grad_()
    mask = None if mask is None else mask.long()
    loss, metrics = loss_fn(start, old, advantages, config=config, loss_mask=mask, rollout_logprobs=rollout)
    (gradient,) = torch.autograd.grad(loss, start)
    return loss.detach(), gradient, metrics


quietly = quiet(values)


# --------------------------------------------------------------------- without SkyRL


def test_each_objective_is_served_or_refused_with_a_reason():
    assert len(adapter.LOSSES) + len(adapter.REFUSED) == len(objectives.__all__)
    assert not set(adapter.LOSSES) & set(adapter.REFUSED)
    assert {"gk_gspo", "gk_gspo_token", "gk_dapo", "gk_dr_grpo", "gk_vespo"} <= set(adapter.LOSSES)
    assert "not proportional to its advantages" in adapter.REFUSED["gk_dro"]
    assert "needs group_ids" in adapter.REFUSED["gk_rebel"]
    assert "a whole batch" in adapter.REFUSED["gk_clip_cov"]


def test_losses_are_proportional_to_advantages_and_take_the_clip_range_from_the_config():
    """Only so do scaled advantages make a mean of the sum."""
    start, old, advantages, _ = batch()
    narrow = config(
        eps_clip_low=0.01, eps_clip_high=0.02,
        cispo=SimpleNamespace(cispo_eps_clip_low=0.01, cispo_eps_clip_high=0.02),
        dppo=SimpleNamespace(dppo_type="binary_kl", delta_low=0.001, delta_high=0.001),
    )  # fmt: skip
    for name, loss_fn in adapter.LOSSES.items():
        one = quietly(loss_fn, start, old, advantages, config())
        scaled = quietly(loss_fn, start, old, 0.1 * advantages, config())
        assert_equal((10 * scaled[0], 10 * scaled[1]), one[:2])
        assert one[1].count_nonzero() > 0 and one[1][~MASK].count_nonzero() == 0, name
        other = quietly(loss_fn, start, old, advantages, narrow)
        assert (torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])) == (name in NO_RANGE), name


def test_the_signature_is_skyrls():
    nothing, parameters = inspect.Parameter.empty, inspect.signature(adapter.LOSSES["gk_gspo"]).parameters
    assert {name: each.default for name, each in parameters.items()} == {
        "log_probs": nothing, "old_log_probs": nothing, "advantages": nothing, "config": nothing,
        "loss_mask": None, "rollout_logprobs": None,
    }  # fmt: skip
    if importlib.util.find_spec("skyrl") is not None:
        for name in ("regular", "gspo"):
            assert [*inspect.signature(theirs(name)).parameters] == [*parameters]


def scale(advantages, reduction, horizon=16):
    """SkyRL's scaling of a mini-batch's advantages, by hand."""
    counts = MASK.sum(1, keepdim=True)
    divisor = {
        "token_mean": MASK.sum(),
        "sequence_mean": len(LENGTHS) * counts,
        "seq_mean_token_sum_norm": torch.tensor(len(LENGTHS) * horizon),
    }
    return advantages / divisor[reduction]


REDUCTIONS = {
    "token_mean": {"aggregation": "token_mean"},
    "sequence_mean": {"aggregation": "sequence_mean"},
    "seq_mean_token_sum_norm": {"aggregation": "constant", "aggregation_constant": 16},
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_sum_over_micro_batches_is_the_mean(reduction):
    start, old, advantages, _ = batch()
    scaled, given = scale(advantages, reduction), config(loss_reduction=reduction)
    for name, cls in (("gk_gspo", gk.GSPO), ("gk_grpo", gk.GRPO), ("gk_topr", gk.TOPR)):
        clip = {} if cls is gk.TOPR else {"clip_low": 0.2, "clip_high": 0.28}
        leaf, objective = start.clone().requires_grad_(), cls(**clip, **REDUCTIONS[reduction])
        expected = gk.policy_loss(leaf, old, advantages[:, 0], loss_mask=MASK, objective=objective).loss
        parts = [
            quietly(adapter.LOSSES[name], start[r], old[r], scaled[r], given, MASK[r])
            for r in (slice(0, 1), slice(1, 4), slice(4, 6))
        ]
        assert_equal(sum(part[0] for part in parts), expected.detach())
        assert_equal(torch.cat([part[1] for part in parts]), torch.autograd.grad(expected, leaf)[0])


def test_gspo_by_hand():
    start, old, mask, loss, gradient, (first, second) = clipped_by_hand()
    advantages = torch.tensor([[2.0 / 6], [-1.0 / 4]], dtype=torch.float64).expand(2, 3)
    got = quietly(adapter.LOSSES["gk_gspo"], start, old, advantages, config(eps_clip_high=0.05), mask)
    assert got[0].item() == pytest.approx(loss)
    torch.testing.assert_close(got[1], gradient)
    expected = {"ratio_mean": (first + second) / 2, "ratio_min": second, "ratio_max": first}
    assert got[2] == pytest.approx({"clip_ratio": 3 / 5, "active_fraction": 0.5, **expected})
    assert all(type(each) is float for each in got[2].values())


def test_masks_and_autocast():
    """No mask counts everything, an empty one nothing; the worker calls the loss under autocast."""
    start, old, advantages, _ = batch()
    loss_fn, same = adapter.LOSSES["gk_gspo"], advantages[:, :1].expand_as(start)
    everything = quietly(loss_fn, start, old, same, config(), torch.ones_like(MASK))
    assert_equal(quietly(loss_fn, start, old, same, config(), None), everything)
    nothing = quietly(loss_fn, start, old, advantages, config(), MASK & False)
    assert nothing[0] == 0 and nothing[1].count_nonzero() == 0
    single = [each.float() for each in (start, old, advantages)]
    expected = quietly(loss_fn, *single, config())
    with torch.autocast("cpu", torch.bfloat16):
        got = quietly(loss_fn, *single, config())
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_warnings_come_once():
    start, old, advantages, _ = batch()
    with pytest.warns(UserWarning) as caught:
        for _ in range(2):
            values(adapter.LOSSES["gk_gspo"], start, old, advantages, config(loss_reduction="token_mean"))
    told = [str(each.message) for each in caught]
    assert len(told) == 2
    assert "loss_reduction='token_mean', while the objective aggregates by 'sequence_mean'" in told[0]
    assert "clip range of 0.28" in told[1] and "eps_clip_low=0.0003, eps_clip_high=0.0004" in told[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        narrow = config(eps_clip_low=3e-4, eps_clip_high=4e-4)
        values(adapter.LOSSES["gk_gspo"], start, old, advantages, narrow)
        values(adapter.LOSSES["gk_dapo"], start, old, advantages, config(loss_reduction="token_mean"))


def test_wrong_calls():
    start, old, advantages, _ = batch()
    gspo = adapter.LOSSES["gk_gspo"]
    with pytest.raises(TypeError, match="old_log_probs: got NoneType"):
        quietly(gspo, start, None, advantages, config())
    with pytest.raises(ValueError, match="advantages: differ within a sequence"):
        quietly(gspo, start, old, advantages + start, config())
    quietly(adapter.LOSSES["gk_gspo_token"], start, old, advantages + start, config())
    with pytest.raises(IntegrationError, match=r"config\.eps_clip_low: missing"):
        quietly(gspo, start, old, advantages, SimpleNamespace(loss_reduction="sequence_mean"))
    with pytest.raises(IntegrationError, match=r"gk_gspo: clip_low: got 2\.0"):
        quietly(gspo, start, old, advantages, config(eps_clip_low=2.0))
    with pytest.raises(IntegrationError, match="DRO is not proportional"):
        adapter.SkyRLPolicyLoss("mine", gk.DRO())
    with pytest.raises(TypeError, match="objective: got the class GSPO"):
        adapter.register("mine", gk.GSPO)


@pytest.mark.skipif(importlib.util.find_spec("skyrl") is not None, reason="skyrl is installed")
def test_without_skyrl_one_sentence():
    for call in (adapter.register_all, lambda: adapter.register("mine", gk.GSPO())):
        with pytest.raises(IntegrationError, match=r"skyrl: not installed, this adapter needs skyrl>=0.3"):
            call()
    start, old, advantages, rollout = batch()
    given = config(off_policy_correction=SimpleNamespace(tis_ratio_type="token"))
    with pytest.raises(IntegrationError, match="skyrl: not installed"):
        quietly(adapter.LOSSES["gk_gspo"], start, old, advantages, given, rollout=rollout)


def test_an_objective_of_ones_own():
    start, old, advantages, _ = batch()
    objective = gk.GSPO(0.1, 0.2, dual_clip=1.3)
    loss = adapter.SkyRLPolicyLoss("mine", objective)
    scaled = scale(advantages, "sequence_mean")
    expected = gk.policy_loss(start, old, advantages[:, 0], loss_mask=MASK, objective=objective)
    assert_equal(values(loss, start, old, scaled, config())[0], expected.loss)
    again = pickle.loads(pickle.dumps(loss))
    assert_equal(values(again, start, old, scaled, config())[0], expected.loss)


# ------------------------------------------------------------------------ with SkyRL


def skyrl_config(name, **changed):
    """SkyRL's own config, with the clip ranges of ``config``."""
    from skyrl.train.config import AlgorithmConfig

    given = AlgorithmConfig(policy_loss_type=name)
    for option, value in vars(config(**changed)).items():
        if isinstance(value, SimpleNamespace):
            for inner, each in vars(value).items():
                setattr(getattr(given, option), inner, each)
        elif value is not None:
            setattr(given, option, value)
    return given


def theirs(name):
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    adapter.register_all()
    return PolicyLossRegistry.get(name)


PAIRS = {
    "gk_gspo": ("gspo", 0.0),
    "gk_gspo_token": ("gspo", 0.0),
    "gk_grpo": ("regular", FLOAT32),
    "gk_cispo": ("cispo", FLOAT32),
    "gk_sapo": ("sapo", 0.0),
    "gk_dppo": ("dppo", FLOAT32),
}
CORRECTIONS = {
    "none": {},
    "sequence": {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.5},
    "token": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.1},
    "masks": {
        "sequence_mask_metric": "geometric",
        "geo_mask_low": 0.8,
        "geo_mask_high": 1.1,
        "token_mask_is_threshold_low": 0.7,
        "token_mask_is_threshold_high": 1.4,
    },
}


@needs_skyrl
@pytest.mark.parametrize("ours", PAIRS)
def test_equals_skyrl(ours):
    """Values, gradients and metrics, through SkyRL's registry, scaling and config."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import apply_loss_reduction_to_advantages_minibatch

    name, guard = PAIRS[ours]
    for seed, (correction, reduction) in enumerate(itertools.product(CORRECTIONS, REDUCTIONS)):
        if name == "dppo" and correction != "none":  # it takes the engine's log-probs for the old ones
            continue
        start, old, advantages, rollout = batch(seed)
        scaled = apply_loss_reduction_to_advantages_minibatch(advantages, MASK.long(), reduction, 6, 16)
        assert_equal(scaled, scale(advantages, reduction))
        options = SimpleNamespace(**CORRECTIONS[correction])
        given = skyrl_config(name, loss_reduction=reduction, off_policy_correction=options)
        rollout = None if name == "dppo" else rollout
        got = quietly(theirs(ours), start, old, scaled, given, rollout=rollout)
        expected = quietly(theirs(name), start, old, scaled, given, rollout=rollout)
        assert expected[1].count_nonzero() > 0
        spread = ours == "gk_gspo" and correction in ("token", "masks")  # one coefficient per sequence
        pick = (lambda x: x.sum(1)) if spread else (lambda x: x)
        assert_equal(pick(got[1]), pick(expected[1]), guard)
        if (
            name == "dppo"
        ):  # r A and sg[r] A logp have one gradient; tokens with A = 0 count as clipped or not
            continue
        assert_equal(got[0], expected[0], guard)
        for metric, value in expected[2].items():
            assert got[2][metric] == pytest.approx(value, rel=1e-6, abs=1e-7), metric


@needs_skyrl
def test_the_registry():
    """Names are taken once; SkyRL sends losses to its workers by cloudpickle."""
    import cloudpickle
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    adapter.register_all()
    adapter.register_all()
    assert set(adapter.LOSSES) <= set(PolicyLossRegistry.list_available())
    with pytest.raises(ValueError, match="already registered"):
        adapter.register("gk_gspo", gk.GSPO())
    adapter.register("mine", gk.GSPO(dual_clip=3.0))
    try:
        there = cloudpickle.loads(cloudpickle.dumps(PolicyLossRegistry.get("mine")))
        assert there == PolicyLossRegistry.get("mine")
    finally:
        PolicyLossRegistry.unregister("mine")


class Table(torch.nn.Module):
    """A policy with logits of its own per position, called as SkyRL's worker calls its model."""

    def __init__(self, sequences, vocabulary):
        super().__init__()
        rng = torch.Generator().manual_seed(shifted_seed(3))
        self.logits = torch.nn.Parameter(torch.randn(*sequences, vocabulary, generator=rng))

    def forward(self, sequences, num_actions, return_output=False, compute_entropy=True, **others):
        rows = sequences[:, 0]  # a prompt of one token that says which row this is
        logp = torch.log_softmax(self.logits[rows], -1)
        chosen = logp.gather(2, sequences[:, 1:, None]).squeeze(2)
        entropy = torch.nn.functional.pad(-(logp.exp() * logp).sum(2), (0, 1))
        return chosen[:, -num_actions:], {"entropy": entropy}


def worker_updates(name, monkeypatch, steps=4):
    """Updates in SkyRL's own worker step, micro-batch by micro-batch, on a batch it has scaled."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import apply_loss_reduction_to_advantages_minibatch
    from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase
    from skyrl.train.dataset.replay_buffer import Experience

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    given = skyrl_config(name, eps_clip_low=0.03, eps_clip_high=0.04)
    given.temperature, given.use_entropy_loss, given.kl_loss_coef = 1.0, True, 0.05
    model = Table(MASK.shape, 11)
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    worker = SimpleNamespace(
        model=model, optimizer=optimizer, cfg=SimpleNamespace(algorithm=given), policy_loss_fn=theirs(name),
        mesh_rank=SimpleNamespace(dp_size=1), scheduler=SimpleNamespace(get_last_lr=lambda: [1.0]),
        strategy=SimpleNamespace(backward=lambda loss, *others: loss.backward()),
    )  # fmt: skip
    rng = torch.Generator().manual_seed(shifted_seed(4))
    rows = torch.arange(6).unsqueeze(1)
    sequences = torch.cat([rows, torch.randint(11, MASK.shape, generator=rng)], dim=1)
    old = model(sequences, 8)[0].detach()
    _, _, advantages, _ = batch(0, torch.float32)
    scaled = apply_loss_reduction_to_advantages_minibatch(
        advantages, MASK.long(), given.loss_reduction, 2, 16
    )
    history = []
    for _ in range(steps):
        for part in (slice(0, 2), slice(2, 4), slice(4, 6)):
            experience = Experience(
                sequences=sequences[part], action_log_probs=old[part], base_action_log_probs=old[part],
                values=None, returns=None, advantages=scaled[part], attention_mask=None,
                loss_mask=MASK[part].long(), action_mask=MASK[part].long(), rollout_logprobs=None,
                rollout_expert_indices=None, num_actions=8, info={},
            )  # fmt: skip
            history.append(PolicyWorkerBase._forward_backward_micro(worker, experience, 1 / 3))
        optimizer.step()
        optimizer.zero_grad()
    return history, model.logits.detach()


@needs_skyrl
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("ours", "name"), [("gk_gspo", "gspo"), ("gk_grpo", "regular")])
def test_updates_in_skyrls_worker_step(ours, name, monkeypatch):
    expected = worker_updates(name, monkeypatch)
    got = worker_updates(ours, monkeypatch)
    before = Table(MASK.shape, 11).logits.detach()
    moved = (expected[1] - before).norm()
    assert (got[1] - expected[1]).norm() <= 1e-5 * moved
    clipped = [step["loss_metrics/clip_ratio"] for step in got[0]]
    assert clipped[0] == 0.0 and any(0 < each < 1 for each in clipped)
    for mine, step in zip(got[0], expected[0], strict=True):
        for metric in ("policy_loss", "final_loss", "policy_entropy", "policy_kl", "loss_metrics/clip_ratio"):
            assert mine[metric] == pytest.approx(step[metric], rel=1e-4, abs=1e-6), metric
