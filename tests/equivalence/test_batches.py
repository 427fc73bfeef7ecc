"""The same batch, cut, ordered or laid out another way, equals the fp64 oracle."""

import itertools
from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from tests.cases import (
    AGGREGATIONS,
    KIND,
    LAYOUTS,
    LENGTHS,
    make_case,
    offsets,
    run,
)
from tests.equivalence.common import LINEAR_ENTRIES, OBJECTIVES, check, with_aggregation
from tests.judging import assert_equals_oracle


@pytest.mark.parametrize("order", [(3, 0, 5, 1, 4, 2), (5, 4, 3, 2, 1, 0)])
@pytest.mark.parametrize("entry", ["fused_policy_loss", "fused_linear_policy_loss"])
def test_permuted_sequences(entry, order, backend):
    case = make_case(KIND[entry], "packed", "weighted")
    ends = case.cu_seqlens.tolist()
    tokens = torch.cat([torch.arange(ends[i], ends[i + 1]) for i in order])
    order = torch.tensor(order)

    def permuted(value):
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            return value
        return value[tokens] if value.shape[0] == tokens.numel() else value[order]

    per_token = {"logits", "hidden"}
    moved = replace(
        case,
        labels=case.labels[tokens],
        inputs={name: value[tokens] if name in per_token else value for name, value in case.inputs.items()},
        old_logprobs=case.old_logprobs[tokens],
        loss_mask=case.loss_mask[tokens],
        advantages=case.advantages[order],
        cu_seqlens=offsets(tuple(LENGTHS[i] for i in order.tolist())),
        terms={name: permuted(value) for name, value in case.terms.items()},
    )
    result = run(moved, entry, gk.GSPO(), backend)
    undo = tokens.argsort()
    grads = {name: value[undo] if name in per_token else value for name, value in result.grads.items()}
    back = replace(result, logprobs=result.logprobs[undo], grads=grads)
    assert_equals_oracle(back, case, gk.GSPO())


def test_left_padding(backend):
    case = make_case("logits", "padded", "holes")
    flip = {
        "labels": case.labels.flip(1),
        "inputs": {"logits": case.inputs["logits"].flip(1)},
        "old_logprobs": case.old_logprobs.flip(1),
        "loss_mask": case.loss_mask.flip(1),
    }
    check(replace(case, **flip), "fused_policy_loss", gk.GSPO(), backend)


@pytest.mark.parametrize("rows", [1, 2, 5, 1000])
@pytest.mark.parametrize("terms", ["all", "on_policy"])
@pytest.mark.parametrize("entry", LINEAR_ENTRIES)
def test_chunk_sizes(entry, terms, rows):
    case = make_case("linear", "packed", terms)
    check(case, entry, gk.GSPO(), max_chunk_bytes=rows * 61 * 4)


@pytest.mark.parametrize("terms", ["all", "on_policy"])
@pytest.mark.parametrize("entry", LINEAR_ENTRIES)
def test_chunks_of_every_backend(entry, terms, backend):
    check(make_case("linear", "padded", terms), entry, gk.GSPO(), backend, max_chunk_bytes=3 * 61 * 4)


def test_a_chunk_budget_below_one_row_still_runs():
    check(make_case("linear"), "fused_linear_policy_loss", gk.GSPO(), max_chunk_bytes=1)


@pytest.mark.parametrize("parts", [((0, 1, 2), (3, 4, 5)), ((0,), (1, 2, 3, 4), (5,))])
@pytest.mark.parametrize(
    ("entry", "name", "aggregation"),
    [
        *itertools.product(["policy_loss"], ["GSPO", "GSPOToken", "GRPO"], AGGREGATIONS),
        ("fused_policy_loss", "GSPO", "sequence_mean"),
        ("fused_policy_loss", "GRPO", "token_mean"),
        ("fused_linear_policy_loss", "GSPO", "token_mean"),
        ("fused_linear_policy_loss", "GRPO", "constant"),
    ],
)
def test_micro_batches_add_up(entry, aggregation, parts, name):
    objective = with_aggregation(OBJECTIVES[name], aggregation)
    case = make_case(KIND[entry], "padded", "kl_tensor")
    counts = case.counted.sum(1)
    divisor = {"token_mean": float(counts.sum()), "sum": 1.0}.get(aggregation, float((counts > 0).sum()))
    loss, grads = 0.0, {name: torch.zeros_like(value) for name, value in case.inputs.items()}
    logprobs = torch.zeros(case.labels.shape)
    for part in parts:
        rows = list(part)
        batched = {name for name in case.inputs if name not in ("weight", "bias")}
        micro = replace(
            case,
            labels=case.labels[rows],
            inputs={k: v[rows] if k in batched else v for k, v in case.inputs.items()},
            old_logprobs=case.old_logprobs[rows],
            loss_mask=case.loss_mask[rows],
            advantages=case.advantages[rows],
            terms={
                **{k: v[rows] if isinstance(v, torch.Tensor) else v for k, v in case.terms.items()},
                "normalizer": divisor,
            },
        )
        result = run(micro, entry, objective)
        loss += result.loss
        logprobs[rows] = result.logprobs
        for key, grad in result.grads.items():
            if key in batched:
                grads[key][rows] += grad
            else:
                grads[key] += grad
    whole = run(case, entry, objective)
    assert_equals_oracle(replace(whole, loss=loss, grads=grads, logprobs=logprobs), case, objective)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_equals_its_parts(layout, backend):
    """The same bits, log-probs and entropy included, as the two calls that the docstring names."""
    case = make_case("logits", layout, "holes")
    fused = run(case, "fused_policy_loss", gk.GRPO(), backend, return_entropy=True)
    bonus = {**case.terms, "entropy_coef": torch.tensor(0.0)}
    apart = run(replace(case, terms=bonus), "token_logprobs", gk.GRPO(), backend)
    assert torch.equal(fused.loss, apart.loss)
    assert torch.equal(fused.logprobs, apart.logprobs)
    assert torch.equal(fused.entropy, apart.entropy)
    counted = case.counted
    assert (fused.logprobs[~counted] == 0).all() and (fused.entropy[~counted] == 0).all()
