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
from tests.integrations.hook_problem import GSPO, judge

VOCABULARY, PADDING = 11, 5
TOTAL, RESPONSE = (9, 6, 8, 12, 7), (5, 4, 3, 8, 0)
ADVANTAGES = (1.0, -0.7, 0.4, -1.3, 2.0)
SPLITS = ((0, 1, 2, 3, 4),), ((0, 1), (4, 3), (2,))


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

    def __init__(self, seed=0, fan_out=True):
        self.seed, self.splits = seed, SPLITS[seed % 2]
        rng = torch.Generator().manual_seed(shifted_seed(seed))
        self.tokens = [torch.randint(VOCABULARY, (n,), generator=rng) for n in TOTAL]
        self.masks = [(torch.rand(n, generator=rng) < 0.8).float() for n in RESPONSE]
        self.masks[0][0] = self.masks[1][0] = self.masks[2][0] = 1.0
        self.logits = [torch.randn(n, VOCABULARY, generator=rng) for n in TOTAL]
        self.advantages = [torch.full((n,), a) for n, a in zip(RESPONSE, ADVANTAGES, strict=True)]
        shift = (0.25, -0.2, 0.0, 0.12, 0.0)

        def near(scale):
            return [
                each.detach() - offset + scale * torch.randn(each.shape, generator=rng)
                for each, offset in zip(self.logprobs(), shift, strict=True)
            ]

        self.old, self.reference, self.engine = near(0.1), near(0.3), near(0.15)
        self.rollouts = 4 if fan_out else 5
        sums = [mask.sum() for mask in self.masks]
        self.sums = [sums[0] + sums[2], sums[1], sums[0] + sums[2], *sums[3:]] if fan_out else sums

    def logprobs(self, logits=None, dtype=torch.float32, temperature=1.0):
        logits = self.logits if logits is None else logits
        return [
            torch.log_softmax(z[t - r - 1 : t - 1].to(dtype) / temperature, -1)
            .gather(-1, tokens[t - r :].unsqueeze(-1))
            .squeeze(-1)
            for z, tokens, t, r in zip(logits, self.tokens, TOTAL, RESPONSE, strict=True)
        ]

    def batch(self, samples):
        def of(values):
            return [values[i] for i in samples]

        return {
            "unconcat_tokens": of(self.tokens), "total_lengths": of(TOTAL), "response_lengths": of(RESPONSE),
            "loss_masks": of(self.masks), "advantages": of(self.advantages), "log_probs": of(self.old),
            "ref_log_probs": of(self.reference), "rollout_log_probs": of(self.engine),
            "rollout_mask_sums": torch.stack(of(self.sums)),
        }  # fmt: skip


def reducer(batch, by_token):
    """slime's ``sum_of_sample_mean``."""

    def total(values):
        parts, sums = values.split(batch["response_lengths"]), batch["rollout_mask_sums"]
        return sum(
            (part * mask).sum() / (1 if by_token else rollout.clamp(min=1))
            for part, mask, rollout in zip(parts, batch["loss_masks"], sums, strict=True)
        )

    return total


def step(loss_fn, rollout, args):
    """Loss and gradient of a training step: slime divides the sum by its rollouts, or by its tokens."""
    by_token = args.calculate_per_token_loss
    divisor = sum(mask.sum() for mask in rollout.masks) if by_token else rollout.rollouts
    gradients, loss_sum = [torch.zeros_like(each) for each in rollout.logits], 0.0
    for samples in rollout.splits:
        batch = rollout.batch(samples)
        leaf = torch.cat([*(rollout.logits[i] for i in samples), torch.randn(PADDING, VOCABULARY)])
        leaf.requires_grad_()
        # as Megatron's: not a leaf
        loss, reported = loss_fn(args, batch, (leaf * 1.0).unsqueeze(0), reducer(batch, by_token))
        (loss / divisor).backward()
        loss_sum += (loss / divisor).detach().double()
        pieces = leaf.grad.split([*batch["total_lengths"], PADDING])
        assert (pieces[-1] == 0).all()
        for i, piece in zip(samples, pieces, strict=False):
            gradients[i] = piece
        assert all(torch.as_tensor(value).ndim == 0 for value in reported.values())
    return loss_sum, torch.cat(gradients).double()


def expected(rollout, objective, args, dtype):
    """The whole step by the oracle, one row per sample."""
    logits = [each.to(dtype).requires_grad_() for each in rollout.logits]

    def padded(values):
        return torch.nn.utils.rnn.pad_sequence([each.to(dtype) for each in values], batch_first=True)

    logprobs = padded(rollout.logprobs(logits, dtype, args.rollout_temperature))
    entropy = [
        -(p := torch.log_softmax(z[t - r - 1 : t - 1] / args.rollout_temperature, -1)).exp().mul(p).sum(-1)
        for z, t, r in zip(logits, TOTAL, RESPONSE, strict=True)
    ]
    mask = padded(rollout.masks).bool()
    shares = torch.stack([m.sum() / s.clamp(min=1) for m, s in zip(rollout.masks, rollout.sums, strict=True)])
    shares = shares.to(dtype) if objective.aggregation == "sequence_mean" else torch.ones_like(shares)
    weights = shares.unsqueeze(1).expand(mask.shape)
    terms = {"rollout_weights": weights.contiguous(), "normalizer": 1.0}
    if args.use_kl_loss:
        terms |= {
            "ref_logprobs": padded(rollout.reference), "kl_beta": args.kl_loss_coef * weights,
            "kl_estimator": args.kl_loss_type,
        }  # fmt: skip
    if args.entropy_coef:
        terms |= {"entropy": padded(entropy), "entropy_coef": args.entropy_coef * weights}
    old = rollout.engine if args.use_rollout_logprobs else rollout.old
    advantages = torch.tensor(ADVANTAGES, dtype=dtype)
    total = oracle.policy_loss(logprobs, padded(old), advantages, mask, objective, **terms)
    divisor = mask.sum() if args.calculate_per_token_loss else rollout.rollouts
    (total / divisor).backward()
    gradients = [torch.zeros_like(z) if z.grad is None else z.grad for z in logits]
    return (total / divisor).detach(), torch.cat(gradients)


CASES = [
    (GSPO, {}),
    (GSPO, {"rollout_temperature": 0.7, "use_rollout_logprobs": True}),
    (GSPO, {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "entropy_coef": 0.05}),
    (gk.GRPO(), {"advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.2}),
    (
        gk.GRPO(aggregation="token_mean"),
        {
            "advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.2, "use_kl_loss": True,
            "calculate_per_token_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2",
        },
    ),
]  # fmt: skip


def test_the_published_signature():
    assert [*inspect.signature(PolicyLoss()).parameters] == ["args", "batch", "logits", "sum_of_sample_mean"]


@pytest.mark.parametrize(("objective", "changes"), CASES)
def test_any_split_adds_up_to_the_step(objective, changes):
    """The logits' memory may take their gradient, or not."""
    args, loss_fns = arguments(**changes), [PolicyLoss(objective, inplace_backward=x) for x in (False, True)]
    judge(
        lambda rollout: step(loss_fns[rollout.seed // 2 % 2], rollout, args),
        lambda rollout, dtype: expected(rollout, objective, args, dtype),
        make=Rollout,
        row_dims=2,
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_correction_weighs_the_policy_term(level):
    """Samples of one rollout share its weight in the sum."""
    correction = RolloutCorrection(level=level, high=1.1)
    ours = step(PolicyLoss(GSPO, correction=correction), Rollout(), arguments())
    rollout, total = Rollout(), 0.0
    for i in range(4):
        mask = rollout.masks[i]
        log_weight = rollout.old[i] - rollout.engine[i]
        if level == "sequence":
            log_weight = (log_weight * mask).sum() / mask.sum()
        weight = (log_weight.exp().clamp(max=1.1) * mask).sum() / rollout.sums[i]
        log_ratio = ((rollout.logprobs()[i] - rollout.old[i]) * mask).sum() / mask.sum()
        total += weight * oracle.ppo_clip(log_ratio, rollout.advantages[i][0].item(), 0.1, 0.15, None)
    torch.testing.assert_close(ours[0].float(), total / rollout.rollouts)


def test_without_old_logprobs_it_is_on_policy():
    rollout = Rollout(fan_out=False)
    batch = rollout.batch(range(5)) | {"log_probs": None}
    logits = torch.cat(rollout.logits).unsqueeze(0).requires_grad_()
    loss, metrics = PolicyLoss()(arguments(), batch, logits, reducer(batch, False))
    torch.testing.assert_close(loss.detach(), torch.tensor(-(1.0 - 0.7 + 0.4 - 1.3)))
    assert metrics["ppo_kl"] == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tensor_model_parallel_size": 2}, "got 2, expected 1: a rank holds a part of the vocabulary"),
        ({"context_parallel_size": 2}, "a rank holds a part of a sequence"),
        ({"rollout_top_p": 0.9}, "no mask of sampled tokens"),
        ({"use_tis": True}, "give PolicyLoss a correction="),
        ({"use_opsm": True}, "off-policy sequence masking"),
        ({"custom_pg_loss_reducer_function_path": "a.b"}, "the reduction is the objective's aggregation"),
        ({"use_unbiased_kl": True}, "not weighted"),
        ({"use_kl_loss": True, "kl_loss_type": "low_var_kl"}, "one of k1, k2, k3: the KL is not clamped"),
        ({"calculate_per_token_loss": True}, "divides by the number of sequences, expected False"),
    ],
)
def test_arguments_that_change_the_loss_are_refused_by_name(change, reason):
    with pytest.raises(IntegrationError, match=f"{[*change][-1]}: .*{reason}"):
        step(PolicyLoss(GSPO), Rollout(), arguments(**change))


def test_wrong_setups_are_refused_at_construction():
    with pytest.raises(IntegrationError, match="EGSW needs entropy and group_ids, which slime"):
        PolicyLoss(gk.EGSW())
    with pytest.raises(ValueError, match="backend: got 'cuda'"):
        PolicyLoss(backend="cuda")
    rollout = Rollout()
    with pytest.raises(ValueError, match="correction: needs the batch's log_probs and rollout_log_probs"):
        batch = rollout.batch([0]) | {"log_probs": None}
        PolicyLoss(correction=RolloutCorrection(high=1.0))(
            arguments(), batch, rollout.logits[0][None], reducer(batch, False)
        )
    with pytest.raises(ValueError, match="logits: got 9 rows for 15 tokens in total_lengths"):
        PolicyLoss()(arguments(), rollout.batch([0, 1]), rollout.logits[0][None], None)
    with pytest.raises(ValueError, match="as long as its sequence or longer, expected a prompt"):
        PolicyLoss()(
            arguments(), rollout.batch([0]) | {"response_lengths": [9]}, rollout.logits[0][None], None
        )


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
        "_calculate_log_probs_and_entropy_chunk", "_VocabParallelLogProbEntropy", "_maybe_all_reduce",
        "_get_vocab_parallel_rank_size", "compute_approx_kl", "compute_gspo_kl", "compute_policy_loss",
        **common,
    )  # fmt: skip
    reducers = peers.extract(
        peers.source("slime", "slime/backends/megatron_utils/cp_utils.py"), "get_sum_of_sample_mean",
        "all_gather_with_cp", **common,
    )  # fmt: skip
    return peers.extract(
        peers.source("slime", "slime/backends/megatron_utils/loss.py"), "loss_function",
        "policy_loss_function", "get_log_probs_and_entropy", "get_rollout_top_p_logprob_kwargs",
        "_build_shifted_tokens", "_extract_per_sample", **{**helpers, **reducers}, Namespace=Namespace,
        RolloutBatch=dict, load_function=lambda path: loss_fn,
    )["loss_function"]  # fmt: skip


def slime_step(loss_function, rollout, args, metrics):
    """One step of slime's: everything after the forward is its own code, but for Megatron's sum."""
    gradients, total, values = [torch.zeros_like(each) for each in rollout.logits], 0.0, 0.0
    for samples in SPLITS[1]:
        batch = rollout.batch(samples)
        leaf = torch.cat([*(rollout.logits[i] for i in samples), torch.zeros(PADDING, VOCABULARY)])
        leaf.requires_grad_()
        loss, _, logged = loss_function(
            args, batch, len(SPLITS[1]), rollout.rollouts, (leaf * 1.0).unsqueeze(0)
        )
        # Megatron: over the micro-batches, or over all their tokens at the end
        all_tokens = sum(mask.sum().clamp(min=1) for mask in rollout.masks)
        scaled = loss / (all_tokens if args.calculate_per_token_loss else len(SPLITS[1]))
        scaled.backward()
        total, values = total + scaled.detach(), values + logged["values"]
        for i, piece in zip(samples, leaf.grad.split([*batch["total_lengths"], PADDING]), strict=False):
            gradients[i] = piece
    divisor = values[0] if args.calculate_per_token_loss else rollout.rollouts
    metrics.update(zip(logged["keys"], (values[1:] / divisor).tolist(), strict=True))
    return total, torch.cat(gradients)


@pytest.mark.parametrize(("objective", "changes"), CASES)
def test_equals_slime(objective, changes):
    theirs, ours = {}, {}
    stock, custom = real(), real(PolicyLoss(objective))
    args = arguments(**changes)
    swapped = arguments(**{**changes, "loss_type": "custom_loss"})
    # slime computes in fp32 whatever it gets
    judge(
        lambda rollout: slime_step(custom, rollout, swapped, ours),
        lambda rollout, dtype: (
            expected(rollout, objective, args, dtype)
            if dtype == torch.float64
            else slime_step(stock, rollout, args, theirs)
        ),
        make=Rollout,
        row_dims=2,
    )
    for name in {*ours} - {"pg_clipfrac"}:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
    if args.calculate_per_token_loss:
        assert ours["pg_clipfrac"] == pytest.approx(theirs["pg_clipfrac"])
