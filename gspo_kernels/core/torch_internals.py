"""Uses of PyTorch's private interfaces: autograd inside operators, and hints to its compiler."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

F = TypeVar("F", bound=Callable[..., Any])
PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))
"""Argument types that are not tensor subclasses such as DTensor."""
_transformed = torch._C._are_functorch_transforms_active
_apply: Any = torch._C._FunctionBase.__dict__["apply"]


def constant_when_traced(function: F) -> F:
    """Make the compiler call a function of plain constants instead of tracing it.

    This is ``torch.compiler.assume_constant_result`` without its import of the compiler and Triton, which
    takes seconds. Arguments must be plain constants (strings, numbers, classes), which the compiler guards.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def plain_constant(value: Any) -> Any:
    """Return the value; when traced, specialize a symbolic number to a guarded constant."""
    # groupby is traceable and specializes
    (constant,) = [key for key, _ in itertools.groupby([value])]
    return constant


@functools.cache
def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Return whether oneDNN supports matmuls of a 16-bit dtype on this CPU; the fallback is far slower."""
    known = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    built = torch.backends.mkldnn.is_available()
    return built and bool(getattr(torch.ops.mkldnn, known[dtype])())


@contextlib.contextmanager
def inner_autograd() -> Iterator[None]:
    """Enable autograd inside an operator's implementation.

    Compiled graphs call operators with autograd's dispatch keys excluded, which ``enable_grad`` doesn't undo.
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


def constant_of(tensor: Tensor) -> Tensor:
    """Return a tensor detached, for ``inner_autograd``; copy an inference tensor, which graphs can't use."""
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def tensors_to_save(ctx: Any, tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return tensors for ``ctx.save_for_backward``; copies of inference tensors, which PyTorch can't save, or
    nothing if no graph is recorded.
    """
    for tensor in () if is_compiling() else tensors:
        if tensor is not None and tensor.is_inference():
            saves = tensors if ctx.next_functions else ()
            return [x.clone() if x is not None and x.is_inference() else x for x in saves]
    return tensors


def refuse_second_derivatives() -> None:
    """Raise an error in a backward with ``create_graph``, unless it is traced.

    ``once_differentiable`` raises only if the upstream gradient requires grad. In a gradient penalty or a
    Hessian it is the constant 1, and a term would be silently missing.
    """
    if not is_compiling():
        raise NotImplementedError(
            "create_graph: got True, expected False: losses and log-probs of gspo_kernels have first "
            "derivatives only"
        )


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``function.apply`` without its functorch support, a third of its time."""
    plain = not (is_compiling() or _transformed())
    return functools.partial(_apply, function) if plain else function.apply


def is_last_backward() -> bool:
    """Return whether the saved tensors of the running backward are freed afterwards, and may be overwritten;
    False if the backward is traced.
    """
    if torch.is_grad_enabled():
        refuse_second_derivatives()
    return not (is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph())
