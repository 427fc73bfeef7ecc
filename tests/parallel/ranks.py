"""What cases on several ranks share; each is a function that every rank calls."""

import contextlib
import importlib
import itertools
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from gspo_kernels.parallel.agreement import RanksDisagreeError

VOCABULARY = 64  # of which 2 and 4 ranks have equal shares
LOSSES = {"logits": "fused_policy_loss", "linear": "fused_linear_policy_loss"}
SCORES = {"logits": "token_logprobs", "linear": "linear_token_logprobs"}
CASES: list[tuple[Callable[[], None], tuple[int, ...]]] = []

SIZES_BYTES = 48
"""What a rank of a ``tp_group`` sends to each other rank before a call over hidden states is cut."""


def of_ranks(*sizes):
    """A case to run on groups of these sizes: on four, too, where more ranks than two can change it."""

    def kept(case):
        CASES.append((case, sizes))
        return case

    return kept


def cases_of(size, modules):
    """The cases of modules of this folder that groups of a size run, as ``module::case``."""
    for module in modules:
        importlib.import_module(f"tests.parallel.{module}")
    return {
        f"{module}::{case.__name__}": case
        for module in modules
        for case, sizes in CASES
        if size in sizes and case.__module__ == f"tests.parallel.{module}"
    }


def every(value):
    """The value of each rank, which may be of different shapes."""
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def assert_same_bits(**values):
    """On all ranks."""

    def said(value):
        return value.dtype, value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()

    first, *others = every({name: said(value) for name, value in values.items() if value is not None})
    for other, name in itertools.product(others, first):
        assert first[name] == other[name], name


@contextlib.contextmanager
def validated():
    """With GSPO_KERNELS_VALIDATE=1."""
    before = os.environ.get("GSPO_KERNELS_VALIDATE")
    os.environ["GSPO_KERNELS_VALIDATE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["GSPO_KERNELS_VALIDATE"]
        else:
            os.environ["GSPO_KERNELS_VALIDATE"] = before


def assert_all_raise(expected, culprit, call, error=ValueError):
    """Where ranks compare their arguments: the culprit its own error, all others that it refused."""
    try:
        with validated():
            call()
    except error as raised:
        assert dist.get_rank() == culprit or culprit is None, raised
        assert expected in str(raised), raised
    except RanksDisagreeError as raised:
        assert dist.get_rank() != culprit and culprit is not None, raised
        assert "refused the call" in str(raised), raised
        assert expected in str(raised), raised
    else:
        raise AssertionError("nothing was raised")


class Wire:
    """Bytes that this rank hands to collectives, by kind, and how often."""

    KINDS = ("all_gather", "all_reduce", "broadcast", "reduce")

    def __init__(self):
        self.sent = dict.fromkeys(self.KINDS, 0)
        self.calls = dict.fromkeys(self.KINDS, 0)

    @property
    def total(self):
        """Bytes and calls of all kinds."""
        return sum(self.sent.values()), sum(self.calls.values())

    def __enter__(self):
        self.theirs = {kind: getattr(dist, kind) for kind in self.KINDS}
        for kind, function in self.theirs.items():
            setattr(dist, kind, self._counted(kind, function))
        return self

    def _counted(self, kind, function):
        def counted(*tensors, **options):
            self.sent[kind] += tensors[-1].nbytes
            self.calls[kind] += 1
            return function(*tensors, **options)

        return counted

    def __exit__(self, *_):
        for kind, function in self.theirs.items():
            setattr(dist, kind, function)
