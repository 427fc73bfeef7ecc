"""Uses of PyTorch that have no public interface: autograd inside operators, and hints to its compiler."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def constant_when_traced(function: F) -> F:
    """Make the compiler call a function of plain constants instead of tracing it.

    This sets the mark of ``torch.compiler.assume_constant_result`` without calling it: the call would import
    the compiler and Triton, which takes seconds even for users who don't compile. Arguments must be plain
    constants (strings, numbers, classes), which the compiler guards. It would see an object made in compiled
    code without its fields.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def plain_constant(value: Any) -> Any:
    """Return the value; when traced, turn a number that has become a symbol into a guarded constant again."""
    # groupby is traceable, and looks at values and guards them instead of passing symbols on
    (constant,) = [key for key, _ in itertools.groupby([value])]
    return constant


@functools.cache
def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Return whether oneDNN computes products of a 16-bit dtype on this CPU. If it can't, PyTorch's own loops
    do, many times slower.
    """
    known = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return built and bool(getattr(torch.ops.mkldnn, known[dtype])())


@contextlib.contextmanager
def inner_autograd() -> Iterator[None]:
    """Let autograd work inside an operator's implementation.

    A compiled graph calls operators with autograd's dispatch keys excluded, and ``enable_grad`` doesn't bring
    them back. PyTorch has no public way to do this.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradOther, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with (
        torch._C._ForceDispatchKeyGuard(included, excluded),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield


def save_for_backward(ctx: Any, *tensors: Tensor | None) -> None:
    """Save tensors in an autograd context, in whose backward an undefined upstream gradient is None.

    PyTorch refuses to save tensors made under ``inference_mode``, so a copy of these is saved.
    """
    ctx.set_materialize_grads(False)
    if not torch.compiler.is_compiling() and any(x is not None and x.is_inference() for x in tensors):
        if not ctx.next_functions:
            return  # no graph is recorded, so there will be no backward
        tensors = tuple(x.clone() if x is not None and x.is_inference() else x for x in tensors)
    ctx.save_for_backward(*tensors)


def once_differentiable(backward: F) -> F:
    """Decorate an autograd function's backward: it has no gradient where no upstream gradient is defined, and
    no second derivatives.

    PyTorch's decorator of this name notices a second derivative only if an upstream gradient needs a gradient
    itself. In a gradient penalty or a Hessian it is the constant 1, and a term would be missing silently.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *upstream: Tensor | None) -> Any:
        for grad in upstream:  # ``all`` takes several times as long
            if grad is not None:
                break
        else:
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "create_graph: is True, expected False: losses and log-probs of gspo_kernels have first "
                "derivatives only"
            )
        return backward(ctx, *upstream)

    return wrapper  # type: ignore[return-value]


def is_last_backward() -> bool:
    """Return, in a function's backward, whether its saved tensors are freed afterwards and may be changed;
    False where the backward is traced.
    """
    return not (torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph())
