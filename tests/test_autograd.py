"""What PyTorch's autograd expects: gradcheck with its defaults, repeated passes, frozen inputs, undefined
gradients, errors for second derivatives, and arguments made under ``inference_mode``.
"""

import pytest
import torch
from torch.autograd import gradcheck
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import gspo_kernels as gk
from tests.every_call import APART, CALLS, INPLACE, prepare
from tests.integrations.tiny_models import largest_allocation


def grads_of(found, leaves, **options):
    return torch.autograd.grad([value.sum() for value in found], leaves, **options)


@pytest.mark.parametrize("name", CALLS)
def test_gradcheck(name, backend):
    """Of several outputs, each has its own gradients while those of the others are undefined."""
    function, leaves, found = prepare(CALLS[name], backend)
    assert all(grad.any() for grad in grads_of(found, leaves))
    # one direction in place of every element, except where most users are without a GPU
    assert gradcheck(function, leaves, fast_mode=backend != "cpp")


@pytest.mark.parametrize("name", CALLS | APART)
def test_backward_passes(name, backend):
    """Two passes and two calls have the same bits, even if the first gradients are overwritten. No argument
    changes.
    """
    arguments = []
    function, leaves, found = prepare(
        (CALLS | APART)[name], backend, lambda value: arguments.append(value) or value, torch.float32
    )
    arguments += leaves
    before = [(value.detach().clone(), value._version) for value in arguments]
    total = 3.0 * sum(value.sum() for value in found)
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    kept = [grad.clone() for grad in first]
    for grad in first:
        grad.fill_(7.0)
    assert all(map(torch.equal, torch.autograd.grad(total, leaves), kept))
    with pytest.raises(RuntimeError, match=r"second time|freed"):
        torch.autograd.grad(total, leaves)
    again = [value for value in function(*leaves) if value.requires_grad]
    assert all(map(torch.equal, again, found))
    plain = [3.0 * grad for grad in grads_of(again, leaves, retain_graph=True)]
    torch.testing.assert_close(plain, kept)
    assert all(map(torch.equal, torch.autograd.grad(3.0 * sum(value.sum() for value in again), leaves), kept))
    for value, (content, version) in zip(arguments, before, strict=True):
        assert torch.equal(value, content) and value._version == version


@pytest.mark.parametrize("name", [name for name in CALLS if "linear" in name and "alone" not in name])
def test_frozen_inputs(name):
    """The others have the same gradients."""
    function, leaves, found = prepare(CALLS[name])
    whole, some = grads_of(found, leaves), range(len(leaves))
    for trained in (*([i] for i in some), *([j for j in some if j != i] for i in some)):
        if not trained:
            continue
        given = [leaf if i in trained else leaf.detach() for i, leaf in enumerate(leaves)]
        got = grads_of([x for x in function(*given) if x.requires_grad], [leaves[i] for i in trained])
        torch.testing.assert_close(got, tuple(whole[i] for i in trained), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", [name for name in CALLS if "logprobs" in name])
def test_upstream_gradients_of_any_strides(name, backend):
    _, leaves, found = prepare(CALLS[name], backend)
    for value in found:
        ramp = torch.arange(1.0, 1 + value.numel(), device=value.device).view(value.shape).to(value.dtype)
        for upstream in (ramp[:1, :1].expand_as(value), ramp.transpose(0, 1)):
            one, other = (
                torch.autograd.grad(value, leaves, grad, retain_graph=True)
                for grad in (upstream, upstream.contiguous())
            )
            assert all(map(torch.equal, one, other))


# --- gradients in the memory of logits


TOLERANCES = {torch.float64: 1e-14, torch.float32: 3e-6, torch.bfloat16: 2.0**-8}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", INPLACE)
def test_inplace_backward(name, dtype, backend):
    """It equals the other call in fp64."""
    _, (leaf,), found = prepare(APART[name], backend)
    (expected,) = grads_of(found, leaf)
    function, (leaf,), _ = prepare(INPLACE[name], backend, dtype=dtype)
    logits = leaf * 1.0  # a leaf's gradient never shares its memory
    found = [value for value in function(logits) if value.requires_grad]
    (grad,) = grads_of(found, leaf, retain_graph=True)
    assert (grad - expected).norm() <= TOLERANCES[dtype] * expected.norm()
    assert torch.equal(logits, grad), "the gradient was not written over the logits"
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation"):
        grads_of(found, leaf)


@pytest.mark.parametrize("name", INPLACE)
def test_undefined_gradients_keep_logits(name, backend):
    _, leaves, found = prepare(INPLACE[name], backend)
    undefined = [torch._C._functions.UndefinedGrad()(value).sum() for value in found]
    assert torch.autograd.grad(undefined, leaves, allow_unused=True, retain_graph=True) == (None,)
    # the logits are those of the forward still: a second backward could not use others
    assert grads_of(found, leaves)[0].any()


HOOKS = {
    "on the CPU": save_on_cpu,
    "the tensor itself": lambda: saved_tensors_hooks(lambda x: x, lambda x: x),
    "a copy": lambda: saved_tensors_hooks(torch.clone, lambda x: x),
    "a copy each time": lambda: saved_tensors_hooks(lambda x: x, torch.clone),
}


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("name", INPLACE)
def test_overwritten_logits_under_hooks(name, hooks):
    """Hooks hide from autograd who reads what the first backward overwrites; none may read a gradient."""
    function, (leaf,), found = prepare(INPLACE[name])
    (expected,) = grads_of(found, leaf)
    logits = leaf * 1.0
    with HOOKS[hooks]():  # two calls share the logits
        found = [value for _ in range(2) for value in function(logits) if value.requires_grad]
    for passes in range(2):
        try:
            (grad,) = grads_of(found, leaf, retain_graph=True)
        except RuntimeError as error:
            assert passes and "inplace_backward" in str(error)
        else:
            assert (grad - 2 * expected).abs().max() < 1e-14


@pytest.mark.parametrize("name", CALLS | INPLACE)
def test_second_derivatives_are_refused(name):
    _, leaves, found = prepare((CALLS | INPLACE)[name])
    with pytest.raises(NotImplementedError, match=r"create_graph: got True, expected False"):
        grads_of(found, leaves, create_graph=True)


# --- inference mode


def inference(value):
    with torch.inference_mode():
        return value.clone()


@pytest.mark.parametrize("name", CALLS)
def test_arguments_may_come_from_inference_mode(name):
    """So may the first input of several that have gradients otherwise."""
    grads = []
    for constant in (torch.clone, inference):
        function, leaves, found = prepare(CALLS[name], constant=constant)
        grads.append(grads_of(found, leaves))
        if len(leaves) > 1:
            first = constant(leaves.pop(0).detach())
            found = [value for value in function(first, *leaves) if value.requires_grad]
            grads[-1] += grads_of(found, leaves)
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("name", CALLS)
def test_forward_and_backward_inside_inference_mode(name):
    function, leaves, found = prepare(CALLS[name])
    sums = [value.sum() for value in found]
    expected = torch.autograd.grad(sums, leaves, retain_graph=True)
    with torch.inference_mode():
        grads = torch.autograd.grad(sums, leaves)
        inside, leaves = CALLS[name]("auto", torch.clone)
        values = inside(*(leaf.clone() for leaf in leaves))
    assert all(map(torch.allclose, grads, expected))
    assert all(torch.equal(one, other) for one, other in zip(values, function(*leaves), strict=True))


def test_inference_log_probs_are_not_copied():
    hidden, labels = inference(torch.randn(1, 512, 64)), torch.zeros(1, 512, dtype=torch.int64)
    weight = torch.randn(7, 64).requires_grad_()
    with torch.no_grad():
        allocated = largest_allocation(lambda: gk.linear_token_logprobs(hidden, weight, labels))
    assert allocated < hidden.nbytes
