"""What PyTorch has no public way for: autograd inside operators, and hints to its compiler."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def constant_when_traced(function: F) -> F:
    """Have the compiler call a function of plain constants instead of looking into it.

    The mark of ``torch.compiler.assume_constant_result``, which would import the compiler and Triton with it:
    seconds that nobody owes who doesn't compile. Arguments must be plain constants (strings, numbers,
    classes): those are guarded, whereas an object made in compiled code would be seen without its fields.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def plain_constant(value: Any) -> Any:
    """Return the value; traced, a number that has become a symbol turns back into a guarded constant."""
    # of the traceable functions it is groupby that looks at values, and guards them, instead of symbols
    (constant,) = [key for key, _ in itertools.groupby([value])]
    return constant


@functools.cache
def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether products of a 16-bit dtype on the CPU are oneDNN's on this processor; PyTorch has loops of its
    own for those that oneDNN doesn't know there, many times slower.
    """
    known = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return built and bool(getattr(torch.ops.mkldnn, known[dtype])())


@contextlib.contextmanager
def inner_autograd() -> Iterator[None]:
    """Let autograd work inside an operator's implementation.

    A compiled graph calls operators with autograd's dispatch keys excluded, and ``enable_grad`` doesn't bring
    them back. PyTorch has no public way to do it.
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


def is_last_backward() -> bool:
    """In a function's backward: whether what it saved is freed afterwards, so that it may write there.

    Never where the backward is traced, or followed itself by autograd (``create_graph``).
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()
