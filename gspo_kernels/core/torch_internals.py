"""Uses of PyTorch that have no public interface: autograd inside operators, and hints to its compiler."""

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
"""Types of arguments that are no subclasses of tensors, as DTensors are."""
_transformed = torch._C._are_functorch_transforms_active
_apply: Any = torch._C._FunctionBase.__dict__["apply"]


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
    # groupby is traceable, and guards values instead of passing symbols on
    (constant,) = [key for key, _ in itertools.groupby([value])]
    return constant


@functools.cache
def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Return whether oneDNN computes products of a 16-bit dtype on this CPU. If it can't, PyTorch's own loops
    do, many times slower.
    """
    known = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    built = torch.backends.mkldnn.is_available()
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


def constant_of(tensor: Tensor) -> Tensor:
    """Return a tensor detached, for ``inner_autograd``. One made under ``inference_mode`` is copied: it can't
    take part in a graph, not even as a constant.
    """
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def tensors_to_save(ctx: Any, tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return tensors for ``ctx.save_for_backward``. Where some were made under ``inference_mode``, which
    PyTorch refuses to save, these are copies, and nothing where no graph is recorded.
    """
    for tensor in () if is_compiling() else tensors:
        if tensor is not None and tensor.is_inference():
            saves = tensors if ctx.next_functions else ()
            return [x.clone() if x is not None and x.is_inference() else x for x in saves]
    return tensors


def refuse_second_derivatives() -> None:
    """Raise an error in a function's backward that autograd records; a traced one passes.

    PyTorch's ``once_differentiable`` raises only if an upstream gradient needs a gradient itself. In a
    gradient penalty or a Hessian it is the constant 1, and a term would be missing silently.
    """
    if not is_compiling():
        raise NotImplementedError(
            "create_graph: is True, expected False: losses and log-probs of gspo_kernels have first "
            "derivatives only"
        )


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``function.apply``, without the third of it that only functorch needs."""
    plain = not (is_compiling() or _transformed())
    return functools.partial(_apply, function) if plain else function.apply


def is_last_backward() -> bool:
    """Return, in a function's backward, whether its saved tensors are freed afterwards and may be changed;
    False where the backward is traced.
    """
    if torch.is_grad_enabled():
        refuse_second_derivatives()
    return not (is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph())
