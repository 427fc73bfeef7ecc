"""Makes Triton's interpreter faster: it repeats much at every launch, and at every operation."""

import contextlib
import operator

import numpy as np
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


class Held:
    """What a patch returns that is in place already: a launch undoes nothing."""

    def restore(self):
        pass


@contextlib.contextmanager
def patched_once():
    """``triton.language`` is patched once for each module with kernels, not at every call of theirs."""
    patch, scopes = interpreter._patch_lang, {}

    def patch_once(function):
        module = id(function.__globals__)
        if module not in scopes:
            scopes[module] = patch(function)
        return Held()

    interpreter._patch_lang = patch_once
    try:
        yield
    finally:
        interpreter._patch_lang = patch
        while scopes:
            scopes.popitem()[1].restore()


@contextlib.contextmanager
def dtypes_looked_up_once():
    """NumPy's dtype for one of Triton's comes from a table, which isn't made anew for each."""
    theirs, known = interpreter._get_np_dtype, {}

    def look_up(dtype):
        if dtype.scalar.is_ptr():
            return theirs(dtype)
        name = dtype.scalar.name
        if name not in known:
            known[name] = theirs(dtype)
        return known[name]

    interpreter._get_np_dtype = look_up
    try:
        yield
    finally:
        interpreter._get_np_dtype = theirs


OPERATIONS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


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
def quick_overflow_checks():
    """Sums and products of integers are checked by ``check_overflow``."""
    theirs = TritonSemantic.binary_op_sanitize_overflow_impl
    TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow
    try:
        yield
    finally:
        TritonSemantic.binary_op_sanitize_overflow_impl = theirs
