"""How operators are registered: one implementation for all devices, its schema read from its annotations.

An argument may be a *struct*, a named tuple of tensors, numbers and strings: the schema lists its fields one
by one, and the two places here that take structs apart and put them together again are the only ones.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

_profiler_enabled = torch._C._autograd._profiler_enabled
_PLAIN = frozenset((Tensor, torch.nn.Parameter))

F = TypeVar("F", bound=Callable[..., Any])

NAMESPACE = __name__.partition(".")[0]
"""Of the operators: the package's name, which is another for each copy of it that a process has imported."""

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LEAVES = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", float: "float", bool: "bool", str: "str"}


class _Struct:
    """How an argument becomes operands: a leaf is one, a named tuple those of its fields."""

    def __init__(self, kind: Any):
        self.kind = kind
        self.fields: dict[str, _Struct] | None = None
        if inspect.isclass(kind) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
            self.fields = {name: _Struct(inner) for name, inner in typing.get_type_hints(kind).items()}
        self.places = () if self.fields is None else _places(self.fields)

    def operands(self, name: str) -> Iterator[tuple[str, str]]:
        """Name and schema type of each operand, for an argument of a name."""
        if self.fields is None:
            yield name, _LEAVES[self.kind]
            return
        for field, inner in self.fields.items():
            yield from inner.operands(f"{name}_{field}")

    def take(self, operands: Iterator[Any]) -> Any:
        """The argument, from the next of the operands."""
        if self.fields is None:
            return next(operands)
        return self.kind(*[inner.take(operands) for inner in self.fields.values()])


def _places(structs: dict[str, _Struct]) -> tuple[tuple[int, _Struct], ...]:
    """Where among arguments there are tensors, or structs that hold some."""
    leaves = (Tensor, Tensor | None)
    return tuple((i, x) for i, x in enumerate(structs.values()) if x.places or x.kind in leaves)


def _collect_tensors(
    places: tuple[tuple[int, _Struct], ...], values: Any, tensors: list[Tensor]
) -> list[Tensor]:
    """``tensors``, and after it the tensors among arguments and in structs among them.

    In the path of every small call: what can't be a tensor is not looked at.
    """
    for place, struct in places:
        value = values[place]
        if value is None:
            continue
        if struct.places:
            _collect_tensors(struct.places, value, tensors)
        else:
            tensors.append(value)
    return tensors


def flat(values: Any) -> list[Any]:
    """Arguments as operands: structs taken apart."""
    operands = []
    for value in values:
        if isinstance(value, tuple):
            operands.extend(flat(value))
        else:
            operands.append(value)
    return operands


def can_bypass_dispatcher(tensors: list[Tensor]) -> bool:
    """Whether a call on these may go straight to the implementation, because nothing would notice it.

    To pass the dispatcher takes as long as a dozen small operations. Compilers, dispatch modes, functorch,
    tensor subclasses and profilers need it.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or _profiler_enabled():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return _PLAIN.issuperset(map(type, tensors))


class Operator:
    """A registered operator: a call dispatches through torch; ``register_fake`` gives it a shape function.

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
        self._arguments = {name: _Struct(kind) for name, kind in hints.items()}
        self._places = _places(self._arguments)
        self._implementation = implementation
        self._mutates, self._multiplies = mutates is not None, multiplies
        operands = [pair for name, struct in self._arguments.items() for pair in struct.operands(name)]
        written = ", ".join(f"{'Tensor(a!)' if name == mutates else kind} {name}" for name, kind in operands)
        outputs = _Struct(result)
        self._result = None if outputs.fields is None else outputs
        if self._result is None:
            returned = "()" if result is type(None) else "Tensor"
        else:
            returned = f"({', '.join(kind for _, kind in outputs.operands(''))})"
        _LIBRARY.define(f"{self.name}({written}) -> {returned}")
        _LIBRARY.impl(self.name, self._from_operands, "CompositeExplicitAutograd")
        self.default = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        if self._mutates:
            self.register_fake(lambda *_: None)

    def _from_operands(self, *operands: Any) -> Any:
        tensors = [operand for operand in operands if isinstance(operand, Tensor)]
        with _isolation(tensors, self._multiplies):
            return self._with_structs(self._implementation, operands)

    def _with_structs(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
        left = iter(operands)
        result = function(*[struct.take(left) for struct in self._arguments.values()])
        return result if self._result is None else tuple(flat(result))

    def __call__(self, *args: Any) -> Any:
        """Dispatch; the arguments are those of the implementation."""
        tensors = _collect_tensors(self._places, args, [])
        if can_bypass_dispatcher(tensors):
            with _isolation(tensors, self._multiplies):
                result = self._implementation(*args)
            if self._mutates:
                torch.autograd.graph.increment_version(args[0])
            return result
        result = self.default(*flat(args))
        if self._mutates and not torch.compiler.is_compiling():
            # a kernel writes unseen by autograd, which must refuse what it has saved of the tensor
            torch.autograd.graph.increment_version(args[0])
        return result if self._result is None else self._result.take(iter(result))

    def tensors(self, *args: Any) -> list[Tensor]:
        """The tensors among the arguments of a call, and in structs among them."""
        return _collect_tensors(self._places, args, [])

    def save(self, ctx: Any, *args: Any) -> None:
        """Save the arguments of a call in an autograd context, for ``repeat``."""
        operands = flat(args)
        ctx.save_for_backward(*[x if isinstance(x, Tensor) else None for x in operands])
        ctx.constants = [None if isinstance(x, Tensor) else x for x in operands]

    def repeat(self, ctx: Any) -> Any:
        """The call whose arguments were saved, once more."""
        saved = zip(ctx.saved_tensors, ctx.constants, strict=True)
        left = iter([constant if tensor is None else tensor for tensor, constant in saved])
        return self(*[struct.take(left) for struct in self._arguments.values()])

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
    """The same for a function that multiplies matrices."""
    return Operator(implementation, multiplies=True)


def inplace_operator(implementation: Callable[..., Any]) -> Operator:
    """The same for a function that writes into its first argument."""
    return Operator(implementation, mutates=next(iter(inspect.signature(implementation).parameters)))


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def _isolation(tensors: list[Tensor], multiplies: bool) -> contextlib.AbstractContextManager[Any]:
    """An operator computes what it says: no autograd, and no autocast or TF32 that the caller has on."""
    device = tensors[0].device.type if tensors else "cpu"
    multiplies = multiplies and device == "cuda"
    if multiplies or torch.is_autocast_enabled(device):
        return _isolated(device, multiplies)
    # contexts that change nothing would take as long as the small operations of a small call
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return torch.no_grad() if learns else _NOTHING


@contextlib.contextmanager
def _isolated(device: str, multiplies: bool) -> Iterator[None]:
    products = _exact_matmul() if multiplies else _NOTHING
    with torch.no_grad(), torch.autocast(device, enabled=False), products:
        yield


_REDUCTIONS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@contextlib.contextmanager
def _exact_matmul() -> Iterator[None]:
    """CUDA's products in fp32 where they say so, whatever the caller has set by the old switches or the new.

    ``fp32_precision`` is the new one for what ``allow_tf32`` and ``set_float32_matmul_precision`` set, which
    can't be read any more once it was used.
    """
    matmul = torch.backends.cuda.matmul
    precision = matmul.fp32_precision
    reductions = {name: _reduction(name) for name in _REDUCTIONS}
    matmul.fp32_precision = "ieee"
    for name in _REDUCTIONS:
        setattr(matmul, name, False)
    try:
        yield
    finally:
        matmul.fp32_precision = precision
        for name, value in reductions.items():
            setattr(matmul, name, value)


def _reduction(name: str) -> bool | tuple[bool, bool]:
    """A setting of 16-bit sums, and that of split sums where this PyTorch has one."""
    matmul = torch.backends.cuda.matmul
    alone: bool = getattr(matmul, name)
    split = getattr(matmul, f"{name}_split_k", None)
    return alone if split is None else (alone, split)


def checked_values(device: torch.device) -> bool:
    """Whether values are to be checked: always on CPU, on other devices with GSPO_KERNELS_VALIDATE=1."""
    return device.type == "cpu" or os.environ.get("GSPO_KERNELS_VALIDATE") == "1"
