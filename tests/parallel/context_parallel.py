"""What every rank of a context-parallel group does; the cases of ``test_context_parallel``."""

import itertools
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gspo_kernels as gk
from gspo_kernels.integrations.layouts import tokens_of_rank
from gspo_kernels.parallel.agreement import AGREEMENT_BYTES, RanksDisagreeError
from tests.accuracy import Spread, assert_as_exact
from tests.cases import KIND, Result, assert_equals_oracle, call, make_case
from tests.objectives.sample_batches import EVERY, examples, make_batch
from tests.parallel.tensor_parallel import (
    LOSSES,
    VOCABULARY,
    Wire,
    assert_all_raise,
    assert_same_bits,
    every,
    shares,
)

ENTRIES = {"logprobs": "policy_loss", **LOSSES}
ORDERS = ("zigzag", "contiguous", "stream")
BY_TOKEN = ("hidden", "logits", "logprobs", "entropy")
REFUSED = ("TLGRPO", "ClipCov", "KLCov")
LENGTHS = (3, 0, 1, 9, 2, 1)


def positions(case, order, rank=None, ranks=None):
    """Which of a case's tokens a rank has, and its offsets; columns, and None, of a padded case."""
    rank = dist.get_rank() if rank is None else rank
    ranks = dist.get_world_size() if ranks is None else ranks
    if case.cu_seqlens is None:
        whole = torch.tensor([0, case.labels.shape[1]])
        return tokens_of_rank(whole, rank, ranks, order=order).values, None
    return tokens_of_rank(case.cu_seqlens, rank, ranks, order=order)


def part(case, where, offsets):
    """The case of a rank's own tokens."""
    dim = 0 if case.cu_seqlens is not None else 1
    shape = case.labels.shape

    def cut(value):
        per_token = isinstance(value, torch.Tensor) and value.shape[: len(shape)] == shape
        return value.index_select(dim, where) if per_token else value

    inputs = {name: cut(value) if name in BY_TOKEN else value for name, value in case.inputs.items()}
    return replace(
        case,
        labels=cut(case.labels),
        inputs=inputs,
        old_logprobs=cut(case.old_logprobs),
        advantages=cut(case.advantages),
        loss_mask=cut(case.loss_mask),
        cu_seqlens=offsets,
        terms={name: cut(value) for name, value in case.terms.items()},
    )


def gathered(case, value, order, ranks=None, group=None):
    """A value of all tokens from those of each rank."""
    dim = 0 if case.cu_seqlens is not None else 1
    parts = every(value)
    whole = value.new_empty(*case.labels.shape, *value.shape[case.labels.ndim :])
    for rank, own in enumerate(parts):
        whole.index_copy_(dim, positions(case, order, rank)[0], own)
    return whole


def run(case, order="zigzag", objective=gk.GSPO(), backend="cpp", frozen=False, **options):
    """A case whose sequences are cut, as ``tests.cases.run`` has it; and the output of the call."""
    own = part(case, *positions(case, order))
    trained = [name for name in own.inputs if not (frozen and name in ("weight", "bias"))]
    leaves = {name: value.clone().requires_grad_(name in trained) for name, value in own.inputs.items()}
    group = {"cp_group": dist.group.WORLD}
    out = call(own, leaves, ENTRIES[case.kind], objective, backend, **group, **options)
    out.loss.backward()
    assert_same_bits(loss=out.loss, **out.metrics)
    grads = {
        name: gathered(case, leaves[name].grad, order) if name in BY_TOKEN else sum(every(leaves[name].grad))
        for name in trained
    }
    entropy = None if out.entropy is None else gathered(case, out.entropy, order)
    return Result(out.loss.detach(), gathered(case, out.logprobs, order), grads, entropy), out


def judge(case, order="zigzag", objective=gk.GSPO(), backend="cpp", **options):
    """As exact as plain PyTorch in one process, and the same bits on all ranks."""
    result, out = run(case, order, objective, backend, **options)
    if dist.get_rank() == 0:
        assert_equals_oracle(result, case, objective)
    return out


def layouts_and_terms():
    """Padded and packed, each way to cut; no and one token, sequences over every rank, holes, every term."""
    for kind, layout, terms in itertools.product(ENTRIES, ("padded", "packed"), ("all", "plain")):
        case = make_case(kind, layout, terms, vocabulary=VOCABULARY, lengths=LENGTHS)
        for order in ORDERS:
            judge(case, order, gk.GSPOToken(0.2, 0.2))
            if terms == "plain":
                judge(case, order, gk.GSPO())


CASES = (layouts_and_terms,)
