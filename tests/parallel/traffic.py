"""What ranks send each other and when, how much memory that takes, and what happens when one fails."""

import itertools
import time

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gspo_kernels as gk
from gspo_kernels import step
from gspo_kernels.integrations.layouts import tokens_of_rank
from gspo_kernels.linear.head import Head
from gspo_kernels.linear.sums import HeadSums
from tests.cases import call, make_case
from tests.parallel.functions import FORMS, TEACHER_MASK, columns_of, distill, sides
from tests.parallel.ranks import (
    ENTRIES,
    GSPO,
    LENGTHS,
    VOCABULARY,
    Wire,
    every,
    leaves_of,
    of_ranks,
    place_of,
    run,
    share,
)

SIZES_BYTES = 48
"""What a rank of a ``tp_group`` sends to each other rank before a call over hidden states is cut."""


def sent(case, split, objective=GSPO, **options):
    """The bytes of a forward and a backward on this rank; and its case."""
    local = share(case, place_of(split))
    with Wire() as wire:
        out = call(
            local, leaves_of(local), ENTRIES[case.kind], objective, "cpp", **place_of(split).groups, **options
        )
        out.loss.backward()
    return wire, local


@of_ranks(2, 4)
def bytes_of_shared_vocabularies():
    """The formula of docs/parallel.md; nothing of it knows the vocabulary's size."""
    for vocabulary, terms, schedule in (
        (VOCABULARY, "plain", "two_pass"),
        (VOCABULARY, "entropy", "two_pass"),
        (4 * VOCABULARY, "plain", "deferred"),
    ):
        case = make_case("linear", "packed", terms, vocabulary=vocabulary, bias=False)
        tokens, width = case.inputs["hidden"].shape
        options = {"schedule": schedule, "skip_inactive": "none", "max_chunk_bytes": 16 * vocabulary}
        rank, size = dist.get_rank(), dist.get_world_size()
        for scattered in (False, True):
            weight = case.inputs["weight"].chunk(size)[rank]
            hidden = case.inputs["hidden"].tensor_split(size)[rank if scattered else slice(None)]
            leaves = {"hidden": hidden if scattered else case.inputs["hidden"], "weight": weight}
            leaves = {name: value.clone().requires_grad_() for name, value in leaves.items()}
            group = {"tp_group": dist.group.WORLD, "sequence_parallel": scattered}
            with Wire() as wire:
                call(case, leaves, ENTRIES["linear"], GSPO, "cpp", **options, **group).loss.backward()
            passes = 1 + (schedule == "two_pass")
            rows = tokens * (16 if terms == "entropy" else 12)
            assert wire.sent("all_gather") == passes * SIZES_BYTES + rows
            assert wire.sent("reduce" if scattered else "all_reduce") == 4 * tokens * width
            assert wire.sent("all_reduce" if scattered else "reduce") == 0
            assert wire.sent("broadcast") == scattered * passes * 4 * tokens * width


@of_ranks(2)
def bytes_of_teachers():
    """Whatever the vocabulary: two log-sum-exps and log-probs, the two sums, and dHidden."""
    counted, columns = int(TEACHER_MASK.sum()), place_of("tp").columns()
    parts = [columns_of(side, *columns) for side in sides(True, torch.float32)]
    for form, bytes_of_row in ((FORMS[1], 12 + 12 + 16), (FORMS[3], 2 * 8 * 5 + 2 * 8 * (2 * 5 + 1))):
        with Wire() as wire:
            distill(*parts, form, tp_group=dist.group.WORLD)
        assert wire.sent("all_gather") == SIZES_BYTES + counted * bytes_of_row
        assert wire.sent("all_reduce") == counted * 8 * 4


@of_ranks(2)
def bytes_of_shared_sequences():
    """The formula of docs/parallel.md: nothing of it knows how many tokens there are."""
    for kind, objective, terms, sums, numbers, extremes, beforehand in (
        ("logprobs", gk.GSPO(), "plain", 1, 3, 0, 0),
        ("logprobs", gk.GSPOToken(0.2, 0.2), "plain", 1, 7, 1, 0),
        ("logprobs", gk.GRPO(), "plain", 0, 7, 1, 0),
        ("logprobs", gk.GRPO(), "kl_tensor", 0, 9, 1, 0),
        ("logprobs", gk.GSPO(), "kl_ratio_weighted", 2, 5, 0, 0),
        ("linear", gk.GSPO(), "plain", 1, 3, 0, 0),
        ("linear", gk.GRPO(), "plain", 0, 7, 1, 1),
        ("linear", gk.GSPO(), "on_policy", 1, 3, 0, 2),
    ):
        for lengths in (LENGTHS, tuple(8 * length for length in LENGTHS)):
            wire, _ = sent(make_case(kind, "packed", terms, lengths=lengths, vocabulary=64), "cp", objective)
            reduced = 8 * ((2 + sums + beforehand) * len(lengths) + numbers)
            assert wire.sent("all_reduce") == reduced, (objective, terms, wire.seen)
            forms = 8 * objective.takes_token_advantages
            assert wire.sent("all_gather") == forms + 16 * extremes, (objective, terms, wire.seen)
            assert wire.sent() == wire.sent("all_reduce", "all_gather")
    # objectives over the batch: log-prob, mask, old log-prob and advantage of each token, once
    case = make_case("logprobs", "packed", "plain+token_advantages", lengths=LENGTHS)
    wire, local = sent(case, "cp", gk.KLCov())
    assert wire.sent("all_gather") == 8 + 8 * len(LENGTHS) + 8 * max(every(len(local.labels))) * 4
    assert not wire.sent("all_reduce")


class Reduction:
    """What ranks exchange; notes when it was waited for."""

    def __init__(self, work, order):
        self.work, self.order = work, order

    def wait(self):
        self.order.append("summed")
        self.work.wait()


def watched(collective, order):
    """A collective of torch that notes when it began, and when it was waited for."""
    original = getattr(dist, collective)

    def begin(*tensors, **options):
        order.append("begun")
        return Reduction(original(*tensors, **options), order)

    return begin


@of_ranks(2)
def dhidden_is_summed_while_the_head_is_multiplied():
    case, reduce, add = make_case("linear", vocabulary=VOCABULARY), dist.all_reduce, HeadSums.add
    for schedule, rows in (("deferred", 4), ("two_pass", 4), ("aligned", 9)):
        order = []

        def added(self, *arguments, order=order):
            order.append("head")
            return add(self, *arguments)

        dist.all_reduce, HeadSums.add = watched("all_reduce", order), added
        try:
            options = {"skip_inactive": "none", "max_chunk_bytes": 4 * VOCABULARY * rows}
            run(case, "tp", schedule=schedule, **options)
        finally:
            dist.all_reduce, HeadSums.add = reduce, add
        chunks = order.count("begun")
        assert chunks and order == ["begun", "head", "summed"] * chunks, (schedule, order)


@of_ranks(2)
def hidden_states_are_gathered_while_a_chunk_is_multiplied():
    """Each product finds those of the next chunk on their way; the last one of a pass has no next."""
    case, send, project, order, ahead = (
        make_case("linear", vocabulary=64),
        dist.broadcast,
        Head.logits,
        [],
        [],
    )

    def logits(self, hidden, out):
        ahead.append(order.count("begun") - order.count("summed"))
        return project(self, hidden, out)

    dist.broadcast, Head.logits = watched("broadcast", order), logits
    try:
        options = {"schedule": "two_pass", "skip_inactive": "none", "max_chunk_bytes": 8 * VOCABULARY}
        run(case, "tp", sequence_parallel=True, **options)
    finally:
        dist.broadcast, Head.logits = send, project
    first, second = ahead[: len(ahead) // 2], ahead[len(ahead) // 2 :]
    for one in (first, second):
        assert len(one) > 2 and all(one[:-1]) and one[-1] == 0, ahead


class Largest(TorchDispatchMode):
    """The most elements that an operation has returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        returned = function(*args, **(kwargs or {}))
        for value in tree_leaves(returned):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return returned


@of_ranks(4)
def a_million_tokens():
    """One sequence over all ranks: nothing that a rank has or sends is as long as the sequence."""
    tokens, ranks, groups = 2**20, dist.get_world_size(), {"parallel": gk.Parallel(**place_of("cp").groups)}
    whole = torch.tensor([0, tokens], dtype=torch.int32)
    where, offsets = tokens_of_rank(whole, dist.get_rank(), ranks)
    leaf = torch.full((len(where),), -1.0).requires_grad_()
    old = leaf.detach() - (where - tokens / 2) / tokens * 1e-3  # differs from token to token; its mean is 0
    largest, evaluate = Largest(), step.evaluate

    def watched_evaluate(*arguments, **named):
        with largest:
            return evaluate(*arguments, **named)

    step.evaluate = watched_evaluate  # inside of the operator, where a mode around it sees nothing
    try:
        with Wire() as wire:
            out = gk.policy_loss(leaf, old, torch.ones(1), cu_seqlens=offsets, **groups)
            out.loss.backward()
    finally:
        step.evaluate = evaluate
    assert tokens // ranks <= largest.elements <= tokens // ranks + 16
    assert wire.sent() <= 80
    torch.testing.assert_close(out.metrics["ratio/mean"], torch.ones(()), rtol=0, atol=1e-8)
    torch.testing.assert_close(leaf.grad, torch.full_like(leaf, -1 / tokens))
    peaks = []
    for length in (2**10, 2**18):
        hidden, weight = torch.zeros(length, 4, requires_grad=True), torch.zeros(64, 4, requires_grad=True)
        ids, ends = torch.zeros(length, dtype=torch.int64), torch.tensor([0, length], dtype=torch.int32)
        plan = gk.explain_schedule(
            hidden, weight, ids, torch.zeros(length), torch.ones(1), cu_seqlens=ends, max_chunk_bytes=2**16,
            **groups,
        )  # fmt: skip
        peaks.append(plan.peak_bytes)
    assert peaks[0] == peaks[1]


@of_ranks(2)
def a_failure_in_the_middle():
    """A rank runs out of memory after the agreement: the others wait as long as their group allows."""
    for split, owner, name, kind in (("tp", Head, "logits", "linear"), ("cp", step, "evaluate", "logprobs")):
        original, calls, began = getattr(owner, name), itertools.count(), time.monotonic()
        first = 1 if split == "tp" else 0  # between two chunks

        def failing(*arguments, original=original, calls=calls, first=first, **named):
            if next(calls) == first and dist.get_rank() == 1:
                raise MemoryError("no memory for another chunk")
            return original(*arguments, **named)

        place = place_of(split, seconds=2)
        local = share(make_case(kind, vocabulary=VOCABULARY, lengths=LENGTHS), place)
        options = {"max_chunk_bytes": 256} if split == "tp" else {}
        setattr(owner, name, failing)
        try:
            call(local, leaves_of(local), ENTRIES[kind], GSPO, "cpp", **place.groups, **options)
        except MemoryError:
            assert dist.get_rank() == 1
        except RuntimeError as error:
            assert dist.get_rank() != 1 and time.monotonic() - began < 30, error
        else:
            raise AssertionError("nothing was raised")
        finally:
            setattr(owner, name, original)
        dist.barrier()  # who failed waits for the others
