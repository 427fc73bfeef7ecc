"""The registry of contestants and suites, filled by decorators.

A *contestant* is a way to compute a task. Its decorated function takes the device, imports what it needs,
and returns the call; if it raises ImportError or ``Missing``, tables show that reason. A *suite* is a
function from the options of a run to its record; most run a list of ``Case`` by ``measure.run_cases``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

TASKS = ("logits", "hidden", "scoring")


class Missing(Exception):
    """A contestant is not available here; the message says why."""


@dataclass(frozen=True)
class Contestant:
    """A way to compute a task.

    Attributes:
        name: its name in tables.
        tasks: which of ``TASKS`` it can do.
        load: device -> call. The call takes a problem and its leaves and returns the loss; for "scoring"
            the log-probs.
        precision: "float32" or "input": the precision that its logits are rounded to (from logits: its
            statistics). Plain PyTorch at this precision sets its budget. A dict has the precision by task.
        only_16_bit: whether it takes part with 16-bit inputs only.
        roundings: how often it rounds the sum of a gradient to the inputs' dtype, given the problem.
        overwrites: whether its backward overwrites the logits, which are then restored outside the clock.
        layout: "padded", "packed" or "next", see ``Problem.layout``; laid out outside the clock.
        ours: whether it is this package.
    """

    name: str
    tasks: tuple[str, ...]
    load: Callable[[torch.device], Callable[..., Any]]
    precision: str | dict[str, str] = "input"
    only_16_bit: bool = False
    roundings: Callable[[Any], int] = lambda problem: 1
    overwrites: bool = False
    layout: str = "padded"
    ours: bool = False

    def precision_for(self, task: str) -> str:
        """The precision of one task."""
        return self.precision if isinstance(self.precision, str) else self.precision[task]

    def get(self, device: torch.device) -> Callable[..., Any]:
        """Return the call.

        Raises:
            Missing: the contestant is not available; the message says why.
        """
        try:
            return self.load(device)
        except (ImportError, AttributeError, OSError) as error:
            raise Missing(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Suite:
    """A named set of measurements; ``everything`` says whether ``run all`` includes it."""

    name: str
    title: str
    run: Callable[[Options], dict[str, Any]]
    everything: bool = True


@dataclass(frozen=True)
class Options:
    """The options of a run.

    Attributes:
        device: "cpu" or "cuda".
        size: "full", or "tiny" for a rehearsal whose times say nothing.
        repeats: interleaved rounds that count; None for the suite's own number.
        only: parts of names of contestants; empty for all.
        cases: parts of names of cases; empty for all.
        without: contestants to leave out, with the reason that the tables give.
        memory: whether to measure peaks.
        save: is called after each case with what is known so far of the record, so that none is lost.
    """

    device: torch.device
    size: str = "full"
    repeats: int | None = None
    only: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    without: dict[str, str] = field(default_factory=dict)
    memory: bool = True
    save: Callable[[dict[str, Any]], None] = lambda known: None

    @property
    def tiny(self) -> bool:
        """Whether this is a rehearsal."""
        return self.size == "tiny"


CONTESTANTS: dict[str, Contestant] = {}
SUITES: dict[str, Suite] = {}


def contestant(name: str, *tasks: str, **about: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a contestant's ``load``; ``about`` as in ``Contestant``."""

    def register(load: Callable[..., Any]) -> Callable[..., Any]:
        if name in CONTESTANTS or not tasks or not set(tasks) <= set(TASKS):
            raise ValueError(f"contestant {name!r} for {tasks}: registered before, or no task of {TASKS}")
        CONTESTANTS[name] = Contestant(name, tasks, load, **about)
        return load

    return register


def suite(name: str, title: str, **about: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a suite; ``about`` as in ``Suite``."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        if name in SUITES:
            raise ValueError(f"suite {name!r}: registered before")
        SUITES[name] = Suite(name, title, run, **about)
        return run

    return register


def entrants(task: str, wanted: Sequence[str], options: Options, dtype: torch.dtype) -> list[Contestant]:
    """Return a task's contestants whose names match a pattern as a whole and contain a requested part."""
    return [
        one
        for one in CONTESTANTS.values()
        if task in one.tasks
        and any(re.fullmatch(pattern, one.name) for pattern in wanted)
        and (not options.only or any(part in one.name for part in options.only))
        and not (one.only_16_bit and dtype.itemsize > 2)
    ]
