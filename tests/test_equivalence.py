"""Every entry point, layout, backend, objective and term equals the fp64 oracle, values and gradients."""

import itertools
from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from tests import oracle
from tests.cases import (
    AGGREGATIONS,
    FUSED_ENTRIES,
    KIND,
    LAYOUTS,
    LENGTHS,
    LOGIT_OPTIONS,
    TERMS,
    assert_equals_oracle,
    for_objective,
    generator,
    make_case,
    offsets,
    pad,
    run,
)

OBJECTIVES = {
    "GSPO": gk.GSPO(),
    "GSPO dual": gk.GSPO(dual_clip=1.2),
    "GSPOToken": gk.GSPOToken(),
    "GRPO": gk.GRPO(),
    "GRPO dual": gk.GRPO(clip_low=0.1, clip_high=0.15, dual_clip=1.3),
    "Linear": gk.Linear(),
}
LINEAR_ENTRIES = ("linear_token_logprobs", "fused_linear_policy_loss")


def check(case, entry, objective, backend="auto", **options):
    case = for_objective(case, objective)
    assert_equals_oracle(run(case, entry, objective, backend, **options), case, objective)


def with_aggregation(objective, aggregation):
    constant = 6.0 if aggregation == "constant" else None
    return replace(objective, aggregation=aggregation, aggregation_constant=constant)


# --- terms, objectives, aggregations


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "terms"),
    # Linear has no importance ratio to weight a KL with
    sorted(set(itertools.product(OBJECTIVES, TERMS)) - {("Linear", "kl_ratio_weighted")}),
)
def test_policy_loss(name, terms, layout):
    check(make_case("logprobs", layout, terms), "policy_loss", OBJECTIVES[name])


@pytest.mark.parametrize("terms", ["plain", "weighted", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS[1:])
@pytest.mark.parametrize("name", ["GSPO", "GSPOToken", "GRPO dual", "Linear"])
def test_policy_loss_aggregations(name, aggregation, layout, terms):
    objective = with_aggregation(OBJECTIVES[name], aggregation)
    check(make_case("logprobs", layout, terms), "policy_loss", objective)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["GSPOToken", "GRPO", "GRPO dual"])
@pytest.mark.parametrize("entry", ["policy_loss", "fused_policy_loss", "fused_linear_policy_loss"])
def test_token_advantages(entry, name, layout):
    check(make_case(KIND[entry], layout, "all+token_advantages"), entry, OBJECTIVES[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_policy_loss_dtypes(dtype):
    check(make_case("logprobs", "padded", "all", dtype=dtype), "policy_loss", gk.GSPO())


@pytest.mark.parametrize("terms", ["plain", "on_policy", "weighted", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["GSPO dual", "GSPOToken", "GRPO", "Linear"])
@pytest.mark.parametrize("entry", FUSED_ENTRIES)
def test_fused_entries(entry, name, layout, terms):
    check(make_case(KIND[entry], layout, terms), entry, OBJECTIVES[name], "cpp")


# Backends know rows, not objectives, but for the single launch: a few of each kind for all of them.
EVERY_BACKEND = [
    *itertools.product(["fused_policy_loss"], ["GSPO", "GSPO dual"], LAYOUTS, ["plain", "weighted"]),
    *itertools.product(["fused_policy_loss"], ["GSPO", "Linear"], LAYOUTS, ["on_policy"]),
    *itertools.product(FUSED_ENTRIES, ["GSPO", "GSPOToken"], LAYOUTS, ["all"]),
    ("token_logprobs", "GRPO", "packed", "plain"),
    ("linear_token_logprobs", "Linear", "packed", "weighted"),
    ("linear_token_logprobs", "GRPO", "padded", "on_policy"),
    ("fused_linear_policy_loss", "GSPO", "packed", "on_policy"),
    ("fused_linear_policy_loss", "GRPO", "padded", "weighted"),
    ("fused_linear_policy_loss", "Linear", "padded", "plain"),
]


@pytest.mark.parametrize(("entry", "name", "layout", "terms"), EVERY_BACKEND)
def test_fused_entries_of_every_backend(entry, name, layout, terms, backend):
    case = make_case(KIND[entry], layout, terms, lengths=(3, 0, 1, 2, 1), padding=1)
    check(case, entry, OBJECTIVES[name], backend)


@pytest.mark.parametrize(
    "terms", ["k3", "kl_tensor", "kl_ratio_weighted", "entropy_tensor", "on_policy_terms"]
)
@pytest.mark.parametrize("name", ["GSPO", "GSPOToken", "GRPO"])
@pytest.mark.parametrize("entry", ["fused_policy_loss", "fused_linear_policy_loss"])
def test_fused_terms(entry, name, terms):
    check(make_case(KIND[entry], "padded", terms), entry, OBJECTIVES[name], "cpp")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["GSPO", "GRPO"])
def test_fused_linear_aggregations(name, aggregation):
    objective = with_aggregation(OBJECTIVES[name], aggregation)
    check(make_case("linear", "packed", "weighted"), "fused_linear_policy_loss", objective)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregations_of_the_single_launch(aggregation, backend):
    for terms in ("plain", "weighted"):
        objective = with_aggregation(gk.GSPO(), aggregation)
        check(make_case("logits", "packed", terms), "fused_policy_loss", objective, backend)


# --- dtypes and shapes


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
        # the interpreter takes milliseconds a row of logits, and 512 tokens are reduced at a time there
        lengths = (520, 0)
    case = make_case(KIND[entry], layout, "holes", vocabulary=5, width=3, lengths=lengths, padding=1)
    check(case, entry, gk.GSPO(), backend)


@pytest.mark.parametrize("length", [1, 3, 600])
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


# --- strides


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


# --- the same batch, cut or ordered another way


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


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("entry", ["fused_policy_loss", "fused_linear_policy_loss"])
def test_padding_amounts(entry, padding, backend):
    case = make_case(KIND[entry], "padded", "weighted", padding=padding, lengths=(3, 0, 1, 2))
    check(case, entry, gk.GSPO(), backend)


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


# --- schedules and skipping


@pytest.mark.parametrize("terms", ["on_policy", "on_policy_terms", "all"])
@pytest.mark.parametrize("name", ["GSPO", "GRPO", "Linear"])
@pytest.mark.parametrize("schedule", ["known", "two_pass", "auto"])
def test_schedules_agree(schedule, name, terms):
    if (name, terms) == ("GSPO", "all"):
        schedule = {"known": "auto"}.get(schedule, schedule)  # "known" is not exact here, and refused
    case = make_case("linear", "packed", terms)
    check(case, "fused_linear_policy_loss", OBJECTIVES[name], schedule=schedule, max_chunk_bytes=4 * 61 * 4)


@pytest.mark.parametrize("schedule", ["known", "two_pass"])
@pytest.mark.parametrize("skip_inactive", ["backward", "none"])
def test_skipping_changes_nothing(skip_inactive, schedule, backend):
    case = make_case("linear", "padded", "all")
    check(
        case, "fused_linear_policy_loss", gk.GRPO(), backend, schedule=schedule, skip_inactive=skip_inactive
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["GSPO", "GSPOToken", "GRPO"])
def test_skipping_all_that_is_known_to_be_inactive(name, layout):
    case = make_case("linear", layout, "holes", advantages=(1.0, 0.0, 0.0, -1.3, 0.0, 0.5))
    objective = OBJECTIVES[name]
    result = run(case, "fused_linear_policy_loss", objective, skip_inactive="all")
    everything = run(case, "fused_linear_policy_loss", objective).logprobs
    skipped = torch.zeros_like(case.counted)
    for sequence in oracle.sequences(case.counted, case.cu_seqlens):
        skipped[sequence.where] = sequence.counted & (case.advantages[sequence.index] == 0)
    assert torch.equal(result.logprobs.isnan(), skipped) and skipped.any()
    filled = replace(result, logprobs=torch.where(skipped, everything, result.logprobs))
    assert_equals_oracle(filled, case, objective)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("entry", LINEAR_ENTRIES)
def test_logits_rounded_to_the_inputs_dtype(entry, dtype, backend):
    # Linear has no clip decision that such rounding could turn
    case = make_case("linear", "packed", "plain", dtype=dtype, logits_dtype="input")
    check(case, entry, gk.Linear(), backend)


def test_without_bias(backend):
    check(make_case("linear", "padded", "all", bias=False), "fused_linear_policy_loss", gk.GSPO(), backend)


# --- outputs


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


def test_padded_equals_packed_equals_oracle(backend):
    packed = make_case("logits", "packed", "holes")
    padded = pad(packed, 3)
    one, other = (run(case, "fused_policy_loss", gk.GSPO(), backend) for case in (packed, padded))
    assert torch.equal(one.logprobs[packed.counted], other.logprobs[padded.counted])
    assert_equals_oracle(one, packed, gk.GSPO())
    assert_equals_oracle(other, padded, gk.GSPO())
