"""NeMo-RL's hook as published in 0.7.0 (git tag v0.7.0, 81aa43d), and its own loss where that is there."""

import enum
import inspect
import math
import pickle
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.nemo_rl import PolicyLoss, RolloutCorrection
from tests.integrations import hook_problem, peers
from tests.integrations.hook_problem import GSPO, SPLITS, assert_close, expected, expected32, problem


class LossType(enum.Enum):
    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(enum.Enum):
    LOGIT = "logit"
    LOGPROB = "logprob"


@pytest.fixture
def nemo_rl(monkeypatch):
    """The two enumerations that the adapter takes from NeMo-RL."""
    parts = ["nemo_rl", "algorithms", "loss", "interfaces"]
    for count in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:count]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module.LossType, module.LossInputType = LossType, LossInputType


class Data(dict):
    """As NeMo-RL's BatchedDataDict: slices of all tensors."""

    def slice(self, start, end):
        return Data({name: value[start:end] for name, value in self.items()})


def data_of(part) -> Data:
    """What the loss reads: one position more than there are next tokens."""

    def pad(values):
        return torch.nn.functional.pad(values, (1, 0), value=0.25)

    # a sequence that is left out still has tokens
    tokens = part.mask | ~part.mask.any(1, keepdim=True)
    return Data(
        token_mask=pad(tokens.to(part.old.dtype)),
        sample_mask=part.mask.any(1).to(part.old.dtype),
        advantages=pad(part.token_advantages),
        prev_logprobs=pad(part.old),
        generation_logprobs=pad(part.rollout),
        reference_policy_logprobs=pad(part.reference),
    )


def step(loss_fn, given, splits=SPLITS[1], dtype=torch.float32, *, metrics=None):
    """Loss and gradient of a global batch: NeMo-RL sums over micro-batches and, in effect, over ranks."""
    gradient, total = torch.zeros_like(given.logprobs), 0.0
    totals = {
        "global_valid_seqs": given.mask.any(1).sum().to(dtype),
        "global_valid_toks": given.mask.sum().to(dtype),
    }
    for rows in splits:
        part = given.part(rows, dtype)
        logprobs = part.logprobs.requires_grad_()
        loss, values = loss_fn(next_token_logprobs=logprobs, data=data_of(part), **totals)
        loss.backward()
        total += loss.detach().double()
        gradient[list(rows)] += logprobs.grad.double()
        for name, value in (values if metrics is not None else {}).items():
            metrics.setdefault(name, []).append(value)
    return total, gradient


def test_the_published_signature(nemo_rl):
    loss_fn = PolicyLoss(GSPO)
    assert [*inspect.signature(loss_fn).parameters] == [
        "next_token_logprobs", "data", "global_valid_seqs", "global_valid_toks",
    ]  # fmt: skip
    assert loss_fn.input_type is LossInputType.LOGPROB
    assert loss_fn.loss_type is LossType.SEQUENCE_LEVEL
    assert PolicyLoss(gk.DAPO()).loss_type is LossType.TOKEN_LEVEL
    sent = pickle.loads(pickle.dumps(loss_fn))  # as Ray does
    assert sent.objective == GSPO


OBJECTIVES = (GSPO, gk.GRPO(dual_clip=1.5), gk.GRPO(aggregation="token_mean"))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("splits", SPLITS)
def test_any_split_over_micro_batches_and_ranks_adds_up(nemo_rl, objective, splits):
    assert_close(
        lambda given: step(PolicyLoss(objective, kl_beta=0.1), given, splits),
        lambda given: expected(given, objective, ref_logprobs=given.reference, kl_beta=0.1),
        lambda given: expected32(given, objective, ref_logprobs=given.reference.float(), kl_beta=0.1),
    )


def test_the_correction_weighs_the_policy_term(nemo_rl):
    loss_fn = PolicyLoss(GSPO, correction=RolloutCorrection(high=1.1))
    assert_close(
        lambda given: step(loss_fn, given),
        lambda given: expected(given, GSPO, rollout_weights=given.weights(1.1)),
        lambda given: expected32(given, GSPO, rollout_weights=given.weights(1.1)),
    )


def test_loss_and_metrics_of_every_fitting_objective_add_up(nemo_rl):
    given = problem()
    for objective in hook_problem.fitting():
        ours, whole, parts = PolicyLoss(objective), {}, {}
        want = step(ours, given, SPLITS[0], torch.float64, metrics=whole)
        got = step(ours, given, SPLITS[1], torch.float64, metrics=parts)
        for left, right in zip(got, want, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-14, msg=str(objective))
        for name, (value,) in whole.items():
            add = {"probs_ratio_min": min, "probs_ratio_max": max}.get(name, sum)
            assert add(parts[name]) == pytest.approx(value, rel=1e-6), (objective, name)
        assert whole["num_valid_samples"] == [5]


def test_a_batch_without_tokens_is_left_out_of_the_range_of_ratios(nemo_rl):
    metrics = {}
    step(PolicyLoss(GSPO), problem(), ((5,),), metrics=metrics)
    assert metrics["probs_ratio_min"] == [float("inf")]
    assert metrics["probs_ratio_max"] == [-float("inf")]


def test_placeholders_are_refused(nemo_rl):
    given = problem()
    data = data_of(given)
    call = {"global_valid_seqs": torch.tensor(5), "global_valid_toks": given.mask.sum()}
    zeros = torch.zeros_like(data["prev_logprobs"])
    with pytest.raises(ValueError, match=r"prev_logprobs: all zeros, .* give on_policy=True"):
        PolicyLoss(GSPO)(given.logprobs, Data(data | {"prev_logprobs": zeros}), **call)
    loss, metrics = PolicyLoss(GSPO, on_policy=True)(
        given.logprobs, Data(data | {"prev_logprobs": zeros}), **call
    )
    assert metrics["probs_ratio_min"] == metrics["probs_ratio_max"] == 1.0
    torch.testing.assert_close(loss, -given.advantages[:5].mean())
    with pytest.raises(ValueError, match="reference_policy_logprobs: all zeros"):
        PolicyLoss(GSPO, kl_beta=0.1)(
            given.logprobs, Data(data | {"reference_policy_logprobs": zeros}), **call
        )
    with pytest.raises(ValueError, match="kl_beta: under top-k or top-p"):
        PolicyLoss(GSPO, kl_beta=0.1)(
            given.logprobs, Data(data | {"curr_logprobs_unfiltered": zeros}), **call
        )


def test_missing_is_one_clear_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "nemo_rl", None)
    with pytest.raises(
        IntegrationError, match=r"^nemo-rl: .* this adapter needs NeMo-RL >=0.6,<0.8, installed from"
    ):
        PolicyLoss()


def test_what_does_not_fit_is_refused_at_construction(nemo_rl):
    with pytest.raises(IntegrationError, match="DPO needs ref_logprobs and group_ids, which NeMo-RL"):
        PolicyLoss(gk.DPO())
    with pytest.raises(ValueError, match="kl_estimator: got 'k4'"):
        PolicyLoss(GSPO, kl_estimator="k4")


def test_the_page_s_example_runs_with_nemo_rl(nemo_rl, capsys):
    page = Path(__file__).parents[2] / "docs" / "integrations" / "nemo_rl.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    namespace = {}
    exec(compile(block, page.name, "exec"), namespace)
    assert namespace["metrics"]["probs_ratio"] == 1.0
    assert namespace["next_token_logprobs"].grad.abs().sum() > 0


def real(name, path, **namespace):
    return peers.extract(peers.source("nemo_rl", path), name, **namespace)[name]


class BaseModel:
    """Enough of pydantic's for a configuration with defaults."""

    def __init_subclass__(cls, **options):
        pass

    def __init__(self, **options):
        vars(self).update(options)


def real_loss(**options):
    utils = peers.extract(
        peers.source("nemo_rl", "nemo_rl/algorithms/utils.py"), "masked_mean", "calculate_kl",
        torch=torch, Optional=peers.Anything,
    )  # fmt: skip
    names = peers.extract(
        peers.source("nemo_rl", "nemo_rl/algorithms/loss/loss_functions.py"), "ClippedPGLossConfig",
        "ClippedPGLossFn", torch=torch, Tensor=torch.Tensor, LossFunction=object, LossType=LossType,
        LossInputType=LossInputType, BatchedDataDict=peers.Anything, ClippedPGLossDataDict=None,
        BaseModel=BaseModel, Optional=peers.Anything, masked_mean=utils["masked_mean"],
        calculate_kl=utils["calculate_kl"],
    )  # fmt: skip
    options = {"reference_policy_kl_penalty": 0.0, **options}
    return names["ClippedPGLossFn"](names["ClippedPGLossConfig"](**options))


SEQUENCES = {"sequence_level_importance_ratios": True, "token_level_loss": False}
TIS = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_ratio": 1.2,
    "truncated_importance_sampling_ratio_min": 0.9,
}
CASES = [
    (GSPO, {}, {**SEQUENCES, "ratio_clip_min": 0.1, "ratio_clip_max": 0.15}),
    (gk.GRPO(aggregation="token_mean"), {}, {}),
    (gk.GRPO(dual_clip=1.5), {}, {"ratio_clip_c": 1.5, "token_level_loss": False}),
    (gk.CISPO(min_ratio=0.8, max_ratio=1.2), {}, {"use_cispo": True}),
    (
        gk.GRPO(aggregation="token_mean"),
        {"correction": RolloutCorrection(low=0.9, high=1.2)},
        {**TIS, "truncated_importance_sampling_type": "tis"},
    ),
    (
        gk.GRPO(aggregation="token_mean"),
        {"correction": RolloutCorrection(mode="icepop", low=0.9, high=1.2)},
        {**TIS, "truncated_importance_sampling_type": "icepop"},
    ),
    (
        gk.GRPO(aggregation="token_mean"),
        {"correction": RolloutCorrection(mode="sequence_mask", low=1.0, high=1.25)},
        {
            **TIS,
            "truncated_importance_sampling_type": "seq-mask-tis",
            "truncated_importance_sampling_ratio": 1.25,
            "truncated_importance_sampling_ratio_min": 1.0,
        },
    ),
]


@pytest.mark.parametrize(("objective", "ours", "theirs"), CASES)
def test_equals_nemo_rl(nemo_rl, objective, ours, theirs):
    theirs, ours = real_loss(**theirs), PolicyLoss(objective, **ours)
    assert [*inspect.signature(theirs).parameters] == [*inspect.signature(ours).parameters]
    assert theirs.loss_type is ours.loss_type
    assert_close(
        lambda given: step(ours, given),
        lambda given: step(theirs, given, dtype=torch.float64),
        lambda given: step(theirs, given),
    )
    mine, its = {}, {}
    step(ours, problem(), metrics=mine)
    step(theirs, problem(), metrics=its)
    names = {"loss", "probs_ratio_min", "probs_ratio_max", "num_valid_samples"}
    for name in names | (set() if objective.level == "sequence" else {"probs_ratio"}):
        assert mine[name] == pytest.approx(its[name], rel=1e-5), name


def test_the_kl_has_nemo_rl_s_value_but_no_score_function_gradient(nemo_rl):
    """NeMo-RL multiplies the KL by exp(logp - sg(logp)), which is 1 and adds kl * dlogp to the gradient."""
    given, objective = problem(), gk.GRPO(aggregation="token_mean")
    theirs = step(real_loss(reference_policy_kl_penalty=0.1), given, dtype=torch.float64)
    ours = step(PolicyLoss(objective, kl_beta=0.1), given, dtype=torch.float64)
    torch.testing.assert_close(ours[0], theirs[0])
    distance = given.logprobs - given.reference
    kl = torch.where(given.mask, torch.exp(-distance) + distance - 1, 0.0)
    torch.testing.assert_close(theirs[1] - ours[1], 0.1 * kl / given.mask.sum())


def test_inside_nemo_rl_s_packing_wrapper(nemo_rl):
    """One sequence at a time, as its workers call the loss with sequence packing."""
    wrapper = real(
        "SequencePackingLossWrapper", "nemo_rl/algorithms/loss/wrapper.py", torch=torch, math=math,
        Tensor=torch.Tensor, LossFunction=object, Callable=peers.Anything, Any=None, Optional=peers.Anything,
        BatchedDataDict=peers.Anything,
    )  # fmt: skip
    given, ours, whole = problem(), PolicyLoss(GSPO), {}
    want = step(ours, given, SPLITS[0], torch.float64, metrics=whole)
    lengths = [int(row.nonzero().max()) + 2 if row.any() else 2 for row in given.mask]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rows = zip(given.logprobs, lengths, strict=True)
    packed = torch.cat(
        [torch.cat([row[: length - 1], row.new_zeros(1)]) for row, length in rows]
    ).requires_grad_()

    def prepare(*, logits, data, **_):
        return {"next_token_logprobs": logits[:, :-1]}, data

    loss, metrics = wrapper(ours, prepare, offsets)(
        packed.unsqueeze(0), data_of(given), torch.tensor(5.0), given.mask.sum()
    )
    loss.backward()
    torch.testing.assert_close(loss.detach(), want[0])
    for row, start, length in zip(want[1], offsets, lengths, strict=False):
        torch.testing.assert_close(packed.grad[start : start + length - 1], row[: length - 1])
    for name, (value,) in whole.items():
        assert metrics[name] == pytest.approx(value), name
