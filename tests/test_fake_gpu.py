"""Requests to a fake GPU: products, their memory, launches, and waits of the host."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.arguments import head
from gspo_kernels.hidden import chunk
from gspo_kernels.hidden.matmul import pytorch
from tests.arguments.test_errors import arguments
from tests.cases import HEAD, Result, call, forward, generator, make_case, poisoned, run
from tests.fake_gpu import FakeGpu
from tests.gpu.calls import CAPTURED, Scale, inputs_of, step
from tests.judging import assert_equals_oracle

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="other tests show it on the device itself")
pytest.importorskip("triton")

ENTRY = "fused_linear_policy_loss"
B = 8
V = 61
ROW = V * 4
NARROW = [torch.float16, torch.bfloat16]
IN_16_BITS = [
    (NARROW[0], "aligned"),
    (NARROW[1], "deferred"),
    (NARROW[0], "two_pass"),
    (NARROW[1], "two_pass"),
]


@pytest.fixture
def gpu(monkeypatch):
    return FakeGpu(monkeypatch)


def problem(dtype, width=16, vocabulary=V, length=2):
    """Return tensors for a fake device: trained hidden and weight, labels, old log-probs, advantages."""
    rng = generator(0)
    hidden, weight = (
        torch.randn(*shape, generator=rng) for shape in ((B, length, width), (vocabulary, width))
    )
    labels = torch.randint(vocabulary, (B, length), generator=rng)
    old, advantages = torch.randn(B, length, generator=rng) - 4, torch.randn(B, generator=rng)
    leaves = [hidden.to(dtype).requires_grad_(), (weight / 4).to(dtype).requires_grad_()]
    return leaves, labels, old, advantages


# --- products


@pytest.mark.parametrize(("dtype", "schedule"), IN_16_BITS)
def test_gradients_summed_in_16_bits_equal_the_oracle(gpu, dtype, schedule):
    case = make_case("linear", "packed", "holes", dtype=dtype)
    with gpu:
        got = run(case, ENTRY, gk.GSPO(), "triton", schedule=schedule, max_chunk_bytes=4 * ROW)
    assert_equals_oracle(got, case, gk.GSPO())


@pytest.fixture
def small_chunks(monkeypatch):
    """Let default chunks have 8 rows, on a device with much memory."""
    for name, value in (("CHUNK_ROWS", {"cuda": (8, 8)}), ("CHUNK_BYTES", 0), ("MIN_CHUNK_BYTES", 0)):
        monkeypatch.setattr(chunk, name, value)
    device = SimpleNamespace(total_memory=2**40, major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)


IDS = torch.randint(4096, (B, 4, 100), generator=generator(1))
SOME = (torch.arange(4 * B) < 20).view(B, 4)
"""Of 32 tokens 20 count: two chunks of 10 where 16 would fit."""
CENTERED = {"objective": gk.CISPO(), "centering": gk.ScoreCentering(IDS, torch.full(IDS.shape, -20.0))}


@pytest.mark.parametrize(
    ("dtype", "schedule", "rows", "logits", "of_weight", "options"),
    [
        (NARROW[0], "aligned", 8, 0, 6, {}),  # dWeight's sum and, at the end, dWeight
        (NARROW[1], "deferred", 8, 4, 8, {}),  # two sums, and the logits of a sequence
        (NARROW[0], "two_pass", 8, 8, 3, {}),  # dWeight, and a quarter of it in fp32
        (NARROW[1], "two_pass", None, 32, 2, {}),
        (NARROW[1], "aligned", None, 32, 2, {}),
        (NARROW[1], "known", None, 32, 2, {"objective": gk.GRPO()}),
        (NARROW[1], "auto", 3, 3, 2, {}),  # no sequence fits, and few rows are not deferred
        (NARROW[1], "known", 16, None, None, {"objective": gk.GRPO(0.9, 9.0), "loss_mask": SOME}),
        (NARROW[1], "known", None, None, None, CENTERED),
        (NARROW[1], "two_pass", 8, None, None, CENTERED),
    ],
)
def test_peak_memory_is_what_the_plan_says(
    gpu, small_chunks, dtype, schedule, rows, logits, of_weight, options
):
    """The plan counts all memory but a few numbers per token. 16-bit rows p - onehot share the memory of
    their fp32 logits, which is kept. Here these are 32 rows. The default chunk has 8, or all for a bf16
    dWeight that is then one product, without centering. At the peak there are ``logits`` rows of logits, and
    ``of_weight`` bytes for each element of the weight.
    """
    width, vocabulary, length = 24, 4096, 4
    leaves, *given = problem(dtype, width, vocabulary, length)
    options = {
        "schedule": schedule,
        "skip_inactive": "backward" if "loss_mask" in options else "none",
    } | options
    options["max_chunk_bytes"] = None if rows is None else rows * vocabulary * 4
    with gpu:
        plan = gk.explain_schedule(*leaves, *given, **options)
        gk.fused_linear_policy_loss(*leaves, *given, **options).loss.backward()
    assert gpu.peak == pytest.approx(plan.peak_bytes, rel=0.02)
    if logits is not None:
        assert gpu.peak == pytest.approx(vocabulary * (4 * logits + width * of_weight), rel=0.03)
    assert plan.gradient_bytes == sum(leaf.numel() * leaf.element_size() for leaf in leaves)


@pytest.mark.parametrize(("sizes", "factor"), [((1.0, 2.0**-30), 1.0), ((2.0**-90, 2.0**20), 2.0**-20)])
@pytest.mark.parametrize("dtype", NARROW)
def test_coefficients_of_any_size_add_up_in_16_bits(gpu, dtype, sizes, factor):
    """The coefficients of two chunks differ by many powers of two; only the loss times a factor has gradients
    in the range of fp16.
    """
    case = make_case("linear", "packed", dtype=dtype, lengths=(8, 8), bias=False)
    weights = (1 + torch.rand(16, generator=generator(0))) * torch.tensor(sizes).repeat_interleave(8)
    case, objective = replace(case, advantages=None, terms={"token_weights": weights}), gk.Linear()
    with gpu:
        leaves, out = forward(case, ENTRY, objective, "triton", schedule="known", max_chunk_bytes=8 * ROW)
        (out.loss * factor).backward()
    grads = {name: leaf.grad for name, leaf in leaves.items()}
    got = Result(out.loss.detach() * factor, out.logprobs, grads, metrics=out.metrics)
    assert_equals_oracle(got, replace(case, terms={"token_weights": weights * factor}), objective)


# --- launches, and what the host waits for

REFERENCE = {"ref_logprobs": torch.full((B, 2), -4.0), "kl_beta": 0.1}
FROM_LOGITS = {
    "GSPO": (gk.GSPO(), {"normalizer": 8.0}),
    "GRPO on-policy": (gk.GRPO(), {"old_logprobs": None}),
    "GSPO with KL": (gk.GSPO(), REFERENCE),
    "GRPO": (gk.GRPO(), {}),
}


@pytest.mark.parametrize("name", FROM_LOGITS)
def test_losses_from_logits_never_sync(gpu, name):
    objective, terms = FROM_LOGITS[name]
    (hidden, weight), labels, old, advantages = problem(torch.float32)
    terms = {"old_logprobs": old, "advantages": advantages, "loss_mask": torch.ones(B, 2)} | terms
    logprobs, logits = old.clone().requires_grad_(), (hidden @ weight.t()).detach().requires_grad_()
    with gpu:
        gk.policy_loss(logprobs, **terms, objective=objective).loss.backward()
        gk.fused_policy_loss(logits, labels, **terms, objective=objective).loss.backward()
        gk.token_logprobs(logits, labels).logprobs.sum().backward()
    assert not gpu.looks


def test_a_weight_on_the_host_is_one_copy(gpu):
    *_, old, advantages = problem(torch.float32)
    terms = {"old_logprobs": old, "advantages": advantages, "objective": gk.GRPO()} | REFERENCE
    with gpu:
        beta = torch.tensor(0.1, dtype=torch.float64)
        out = gk.policy_loss(old + 0.1, **terms | {"kl_beta": beta})
        assert gpu.looks == {"copy to the device": 1}
        assert torch.equal(out.loss, gk.policy_loss(old + 0.1, **terms).loss)


HOLES = torch.ones(B, 2).index_fill(1, torch.tensor([1]), 0.0)
# ratios of every other sequence are clipped
CLIPPED = {"objective": gk.GSPO(0.5, 1e9), "advantages": -torch.ones(B)}
CLIPPED["old_logprobs"] = torch.tensor([[0.0, 0.0], [-8.0, -8.0]]).repeat(B // 2, 1)
ON_POLICY, PER_TOKEN = {"old_logprobs": None}, {"objective": gk.GRPO(0.999, 1e9)}
FROM_HIDDEN = [
    ("aligned", "none", {}, 0, 0),
    ("aligned", "backward", {}, 1, 5),
    ("deferred", "backward", {}, 1, 1),
    ("two_pass", "none", {}, 0, 0),
    ("two_pass", "backward", {}, 1, 2),
    ("known", "none", ON_POLICY, 0, 0),
    ("known", "backward", ON_POLICY, 1, 2),
    ("known", "backward", PER_TOKEN, 1, 5),
    ("aligned", "none", {"dtype": torch.float16}, 0, 0),
    ("aligned", "backward", {"loss_mask": HOLES}, 1, 3),
    ("aligned", "backward", CLIPPED, 1, 5),
    ("known", "none", ON_POLICY | {"vocabulary": 64}, 0, 0),  # rows that stay on the chip
    ("known", "none", ON_POLICY | REFERENCE, 0, 0),
]
"""Schedule, ``skip_inactive``, terms, and syncs of a forward and backward: one for the lengths. In large
calls, in which skipping rows saves more than a sync costs, each chunk may have one more.
"""


@pytest.mark.parametrize("is_large", (False, True))
@pytest.mark.parametrize(("schedule", "skip", "terms", "syncs", "syncs_if_large"), FROM_HIDDEN)
def test_losses_from_hidden_states_rarely_sync(
    gpu, schedule, skip, terms, syncs, syncs_if_large, is_large, monkeypatch
):
    if is_large:
        for module in (head, pytorch):
            monkeypatch.setattr(module, "MIN_SYNC_WORK", 0.0)
    given = {"dtype": torch.bfloat16, "vocabulary": V} | terms
    dtype, vocabulary = given.pop("dtype"), given.pop("vocabulary")
    leaves, labels, old, advantages = problem(dtype, vocabulary=vocabulary)
    terms = {"old_logprobs": old, "advantages": advantages.abs() + 1, "normalizer": 8.0}
    terms |= {"objective": gk.GSPO(clip_low=0.999, clip_high=1e9), "loss_mask": torch.ones(B, 2)} | given
    options = {"schedule": schedule, "skip_inactive": skip, "max_chunk_bytes": B * 2 // 4 * vocabulary * 4}
    with gpu:
        gk.fused_linear_policy_loss(*leaves, labels, **terms, **options).loss.backward()
    assert gpu.products and not gpu.inexact
    assert gpu.looks.total() == (syncs_if_large if is_large else syncs)


LENGTHS = torch.tensor([0, 2, 2, 7, 16], dtype=torch.int32)
ADVANTAGES = torch.tensor([1.0, -1.0, 0.0, 2.0])


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_prefetched_lengths_avoid_the_sync(gpu, layout):
    """The loss and its gradients equal those of a call that syncs."""
    leaves, labels, old, advantages = problem(torch.bfloat16)
    advantages[1], terms = 0.0, {"loss_mask": HOLES.clone(), "objective": gk.GSPO(0.9, 0.9)}
    if layout == "packed":
        leaves[0] = leaves[0].detach().flatten(0, 1).requires_grad_()
        labels, old, advantages = labels.flatten(), old.flatten(), ADVANTAGES.clone()
        terms |= {"loss_mask": terms["loss_mask"].flatten(), "cu_seqlens": LENGTHS.clone()}
    labels[-1] = -100
    asked = {name: terms.get(name) for name in ("loss_mask", "cu_seqlens")}
    found = []
    for ahead in (False, True):
        for leaf in leaves:
            leaf.grad = None
        with gpu:
            if ahead:
                gk.prefetch(labels, asked["loss_mask"], advantages, cu_seqlens=asked["cu_seqlens"])
                assert not gpu.looks
            out = gk.fused_linear_policy_loss(
                *leaves, labels, old, advantages, **terms, max_chunk_bytes=4 * ROW
            )
            out.loss.backward()
        assert gpu.looks.total() == (not ahead)
        gpu.looks.clear()
        found.append([out.loss.detach(), out.logprobs, *(leaf.grad for leaf in leaves)])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_prefetched_lengths_serve_one_call(gpu):
    (hidden, weight), labels, old, advantages = problem(torch.bfloat16)
    mask, chunk = torch.ones(B, 2), {"max_chunk_bytes": 4 * ROW}

    def looks(*given):
        gpu.looks.clear()
        gk.fused_linear_policy_loss(hidden, weight, given[0], old, given[2], loss_mask=given[1], **chunk)
        return gpu.looks.total()

    with gpu:
        gk.prefetch(labels, mask, advantages)
        assert looks(labels, mask, advantages) == 0 and looks(labels, mask, advantages) == 1
        for other in range(3):
            given = [labels, mask, advantages]
            gk.prefetch(*given)
            given[other] = given[other].clone()
            assert looks(*given) == 1
        gk.prefetch(labels, mask, advantages)
        mask[0, 0] = 0  # the version tells
        assert looks(labels, mask, advantages) == 1
        for count in (0, 1):
            if not count:
                gk.prefetch(labels)
            gpu.looks.clear()
            gk.linear_token_logprobs(hidden, weight, labels, **chunk).logprobs.sum().backward()
            assert gpu.looks.total() == count
    with pytest.raises(ValueError, match="loss_mask: got shape"):
        gk.prefetch(labels, mask[:1])
    with pytest.raises(ValueError, match="advantages: got shape"):
        gk.prefetch(labels, mask, advantages[1:])


# --- masks and offsets that the caller has on the host

HOST = ("loss_mask", "cu_seqlens")


@pytest.mark.parametrize("schedule", ["aligned", "deferred", "frozen", "two_pass", "known"])
@pytest.mark.parametrize(("layout", "skip"), [("padded", "none"), ("packed", "backward")])
def test_a_mask_and_offsets_on_the_host_avoid_syncs(gpu, layout, schedule, skip):
    """The host can't see that a label in the mask is ``ignore_index``. The loss is the oracle's."""
    case = make_case("linear", layout, "on_policy" if schedule == "known" else "holes")
    labels = case.labels.clone()
    labels.view(-1)[labels.numel() // 2] = case.ignore_index
    case = replace(case, labels=labels)
    frozen = HEAD if schedule == "frozen" else ()
    here = poisoned(case).each(lambda name, value: gpu.host(value) if name in HOST else value)
    leaves = {name: value.clone().requires_grad_(name not in frozen) for name, value in here.inputs.items()}
    options = {"schedule": schedule, "skip_inactive": skip, "max_chunk_bytes": 8 * ROW}
    with gpu:
        out = call(here, leaves, ENTRY, gk.GSPO(), "triton", **options)
        out.loss.backward()
        assert not gpu.looks
    grads = {name: leaf.grad for name, leaf in leaves.items() if name not in frozen}
    got = Result(out.loss.detach(), out.logprobs, grads, metrics=out.metrics, frozen=frozen)
    assert_equals_oracle(got, case, gk.GSPO())


TAKING_MASKS = [
    gk.policy_loss, gk.policy_coefficients, gk.fused_policy_loss, gk.distillation_loss, gk.rollout_weights,
    gk.fused_linear_distillation_loss, gk.fused_linear_policy_loss, gk.off_policy_mask, gk.normalizer,
    gk.advantages.reverse_kl,
]  # fmt: skip


@pytest.mark.parametrize(("packed", "dtype"), [(False, torch.float32), (True, torch.int64)])
@pytest.mark.parametrize("function", TAKING_MASKS, ids=lambda function: function.__name__)
def test_functions_take_a_mask_and_offsets_on_the_host(gpu, function, packed, dtype):
    mask = torch.ones(3, 4).index_fill(1, torch.tensor([1]), 0.0).to(dtype)
    call = arguments(function, packed, loss_mask=mask)
    call |= {"max_chunk_bytes": 4 * 11 * 4} if "hidden" in call else {}
    call |= {"temperature": torch.ones(3)} if "logits" in call else {}
    call |= {"level": "sequence"} if function == gk.rollout_weights else {}
    results, prefetch = [], function == gk.fused_linear_policy_loss
    with gpu:
        host = {name: gpu.host(value) if name in HOST else value for name, value in call.items()}
        for given in (call, host):
            gpu.looks.clear()
            if prefetch:
                gk.prefetch(given["labels"], given["loss_mask"], cu_seqlens=given.get("cu_seqlens"))
            results.append(function(**given))
        assert not gpu.looks
    got, wanted = (torch.as_tensor(getattr(each, "loss", each)) for each in results)
    assert torch.equal(got, wanted)


def test_other_arguments_on_the_host_are_errors(gpu, monkeypatch):
    """Values of a mask and offsets are checked there. A graph would read the host's memory."""
    *_, old, advantages = problem(torch.float32)
    flat = (old.flatten() + 0.1, old.flatten(), ADVANTAGES)
    with gpu:
        with pytest.raises(ValueError, match="loss_mask"):
            gk.policy_loss(old + 0.1, old, advantages, loss_mask=gpu.host(torch.full((B, 2), 0.5)))
        with pytest.raises(ValueError, match="cu_seqlens: starts at 2"):
            gk.policy_loss(*flat, cu_seqlens=gpu.host(LENGTHS + 2))
        with pytest.raises(ValueError, match="advantages: is on cpu, expected cuda:0"):
            gk.policy_loss(old + 0.1, old, gpu.host(advantages))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(ValueError, match="cu_seqlens: is on the CPU, expected cuda:0 while a CUDA graph"):
            gk.policy_loss(*flat, cu_seqlens=gpu.host(LENGTHS))
    assert not gpu.looks


# --- what a CUDA graph can capture

STEP = Scale(16, 64, 16, 1)


def launched(gpu, kind, values, **options):
    """Return how often a step launches each kernel and operation; reject copies and syncs."""
    gpu.kernels.clear(), gpu.small.clear(), gpu.products.clear()
    with gpu:
        results = step(kind, values, **options)
    assert not gpu.looks and "copy of pinned memory" not in gpu.small
    return dict(gpu.kernels), dict(gpu.small), list(gpu.products), [one.shape for one in results]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("kind", "options"), CAPTURED)
def test_captured_launches_do_not_depend_on_values(gpu, kind, options, packed):
    """What replays do, ``tests.gpu.test_gpu`` shows on a GPU."""
    if kind == "hidden":
        options = {"max_chunk_bytes": 8 * 64 * 4} | options
        options |= {"max_chunk_bytes": None} if "memory" in options else {}
    first, second = (inputs_of("cpu", STEP, kind, packed, seed) for seed in (0, 1))
    assert launched(gpu, kind, first, **options) == launched(gpu, kind, second, **options)


# --- rows that stay on the chip, of vocabularies that come in 16-byte pieces

ROWS = {"lengths": (3, 0, 4, 2, 1), "advantages": (1.0, -0.4, 0.0, -1.3, 0.5), "vocabulary": 64}
ON_CHIP = [
    ("on_policy", "auto", "backward", 3, 2),
    ("on_policy", "known", "none", 3, 0),
    ("on_policy", "deferred", "backward", 3, 2),
    ("on_policy", "aligned", "none", 4, 0),
    # rows are projected again, in chunks with other rows, and get new statistics
    ("holes", "two_pass", "backward", 4, 3),
]
"""Terms, schedule, ``skip_inactive``, rows of a chunk, and the number of chunks that get log-probs alone."""


@pytest.mark.parametrize(("terms", "schedule", "skip", "rows", "forward"), ON_CHIP)
def test_rows_are_kept_on_chip(gpu, monkeypatch, terms, schedule, skip, rows, forward):
    """Log-probs alone are computed for rows whose gradient is known to be 0, or is not known yet."""
    for module in (head, pytorch):
        monkeypatch.setattr(module, "MIN_SYNC_WORK", 0.0)
    dtype = torch.float32 if schedule == "two_pass" else NARROW[skip == "none"]
    case = make_case(
        "linear", "packed", terms, dtype=dtype, **ROWS if terms == "on_policy" else {"vocabulary": 64}
    )
    options = {"schedule": schedule, "skip_inactive": skip, "max_chunk_bytes": rows * 64 * 4}
    with gpu:
        got = run(case, ENTRY, gk.GSPO(), "triton", **options)
    assert gpu.kernels["on_chip_row_kernel"]
    assert gpu.kernels["logprobs_forward_kernel"] == forward
    assert not gpu.kernels["logprobs_backward_kernel"]
    assert_equals_oracle(got, case, gk.GSPO())
    if schedule == "known":
        with gpu:
            case = replace(case, frozen=("weight", "bias"))
            frozen = run(case, ENTRY, gk.GSPO(), "triton", schedule="frozen", max_chunk_bytes=3 * 64 * 4)
        assert_equals_oracle(frozen, case, gk.GSPO())


def test_ratios_of_equal_weights_are_1(gpu):
    """The ratio is exactly 1 if ``linear_token_logprobs`` multiplied as many rows at a time. It is within
    1e-6 of 1 otherwise, and with log-probs of a call whose rows stayed on the chip.
    """
    leaves, labels, _, advantages = problem(torch.bfloat16, vocabulary=1040)
    options = {"max_chunk_bytes": 8 * 1040 * 4, "backend": "triton"}
    with gpu:
        old = gk.linear_token_logprobs(*leaves, labels, **options).logprobs.detach()
        known = gk.fused_linear_policy_loss(*leaves, labels, None, advantages, **options)
        for schedule, bound in (("aligned", 0.0), ("two_pass", 0.0), ("deferred", 1e-6)):
            options |= {"schedule": schedule, "skip_inactive": "none"}
            out = gk.fused_linear_policy_loss(*leaves, labels, old, advantages, **options)
            assert max(abs(out.metrics[f"ratio/{end}"] - 1.0) for end in ("min", "max")) <= bound, schedule
    assert gpu.kernels["on_chip_row_kernel"] == 2
    assert (known.logprobs.double() - old).mean(1).abs().max() <= 1e-6


# --- value checks, and batch-invariant matmuls


@pytest.mark.slow
def test_batch_invariant_products_are_a_kernel_of_ours(gpu):
    """No library matmul in either schedule. Chunks split segments, and some rows are ignored."""
    shown = []
    for schedule, rows in (("aligned", 1000), ("two_pass", 90)):
        leaves, labels, old, advantages = problem(torch.bfloat16, length=17)
        advantages[::3] = 0
        options = {"schedule": schedule, "max_chunk_bytes": rows * ROW, "objective": gk.GSPO(0.9, 0.9)}
        with gpu:
            out = gk.fused_linear_policy_loss(
                *leaves, labels, old, advantages, batch_invariant=True, **options
            )
            (out.loss * 0.3).backward()
        shown.append([out.logprobs, *(leaf.grad for leaf in leaves)])
    assert not gpu.products and gpu.kernels["fixed_product_kernel"]
    assert all(torch.equal(got, expected) for got, expected in zip(*shown, strict=True))
    leaves = [leaf.detach().to(torch.float16).requires_grad_() for leaf in leaves]
    with gpu, pytest.raises(ValueError, match="summed in a unit"):
        gk.fused_linear_policy_loss(*leaves, labels, old, advantages, batch_invariant=True)
