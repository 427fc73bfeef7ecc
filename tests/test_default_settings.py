"""``torch.set_default_dtype`` and ``set_default_device``, which many scripts call, change no result."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch

import gspo_kernels as gk
from tests.every_call import CALLS, WITHOUT_GRADIENT, prepare
from tests.objectives.sample_batches import coefficients, examples, make_batch

SETTINGS = pytest.mark.parametrize("setting", [torch.bfloat16, torch.device("meta")], ids=str)


@contextmanager
def default(setting):
    """Set the default dtype or device. On "meta" nothing can be computed, so no tensor may land there."""
    dtype = torch.get_default_dtype()
    if isinstance(setting, torch.dtype):
        torch.set_default_dtype(setting)
    else:
        torch.set_default_device(setting)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)


def assert_unchanged(call, setting):
    expected = call()
    with default(setting):
        results = call()
    for one, other in zip(results, expected, strict=True):
        assert one.dtype == other.dtype and one.device == other.device
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@SETTINGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_calls_with_gradients(name, dtype, setting, backend):
    function, leaves, _ = prepare(CALLS[name], backend, dtype=dtype)

    def call():
        found = function(*leaves)
        sums = [value.sum() for value in found if value.requires_grad]
        return [value.detach() for value in found] + list(torch.autograd.grad(sums, leaves))

    assert_unchanged(call, setting)
    if name.endswith(("aligned", "two_pass")) and backend != "reference":
        with gk.set_batch_invariant(True):
            assert_unchanged(call, setting)


@SETTINGS
def test_other_functions(setting):
    for call in WITHOUT_GRADIENT.values():
        assert_unchanged(lambda call=call: [call()], setting)
    for objective in examples():
        assert_unchanged(partial(map, coefficients, [make_batch(objective)], [objective]), setting)
