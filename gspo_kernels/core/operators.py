"""Registration of operators, with one implementation for all devices and the schema from its annotations.

An argument may be a *struct*, a named tuple of tensors, numbers and strings, whose fields are flattened in
the schema.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from gspo_kernels.core.checks import validates
from gspo_kernels.core.torch_internals import PLAIN, tensors_to_save

_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_get_precision, _set_precision = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
_profiler_enabled = torch._C._autograd._profiler_enabled

F = TypeVar("F", bound=Callable[..., Any])

NAMESPACE = __name__.partition(".")[0]
"""The operators' namespace, the package's name, which differs between copies imported in one process."""

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LEAVES = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", float: "float", bool: "bool", str: "str"}


class _Struct:
    """Flattening of arguments, or of the fields of a named tuple, to operands.

    Args:
        make: builds the arguments or the named tuple from its fields.
        hints: the types of the fields.
    """

    def __init__(self, make: Callable[[Any], Any], hints: dict[str, Any]):
        self._make = make
        self._fields: dict[str, str | _Struct] = {
            name: _LEAVES.get(kind) or _Struct(kind._make, typing.get_type_hints(kind))
            for name, kind in hints.items()
        }
        self._places: list[tuple[int, _Struct | None]] = [
            (place, None if isinstance(field, str) else field)
            for place, field in enumerate(self._fields.values())
            if (field.startswith("Tensor") if isinstance(field, str) else bool(field._places))
        ]

    def operands(self, prefix: str = "") -> Iterator[tuple[str, str]]:
        """Yield name and schema type of each operand."""
        for name, field in self._fields.items():
            if isinstance(field, str):
                yield prefix + name, field
            else:
                yield from field.operands(f"{prefix}{name}_")

    def take(self, operands: Iterator[Any]) -> Any:
        """Build from the next operands."""
        fields = self._fields.values()
        return self._make(next(operands) if isinstance(x, str) else x.take(operands) for x in fields)

    def collect_tensors(self, values: Any, tensors: list[Tensor]) -> list[Tensor]:
        """Append the tensors among values of the fields to ``tensors``; return that list.

        Fields that can't be tensors are skipped, for the speed of small calls.
        """
        for place, struct in self._places:
            value = values[place]
            if value is None:
                continue
            if struct is None:
                tensors.append(value)
            else:
                struct.collect_tensors(value, tensors)
        return tensors


def flat(values: Any) -> list[Any]:
    """Flatten arguments to operands."""
    operands = []
    for value in values[:]:  # a plain tuple, as torch 2.11 can't trace iteration over a constant struct
        if isinstance(value, tuple):
            operands.extend(flat(value))
        else:
            operands.append(value)
    return operands


def can_bypass_dispatcher(tensors: list[Tensor]) -> bool:
    """Return whether a call on these tensors may bypass the dispatcher, which is slow for small calls.

    Compilers, dispatch modes, functorch, tensor subclasses and profilers need the dispatcher.
    """
    return not (
        is_compiling() or _modes() or _profiler_enabled() or _transforms() is not None
    ) and PLAIN.issuperset(map(type, tensors))


class Operator:
    """An operator registered with torch; ``register_fake`` adds its fake implementation.

    Args:
        implementation: takes tensors, numbers, strings and structs; returns a tensor, a struct of tensors, or
            None. Its name is the operator's.
        mutates: the name of the argument that it writes into, which must be the first.
        multiplies: whether it multiplies matrices.
    """

    def __init__(
        self, implementation: Callable[..., Any], mutates: str | None = None, multiplies: bool = False
    ):
        hints = typing.get_type_hints(implementation)
        result = hints.pop("return")
        self.name, self.__doc__ = implementation.__name__, implementation.__doc__
        self.arguments = _Struct(tuple, hints)
        self._implementation = implementation
        self._mutates, self._multiplies = mutates is not None, multiplies
        operands = self.arguments.operands()
        written = ", ".join(f"{'Tensor(a!)' if name == mutates else kind} {name}" for name, kind in operands)
        self._result: _Struct | None = None
        returned = "()" if result is type(None) else "Tensor"
        if hasattr(result, "_make"):
            self._result = _Struct(result._make, typing.get_type_hints(result))
            returned = f"({', '.join(kind for _, kind in self._result.operands())})"
        _LIBRARY.define(f"{self.name}({written}) -> {returned}")
        _LIBRARY.impl(self.name, self._from_operands, "CompositeExplicitAutograd")
        self.default = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        if self._mutates:
            self.register_fake(lambda *_: None)

    def _from_operands(self, *operands: Any) -> Any:
        tensors = [operand for operand in operands if isinstance(operand, Tensor)]
        with _isolation(tensors, self._multiplies) or _NOTHING:
            return self._with_structs(self._implementation, operands)

    def _with_structs(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        result = function(*self.arguments.take(iter(operands)))
        return result if self._result is None else tuple(flat(result))

    def __call__(self, *args: Any) -> Any:
        """Call the operator with the arguments of the implementation."""
        tensors = self.arguments.collect_tensors(args, [])
        if can_bypass_dispatcher(tensors):
            isolation = _isolation(tensors, self._multiplies)
            if isolation is None:
                result = self._implementation(*args)
            else:
                with isolation:
                    result = self._implementation(*args)
            if self._mutates:
                torch.autograd.graph.increment_version(args[0])
            return result
        result = self.default(*flat(args))
        if self._mutates and not is_compiling():
            # let autograd detect the write, which is invisible to it
            torch.autograd.graph.increment_version(args[0])
        return result if self._result is None else self._result.take(iter(result))

    def save(self, ctx: Any, *args: Any) -> None:
        """Save the arguments of a call in an autograd context, for ``repeat``."""
        operands = flat(args)
        tensors = [x if isinstance(x, Tensor) else None for x in operands]
        ctx.save_for_backward(*tensors_to_save(ctx, tensors))
        ctx.constants = [None if isinstance(x, Tensor) else x for x in operands]

    def repeat(self, ctx: Any) -> Any:
        """Repeat the call whose arguments were saved."""
        saved = zip(ctx.saved_tensors, ctx.constants, strict=True)
        operands = iter([constant if tensor is None else tensor for tensor, constant in saved])
        return self(*self.arguments.take(operands))

    def register_fake(self, fake: F) -> F:
        """Use ``fake``, which takes the same arguments, for shapes and dtypes under tracing."""

        def from_operands(*operands: Any) -> Any:
            return self._with_structs(fake, operands)

        torch.library.register_fake(f"{NAMESPACE}::{self.name}", from_operands, lib=_LIBRARY)
        return fake


def operator(implementation: Callable[..., Any]) -> Operator:
    """Register the decorated function as an operator of ``NAMESPACE``."""
    return Operator(implementation)


def matrix_operator(implementation: Callable[..., Any]) -> Operator:
    """Register the decorated function, which multiplies matrices, as an operator."""
    return Operator(implementation, multiplies=True)


def inplace_operator(implementation: Callable[..., Any]) -> Operator:
    """Register the decorated function, which writes into its first argument, as an operator."""
    return Operator(implementation, mutates=next(iter(inspect.signature(implementation).parameters)))


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def isolated(tensors: list[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Return a context that disables autograd, autocast and reduced-precision matmuls."""
    return _isolation(tensors, True) or _NOTHING


def _isolation(tensors: list[Tensor], multiplies: bool) -> contextlib.AbstractContextManager[Any] | None:
    """Return the context of ``isolated``, or None if it would change nothing (faster in small calls)."""
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if multiplies:
        on_cuda = bool(tensors) and tensors[0].is_cuda
        multiplies = on_cuda or _get_precision("mkldnn", "matmul") in ("tf32", "bf16")
    if torch._C._is_any_autocast_enabled():
        device = tensors[0].device.type if tensors else "cpu"
        if torch.is_autocast_enabled(device):
            return _isolated(device, multiplies)
    if learns:
        return _isolated("", multiplies) if multiplies else torch.no_grad()
    return EXACT_MATMUL if multiplies else None


@contextlib.contextmanager
def _isolated(autocast: str, multiplies: bool) -> Iterator[None]:
    """Disable autograd, autocast on a device if one is named, and reduced-precision matmuls."""
    with (
        torch.no_grad(),
        torch.autocast(autocast, enabled=False) if autocast else _NOTHING,
        EXACT_MATMUL if multiplies else _NOTHING,
    ):
        yield


_CUDA = torch.backends.cuda.matmul
_REDUCTIONS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


class _ExactMatmul:
    """Disable TF32, bf16 and 16-bit accumulation in matmuls, regardless of the caller's settings.

    ``fp32_precision`` replaces ``allow_tf32`` and ``set_float32_matmul_precision``, which can't be read after
    it was used. With "medium", CPUs with bf16 instructions multiply fp32 matrices in bf16. Settings are
    global: of overlapping calls in several threads, the first saves and the last restores them.
    """

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            self._reductions = [(name, _reduction(name)) for name in _REDUCTIONS]
            self._precisions = []
            for backend in ("cuda", "mkldnn"):
                precision = _get_precision(backend, "matmul")
                # "none" inherits the global setting, and must be restored as such
                _set_precision(backend, "matmul", "none")
                self._precisions.append(
                    (backend, "none" if _get_precision(backend, "matmul") == precision else precision)
                )
                _set_precision(backend, "matmul", "ieee")
            for name in _REDUCTIONS:
                setattr(_CUDA, name, False)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            for backend, precision in self._precisions:
                _set_precision(backend, "matmul", precision)
            for name, value in self._reductions:
                setattr(_CUDA, name, value)


EXACT_MATMUL = _ExactMatmul()


def _reduction(name: str) -> bool | tuple[bool, bool]:
    """Return a reduced-precision reduction setting, with that of split-K if this PyTorch has one."""
    setting: bool = getattr(_CUDA, name)
    split = getattr(_CUDA, f"{name}_split_k", None)
    return setting if split is None else (setting, split)


def must_check_values(device: torch.device) -> bool:
    """Return whether to check values: always on CPU, on other devices with GSPO_KERNELS_VALIDATE=1."""
    return _is_cpu(device) or validates()


@functools.lru_cache(maxsize=64)
def _is_cpu(device: torch.device) -> bool:
    return device.type == "cpu"
