"""Which library multiplies fp32 matrices on this processor: measured once, and remembered on disk.

torch's products are MKL's, which are good on some processors and slow on others that have the same
instructions. The first process that needs to know measures for about a tenth of a second and writes its
choice to the user's cache; every other reads it there, so that old and new log-probs come from the same
products. Threads are not part of what a choice is remembered by: a process with other threads makes the same
log-probs. ``GSPO_KERNELS_CALIBRATE=0`` leaves the products to torch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from gspo_kernels.cpp.products import multiplies, multiply

LIBRARIES = ("torch", "cpp")
MARGIN = 1.15
"""How much faster the C++ backend's products must be: below, timers could decide one way or the other."""
SHAPE = (256, 2048, 512)
"""Rows, V and H of the products that are timed."""
ROUNDS = 5


class Choice(NamedTuple):
    """What was decided, and why."""

    library: str
    reason: str


def fp32_library() -> str:
    """One of ``LIBRARIES``; measures if this processor was never measured."""
    return choice().library


@functools.cache
def choice() -> Choice:
    """The choice for this processor."""
    if not multiplies(torch.float32):
        return Choice("torch", "the C++ backend has no products for this processor")
    if os.environ.get("GSPO_KERNELS_CALIBRATE") == "0":
        return Choice("torch", "GSPO_KERNELS_CALIBRATE=0")
    file = cache_file()
    known = _read(file)
    if known is None:
        known = _remember(file, measure())
    seconds = known["seconds"]
    return Choice(
        _fastest(seconds),
        f"measured: torch {seconds['torch'] * 1e3:.2f} ms, cpp {seconds['cpp'] * 1e3:.2f} ms ({file})",
    )


def _fastest(seconds: dict[str, float]) -> str:
    return "cpp" if seconds["torch"] >= MARGIN * seconds["cpp"] else "torch"


def cache_file() -> Path:
    """Where this processor's measurement is kept."""
    home = os.environ.get("XDG_CACHE_HOME")
    folder = Path(home) if home and Path(home).is_absolute() else Path("~/.cache").expanduser()
    digest = hashlib.sha256(json.dumps(_machine()).encode()).hexdigest()[:16]
    return folder / "gspo_kernels" / f"fp32_products_{digest}.json"


def _machine() -> list[str]:
    """What a measurement holds for: processor, torch, rule, and the instructions that libraries may use."""
    fields = ("vendor_id", "cpu family", "model", "model name", "stepping")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
        entries = dict(line.replace("\t", "").split(":", 1) for line in lines if ":" in line)
        processor = [entries.get(field, "").strip() for field in fields]
    except OSError:
        processor = [platform.machine(), platform.processor()]
    limits = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA")
    rule = f"{MARGIN} {SHAPE} {ROUNDS}"
    return [*processor, torch.__version__, rule, *(os.environ.get(limit, "") for limit in limits)]


def measure() -> dict[str, float]:
    """Seconds that each library takes for a chunk's three products: medians of a few rounds, in turns."""
    rows, vocabulary, width = SHAPE
    hidden, weight = torch.ones(rows, width), torch.ones(vocabulary, width)
    logits, grad_hidden = torch.ones(rows, vocabulary), torch.empty(rows, width)
    products = (
        (hidden, weight.t(), logits),
        (logits, weight, grad_hidden),
        (logits.t(), hidden, torch.empty(vocabulary, width)),
    )
    libraries: dict[str, Callable[..., object]] = {
        "torch": lambda a, b, out: torch.mm(a, b, out=out),
        "cpp": multiply,
    }
    seconds = dict.fromkeys(LIBRARIES, 0.0)
    for product in products:
        times: dict[str, list[float]] = {name: [] for name in LIBRARIES}
        for _ in range(ROUNDS):
            for name, library in libraries.items():
                start = time.perf_counter()
                library(*product)
                times[name].append(time.perf_counter() - start)
        for name in LIBRARIES:
            seconds[name] += statistics.median(times[name])
    return seconds


def _read(file: Path) -> dict[str, dict[str, float]] | None:
    """A measurement that was kept, or None where there is none that makes sense."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        seconds = {name: float(known["seconds"][name]) for name in LIBRARIES}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return {"seconds": seconds} if all(value > 0 for value in seconds.values()) else None


def _remember(file: Path, seconds: dict[str, float]) -> dict[str, dict[str, float]]:
    """Keep a measurement and return it, or that of another process that was faster to keep its own."""
    measured = {"seconds": seconds}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, prefix=file.name, delete=False, encoding="utf-8"
        ) as new:
            json.dump({"machine": _machine(), **measured}, new, indent=1)
        try:
            os.link(new.name, file)
        except FileExistsError:
            known = _read(file)
            if known is not None:
                return known
            Path(new.name).replace(file)
        finally:
            Path(new.name).unlink(missing_ok=True)
    return measured
