"""What ranks send each other, when they do so, and how much memory that takes."""

import torch.distributed as dist

import gspo_kernels as gk
from tests.cases import call, make_case
from tests.distributed.ranks import (
    ENTRIES,
    GSPO,
    LENGTHS,
    VOCABULARY,
    Wire,
    every,
    leaves_of,
    of_ranks,
    place_of,
    share,
)

SIZES_BYTES = 56
"""Bytes that a rank of a ``tp_group`` sends to each other rank before a pass over hidden states is cut."""


def sent(case, split, objective=GSPO, **options):
    """Run a forward and a backward; return the ``Wire`` with this rank's bytes, and the rank's case."""
    local, options = share(case, place_of(split)), place_of(split).groups | options
    with Wire() as wire:
        call(local, leaves_of(local), ENTRIES[case.kind], objective, "cpp", **options).loss.backward()
    return wire, local


@of_ranks(2, 4)
def bytes_of_shared_vocabularies():
    """Bytes follow the formula of docs/parallel.md, for any size of the vocabulary."""
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
def bytes_of_shared_sequences():
    """Bytes follow the formula of docs/parallel.md, for any number of tokens."""
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
