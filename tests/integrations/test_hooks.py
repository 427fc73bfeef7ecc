"""Loss hooks that take log-probs: AReaL 1.0.4, NeMo-RL 0.7.0, OpenRLHF 0.11.2, prime-rl 0.9.0 and after.

Each framework's way to add up micro-batches and ranks is written out here; where its own code is there (see
``peers``) the same numbers must come from that.
"""

import enum
import inspect
import math
import pickle
import re
import sys
import types
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.integrations import areal, nemo_rl, openrlhf, prime_rl
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.hooks import RolloutCorrection
from tests.cases import offsets
from tests.draws import shifted_seed
from tests.integrations import peers
from tests.integrations.hook_problem import GSPO, PARTS, WHOLE, expected, fitting, judge, problem
from tests.test_docs import run

GRPO, DUAL = gk.GRPO(aggregation="token_mean"), gk.GRPO(dual_clip=1.5)
GSPO_OVER_TOKENS = gk.GSPO(clip_low=0.1, clip_high=0.15, aggregation="token_mean")
TIS = RolloutCorrection(low=0.9, high=1.2)
MASKED, ICEPOP = (RolloutCorrection(mode=mode, low=0.9, high=1.2) for mode in ("mask", "icepop"))
SEQUENCE_MASK = RolloutCorrection(mode="sequence_mask", low=1.0, high=1.25)


class LossType(enum.Enum):
    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(enum.Enum):
    LOGIT = "logit"
    LOGPROB = "logprob"


@pytest.fixture(autouse=True)
def nemo_rl_interfaces(monkeypatch):
    """The two enumerations that the adapter takes from NeMo-RL."""
    parts = ["nemo_rl", "algorithms", "loss", "interfaces"]
    for count in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:count]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module.LossType, module.LossInputType = LossType, LossInputType


# ------------------------------------------------------ one step, as each framework adds it up


def areal_data(part, packed=True) -> dict:
    """What AReaL's engine passes: packed without padding (here full rows), or padded."""
    data = {
        "logprobs": part.rollout, "prox_logp": part.old, "advantages": part.token_advantages,
        "loss_mask": part.mask.to(part.old.dtype),
    }  # fmt: skip
    if packed:
        data = {name: value.flatten() for name, value in data.items()}
        data["cu_seqlens"] = offsets((part.mask.shape[1],) * part.mask.shape[0])
    return data


def tokens_of(data):
    """How AReaL's own actor weighs micro-batches."""
    return data["loss_mask"].count_nonzero()


def areal_step(loss_fn, given, dtype=torch.float32, splits=None, *, weight=None):
    """``train_batch``: every micro-batch weighs ``weight`` of the sum."""
    weight, packed = weight or loss_fn.weight, given.seed % 2 == 0
    parts = [(list(rows), given.part(rows, dtype)) for rows in splits or given.splits]
    weights = [weight(areal_data(part, packed)) for _, part in parts]
    gradient, total = torch.zeros_like(given.logprobs), 0.0
    for (rows, part), share in zip(parts, weights, strict=True):
        if share == 0:
            continue
        logprobs = part.logprobs.requires_grad_()
        entropy = torch.ones_like(logprobs)
        row = (logprobs.flatten(), entropy.flatten()) if packed else (logprobs, entropy)
        ranges = dict.fromkeys(("vocab_min_logits", "vocab_max_logits"), row[1].detach())
        loss = loss_fn(*row, areal_data(part, packed), **ranges) * share / sum(weights)
        loss.backward()
        total += loss.detach().double()
        gradient[rows] += logprobs.grad.double()
    return total, gradient


class BatchedData(dict):
    """As NeMo-RL's BatchedDataDict: slices of all tensors."""

    def slice(self, start, end):
        return BatchedData({name: value[start:end] for name, value in self.items()})


def nemo_data(part) -> BatchedData:
    """What NeMo-RL's loss reads: one position more than there are next tokens."""

    def pad(values):
        return torch.nn.functional.pad(values, (1, 0), value=0.25)

    # a sequence that is left out still has tokens
    tokens = part.mask | ~part.mask.any(1, keepdim=True)
    return BatchedData(
        token_mask=pad(tokens.to(part.old.dtype)),
        sample_mask=part.mask.any(1).to(part.old.dtype),
        advantages=pad(part.token_advantages),
        prev_logprobs=pad(part.old),
        generation_logprobs=pad(part.rollout),
        reference_policy_logprobs=pad(part.reference),
    )


def nemo_step(loss_fn, given, dtype=torch.float32, splits=None, *, metrics=None):
    """A global batch: sums over micro-batches and, in effect, over ranks."""
    gradient, total = torch.zeros_like(given.logprobs), 0.0
    totals = {
        "global_valid_seqs": given.mask.any(1).sum().to(dtype),
        "global_valid_toks": given.mask.sum().to(dtype),
    }
    for rows in splits or given.splits:
        part = given.part(rows, dtype)
        logprobs = part.logprobs.requires_grad_()
        loss, values = loss_fn(next_token_logprobs=logprobs, data=nemo_data(part), **totals)
        loss.backward()
        total += loss.detach().double()
        gradient[list(rows)] += logprobs.grad.double()
        for name, value in (values if metrics is not None else {}).items():
            metrics.setdefault(name, []).append(value)
    return total, gradient


def openrlhf_step(loss_fn, given, dtype=torch.float32, splits=None, *, info=None):
    """An optimizer step of OpenRLHF; in every second problem a rank has one micro-batch."""
    splits = splits or given.splits
    ranks = len(splits) if given.seed % 2 else 1
    accumulation = len(splits) // ranks
    info = info or {
        "dp_size": ranks,
        "batch_num_tokens": given.mask.sum().double() / accumulation,
        "global_batch_size": given.mask.any(1).sum().double() / accumulation,
    }
    # with one of these OpenRLHF asks the engine for log-probs
    corrects = getattr(loss_fn, "correction", None) is not None or hasattr(loss_fn, "is_correction_level")
    gradient, total = torch.zeros_like(given.logprobs), 0.0
    for rows in splits:
        part = given.part(rows, dtype)
        logprobs = part.logprobs.requires_grad_()
        rollout = part.rollout if corrects else None
        call = (logprobs, part.old, part.token_advantages, part.mask, rollout)
        scaled = loss_fn(*call, **info)[0] / len(splits)
        scaled.backward()
        total += scaled.detach().double()
        gradient[list(rows)] += logprobs.grad.double()
    return total, gradient


class LossInputs(NamedTuple):
    """The fields that prime-rl has published; those of the sampling mask came after 0.9.0."""

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = None
    trainer_mask_logprobs: torch.Tensor | None = None
    inference_mask_logprobs: torch.Tensor | None = None


def prime_step(
    loss_fn, given, dtype=torch.float32, splits=None, *, weights=None, reference=False, compute=None
):
    """Every sequence alone, divided by the global number of tokens; ranks are summed."""
    gradient, total, tokens = torch.zeros_like(given.logprobs), 0.0, int(given.mask.sum())
    for rows in splits or given.splits:
        part, rows = given.part(rows, dtype), list(rows)
        logprobs = part.logprobs.requires_grad_()
        scale = None if weights is None else [*weights[rows].to(dtype)]
        references = [*part.reference] if reference else None
        if compute is None:
            loss = logprobs.new_zeros(())
            for i in range(len(rows)):
                inputs = LossInputs(
                    logprobs[i], part.old[i], references and references[i],
                    part.token_advantages[i], part.mask[i], scale and scale[i],
                )  # fmt: skip
                loss = loss + loss_fn(inputs).loss / tokens
        else:
            loss, _ = compute(
                [*logprobs], [*part.old], references, [*part.token_advantages], [*part.mask], scale,
                None, None, loss_fn, tokens, 1, 1,
            )  # fmt: skip
        loss.backward()
        total += loss.detach().double()
        gradient[rows] += logprobs.grad.double()
    return total, gradient


# ------------------------------------------------------ what holds for all of them


@dataclass(frozen=True)
class Framework:
    adapter: types.ModuleType
    step: Callable
    call: str
    """The arguments that it passes to a loss."""
    installed: str
    """A version that is served, and one that isn't."""
    other: str
    objectives: tuple
    aggregations: tuple = ()


FRAMEWORKS = {
    "areal": Framework(
        areal, areal_step, "logprobs entropy input_data vocab_min_logits vocab_max_logits", "1.0.4", "0.9.0",
        (GSPO, DUAL, GRPO, gk.GRPO(aggregation="sequence_mean_token_sum")),
    ),
    "nemo-rl": Framework(
        nemo_rl, nemo_step, "next_token_logprobs data global_valid_seqs global_valid_toks", "0.7.0", "0.8.0",
        (GSPO, DUAL, GRPO),
    ),
    "openrlhf": Framework(
        openrlhf, openrlhf_step, "log_probs old_log_probs advantages action_mask rollout_log_probs dp_size "
        "batch_num_tokens global_batch_size", "0.11.2", "0.10.4",
        (GSPO, GSPO_OVER_TOKENS, DUAL, GRPO, gk.GRPO(aggregation="sequence_mean_token_sum"),
         gk.GRPO(aggregation="constant", aggregation_constant=16.0)),
    ),
    # 0.9.1.dev is the main branch after 0.9.0, with another default and loss objects
    "prime-rl": Framework(
        prime_rl, prime_step, "inputs", "0.9.1.dev40", "0.10.0",
        (GSPO_OVER_TOKENS, gk.GRPO(aggregation="token_mean", dual_clip=1.5)), ("token_mean",),
    ),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", FRAMEWORKS)


@EACH
def test_the_signature_is_the_published_one(name):
    one = FRAMEWORKS[name]
    loss_fn = one.adapter.PolicyLoss()
    function = loss_fn.forward if name == "openrlhf" else loss_fn
    assert [*inspect.signature(function).parameters] == one.call.split()


@pytest.mark.parametrize(
    ("name", "objective"), [(name, each) for name, one in FRAMEWORKS.items() for each in one.objectives]
)
def test_any_split_over_micro_batches_and_ranks_adds_up_to_the_step(name, objective):
    one = FRAMEWORKS[name]
    loss_fn = one.adapter.PolicyLoss(objective)
    judge(lambda given: one.step(loss_fn, given), lambda given, dtype: expected(given, objective, dtype))


@pytest.mark.parametrize("objective", [GSPO, GRPO])
@pytest.mark.parametrize("name", ["areal", "nemo-rl", "openrlhf"])
def test_the_correction_weighs_the_policy_term(name, objective):
    one = FRAMEWORKS[name]
    loss_fn = one.adapter.PolicyLoss(objective, correction=RolloutCorrection(high=1.1))
    judge(
        lambda given: one.step(loss_fn, given),
        lambda given, dtype: expected(given, objective, dtype, rollout_weights=given.weights(1.1)),
    )


@pytest.mark.parametrize(
    "options",
    [
        {"high": 1.1},
        {"mode": "icepop", "low": 0.9, "high": 1.2},
        {"level": "sequence", "reduce": "sum", "low": 0.9, "high": 1.5},
        {"mode": "k2", "level": "sequence", "reduce": "max", "high": 0.05},
    ],
)
def test_a_correction_is_rollout_weights_with_its_options(options):
    given = problem()
    weights = RolloutCorrection(**options).weights(given.old, given.rollout, given.mask)
    expected = gk.rollout_weights(given.old, given.rollout, loss_mask=given.mask, **options)
    assert torch.equal(weights, expected)


@EACH
def test_every_fitting_objective_splits(name):
    one, given = FRAMEWORKS[name], problem()
    objectives = fitting(*one.aggregations)
    assert len(objectives) >= (8 if one.aggregations else 20)
    for objective in objectives:
        loss_fn = one.adapter.PolicyLoss(objective)
        parts, whole = (one.step(loss_fn, given, torch.float64, each) for each in (PARTS, WHOLE))
        alone = gk.policy_loss(
            given.logprobs, given.old, given.advantages, loss_mask=given.mask, objective=objective
        ).loss
        # AReaL's weights are fp32; parts of a loss cancel, those of a gradient lie side by side
        near = {"rtol": 1e-6, "atol": 1e-6} if name == "areal" else {"rtol": 1e-12, "atol": 1e-14}
        torch.testing.assert_close(whole[0], alone, **near, msg=str(objective))
        for got, want in zip(parts, whole, strict=True):
            torch.testing.assert_close(got, want, **near, msg=str(objective))


@EACH
def test_another_version_is_refused(name, monkeypatch):
    one, installed = FRAMEWORKS[name], []
    for module in ("hooks", "errors"):
        monkeypatch.setattr(f"gspo_kernels.integrations.{module}.version", lambda name: installed[0])
    installed[:] = [one.installed]
    one.adapter.PolicyLoss()
    installed[:] = [one.other]
    served = re.escape(one.adapter.SUPPORTED)
    with pytest.raises(
        IntegrationError, match=f"{name}: version {one.other} is installed, .*needs {name}{served}"
    ):
        one.adapter.PolicyLoss()


@pytest.mark.parametrize(
    ("name", "objective", "reason"),
    [
        ("areal", gk.KLCov(), "KLCov looks at a whole batch, but AReaL"),
        ("nemo-rl", gk.DPO(), "DPO needs ref_logprobs and group_ids, which NeMo-RL"),
        ("openrlhf", gk.REBEL(), "needs group_ids, which OpenRLHF"),
        ("openrlhf", gk.EGSW(), "needs entropy and group_ids"),
        ("openrlhf", gk.ClipCov(), "looks at a whole batch"),
        ("openrlhf", gk.TLGRPO(), "needs turn_ids"),
        ("openrlhf", gk.GRPO(aggregation="sum"), "divides by nothing"),
        ("prime-rl", GSPO, "'sequence_mean' divides by the number of sequences, but prime-rl divides by the"),
        ("prime-rl", gk.DrGRPO(aggregation_constant=8.0), "aggregation='constant' divides"),
        ("prime-rl", gk.AGRO(), "needs ref_logprobs and group_ids"),
    ],
)
def test_an_objective_that_does_not_fit_is_refused_at_construction(name, objective, reason):
    with pytest.raises(IntegrationError, match=reason):
        FRAMEWORKS[name].adapter.PolicyLoss(objective)


# The call of each framework's own loss that is ours: (objective, options of ours, options of its own).
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
        peers.source("areal", "areal/utils/functional/functional.py"), "ppo_actor_loss_fn",
        "_compute_sequence_level_ratio_and_advantages", "apply_rejection_sampling", "RejectionSamplingResult",
        "_check_bounds", RejectionSamplingConfig=peers.Anything, dataclass=dataclass,
    )  # fmt: skip
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


class BaseModel:
    """Enough of pydantic's for a configuration with defaults."""

    def __init_subclass__(cls, **options):
        pass

    def __init__(self, **options):
        vars(self).update(options)


def nemo_loss(options):
    utils = peers.extract(
        peers.source("nemo_rl", "nemo_rl/algorithms/utils.py"), "masked_mean", "calculate_kl"
    )
    names = peers.extract(
        peers.source("nemo_rl", "nemo_rl/algorithms/loss/loss_functions.py"), "ClippedPGLossConfig",
        "ClippedPGLossFn", Tensor=torch.Tensor, LossFunction=object, LossType=LossType,
        LossInputType=LossInputType, BatchedDataDict=peers.Anything, ClippedPGLossDataDict=None,
        BaseModel=BaseModel, masked_mean=utils["masked_mean"], calculate_kl=utils["calculate_kl"],
    )  # fmt: skip
    bounds = {"truncated_importance_sampling_ratio": 1.2, "truncated_importance_sampling_ratio_min": 0.9}
    if "truncated_importance_sampling_type" in options:
        options = {"use_importance_sampling_correction": True, **bounds, **options}
    options = {"reference_policy_kl_penalty": 0.0, **options}
    return names["ClippedPGLossFn"](names["ClippedPGLossConfig"](**options))


def openrlhf_loss(options):
    utils = peers.extract(peers.source("openrlhf", "openrlhf/models/utils.py"), "masked_mean")
    names = peers.extract(
        peers.source("openrlhf", "openrlhf/models/loss.py"), "aggregate_loss", "PolicyLoss",
        nn=torch.nn, masked_mean=utils["masked_mean"],
    )  # fmt: skip
    if "is_correction_mode" in options:
        options = {"is_correction_level": "token", "is_correction_threshold": [0.9, 1.2], **options}
    return names["PolicyLoss"](**options)


THEIRS = {"areal": areal_loss, "nemo-rl": nemo_loss, "openrlhf": openrlhf_loss}


@pytest.mark.parametrize(
    ("name", "objective", "options", "theirs"), [(name, *each) for name, all in SAME.items() for each in all]
)
def test_equals_the_framework(name, objective, options, theirs):
    one = FRAMEWORKS[name]
    ours, theirs = one.adapter.PolicyLoss(objective, **options), THEIRS[name](dict(theirs))

    def both(given):
        """Options of the steps of each."""
        if name == "areal":
            given.seed = 0  # its sequence-level ratio takes packed tokens
            return {}, {"weight": tokens_of}
        if name == "openrlhf":
            path = peers.source("openrlhf", "openrlhf/utils/loss_utils.py")
            norm = peers.extract(path, "_optimizer_step_loss_norm", dist=torch.distributed)
            masks = [given.mask[list(rows)] for rows in PARTS]
            return ({"info": norm["_optimizer_step_loss_norm"](masks, None, 1, len(PARTS))},) * 2
        return {}, {}

    judge(
        lambda given: one.step(ours, given, splits=PARTS, **both(given)[0]),
        lambda given, dtype: one.step(theirs, given, dtype, PARTS, **both(given)[1]),
    )
    if name == "nemo-rl":
        assert inspect.signature(theirs).parameters.keys() == inspect.signature(ours).parameters.keys()
        assert theirs.loss_type is ours.loss_type
        mine, its = {}, {}
        nemo_step(ours, problem(), metrics=mine)
        nemo_step(theirs, problem(), metrics=its)
        names = {"loss", "probs_ratio_min", "probs_ratio_max", "num_valid_samples"}
        for metric in names | (set() if objective.level == "sequence" else {"probs_ratio"}):
            assert mine[metric] == pytest.approx(its[metric], rel=1e-5), metric
    if name == "openrlhf":
        signatures = (inspect.signature(each.forward).parameters for each in (theirs, ours))
        assert [*next(signatures)] == [*next(signatures)]
        # a sequence without a token has a ratio of NaN there, and counts as filtered
        given = problem()
        given = given.part(given.mask.any(1).nonzero().flatten().tolist())
        rollout = given.rollout if options else None
        call = (given.logprobs, given.old, given.token_advantages, given.mask.double(), rollout)
        for got, want in zip(ours(*call)[1:], theirs(*call)[1:], strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(got.double(), want.double(), rtol=1e-6, atol=1e-7)


# ------------------------------------------------------ AReaL alone


def test_areal_counting_tokens_instead_of_sequences_would_be_wrong():
    # in one batch the parts may count as many tokens as their sequences would
    loss_fn, errors = areal.PolicyLoss(GSPO), []
    for given in map(problem, range(8)):
        wrong = areal_step(loss_fn, given, splits=PARTS, weight=tokens_of)[0]
        errors.append(float((wrong - expected(given, GSPO)[0]).abs()))
    assert max(errors) > 1e-3


def test_areal_s_advantages_and_old_log_probs():
    """A sequence's advantage is its tokens' mean; without proximal log-probs the rollout's are old."""
    given = problem()
    data = areal_data(given)
    data["advantages"] = data["advantages"] + torch.linspace(-1, 1, 42).double()
    call = (given.logprobs.flatten(), given.logprobs.flatten())
    varying = torch.where(given.mask, data["advantages"].view(6, 7), 0.0)
    given.advantages = varying.sum(1) / given.mask.sum(1).clamp(min=1)
    torch.testing.assert_close(areal.PolicyLoss(GSPO)(*call, data), expected(given, GSPO)[0])
    given.old = given.rollout
    loss = areal.PolicyLoss(GSPO)(*call, data | {"prox_logp": None})
    torch.testing.assert_close(loss, expected(given, GSPO)[0])


def test_areal_s_metrics_are_logged_as_numbers():
    seen = []
    areal_step(areal.PolicyLoss(GSPO, log=seen.append), problem(), splits=WHOLE)
    (metrics,) = seen
    names = {"ratio/min", "clip_fraction/tokens", "entropy", "vocab_min_logits", "vocab_max_logits"}
    assert names <= metrics.keys()
    assert all(type(value) is float for value in metrics.values())


def test_areal_s_wrong_setups():
    given = problem()
    data, call = areal_data(given), (given.logprobs.flatten(), given.logprobs.flatten())
    with pytest.raises(TypeError, match="log: got str"):
        areal.PolicyLoss(log="stats")
    with pytest.raises(ValueError, match="teacher_logp: distillation is not part"):
        areal.PolicyLoss()(*call, data | {"teacher_logp": data["logprobs"]})
    with pytest.raises(ValueError, match="prox_logp: got None, but the correction needs it"):
        areal.PolicyLoss(correction=TIS)(*call, data | {"prox_logp": None})


# ------------------------------------------------------ NeMo-RL alone


def test_nemo_rl_s_loss_says_what_it_takes_and_can_be_sent():
    loss_fn = nemo_rl.PolicyLoss(GSPO)
    assert (loss_fn.input_type, loss_fn.loss_type) == (LossInputType.LOGPROB, LossType.SEQUENCE_LEVEL)
    assert nemo_rl.PolicyLoss(gk.DAPO()).loss_type is LossType.TOKEN_LEVEL
    assert pickle.loads(pickle.dumps(loss_fn)).objective == GSPO  # as Ray does


def test_nemo_rl_s_kl():
    """In any split; with NeMo-RL's value, but without its score-function gradient.

    NeMo-RL multiplies the KL by exp(logp - sg(logp)), which is 1 and adds kl * dlogp to the gradient.
    """
    loss_fn = nemo_rl.PolicyLoss(GRPO, kl_beta=0.1)
    judge(
        lambda given: nemo_step(loss_fn, given),
        lambda given, dtype: expected(given, GRPO, dtype, ref_logprobs=given.reference, kl_beta=0.1),
    )
    with pytest.raises(ValueError, match="kl_estimator: got 'k4'"):
        nemo_rl.PolicyLoss(GSPO, kl_estimator="k4")
    given = problem()
    theirs = nemo_step(nemo_loss({"reference_policy_kl_penalty": 0.1}), given, torch.float64)
    ours = nemo_step(loss_fn, given, torch.float64)
    torch.testing.assert_close(ours[0], theirs[0])
    distance = given.logprobs - given.reference
    kl = torch.where(given.mask, torch.exp(-distance) + distance - 1, 0.0)
    torch.testing.assert_close(theirs[1] - ours[1], 0.1 * kl / given.mask.sum())


def test_nemo_rl_s_metrics_add_up():
    given = problem()
    for objective in fitting():
        whole, parts = {}, {}
        for metrics, splits in ((whole, WHOLE), (parts, PARTS)):
            nemo_step(nemo_rl.PolicyLoss(objective), given, torch.float64, splits, metrics=metrics)
        for name, (value,) in whole.items():
            add = {"probs_ratio_min": min, "probs_ratio_max": max}.get(name, sum)
            assert add(parts[name]) == pytest.approx(value, rel=1e-6), (objective, name)
        assert whole["num_valid_samples"] == [5]
    empty = {}
    nemo_step(nemo_rl.PolicyLoss(GSPO), given, splits=((5,),), metrics=empty)
    assert empty["probs_ratio_min"] == [math.inf] and empty["probs_ratio_max"] == [-math.inf]


def test_nemo_rl_s_placeholders_are_refused():
    given = problem()
    data, totals = nemo_data(given), (torch.tensor(5), given.mask.sum())
    zeros = torch.zeros_like(data["prev_logprobs"])

    def call(name, **options):
        loss_fn = nemo_rl.PolicyLoss(GSPO, **options)
        return loss_fn(given.logprobs, BatchedData(data | {name: zeros}), *totals)

    with pytest.raises(ValueError, match=r"prev_logprobs: all zeros, .* give on_policy=True"):
        call("prev_logprobs")
    loss, metrics = call("prev_logprobs", on_policy=True)
    assert metrics["probs_ratio_min"] == metrics["probs_ratio_max"] == 1.0
    torch.testing.assert_close(loss, -given.advantages[:5].mean())
    with pytest.raises(ValueError, match="reference_policy_logprobs: all zeros"):
        call("reference_policy_logprobs", kl_beta=0.1)
    with pytest.raises(ValueError, match="kl_beta: under top-k or top-p"):
        call("curr_logprobs_unfiltered", kl_beta=0.1)


def test_a_missing_nemo_rl_is_one_clear_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "nemo_rl.algorithms.loss.interfaces", None)
    said = r"^nemo-rl: .* this adapter needs NeMo-RL >=0.6,<0.8, installed from"
    with pytest.raises(IntegrationError, match=said):
        nemo_rl.PolicyLoss()


def test_inside_nemo_rl_s_packing_wrapper():
    """One sequence at a time, as its workers call the loss with sequence packing."""
    wrapper = peers.extract(
        peers.source("nemo_rl", "nemo_rl/algorithms/loss/wrapper.py"), "SequencePackingLossWrapper",
        math=math, Tensor=torch.Tensor, LossFunction=object, BatchedDataDict=peers.Anything,
    )["SequencePackingLossWrapper"]  # fmt: skip
    given, ours, whole = problem(), nemo_rl.PolicyLoss(GSPO), {}
    want = nemo_step(ours, given, torch.float64, WHOLE, metrics=whole)
    lengths = [int(row.nonzero().max()) + 2 if row.any() else 2 for row in given.mask]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    rows = zip(given.logprobs, lengths, strict=True)
    packed = torch.cat([torch.cat([row[: n - 1], row.new_zeros(1)]) for row, n in rows]).requires_grad_()

    def prepare(*, logits, data, **_):
        return {"next_token_logprobs": logits[:, :-1]}, data

    loss, metrics = wrapper(ours, prepare, starts)(
        packed.unsqueeze(0), nemo_data(given), torch.tensor(5.0), given.mask.sum()
    )
    loss.backward()
    torch.testing.assert_close(loss.detach(), want[0])
    for row, start, length in zip(want[1], starts, lengths, strict=False):
        torch.testing.assert_close(packed.grad[start : start + length - 1], row[: length - 1])
    for name, (value,) in whole.items():
        assert metrics[name] == pytest.approx(value), name


# ------------------------------------------------------ OpenRLHF alone


def test_openrlhf_s_metrics():
    clipped = []
    for given in map(problem, range(8)):  # a batch may have no sequence that is clipped, or all
        call = (given.logprobs, given.old, given.token_advantages, given.mask)
        loss, clip_ratio, ppo_kl, vllm_kl, is_filter_ratio = openrlhf.PolicyLoss(GSPO)(*call)
        assert loss.ndim == clip_ratio.ndim == ppo_kl.ndim == 0
        assert vllm_kl is None and is_filter_ratio is None
        clipped.append(float(clip_ratio))
    assert any(0 < share < 1 for share in clipped)
    corrected = openrlhf.PolicyLoss(GSPO, correction=RolloutCorrection(high=1.1))
    *_, vllm_kl, bounded = corrected(*call, rollout_log_probs=given.rollout)
    torch.testing.assert_close(vllm_kl, (given.rollout - given.old)[given.mask].mean())
    assert bounded == ((given.old - given.rollout).exp() > 1.1)[given.mask].float().mean()


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "icepop", "low": 0.9, "high": 1.2},
        {"mode": "sequence_mask", "low": 0.9, "high": 1.2},
        {"mode": "k3", "high": 0.02},
        {"mode": "k2", "level": "sequence", "reduce": "max", "high": 0.02},
        {"mode": "k1", "level": "sequence", "low": -0.2, "high": 0.2},
        {"level": "sequence", "low": 0.9, "high": 1.2},
        {"low": 0.9, "high": 1.2},
    ],
)
def test_openrlhf_s_share_of_what_is_bounded_has_the_unit_of_the_correction(options):
    """Two of six sequences are far off, with all of their tokens: a third of the sequences."""
    given = problem()
    far = torch.tensor([0.3, -0.3, 0.05, -0.05, 0.1, 0.0]).unsqueeze(1)
    rollout = given.old - far - 0.02 * (torch.arange(given.mask.shape[1]) % 2)
    *_, share = openrlhf.PolicyLoss(GSPO, correction=RolloutCorrection(**options))(
        given.logprobs, given.old, given.token_advantages, given.mask, rollout_log_probs=rollout
    )
    tokens = options.get("level") is None and options.get("mode") != "sequence_mask"
    assert given.mask[:2].any(1).all()
    expected = given.mask[:2].sum() / given.mask.sum() if tokens else torch.tensor(2 / 6)
    torch.testing.assert_close(share, expected)


def test_openrlhf_s_calls():
    """Without totals a micro-batch stands alone; masked advantages may be anything."""
    given = problem()
    call = (given.logprobs, given.old, given.token_advantages, given.mask)
    alone = openrlhf.PolicyLoss(GSPO)(*call, dp_size=4)[0]
    torch.testing.assert_close(alone, expected(given, GSPO)[0])
    nan = given.token_advantages.masked_fill(~given.mask, math.nan)
    assert openrlhf.PolicyLoss(GSPO)(given.logprobs, given.old, nan, given.mask)[0] == alone
    with pytest.raises(TypeError, match="instance such as GSPO"):
        openrlhf.PolicyLoss(gk.GSPO)
    with pytest.raises(TypeError, match="correction: got float"):
        openrlhf.PolicyLoss(correction=0.5)
    with pytest.raises(ValueError, match="needs at least one bound"):
        RolloutCorrection()
    with pytest.raises(ValueError, match=r"rollout_log_probs: .* made with a correction; set both or none"):
        openrlhf.PolicyLoss(GSPO, correction=TIS)(*call)
    with pytest.raises(ValueError, match=r"rollout_log_probs: .* without a correction; set both or none"):
        openrlhf.PolicyLoss(GSPO)(*call, given.rollout)
    varying = given.token_advantages + torch.arange(7)
    with pytest.raises(ValueError, match="advantages: differ within a sequence, but GSPO"):
        openrlhf.PolicyLoss(GSPO)(given.logprobs, given.old, varying, given.mask)
    openrlhf.PolicyLoss(gk.GSPOToken())(given.logprobs, given.old, varying, given.mask)


# ------------------------------------------------------ prime-rl alone


def test_prime_rl_s_weights_scale_every_token_of_the_loss_and_of_the_kl():
    rng = torch.Generator().manual_seed(shifted_seed(3))
    weights = 0.5 + torch.rand(6, 7, generator=rng, dtype=torch.float64)
    terms = {"rollout_weights": weights, "kl_beta": 0.1 * weights}
    for objective in (GSPO_OVER_TOKENS, GRPO):
        loss_fn = prime_rl.PolicyLoss(objective, kl_beta=0.1)
        judge(
            lambda given, loss_fn=loss_fn: prime_step(loss_fn, given, weights=weights, reference=True),
            lambda given, dtype, objective=objective: expected(
                given, objective, dtype, ref_logprobs=given.reference, **terms
            ),
        )


def test_prime_rl_s_sequences():
    """A loss object has ``loss`` and is not called; a sequence without a token still goes backward."""
    given, loss_fn = problem(), prime_rl.PolicyLoss(GSPO_OVER_TOKENS)

    def part(i, logprobs):
        return LossInputs(logprobs, given.old[i], None, given.token_advantages[i], given.mask[i])

    first = part(0, given.logprobs[0])
    assert torch.equal(loss_fn.loss(first).loss, loss_fn(first).loss)
    loss, metrics = loss_fn(part(5, empty := given.logprobs[5].requires_grad_()))
    loss.backward()
    assert loss == 0 and (empty.grad == 0).all()
    assert all(each.ndim == 0 and not each.requires_grad for each in metrics.values())
    with pytest.raises(ValueError, match="ref_logprobs: got None, but kl_beta asks"):
        prime_rl.PolicyLoss(kl_beta=0.1)(first)


def prime_file():
    return peers.source("prime_rl", "prime_rl/trainer/rl/loss.py")


def prime_code(*names, **known):
    """Definitions of prime-rl's own file of losses."""
    unknown = ("Float", "Bool", "Int", "Loss", "LossFn", "IPOLossConfig", "CustomLossConfig")
    unknown = dict.fromkeys(unknown, peers.Anything)
    dataclasses = {"Tensor": torch.Tensor, "dataclass": dataclass, "field": field}
    return peers.extract(prime_file(), *names, **dataclasses, **unknown, **known)


def test_inside_prime_rl_s_compute_loss():
    """As a function, and where its losses are objects as its ``CustomLoss``."""
    objects = "class IPOLoss:" in prime_file().read_text()
    compute = prime_code("LossInputs", "compute_loss")
    published = [each.name for each in fields(compute["LossInputs"])]
    assert published == [*LossInputs._fields][: 8 if objects else 6]
    weights = torch.linspace(0.5, 1.5, 42, dtype=torch.float64).view(6, 7)
    for options in ({}, {"reference": True}, {"weights": weights}, {"weights": weights, "reference": True}):
        loss_fn = prime_rl.PolicyLoss(GSPO_OVER_TOKENS, kl_beta=0.1 if "reference" in options else 0.0)
        want = prime_step(loss_fn, problem(), torch.float64, PARTS, **options)
        options["compute"] = compute["compute_loss"]
        torch.testing.assert_close(prime_step(loss_fn, problem(), torch.float64, PARTS, **options), want)
        if objects and options.keys() == {"compute"}:
            custom = prime_code(
                "LossInputs", "LossOutputs", "compute_loss", "CustomLoss", import_object={"my": loss_fn}.get
            )
            loss = custom["CustomLoss"](SimpleNamespace(import_path="my", kwargs={}))
            got = prime_step(loss, problem(), torch.float64, PARTS, compute=custom["compute_loss"])
            torch.testing.assert_close(got, want)


def ipo(inputs):
    """Its gradient's source: the ratio of tokens whose probability moved by at most 0.3, at most 1e4."""
    logp, old = inputs.trainer_logprobs, inputs.inference_logprobs
    kept = inputs.loss_mask & ((logp.exp() - old.exp()).abs() <= 0.3)
    ratio = (logp - old).exp().clamp(max=1e4).detach()
    weights = 1.0 if inputs.loss_weights is None else inputs.loss_weights
    return -torch.where(kept, weights * inputs.advantages * ratio * logp, 0.0).sum()


@dataclass
class Inputs:
    """As prime-rl's own, which is a dataclass."""

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = None


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("theirs", [False, True])
def test_prime_rl_s_default_from_the_parts_of_the_page(weighted, theirs):
    """The same gradients as IPO's formula, and as prime-rl's own loss."""
    page, reference, inputs_type = run("docs/integrations/prime_rl.md"), ipo, Inputs
    if theirs:
        if "class IPOLoss:" not in prime_file().read_text():
            pytest.skip("this prime-rl has another default")
        helpers = ("_safe_mean", "_mismatch_kl_from_log_ratio", "_capped_importance_ratio")
        own = prime_code("LossInputs", "LossOutputs", *helpers, "IPOLoss")
        config = SimpleNamespace(eps=0.3, max_importance_ratio=1e4, adv_tau=1.0, score_centering=False)
        inputs_type, loss = own["LossInputs"], own["IPOLoss"](config)

        def reference(inputs):
            return loss.loss(inputs).loss

    rng = torch.Generator().manual_seed(shifted_seed(8))
    logprobs = -3 * torch.rand(64, generator=rng, dtype=torch.float64)
    inference = (logprobs + 0.7 * torch.randn(64, generator=rng, dtype=torch.float64)).clamp(max=-1e-3)
    mask = torch.rand(64, generator=rng) > 0.2
    inference[:2] = torch.tensor([-14.0, -1e-3], dtype=torch.float64)
    logprobs[:2] = torch.tensor([-1.5, -12.0], dtype=torch.float64)
    mask[:2] = True
    moved = (logprobs.exp() - inference.exp()).abs()
    assert (moved[mask] > 0.3).any() and ((logprobs - inference)[mask & (moved <= 0.3)] > 9.3).any()
    weights = 0.5 + torch.rand(64, generator=rng, dtype=torch.float64) if weighted else None
    for advantage in (1.0, -0.5):
        gradients = []
        for loss_fn in (reference, lambda inputs: page["loss"](inputs).loss):
            leaf = logprobs.clone().requires_grad_()
            advantages = torch.full_like(leaf, advantage)
            inputs = inputs_type(leaf, inference, None, advantages, mask, weights)
            gradients.append(torch.autograd.grad(loss_fn(inputs), leaf)[0])
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-10, atol=1e-14)
