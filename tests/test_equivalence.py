"""Every entry point equals the fp64 oracle in values and gradients on all backends."""

import itertools
from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from tests.cases import KIND, LAYOUTS, LOGIT_OPTIONS, for_objective, make_case, run
from tests.judging import assert_equals_oracle

POLICY, *FUSED_ENTRIES = KIND
ROWS, FUSED, LINEAR_ROWS, LINEAR = FUSED_ENTRIES
OBJECTIVES = {
    "GSPO": gk.GSPO(),
    "GSPO dual": gk.GSPO(dual_clip=1.2),
    "GSPOToken": gk.GSPOToken(),
    "GRPO": gk.GRPO(),
    "GRPO dual": gk.GRPO(clip_low=0.1, clip_high=0.15, dual_clip=1.3),
    "Linear": gk.Linear(),
}
BRIEF = (3, 0, 1, 2, 1, 1)
FEW = {"lengths": (2, 0, 1), "log_s": (0.4, 0.0, -0.2), "advantages": (-0.5, 1.0, 0.7)}
HALF, BFLOAT, DOUBLE = {"dtype": torch.float16}, {"dtype": torch.bfloat16}, {"dtype": torch.float64}
CHUNK = {"max_chunk_bytes": 3 * 61 * 4}


def check(entry, objective, layout, terms, backend="auto", max_chunk_bytes=None, **others):
    """Compare a call with the oracle; ``others`` are arguments of ``make_case``."""
    objective = OBJECTIVES[objective] if isinstance(objective, str) else objective
    case = for_objective(make_case(KIND[entry], layout, terms, **others), objective)
    options = {} if max_chunk_bytes is None else {"max_chunk_bytes": max_chunk_bytes}
    assert_equals_oracle(run(case, entry, objective, backend, **options), case, objective)


# Calls for every backend. A backend serves rows of logits, and whole GSPO losses from logits without entropy.
EVERY_BACKEND = [
    (FUSED, "GSPO", "packed", "plain", {}),
    (FUSED, "GSPO", "padded", "weighted", {}),
    (FUSED, "GSPO", "padded", "on_policy", {}),
    (FUSED, "GSPO dual", "packed", "weighted", {}),
    (FUSED, "GSPOToken", "packed", "all", {}),
    (FUSED, "Linear", "packed", "on_policy", {}),
    *((entry, "GSPO", layout, "lengths", {"lengths": (0, 0, 2, 1, 0)})
      for entry, layout in ((FUSED, "packed"), (LINEAR, "padded"))),
    *((FUSED, gk.GSPO(aggregation=name), "packed", "holes+lengths", {})
      for name in ("token_mean", "prompt_mean", "sequence_mean_token_sum", "sum")),
    (FUSED, gk.GSPO(aggregation="constant", aggregation_constant=6.0), "padded", "holes", {}),
    (ROWS, "GRPO", "packed", "plain", {}),
    (ROWS, "GSPO", "padded", "all", {}),
    (LINEAR_ROWS, "Linear", "packed", "weighted", {}),
    (LINEAR_ROWS, "GSPO", "padded", "all", CHUNK),
    (LINEAR, "GSPO", "packed", "on_policy", CHUNK),
    (LINEAR, "GRPO", "padded", "weighted", {"bias": False}),
    (LINEAR, gk.GSPOToken(aggregation="prompt_mean"), "padded", "all", CHUNK),
    (ROWS, gk.GRPO(aggregation="prompt_mean"), "packed", "kl_tensor+rollout_token", {}),
    (LINEAR, "GSPOToken", "packed", "all", CHUNK),
    (LINEAR, "Linear", "padded", "plain", {}),
    *itertools.product([FUSED, LINEAR_ROWS], ["GSPO"], ["packed"], ["weighted"], [HALF, BFLOAT, DOUBLE]),
    *itertools.product([ROWS, LINEAR], ["GRPO"], ["padded"], ["entropy"], [HALF, BFLOAT, DOUBLE]),
    # rounded logits could turn a clip decision, but Linear has none
    *((entry, "Linear", "packed", "plain", {**dtype, "logits_dtype": "input"})
      for entry in (LINEAR_ROWS, LINEAR) for dtype in (HALF, BFLOAT)),
    # one column; no full vector; prime; one more than the 4,096 and 8,192 that kernels reduce at a time; wide
    *((FUSED, "GSPO", "packed", "plain", FEW | {"vocabulary": V}) for V in (1, 2, 1009, 4097, 8193, 32000)),
    *((ROWS, "GSPOToken", "padded", "entropy", FEW | {"vocabulary": V}) for V in (1, 8193)),
    # one column; one more than the columns or rows of a weight that are multiplied at a time
    (LINEAR, "GSPO", "packed", "plain", FEW | {"vocabulary": 1}),
    (LINEAR, "GSPO", "packed", "plain", FEW | {"vocabulary": 4097}),
    (LINEAR, "Linear", "packed", "plain", FEW | HALF | {"vocabulary": 8193}),
    # only labels say which tokens count
    (FUSED, "GSPO", "padded", "plain", {"label_dtype": torch.int32, "masked": False}),
    (LINEAR, "GSPO", "padded", "plain", {"label_dtype": torch.int32, "masked": False}),
    *((FUSED, "GSPO", layout, "plain", {"logit_options": name})
      for layout in LAYOUTS for name in ("together", "kept and the rest")),
    *((ROWS, "GRPO", "padded", "entropy", {"logit_options": name})
      for name in ("temperature per sequence", "softcap", "kept and the rest")),
    (LINEAR_ROWS, "GSPO", "packed", "entropy", {"logit_options": "together"} | CHUNK),
    (LINEAR, "GSPO", "padded", "entropy", {"logit_options": "kept and the rest"} | CHUNK),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "objective", "layout", "terms", "others"), EVERY_BACKEND)
def test_every_backend(entry, objective, layout, terms, others, backend):
    check(entry, objective, layout, terms, backend, **{"lengths": BRIEF, "padding": 1} | others)


ON_CPU = [
    *((POLICY, name, LAYOUTS[i % 2], "all", {}) for i, name in enumerate(OBJECTIVES)),
    *((POLICY, name, "packed", "k3", {"lengths": (150, 0, 1)}) for name in ("GSPO", "GRPO")),
    *((entry, name, "packed", "kl_ratio_weighted", {})
      for entry in (POLICY, FUSED) for name in ("GSPO", "GSPOToken", "GRPO")),
    *((entry, "GRPO dual", "padded", "all+token_advantages", {}) for entry in (POLICY, FUSED, LINEAR)),
    *((LINEAR, "GSPO", "padded", "entropy", {"logit_options": name}) for name in list(LOGIT_OPTIONS)[1:]),
    *((LINEAR_ROWS, "GSPO", "packed", "all", {"max_chunk_bytes": size}) for size in (1, 488, 1220)),
]  # fmt: skip
"""Calls that random ones, ``tests.fuzz``, may miss."""


@pytest.mark.parametrize(("entry", "objective", "layout", "terms", "others"), ON_CPU)
def test_on_the_cpu(entry, objective, layout, terms, others):
    check(entry, objective, layout, terms, **others)


def left_padded(case):
    return replace(
        case, labels=case.labels.flip(1), inputs={"logits": case.inputs["logits"].flip(1)},
        old_logprobs=case.old_logprobs.flip(1), loss_mask=case.loss_mask.flip(1),
    )  # fmt: skip


def expanded(case):
    """Return the case with expanded tensors: one number in memory for many, the same logits everywhere."""
    shape = case.labels.shape
    inputs = dict(case.inputs)
    if "logits" in inputs:
        inputs["logits"] = inputs["logits"][:1, :1].expand(*shape, -1)
    return replace(
        case, inputs=inputs, old_logprobs=torch.full((1, 1), -2.0).expand(shape),
        advantages=torch.tensor(-0.6).expand(shape[0]),
        terms={
            "rollout_weights": torch.tensor([[0.7]]).expand(shape),
            "lengths": torch.tensor(4.0).expand(shape[0]),
        },
    )  # fmt: skip


def ignoring(index):
    def change(case):
        labels = case.labels.clone()
        labels[0, 0] = labels[2, 0] = index
        # policy_loss sees no labels, so its mask repeats which tokens they leave out
        counted = case.counted & (labels != index)
        assert counted.any() and (case.counted & ~counted).any()
        return replace(case, labels=labels, ignore_index=index, loss_mask=counted)

    return change


def with_mask_of(dtype):
    return lambda case: replace(case, loss_mask=case.loss_mask.to(dtype))


MASKS = (torch.int32, torch.int64, torch.uint8, torch.float32, torch.float64, torch.bfloat16)
CHANGES = [
    (FUSED, left_padded),
    *itertools.product([FUSED, LINEAR], [expanded, ignoring(7)]),
    *itertools.product(FUSED_ENTRIES, [ignoring(0), ignoring(-1)]),
    *itertools.product([FUSED], map(with_mask_of, MASKS)),
]


@pytest.mark.parametrize(("entry", "change"), CHANGES)
def test_arguments_in_another_form(entry, change, backend):
    case = change(make_case(KIND[entry], "padded", "holes", lengths=BRIEF, padding=1))
    assert_equals_oracle(run(case, entry, gk.GSPO(), backend), case, gk.GSPO())


@pytest.mark.parametrize("strides", ["gaps", "reversed axes"])
@pytest.mark.parametrize("entry", FUSED_ENTRIES)
def test_arguments_of_any_strides(entry, strides, backend):
    case = make_case(KIND[entry], "padded", "all", lengths=BRIEF, padding=1)
    assert_equals_oracle(run(case, entry, gk.GSPO(), backend, strides=strides), case, gk.GSPO())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_equals_its_parts(layout, backend):
    """Loss, log-probs and entropy have the bits of the two calls that the docstring names."""
    case = make_case("logits", layout, "holes", lengths=BRIEF)
    fused = run(case, FUSED, gk.GRPO(), backend, return_entropy=True)
    bonus = {**case.terms, "entropy_coef": torch.tensor(0.0)}
    apart = run(replace(case, terms=bonus), ROWS, gk.GRPO(), backend)
    for name in ("loss", "logprobs", "entropy"):
        assert torch.equal(fused.values()[name], apart.values()[name]), name
    assert (fused.logprobs[~case.counted] == 0).all() and (fused.entropy[~case.counted] == 0).all()
