"""What ``torch.compile`` is told about our Python."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

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
