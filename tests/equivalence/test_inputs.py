"""Inputs of every dtype, shape and stride equal the fp64 oracle, on every backend."""

from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from tests.cases import (
    FUSED_ENTRIES,
    KIND,
    LAYOUTS,
    LOGIT_OPTIONS,
    generator,
    make_case,
)
from tests.equivalence.common import OBJECTIVES, check


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("entry", FUSED_ENTRIES)
def test_dtypes(entry, dtype, backend):
    case = make_case(KIND[entry], "packed", "weighted", dtype=dtype, seed=1)
    check(case, entry, gk.GSPO(), backend)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("entry", ["token_logprobs", "fused_linear_policy_loss"])
def test_dtypes_with_entropy(entry, dtype, backend):
    check(make_case(KIND[entry], "padded", "entropy", dtype=dtype), entry, gk.GRPO(), backend)


# one; not a full vector; prime; wide; one more than the 4,096 and 8,192 elements that kernels fold at a time
@pytest.mark.parametrize("vocabulary", [1, 2, 1009, 4097, 8193, 32000])
@pytest.mark.parametrize("entry", ["fused_policy_loss", "fused_linear_policy_loss"])
def test_vocabularies(entry, vocabulary, backend):
    case = make_case(
        KIND[entry], "packed", "plain", vocabulary=vocabulary, lengths=(2, 0, 1), log_s=(0.4, 0.0, -0.2),
        advantages=(-0.5, 1.0, 0.7),
    )  # fmt: skip
    check(case, entry, gk.GSPO(), backend)


@pytest.mark.parametrize("vocabulary", [1, 1009, 8193])
def test_vocabularies_with_entropy(vocabulary, backend):
    case = make_case("logits", "padded", "entropy", vocabulary=vocabulary, lengths=(2, 0, 1))
    check(case, "fused_policy_loss", gk.GSPOToken(), backend)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("entry", ["fused_policy_loss", "fused_linear_policy_loss"])
def test_long_sequences(entry, layout, backend):
    # more tokens than are reduced at a time, one more than a power of two, none, and a few
    lengths = (3001, 0, 3, 1025)
    if backend == "triton" and not torch.cuda.is_available():
        if layout == "padded":
            pytest.skip("the interpreter takes milliseconds a row of logits")
        lengths = (520, 0)  # 512 tokens are reduced at a time there
    case = make_case(KIND[entry], layout, "holes", vocabulary=5, width=3, lengths=lengths, padding=1)
    check(case, entry, gk.GSPO(), backend)


@pytest.mark.parametrize("length", [1, 3, 150])
@pytest.mark.parametrize("name", ["GSPO", "GSPOToken", "GRPO"])
def test_policy_loss_lengths(name, length):
    case = make_case("logprobs", "packed", "k3", lengths=(length, 0, length))
    check(case, "policy_loss", OBJECTIVES[name])


@pytest.mark.parametrize("label_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("masked", [True, False], ids=["loss_mask", "ignore_index"])
@pytest.mark.parametrize("entry", ["fused_policy_loss", "fused_linear_policy_loss"])
def test_labels(entry, masked, label_dtype, backend):
    case = make_case(KIND[entry], "padded", "plain", label_dtype=label_dtype, masked=masked)
    check(case, entry, gk.GSPO(), backend)


@pytest.mark.parametrize("ignore_index", [0, 7, -1])
@pytest.mark.parametrize("entry", FUSED_ENTRIES)
def test_ignore_index_inside_and_outside_the_vocabulary(entry, ignore_index, backend):
    case = make_case(KIND[entry], "packed", "plain")
    labels = case.labels.clone()
    labels[[1, 4]] = ignore_index
    case = replace(case, labels=labels, ignore_index=ignore_index)
    if entry.endswith("token_logprobs"):
        # policy_loss sees no labels, so its mask says what they left out
        case = replace(case, loss_mask=case.counted)
    assert 0 < int((~case.counted).sum()) < labels.numel()
    check(case, entry, gk.GSPO(), backend)


@pytest.mark.parametrize("mask_dtype", [torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_mask_dtypes(mask_dtype):
    case = make_case("logits", "padded", "holes")
    check(replace(case, loss_mask=case.loss_mask.to(mask_dtype)), "fused_policy_loss", gk.GSPO())


@pytest.mark.parametrize("name", list(LOGIT_OPTIONS)[1:])
@pytest.mark.parametrize("entry", FUSED_ENTRIES)
def test_logit_options(entry, name, backend):
    layout = "packed" if entry in ("fused_policy_loss", "linear_token_logprobs") else "padded"
    case = make_case(KIND[entry], layout, "entropy", logit_options=name)
    check(case, entry, gk.GSPO(), backend)


@pytest.mark.parametrize("name", ["together", "kept", "kept and the rest"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logit_options_of_the_single_launch(layout, name, backend):
    case = make_case("logits", layout, "plain", logit_options=name)
    check(case, "fused_policy_loss", gk.GSPO(), backend)


def transposed(value):
    return value.transpose(-1, -2).contiguous().transpose(-1, -2)


def sliced(value):
    wide = torch.full(
        [size * 2 + 1 for size in value.shape], 9.0 if value.is_floating_point() else 1, dtype=value.dtype
    )
    window = wide[tuple(slice(1, None, 2) for _ in value.shape)]
    window.copy_(value)
    return window


def reversed_batch(value):
    return value.transpose(0, 1).contiguous().transpose(0, 1) if value.ndim >= 2 else value


@pytest.mark.parametrize("strides", [transposed, sliced, reversed_batch])
@pytest.mark.parametrize("entry", FUSED_ENTRIES)
def test_strided_inputs(entry, strides, backend):
    case = make_case(KIND[entry], "padded", "all")
    case = replace(
        case,
        inputs={
            name: strides(value) if value.ndim > 1 else sliced(value) for name, value in case.inputs.items()
        },
        labels=sliced(case.labels),
        old_logprobs=sliced(case.old_logprobs),
        loss_mask=sliced(case.loss_mask),
        advantages=sliced(case.advantages),
        terms={
            name: sliced(value) if isinstance(value, torch.Tensor) and value.ndim else value
            for name, value in case.terms.items()
        },
    )
    assert not all(value.is_contiguous() for value in case.inputs.values())
    check(case, entry, gk.GSPO(), backend)


@pytest.mark.parametrize("entry", ["fused_policy_loss", "token_logprobs"])
def test_expanded_logits(entry, backend):
    row = torch.randn(1, 1, 61, generator=generator(0))
    case = make_case("logits", "padded", "plain", lengths=(2, 3))
    shared = row.to(case.inputs["logits"].device)
    mapped = replace(
        case, inputs={"logits": shared.expand(2, case.labels.shape[1], 61)}, old_logprobs=case.old_logprobs
    )
    check(mapped, entry, gk.GRPO(), backend)


@pytest.mark.parametrize("entry", ["fused_policy_loss", "fused_linear_policy_loss"])
def test_expanded_terms(entry, backend):
    case = make_case(KIND[entry], "padded", "plain")
    shape = case.labels.shape
    terms = {
        "rollout_weights": torch.tensor([[0.7]]).expand(shape),
        "lengths": torch.tensor(4.0).expand(shape[0]),
    }
    old = torch.full((1, 1), -2.0).expand(shape)
    case = replace(case, terms=terms, old_logprobs=old, advantages=torch.tensor(-0.6).expand(shape[0]))
    check(case, entry, gk.GSPO(), backend)
