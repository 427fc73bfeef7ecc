"""The backward pass, as trainers use it."""

from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from tests.cases import FUSED_ENTRIES, KIND, device_of, generator, make_case, run
from tests.invariants.common import ENTRIES, SHORT, assert_same_bits, forward, leaves_of, on_device
from tests.judging import assert_equals_oracle


@pytest.mark.parametrize("terms", ["plain", "on_policy"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_two_backward_passes(entry, terms, backend):
    case = make_case(KIND[entry], "packed", terms, **SHORT)
    leaves, output = forward(case, entry, gk.GSPO(), backend)
    once = torch.autograd.grad(output.loss, list(leaves.values()), retain_graph=True)
    kept = [grad.cpu().clone() for grad in once]
    # what the first pass handed out belongs to the caller, who may write to it
    for grad in once:
        grad.fill_(7.0)
    twice = [grad.cpu() for grad in torch.autograd.grad(output.loss, list(leaves.values()))]
    result = run(case, entry, gk.GSPO(), backend)
    # not the same bits: on-policy, the second pass has to compute anew what the first one gave away
    for grads in (kept, twice):
        assert_equals_oracle(replace(result, grads=dict(zip(leaves, grads, strict=True))), case, gk.GSPO())
    with pytest.raises(RuntimeError, match=r"second time|freed"):
        output.loss.backward()


@pytest.mark.parametrize("terms", ["plain", "on_policy"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_upstream_gradient_of_three(entry, terms, backend):
    case = make_case(KIND[entry], "packed", terms, **SHORT)
    leaves, output = forward(case, entry, gk.GRPO(), backend)
    (output.loss * 3.0).backward()
    thirds = {name: leaf.grad.cpu() / 3.0 for name, leaf in leaves.items()}
    result = run(case, entry, gk.GRPO(), backend)
    assert_equals_oracle(replace(result, grads=thirds), case, gk.GRPO())


def upstreams(logprobs):
    """Ways in which a gradient reaches log-probs, each with the dense gradient that it amounts to."""
    rows, columns = logprobs.shape
    ramp = torch.arange(1.0, rows * columns + 1, device=logprobs.device).reshape(columns, rows)
    inner = torch.zeros(rows, columns, device=logprobs.device)
    inner[:, 1:] = 1.0
    every_other = torch.zeros(rows, columns, device=logprobs.device)
    every_other[::2] = 2.0
    return {
        "sum (stride 0)": (logprobs.sum(), torch.ones(rows, columns)),
        "mean (stride 0)": (logprobs.mean(), torch.full((rows, columns), 1.0 / (rows * columns))),
        "transposed": ((logprobs.t() * ramp).sum(), ramp.t()),
        "slice": (logprobs[:, 1:].sum(), inner),
        "strided slice": (2.0 * logprobs[::2].sum(), every_other),
        "expanded": (logprobs.expand(3, rows, columns).sum(), torch.full((rows, columns), 3.0)),
    }


@pytest.mark.parametrize("kind", ["logits", "linear"])
def test_upstream_gradients_of_any_strides(kind, backend):
    entry = "token_logprobs" if kind == "logits" else "linear_token_logprobs"
    case = make_case(kind, "padded", "plain", padding=0, lengths=(2, 1))
    for name in upstreams(torch.zeros(2, 2)):
        gradients = []
        for dense in (False, True):
            leaves = leaves_of(case, backend)
            moved = on_device(backend)
            if kind == "logits":
                output = gk.token_logprobs(leaves["logits"], moved(case.labels), backend=backend)
            else:
                output = gk.linear_token_logprobs(
                    leaves["hidden"],
                    leaves["weight"],
                    moved(case.labels),
                    bias=leaves["bias"],
                    backend=backend,
                )
            value, upstream = upstreams(output.logprobs)[name]
            if dense:
                output.logprobs.backward(upstream.contiguous().to(output.logprobs.device))
            else:
                value.backward()
            gradients.append({key: leaf.grad for key, leaf in leaves.items()})
        for key, grad in gradients[0].items():
            assert torch.equal(grad, gradients[1][key]), (entry, name, key)


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"], indirect=True)
def test_only_the_entropy_is_used(backend):
    device = device_of(backend)
    leaf = torch.randn(2, 3, 61, generator=generator(0)).to(device).requires_grad_()
    labels = torch.zeros(2, 3, dtype=torch.int64, device=device)
    gk.token_logprobs(leaf, labels, return_entropy=True, backend=backend).entropy.sum().backward()
    fp64 = leaf.detach().cpu().double().requires_grad_()
    logp = torch.log_softmax(fp64, -1)
    (-(logp.exp() * logp).sum()).backward()
    assert torch.allclose(leaf.grad.cpu().double(), fp64.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("schedule", ["known", "aligned", "two_pass"])
@pytest.mark.parametrize("trained", [("hidden",), ("weight",), ("bias",), ("hidden", "bias")])
def test_frozen_inputs(trained, schedule, backend):
    case = make_case("linear", "packed", "kl_tensor", **SHORT)
    entry, objective = "fused_linear_policy_loss", gk.GRPO()
    leaves = {name: leaf.requires_grad_(name in trained) for name, leaf in leaves_of(case, backend).items()}
    _, output = forward(case, entry, objective, backend, leaves, schedule=schedule)
    output.loss.backward()
    whole = run(case, entry, objective, backend, schedule=schedule)
    assert torch.equal(output.loss.detach().cpu(), whole.loss)
    for name, leaf in leaves.items():
        if name in trained:
            assert torch.equal(leaf.grad.cpu(), whole.grads[name])
        else:
            assert leaf.grad is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("entry", ENTRIES)
def test_without_gradients(entry, mode, backend):
    case = make_case(KIND[entry], "packed", "on_policy", **SHORT)
    expected = forward(case, entry, gk.GSPO(), backend)[1]
    with mode():
        output = forward(case, entry, gk.GSPO(), backend)[1]
    frozen = {name: leaf.detach() for name, leaf in leaves_of(case, backend).items()}
    detached = forward(case, entry, gk.GSPO(), backend, frozen)[1]
    for other in (output, detached):
        assert not other.loss.requires_grad
        assert torch.equal(other.loss, expected.loss) and torch.equal(other.logprobs, expected.logprobs)
        for key, metric in other.metrics.items():
            # known coefficients and one launch count what is active the same way
            assert torch.equal(metric, expected.metrics[key]), key


@pytest.mark.parametrize("entry", ["linear_token_logprobs", "fused_linear_policy_loss"])
def test_autocast(entry, backend):
    case = make_case("linear", "padded", "plain", vocabulary=1009)
    rounded = replace(case, inputs={name: value.bfloat16() for name, value in case.inputs.items()})
    device = device_of(backend)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = run(case, entry, gk.GSPO(), backend)
    expected = run(rounded, entry, gk.GSPO(), backend)
    assert got.loss.dtype == torch.float32
    assert torch.equal(got.logprobs, expected.logprobs)
    for name, grad in got.grads.items():
        assert grad.dtype == torch.float32
        assert torch.equal(grad, expected.grads[name].float()), name
    # the product stays in fp32: rounding the logits to bf16 would show at once
    assert_equals_oracle(expected, rounded, gk.GSPO())


def test_autocast_takes_hidden_states_of_the_other_dtype():
    case = make_case("linear", "padded", "plain")
    mixed = replace(case, inputs={**case.inputs, "hidden": case.inputs["hidden"].bfloat16()})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = run(mixed, "fused_linear_policy_loss", gk.GSPO())
    assert result.grads["hidden"].dtype == torch.bfloat16
    assert result.grads["weight"].dtype == torch.float32


@pytest.mark.parametrize("entry", ["fused_policy_loss", "token_logprobs"])
def test_autocast_leaves_given_logits_alone(entry):
    case = make_case("logits", "padded", "plain")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(case, entry, gk.GSPO())
    assert_same_bits(got, run(case, entry, gk.GSPO()))


@pytest.mark.parametrize("entry", FUSED_ENTRIES)
def test_fp16_with_a_loss_scale(entry, backend):
    case = make_case(KIND[entry], "packed", "plain", dtype=torch.float16, vocabulary=1009, **SHORT)
    # a normalizer such that the scaled gradients fit fp16
    case = replace(case, terms={"normalizer": 200.0})
    scale = 65536.0
    leaves, output = forward(case, entry, gk.GSPO(), backend)
    (output.loss * scale).backward()
    unscaled = run(case, entry, gk.GSPO(), backend)
    # small gradients keep digits that the unscaled ones have lost to fp16's subnormals
    fp32 = replace(case, inputs={name: value.float() for name, value in case.inputs.items()})
    exact = run(fp32, entry, gk.GSPO(), backend)
    for name, leaf in leaves.items():
        grad = leaf.grad.cpu().float() / scale
        assert grad.isfinite().all()
        reference = exact.grads[name]
        allowed = torch.finfo(torch.float16).eps * float(reference.abs().max())
        assert float((grad - reference).abs().max()) <= allowed, name
        assert (grad != 0).sum() >= (unscaled.grads[name] != 0).sum()
