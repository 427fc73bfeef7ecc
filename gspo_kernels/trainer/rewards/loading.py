"""Finding a reward function by its import path or file."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import sys
import traceback
import zlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from gspo_kernels.trainer.input_errors import RewardError

RESERVED = ("prompts", "completions", "completion_ids")
"""What reward functions get beside the columns, and therefore no column may be called."""

RewardFunction = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]


def find_reward(spec: str) -> RewardFunction:
    """Return the function behind ``"module:function"`` or ``"path/to/file.py:function"``.

    ``(name=value, ...)`` after it binds keyword arguments to literal values.
    """
    place, opening, options = spec.partition("(")
    location, _, name = place.rpartition(":")
    if not location or not name:
        raise RewardError(f"reward {spec!r}: expected 'module:function' or 'file.py:function'")
    module = _load_file(location, spec) if location.endswith(".py") else _load_module(location, spec)
    function = getattr(module, name, None)
    if function is None:
        raise RewardError(f"reward {spec!r}: {location} has no {name!r}")
    if not callable(function):
        raise RewardError(f"reward {spec!r}: {name} is not a function but {type(function).__name__}")
    return functools.partial(function, **_options(opening + options, spec)) if opening else function


def name_of(function: RewardFunction) -> str:
    """Return what a reward function is called in metrics and messages."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return getattr(function, "__name__", type(function).__name__)


def wants_own_process(function: RewardFunction) -> bool:
    """Return the function's attribute ``own_process``, by which it says that only a process can stop it."""
    inner = function.func if isinstance(function, functools.partial) else function
    return bool(getattr(inner, "own_process", False))


def place_of(error: BaseException, function: Any) -> str:
    """Return `` (file, line n)``: the function's own last line, and where it called others the one below."""
    inner = function.func if isinstance(function, functools.partial) else function
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    places = [f"{frame.filename}, line {frame.lineno}" for frame in (*own[-1:], *frames[-1:])]
    return f" ({', below it '.join(dict.fromkeys(places))})" if places else ""


def _options(text: str, spec: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if isinstance(call, ast.Call) and not call.args and all(k.arg for k in call.keywords):
            return {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError):
        pass
    raise RewardError(f"reward {spec!r}: expected (name=value, ...) with plain values after the function")


def _load_file(location: str, spec: str) -> Any:
    path = Path(location)
    if not path.is_file():
        raise RewardError(f"reward {spec!r}: there is no file {location}")
    # files of the same name in two folders are two modules
    name = f"gspo_reward_file_{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses look their module up there
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise RewardError(f"reward {spec!r}: {location} failed to load: {error!r}") from error
    return module


def _load_module(location: str, spec: str) -> Any:
    # A console script does not look into the current directory; a user's reward module lies there.
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return importlib.import_module(location)
    except Exception as error:
        raise RewardError(f"reward {spec!r}: module {location} failed to load: {error!r}") from error
    finally:
        if here in sys.path:
            sys.path.remove(here)
