"""Fused losses for sequence-level policy optimization: Triton kernels on the GPU, C++ kernels on the CPU.

The public names of ``api`` are imported lazily, as importing torch takes seconds and the trainer reports
wrong options without it.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo_kernels.api import *  # noqa: F403

try:
    __version__ = version("gspo_kernels")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    public = {key: value for key, value in vars(import_module(f"{__name__}.api")).items() if key[0] != "_"}
    globals().update(public, __all__=sorted(public))
    if name not in globals():
        try:
            import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return globals()[name]


def __dir__() -> list[str]:
    names: list[str] = __getattr__("__all__")
    return names
