"""``torch.set_default_dtype`` and ``set_default_device``, which many scripts call, change no result, and
devices without fp64, such as Apple's MPS, are served: here any fp64 tensor raises an error.
"""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gspo_kernels as gk
from gspo_kernels.backends import dispatch as backends
from gspo_kernels.core import exact
from gspo_kernels.core import operators as library
from tests.cases import KIND, forward, generator, make_case, run
from tests.every_call import APART, CALLS, WITHOUT_GRADIENT, prepare
from tests.judging import assert_equals_oracle
from tests.objectives.sample_batches import EVERY, NO_DEFAULTS, coefficients, examples, make_batch


def results(function, leaves):
    """Return what a function returns, and the gradients."""
    found = function(*leaves)
    grads = torch.autograd.grad([value.sum() for value in found if value.requires_grad], leaves)
    return [value.detach() for value in found] + list(grads)


# --- defaults


@contextmanager
def other_defaults():
    """Set bf16 as the default dtype, and a default device on which nothing can be computed."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)


def assert_unchanged(call):
    expected = call()
    with other_defaults():
        found = call()
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.device == other.device
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS | APART)
def test_defaults_do_not_change_calls(name, dtype, backend):
    function, leaves, _ = prepare((CALLS | APART)[name], backend, dtype=dtype)
    assert_unchanged(partial(results, function, leaves))
    if name.endswith(("aligned", "two_pass")) and backend != "reference":
        with gk.set_batch_invariant(True):
            assert_unchanged(partial(results, function, leaves))


@pytest.mark.parametrize("entry", KIND)
def test_defaults_do_not_change_metrics(entry, backend):
    case = make_case(KIND[entry], "padded", "all", lengths=(3, 1), vocabulary=21)

    def call():
        output = forward(case, entry, gk.GSPO(), backend)[1]
        return [output.loss.detach(), output.logprobs.detach(), *output.metrics.values()]

    assert_unchanged(call)


def test_defaults_do_not_change_other_functions():
    for call in WITHOUT_GRADIENT.values():
        assert_unchanged(lambda call=call: [call()])
    for objective in examples():
        batch = make_batch(objective)
        assert_unchanged(lambda batch=batch, each=objective: [coefficients(batch, each)])


# --- without fp64


class _Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float64:
                raise TypeError(f"{func}: fp64 on a device that has none")
        if "segment_reduce" in str(func):
            raise NotImplementedError("MPS has no segment_reduce")
        return result


@pytest.fixture
def without_fp64(monkeypatch):
    monkeypatch.setattr(exact, "WITHOUT_FP64", ("cpu",))
    monkeypatch.setattr(backends, "automatic", lambda device: "reference")
    monkeypatch.setattr("gspo_kernels.arguments.cache._DECISIONS", {})
    # an operator runs as plain calls, which are seen, instead of as one opaque call
    monkeypatch.setattr(library, "can_bypass_dispatcher", lambda _: True)
    return _Refusing()


@pytest.mark.parametrize("name", CALLS)
def test_calls_without_fp64(without_fp64, name):
    """They are close to those in fp64."""
    function, leaves, _ = prepare(CALLS[name], "reference", dtype=torch.float32)
    with without_fp64:
        got = results(function, leaves)
    for value, want in zip(got, results(*prepare(CALLS[name], "reference")[:2]), strict=True):
        torch.testing.assert_close(value.double(), want.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", ["known", "aligned", "deferred", "two_pass", "frozen"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_schedules_without_fp64(without_fp64, layout, schedule):
    case = make_case("linear", layout, "on_policy" if schedule == "known" else "holes")
    with without_fp64:
        got = run(case, "fused_linear_policy_loss", gk.GSPO(), "reference", schedule=schedule)
    assert_equals_oracle(got, case, gk.GSPO())


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_other_functions_without_fp64(without_fp64, name):
    plain = WITHOUT_GRADIENT[name]()
    with without_fp64:
        torch.testing.assert_close(WITHOUT_GRADIENT[name](), plain)


@pytest.mark.parametrize("name", EVERY)
def test_objectives_without_fp64(without_fp64, name):
    """Half of the batches are packed."""
    objective = EVERY[name](**({"aggregation_constant": 8.0} if name in NO_DEFAULTS else {}))
    batch = make_batch(objective)
    batch = batch.packed() if len(name) % 2 else batch
    here = batch.each(lambda x: x.float() if x.is_floating_point() else x)
    there = here.each(lambda x: x.double() if x.is_floating_point() else x)

    def computed(batch):
        leaf = batch.logprobs.clone().requires_grad_()
        return results(lambda leaf: [batch.call(gk.policy_loss, objective, logprobs=leaf).loss], [leaf])

    with without_fp64:
        got = computed(here)
    for value, want in zip(got, computed(there), strict=True):
        torch.testing.assert_close(value.double(), want, rtol=2e-4, atol=1e-6)


def test_compensated_sums():
    """Errors are RMS over many sums of 16,385 tokens, against fp64 and relative to the mean size of a sum."""
    values = torch.randn(200, 16_385, generator=generator(0))
    true = values.double().sum(-1)
    plain, compensated, rounded = (
        float((sums.double() - true).square().mean().sqrt() / true.abs().mean())
        for sums in (values.sum(-1), exact.compensated_sum(values), true.float())
    )
    assert compensated < 1.01 * rounded < plain / 3, (plain, compensated, rounded)
