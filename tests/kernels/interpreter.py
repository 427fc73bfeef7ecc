"""Makes Triton's interpreter faster: it repeats much at every launch, and at every operation."""

import contextlib
import operator

import numpy as np
import pytest
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

OPERATIONS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


class Patched:
    """What patching returns where the language is patched already: a launch undoes nothing."""

    def restore(self):
        pass


def check_overflow(self, left, right, operation):
    """That integers of up to 32 bits hold what comes out; Triton itself interprets six operations for it."""
    scalar = left.type.scalar
    if scalar.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
        return
    name = operation.__name__
    wide = OPERATIONS[name](*(np.asarray(each.handle.data).astype(np.int64) for each in (left, right)))
    fits = (wide >= scalar.get_int_min_value()).all() and (wide <= scalar.get_int_max_value()).all()
    assert fits, f"int{scalar.int_bitwidth} overflow detected for operation {name}"


@contextlib.contextmanager
def faster():
    """``triton.language`` is patched once for each module with kernels, not at every call of theirs; NumPy's
    dtypes come from a table; overflow is checked by ``check_overflow``.
    """
    patch_language, make_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    scopes, known = {}, {}

    def patch_once(function):
        module = id(function.__globals__)
        if module not in scopes:
            scopes[module] = patch_language(function)
        return Patched()

    def look_up(dtype):
        if dtype.scalar.is_ptr():
            return make_dtype(dtype)
        name = dtype.scalar.name
        if name not in known:
            known[name] = make_dtype(dtype)
        return known[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter, "_get_np_dtype", look_up)
        patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", check_overflow)
        yield
    while scopes:
        scopes.popitem()[1].restore()
