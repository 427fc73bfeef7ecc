"""Schedules of a loss over hidden states: equal to the oracle or refused, and no costlier than promised."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.hidden import gradients
from gspo_kernels.hidden import plan as linear_schedule
from gspo_kernels.hidden.gradients import Accumulators, HeadSums
from gspo_kernels.hidden.matmul.cpp_blocks import StreamedMatmul
from gspo_kernels.hidden.matmul.pytorch import SlabMatmul
from tests import oracle
from tests.cases import LAYOUTS, device_of, for_objective, generator, make_case, run
from tests.judging import assert_equals_oracle

ENTRY, V = "fused_linear_policy_loss", 61
ROW = V * 4
NAMES = ("auto", "known", "frozen", "aligned", "deferred", "two_pass")
# advantages of a case's six sequences: half of them 0, and all of them 0
HALF, NONE = (0.0, -0.4, 1.0, 0.0, -0.5, 0.0), (0.0,) * 6
GSPO, TOKEN, GRPO, LINEAR = gk.GSPO(), gk.GSPOToken(), gk.GRPO(), gk.Linear()
UNKNOWN = {"known": "it needs coefficients that depend on one token alone, but GSPO off-policy"}
UNKNOWN_TOKEN = {"known": "but GSPOToken off-policy makes them depend on the sequence"}
OF_TOKENS = {"deferred": "coefficients are not one number per sequence"}
WITH_ENTROPY = {"deferred": "entropy_coef adds", "frozen": "entropy_coef adds"}
PER_TOKEN = {"deferred": "per token give GSPOToken coefficients per token"}

# Objective, arguments of make_case, and the schedules that refuse the call, with their reason.
CASES = {
    "sequences": (GSPO, {"layout": "padded", "terms": "weighted"}, UNKNOWN),
    "sequences, half inactive": (GSPO, {"terms": "weighted", "advantages": HALF}, UNKNOWN),
    "sequences, all inactive": (GSPO, {"layout": "padded", "terms": "weighted", "advantages": NONE}, UNKNOWN),
    "token mean": (gk.GSPO(aggregation="token_mean"), {"terms": "holes+lengths"}, UNKNOWN),
    "prompt mean": (gk.GSPO(aggregation="prompt_mean"), {"terms": "holes+lengths"}, UNKNOWN),
    "prompt mean, tokens": (gk.GRPO(aggregation="prompt_mean"),
                            {"terms": "weighted", "advantages": HALF}, OF_TOKENS),
    "tokens of sequences": (TOKEN, {"terms": "weighted", "advantages": HALF}, UNKNOWN_TOKEN),
    "tokens": (GRPO, {"layout": "padded", "terms": "weighted", "advantages": HALF}, OF_TOKENS),
    "linear": (LINEAR, {"terms": "weighted"}, OF_TOKENS),
    "on-policy": (GSPO, {"terms": "on_policy"}, {}),
    "on-policy with terms": (GRPO, {"terms": "on_policy_terms"}, WITH_ENTROPY),
    "on-policy with an entropy": (GSPO, {"terms": "on_policy+entropy"}, WITH_ENTROPY),
    "all terms": (GSPO, {"terms": "all"}, UNKNOWN | WITH_ENTROPY),
    "all terms, tokens": (GRPO, {"layout": "padded", "terms": "all"}, WITH_ENTROPY),
    "KL": (TOKEN, {"terms": "kl_tensor"}, UNKNOWN_TOKEN | {"deferred": "kl_beta adds"}),
    "weighted KL": (GSPO, {"terms": "kl_ratio_weighted"},
                    {"known": "kl_ratio_weighted with GSPO off-policy", "deferred": "kl_beta adds"}),
    "weighted KL, on-policy": (GSPO, {"terms": "on_policy+kl_ratio_weighted"},
                               {"known": "kl_ratio_weighted with GSPO", "deferred": "kl_beta adds"}),
    "entropy": (TOKEN, {"terms": "entropy_tensor"}, UNKNOWN_TOKEN | WITH_ENTROPY),
    "token weights": (TOKEN, {"terms": "token_weights"}, UNKNOWN_TOKEN),
    "advantages of tokens": (TOKEN, {"terms": "holes+token_advantages"}, UNKNOWN_TOKEN | PER_TOKEN),
    "advantages of tokens alone": (GRPO, {"terms": "holes+token_advantages"}, OF_TOKENS),
    "rollout weights of tokens": (TOKEN, {"terms": "rollout_token"}, UNKNOWN_TOKEN | PER_TOKEN),
    "mean rollout weights": (GSPO, {"terms": "rollout_token"}, UNKNOWN),
    "fp16": (GSPO, {"terms": "holes", "dtype": torch.float16}, UNKNOWN),
    "fp64": (GSPO, {"terms": "holes", "dtype": torch.float64}, UNKNOWN),
    # Linear has no clip decision that rounded logits could turn
    "rounded logits, fp16": (LINEAR, {"dtype": torch.float16, "logits_dtype": "input"}, OF_TOKENS),
    "rounded logits, bf16": (LINEAR, {"dtype": torch.bfloat16, "logits_dtype": "input"}, OF_TOKENS),
    "logit options": (GSPO, {"layout": "padded", "terms": "holes", "logit_options": "together"}, UNKNOWN),
    "interleaved groups": (gk.REBEL(), {"terms": "holes+groups"}, OF_TOKENS | {"known": "on the group"}),
    "batch": (gk.M2PO(), {"terms": "holes"}, OF_TOKENS | {"known": "on the batch"}),
    "sampling mask": (GSPO, {"terms": "holes", "logit_options": "kept and the rest"}, UNKNOWN),
}  # fmt: skip


def most_together(case, objective):
    """Count tokens of the largest set that a chunk must hold: an active sequence, a group, or all."""
    scope, counts = objective.coefficient_scope, Counter()
    per_sequence = case.advantages is not None and case.advantages.shape == (6,)
    for sequence in oracle.sequences(case.counted, case.cu_seqlens):
        if scope in ("group", "batch"):
            counts[int(case.terms["group_ids"][sequence.index]) if scope == "group" else 0] += sequence.count
        elif not per_sequence or case.advantages[sequence.index] != 0:
            counts[sequence.index] = sequence.count
    return max(counts.values(), default=0)


@pytest.mark.parametrize("schedule", NAMES)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_oracle_or_refused(name, schedule):
    objective, arguments, refused = CASES[name]
    case = for_objective(make_case("linear", **arguments), objective)
    row_bytes = V * max(4, case.inputs["weight"].dtype.itemsize)
    # how many rounded logits fit, with the rows of their gradient, depends on the processor
    for rows in (1, 3, 6) if case.logits_dtype == "float32" else (9,):
        options = {"schedule": schedule, "max_chunk_bytes": rows * row_bytes}
        options["strides"] = "reversed axes" if schedule == "auto" else "contiguous"
        reason = refused.get(schedule)
        if reason is not None:
            reason = f"^schedule: '{schedule}' is not exact here: .*{reason}"
        elif schedule == "aligned" and rows < (most := most_together(case, objective)):
            reason = f"one of {most} counted tokens for chunks of {rows} row"
        if reason is None:
            assert_equals_oracle(run(case, ENTRY, objective, **options), case, objective)
            continue
        with pytest.raises(ValueError, match=reason):
            run(case, ENTRY, objective, **options)


@pytest.mark.parametrize("schedule", NAMES)
def test_every_backend(schedule, backend):
    objective = GRPO if schedule == "known" else GSPO
    case = make_case("linear", "packed", "holes", dtype=torch.bfloat16)
    result = run(case, ENTRY, objective, backend, schedule=schedule, max_chunk_bytes=4 * ROW)
    assert_equals_oracle(result, case, objective)


@pytest.mark.parametrize(
    ("dtype", "terms", "logit_options"),
    [
        (torch.bfloat16, "holes", "default"),
        (torch.bfloat16, "all", "together"),
        (torch.float16, "entropy_tensor", "kept and the rest"),
    ],
)
def test_two_passes_over_16_bit_weights(dtype, terms, logit_options, backend, monkeypatch):
    """Logits are recomputed by blocks of columns; the last one has fewer."""
    monkeypatch.setattr(gradients, "BLOCK_COLUMNS", {"cpu": 24, "cuda": 24})
    case = make_case("linear", "packed", terms, dtype=dtype, logit_options=logit_options, advantages=HALF)
    options = {"schedule": "two_pass", "max_chunk_bytes": 6 * ROW}
    assert_equals_oracle(run(case, ENTRY, GSPO, backend, **options), case, GSPO)
    # hidden states of masked rows may be anything
    poison = torch.where(case.counted.unsqueeze(-1), case.inputs["hidden"], math.nan)
    poisoned = replace(case, inputs=case.inputs | {"hidden": poison})
    results = [run(each, ENTRY, GSPO, backend, skip_inactive="none", **options) for each in (case, poisoned)]
    assert all(map(torch.equal, *(each.grads.values() for each in results)))


def test_memory_chooses_schedule_and_chunks():
    """Both are errors with memory="least", which never materializes all logits."""
    case = make_case("linear", "packed", "holes", dtype=torch.bfloat16)
    least, numbers = explain(case, memory="least"), explain(case, schedule="two_pass", max_chunk_bytes=2**28)
    assert replace(least, reason="") == replace(numbers, reason="") and least.schedule == "two_pass"
    assert "memory='least'" in least.reason
    assert explain(case, schedule="two_pass") == replace(least, reason="it was passed")
    result, same = (
        run(case, ENTRY, GSPO, **options) for options in ({"memory": "least"}, {"schedule": "two_pass"})
    )
    assert_equals_oracle(result, case, GSPO)
    assert all(map(torch.equal, result.grads.values(), same.grads.values()))
    frozen = replace(case, frozen=("weight", "bias"))
    assert explain(frozen, memory="least").schedule == "frozen"
    for option, message in (
        ({"schedule": "aligned"}, "schedule: got 'aligned', expected 'auto' with memory='least'"),
        ({"max_chunk_bytes": 5}, "max_chunk_bytes: got 5, expected None with memory='least'"),
    ):
        with pytest.raises(ValueError, match=message):
            run(case, ENTRY, GSPO, memory="least", **option)


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
@pytest.mark.parametrize("schedule", ["aligned", "two_pass"])
def test_rows_that_move_keep_their_own_temperature(schedule, backend):
    """Every second sequence is clipped and leaves the products, so that the others move to the front."""
    B, T, H = 6, 5, 7
    rng, served = generator(0), device_of(backend)
    hidden, weight = (torch.randn(*shape, generator=rng) for shape in ((B, T, H), (V, H)))
    labels, temperature = torch.randint(V, (B, T), generator=rng), torch.linspace(0.5, 2.0, B)
    logits = (hidden.double() @ weight.double().t()).requires_grad_()
    options = {"temperature": temperature, "objective": gk.GSPO(clip_low=0.1, clip_high=0.1)}
    old = gk.token_logprobs(logits.detach(), labels, temperature=temperature, backend="reference").logprobs
    old, advantages = old - torch.tensor([0.0, 1.0] * (B // 2)).unsqueeze(1), torch.ones(B)
    loss = gk.fused_policy_loss(logits, labels, old, advantages, backend="reference", **options).loss
    (rows,) = torch.autograd.grad(loss, logits)
    assert [bool(each.any()) for each in rows] == [True, False] * (B // 2)

    leaves = [each.to(served, copy=True).requires_grad_() for each in (hidden, weight)]
    options["temperature"] = temperature.to(served)
    given = (each.to(served) for each in (labels, old, advantages))
    out = gk.fused_linear_policy_loss(*leaves, *given, schedule=schedule, backend=backend, **options)
    got = torch.autograd.grad(out.loss, leaves)
    want = rows @ weight.double(), rows.flatten(0, 1).t() @ hidden.flatten(0, 1).double()
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double().cpu(), other, rtol=1e-4, atol=1e-6 * float(other.abs().max()))


@pytest.mark.slow
def test_active_rows_move_to_the_front_a_few_at_a_time():
    """Here two rows move, and with this vocabulary one at a time: a copy of both would need more memory."""
    case = make_case("linear", "packed", "holes", vocabulary=2**17, width=4, dtype=torch.float64)
    assert_equals_oracle(run(case, ENTRY, GSPO, schedule="aligned"), case, GSPO)


@pytest.mark.parametrize("schedule", [name for name in NAMES if name != "known"])
@pytest.mark.parametrize("objective", [GSPO, TOKEN])
def test_skipping_changes_nothing(schedule, objective):
    """Except log-probs of sequences that "all" skips, which are NaN."""
    for layout, advantages in (("padded", None), ("packed", HALF), ("padded", NONE)):
        case = make_case("linear", layout, "holes", advantages=advantages)
        skipped = torch.zeros_like(case.counted)
        for sequence in oracle.sequences(case.counted, case.cu_seqlens):
            skipped[sequence.where] = sequence.counted & (case.advantages[sequence.index] == 0)
        for skip in ("none", "backward", "all"):
            # "none" projects padding too, so that a sequence has six rows
            options = {"schedule": schedule, "skip_inactive": skip, "max_chunk_bytes": 6 * ROW}
            result = run(case, ENTRY, objective, **options)
            if skip == "all":
                assert torch.equal(result.logprobs.isnan(), skipped)
                everything = run(case, ENTRY, objective).logprobs
                result = replace(result, logprobs=torch.where(skipped, everything, result.logprobs))
            assert_equals_oracle(result, case, objective)


# --- the choice, and its costs


@pytest.fixture
def products(monkeypatch):
    """Record the rows of each product of a call, by kind."""
    rows = {"forward": [], "hidden": [], "weight": []}

    def count(owner, name, kind, size):
        product = getattr(owner, name)

        def counted(self, operand, *args):
            if name != "statistics" or self.streams:
                rows[kind].append(size(operand))
            return product(self, operand, *args)

        monkeypatch.setattr(owner, name, counted)

    for owner, name, kind, size in (
        (Accumulators, "logits_memory", "forward", lambda count: count),
        (StreamedMatmul, "statistics", "forward", lambda chunk: chunk.size),
        (SlabMatmul, "grad_hidden", "hidden", len),
        (HeadSums, "add", "weight", lambda parts: len(parts[0])),
    ):
        count(owner, name, kind, size)
    return rows


def explain(case, **options):
    leaves = {
        name: value.detach().clone().requires_grad_(name not in case.frozen)
        for name, value in case.inputs.items()
    }
    return gk.explain_schedule(
        leaves["hidden"], leaves["weight"], case.labels, case.old_logprobs, case.advantages,
        bias=leaves["bias"], loss_mask=case.loss_mask, cu_seqlens=case.cu_seqlens, **case.terms | options,
    )  # fmt: skip


def test_plans_depend_on_backend_and_normalizer():
    """PyTorch's statistics need written logits. Without a normalizer, prompts need ``group_ids``."""
    hidden, weight, labels = torch.zeros(1, 8, 2), torch.zeros(4096, 2), torch.zeros(1, 8, dtype=torch.int64)
    for backend, columns in {"cpp": 2048, "reference": 4096}.items():
        plan = gk.explain_schedule(hidden, weight, labels, None, torch.ones(1), backend=backend)
        assert plan.peak_bytes == 8 * columns * 4
    case, by_prompt = make_case("linear"), {"objective": gk.GRPO(aggregation="prompt_mean")}
    assert explain(case, normalizer=torch.ones(len(case.advantages)), **by_prompt).schedule == "known"
    with pytest.raises(ValueError, match="group_ids: got None"):
        explain(case, **by_prompt)


def test_the_first_schedule_that_is_exact_is_taken():
    """Each line of the rule is shown with a call that no earlier line serves."""
    case = make_case("linear")
    two_rows = {"max_chunk_bytes": 2 * ROW}
    with torch.no_grad():
        plan = explain(case)
    assert (plan.schedule, plan.products) == ("forward", 1.0)
    assert "no input requires a gradient" in plan.reason
    assert explain(case, objective=GRPO).schedule == "known"
    frozen = {"frozen": ("weight", "bias")}
    assert explain(replace(case, **frozen)).schedule == "frozen"
    assert explain(replace(make_case("linear", terms="entropy"), **frozen)).schedule == "aligned"
    assert explain(case).schedule == "aligned"
    assert explain(case, **two_rows).parts == {"aligned": 3, "two_pass": 7, "forward": 1}
    least = linear_schedule.SUM_ROWS["cpu"]
    long = make_case("linear", lengths=(least - 1, 2, least))
    assert explain(long, **two_rows).parts == {"two_pass": least - 1, "deferred": least, "aligned": 2}
    kl = {"ref_logprobs": case.old_logprobs, "kl_beta": 0.1}
    assert explain(case, **kl, **two_rows).parts == {"aligned": 4, "two_pass": 7}
    pairs = {"objective": gk.REBEL(), "group_ids": torch.tensor([0, 0, 1, 1, 2, 2])}
    assert explain(case, **pairs, **two_rows).parts == {"two_pass": 11}


# 21 tokens: 16 of sequences with an advantage, of which 12 are not clipped
WORK = {"lengths": (5, 3, 4, 4, 3, 2), "advantages": (1.0, 0.0, -1.0, 0.5, -0.7, 0.0)}
CLIPPED, ACTIVE = (1e-4, 0.0, -1e-4, 0.1, 2e-4, 0.0), (1e-4, 0.0, -1e-4, 1e-4, 2e-4, 0.0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("schedule", "skip_inactive", "rows", "forward", "gradient"),
    [
        ("known", "backward", 3, 21, 16),
        ("frozen", "backward", 3, 21, 16),
        ("aligned", "backward", 8, 21, 12),
        ("aligned", "all", 8, 16, 12),
        ("deferred", "backward", 2, 21, 16),
        ("deferred", "all", 2, 16, 16),
        ("two_pass", "backward", 2, 21 + 12, 12),
        ("two_pass", "all", 2, 16 + 12, 12),
        ("auto", "backward", 8, 21, 12),
        ("auto", "all", 8, 16, 12),
    ],
)
def test_rows_in_products(products, schedule, skip_inactive, rows, forward, gradient, layout):
    """Rows without gradient enter no gradient product, masked rows (padding) enter no product at all."""
    case = make_case("linear", layout, "plain", log_s=CLIPPED, noise=0.0, **WORK)
    objective = gk.GRPO(0.9, 9.0) if schedule == "known" else GSPO  # GRPO clips no token here
    run(case, ENTRY, objective, schedule=schedule, skip_inactive=skip_inactive, max_chunk_bytes=rows * ROW)
    assert sum(products["forward"]) == forward and max(products["forward"]) <= rows
    assert sum(products["hidden"]) == gradient
    assert sum(products["weight"]) == gradient or schedule == "frozen"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("skip_inactive", ["backward", "all", "none"])
@pytest.mark.parametrize("schedule", ["auto", "aligned", "deferred", "two_pass"])
def test_explained_products_are_those_that_run(products, schedule, skip_inactive, layout):
    """Here every sequence with an advantage is active, so the plan has nothing to guess."""
    case = make_case("linear", layout, "holes", log_s=ACTIVE, **WORK)
    # the last chunk has room for sequences without advantage
    options = {"schedule": schedule, "skip_inactive": skip_inactive, "max_chunk_bytes": 11 * ROW}
    plan = explain(case, **options)
    run(case, ENTRY, GSPO, **options)
    rows = sum(plan.parts.values())
    if skip_inactive == "none" and schedule != "deferred":
        # masked rows and rows without advantage take part, too
        assert rows == case.labels.numel()
    assert plan.products * rows == pytest.approx(sum(map(sum, products.values())))
    assert max(products["forward"]) <= 11
