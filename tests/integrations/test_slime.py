"""slime's hook as published in 0.3.1 (git tag v0.3.1, a6272da), and its own code where that is there."""

import inspect
import types
from argparse import Namespace

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.slime import PolicyLoss, RolloutCorrection
from tests import oracle
from tests.draws import shifted_seed
from tests.integrations import peers

GSPO = gk.GSPO(clip_low=0.1, clip_high=0.15)
VOCABULARY, PADDING = 11, 5
TOTAL, RESPONSE = (9, 6, 8, 12, 7), (5, 4, 3, 8, 0)
ADVANTAGES = (1.0, -0.7, 0.4, -1.3, 2.0)
WHOLE, PARTS = ((0, 1, 2, 3, 4),), ((0, 1), (4, 3), (2,))


def arguments(**changes) -> Namespace:
    """Of slime's and Megatron's arguments, with slime's defaults, those that its loss looks at."""
    defaults = {
        "loss_type": "policy_loss", "advantage_estimator": "gspo", "calculate_per_token_loss": False,
        "eps_clip": 0.1, "eps_clip_high": 0.15, "entropy_coef": 0.0, "use_kl_loss": False,
        "kl_loss_coef": 0.0, "kl_loss_type": "k1", "use_unbiased_kl": False, "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "use_rollout_logprobs": False, "use_opsm": False, "use_tis": False, "get_mismatch_metrics": False,
        "custom_pg_loss_reducer_function_path": None, "tensor_model_parallel_size": 1,
        "context_parallel_size": 1, "allgather_cp": False, "recompute_loss_function": False,
        "log_probs_chunk_size": -1, "custom_loss_function_path": "ours",
    }  # fmt: skip
    return Namespace(**{**defaults, **changes})


class Rollout:
    """Five samples: ragged, one without a response, holes in the masks; samples 0 and 2 are one rollout."""

    def __init__(self, dtype=torch.float64, fan_out=True):
        rng = torch.Generator().manual_seed(shifted_seed(0))
        self.tokens = [torch.randint(VOCABULARY, (n,), generator=rng) for n in TOTAL]
        self.masks = [(torch.rand(n, generator=rng) < 0.8).to(dtype) for n in RESPONSE]
        self.masks[0][0] = self.masks[1][0] = self.masks[2][0] = 1.0
        self.logits = [torch.randn(n, VOCABULARY, generator=rng).to(dtype) for n in TOTAL]
        self.advantages = [
            torch.full((n,), a, dtype=dtype) for n, a in zip(RESPONSE, ADVANTAGES, strict=True)
        ]

        def near(scale):
            return [
                each.detach() - offset + scale * torch.randn(each.shape, generator=rng)
                for each, offset in zip(self.logprobs(), (0.25, -0.2, 0.0, 0.12, 0.0), strict=True)
            ]

        self.old, self.reference, self.engine = near(0.1), near(0.3), near(0.15)
        self.rollouts = 4 if fan_out else 5
        sums = [mask.sum() for mask in self.masks]
        self.sums = [sums[0] + sums[2], sums[1], sums[0] + sums[2], *sums[3:]] if fan_out else sums

    def logprobs(self, logits=None, temperature=1.0, entropy=False):
        """Of the response tokens, by sample; or the entropy there."""
        logits, values = self.logits if logits is None else logits, []
        for z, tokens, t, r in zip(logits, self.tokens, TOTAL, RESPONSE, strict=True):
            logp = torch.log_softmax(z[t - r - 1 : t - 1] / temperature, -1)
            chosen = logp.gather(-1, tokens[t - r :].unsqueeze(-1)).squeeze(-1)
            values.append(-(logp.exp() * logp).sum(-1) if entropy else chosen)
        return values

    def batch(self, samples):
        def of(values):
            return [values[i] for i in samples]

        return {
            "unconcat_tokens": of(self.tokens), "total_lengths": of(TOTAL), "response_lengths": of(RESPONSE),
            "loss_masks": of(self.masks), "advantages": of(self.advantages), "log_probs": of(self.old),
            "ref_log_probs": of(self.reference), "rollout_log_probs": of(self.engine),
            "rollout_mask_sums": torch.stack(of(self.sums)),
        }  # fmt: skip


def reducer(batch, by_token=False):
    """slime's ``sum_of_sample_mean``."""

    def total(values):
        parts, sums = values.split(batch["response_lengths"]), batch["rollout_mask_sums"]
        return sum(
            (part * mask).sum() / (1 if by_token else rollout.clamp(min=1))
            for part, mask, rollout in zip(parts, batch["loss_masks"], sums, strict=True)
        )

    return total


def step(loss_of, rollout, splits):
    """Loss and gradient of a training step: sums of ``loss_of(batch, logits)`` over its micro-batches."""
    gradients, total = [torch.zeros_like(each) for each in rollout.logits], 0.0
    for samples in splits:
        batch = rollout.batch(samples)
        padding = torch.randn(PADDING, VOCABULARY).to(rollout.logits[0])
        leaf = torch.cat([*(rollout.logits[i] for i in samples), padding]).requires_grad_()
        loss = loss_of(batch, (leaf * 1.0).unsqueeze(0))  # as Megatron's: not a leaf
        loss.backward()
        total += loss.detach()
        *pieces, of_padding = leaf.grad.split([*batch["total_lengths"], PADDING])
        assert (of_padding == 0).all()
        for i, piece in zip(samples, pieces, strict=True):
            gradients[i] = piece
    return total, torch.cat(gradients)


def expected(rollout, objective, args):
    """The whole step by the oracle, one row per sample."""
    logits = [each.clone().requires_grad_() for each in rollout.logits]

    def padded(values):
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)

    mask = padded(rollout.masks).bool()
    shares = torch.stack([m.sum() / s.clamp(min=1) for m, s in zip(rollout.masks, rollout.sums, strict=True)])
    shares = shares if objective.aggregation == "sequence_mean" else torch.ones_like(shares)
    weights = shares.unsqueeze(1).expand(mask.shape)
    terms = {"rollout_weights": weights.contiguous(), "normalizer": 1.0}
    if args.use_kl_loss:
        terms |= {
            "ref_logprobs": padded(rollout.reference), "kl_beta": args.kl_loss_coef * weights,
            "kl_estimator": args.kl_loss_type,
        }  # fmt: skip
    if args.entropy_coef:
        entropy = padded(rollout.logprobs(logits, args.rollout_temperature, entropy=True))
        terms |= {"entropy": entropy, "entropy_coef": args.entropy_coef * weights}
    old = rollout.engine if args.use_rollout_logprobs else rollout.old
    logprobs = padded(rollout.logprobs(logits, args.rollout_temperature))
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    total = oracle.policy_loss(logprobs, padded(old), advantages, mask, objective, **terms)
    loss = total / (mask.sum() if args.calculate_per_token_loss else rollout.rollouts)
    gradients = torch.autograd.grad(loss, logits, allow_unused=True, materialize_grads=True)
    return loss.detach(), torch.cat(gradients)


TOKENS = {"advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.2}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
CASES = [
    (GSPO, {}),
    (GSPO, {"rollout_temperature": 0.7, "use_rollout_logprobs": True}),
    (GSPO, KL | {"kl_loss_type": "k3", "entropy_coef": 0.05}),
    (gk.GRPO(), TOKENS),
    (
        gk.GRPO(aggregation="token_mean"),
        TOKENS | KL | {"calculate_per_token_loss": True, "kl_loss_type": "k2"},
    ),
]


@pytest.mark.parametrize(("objective", "changes"), CASES)
def test_any_split_adds_up_to_the_step(objective, changes):
    """slime divides the sum by its rollouts, or by its tokens. The logits' memory may take their gradient."""
    args, rollout = arguments(**changes), Rollout()
    by_token = args.calculate_per_token_loss
    divisor = sum(mask.sum() for mask in rollout.masks) if by_token else rollout.rollouts
    want = expected(rollout, objective, args)
    for splits, inplace in ((WHOLE, False), (PARTS, True)):
        loss_fn = PolicyLoss(objective, inplace_backward=inplace)

        def loss_of(batch, logits, loss_fn=loss_fn):
            loss, reported = loss_fn(args, batch, logits, reducer(batch, by_token))
            assert all(torch.as_tensor(value).ndim == 0 for value in reported.values())
            return loss / divisor

        torch.testing.assert_close(step(loss_of, rollout, splits), want, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_correction_weighs_the_policy_term(level):
    """Samples of one rollout share its weight in the sum."""
    rollout, batch, total = Rollout(), Rollout().batch(range(5)), 0.0
    logits = torch.cat(rollout.logits).unsqueeze(0)
    loss_fn = PolicyLoss(GSPO, correction=RolloutCorrection(level=level, high=1.1))
    ours, _ = loss_fn(arguments(), batch, logits, reducer(batch))
    for i in range(4):
        mask = rollout.masks[i]
        log_weight = rollout.old[i] - rollout.engine[i]
        if level == "sequence":
            log_weight = (log_weight * mask).sum() / mask.sum()
        weight = (log_weight.exp().clamp(max=1.1) * mask).sum() / rollout.sums[i]
        log_ratio = ((rollout.logprobs()[i] - rollout.old[i]) * mask).sum() / mask.sum()
        total += weight * oracle.ppo_clip(log_ratio, rollout.advantages[i][0].item(), 0.1, 0.15, None)
    torch.testing.assert_close(ours, total, rtol=1e-10, atol=0)


def test_without_old_logprobs_it_is_on_policy():
    rollout = Rollout(fan_out=False)
    batch = rollout.batch(range(5)) | {"log_probs": None}
    loss, metrics = PolicyLoss()(arguments(), batch, torch.cat(rollout.logits).unsqueeze(0), reducer(batch))
    assert loss.item() == pytest.approx(-(1.0 - 0.7 + 0.4 - 1.3)) and metrics["ppo_kl"] == 0
    assert [*inspect.signature(PolicyLoss()).parameters] == ["args", "batch", "logits", "sum_of_sample_mean"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tensor_model_parallel_size": 2}, "got 2, expected 1: a rank holds a part of the vocabulary"),
        ({"context_parallel_size": 2}, "a rank holds a part of a sequence"),
        ({"allgather_cp": True}, "a rank holds a part of a sequence"),
        ({"rollout_top_p": 0.9}, "no mask of sampled tokens"),
        ({"use_tis": True}, "give PolicyLoss a correction="),
        ({"use_opsm": True}, "off-policy sequence masking"),
        ({"get_mismatch_metrics": True}, "it also changes slime's loss"),
        ({"custom_pg_loss_reducer_function_path": "a.b"}, "the reduction is the objective's aggregation"),
        ({"use_unbiased_kl": True}, "not weighted"),
        ({"use_kl_loss": True, "kl_loss_type": "low_var_kl"}, "one of k1, k2, k3: the KL is not clamped"),
        ({"calculate_per_token_loss": True}, "divides by the number of sequences, expected False"),
    ],
)
def test_arguments_that_change_the_loss_are_refused_by_name(change, reason):
    with pytest.raises(IntegrationError, match=f"{[*change][-1]}: .*{reason}"):
        PolicyLoss(GSPO).check_arguments(arguments(**change))


def test_wrong_setups_are_refused():
    one, logits = Rollout().batch([0]), Rollout().logits[0][None]
    for options, error, reason in (
        ({"objective": gk.EGSW()}, IntegrationError, "EGSW needs entropy and group_ids, which slime"),
        ({"backend": "cuda"}, ValueError, "backend: got 'cuda'"),
    ):
        with pytest.raises(error, match=reason):
            PolicyLoss(**options)
    corrected = PolicyLoss(correction=RolloutCorrection(high=1.0))
    without = "correction: needs the batch's log_probs and rollout_log_probs"
    for loss_fn, args, batch, reason in (
        (PolicyLoss(), {"use_tis": True}, one, "use_tis: got True"),
        (corrected, {}, one | {"log_probs": None}, without),
        (PolicyLoss(), {}, Rollout().batch([0, 1]), "logits: got 9 rows for 15 tokens in total_lengths"),
        (PolicyLoss(), {}, one | {"response_lengths": [9]}, "as long as its sequence or longer, expected a"),
    ):
        with pytest.raises(ValueError, match=reason):
            loss_fn(arguments(**args), batch, logits, reducer(one))


def real(loss_fn=None):
    """slime's ``loss_function`` and all that it calls, in one process without Megatron."""
    mpu = types.SimpleNamespace(
        get_context_parallel_world_size=lambda: 1,
        get_context_parallel_group=lambda: None,
        get_tensor_model_parallel_group=lambda: None,
        get_data_parallel_world_size=lambda with_context_parallel: 1,
    )
    common = {"dist": torch.distributed, "mpu": mpu}
    helpers = peers.extract(
        peers.source("slime", "slime/utils/ppo_utils.py"), "calculate_log_probs_and_entropy",
        "compute_approx_kl", "compute_gspo_kl", "compute_policy_loss",
        **common,
    )  # fmt: skip
    reducers = peers.extract(
        peers.source("slime", "slime/backends/megatron_utils/cp_utils.py"), "get_sum_of_sample_mean",
        "all_gather_with_cp", **common,
    )  # fmt: skip
    return peers.extract(
        peers.source("slime", "slime/backends/megatron_utils/loss.py"), "loss_function",
        **{**helpers, **reducers}, load_function=lambda path: loss_fn,
    )["loss_function"]  # fmt: skip


@pytest.mark.parametrize(("objective", "changes"), CASES)
def test_equals_slime(objective, changes):
    """Everything after the forward is slime's own code, in fp32, but for Megatron's sum."""
    rollout, results = Rollout(torch.float32), []
    for loss_function, loss_type in ((real(PolicyLoss(objective)), "custom_loss"), (real(), "policy_loss")):
        args, values = arguments(**changes | {"loss_type": loss_type}), 0.0
        # Megatron: over the micro-batches, or over all their tokens at the end
        tokens = sum(mask.sum().clamp(min=1) for mask in rollout.masks)
        divisor = tokens if args.calculate_per_token_loss else len(PARTS)

        def loss_of(batch, logits):
            nonlocal values, logged
            loss, _, logged = loss_function(args, batch, len(PARTS), rollout.rollouts, logits)  # noqa: B023
            values = values + logged["values"]
            return loss / divisor  # noqa: B023

        logged: dict = {}
        loss, gradient = step(loss_of, rollout, PARTS)
        counted = values[0] if args.calculate_per_token_loss else rollout.rollouts
        results.append(
            (loss, gradient, dict(zip(logged["keys"], (values[1:] / counted).tolist(), strict=True)))
        )
    (loss, gradient, metrics), (their_loss, their_gradient, their_metrics) = results
    torch.testing.assert_close(loss, their_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, their_gradient, rtol=1e-5, atol=1e-6)
    for name in {*metrics} - {"pg_clipfrac"}:
        assert metrics[name] == pytest.approx(their_metrics[name], rel=1e-5, abs=1e-6), name
    if args.calculate_per_token_loss:
        assert metrics["pg_clipfrac"] == pytest.approx(their_metrics["pg_clipfrac"])
