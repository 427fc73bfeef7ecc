"""Make Triton's interpreter faster: on its own it repeats work at every launch and at every operation."""

import contextlib
import functools
import math
import operator
from types import SimpleNamespace

import numpy as np
import pytest
from triton.language import core, semantic
from triton.runtime import interpreter

NO_CONSTANTS = {core.tensor, core.dtype, core.block_type, int, float, bool, str, type(None)}


def check_overflow(self, left, right, operation):
    """Assert that integers of up to 32 bits hold the result. Triton's own check interprets six operations."""
    scalar = left.type.scalar
    if scalar.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
        return
    name = operation.__name__  # add, sub or mul
    numbers = (np.asarray(each.handle.data).astype(np.int64) for each in (left, right))
    wide = getattr(operator, name)(*numbers)
    fits = (wide >= scalar.get_int_min_value()).all() and (wide <= scalar.get_int_max_value()).all()
    assert fits, f"int{scalar.int_bitwidth} overflow detected for operation {name}"


@functools.cache
def shape_of_tensors(shape):
    """Return the attributes ``numel`` and ``shape`` of tensors with this shape."""
    return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])


def init_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = shape_of_tensors(tuple(type.shape.values) if type.is_block() else ())


@contextlib.contextmanager
def faster():
    """Patch ``triton.language`` once for each module with kernels, not at every call of a kernel. Make types
    of blocks and of NumPy and the shapes of tensors once, and remember them. Tell by its type that a value is
    no constant. Check overflow by ``check_overflow``.
    """
    patch_language, make_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    unwrap_any, make_block_type = core._unwrap_if_constexpr, core.block_type.__init__
    scopes, known, blocks = {}, {}, {}

    def patch_once(function):
        module = id(function.__globals__)
        if module not in scopes:
            scopes[module] = patch_language(function)
        return SimpleNamespace(restore=lambda: None)  # patches outlive the launch

    def look_up(dtype):
        if dtype.scalar.is_ptr():
            return make_dtype(dtype)
        name = dtype.scalar.name
        if name not in known:
            known[name] = make_dtype(dtype)
        return known[name]

    def unwrap(value):
        kind = type(value)
        if kind in NO_CONSTANTS:
            return value
        return value.value if kind is core.constexpr else unwrap_any(value)

    def new_block_type(cls, element_ty, shape):
        key = (element_ty.name, *map(unwrap, shape))
        if key not in blocks:
            blocks[key] = object.__new__(cls)
        return blocks[key]

    def init_block_type(self, element_ty, shape):
        if not hasattr(self, "numel"):
            make_block_type(self, element_ty, shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter, "_get_np_dtype", look_up)
        patch.setattr(core, "_unwrap_if_constexpr", unwrap)
        patch.setattr(core.tensor, "__init__", init_tensor)
        patch.setattr(core.block_type, "__new__", new_block_type, raising=False)
        patch.setattr(core.block_type, "__init__", init_block_type)
        patch.setattr(semantic.TritonSemantic, "binary_op_sanitize_overflow_impl", check_overflow)
        yield
    while scopes:
        scopes.popitem()[1].restore()
