"""Sequences cut up over ranks: what they send each other, and what happens when one refuses."""

import itertools
import time
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gspo_kernels as gk
from gspo_kernels import step
from gspo_kernels.integrations.layouts import tokens_of_rank
from gspo_kernels.parallel.agreement import RanksDisagreeError
from tests.cases import Result, call, make_case
from tests.judging import assert_equals_oracle
from tests.objectives.sample_batches import examples, make_batch
from tests.parallel.ranks import LOSSES, VOCABULARY, Wire, assert_all_raise, assert_same_bits, every, of_ranks
from tests.parallel.sequences import ENTRIES, LENGTHS, part, positions, run


@of_ranks(4)
def with_the_vocabulary_cut_too():
    """Context parallel 2 x tensor parallel 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    cp, tp = mesh.get_local_rank("cp"), mesh.get_local_rank("tp")
    half = slice(tp * VOCABULARY // 2, (tp + 1) * VOCABULARY // 2)
    groups = {"cp_group": mesh["cp"], "tp_group": mesh["tp"]}
    for kind, terms in itertools.product(LOSSES, ("all", "plain")):
        case = make_case(kind, "packed", terms, vocabulary=VOCABULARY, lengths=LENGTHS)
        own = part(case, *positions(case, "zigzag", cp, 2))
        shards = {
            name: value[half] if name in ("weight", "bias") else value for name, value in own.inputs.items()
        }
        if kind == "logits":
            shards["logits"] = shards["logits"][:, half]
        leaves = {name: value.clone().requires_grad_() for name, value in shards.items()}
        out = call(own, leaves, LOSSES[kind], gk.GSPOToken(0.2, 0.2), "cpp", **groups)
        out.loss.backward()
        assert_same_bits(loss=out.loss, **out.metrics)
        all_grads, scores = every({name: leaf.grad for name, leaf in leaves.items()}), every(out.logprobs)
        grads = {}
        for name in ("weight", "bias") if kind == "linear" else ():
            parts = [each[name] for each in all_grads]
            grads[name] = torch.cat([parts[0] + parts[2], parts[1] + parts[3]])
        tokens = {"logprobs": [scores[0], scores[2]]}
        if kind == "linear":
            tokens["hidden"] = [all_grads[0]["hidden"], all_grads[2]["hidden"]]
        else:
            each = [one["logits"] for one in all_grads]
            tokens["logits"] = [torch.cat(each[:2], 1), torch.cat(each[2:], 1)]
        whole = {}
        for name, (first, second) in tokens.items():
            whole[name] = first.new_empty(len(case.labels), *first.shape[1:])
            for rank, value in enumerate((first, second)):
                whole[name][positions(case, "zigzag", rank, 2)[0]] = value
        logprobs = whole.pop("logprobs")
        if dist.get_rank() == 0 and not case.wants_entropy:
            assert_equals_oracle(
                Result(out.loss.detach(), logprobs, grads | whole), case, gk.GSPOToken(0.2, 0.2)
            )

    def wrong():
        lengths = torch.full((len(LENGTHS),), -1.0 if dist.get_rank() == 3 else 30.0)
        return call(
            replace(own, terms={"lengths": lengths}), leaves, LOSSES[kind], gk.GSPO(), "cpp", **groups
        )

    assert_all_raise("lengths: expected positive", 3, wrong)


@of_ranks(2, 4)
def dtensors():
    """Tokens as a dimension of a mesh cuts them say the group; along with the vocabulary over another one."""
    four = dist.get_world_size() == 4
    names = ("cp", "tp") if four else ("cp",)
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    placements = {
        "hidden": [Shard(0), Replicate()],
        "weight": [Replicate(), Shard(0)],
        "bias": [Replicate(), Shard(0)],
        "logits": [Shard(0), Shard(1)],
    }
    for kind, objective in itertools.product(("linear", "logits"), (gk.GSPO(), gk.GRPO())):
        case = make_case(kind, "packed", vocabulary=61, lengths=LENGTHS)
        leaves = {
            name: distribute_tensor(value, mesh, placements[name][: mesh.ndim]).detach().requires_grad_()
            for name, value in case.inputs.items()
        }
        where, offsets = positions(case, "stream", mesh.get_local_rank("cp"), 2)
        own = part(case, where, offsets)
        out = call(own, leaves, LOSSES[kind], objective, "cpp")
        out.loss.backward()
        assert_same_bits(loss=out.loss, **out.metrics)
        if kind == "linear":
            assert leaves["weight"].grad.placements[0] == Partial()
        grads = {name: leaf.grad.full_tensor() for name, leaf in leaves.items()}
        logprobs = torch.cat(every(out.logprobs)[:: 2 if four else 1])
        if dist.get_rank() == 0:
            assert_equals_oracle(Result(out.loss.detach(), logprobs, grads), case, objective)
    own = replace(own, inputs=leaves)
    for name in ("cp_group", "tp_group"):
        assert_all_raise(
            f"{name}: logits as DTensors say it themselves, expected None",
            None,
            lambda n=name: call(own, own.inputs, LOSSES["logits"], gk.GSPO(), "cpp", **{n: mesh["cp"]}),
        )
    if four:
        twice = {**leaves, "logits": distribute_tensor(case.inputs["logits"], mesh, [Shard(1), Shard(1)])}
        assert_all_raise(
            "logits: 2 dimensions of device meshes cut the vocabulary",
            None,
            lambda: call(own, twice, LOSSES["logits"], gk.GSPO(), "cpp"),
        )


@of_ranks(2, 4)
def bytes_on_the_wire():
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
            case = make_case(kind, "packed", terms, lengths=lengths)
            own = part(case, *positions(case, "zigzag"))
            leaves = {name: value.clone().requires_grad_() for name, value in own.inputs.items()}
            with Wire() as wire:
                out = call(own, leaves, ENTRIES[kind], objective, "cpp", cp_group=dist.group.WORLD)
                out.loss.backward()
            assert wire.sent["all_reduce"] == 8 * ((2 + sums + beforehand) * len(lengths) + numbers), (
                objective,
                wire.sent,
            )
            forms = 8 * objective.takes_token_advantages
            assert wire.sent["all_gather"] == forms + 16 * extremes, (objective, wire.sent)
            assert not wire.sent["broadcast"] and not wire.sent["reduce"]
            if kind == "linear":
                arguments = (own.labels, own.old_logprobs, own.advantages)
                options = {"cu_seqlens": own.cu_seqlens, "objective": objective, **own.terms}
                plan = gk.explain_schedule(
                    leaves["hidden"],
                    leaves["weight"],
                    *arguments,
                    parallel=gk.Parallel(cp_group=dist.group.WORLD),
                    **options,
                )
                assert plan.sent_bytes == sum(wire.sent.values()), (objective, plan.sent_bytes, wire.sent)
                assert plan.messages == sum(wire.calls.values()), (objective, plan.messages, wire.calls)


@of_ranks(2, 4)
def bytes_of_tokens_on_the_wire():
    """Objectives over the batch: log-prob, mask, old log-prob and advantage of each token, once."""
    case = make_case("logprobs", "packed", "plain+token_advantages", lengths=LENGTHS)
    own = part(case, *positions(case, "zigzag"))
    with Wire() as wire:
        call(own, own.inputs, ENTRIES["logprobs"], gk.KLCov(), "cpp", cp_group=dist.group.WORLD)
    most, values = max(every(len(own.labels))), 4
    assert wire.sent["all_gather"] == 8 + 8 * len(LENGTHS) + 8 * most * values
    assert not wire.sent["all_reduce"]


@of_ranks(4)
def a_million_tokens():
    """One sequence over all ranks: nothing that a rank holds or sends is as long as the sequence."""
    tokens, ranks, group = 2**20, dist.get_world_size(), dist.group.WORLD
    whole = torch.tensor([0, tokens], dtype=torch.int32)
    own, offsets = tokens_of_rank(whole, dist.get_rank(), ranks)
    leaf = torch.full((len(own),), -1.0).requires_grad_()
    old = leaf.detach() - (own - tokens / 2) / tokens * 1e-3  # differs from token to token; its mean is 0
    options = {"cu_seqlens": offsets, "parallel": gk.Parallel(cp_group=group)}
    largest, theirs = Largest(), step.evaluate

    def watched(*arguments, **named):
        with largest:
            return theirs(*arguments, **named)

    step.evaluate = watched  # inside of the operator, where a mode around it sees nothing
    try:
        with Wire() as wire:
            out = gk.policy_loss(leaf, old, torch.ones(1), **options)
            out.loss.backward()
    finally:
        step.evaluate = theirs
    assert tokens // ranks <= largest.elements <= tokens // ranks + 16
    assert sum(wire.sent.values()) <= 80
    torch.testing.assert_close(out.metrics["ratio/mean"], torch.ones(()), rtol=0, atol=1e-8)
    torch.testing.assert_close(leaf.grad, torch.full_like(leaf, -1 / tokens))
    peaks = []
    for length in (2**10, 2**18):
        hidden, weight = torch.zeros(length, 4, requires_grad=True), torch.zeros(64, 4, requires_grad=True)
        ids, ends = torch.zeros(length, dtype=torch.int64), torch.tensor([0, length], dtype=torch.int32)
        plan = gk.explain_schedule(
            hidden, weight, ids, torch.zeros(length), torch.ones(1), cu_seqlens=ends,
            parallel=gk.Parallel(cp_group=group), max_chunk_bytes=2**16,
        )  # fmt: skip
        peaks.append(plan.peak_bytes)
    assert peaks[0] == peaks[1]


class Largest(TorchDispatchMode):
    """The most elements that an operation has returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        returned = function(*args, **(kwargs or {}))
        for value in tree_leaves(returned):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return returned


@of_ranks(2, 4)
def normalizers():
    """Of data-parallel ranks, whose averaged gradients and losses are those of the whole batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    for objective, everything in itertools.product(examples(max_scope="group"), (False, True)):
        batches = [
            make_batch(objective, seed=seed, length=4 + seed, everything=everything) for seed in range(size)
        ]
        aggregations = {objective.aggregation, "token_mean", "sum", "sequence_mean_token_sum"}
        for aggregation in sorted(aggregations):
            if (aggregation == "constant") != (objective.aggregation_constant is not None):
                continue
            one = replace(objective, aggregation=aggregation)
            pairs = one.outer_divisor()[0] == "pairs"

            def counted(batch, one=one, pairs=pairs, **groups):
                given = {"lengths": batch.terms.get("lengths")}
                if pairs:
                    given |= {"advantages": batch.advantages, "group_ids": batch.terms["group_ids"]}
                return gk.normalizer(one, batch.loss_mask, **given, **groups)

            got = counted(batches[rank], group=group)
            assert_same_bits(got=got)
            own = [counted(batch) for batch in batches]
            expected = (torch.ones(()).double() if aggregation == "sum" else sum(own)) / size
            torch.testing.assert_close(got, expected, rtol=1e-14, atol=0, msg=str(one))
    objective, masks = gk.GSPO(), [torch.ones(3, 4), torch.zeros(2, 5), torch.zeros(0, 2), torch.ones(1, 1)]
    mine = masks[rank]
    sequences = sum(int((mask.sum(1) > 0).sum()) for mask in masks[:size])
    assert gk.normalizer(objective, mine, group=group) == sequences / size
    assert gk.normalizer(objective, torch.zeros(2, 3), group=group) == 1
    case = make_case("logprobs", "packed", "holes", lengths=LENGTHS)
    cut = part(case, *positions(case, "stream"))
    for one in (gk.GSPO(), gk.DAPO()):
        alone = gk.normalizer(one, case.loss_mask, cu_seqlens=case.cu_seqlens)
        parallel = gk.Parallel(cp_group=group)
        together = gk.normalizer(one, cut.loss_mask, cu_seqlens=cut.cu_seqlens, parallel=parallel)
        assert_same_bits(together=together)
        assert alone == together
    for message, culprit, given, error in (
        ("loss_mask: got shape", 1, {"loss_mask": torch.ones(3) if rank == 1 else mine}, ValueError),
        ("objective: differs", None, {"objective": gk.DAPO() if rank else gk.GSPO()}, RanksDisagreeError),
    ):
        given = {"objective": objective, "loss_mask": mine, **given}
        assert_all_raise(message, culprit, lambda g=given: gk.normalizer(**g, group=group), error)


@of_ranks(2)
def errors():
    """What one rank refuses, or does differently, is an error on all of them, at once and by name."""
    here = dist.get_rank()
    for kind, entry in ENTRIES.items():
        case = make_case(kind, "packed", vocabulary=VOCABULARY, lengths=LENGTHS)
        own = part(case, *positions(case, "zigzag"))

        def calling(one, entry=entry, **options):
            options = {"objective": gk.GSPO(), "cp_group": dist.group.WORLD, **options}
            leaves = {name: value.clone().requires_grad_() for name, value in one.inputs.items()}
            return lambda: call(one, leaves, entry, options.pop("objective"), "cpp", **options)

        def of_one(own=own, **changed):
            return replace(own, **changed) if here == 1 else own

        assert_all_raise("old_logprobs: got shape", 1, calling(of_one(old_logprobs=torch.zeros(99))))
        grows = torch.tensor([0, 5, *own.cu_seqlens[2:]])
        assert_all_raise("cu_seqlens: decreases", 1, calling(of_one(cu_seqlens=grows.to(torch.int32))))
        negative = {"lengths": torch.full((len(LENGTHS),), -1.0 if here == 1 else 9.0)}
        assert_all_raise("lengths: expected positive", 1, calling(replace(own, terms=negative)))
        for expected, one, options in (
            ("advantages: differs", of_one(advantages=own.advantages + 1), {}),
            ("advantages: differs", of_one(advantages=own.old_logprobs), {"objective": gk.GRPO()}),
            ("old_logprobs: differs", of_one(old_logprobs=None), {}),
            ("normalizer: differs", replace(own, terms={"normalizer": 3.0 + (here == 1)}), {}),
            ("the number of sequences", of_one(**more_sequences(own)), {}),
            ("objective: differs", own, {"objective": gk.GSPO() if here else gk.GSPO(0.1, 0.2)}),
        ):
            assert_all_raise(expected, None, calling(one, **options), RanksDisagreeError)
        assert_all_raise("cp_group: got int", None, lambda: gk.Parallel(cp_group=3), TypeError)
    by_token = make_case("linear", "padded", "plain+token_advantages", vocabulary=VOCABULARY)
    assert_all_raise(
        "skip_inactive: 'all' needs one advantage per sequence",
        None,
        lambda: run(by_token, objective=gk.GRPO(), skip_inactive="all"),
    )


@of_ranks(2)
def a_failure_in_the_middle():
    """A rank that runs out of memory after the agreement: the others wait as long as their group allows."""
    group, theirs = dist.new_group(timeout=timedelta(seconds=4)), step.evaluate
    case = make_case("logprobs", "packed", lengths=LENGTHS)
    own, began = part(case, *positions(case, "zigzag")), time.monotonic()

    def evaluate(*arguments, **named):
        if dist.get_rank() == 1:
            raise MemoryError("no memory for the terms")
        return theirs(*arguments, **named)

    step.evaluate = evaluate
    try:
        call(own, own.inputs, ENTRIES["logprobs"], gk.GSPO(), "cpp", cp_group=group)
    except MemoryError:
        assert dist.get_rank() == 1
    except RuntimeError as error:
        assert dist.get_rank() != 1 and time.monotonic() - began < 30, error
    else:
        raise AssertionError("nothing was raised")
    finally:
        step.evaluate = theirs


def more_sequences(case):
    """An empty one at the end."""
    ends = torch.cat([case.cu_seqlens, case.cu_seqlens[-1:]])
    return {"cu_seqlens": ends, "advantages": torch.cat([case.advantages, torch.ones(1)])}


@of_ranks(2)
def compiled():
    """One graph, its operators wait for each other inside."""
    case = make_case("logits", vocabulary=VOCABULARY, lengths=LENGTHS)
    own = part(case, *positions(case, "zigzag"))

    def loss(logits):
        return gk.fused_policy_loss(
            logits, own.labels, own.old_logprobs, own.advantages, cu_seqlens=own.cu_seqlens,
            parallel=gk.Parallel(cp_group=dist.group.WORLD),
        ).loss  # fmt: skip

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaf = own.inputs["logits"].clone().requires_grad_()
        value = function(leaf)
        results.append((value.detach(), *torch.autograd.grad(value, leaf)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
