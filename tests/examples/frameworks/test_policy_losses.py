"""Recipes for AReaL, NeMo-RL, OpenRLHF, prime-rl and slime, held against formulas in fp64.

Each framework's sum over micro-batches and ranks is written out here.
"""

import enum
import importlib
import itertools
import math
import pickle
import sys
from argparse import Namespace
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import gspo_kernels as gk
from examples.frameworks import openrlhf, prime_rl, slime
from tests import oracle
from tests.cases import generator, offsets
from tests.forks import in_processes
from tests.objectives.sample_batches import ADVANTAGES, make_batch

LossType = enum.Enum("LossType", "TOKEN_LEVEL SEQUENCE_LEVEL")
LossInputType = enum.Enum("LossInputType", "LOGIT LOGPROB")
MetricNormalizer = enum.Enum("MetricNormalizer", "TOKENS SEQUENCES NONE")
LOGGED: dict = {}


def with_stub(name, module, **contents):
    """Import a recipe with a stand-in for the framework's module that it imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module, SimpleNamespace(**contents))
        return importlib.import_module(f"examples.frameworks.{name}")


areal = with_stub("areal", "areal.utils", stats_tracker=SimpleNamespace(scalar=LOGGED.update))
nemo_rl = with_stub(
    "nemo_rl", "nemo_rl.algorithms.loss.interfaces",
    LossType=LossType, LossInputType=LossInputType, MetricNormalizer=MetricNormalizer,
)  # fmt: skip

WHOLE, PARTS = ((0, 1, 2, 3, 4, 5),), ((0, 1), (2, 5, 3), (4,))
SPLITS = WHOLE, PARTS, tuple((row,) for row in range(6))
"""Splits into micro-batches of sequences; in the last, one micro-batch has no token."""


@dataclass
class Problem:
    """Six sequences [B, T] in fp64 with holes in their masks, one of them empty."""

    logprobs: Tensor
    old: Tensor
    mask: Tensor
    advantages: Tensor
    rollout: Tensor
    reference: Tensor

    @property
    def token_advantages(self) -> Tensor:
        return self.advantages.unsqueeze(1).expand(self.mask.shape).contiguous()

    def part(self, rows) -> "Problem":
        return Problem(*(getattr(self, each.name)[list(rows)] for each in fields(self)))


def problem() -> Problem:
    batch, rng = make_batch(gk.GRPO()), generator(100)
    old, noise = (
        batch.old_logprobs.nan_to_num(-1.0),
        0.3 * torch.randn(2, *batch.loss_mask.shape, generator=rng, dtype=torch.float64),
    )
    rollout = (old + noise[0]).clamp(max=-1e-3)
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    given = (batch.logprobs.nan_to_num(-0.5), old, batch.loss_mask, advantages, rollout)
    return Problem(*given, old - 0.2 + noise[1])


def formula(given, *, kind=gk.GRPO, mean="token_mean", dual_clip=None, **terms):
    """Return the loss of the whole batch and its gradient. The vocabulary has two tokens."""
    bounds = {gk.CISPO: (0.9, 1.15), gk.SAPO: ()}.get(kind, (0.1, 0.15))
    options = {} if dual_clip is None else {"dual_clip": dual_clip}
    logprobs = given.logprobs.clone().requires_grad_()
    other = torch.log1p(-logprobs.exp())
    terms["entropy"] = -(logprobs.exp() * logprobs + other.exp() * other)
    terms["ref_logprobs"] = given.reference
    objective = kind(*bounds, aggregation=mean, **options)
    total = oracle.policy_loss(logprobs, given.old, given.advantages, given.mask, objective, **terms)
    return total.detach(), torch.autograd.grad(total, logprobs)[0]


def assert_same(got, want, about=None, rtol=1e-10):
    torch.testing.assert_close(got, want, rtol=rtol, atol=1e-13, msg=lambda text: f"{about}: {text}")


def raises(message):
    return pytest.raises((TypeError, ValueError), match=message)


# ------------------------------------------------------ one step, as each framework adds it up


def add_up(given, splits, loss_of):
    """Return loss and gradient, the sums of those of ``loss_of(part, logprobs)`` over the micro-batches."""
    gradient, total = torch.zeros_like(given.logprobs), 0.0
    for rows in splits:
        part = given.part(rows)
        logprobs = part.logprobs.requires_grad_()
        loss = loss_of(part, logprobs)
        loss.backward()
        total += loss.detach()
        gradient[list(rows)] += logprobs.grad
    return total, gradient


def areal_data(part, packed=True) -> dict:
    """Return the data that AReaL's engine passes: packed without padding (here full rows), or padded."""
    data = {
        "logprobs": part.rollout, "prox_logp": part.old, "advantages": part.token_advantages,
        "loss_mask": part.mask.to(part.old.dtype),
    }  # fmt: skip
    if packed:
        data = {name: value.flatten() for name, value in data.items()}
        data["cu_seqlens"] = offsets((part.mask.shape[1],) * part.mask.shape[0])
    return data


def areal_step(given, splits, options, *, packed=True):
    """Add up as ``train_batch``: a micro-batch has its share of the sum of the weights over the batch."""
    loss_fn, weight = areal.grpo_loss_fn, lambda data: data["loss_mask"].count_nonzero()
    if options.get("aggregation") == "sequence_mean":
        weight = areal.count_sequences
    options = {"eps_clip": 0.1, "eps_clip_higher": 0.15, "c_clip": None} | options
    whole = sum(weight(areal_data(given.part(rows), packed)).double() for rows in splits)

    def loss_of(part, logprobs):
        data = areal_data(part, packed)
        row = logprobs.flatten() if packed else logprobs
        ranges = dict.fromkeys((f"vocab_{x}_logits" for x in ("min", "max", "mean", "norm")), row.detach())
        share = weight(data).double() / whole
        return loss_fn(row, row.exp(), data, **options, **ranges) * share if share else 0.0 * logprobs.sum()

    return add_up(given, splits, loss_of)


NEMO = {
    "disable_ppo_ratio": False, "token_level_loss": True, "sequence_level_importance_ratios": False,
    "ratio_clip_min": 0.1, "ratio_clip_max": 0.15, "ratio_clip_c": None, "reference_policy_kl_penalty": 0.0,
    "reference_policy_kl_type": "k3", "kl_input_clamp_value": None, "kl_output_clamp_value": None,
    "use_kl_in_reward": False, "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None, "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None, "use_on_policy_kl_approximation": False,
    "force_on_policy_ratio": False, "use_cispo": False, "positive_example_nll_weight": 0.0,
}  # fmt: skip
"""The fields of NeMo-RL's ``ClippedPGLossConfig``."""


def nemo_data(part) -> dict:
    """Return the data that NeMo-RL's loss reads: one more position than there are next tokens."""

    def pad(values):
        return torch.nn.functional.pad(values, (1, 0), value=0.25)

    # A sequence outside of sample_mask still has tokens in token_mask.
    tokens = part.mask | ~part.mask.any(1, keepdim=True)
    return {
        "token_mask": pad(tokens.to(part.old.dtype)), "sample_mask": part.mask.any(1).to(part.old.dtype),
        "advantages": pad(part.token_advantages), "prev_logprobs": pad(part.old),
        "generation_logprobs": pad(part.rollout), "reference_policy_logprobs": pad(part.reference),
    }  # fmt: skip


def nemo_step(given, splits, options, *, metrics=None):
    """Add up a global batch: a sum over micro-batches and, in effect, over ranks."""
    loss_fn = nemo_rl.ClippedPGLossFn(Namespace(**NEMO | options))
    totals = {
        "global_valid_seqs": given.mask.any(1).sum().double(),
        "global_valid_toks": given.mask.sum().double(),
    }

    def loss_of(part, logprobs):
        loss, values = loss_fn(next_token_logprobs=logprobs, data=nemo_data(part), **totals)
        for name, value in (values if metrics is not None else {}).items():
            metrics.setdefault(name, []).append(value)
        return loss

    return add_up(given, splits, loss_of)


def openrlhf_step(given, splits, options, *, ranks=None):
    """Add up an optimizer step of OpenRLHF; without ``ranks`` each rank has one micro-batch."""
    loss_fn = openrlhf.PolicyLoss(0.1, 0.15, **options)
    ranks = ranks or len(splits)
    info = {
        "dp_size": ranks,
        "batch_num_tokens": given.mask.sum().double() * ranks / len(splits),
        "global_batch_size": given.mask.any(1).sum().double() * ranks / len(splits),
    }
    corrects = loss_fn.is_correction_level != "off"  # then OpenRLHF passes the engine's log-probs

    def loss_of(part, logprobs):
        rows = {"action_mask": part.mask, "rollout_log_probs": part.rollout if corrects else None}
        return loss_fn(logprobs, part.old, part.token_advantages, **rows, **info)[0] / len(splits)

    return add_up(given, splits, loss_of)


class LossInputs(NamedTuple):
    """The published fields of prime-rl; those of the sampling mask came after 0.9.0."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None
    trainer_mask_logprobs: Tensor | None = None
    inference_mask_logprobs: Tensor | None = None


def prime_step(given, splits, options, *, weights=None, reference=False):
    """Sum the losses of single sequences over all ranks, divided by the global number of tokens."""
    tokens, every = int(given.mask.sum()), iter([list(rows) for rows in splits])
    options = {"objective": "GRPO", "clip_low": 0.1, "clip_high": 0.15} | options

    def loss_fn(inputs):
        return prime_rl.policy_loss(inputs, **options)

    def loss_of(part, logprobs):
        rows = next(every)
        scale = [None] * len(rows) if weights is None else [*weights[rows]]
        references = [*part.reference] if reference else [None] * len(rows)
        columns = ([*logprobs], [*part.old], references, [*part.token_advantages], [*part.mask], scale)
        return sum(loss_fn(LossInputs(*row)).loss for row in zip(*columns, strict=True)) / tokens

    return add_up(given, splits, loss_of)


def slime_arguments(**changes) -> Namespace:
    """Return the arguments of slime and Megatron that slime's loss reads, with defaults."""
    defaults = {
        "loss_type": "policy_loss", "advantage_estimator": "grpo", "calculate_per_token_loss": False,
        "eps_clip": 0.1, "eps_clip_high": 0.15, "eps_clip_c": None, "entropy_coef": 0.0, "use_kl_loss": False,
        "kl_loss_coef": 0.0, "kl_loss_type": "k1", "use_unbiased_kl": False, "rollout_temperature": 1.0,
        "rollout_top_p": 1.0, "use_rollout_logprobs": False, "use_opsm": False, "use_tis": False,
        "tis_clip": 1.1, "tis_clip_low": 0.9, "custom_tis_function_path": None, "get_mismatch_metrics": False,
        "custom_pg_loss_reducer_function_path": None, "tensor_model_parallel_size": 1,
        "context_parallel_size": 1, "allgather_cp": False, "recompute_loss_function": False,
        "log_probs_chunk_size": -1, "custom_loss_function_path": "ours",
    }  # fmt: skip
    return Namespace(**{**defaults, **changes})


def slime_batch(part, logprobs, totals_of_rollouts, temperature=1.0):
    """Return a packed micro-batch and logits [1, T, 2], whose log-softmax at the response is ``logprobs``.

    Prompts and responses differ in length; a sequence without a counted token has no response.
    """
    rng = generator(1)
    responses = [int(row.nonzero().max()) + 1 if row.any() else 0 for row in part.mask]
    totals = [2 + i + length for i, length in enumerate(responses)]
    tokens = [torch.randint(2, (total,), generator=rng) for total in totals]
    rows = []
    for ids, length, chosen in zip(tokens, responses, logprobs, strict=True):
        chosen = chosen[:length]
        both = torch.stack([chosen, torch.log1p(-chosen.exp())], -1)
        both = torch.where(ids[len(ids) - length :].unsqueeze(1) == 0, both, both.flip(-1))
        others = torch.randn(len(ids) - length, 2, generator=rng).to(both)
        rows += [others[1:], both, others[:1]]
    padding = torch.randn(5, 2, generator=rng).to(logprobs)

    def of(values):
        return [value[:length] for value, length in zip(values, responses, strict=True)]

    batch = {
        "unconcat_tokens": tokens, "total_lengths": totals, "response_lengths": responses,
        "loss_masks": of(part.mask.to(part.old.dtype)), "advantages": of(part.token_advantages),
        "log_probs": of(part.old), "ref_log_probs": of(part.reference), "rollout_log_probs": of(part.rollout),
        "rollout_mask_sums": totals_of_rollouts.to(part.old.dtype),
    }  # fmt: skip
    return batch, temperature * torch.cat([*rows, padding]).unsqueeze(0)


def sum_of_sample_mean(batch, by_token=False):
    """Return slime's reduction of response tokens as a function."""

    def total(values):
        parts, sums = values.split(batch["response_lengths"]), batch["rollout_mask_sums"]
        return sum(
            (part * mask).sum() / (1 if by_token else tokens.clamp(min=1))
            for part, mask, tokens in zip(parts, batch["loss_masks"], sums, strict=True)
        )

    return total


def rollout_totals(given):
    """Return the tokens of each sequence's rollout; sequences 0 and 2 share one, so four have tokens."""
    totals = given.mask.sum(1)
    totals[[0, 2]] = totals[[0, 2]].sum()
    return totals


def slime_step(given, splits, options):
    """Add up as slime, which divides the sum over micro-batches by the step's rollouts or by its tokens."""
    args, totals, every = slime_arguments(**options), rollout_totals(given), iter(splits)
    by_token = args.calculate_per_token_loss

    def loss_of(part, logprobs):
        rows = list(next(every))
        batch, logits = slime_batch(part, logprobs, totals[rows], args.rollout_temperature)
        loss, reported = slime.policy_loss(args, batch, logits, sum_of_sample_mean(batch, by_token))
        assert all(torch.as_tensor(value).ndim == 0 for value in reported.values())
        return loss / (given.mask.sum() if by_token else 4)

    return add_up(given, splits, loss_of)


# ------------------------------------------------------ what holds for all of them

SEQUENCE_MEAN = {"mean": "sequence_mean"}
SEQUENCE = {"kind": gk.GSPO, **SEQUENCE_MEAN}
TIS = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 1.2,
       "truncated_importance_sampling_ratio_min": 0.9}  # fmt: skip


def reject(action):
    rejection = {"action": action, "level": "token", "metric": "ratio", "agg": "mean"}
    return {"rejection_sampling": Namespace(**rejection, lower=0.9, upper=1.2)}


def ratios(given):
    return (given.old - given.rollout).exp()


def clamped(given):
    return {"rollout_weights": ratios(given).clamp(0.9, 1.2)}


def kept(given, of_sequence=False):
    ratio = judged = ratios(given)
    if of_sequence:
        lengths = given.mask.sum(1, keepdim=True).clamp(min=1)
        judged = (torch.where(given.mask, ratio.log(), 0.0).sum(1, keepdim=True) / lengths).exp()
    return {"rollout_weights": torch.where((judged >= 0.9) & (judged <= 1.2), ratio, 0.0)}


def shares(given):
    """The terms of a slime step: four rollouts, of which one has two sequences."""
    return {"lengths": rollout_totals(given), "normalizer": 4, **SEQUENCE_MEAN}


CASES = {
    "areal": (areal_step, ({"packed": True}, {"packed": False}), [
        ({"importance_sampling_level": "sequence"}, {"kind": gk.GSPO}),
        ({"importance_sampling_level": "sequence", "aggregation": "sequence_mean"}, SEQUENCE),
        ({"c_clip": 1.5}, {"dual_clip": 1.5}),
        ({"use_cispo_loss": True}, {"kind": gk.CISPO}),
        ({"use_sapo_loss": True}, lambda given: {"kind": gk.SAPO, "old": given.rollout}),
        (reject("clamp"), clamped),
        (reject("mask"), kept),
    ]),
    "nemo-rl": (nemo_step, ({},), [
        ({"sequence_level_importance_ratios": True, "token_level_loss": False}, SEQUENCE),
        ({"ratio_clip_c": 1.5, "token_level_loss": False}, {"dual_clip": 1.5, **SEQUENCE_MEAN}),
        ({"use_cispo": True}, {"kind": gk.CISPO}),
        ({"reference_policy_kl_penalty": 0.1}, {"kl_beta": 0.1}),
        ({"force_on_policy_ratio": True}, lambda given: {"old": given.logprobs}),
        (TIS | {"truncated_importance_sampling_type": "tis"}, clamped),
        (TIS | {"truncated_importance_sampling_type": "icepop"}, kept),
        (TIS | {"truncated_importance_sampling_type": "seq-mask-tis"}, lambda given: kept(given, True)),
    ]),
    "openrlhf": (openrlhf_step, ({"ranks": 1}, {}), [
        ({"policy_loss_type": "gspo"}, SEQUENCE),
        ({"policy_loss_type": "gspo", "is_correction_level": "token"},
         lambda given: {"old": given.rollout, **SEQUENCE}),
        ({"dual_clip": 1.5, "token_level_loss": False}, {"dual_clip": 1.5, **SEQUENCE_MEAN}),
        ({"is_correction_level": "token", "is_correction_mode": "clip",
          "is_correction_threshold": [0.9, 1.2]}, clamped),
        ({"is_correction_level": "token", "is_correction_threshold": [0.9, 1.2]}, kept),
        ({"is_correction_level": "seq", "is_correction_threshold": [0.9, 1.2]},
         lambda given: kept(given, True)),
    ]),
    "prime-rl": (prime_step, ({},), [
        ({"objective": "GSPO"}, {"kind": gk.GSPO}),
        ({"dual_clip": 1.5}, {"dual_clip": 1.5}),
    ]),
    "slime": (slime_step, ({},), [
        ({"advantage_estimator": "gspo", "rollout_temperature": 0.7},
         lambda g: {"rollout_weights": g.mask.sum(1) / rollout_totals(g).clamp(min=1), "normalizer": 4,
                    **SEQUENCE}),
        ({"advantage_estimator": "cispo", "calculate_per_token_loss": True}, {"kind": gk.CISPO}),
        ({"eps_clip_c": 1.5, "use_rollout_logprobs": True},
         lambda g: {"dual_clip": 1.5, "old": g.rollout, **shares(g)}),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2", "entropy_coef": 0.05},
         lambda g: {"kl_beta": 0.1, "kl_estimator": "k2", "entropy_coef": 0.05, **shares(g)}),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1, "calculate_per_token_loss": True},
         {"kl_beta": 0.1, "kl_estimator": "k1"}),
        ({"use_tis": True}, lambda g: {"rollout_weights": ratios(g).clamp(0.9, 1.1), **shares(g)}),
    ]),
}  # fmt: skip
"""For each framework its step, options of that, and (options of the framework, terms of the formula)."""


@pytest.mark.parametrize("name", CASES)
def test_any_split_adds_up_to_the_formula(name):
    step, ways, cases = CASES[name]
    for options, terms in cases:
        given = problem()
        terms = dict(terms(given) if callable(terms) else terms)
        moved = problem()
        moved.old = terms.pop("old", moved.old)
        want = formula(moved, **terms)
        for splits, way in itertools.product(SPLITS, ways):
            assert_same(step(given, splits, options, **way), want, (options, splits, way), rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("areal", {"m2_threshold": 0.1}),
        ("areal", {"prox_logp_method": "loglinear"}),
        ("areal", {"importance_sampling_level": "turn"}),
        ("areal", {"importance_sampling_level": "sequence", "use_sapo_loss": True}),
        ("areal", {"importance_sampling_level": "sequence", "use_cispo_loss": True}),
        ("areal", {"importance_sampling_level": "sequence", **reject("mask")}),
        ("areal", {"rejection_sampling": Namespace(level="sequence", metric="ratio")}),
        ("nemo-rl", {"disable_ppo_ratio": True}),
        ("nemo-rl", {"positive_example_nll_weight": 0.1}),
        ("nemo-rl", {"reference_policy_kl_penalty": 0.1, "kl_input_clamp_value": 20.0}),
        ("nemo-rl", {"sequence_level_importance_ratios": True, "token_level_loss": True}),
        ("openrlhf", {"policy_loss_type": "grpo"}),
        ("openrlhf", {"is_correction_level": "token", "is_correction_gating": "tv"}),
        ("prime-rl", {"kl_beta": 0.1}),
        ("prime-rl", {"objective": "policy_loss"}),
        ("slime", {"allgather_cp": True}),
        ("slime", {"log_probs_backend": "triton"}),
        ("slime", {"rollout_top_p": 0.9}),
        ("slime", {"custom_tis_function_path": "a.b"}),
        ("slime", {"use_opsm": True}),
        ("slime", {"use_unbiased_kl": True}),
        ("slime", {"use_kl_loss": True, "kl_loss_type": "low_var_kl"}),
    ],
)
def test_options_not_served_are_refused(name, options):
    with raises(f"{[*options][-1]}[:.]"):
        CASES[name][0](problem(), WHOLE, options)


@pytest.mark.parametrize("name", ["nemo-rl", "openrlhf", "prime-rl", "slime"])
def test_one_advantage_per_sequence(name, monkeypatch):
    step, _, cases = CASES[name]
    monkeypatch.setattr(Problem, "token_advantages", property(lambda self: self.old + 1))
    with raises("advantages: differ within a sequence"):
        step(problem(), WHOLE, cases[0][0])


# ------------------------------------------------------ each alone


def test_areal_advantages_old_log_probs_and_metrics():
    """A sequence's advantage is its tokens' mean; without prox_logp the old log-probs are the rollout's."""
    given = problem()
    data, row = areal_data(given), given.logprobs.flatten()
    data["advantages"] = data["advantages"] + torch.linspace(-1, 1, 42).double()
    varying = torch.where(given.mask, data["advantages"].view(6, 7), 0.0)
    given.advantages = varying.sum(1) / given.mask.sum(1).clamp(min=1)
    given.old = given.rollout
    options = {"eps_clip": 0.1, "eps_clip_higher": 0.15, "c_clip": None, "vocab_norm_logits": 2 * row}
    options |= {"importance_sampling_level": "sequence"}
    LOGGED.clear()
    got = areal.grpo_loss_fn(row, row, data | {"prox_logp": None}, **options)
    assert_same(got, formula(given, kind=gk.GSPO)[0])
    assert {"ratio/min", "clip_fraction/tokens", "entropy", "vocab_norm_logits"} <= LOGGED.keys()
    assert "vocab_min_logits" not in LOGGED and all(type(value) is float for value in LOGGED.values())
    with raises("teacher_logp: "):
        areal.grpo_loss_fn(row, row, data | {"teacher_logp": row}, **options)


def test_nemo_rl_metrics_add_up():
    """Also where counts are 1 and each metric is divided afterwards, by what the loss says of it."""
    given, one = problem(), torch.tensor(1.0)
    counts = {
        MetricNormalizer.TOKENS: given.mask.sum().item(),
        MetricNormalizer.SEQUENCES: given.mask.any(1).sum().item(),
        MetricNormalizer.NONE: 1,
    }
    for options, _ in CASES["nemo-rl"][2]:
        whole, parts = {}, {}
        for metrics, splits in ((whole, WHOLE), (parts, PARTS)):
            nemo_step(given, splits, options, metrics=metrics)
        loss_fn = pickle.loads(pickle.dumps(nemo_rl.ClippedPGLossFn(Namespace(**NEMO | options))))
        _, raw = loss_fn(given.logprobs, nemo_data(given), one, one)
        assert raw.keys() == loss_fn.metric_normalizations.keys() and whole["num_valid_samples"] == [5]
        for name, (value,) in whole.items():
            add = {"probs_ratio_min": min, "probs_ratio_max": max}.get(name, sum)
            assert add(parts[name]) == pytest.approx(value, rel=1e-6), (options, name)
            counted = counts[loss_fn.metric_normalizations[name]]
            if name not in ("loss", "kl_penalty") or "reference_policy_kl_penalty" not in options:
                assert raw[name] / counted == pytest.approx(value, rel=1e-6), (options, name)
    empty = {}
    nemo_step(given, ((5,),), {}, metrics=empty)
    assert empty["probs_ratio_min"] == [math.inf] and empty["probs_ratio_max"] == [-math.inf]
    loss_fn = nemo_rl.ClippedPGLossFn(Namespace(**NEMO | {"reference_policy_kl_penalty": 0.1}), True)
    with raises("reference_policy_kl_penalty: got top-k or top-p"):
        loss_fn(given.logprobs, nemo_data(given) | {"curr_logprobs_unfiltered": given.logprobs}, one, one)


def test_nemo_rl_filtered_tokens_are_masked():
    """Top-k or top-p sampling that drops a token leaves a placeholder; divisors count it."""
    given = problem()
    keep = torch.rand(given.mask.shape, generator=generator(4)) < 0.7
    kept = problem()
    kept.mask, logprobs = given.mask & keep, torch.where(keep, given.logprobs, 0.0)
    totals = given.mask.any(1).sum(), given.mask.sum()
    for options, terms in CASES["nemo-rl"][2][:3]:
        loss_fn = nemo_rl.ClippedPGLossFn(Namespace(**NEMO | options))
        got, _ = loss_fn(logprobs, nemo_data(given) | {"curr_logprobs_keep_mask": keep}, *totals)
        want, _ = formula(kept, normalizer=totals[1] if loss_fn.by_token else totals[0], **terms)
        assert_same(got, want)


@pytest.mark.parametrize(
    ("level", "mode", "of_tokens"), [("token", "mask", True), ("token", "clip", True), ("seq", "mask", False)]
)
def test_openrlhf_metrics(level, mode, of_tokens):
    """Two far-off sequences of six are bounded; one sequence's ratio is clipped."""
    given = problem()
    given.old = given.logprobs - torch.tensor([0.3, 0.0, 0.0, 0.0, 0.0, 0.0]).unsqueeze(1)
    far = torch.tensor([0.3, -0.3, 0.05, -0.05, 0.1, 0.0]).unsqueeze(1)
    lengths = given.mask.sum(1).double()
    correction = {"is_correction_level": level, "is_correction_mode": mode}
    loss_fn = openrlhf.PolicyLoss(**correction, is_correction_threshold=[0.9, 1.2])
    rows = (given.logprobs, given.old, given.token_advantages, given.mask, given.old - far)
    own, bounded = (lengths[:n].sum().item() / lengths.sum().item() for n in (1, 2))
    kl = -(far * given.mask).sum().item() / lengths.sum().item()
    metrics = [each.item() for each in loss_fn(*rows)[1:]]
    assert metrics == pytest.approx(
        [own * (ADVANTAGES[0] > 0), -0.3 * own, kl, bounded if of_tokens else 2 / 6]
    )


WEIGHTS = torch.linspace(0.5, 1.5, 42, dtype=torch.float64).view(6, 7)


def test_prime_rl_weights_scale_the_loss_and_the_kl():
    given = problem()
    got = prime_step(given, PARTS, {"kl_beta": 0.1}, weights=WEIGHTS, reference=True)
    assert_same(got, formula(given, rollout_weights=WEIGHTS, kl_beta=0.1 * WEIGHTS))


def test_prime_rl_ipo_and_score_centering():
    """prime-rl's ``ipo`` of November 2026, with centering over all ids of a sampling mask; times weights."""
    given, rng, K, eps, cap = problem(), generator(9), 5, 0.3, 1e4

    def theirs(inputs):
        moved = (inputs.trainer_logprobs.exp() - inputs.inference_logprobs.exp()).abs()
        ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()
        loss = torch.where(
            inputs.loss_mask & (moved <= eps), inputs.advantages * ratio * inputs.loss_weights, 0.0
        )
        if inputs.trainer_mask_logprobs is None:
            return -loss.sum()
        log_p, log_q = inputs.trainer_mask_logprobs, inputs.inference_mask_logprobs
        p, q = log_p.detach().exp(), log_q.exp()
        inside = log_q.isfinite() & ((p - q).abs() <= eps)
        centered = (torch.where(inside, torch.minimum(p, cap * q), 0.0) * log_p).sum(-1)
        scaled = inputs.advantages * inputs.loss_weights * centered
        return torch.where(inputs.loss_mask, scaled, 0.0).sum() - loss.sum()

    options = {"objective": "PrimeIPO", "eps": eps, "score_centering": True}
    none = torch.arange(K) >= torch.randint(2, K + 1, (7, 1), generator=rng)
    for row, centered in itertools.product(range(2), (True, False)):
        z, other = (torch.randn(7, K, generator=rng, dtype=torch.float64) * 2 for _ in range(2))
        q, grads = other.masked_fill(none, -math.inf).log_softmax(-1), []
        for each in (theirs, lambda inputs: prime_rl.policy_loss(inputs, **options).loss):
            leaves = z.clone().requires_grad_(), given.logprobs[row].clone().requires_grad_()
            p = leaves[0].masked_fill(none, -math.inf).log_softmax(-1).masked_fill(none, 0.0)
            rows = (leaves[1], given.old[row] - 0.8, None, given.token_advantages[row], given.mask[row])
            inputs = LossInputs(*rows, WEIGHTS[row], *((p, q) if centered else ()))
            grads.append(torch.autograd.grad(each(inputs), leaves, materialize_grads=True))
        assert bool((grads[0][0] != 0).any()) == centered
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-14)
    with raises("GSPO can't be centered: its weight depends on the sequence"):
        prime_rl.policy_loss(LossInputs(*rows, None, p, q), score_centering=True)
    with raises("score_centering: this prime-rl passes no log-probs"):
        before = dict(zip(LossInputs._fields[:6], inputs, strict=False))
        prime_rl.policy_loss(SimpleNamespace(**before), **options)


def test_slime_calls():
    """Without old log-probs the loss is on-policy."""
    given, gspo = problem(), slime_arguments(advantage_estimator="gspo")
    batch, logits = slime_batch(given, given.logprobs, given.mask.sum(1))
    reducer, long = sum_of_sample_mean(batch), [torch.zeros(30, dtype=torch.int64)] * 6
    loss, metrics = slime.policy_loss(gspo, batch | {"log_probs": None}, logits, reducer)
    assert loss.item() == pytest.approx(-sum(ADVANTAGES[:5])) and metrics["ppo_kl"] == 0
    for args, changes, message in (
        (slime_arguments(use_tis=True), {"log_probs": None}, "use_tis: got no log_probs"),
        (gspo, {"response_lengths": [30] * 6}, r"response_lengths: got 30 of \d+ tokens, expected a prompt"),
        (gspo, {"total_lengths": [30] * 6, "unconcat_tokens": long}, r"logits: got \d+ rows, total_lengths"),
    ):
        with raises(message):
            slime.policy_loss(args, batch | changes, logits, reducer)


def part_of_rank(batch, logits, rank, ranks):
    """Return a micro-batch as a rank among those that share tokens has it, and the rows that it has."""
    rows, start = [], 0
    parts = {name: [] for name in ("log_probs", "ref_log_probs", "rollout_log_probs", "advantages")}
    for i, (total, response) in enumerate(
        zip(batch["total_lengths"], batch["response_lengths"], strict=True)
    ):
        run = -(-total // (2 * ranks))
        own = [k * run + j for k in (rank, 2 * ranks - 1 - rank) for j in range(run)]
        rows += [start + each if each < total else -1 for each in own]
        places = [each - (total - response - 1) for each in own]
        places = [each for each in places if 0 <= each < response]
        for name, values in parts.items():
            values.append(batch[name][i][places])
        start += total
    rows = torch.tensor([*rows, -1, -1, -1])
    local = torch.where(rows.unsqueeze(1) < 0, 0.5, logits[0, rows.clamp(min=0)])
    return batch | parts, local.unsqueeze(0), rows


@pytest.mark.parametrize(("estimator", "by_token"), [("gspo", False), ("grpo", True)])
def test_slime_ranks_share_vocabulary_and_tokens(estimator, by_token):
    """Two ranks share the vocabulary, and two such pairs the tokens: numbers are those of one process."""
    given = problem()
    changes = {"calculate_per_token_loss": by_token, "use_kl_loss": True, "kl_loss_coef": 0.1}
    changes |= {"advantage_estimator": estimator, "use_tis": True}
    batch, logits = slime_batch(given, given.logprobs, rollout_totals(given))
    whole = logits.clone().requires_grad_()
    loss, metrics = slime.policy_loss(
        slime_arguments(**changes), batch, whole, sum_of_sample_mean(batch, by_token)
    )
    (gradient,) = torch.autograd.grad(loss, whole)

    def over_ranks(rank):
        torch.distributed.init_process_group("gloo")
        (cp, tp), new = divmod(rank, 2), torch.distributed.new_group
        tensor, context = ([new(pair) for pair in pairs] for pairs in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
        sys.modules["megatron.core.mpu"] = SimpleNamespace(
            get_tensor_model_parallel_group=lambda: tensor[cp],
            get_context_parallel_group=lambda: context[tp],
            get_context_parallel_rank=lambda: cp,
        )
        args = slime_arguments(tensor_model_parallel_size=2, context_parallel_size=2, **changes)
        own, local, rows = part_of_rank(batch, logits, cp, 2)
        leaf = local[..., tp : tp + 1].clone().requires_grad_()
        got, reported = slime.policy_loss(args, own, leaf, lambda values: values.sum())
        assert_same(got, loss)
        (mine,) = torch.autograd.grad(got, leaf)
        want = torch.where(rows.unsqueeze(1) < 0, 0.0, gradient[0, rows.clamp(min=0), tp : tp + 1])
        assert_same(mine[0], want)
        for name in ("loss", "pg_clipfrac"):  # slime adds these up
            value = torch.as_tensor(reported[name]).detach().double().clone()
            torch.distributed.all_reduce(value, group=context[tp])
            assert_same(value, torch.as_tensor(metrics[name]).double(), name)

    in_processes(4, over_ranks)
