"""What the cases of several ranks share: groups, a rank's part of a call, and checks that ranks agree.

A case is a function that every rank calls. Ranks share the vocabulary ("tp"), the tokens of the sequences
("cp"), or both, as a grid of two times two ("both").
"""

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gspo_kernels as gk
from gspo_kernels.models.layouts import tokens_of_rank
from tests.cases import Result, call
from tests.judging import assert_equals_oracle

VOCABULARY = 64  # 2 and 4 ranks have equal shares of it
LENGTHS = (3, 0, 1, 9, 2, 1)
ORDERS = ("zigzag", "contiguous", "stream")
GSPO = gk.GSPO()
LOSSES = {"logits": "fused_policy_loss", "linear": "fused_linear_policy_loss"}
SCORES = {"logits": "token_logprobs", "linear": "linear_token_logprobs"}
ENTRIES = {"logprobs": "policy_loss", **LOSSES}
KINDS = {"tp": tuple(LOSSES), "cp": tuple(ENTRIES), "both": tuple(LOSSES)}
BY_TOKEN = ("hidden", "logits", "logprobs", "entropy")
SHARDED = {"logits": -1, "weight": 0, "bias": 0, "B": 0}
CASES: list[tuple[Callable[[], None], tuple[int, ...]]] = []


def of_ranks(*sizes):
    """Register a case for groups of these sizes: four ranks where more than two can change the result."""

    def kept(case):
        CASES.append((case, sizes))
        return case

    return kept


class Place(NamedTuple):
    """A rank's number among those that share tokens, and among those that share the vocabulary."""

    cp: int
    cps: int
    tp: int
    tps: int
    groups: dict[str, dist.ProcessGroup]  # by argument

    def columns(self, uneven=False):
        """Return the first column of the rank's shard, and the column behind its last."""
        ends = [VOCABULARY * rank // self.tps for rank in range(self.tps + 1)]
        if uneven:  # one column, many, and one for each rank that is left
            ends = [0, 1, *range(VOCABULARY - self.tps + 2, VOCABULARY + 1)]
        return ends[self.tp], ends[self.tp + 1]


@functools.cache
def place_of(split, seconds=60):
    """Return this rank's place, in groups whose ranks wait up to ``seconds``; all ranks must call this."""
    (rank, size), limit = (dist.get_rank(), dist.get_world_size()), timedelta(seconds=seconds)
    if split == "both":
        rows, columns = (
            [dist.new_group(ranks, timeout=limit) for ranks in pairs]
            for pairs in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
        )
        cp, tp = divmod(rank, 2)
        return Place(cp, 2, tp, 2, {"tp_group": rows[cp], "cp_group": columns[tp]})
    group = {f"{split}_group": dist.new_group(timeout=limit)}
    return Place(rank, size, 0, 1, group) if split == "cp" else Place(0, 1, rank, size, group)


def tokens_of(case, cp, cps, order="zigzag"):
    """Return which tokens of a case a rank has, and their offsets; of a padded case columns, and None."""
    if case.cu_seqlens is None:
        whole = torch.tensor([0, case.labels.shape[1]])
        return tokens_of_rank(whole, cp, cps, order=order).positions, None
    return tokens_of_rank(case.cu_seqlens, cp, cps, order=order)


def share(case, place, order="zigzag", uneven=False):
    """Return the case as a rank has it."""
    where, offsets = tokens_of(case, place.cp, place.cps, order)
    (start, end), shape = place.columns(uneven), case.labels.shape

    def tokens(value):
        per_token = isinstance(value, torch.Tensor) and value.shape[: len(shape)] == shape
        return value.index_select(len(shape) - 1, where) if per_token and place.cps > 1 else value

    inputs = {name: tokens(value) if name in BY_TOKEN else value for name, value in case.inputs.items()}
    for name in inputs.keys() & SHARDED if place.tps > 1 else ():
        inputs[name] = inputs[name].narrow(SHARDED[name], start, end - start)
    return replace(
        case,
        labels=tokens(case.labels),
        inputs=inputs,
        old_logprobs=tokens(case.old_logprobs),
        advantages=tokens(case.advantages),
        loss_mask=tokens(case.loss_mask),
        cu_seqlens=offsets,
        terms={name: tokens(value) for name, value in case.terms.items()},
        logit_options={name: tokens(value) for name, value in case.logit_options.items()},
    )


def leaves_of(case):
    """Return copies of a case's inputs that require gradients, except for frozen ones."""
    return {n: value.clone().requires_grad_(n not in case.frozen) for n, value in case.inputs.items()}


def run(case, split, objective=GSPO, entry=None, backend="cpp", *, order="zigzag", uneven=False, **options):
    """Run a case over ranks; return values and gradients as ``tests.cases.run`` does, and the output."""
    place, entry = place_of(split), entry or ENTRIES[case.kind]
    local = share(case, place, order, uneven)
    leaves = leaves_of(local)
    scattered, summed = options.get("sequence_parallel", False), options.get("reduce_hidden_grad", True)
    if scattered:  # unevenly: of several ranks, the last has no tokens
        length, size = local.labels.shape[-1], place.tps
        ends = [0, *(length * (rank + 1) // (size - 1) for rank in range(size - 1)), length]
        hidden = local.inputs["hidden"].narrow(-2, ends[place.tp], ends[place.tp + 1] - ends[place.tp])
        leaves["hidden"] = hidden.clone().requires_grad_()
    if uneven:
        options["vocab_range"] = place.columns(uneven)
    out = call(local, leaves, entry, objective, backend, **place.groups, **options)
    out.loss.backward()
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert_same_bits(loss=out.loss, **out.metrics)
    alike = {"hidden": grads.get("hidden")} if summed and not scattered else {}
    assert_same_bits(place.cp, logprobs=out.logprobs, entropy=out.entropy, A=grads.get("A"), **alike)

    each = every({"logprobs": out.logprobs.detach(), "entropy": out.entropy, "grads": grads})
    rows = [each[cp * place.tps : (cp + 1) * place.tps] for cp in range(place.cps)]  # [cp][tp]

    def of_all_tokens(values):
        """Return the values of all tokens, from those of the ranks that share the tokens."""
        whole = values[0].new_empty(*case.labels.shape, *values[0].shape[case.labels.ndim :])
        for cp, value in enumerate(values):
            where = tokens_of(case, cp, place.cps, order)[0] if place.cps > 1 else slice(None)
            whole[where if case.labels.ndim == 1 else (slice(None), where)] = value
        return whole

    def gradient(name):
        parts = [[rank["grads"][name] for rank in row] for row in rows]
        if name == "A":  # every rank has all of it
            return parts[0][0]
        if name not in BY_TOKEN:
            return torch.cat([sum(parts[cp][tp] for cp in range(place.cps)) for tp in range(place.tps)])
        if name == "logits" or (name == "hidden" and scattered):
            return of_all_tokens([torch.cat(row, -1 if name == "logits" else -2) for row in parts])
        return of_all_tokens([row[0] if summed else sum(row) for row in parts])

    logprobs = of_all_tokens([row[0]["logprobs"] for row in rows])
    entropy = None if out.entropy is None else of_all_tokens([row[0]["entropy"] for row in rows])
    if entry in SCORES.values():  # scores do not know the loss's mask
        logprobs, entropy = (torch.where(case.counted, each, 0.0) for each in (logprobs, entropy))
    whole = {name: gradient(name) for name in grads}
    return Result(out.loss.detach(), logprobs, whole, entropy, frozen=case.frozen), out


def judge(case, split, objective=GSPO, *arguments, **options):
    """Check that a case is as exact as plain PyTorch in one process, with the same bits on all ranks."""
    result, out = run(case, split, objective, *arguments, **options)
    if dist.get_rank() == 0:
        assert_equals_oracle(result, case, objective)
    return out


def every(value):
    """Return each rank's value; shapes may differ."""
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def assert_same_bits(among=0, **values):
    """Assert that values have the same bits on all ranks, or on the ranks that pass the same ``among``."""

    def bits(value):
        return value.dtype, value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()

    seen = {}
    for number, theirs in every((among, {n: bits(v) for n, v in values.items() if v is not None})):
        for name, first in seen.setdefault(number, theirs).items():
            assert first == theirs[name], name


def validated():
    """Return a context in which the ranks compare their arguments."""
    return mock.patch.dict(os.environ, GSPO_KERNELS_VALIDATE="1")


def assert_all_raise(expected, run, culprit=None):
    """Assert that no rank waits and all raise an error with this text; a culprit raises its own error."""
    raised = "nothing", ""
    try:
        with validated():
            run()
    except Exception as error:
        raised = type(error).__name__, str(error)
    own = ("ValueError", "TypeError")
    for rank, (kind, message) in enumerate(ranks := every(raised)):
        assert expected in message and kind in (*own, "RanksDisagreeError"), (expected, rank, ranks)
        assert culprit is None or (kind in own) == (rank == culprit), (expected, rank, ranks)


class Wire:
    """The collectives that this rank takes part in: kind, group, and the bytes that the rank hands in."""

    KINDS = ("all_gather", "all_reduce", "broadcast", "reduce")

    def __init__(self):
        self.seen = []

    def sent(self, *kinds):
        """Return the bytes of these kinds of collectives, or of all kinds."""
        return sum(size for kind, _, size in self.seen if not kinds or kind in kinds)

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        for kind in self.KINDS:
            self.patch.setattr(dist, kind, self._counted(kind, getattr(dist, kind)))
        return self

    def _counted(self, kind, function):
        def counted(*tensors, **options):
            self.seen.append((kind, options["group"].group_name, tensors[-1].nbytes))
            return function(*tensors, **options)

        return counted

    def __exit__(self, *_):
        self.patch.undo()
