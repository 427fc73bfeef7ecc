"""Loss hooks: AReaL 1.0.4, NeMo-RL 0.7.0, OpenRLHF 0.11.2, prime-rl 0.9.0 and after, slime 0.3.1.

Each framework's sum over micro-batches and ranks is written out here in fp64. Where the framework's code is
available (see ``peers``), it must give the same numbers.
"""

import enum
import importlib
import inspect
import itertools
import math
import pickle
import re
import sys
import types
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.integrations import areal, nemo_rl, openrlhf, prime_rl, slime
from gspo_kernels.integrations.backends.replacing import Replacements
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.hooks import RolloutCorrection
from tests.cases import generator, offsets
from tests.forks import in_processes
from tests.integrations import peers
from tests.objectives.sample_batches import ADVANTAGES, examples, make_batch
from tests.test_docs import run

GSPO, DUAL = gk.GSPO(clip_low=0.1, clip_high=0.15), gk.GRPO(dual_clip=1.5)
GRPO = gk.GRPO(aggregation="token_mean")
GSPO_OVER_TOKENS = gk.GSPO(clip_low=0.1, clip_high=0.15, aggregation="token_mean")
WHOLE, PARTS = ((0, 1, 2, 3, 4, 5),), ((0, 1), (2, 5, 3), (4,))
SPLITS = WHOLE, PARTS, tuple((row,) for row in range(6))
"""Splits into micro-batches of sequences; in the last, one micro-batch has no token."""


@dataclass
class Problem:
    """Six sequences [B, T] in fp64 with holes in their masks, one of them empty; masked values are finite."""

    logprobs: Tensor
    old: Tensor
    mask: Tensor
    advantages: Tensor
    rollout: Tensor
    reference: Tensor
    rollout_tokens: Tensor
    """[B]: the tokens of all sequences of the same rollout; by default each sequence is one rollout."""

    @property
    def token_advantages(self) -> Tensor:
        return self.advantages.unsqueeze(1).expand(self.mask.shape).contiguous()

    @property
    def call(self):
        """Return the first arguments of a loss of padded log-probs."""
        return self.logprobs, self.old, self.token_advantages, self.mask

    def part(self, rows) -> "Problem":
        return Problem(*(getattr(self, each.name)[list(rows)] for each in fields(self)))


def problem() -> Problem:
    batch = make_batch(gk.GRPO())
    rng = generator(100)

    def noise() -> Tensor:
        return 0.3 * torch.randn(batch.loss_mask.shape, generator=rng, dtype=torch.float64)

    old = batch.old_logprobs.nan_to_num(-1.0)
    return Problem(
        batch.logprobs.nan_to_num(-0.5), old, batch.loss_mask, torch.tensor(ADVANTAGES, dtype=torch.float64),
        (old + noise()).clamp(max=-1e-3), old - 0.2 + noise(), batch.loss_mask.sum(1),
    )  # fmt: skip


def fitting(*aggregations: str) -> list:
    """Return every registered objective that needs no more than a sequence and no optional argument."""
    return [
        one
        for one in examples(max_scope="sequence")
        if not one.needs and (not aggregations or one.aggregation in aggregations)
    ]


def expected(given: Problem, objective, **terms) -> tuple[Tensor, Tensor]:
    """Return the loss of the whole batch and its gradient."""
    logprobs = given.logprobs.clone().requires_grad_()
    if "entropy_coef" in terms:  # the vocabulary has two tokens
        other = torch.log1p(-logprobs.exp())
        terms["entropy"] = -(logprobs.exp() * logprobs + other.exp() * other)
    loss = gk.policy_loss(
        logprobs, given.old, given.advantages, loss_mask=given.mask, objective=objective, **terms
    ).loss
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


def assert_same(got, want, about=None, rtol=1e-10):
    torch.testing.assert_close(got, want, rtol=rtol, atol=1e-13, msg=lambda text: f"{about}: {text}")


def raises(message):
    return pytest.raises((TypeError, ValueError), match=message)


LossType = enum.Enum("LossType", "TOKEN_LEVEL SEQUENCE_LEVEL")
LossInputType = enum.Enum("LossInputType", "LOGIT LOGPROB")
MetricNormalizer = enum.Enum("MetricNormalizer", "TOKENS SEQUENCES NONE")


@pytest.fixture(autouse=True)
def nemo_rl_interfaces(monkeypatch):
    """Provide the enumerations that the adapter imports from NeMo-RL."""
    interfaces = SimpleNamespace(
        LossType=LossType, LossInputType=LossInputType, MetricNormalizer=MetricNormalizer
    )
    monkeypatch.setitem(sys.modules, "nemo_rl.algorithms.loss.interfaces", interfaces)


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


def areal_step(loss_fn, given, splits, *, packed=True, weight=None):
    """Add up as ``train_batch``: a micro-batch has its share of the sum of ``weight`` over the batch."""
    weight = weight or loss_fn.weight
    whole = sum(weight(areal_data(given.part(rows), packed)).double() for rows in splits)

    def loss_of(part, logprobs):
        data = areal_data(part, packed)
        row = logprobs.flatten() if packed else logprobs
        ranges = dict.fromkeys(("vocab_min_logits", "vocab_max_logits"), torch.ones_like(row))
        share = weight(data).double() / whole
        return loss_fn(row, torch.ones_like(row), data, **ranges) * share if share else 0.0 * logprobs.sum()

    return add_up(given, splits, loss_of)


def nemo_data(part) -> dict:
    """Return the data that NeMo-RL's loss reads: one more position than there are next tokens."""

    def pad(values):
        return torch.nn.functional.pad(values, (1, 0), value=0.25)

    # A sequence outside of sample_mask still has tokens in token_mask.
    tokens = part.mask | ~part.mask.any(1, keepdim=True)
    return {
        "token_mask": pad(tokens.to(part.old.dtype)),
        "sample_mask": part.mask.any(1).to(part.old.dtype),
        "advantages": pad(part.token_advantages),
        "prev_logprobs": pad(part.old),
        "generation_logprobs": pad(part.rollout),
        "reference_policy_logprobs": pad(part.reference),
    }


def nemo_step(loss_fn, given, splits, *, metrics=None):
    """Add up a global batch: a sum over micro-batches and, in effect, over ranks."""
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


def openrlhf_step(loss_fn, given, splits, *, ranks=None, info=None):
    """Add up an optimizer step of OpenRLHF; without ``ranks`` each rank has one micro-batch."""
    ranks = ranks or len(splits)
    info = info or {
        "dp_size": ranks,
        "batch_num_tokens": given.mask.sum().double() * ranks / len(splits),
        "global_batch_size": given.mask.any(1).sum().double() * ranks / len(splits),
    }
    # With one of these attributes a loss gets the engine's log-probs, as in OpenRLHF.
    corrects = getattr(loss_fn, "correction", None) is not None or hasattr(loss_fn, "is_correction_level")

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


def prime_step(loss_fn, given, splits, *, weights=None, reference=False, compute=None):
    """Sum the losses of single sequences over all ranks, divided by the global number of tokens."""
    tokens, every = int(given.mask.sum()), iter([list(rows) for rows in splits])

    def loss_of(part, logprobs):
        rows = next(every)
        scale = [None] * len(rows) if weights is None else [*weights[rows]]
        references = [*part.reference] if reference else [None] * len(rows)
        columns = ([*logprobs], [*part.old], references, [*part.token_advantages], [*part.mask], scale)
        if compute is None:
            return sum(loss_fn(LossInputs(*row)).loss for row in zip(*columns, strict=True)) / tokens
        columns = [None if column[0] is None else column for column in columns]
        return compute(*columns, None, None, loss_fn, tokens, 1, 1)[0]

    return add_up(given, splits, loss_of)


def slime_arguments(**changes) -> Namespace:
    """Return the arguments of slime and Megatron that slime's loss reads, with defaults."""
    defaults = {
        "loss_type": "policy_loss", "advantage_estimator": "gspo", "calculate_per_token_loss": False,
        "eps_clip": 0.1, "eps_clip_high": 0.15, "entropy_coef": 0.0, "use_kl_loss": False,
        "kl_loss_coef": 0.0, "kl_loss_type": "k1", "use_unbiased_kl": False, "rollout_temperature": 1.0,
        "rollout_top_p": 1.0, "use_rollout_logprobs": False, "use_opsm": False, "use_tis": False,
        "get_mismatch_metrics": False,
        "custom_pg_loss_reducer_function_path": None, "tensor_model_parallel_size": 1,
        "context_parallel_size": 1, "allgather_cp": False, "recompute_loss_function": False,
        "log_probs_chunk_size": -1, "custom_loss_function_path": "ours",
    }  # fmt: skip
    return Namespace(**{**defaults, **changes})


def slime_batch(part, logprobs, temperature=1.0):
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
        "log_probs": of(part.old), "ref_log_probs": of(part.reference),
        "rollout_log_probs": of(part.rollout), "rollout_mask_sums": part.rollout_tokens.to(part.old.dtype),
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


def slime_step(loss_fn, given, splits, *, inplace=False, rollouts=None, **changes):
    """Add up as slime, which divides the sum over micro-batches by the step's rollouts or by its tokens."""
    by_token = loss_fn.objective.outer_divisor()[0] == "tokens"
    args = slime_arguments(**{"calculate_per_token_loss": by_token, **changes})
    loss_fn.inplace_backward = inplace  # whether the gradient may overwrite the logits

    def loss_of(part, logprobs):
        batch, logits = slime_batch(part, logprobs, args.rollout_temperature)
        loss, reported = loss_fn(args, batch, logits, sum_of_sample_mean(batch, by_token))
        assert all(torch.as_tensor(value).ndim == 0 for value in reported.values())
        return loss / (given.mask.sum() if by_token else rollouts or given.mask.any(1).sum())

    return add_up(given, splits, loss_of)


# ------------------------------------------------------ what holds for all of them


@dataclass(frozen=True)
class Framework:
    adapter: types.ModuleType
    step: Callable
    ways: tuple[dict, ...]
    """Sets of options of ``step``."""
    installed: str
    """A supported version; ``other`` is not supported."""
    other: str
    aggregations: tuple = ()


FRAMEWORKS = {
    "areal": Framework(areal, areal_step, ({"packed": True}, {"packed": False}), "1.0.4", "0.9.0"),
    "nemo-rl": Framework(nemo_rl, nemo_step, ({},), "0.7.0", "0.8.0"),
    "openrlhf": Framework(openrlhf, openrlhf_step, ({"ranks": 1}, {}), "0.11.2", "0.10.4"),
    # 0.9.1.dev is the main branch after 0.9.0, with another default loss and with loss objects.
    "prime-rl": Framework(prime_rl, prime_step, ({},), "0.9.1.dev40", "0.10.0", ("token_mean",)),
    "slime": Framework(slime, slime_step, ({}, {"inplace": True}), "0.3.1", "0.2.4"),
}
EACH = pytest.mark.parametrize("name", FRAMEWORKS)
CORRECTIONS = [
    {"high": 1.1},
    {"mode": "icepop", "low": 0.9, "high": 1.2},
    {"level": "sequence", "reduce": "sum", "low": 0.9, "high": 1.5},
    {"mode": "k2", "level": "sequence", "reduce": "max", "high": 0.05},
]


@EACH
def test_any_split_over_micro_batches_and_ranks_adds_up_to_the_step(name):
    """This holds for every objective that fits, and with every kind of correction."""
    one, given = FRAMEWORKS[name], problem()
    cases = [(objective, {}, {}) for objective in fitting(*one.aggregations)]
    assert len(cases) >= (8 if one.aggregations else 20)
    for objective, options in itertools.product((GSPO, GRPO), CORRECTIONS if name != "prime-rl" else ()):
        weights = gk.rollout_weights(given.old, given.rollout, loss_mask=given.mask, **options)
        terms = {"rollout_weights": weights}
        cases.append((objective, {"correction": RolloutCorrection(**options)}, terms))
    for objective, options, terms in cases:
        loss_fn, want = one.adapter.PolicyLoss(objective, **options), expected(given, objective, **terms)
        for splits, way in itertools.product(SPLITS, one.ways):
            assert_same(one.step(loss_fn, given, splits, **way), want, (objective, options, splits, way))


@EACH
def test_the_published_version_is_served_and_another_is_refused(name, monkeypatch):
    one = FRAMEWORKS[name]
    monkeypatch.setattr("gspo_kernels.integrations.errors.version", lambda name: one.installed)
    one.adapter.PolicyLoss()
    monkeypatch.setattr("gspo_kernels.integrations.errors.version", lambda name: one.other)
    served = re.escape(one.adapter.SUPPORTED)
    with raises(f"{name}: version {one.other} is installed, .*needs {name}{served}"):
        one.adapter.PolicyLoss()


def integration(name, function, *arguments):
    """Return a call of an adapter's function that imports the adapter only when called."""
    return lambda: getattr(importlib.import_module(f"gspo_kernels.integrations.{name}"), function)(*arguments)


@pytest.mark.parametrize(
    ("installed", "says"), [("0.1.0", "version 0.1.0 is installed, this"), (None, "not installed, this")]
)
@pytest.mark.parametrize(
    ("needed", "call"),
    [
        ("transformers>=5.1", integration("transformers", "fuse_lm_head", None)),
        ("trl>=1.16", integration("trl", "FusedGRPOTrainer")),
        ("trl>=1.16", integration("backends.trl", "install")),
        ("verl>=0.9.1", integration("verl", "register", "mine", gk.GSPO())),
        ("verl>=0.9.1", integration("backends.verl", "install")),
        ("skyrl>=0.3,<0.4", integration("skyrl", "register_all")),
        ("skyrl>=0.3,<0.4", integration("skyrl", "register", "mine", gk.GSPO())),
        ("some-framework>=1", Replacements("some-framework", ">=1", {}).install),
    ],
)
def test_what_is_missing_or_at_another_version_is_said_in_one_sentence(
    installed, says, needed, call, monkeypatch
):
    def version(name):
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr("gspo_kernels.integrations.errors.version", version)
    extras = ["trl>=1.16; extra == 'trl'", "transformers>=5.1", "verl>=0.9.1; extra == 'verl'", "peft"]
    monkeypatch.setattr("gspo_kernels.integrations.errors.requires", lambda name: extras)
    # The TRL adapter checks the version when it is imported.
    monkeypatch.delitem(sys.modules, "gspo_kernels.integrations.trl", raising=False)
    with pytest.raises(IntegrationError, match=f"^[a-z-]+: {says} adapter needs {re.escape(needed)}"):
        call()


TIS = RolloutCorrection(low=0.9, high=1.2)
MASKED, ICEPOP = (RolloutCorrection(mode=mode, low=0.9, high=1.2) for mode in ("mask", "icepop"))
SEQUENCE_MASK = RolloutCorrection(mode="sequence_mask", low=1.0, high=1.25)


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (areal, {"objective": gk.KLCov()}, "KLCov looks at a whole batch, but AReaL"),
        (areal, {"log": "stats"}, "log: got str"),
        (nemo_rl, {"objective": gk.DPO()}, "DPO needs ref_logprobs and group_ids, which NeMo-RL"),
        (nemo_rl, {"kl_estimator": "k4"}, "kl_estimator: got 'k4'"),
        (openrlhf, {"objective": gk.GRPO(aggregation="sum")}, "divides by nothing"),
        (openrlhf, {"objective": gk.GSPO}, "instance such as GSPO"),
        (openrlhf, {"correction": 0.5}, "correction: got float"),
        (
            areal,
            {"objective": gk.GSPO(aggregation="prompt_mean")},
            "by the number of prompts, but AReaL",
        ),
        (prime_rl, {"objective": GSPO}, "'sequence_mean' divides by the number of sequences, but prime-rl"),
        (slime, {"objective": gk.EGSW()}, "EGSW needs entropy and group_ids, which slime"),
        (slime, {"backend": "cuda"}, "backend: got 'cuda'"),
    ],
)
def test_what_does_not_fit_is_refused_at_construction(make, options, reason):
    with raises(reason):
        make.PolicyLoss(**options)


# Options with which a framework's loss equals ours: (objective, options of ours, options of the framework).
SAME = {
    "areal": [
        (GSPO_OVER_TOKENS, {}, {"eps_clip": 0.1, "eps_clip_higher": 0.15,
                                "importance_sampling_level": "sequence"}),
        (GRPO, {}, {"eps_clip": 0.2}),
        (GRPO, {"correction": TIS}, {"eps_clip": 0.2, "action": "clamp"}),
        (GRPO, {"correction": MASKED}, {"eps_clip": 0.2, "action": "mask"}),
    ],
    "nemo-rl": [
        (GSPO, {}, {"sequence_level_importance_ratios": True, "token_level_loss": False,
                    "ratio_clip_min": 0.1, "ratio_clip_max": 0.15}),
        (GRPO, {}, {}),
        (DUAL, {}, {"ratio_clip_c": 1.5, "token_level_loss": False}),
        (gk.CISPO(min_ratio=0.8, max_ratio=1.2), {}, {"use_cispo": True}),
        (GRPO, {"correction": TIS}, {"truncated_importance_sampling_type": "tis"}),
        (GRPO, {"correction": ICEPOP}, {"truncated_importance_sampling_type": "icepop"}),
        (GRPO, {"correction": SEQUENCE_MASK}, {"truncated_importance_sampling_type": "seq-mask-tis",
                                               "truncated_importance_sampling_ratio": 1.25,
                                               "truncated_importance_sampling_ratio_min": 1.0}),
    ],
    "openrlhf": [
        (GSPO, {}, {"policy_loss_type": "gspo", "clip_eps_low": 0.1, "clip_eps_high": 0.15}),
        (GRPO, {}, {}),
        (DUAL, {}, {"dual_clip": 1.5, "token_level_loss": False}),
        (GRPO, {"correction": TIS}, {"is_correction_mode": "clip"}),
        (GRPO, {"correction": ICEPOP}, {"is_correction_mode": "mask"}),
        (GRPO, {"correction": SEQUENCE_MASK}, {"is_correction_mode": "mask", "is_correction_level": "seq",
                                               "is_correction_threshold": [1.0, 1.25]}),
    ],
}  # fmt: skip


def areal_loss(options):
    names = peers.extract(
        peers.source("areal", "areal/utils/functional/functional.py"),
        "ppo_actor_loss_fn",
        dataclass=dataclass,
    )
    if action := options.pop("action", None):
        options["rejection_sampling"] = Namespace(
            action=action, level="token", metric="ratio", agg="mean", lower=0.9, upper=1.2
        )

    def loss(logprobs, entropy, data, **_):
        return names["ppo_actor_loss_fn"](
            logprobs, data["prox_logp"], data["logprobs"], data["advantages"],
            loss_mask=data["loss_mask"].bool(), cu_seqlens=data.get("cu_seqlens"), **options,
        )[0]  # fmt: skip

    return loss


class BaseModel(Namespace):
    """A stand-in for pydantic's class that suffices for a configuration with defaults."""

    def __init_subclass__(cls, **options):
        pass


def nemo_loss(options):
    utils = peers.extract(
        peers.source("nemo_rl", "nemo_rl/algorithms/utils.py"), "masked_mean", "calculate_kl"
    )
    names = peers.extract(
        peers.source("nemo_rl", "nemo_rl/algorithms/loss/loss_functions.py"), "ClippedPGLossConfig",
        "ClippedPGLossFn", LossFunction=object, LossType=LossType, LossInputType=LossInputType,
        MetricNormalizer=MetricNormalizer, BaseModel=BaseModel, masked_mean=utils["masked_mean"],
        calculate_kl=utils["calculate_kl"],
    )  # fmt: skip
    bounds = {"truncated_importance_sampling_ratio": 1.2, "truncated_importance_sampling_ratio_min": 0.9}
    if "truncated_importance_sampling_type" in options:
        options = {"use_importance_sampling_correction": True, **bounds, **options}
    options = {"reference_policy_kl_penalty": 0.0, **options}
    return names["ClippedPGLossFn"](names["ClippedPGLossConfig"](**options))


def openrlhf_loss(options):
    utils = peers.extract(peers.source("openrlhf", "openrlhf/models/utils.py"), "masked_mean")
    names = peers.extract(
        peers.source("openrlhf", "openrlhf/models/loss.py"), "PolicyLoss",
        nn=torch.nn, masked_mean=utils["masked_mean"],
    )  # fmt: skip
    if "is_correction_mode" in options:
        options = {"is_correction_level": "token", "is_correction_threshold": [0.9, 1.2], **options}
    return names["PolicyLoss"](**options)


@pytest.mark.parametrize(
    ("name", "objective", "options", "theirs"), [(name, *each) for name, all in SAME.items() for each in all]
)
def test_equals_the_framework(name, objective, options, theirs):
    one, given = FRAMEWORKS[name], problem()
    make = {"areal": areal_loss, "nemo-rl": nemo_loss, "openrlhf": openrlhf_loss}[name]
    ours, theirs, way = one.adapter.PolicyLoss(objective, **options), make(dict(theirs)), {}
    if name == "areal":
        way["weight"] = ours.weight  # AReaL's actor counts tokens, as these objectives do
    if name == "openrlhf":
        norm = peers.extract(
            peers.source("openrlhf", "openrlhf/utils/loss_utils.py"), "_optimizer_step_loss_norm",
            dist=torch.distributed,
        )["_optimizer_step_loss_norm"]  # fmt: skip
        way["info"] = norm([given.mask[list(rows)] for rows in PARTS], None, 1, len(PARTS))
    got, want = (one.step(each, given, PARTS, **way) for each in (ours, theirs))
    # The frameworks divide a sequence's sum by its number of tokens plus 1e-8.
    assert_same(got, want, rtol=1e-6)
    if name == "nemo-rl":
        assert inspect.signature(theirs).parameters.keys() == inspect.signature(ours).parameters.keys()
        assert theirs.loss_type is ours.loss_type
        if said := getattr(theirs, "metric_normalizations", None):  # after 0.7
            shared = said.keys() & ours.metric_normalizations.keys() - {"probs_ratio", "kl_penalty"}
            assert all(ours.metric_normalizations[name] is said[name] for name in shared)
        mine, its = {}, {}
        for loss_fn, metrics in ((ours, mine), (theirs, its)):
            nemo_step(loss_fn, given, WHOLE, metrics=metrics)
        names = {"loss", "probs_ratio_min", "probs_ratio_max", "num_valid_samples"}
        for metric in names | (set() if objective.level == "sequence" else {"probs_ratio"}):
            assert mine[metric] == pytest.approx(its[metric], rel=1e-5), metric
    if name == "openrlhf":
        mine, its = (inspect.signature(each.forward).parameters for each in (ours, theirs))
        assert [*mine] == [*its]
        # In OpenRLHF a sequence without a token has a ratio of NaN and counts as filtered.
        given = given.part(given.mask.any(1).nonzero().flatten().tolist())
        *call, mask = given.call
        call += [mask.double(), given.rollout if options else None]
        (_, clipped, *mine), (_, its_clipped, *its) = (
            [each if each is None else each.double() for each in loss_fn(*call)] for loss_fn in (ours, theirs)
        )
        assert_same(mine, its, rtol=1e-6)
        clipped, its_clipped = clipped.item(), its_clipped.item()
        # OpenRLHF does not count tokens that its dual clip bounds.
        assert (
            clipped >= its_clipped if objective == DUAL else clipped == pytest.approx(its_clipped, rel=1e-6)
        )


# ------------------------------------------------------ each alone


def test_areal_s_advantages_old_log_probs_and_metrics():
    """A sequence's advantage is its tokens' mean; without prox_logp the old log-probs are the rollout's."""
    given, seen = problem(), []
    data, call = areal_data(given), (given.logprobs.flatten(), given.logprobs.flatten())
    data["advantages"] = data["advantages"] + torch.linspace(-1, 1, 42).double()
    varying = torch.where(given.mask, data["advantages"].view(6, 7), 0.0)
    given.advantages = varying.sum(1) / given.mask.sum(1).clamp(min=1)
    loss_fn = areal.PolicyLoss(GSPO, log=seen.append)
    assert_same(loss_fn(*call, data, given.old.flatten()), expected(given, GSPO)[0])
    names = {"ratio/min", "clip_fraction/tokens", "entropy", "vocab_min_logits"}
    assert names <= seen[0].keys() and all(type(value) is float for value in seen[0].values())
    assert "vocab_max_logits" not in seen[0]
    given.old = given.rollout
    assert_same(loss_fn(*call, data | {"prox_logp": None}), expected(given, GSPO)[0])
    with raises("teacher_logp: got a tensor, expected None: this loss has no"):
        loss_fn(*call, data | {"teacher_logp": data["logprobs"]})
    with raises("prox_logp: got None, but the correction needs it"):
        areal.PolicyLoss(correction=TIS)(*call, data | {"prox_logp": None})


def test_nemo_rl_s_loss_says_what_it_takes_and_can_be_sent(monkeypatch):
    loss_fn = nemo_rl.PolicyLoss(GSPO)
    assert (loss_fn.input_type, loss_fn.loss_type) == (LossInputType.LOGPROB, LossType.SEQUENCE_LEVEL)
    assert nemo_rl.PolicyLoss(gk.DAPO()).loss_type is LossType.TOKEN_LEVEL
    assert pickle.loads(pickle.dumps(loss_fn)).objective == GSPO  # as Ray does
    monkeypatch.setitem(sys.modules, "nemo_rl.algorithms.loss.interfaces", None)
    with raises(r"^nemo-rl: .* this adapter needs NeMo-RL >=0.6,<0.8, installed from"):
        nemo_rl.PolicyLoss()


def test_nemo_rl_s_kl():
    """The value is NeMo-RL's; the gradient has no score-function part, which NeMo-RL's has."""
    loss_fn, given = nemo_rl.PolicyLoss(GRPO, kl_beta=0.1), problem()
    ours = expected(given, GRPO, ref_logprobs=given.reference, kl_beta=0.1)
    assert_same(nemo_step(loss_fn, given, PARTS), ours)
    theirs = nemo_step(nemo_loss({"reference_policy_kl_penalty": 0.1}), given, WHOLE)
    assert_same(ours[0], theirs[0], rtol=1e-6)


def test_nemo_rl_s_metrics_add_up():
    given = problem()
    for objective in fitting():
        whole, parts = {}, {}
        for metrics, splits in ((whole, WHOLE), (parts, PARTS)):
            nemo_step(nemo_rl.PolicyLoss(objective), given, splits, metrics=metrics)
        for name, (value,) in whole.items():
            add = {"probs_ratio_min": min, "probs_ratio_max": max}.get(name, sum)
            assert add(parts[name]) == pytest.approx(value, rel=1e-6), (objective, name)
        assert whole["num_valid_samples"] == [5]
    empty = {}
    nemo_step(nemo_rl.PolicyLoss(GSPO), given, ((5,),), metrics=empty)
    assert empty["probs_ratio_min"] == [math.inf] and empty["probs_ratio_max"] == [-math.inf]


def test_nemo_rl_s_metrics_are_the_same_when_counts_come_afterwards(monkeypatch):
    """Trainers after 0.7 pass counts of 1 and divide each metric by what the loss says of it."""
    given, one = problem(), torch.tensor(1.0)
    counts = {
        MetricNormalizer.TOKENS: given.mask.sum().item(),
        MetricNormalizer.SEQUENCES: given.mask.any(1).sum().item(),
        MetricNormalizer.NONE: 1,
    }
    for objective in (GSPO, gk.DAPO(), gk.GSPOToken()):
        loss_fn, whole = nemo_rl.PolicyLoss(objective), {}
        nemo_step(loss_fn, given, WHOLE, metrics=whole)
        _, raw = loss_fn(given.logprobs, nemo_data(given), one, one)
        assert raw.keys() == loss_fn.metric_normalizations.keys()
        for name, counted in loss_fn.metric_normalizations.items():
            assert raw[name] / counts[counted] == pytest.approx(whole[name][0], rel=1e-6), (objective, name)
    assert loss_fn.use_fused_linear_logprobs is False
    assert nemo_rl.PolicyLoss(use_fused_linear_logprobs=True).use_fused_linear_logprobs is True
    monkeypatch.delattr(sys.modules["nemo_rl.algorithms.loss.interfaces"], "MetricNormalizer")
    assert nemo_rl.PolicyLoss().metric_normalizations == {}  # 0.6 and 0.7


def test_nemo_rl_s_placeholders_are_refused():
    given = problem()
    data, totals = nemo_data(given), (torch.tensor(5), given.mask.sum())
    zeros = torch.zeros_like(data["prev_logprobs"])

    def call(name, **options):
        loss_fn = nemo_rl.PolicyLoss(GSPO, **options)
        return loss_fn(given.logprobs, data | {name: zeros}, *totals)

    with raises(r"prev_logprobs: all zeros, .* give on_policy=True"):
        call("prev_logprobs")
    loss, metrics = call("prev_logprobs", on_policy=True)
    assert metrics["probs_ratio_min"] == metrics["probs_ratio_max"] == 1.0
    assert_same(loss, -given.advantages[:5].mean())
    with raises("reference_policy_logprobs: all zeros"):
        call("reference_policy_logprobs", kl_beta=0.1)
    with raises("kl_beta: under top-k or top-p"):
        call("curr_logprobs_unfiltered", kl_beta=0.1)


def test_openrlhf_s_metrics():
    """All tokens of two of the six sequences are far off, so a third of the sequences is bounded."""
    given = problem()
    given.old[0] -= 0.5  # clipped in every draw
    out = openrlhf.PolicyLoss(GSPO)(*given.call)
    assert out.vllm_kl is None and out.is_filter_ratio is None
    assert_same(out.ppo_kl.double(), (given.old - given.logprobs)[given.mask].mean())
    want = gk.policy_loss(given.logprobs, given.old, given.advantages, loss_mask=given.mask, objective=GSPO)
    assert out.clip_ratio == want.metrics["clip_fraction/tokens"] and 0 < out.clip_ratio < 1
    far = torch.tensor([0.3, -0.3, 0.05, -0.05, 0.1, 0.0]).unsqueeze(1)
    rollout = given.old - far - 0.02 * (torch.arange(7) % 2)
    of_tokens, of_sequences = given.mask[:2].sum() / given.mask.sum(), torch.tensor(2 / 6)
    for options, share in (
        ({"low": 0.9, "high": 1.2}, of_tokens),
        ({"mode": "icepop", "low": 0.9, "high": 1.2}, of_tokens),
        ({"mode": "sequence_mask", "low": 0.9, "high": 1.2}, of_sequences),
        ({"level": "sequence", "low": 0.9, "high": 1.2}, of_sequences),
        ({"mode": "k2", "level": "sequence", "reduce": "max", "high": 0.02}, of_sequences),
    ):
        loss_fn = openrlhf.PolicyLoss(GSPO, correction=RolloutCorrection(**options))
        out = loss_fn(*given.call, rollout_log_probs=rollout)
        assert_same(out.vllm_kl, (rollout - given.old)[given.mask].mean())
        torch.testing.assert_close(out.is_filter_ratio, share)


def test_openrlhf_s_calls():
    """Without totals a micro-batch is the whole batch; masked advantages may be NaN."""
    given, loss_fn = problem(), openrlhf.PolicyLoss(GSPO)
    alone = loss_fn(*given.call, dp_size=4)[0]
    assert_same(alone, expected(given, GSPO)[0])
    nan = given.token_advantages.masked_fill(~given.mask, math.nan)
    assert loss_fn(given.logprobs, given.old, nan, given.mask)[0] == alone
    with raises("needs at least one bound"):
        RolloutCorrection()
    with raises(r"rollout_log_probs: .* made with a correction; set both or none"):
        openrlhf.PolicyLoss(GSPO, correction=TIS)(*given.call)
    with raises(r"rollout_log_probs: .* without a correction; set both or none"):
        loss_fn(*given.call, given.rollout)


# ------------------------------------------------------ prime-rl alone

WEIGHTS = torch.linspace(0.5, 1.5, 42, dtype=torch.float64).view(6, 7)


def prime_code(*names, **known):
    """Return definitions from prime-rl's own file of losses."""
    file = peers.source("prime_rl", "prime_rl/trainer/rl/loss.py")
    if "IPOLoss" in names and "class IPOLoss:" not in file.read_text():
        pytest.skip("this prime-rl has another default")
    return peers.extract(file, *names, dataclass=dataclass, field=field, **known)


def test_prime_rl_s_weights_scale_every_token_of_the_loss_and_of_the_kl():
    given = problem()
    terms = {"rollout_weights": WEIGHTS, "kl_beta": 0.1 * WEIGHTS, "ref_logprobs": given.reference}
    for objective in (GSPO_OVER_TOKENS, GRPO):
        loss_fn = prime_rl.PolicyLoss(objective, kl_beta=0.1)
        got = prime_step(loss_fn, given, PARTS, weights=WEIGHTS, reference=True)
        assert_same(got, expected(given, objective, **terms))


def test_prime_rl_s_loss_objects_and_metrics():
    """The method ``loss`` equals a call; metrics are 0-d and need no gradient."""
    given, loss_fn = problem().part([0]), prime_rl.PolicyLoss(GSPO_OVER_TOKENS)
    given.logprobs.requires_grad_()
    first = LossInputs(given.logprobs[0], given.old[0], None, given.token_advantages[0], given.mask[0])
    loss, metrics = loss_fn(first)
    assert torch.equal(loss_fn.loss(first).loss, loss)
    assert all(each.ndim == 0 and not each.requires_grad for each in metrics.values())
    with raises("ref_logprobs: got None, but kl_beta asks"):
        prime_rl.PolicyLoss(kl_beta=0.1)(first)


def test_inside_prime_rl_s_compute_loss():
    """Our loss works as a function and, in versions with loss objects, through prime-rl's ``CustomLoss``."""
    objects = "class IPOLoss:" in peers.source("prime_rl", "prime_rl/trainer/rl/loss.py").read_text()
    code, given = prime_code("LossInputs", "compute_loss"), problem()
    published = [each.name for each in fields(code["LossInputs"])]
    assert published == [*LossInputs._fields][: 8 if objects else 6]
    for options in ({}, {"reference": True}, {"weights": WEIGHTS}, {"weights": WEIGHTS, "reference": True}):
        loss_fn = prime_rl.PolicyLoss(GSPO_OVER_TOKENS, kl_beta=0.1 if "reference" in options else 0.0)
        want = prime_step(loss_fn, given, PARTS, **options)
        assert_same(prime_step(loss_fn, given, PARTS, compute=code["compute_loss"], **options), want)
        if objects and not options:
            names = ("LossInputs", "LossOutputs", "compute_loss", "CustomLoss")
            code = prime_code(*names, import_object={"my": loss_fn}.get)
            loss = code["CustomLoss"](SimpleNamespace(import_path="my", kwargs={}))
            assert_same(prime_step(loss, given, PARTS, compute=code["compute_loss"]), want)


def test_the_page_s_loss_is_the_default_of_prime_rl():
    helpers = ("_safe_mean", "_mismatch_kl_from_log_ratio", "_capped_importance_ratio")
    code, given = prime_code("LossInputs", "LossOutputs", *helpers, "IPOLoss"), problem()
    config = SimpleNamespace(eps=0.3, max_importance_ratio=1e4, adv_tau=1.0, score_centering=False)
    theirs, ours = code["IPOLoss"](config).loss, run("docs/integrations/prime_rl.md")["loss"]
    given.old[::2] -= 1.5
    moved = (given.logprobs.exp() - given.old.exp())[given.mask].abs() > 0.3
    assert moved.any() and not moved.all()
    for weights in (None, WEIGHTS):
        # r A and sg[r] A logp have the same gradient
        _, want = prime_step(theirs, given, PARTS, weights=weights)
        assert_same(prime_step(ours, given, PARTS, weights=weights)[1], want)


def ipo_with_centering(inputs, eps=0.3, cap=1e4):
    """prime-rl's ``ipo`` with ``score_centering``, after its main branch of November 2026."""
    keep = inputs.loss_mask & ((inputs.trainer_logprobs.exp() - inputs.inference_logprobs.exp()).abs() <= eps)
    ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()
    loss = -torch.where(keep, inputs.advantages * ratio * inputs.loss_weights, 0.0).sum()
    log_p, log_q = inputs.trainer_mask_logprobs, inputs.inference_mask_logprobs
    p, q = log_p.detach().exp(), log_q.exp()
    inside = log_q.isfinite() & ((p - q).abs() <= eps)
    centred = (torch.where(inside, torch.minimum(p, cap * q), 0.0) * log_p).sum(-1)
    return loss + torch.where(inputs.loss_mask, inputs.advantages * inputs.loss_weights * centred, 0.0).sum()


@pytest.mark.parametrize("published", [False, True])
def test_prime_rl_s_score_centering(published):
    """Over all ids of a sampling mask, for tokens whose own term IPO masks, too; times ``loss_weights``."""
    given, rng, K = problem(), generator(9), 5
    theirs = ipo_with_centering
    if published:
        helpers = ("_safe_mean", "_mismatch_kl_from_log_ratio", "_capped_importance_ratio")
        code = prime_code("LossInputs", "LossOutputs", *helpers, "IPOLoss", math=math)
        if not hasattr(code["IPOLoss"], "score_centering_loss"):
            pytest.skip("this prime-rl has no score centering")
        config = SimpleNamespace(eps=0.3, max_importance_ratio=1e4, adv_tau=1.0, score_centering=True)
        theirs = lambda inputs: code["IPOLoss"](config).loss(inputs).loss  # noqa: E731
    loss_fn = prime_rl.PolicyLoss(gk.PrimeIPO(eps=0.3, aggregation="token_mean"), score_centering=True)
    none = torch.arange(K) >= torch.randint(2, K + 1, (7, 1), generator=rng)
    for row in range(2):
        z, other = (torch.randn(7, K, generator=rng, dtype=torch.float64) * 2 for _ in range(2))
        q = other.masked_fill(none, -math.inf).log_softmax(-1)
        grads = []
        for each in (theirs, lambda inputs: loss_fn(inputs).loss):
            leaves = z.clone().requires_grad_(), given.logprobs[row].clone().requires_grad_()
            p = leaves[0].masked_fill(none, -math.inf).log_softmax(-1).masked_fill(none, 0.0)
            inputs = (leaves[1], given.old[row] - 0.8, None, given.token_advantages[row], given.mask[row])
            loss = each(LossInputs(*inputs, WEIGHTS[row], p, q))
            grads.append(torch.autograd.grad(loss, leaves))
        assert (grads[0][0] != 0).any()
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-14)
        alone, plain = loss_fn(LossInputs(*inputs, WEIGHTS[row])), prime_rl.PolicyLoss(loss_fn.objective)
        assert_same(alone.loss, plain(LossInputs(*inputs, WEIGHTS[row])).loss)
    with raises("GSPO can't be centred: its weight depends on the sequence"):
        prime_rl.PolicyLoss(GSPO_OVER_TOKENS, score_centering=True)
    with raises("score_centering: got True, but this prime-rl passes no log-probs"):
        loss_fn(SimpleNamespace(**dict(zip(LossInputs._fields[:6], (*inputs, None), strict=True))))


# ------------------------------------------------------ slime alone

TOKENS = {"advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.2}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
AS_SLIME = pytest.mark.parametrize(
    ("objective", "changes"),
    [
        (GSPO, {}),
        (GSPO, {"rollout_temperature": 0.7, "use_rollout_logprobs": True}),
        (GSPO, KL | {"kl_loss_type": "k3", "entropy_coef": 0.05}),
        (gk.GRPO(), TOKENS),
        (GRPO, TOKENS | KL | {"calculate_per_token_loss": True, "kl_loss_type": "k2"}),
    ],
)
"""Objectives, and slime's arguments for the same loss."""


def shared_rollout() -> Problem:
    """Return a problem in which sequences 0 and 2 share a rollout, so that four rollouts have tokens."""
    given = problem()
    given.rollout_tokens[[0, 2]] = given.rollout_tokens[[0, 2]].sum()
    return given


@AS_SLIME
def test_slime_s_arguments_and_rollouts_of_several_sequences(objective, changes):
    """A correction weighs the policy term alone."""
    given, by_token = shared_rollout(), objective.aggregation == "token_mean"
    shares = given.mask.sum(1).double() / given.rollout_tokens.clamp(min=1)
    weights = (torch.ones_like(shares) if by_token else shares).unsqueeze(1).expand(given.mask.shape)
    terms = {"normalizer": None if by_token else 4.0}
    if "use_kl_loss" in changes:
        terms |= {"kl_beta": 0.1 * weights, "kl_estimator": changes["kl_loss_type"]}
        terms["ref_logprobs"] = given.reference
    if "entropy_coef" in changes:
        terms["entropy_coef"] = 0.05 * weights
    old = given.rollout if "use_rollout_logprobs" in changes else given.old
    for correction in (None, RolloutCorrection(high=1.1), RolloutCorrection(level="sequence", high=1.1)):
        terms["rollout_weights"] = weights
        if correction is not None:
            corrections = correction.weights(old, given.rollout, given.mask)
            terms["rollout_weights"] = weights * corrections.view(6, -1)
        want = expected(replace(given, old=old), objective, **terms)
        loss_fn = slime.PolicyLoss(objective, correction=correction)
        for splits in (WHOLE, PARTS):
            assert_same(slime_step(loss_fn, given, splits, rollouts=4, **changes), want)


def slime_call(loss_fn, changes=None, rows=range(6), **arguments):
    """Return loss and metrics of the sequences ``rows``; ``arguments`` replace entries of the batch."""
    given = problem().part(rows)
    batch, logits = slime_batch(given, given.logprobs)
    reducer = sum_of_sample_mean(batch)
    return loss_fn(slime_arguments(**changes or {}), batch | arguments, logits, reducer)


def test_slime_s_calls():
    """Without old log-probs the loss is on-policy."""
    loss, metrics = slime_call(slime.PolicyLoss(), log_probs=None)
    assert loss.item() == pytest.approx(-sum(ADVANTAGES[:5])) and metrics["ppo_kl"] == 0
    with raises("correction: needs the batch's log_probs and rollout_log_probs"):
        slime_call(slime.PolicyLoss(correction=TIS), log_probs=None)
    with raises(r"logits: got \d+ rows, total_lengths have 180 on this rank"):
        slime_call(slime.PolicyLoss(), total_lengths=[30] * 6)
    with raises("response_lengths: got 9 of 9 tokens, expected a prompt of at least one"):
        slime_call(slime.PolicyLoss(), rows=[0], response_lengths=[9])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"allgather_cp": True}, "logits and log-probs of a rank then belong to different tokens"),
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
def test_slime_s_arguments_that_change_the_loss_are_refused_by_name(change, reason):
    with raises(f"{[*change][-1]}: .*{reason}"):
        slime_call(slime.PolicyLoss(), change)


def slime_loss(loss_fn=None):
    """Return slime's ``loss_function`` with all that it calls, for one process without Megatron."""
    mpu = SimpleNamespace(
        get_context_parallel_world_size=lambda: 1,
        get_context_parallel_group=lambda: None,
        get_tensor_model_parallel_group=lambda: None,
        get_data_parallel_world_size=lambda with_context_parallel: 1,
    )
    common = {"dist": torch.distributed, "mpu": mpu}
    helpers = peers.extract(
        peers.source("slime", "slime/utils/ppo_utils.py"), "calculate_log_probs_and_entropy",
        "compute_approx_kl", "compute_gspo_kl", "compute_policy_loss", **common,
    )  # fmt: skip
    reducers = peers.extract(
        peers.source("slime", "slime/backends/megatron_utils/cp_utils.py"), "get_sum_of_sample_mean",
        "all_gather_with_cp", **common,
    )  # fmt: skip
    return peers.extract(
        peers.source("slime", "slime/backends/megatron_utils/loss.py"), "loss_function",
        **{**helpers, **reducers}, load_function=lambda path: loss_fn,
    )["loss_function"]  # fmt: skip


@AS_SLIME
def test_equals_slime(objective, changes):
    """Everything after the forward is slime's own code, in fp32, except Megatron's sum."""
    given = shared_rollout()
    tensors = (getattr(given, each.name) for each in fields(given))
    given, results = Problem(*(each.float() if each.is_floating_point() else each for each in tensors)), []
    for loss_fn, loss_type in ((slime.PolicyLoss(objective), "custom_loss"), (None, "policy_loss")):
        args, values, theirs = slime_arguments(**changes | {"loss_type": loss_type}), 0.0, slime_loss(loss_fn)
        by_token = args.calculate_per_token_loss

        def loss_of(part, logprobs):
            nonlocal values, logged
            batch, logits = slime_batch(part, logprobs, args.rollout_temperature)  # noqa: B023
            loss, _, logged = theirs(args, batch, len(PARTS), 4, logits)  # noqa: B023
            values = values + logged["values"]
            # Megatron divides by the number of micro-batches, or at the end by all their tokens.
            return loss / (given.mask.sum(1).clamp(min=1).sum() if by_token else len(PARTS))  # noqa: B023

        logged: dict = {}
        numbers = add_up(given, PARTS, loss_of)
        values = values[1:] / (values[0] if by_token else 4)
        results.append((numbers, dict(zip(logged["keys"], values.tolist(), strict=True))))
    (got, metrics), (want, their_metrics) = results
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    for name in {*metrics} - ({"pg_clipfrac"} if not by_token else set()):
        assert metrics[name] == pytest.approx(their_metrics[name], rel=1e-5, abs=1e-6), name


def part_of_rank(batch, logits, rank, ranks):
    """Return a micro-batch as a rank among those that share tokens has it, and the rows that it has."""
    rows, parts, start = [], {name: [] for name in ("log_probs", "ref_log_probs", "rollout_log_probs")}, 0
    parts["advantages"] = []
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


@pytest.mark.parametrize("objective", [GSPO, gk.DAPO(), gk.GSPOToken()], ids=lambda each: type(each).__name__)
def test_slime_s_megatron_ranks_share_vocabulary_and_tokens(objective):
    """Two ranks share the vocabulary, and two such pairs the tokens: numbers are those of one process."""
    given, by_token = shared_rollout(), objective.outer_divisor()[0] == "tokens"
    changes = {"calculate_per_token_loss": by_token, "use_kl_loss": True, "kl_loss_coef": 0.1}
    batch, logits = slime_batch(given, given.logprobs)
    loss_fn = slime.PolicyLoss(objective, correction=TIS)
    reducer = sum_of_sample_mean(batch, by_token)
    whole = logits.clone().requires_grad_()
    loss, metrics = loss_fn(slime_arguments(**changes), batch, whole, reducer)
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
        got, reported = loss_fn(args, own, leaf, lambda values: values.sum())
        assert_same(got, loss)
        (mine,) = torch.autograd.grad(got, leaf)
        want = torch.where(rows.unsqueeze(1) < 0, 0.0, gradient[0, rows.clamp(min=0), tp : tp + 1])
        assert_same(mine[0], want)
        for name in ("loss", "pg_clipfrac"):  # slime adds these up
            value = torch.as_tensor(reported[name]).detach().double().clone()
            torch.distributed.all_reduce(value, group=context[tp])
            assert_same(value, torch.as_tensor(metrics[name]).double(), name)
        sequences = slime.PolicyLoss(objective, correction=RolloutCorrection(level="sequence", high=1.1))
        with raises("correction: got level='sequence', expected 'token' with context_parallel_size above 1"):
            sequences(args, own, leaf, reducer)

    in_processes(4, over_ranks)
