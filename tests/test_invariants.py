"""What holds for every call: outputs, the backward, masked positions without effect, and extreme values."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.core.types import METRICS
from tests.cases import KIND, device_of, for_objective, forward, generator, make_case, run
from tests.judging import assert_equals_oracle

POLICY, *FUSED_ENTRIES = KIND
ROWS, FUSED, LINEAR_ROWS, LINEAR = FUSED_ENTRIES
SHORT = {"lengths": (2, 0, 1, 2), "log_s": (5e-3, 0.0, 0.4, -5e-3), "advantages": (1.0, 1.0, -0.5, -1.0)}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SCHEDULES = ("auto", "aligned", "deferred", "two_pass")


def assert_same_bits(one, other):
    assert one.values().keys() == other.values().keys()
    for name, value in one.values().items():
        assert torch.equal(value, other.values()[name]), name


# --- outputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", [POLICY, *FUSED_ENTRIES])
def test_outputs(entry, dtype):
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    for terms in ("plain", "on_policy", "entropy"):
        case = make_case(KIND[entry], "packed", terms, dtype=dtype)
        leaves, output = forward(case, entry, gk.GSPO())
        assert isinstance(output, gk.LossOutput) and len(output) == 4
        assert output.loss.shape == () and output.loss.dtype == stats and output.loss.requires_grad
        assert (output.entropy is not None) == (terms == "entropy")
        per_token = [output.logprobs, *([output.entropy] if terms == "entropy" else [])]
        for each in per_token:
            assert each.shape == case.labels.shape and not each.requires_grad
            assert each.dtype == (dtype if entry == POLICY else stats)
        assert set(output.metrics) == set(METRICS) | ({"entropy"} if terms == "entropy" else set())
        for metric in output.metrics.values():
            assert metric.shape == () and metric.dtype == stats and metric.isfinite()
            assert not metric.requires_grad
        output.loss.backward()
        for name, leaf in leaves.items():
            assert leaf.grad.dtype == dtype and leaf.grad.shape == leaf.shape, name
    if entry in (ROWS, LINEAR_ROWS):
        for entropy in (False, True):
            terms = {"return_entropy": entropy, "ignore_index": int(case.labels[0])}
            output = getattr(gk, entry)(**leaves, labels=case.labels, **terms)
            assert isinstance(output, gk.TokenLogprobs) and len(output) == 2
            assert (output.entropy is not None) == entropy
            for each in output if entropy else output[:1]:
                assert each.dtype == stats and each.shape == case.labels.shape and each[0] == 0


E = math.exp
COMMON = {"clip_fraction/tokens": 3 / 4, "kl/old": -0.05, "active_fraction": 1 / 3, "ratio/min": E(-0.5)}
BY_HAND = {
    # clip 0.2: the first sequence is over 1.2, the second under 0.8, the third inside
    "GSPO": COMMON | {
        "ratio/mean": (E(0.3) + E(-0.5) + E(0.1)) / 3, "ratio/max": E(0.3),
        "clip_fraction/low": 1 / 3, "clip_fraction/high": 1 / 3,
    },
    # per token; r = exp(0.2) is over 1.2 too
    "GRPO": COMMON | {
        "ratio/mean": (E(0.2) + E(0.4) + E(-0.5) + E(0.1)) / 4, "ratio/max": E(0.4),
        "clip_fraction/low": 1 / 4, "clip_fraction/high": 2 / 4,
    },
    # the sequence's ratio on each of its tokens
    "GSPOToken": COMMON | {
        "ratio/mean": (2 * E(0.3) + E(-0.5) + E(0.1)) / 4, "ratio/max": E(0.3),
        "clip_fraction/low": 1 / 4, "clip_fraction/high": 2 / 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("entry", [POLICY, FUSED, LINEAR])
def test_metrics_by_hand(entry, name, backend):
    """Uniform logits over 4 tokens; three sequences of 2, 1 and 1 counted tokens, and one without."""
    log_ratios = torch.tensor([[0.2, 9.0, 0.4], [-0.5, 9.0, 9.0], [9.0, 0.1, 9.0], [9.0, 9.0, 9.0]])
    inputs = {
        POLICY: {"logprobs": torch.full((4, 3), -math.log(4))},
        FUSED: {"logits": torch.zeros(4, 3, 4)},
        LINEAR: {"hidden": torch.ones(4, 3, 2), "weight": torch.ones(4, 2)},
    }[entry]
    case = replace(
        make_case(KIND[entry]), inputs=inputs, cu_seqlens=None,
        labels=torch.tensor([[0, 1, 2], [3, 0, 0], [1, 1, 1], [0, 0, 0]]),
        loss_mask=torch.tensor([[1, 0, 1], [1, 0, 0], [0, 1, 0], [0, 0, 0]]),
        old_logprobs=-math.log(4) - log_ratios, advantages=torch.tensor([1.0, -1.0, -1.0, 5.0]),
    )  # fmt: skip
    _, output = forward(case, entry, getattr(gk, name)(clip_low=0.2, clip_high=0.2), backend)
    assert tuple(output.metrics) == METRICS
    for key, value in BY_HAND[name].items():
        assert output.metrics[key].item() == pytest.approx(value, rel=1e-6), key
    first = -1.2 if name == "GSPO" else (-1.2 - 1.2) / 2
    assert output.loss.item() == pytest.approx((first + 0.8 + E(0.1)) / 3, rel=1e-6)


# --- the backward


def test_a_second_backward_refuses_a_changed_weight():
    """The first backward has its gradient already; a second one would compute with the new weight."""
    leaves, output = forward(make_case("linear", "packed", "holes"), LINEAR, gk.GSPO())
    output.loss.backward(retain_graph=True)
    with torch.no_grad():
        leaves["weight"].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.loss.backward()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", [ROWS, LINEAR_ROWS, "selected_logprobs", "linear_selected_logprobs"])
def test_log_probs_of_masked_tokens(name, packed, backend):
    """For any value there. A second call, with cached checks, returns the same."""
    rng, device = generator(0), device_of(backend)
    logits, hidden, weight = (torch.randn(*size, generator=rng) for size in ((2, 4, 9), (2, 4, 5), (9, 5)))
    inputs = {"hidden": hidden, "weight": weight} if "linear" in name else {"logits": logits}
    mask = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]], dtype=torch.bool)
    key, counted = ("ids", mask.unsqueeze(-1)) if "selected" in name else ("labels", mask)
    tokens = torch.randint(9, (2, 4, 3), generator=rng) if key == "ids" else torch.tensor([[0, 1, 2, 3]] * 2)
    tokens[1, 1] = -100

    def results(anything, there, loss_mask=None):
        first, *others = inputs
        given = {first: torch.where(mask.unsqueeze(-1), inputs[first], anything)}
        given |= {key: torch.where(counted, tokens, there)}
        given |= {"loss_mask": loss_mask} if loss_mask is not None else {}
        given = {label: value.flatten(0, 1) if packed else value for label, value in given.items()}
        given |= {label: inputs[label] for label in others}
        given = {label: value.to(device) for label, value in given.items()}
        leaves = [given[label].requires_grad_() for label in inputs]
        found = [value for value in getattr(gk, name)(**given, backend=backend) if value is not None]
        return [*found, *torch.autograd.grad([value.sum() for value in found], leaves)]

    expected = results(0.0, -100)
    assert (expected[0].cpu().view(tokens.shape)[~mask] == 0).all()
    for loss_mask in (mask, mask, mask.long(), mask.double()):
        assert all(map(torch.equal, results(torch.nan, 70_000, loss_mask), expected))


@pytest.mark.parametrize("entry", [POLICY, *FUSED_ENTRIES])
def test_without_gradients(entry, backend):
    case = make_case(KIND[entry], "packed", "on_policy", **SHORT)
    expected = forward(case, entry, gk.GSPO(), backend)[1]
    outputs = [forward(replace(case, frozen=tuple(case.inputs)), entry, gk.GSPO(), backend)[1]]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outputs.append(forward(case, entry, gk.GSPO(), backend)[1])
    for other in outputs:
        assert not other.loss.requires_grad
        assert torch.equal(other.loss, expected.loss)
        if expected.logprobs.is_cuda and entry == FUSED:
            # with gradients one launch reads each row once, and sums it up in another order
            torch.testing.assert_close(other.logprobs, expected.logprobs, rtol=1e-6, atol=0)
        else:
            assert torch.equal(other.logprobs, expected.logprobs)
        # active sequences are counted alike with known coefficients and in one launch
        assert other.metrics == expected.metrics


@pytest.mark.parametrize("entry", [LINEAR_ROWS, LINEAR])
def test_autocast_rounds_hidden_states_and_weight(entry, backend):
    case = make_case("linear", "padded", "plain", vocabulary=1009)
    rounded = replace(case, inputs={name: value.bfloat16() for name, value in case.inputs.items()})
    expected = run(rounded, entry, gk.GSPO(), backend)
    # the product stays in fp32: rounding the logits to bf16 would show at once
    assert_equals_oracle(expected, rounded, gk.GSPO())
    mixed = replace(case, inputs={**case.inputs, "hidden": case.inputs["hidden"].bfloat16()})
    for passed in (case, mixed):
        with torch.autocast(device_of(backend).type, dtype=torch.bfloat16):
            got = run(passed, entry, gk.GSPO(), backend)
        assert all(got.grads[name].dtype == value.dtype for name, value in passed.inputs.items())
        grads = {name: grad.bfloat16() for name, grad in got.grads.items()}
        assert_same_bits(replace(got, grads=grads), expected)
        assert all(torch.equal(grad, expected.grads[name].to(grad.dtype)) for name, grad in got.grads.items())


@pytest.mark.parametrize(
    ("entry", "terms", "options"),
    [
        *((entry, terms, {}) for entry in FUSED_ENTRIES for terms in ("plain", "on_policy")),
        *((LINEAR, "plain", {"schedule": name}) for name in (*SCHEDULES[1:], "frozen")),
    ],
)
def test_fp16_with_a_loss_scale(entry, terms, options, backend):
    """fp16 gradients are exact even if coefficients are far below the smallest number of fp16."""
    scale, case = 2.0**20, make_case(KIND[entry], "packed", terms, dtype=torch.float16, **SHORT)
    case = replace(case, terms={"normalizer": 1.0})
    leaves, output = forward(replace(case, terms={"normalizer": scale}), entry, gk.GSPO(), backend, **options)
    (output.loss * scale).backward()
    result = run(case, entry, gk.GSPO(), backend, **options)
    grads = {name: leaves[name].grad.cpu() for name in result.grads}
    assert_equals_oracle(replace(result, grads=grads), case, gk.GSPO())


# --- extreme values


@pytest.mark.parametrize("schedule", ["aligned", "deferred", "frozen", "two_pass"])
@pytest.mark.parametrize("upstream", [1.0, 2.0**16])
def test_an_overflowed_coefficient_makes_no_nan(schedule, upstream, backend):
    """Ratios of exp(500) overflow fp32: gradients are infinite for both signs, and zeros stay zeros."""
    rng, device = generator(9), device_of(backend)
    hidden, weight = (torch.randn(*size, generator=rng).to(device) for size in ((2, 3, 4), (61, 4)))
    hidden[..., 0], weight[:, 1] = 0.0, 0.0
    leaves = hidden.requires_grad_(), weight.requires_grad_(schedule != "frozen")
    terms = torch.zeros(2, 3, dtype=torch.int64), torch.full((2, 3), -500.0), torch.tensor([-1.0, 1.0])
    options = {"objective": gk.GSPO(clip_low=1.0, clip_high=1e300), "schedule": schedule, "backend": backend}
    loss = gk.fused_linear_policy_loss(*leaves, *(each.to(device) for each in terms), **options).loss
    (loss * upstream).backward()
    assert (hidden.grad[..., 1] == 0).all() and hidden.grad[..., [0, 2, 3]].isinf().all()
    if schedule != "frozen":
        assert (weight.grad[:, 0] == 0).all() and not weight.grad.isnan().any()
        assert weight.grad[0, 2:].abs().min() > 1e25


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("weighted", [False, True])
def test_extreme_kl(weighted, estimator):
    for sign in (1, -1):
        logprobs = (torch.tensor([[-1.0, -2.0]]) + min(sign * 1e4, 0.0)).requires_grad_()
        old, reference = logprobs.detach() - sign * 1e4, logprobs.detach() - sign * torch.tensor([[1e4, 0.0]])
        output = gk.policy_loss(
            logprobs, old, torch.tensor([0.0]), ref_logprobs=reference, kl_beta=0.5, kl_estimator=estimator,
            kl_ratio_weighted=weighted,
        )  # fmt: skip
        output.loss.backward()
        assert not output.loss.isnan() and not logprobs.grad.isnan().any()
        if not weighted and (estimator, sign) != ("k3", -1):
            value = {"k1": sign * 1e4, "k2": 5e7, "k3": 1e4 - 1}[estimator]
            assert output.loss.item() == pytest.approx(0.25 * value, rel=1e-6)
            assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("name", ["GSPO", "GSPOToken", "GRPO"])
def test_equality_with_a_bound_is_inside(name):
    objective, advantages = getattr(gk, name)(clip_low=0.5, clip_high=1.0), torch.tensor([1.0, -1.0])
    bounds = torch.tensor([[math.log1p(1.0)], [math.log1p(-0.5)]], dtype=torch.float64)
    for beyond, clipped in ((0.0, False), (1e-12, True)):
        logprobs = torch.zeros(2, 1, dtype=torch.float64, requires_grad=True)
        old = -bounds - beyond * advantages.unsqueeze(1)
        output = gk.policy_loss(logprobs, old, advantages, objective=objective)
        output.loss.backward()
        assert ((logprobs.grad == 0) == clipped).all()
        assert output.metrics["clip_fraction/low"] == output.metrics["clip_fraction/high"] == 0.5 * clipped


# --- a ratio of one


@pytest.mark.parametrize("name", ["GSPO", "GSPOToken", "GRPO"])
@pytest.mark.parametrize(("entry", "layout"), [(FUSED, "padded"), (LINEAR, "packed")])
def test_ratio_is_exactly_one_on_the_identical_path(entry, layout, name, backend):
    case, objective = make_case(KIND[entry], layout, "holes", vocabulary=1009, **SHORT), getattr(gk, name)()
    with torch.no_grad():
        old = forward(case, entry, objective, backend)[1].logprobs.cpu()
    metrics = forward(replace(case, old_logprobs=old), entry, objective, backend)[1].metrics
    assert all(metrics[f"ratio/{which}"].item() == 1.0 for which in ("min", "mean", "max"))
    assert metrics["kl/old"].item() == 0.0 and metrics["clip_fraction/tokens"].item() == 0.0
    # over the same rows: a product of more rows may round differently
    same = replace(case, labels=case.labels.masked_fill(~case.counted, case.ignore_index))
    apart = ROWS if entry == FUSED else LINEAR_ROWS
    assert torch.equal(run(same, apart, objective, backend).logprobs, old)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loss_logprobs_equal_token_logprobs(dtype):
    """C++ only, bit for bit. It sums rows in blocks of 2,048 columns: one, two, or many, the last in part.
    The tokens are one sequence, so that all paths multiply the same rows.
    """
    schedules = {"auto": gk.GSPO(), "two_pass": gk.GSPO(), "deferred": gk.GSPO(), "known": gk.GRPO()}
    for vocabulary in (2048, 4095, 4097, 20001):
        hidden = torch.randn(1, 96, 8).to(dtype).requires_grad_()
        weight = (2 * torch.randn(vocabulary, 8)).to(dtype).requires_grad_()
        labels, one = torch.randint(vocabulary, (1, 96)), torch.ones(1)
        for options in ({}, {"temperature": 0.7}, {"softcap": 5.0}):
            call = (hidden, weight, labels), {"backend": "cpp", **options}
            with torch.no_grad():
                old = gk.linear_token_logprobs(*call[0], **call[1]).logprobs
            assert torch.equal(gk.linear_token_logprobs(*call[0], **call[1]).logprobs, old)
            for schedule, objective in schedules.items():
                how = {"schedule": schedule, "objective": objective}
                out = gk.fused_linear_policy_loss(*call[0], old, one, **call[1], **how)
                assert torch.equal(out.logprobs, old), (vocabulary, options, schedule)
                assert out.metrics["ratio/min"] == out.metrics["ratio/max"] == 1.0


# --- nothing to do


EMPTY = {
    "no sequences": {"layout": "padded", "lengths": (), "padding": 4},
    "no positions": {"layout": "padded", "lengths": (0, 0, 0), "padding": 0},
    "no tokens": {"lengths": (0, 0)},
    "nothing at all": {"lengths": ()},
    "all masked": {"layout": "padded", "lengths": (3, 1)},
    "all masked, packed": {"lengths": (2, 0, 3)},
}


@pytest.mark.parametrize("what", EMPTY)
@pytest.mark.parametrize("entry", [POLICY, FUSED, LINEAR])
def test_nothing_to_do(entry, what, backend):
    case = make_case(KIND[entry], **EMPTY[what])
    nothing = torch.zeros(case.labels.shape, dtype=torch.bool)
    case = replace(case, loss_mask=nothing, advantages=torch.ones(len(EMPTY[what]["lengths"])))
    for name, old in itertools.product(("GSPO", "GSPOToken", "GRPO", "Linear"), (case.old_logprobs, None)):
        objective = getattr(gk, name)()
        here = for_objective(replace(case, old_logprobs=old), objective)
        result = run(here, entry, objective, backend)
        assert result.loss == 0.0 and result.logprobs.shape == case.labels.shape
        assert all((grad == 0).all() for grad in result.grads.values())
        assert all(metric.isfinite() for metric in result.metrics.values()), result.metrics
