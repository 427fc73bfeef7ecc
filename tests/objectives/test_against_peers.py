"""The same losses and gradients as verl's and Liger's own code, on ragged batches within their clamps; as
TRL's, tests/integrations/test_trl.py shows.

Where a peer differs by choice the table says how; its terms that differ are left out.
"""

from types import SimpleNamespace

import pytest
import torch

import gspo_kernels as gk
from tests.cases import generator
from tests.integrations import peers

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
NARROW = {"clip_low": 0.1, "clip_high": 0.15}
MASK = torch.arange(8) < torch.tensor((8, 3, 5, 6, 1, 0)).unsqueeze(1)
ADVANTAGES = torch.tensor([1.0, -0.5, -1.25, 0.75, 0.0, 2.0]).double()
SHIFT = torch.tensor([0.3, -0.3, 0.3, -0.3, 0.0, 0.1]).double().unsqueeze(1)
"""Log-ratios of sequences, about those of all branches of all clips."""


def values(function, *inputs):
    """The loss, and the gradients of the inputs."""
    leaves = [value.clone().requires_grad_() for value in inputs]
    loss = function(*leaves)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


# --- verl, from log-probs

AGGREGATIONS = {
    "token-mean": {"aggregation": "token_mean"},
    "token-sum": {"aggregation": "sum"},
    "seq-mean-token-mean": {"aggregation": "sequence_mean"},
    "seq-mean-token-sum": {"aggregation": "sequence_mean_token_sum"},
    "seq-mean-token-sum-norm": {"aggregation": "constant", "aggregation_constant": 8},
}
TOKEN_MEAN = AGGREGATIONS["token-mean"]
COV = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.2, "clip_cov_ub": 0.9}  # every candidate: verl draws otherwise
KL_COV = {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}
BY_TOKEN, BY_SEQUENCE = "advantages and weights of tokens", "of sequences"
VERL = [
    *(
        ("vanilla", gk.GRPO(**CLIP, dual_clip=1.5, **ours), {"clip_ratio_c": 1.5}, theirs, BY_TOKEN)
        for theirs, ours in AGGREGATIONS.items()
    ),
    *(
        ("gspo", gk.GSPOToken(**NARROW, **ours), NARROW, theirs, BY_TOKEN)
        for theirs, ours in AGGREGATIONS.items()
    ),
    # verl's default for GSPO, the mean over tokens, is not the paper's
    ("gspo", gk.GSPO(**NARROW), NARROW, "seq-mean-token-mean", BY_SEQUENCE),
    ("gpg", gk.GPG(), {}, "token-mean", BY_TOKEN),
    ("clip_cov", gk.ClipCov(**CLIP, **COV, **TOKEN_MEAN), COV, "token-mean", BY_TOKEN),
    ("kl_cov", gk.KLCov(**KL_COV, **TOKEN_MEAN), KL_COV, "token-mean", BY_TOKEN),
    ("cispo", gk.CISPO(min_ratio=0.8, max_ratio=1.28), {}, "token-mean", BY_TOKEN),
    ("sapo", gk.SAPO(tau_negative=1.05), {}, "seq-mean-token-mean", BY_TOKEN),
    ("dro", gk.DRO(beta=0.3), {"dro_beta": 0.3}, "token-mean", BY_TOKEN),
    *(
        (
            f"dppo_{kind}", gk.DPPO(divergence=kind, bound_low=low, bound_high=high, max_ratio=1.4),
            {"clip_low": low, "clip_high": high, "clip_ratio_c": 1.4}, "token-mean", BY_TOKEN,
        )
        for kind, low, high in (("tv", 0.04, 0.06), ("kl", 0.02, 0.03))
    ),
    # it divides by all sequences, the empty ones too, and takes geometric means of weights
    ("geo_mean", gk.GMPO(log_clip_low=0.2, log_clip_high=0.28), {}, "token-mean", BY_SEQUENCE),
]  # fmt: skip


class Config(dict):
    """verl's, as far as its losses look: what is missing is None."""

    __getattr__ = dict.get


@pytest.mark.parametrize(
    ("name", "objective", "options", "aggregation", "level"), VERL, ids=[f"{row[0]} {row[3]}" for row in VERL]
)
def test_verl(name, objective, options, aggregation, level):
    means = peers.source("verl", "utils/torch_functional.py")
    verl = peers.extract(
        peers.source("verl", "trainer/ppo/core_algos.py"), f"compute_policy_loss_{name}", "agg_loss",
        verl_F=SimpleNamespace(**peers.extract(means, "masked_sum", "masked_mean")),
        ActorConfig=Config, AlgoConfig=tuple, DictConfig=Config,
    )  # fmt: skip
    options = {"clip_low": 0.2, "clip_high": 0.28} | options
    config = Config(
        clip_ratio_low=options.pop("clip_low"), clip_ratio_high=options.pop("clip_high"), tau_pos=1.0,
        tau_neg=1.05, global_batch_info={}, policy_loss=Config(options), **options,
    )  # fmt: skip
    rng = generator(4)

    def draw(make):
        return make(MASK.shape, generator=rng, dtype=torch.float64)

    logprobs = -draw(torch.rand) - 0.1
    old = (logprobs - SHIFT - 0.2 * draw(torch.randn)).clamp(max=-0.01)
    advantages, weights = ADVANTAGES, 0.5 + draw(torch.rand)
    if level == BY_TOKEN:
        advantages = advantages.unsqueeze(1) + draw(torch.randn)
    else:
        weights = weights[:, 0]
    ours = values(
        lambda x: gk.policy_loss(
            x, old, advantages, loss_mask=MASK, rollout_weights=weights, objective=objective,
            normalizer=len(MASK) if name == "geo_mean" else None,
        ).loss,
        logprobs,
    )  # fmt: skip
    their_advantages, their_weights = (
        each if each.ndim == 2 else each.unsqueeze(1).repeat(1, 8) for each in (advantages, weights)
    )
    theirs = values(
        lambda x: verl[f"compute_policy_loss_{name}"](
            old, x, their_advantages, MASK.double(), aggregation, config, rollout_is_weights=their_weights
        )[0],
        logprobs,
    )
    # means over a sequence divide by |y| + 1e-8 there
    guard = 5e-8 if aggregation == "seq-mean-token-mean" or name == "geo_mean" else 0.0
    torch.testing.assert_close(ours, theirs, rtol=1e-10 + guard, atol=1e-14 + guard)
    assert ours[1].any()


# --- Liger, from hidden states. It computes in fp32 whatever it is given.

SEQUENCE = {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15}
LIGER = {
    "grpo": (gk.GRPO(**CLIP), {}),
    "grpo, two-sided": (gk.GRPO(**CLIP, dual_clip=1.4), {"delta": 1.4}),
    "grpo, sequence level": (gk.GSPO(**NARROW), SEQUENCE),
    "grpo, sequence level, two-sided": (gk.GSPO(**NARROW, dual_clip=1.2), {**SEQUENCE, "delta": 1.2}),
    "bnpo": (gk.BNPO(**CLIP), {}),
    "dr_grpo": (gk.DrGRPO(**CLIP, aggregation_constant=9), {"max_completion_length": 9}),
    "dr_grpo, sequence level": (
        gk.GSPO(**NARROW, aggregation="constant", aggregation_constant=9),
        {**SEQUENCE, "max_completion_length": 9},
    ),
    "dapo": (gk.DAPO(), {}),
    "dapo, sequence level": (gk.GSPO(**NARROW, aggregation="token_mean"), SEQUENCE),
    "luspo": (gk.LUSPO(**NARROW), SEQUENCE),
    "cispo": (gk.CISPO(max_ratio=1.3), {"epsilon_high": 1.3}),
    "cispo, Liger's default": (gk.CISPO(max_ratio=0.2), {"epsilon_high": 0.2}),
    "sapo": (gk.SAPO(), {}),
    "vespo": (gk.VESPO(), {}),
}


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("name", LIGER)
def test_liger(name, on_policy):
    """With a KL, rollout weights and a number of tokens where Liger has the same ones."""
    liger_losses = pytest.importorskip("liger_kernel.chunked_loss", reason="pip install liger-kernel")
    (objective, options), loss_type, rng = LIGER[name], name.split(",")[0], generator(4)

    def normal(*shape):  # in fp64 the very numbers that fp32 has
        return torch.randn(shape, generator=rng).double()

    inputs = hidden, weight, bias = normal(6, 8, 16), 0.3 * normal(37, 16), 0.3 * normal(37)
    labels, temperature = torch.randint(37, (6, 8), generator=rng), 1.3
    scores = (hidden @ weight.T + bias) / temperature
    logprobs = scores.log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2)
    old = None if on_policy else (logprobs - SHIFT - 0.2 * normal(6, 8)).float().double()
    ref = (logprobs + 0.3 * normal(6, 8)).float().double()
    weights = (0.5 + torch.rand(6, 8, generator=rng)).double()
    if loss_type == "luspo":  # Liger's mean of weights per token counts padding
        weights = weights[:, 0]

    terms, theirs, beta = {}, {}, 0.0
    if loss_type in ("grpo", "dr_grpo", "sapo", "luspo"):
        terms["normalizer"] = 6.0  # Liger's mean over sequences counts the empty one
    elif loss_type in ("dapo", "cispo", "vespo"):
        terms["normalizer"], theirs["num_items_in_batch"] = 31.0, torch.tensor(31.0)
    if loss_type != "vespo":  # there they enter the ratio
        terms["rollout_weights"], theirs["vllm_is_ratio"] = weights, weights.float()
    if loss_type != "luspo":  # there the KL counts padding
        beta, by_ratio = 0.25, loss_type != "vespo"  # there by the ratio of a token
        terms |= {"ref_logprobs": ref, "kl_beta": beta, "kl_ratio_weighted": by_ratio}
        options = options | {"use_bias_correction_kl": by_ratio}
    liger = liger_losses.LigerFusedLinearGRPOLoss(
        beta=beta, compiled=False, use_ref_model=beta != 0, loss_type=loss_type, temperature=temperature,
        chunk_size=2, **({"epsilon_low": 0.2, "epsilon_high": 0.28} | options),
    )  # fmt: skip

    def by_liger(hidden, weight, bias):
        return liger(
            hidden, weight, labels, MASK.float(), ADVANTAGES.float(), bias=bias,
            ref_per_token_logps=ref.float() if beta else None,
            old_per_token_logps=None if old is None else old.float(), **theirs,
        )[0]  # fmt: skip

    def by_ours(hidden, weight, bias):
        return gk.fused_linear_policy_loss(
            hidden, weight, labels, old, ADVANTAGES, bias=bias, loss_mask=MASK, temperature=temperature,
            objective=objective, **terms,
        ).loss  # fmt: skip

    ours, ligers = values(by_ours, *inputs), values(by_liger, *(x.float() for x in inputs))
    # of a logit in fp32, then relative of a ratio or a probability: both enter, with room for sums
    products = (hidden.abs() @ weight.abs().T + bias.abs()).max().item()
    error = 4 * torch.finfo(torch.float32).eps * (16 + 2) * products / temperature
    assert error < 1e-4
    assert abs(ours[0] - ligers[0]) <= error * max(1.0, abs(ours[0]))
    for one, other in zip(ours[1:], ligers[1:], strict=True):
        largest = one.abs().max()
        assert largest > 1e-4 and (one - other).abs().max() <= error * max(largest, 1e-2)
