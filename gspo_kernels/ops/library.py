"""How operators are registered: schema, one implementation for all devices, a fake for tracing."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

_LIBRARY = torch.library.Library("gspo_kernels", "FRAGMENT")


class Operator:
    """A registered operator: a call dispatches through torch; ``register_fake`` gives it a shape function."""

    def __init__(self, schema: str, implementation: Callable[..., Any]):
        self.name = schema.split("(", 1)[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(self.name, _isolated(implementation), "CompositeExplicitAutograd")
        self.mutates_first = "(a!)" in schema
        self.default = getattr(torch.ops.gspo_kernels, self.name).default
        self.__doc__ = implementation.__doc__

    def __call__(self, *args: Any) -> Any:
        """Dispatch."""
        result = self.default(*args)
        if self.mutates_first and not torch.compiler.is_compiling():
            # a kernel writes unseen by autograd, which must refuse what it has saved of the tensor
            torch.autograd.graph.increment_version(args[0])
        return result

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Use ``fake`` for shapes and dtypes under tracing."""
        torch.library.register_fake(f"gspo_kernels::{self.name}", fake, lib=_LIBRARY)
        return fake


def operator(schema: str) -> Callable[[Callable[..., Any]], Operator]:
    """Register the decorated function under ``schema`` as an operator of namespace ``gspo_kernels``."""
    return functools.partial(Operator, schema)


def _isolated(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """An operator computes what it says: no autograd, and no autocast or TF32 that the caller has on."""

    @functools.wraps(implementation)
    def call(*args: Any) -> Any:
        device = next((arg.device.type for arg in args if isinstance(arg, torch.Tensor)), "cpu")
        with torch.no_grad(), torch.autocast(device, enabled=False), _exact_matmul(device):
            return implementation(*args)

    return call


@contextlib.contextmanager
def _exact_matmul(device: str) -> Iterator[None]:
    if device != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = (
        matmul.allow_tf32,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )
    matmul.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        (
            matmul.allow_tf32,
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_fp16_reduced_precision_reduction,
        ) = before


def checked_values(device: torch.device) -> bool:
    """Whether values are to be checked: always on CPU, on other devices with GSPO_KERNELS_VALIDATE=1."""
    return device.type == "cpu" or os.environ.get("GSPO_KERNELS_VALIDATE") == "1"
