"""Calls over hidden states whose product takes exponentials, in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.backends import triton as kernels
from gspo_kernels.backends.dispatch import unavailable_reason
from gspo_kernels.core.types import LogitTransform, RowOptions, Shard
from gspo_kernels.hidden import gradients
from gspo_kernels.hidden.matmul import exponentials, select_matmul
from tests import test_infinities
from tests.cases import generator, make_case, run
from tests.fake_gpu import FakeGpu
from tests.judging import assert_equals_oracle

BF16 = torch.bfloat16
ENTRY = "fused_linear_policy_loss"


@pytest.fixture
def here(monkeypatch):
    """Let the product serve the CPU, where PyTorch lacks products from bf16 to fp32."""
    if (reason := unavailable_reason("triton", torch.device("cpu"))) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(exponentials, "unavailable_on", lambda device: None)
    mm, addmm = torch.mm, torch.addmm

    def wide_mm(a, b, *, out_dtype=None, out=None):
        return mm(a, b, out=out) if out_dtype is None else mm(a.float(), b.float(), out=out)

    def wide_addmm(total, a, b, *, out_dtype=None, out=None):
        return addmm(total, a.float(), b.float(), out=out)

    monkeypatch.setattr(torch, "mm", wide_mm)
    monkeypatch.setattr(torch, "addmm", wide_addmm)


def test_which_calls_are_served(here):
    """Of bf16, with rows that begin at multiples of 16 bytes, and with all columns on this rank."""
    weight, padded = (torch.empty(50, width, dtype=BF16) for width in (16, 24))
    plain = RowOptions(LogitTransform(), -100, "triton")

    def serves(weight=weight, base=None, logits_dtype="float32", invariant=False, whole=False, **changes):
        matmul = select_matmul(weight, None, base, logits_dtype, invariant, plain._replace(**changes), whole)
        return isinstance(matmul, exponentials.ExponentialMatmul)

    assert serves() and serves(padded[:, :16])
    others = [weight.float(), weight.half(), torch.empty(50, 17, dtype=BF16)[:, :16], padded[:, 1:17]]
    others.append(weight[:, :12])  # hidden states of this width begin elsewhere
    kept = LogitTransform(kept=torch.zeros(1, 1, 2, dtype=torch.int32))
    options = [{"logits_dtype": "input"}, {"invariant": True}, {"whole": True}, {"transform": kept}]
    options += [{"shard": Shard("group")}, {"backend": "reference"}]
    assert not any(map(serves, others)) and not any(serves(**each) for each in options)
    assert not serves(torch.empty(50, 4), base=weight)


@pytest.mark.parametrize(
    ("schedule", "terms", "logit_options"),
    [
        ("aligned", "plain", "default"),
        ("deferred", "plain", "together"),
        ("two_pass", "loss_mask", "temperature per sequence"),
        ("known", "on_policy", "logit_scale"),
        ("frozen", "loss_mask", "together"),
        ("auto", "loss_mask+k3+entropy", "softcap"),
        ("two_pass", "entropy_tensor+token_weights", "together"),
        ("auto", "k1+normalizer", "default"),
    ],
)
def test_losses_equal_the_oracle(here, schedule, terms, logit_options):
    case = make_case("linear", "packed", terms, dtype=BF16, logit_options=logit_options)
    options = {"schedule": schedule, "max_chunk_bytes": 4 * 2 * 64}
    for skip in ("backward", "none"):
        got = run(case, ENTRY, gk.GSPO(), "triton", skip_inactive=skip, **options)
        assert_equals_oracle(got, case, gk.GSPO())


@pytest.mark.parametrize("terms", ["holes", "holes+entropy"])
@pytest.mark.parametrize("logit_options", ["default", "together"])
def test_two_pass_by_blocks_of_columns(here, monkeypatch, terms, logit_options):
    """No pass over logits follows; skipped rows and hidden states of masked ones may be anything."""
    monkeypatch.setattr(gradients, "BLOCK_COLUMNS", {"cpu": 24})
    monkeypatch.setattr(kernels, "logprobs_backward", None)
    advantages = (0.0, -0.4, 1.0, 0.0, -0.5, 0.0)
    case = make_case(
        "linear", "packed", terms, dtype=BF16, logit_options=logit_options, advantages=advantages
    )
    options = {"schedule": "two_pass", "max_chunk_bytes": 6 * 2 * 64}
    result = run(case, ENTRY, gk.GSPO(), "triton", **options)
    assert_equals_oracle(result, case, gk.GSPO())
    poison = torch.where(case.counted.unsqueeze(-1), case.inputs["hidden"], torch.nan)
    results = [
        run(each, ENTRY, gk.GSPO(), "triton", skip_inactive="none", **options)
        for each in (case, replace(case, inputs=case.inputs | {"hidden": poison}))
    ]
    assert all(map(torch.equal, *(each.grads.values() for each in results)))


@pytest.mark.parametrize("columns", [16384, 96])
def test_rounding_at_labels_is_put_back(here, monkeypatch, columns):
    """It would show in dBias where the shares of two tokens with one label nearly cancel, and in dHidden
    where the rows of the weight have much in common.
    """
    monkeypatch.setattr(gradients, "BLOCK_COLUMNS", {"cpu": columns})
    errors, sizes, H, V = [], [], 16, 250
    for seed in range(8):
        rng = generator(seed)
        hidden = 0.1 * torch.randn(1, 1, H, generator=rng) * torch.tensor([[[1.0], [1.25]]])
        weight, bias = 16 + torch.randn(V, H, generator=rng), torch.zeros(V)
        hidden[..., -1] -= hidden.sum(-1)  # what the rows have in common is in no logit, up to rounding
        given = [each.to(BF16) for each in (hidden, weight, bias)]
        labels = torch.randint(V, (1, 1), generator=rng).expand(1, 2)
        exact, ours = ([each.to(dtype).requires_grad_() for each in given] for dtype in (torch.float64, BF16))
        (exact[0] @ exact[1].t() + exact[2]).log_softmax(-1)[0, :, labels[0, 0]].diff().backward()
        gk.linear_token_logprobs(
            *ours[:2], labels, bias=ours[2], backend="triton", max_chunk_bytes=2 * 2 * 256
        ).logprobs[0].diff().backward()
        grads = [(one[0].grad.double(), one[2].grad[labels[0, 0]].double()) for one in (ours, exact)]
        errors.append([(a - b).square().mean() for a, b in zip(*grads, strict=True)])
        sizes.append([torch.tensor(16.0).square(), grads[1][1].square()])
    hidden, bias = (torch.tensor(errors).sum(0) / torch.tensor(sizes).sum(0)).sqrt()
    assert hidden < 2.0**-11 and bias < 2.0**-6, (hidden, bias)


@pytest.mark.parametrize("terms", ["loss_mask", "entropy"])
def test_log_probs_and_their_gradient_equal_the_oracle(here, terms):
    case = make_case("linear", "padded", terms, dtype=BF16, logit_options="temperature per sequence")
    got = run(case, "linear_token_logprobs", gk.GSPO(), "triton")
    assert_equals_oracle(got, case, gk.GSPO())


@pytest.mark.parametrize("entry", ["linear_token_logprobs", "fused_linear_policy_loss"])
@pytest.mark.parametrize("line", test_infinities.MAKERS)
def test_rows_with_infinities_are_as_documented(here, line, entry):
    for maker in test_infinities.MAKERS[line][::3]:
        row = test_infinities.make_row(*maker, 37, BF16)
        test_infinities.assert_row_of_a_product(row, entry, BF16, "triton")


def drawn(B=4, T=12, V=90, H=32, seed=0):
    rng = generator(seed)
    hidden, weight = torch.randn(B, T, H, generator=rng), 0.5 * torch.randn(V, H, generator=rng)
    labels = torch.randint(0, V, (B, T), generator=rng)
    labels[0, 5:] = -100
    return hidden.to(BF16), weight.to(BF16), labels, torch.tensor([1.0, -1.0, 0.5, 2.0])


def test_ratios_of_equal_weights_are_exactly_1(here):
    """For all schedules, with or without entropy, entropy bonus and KL."""
    hidden, weight, labels, advantages = drawn()
    old = gk.linear_token_logprobs(hidden, weight, labels, backend="triton").logprobs
    with_entropy = gk.linear_token_logprobs(hidden, weight, labels, backend="triton", return_entropy=True)
    assert torch.equal(old, with_entropy.logprobs)
    leaf = weight.clone().requires_grad_()
    calls = [
        *({"schedule": name} for name in ("aligned", "deferred", "two_pass")),
        {"max_chunk_bytes": 7 * 2 * 96},
        {"return_entropy": True},
        {"entropy_coef": 0.01},
        {"ref_logprobs": old, "kl_beta": 0.1},
    ]
    for options in calls:
        out = gk.fused_linear_policy_loss(hidden, leaf, labels, old, advantages, backend="triton", **options)
        assert out.metrics["ratio/min"] == out.metrics["ratio/max"] == 1, options
        assert torch.equal(out.logprobs, old), options
    frozen = hidden.clone().requires_grad_()
    out = gk.fused_linear_policy_loss(frozen, weight, labels, old, advantages, backend="triton")
    assert out.metrics["ratio/min"] == out.metrics["ratio/max"] == 1


@pytest.mark.parametrize("schedule", ["aligned", "two_pass", "frozen"])
def test_peak_memory_is_what_the_plan_says(schedule, monkeypatch):
    """Rows take two bytes for each logit. With a frozen head, each chunk, a quarter of the rows, is projected
    once, and its exponentials are multiplied once.
    """
    monkeypatch.setattr(exponentials, "unavailable_on", lambda device: None)
    hidden, weight, labels, advantages = drawn(T=16, V=2048, H=128)
    leaves = [hidden.requires_grad_(), weight.requires_grad_(schedule != "frozen")]
    options = {"schedule": schedule, "skip_inactive": "none", "max_chunk_bytes": 2 * 2048 * 16}
    gpu = FakeGpu(monkeypatch)
    with gpu:
        plan = gk.explain_schedule(*leaves, labels, None, advantages, **options)
        gk.fused_linear_policy_loss(*leaves, labels, None, advantages, **options).loss.backward()
    assert "exponentials_kernel" in gpu.kernels and hidden.grad.any()
    if schedule == "frozen":
        assert len(gpu.products) == 4 and gpu.peak < options["max_chunk_bytes"] + weight.nbytes / 8
    else:
        assert gpu.peak == pytest.approx(plan.peak_bytes, rel=0.02)


@pytest.mark.parametrize("size", [1.0, 40.0])
def test_recomputed_rows_need_no_sync(monkeypatch, size):
    """As many syncs as with logits, even if labels are far from the other logits."""
    hidden, weight, labels, advantages = drawn()
    looks, results = [], []
    for reason in (None, "not now"):
        leaves = [(hidden * size).requires_grad_(), weight.clone().requires_grad_()]
        gpu = FakeGpu(monkeypatch)
        with monkeypatch.context() as patch, gpu:
            patch.setattr(exponentials, "unavailable_on", lambda device, reason=reason: reason)
            out = gk.fused_linear_policy_loss(
                *leaves, labels, None, advantages, backend="triton", max_chunk_bytes=2**20
            )
            out.loss.backward()
        looks.append(gpu.looks)
        results.append([out.logprobs, *(leaf.grad for leaf in leaves)])
        assert ("exponentials_kernel" in gpu.kernels) == (reason is None)
    assert looks[0] == looks[1] and (results[0][0].min() < -100) == (size > 1)
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() <= 2.0**-6 * theirs.abs().max()
