"""The vocabulary cut up over ranks: what they send each other, and what happens when one refuses."""

import itertools
import time
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import gspo_kernels as gk
from gspo_kernels.linear.chunks import SIZES_BYTES
from gspo_kernels.linear.head import Head
from gspo_kernels.linear.sums import HeadSums
from gspo_kernels.parallel.agreement import RanksDisagreeError
from tests.cases import Result, call, make_case, over_ranks
from tests.judging import assert_equals_oracle
from tests.parallel.ranks import (
    LOSSES,
    SCORES,
    VOCABULARY,
    Wire,
    assert_all_raise,
    assert_same_bits,
    every,
    of_ranks,
)
from tests.parallel.vocabulary import cut, judge, shares


@of_ranks(2, 4)
def sequence_parallel():
    """Hidden states that lie on the ranks token by token, unevenly: one rank has none."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for layout, schedule, dtype in itertools.product(
        ("packed", "padded"), ("deferred", "two_pass", "auto"), (torch.float32, torch.bfloat16)
    ):
        case = make_case("linear", layout, vocabulary=VOCABULARY, dtype=dtype)
        length = case.labels.shape[-1]
        ends = [0, *(length * (r + 1) // (size - 1) for r in range(size - 1)), length]
        leaves = cut(case.inputs)
        hidden = case.inputs["hidden"].narrow(-2, ends[rank], ends[rank + 1] - ends[rank])
        leaves["hidden"] = hidden.clone().requires_grad_()
        options = {"sequence_parallel": True, "schedule": schedule, "max_chunk_bytes": 256}
        out = call(case, leaves, LOSSES["linear"], gk.GSPO(), "cpp", tp_group=dist.group.WORLD, **options)
        out.loss.backward()
        assert_same_bits(loss=out.loss, logprobs=out.logprobs)
        grads = {"hidden": torch.cat(every(leaves["hidden"].grad), -2)}
        grads |= {name: torch.cat(every(leaves[name].grad)) for name in ("weight", "bias")}
        if rank == 0:
            assert_equals_oracle(Result(out.loss.detach(), out.logprobs, grads), case, gk.GSPO())


@of_ranks(2, 4)
def bytes_on_the_wire():
    """The formula of docs/parallel.md, and of the plan; nothing of it knows the vocabulary's size."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for vocabulary, terms, schedule, scattered in (
        (VOCABULARY, "plain", "two_pass", False),
        (VOCABULARY, "entropy", "two_pass", False),
        (4 * VOCABULARY, "entropy", "two_pass", False),
        (4 * VOCABULARY, "plain", "deferred", False),
        (VOCABULARY, "plain", "two_pass", True),
    ):
        case = make_case("linear", "packed", terms, vocabulary=vocabulary, bias=False)
        tokens, width = case.inputs["hidden"].shape
        start, end = shares(vocabulary)[rank]
        first, last = (tokens * rank // size, tokens * (rank + 1) // size) if scattered else (0, tokens)
        leaves = {"hidden": case.inputs["hidden"][first:last], "weight": case.inputs["weight"][start:end]}
        leaves = {name: value.clone().requires_grad_() for name, value in leaves.items()}
        options = {"schedule": schedule, "skip_inactive": "none", "tp_group": dist.group.WORLD}
        options |= {"sequence_parallel": scattered, "max_chunk_bytes": 16 * vocabulary}
        with Wire() as wire:
            call(case, leaves, LOSSES["linear"], gk.GSPO(), "cpp", **options).loss.backward()
        passes = 1 + (schedule == "two_pass")
        rows = tokens * (16 if terms == "entropy" else 12)
        assert wire.sent["all_gather"] == passes * SIZES_BYTES + rows
        assert wire.sent["reduce" if scattered else "all_reduce"] == 4 * tokens * width
        assert wire.sent["all_reduce" if scattered else "reduce"] == 0
        assert wire.sent["broadcast"] == scattered * 2 * 4 * tokens * width
        plan = gk.explain_schedule(
            leaves["hidden"], leaves["weight"], case.labels, case.old_logprobs, case.advantages,
            cu_seqlens=case.cu_seqlens, **case.terms, **over_ranks(options),
        )  # fmt: skip
        assert plan.sent_bytes == sum(wire.sent.values())
        said = plan.overlaps.split(", ")
        assert ("hidden states' while the chunk before is multiplied" in said) == scattered
        assert any("first pass" in each for each in said) == (schedule == "two_pass")
        assert "dHidden's while dWeight is multiplied" in said and plan.overlaps in str(plan)
        assert scattered or plan.messages == sum(wire.calls.values()), (plan.messages, wire.calls)


class Reduction:
    """What ranks exchange, and when it was waited for."""

    def __init__(self, work, order):
        self.work, self.order = work, order

    def wait(self):
        self.order.append("summed")
        self.work.wait()


@of_ranks(2)
def dhidden_is_summed_while_the_head_is_multiplied():
    case = make_case("linear", vocabulary=VOCABULARY)
    reduce, add = dist.all_reduce, HeadSums.add
    for schedule in ("deferred", "two_pass", "aligned"):
        order = []

        def begun(*tensors, order=order, **options):
            order.append("begun")
            return Reduction(reduce(*tensors, **options), order)

        def added(self, *arguments, order=order):
            order.append("head")
            return add(self, *arguments)

        dist.all_reduce, HeadSums.add = begun, added
        try:
            rows = {"aligned": 9}.get(schedule, 4)
            options = {"skip_inactive": "none", "max_chunk_bytes": 4 * VOCABULARY * rows}
            judge(case, LOSSES["linear"], gk.GSPO(), schedule=schedule, **options)
        finally:
            dist.all_reduce, HeadSums.add = reduce, add
        chunks = order.count("begun")
        assert chunks and order == ["begun", "head", "summed"] * chunks, (schedule, order)


@of_ranks(2)
def statistics_are_gathered_while_the_next_chunk_is_multiplied():
    """Where no gradient waits for them: in scoring, and in the first of two passes."""
    case = make_case("linear", vocabulary=VOCABULARY)
    gather, project = dist.all_gather, Head.logits
    for entry, options in ((SCORES["linear"], {}), (LOSSES["linear"], {"schedule": "two_pass"})):
        order, under_way = [], []

        def begun(*tensors, order=order, **options):
            order.append("begun")
            return Reduction(gather(*tensors, **options), order)

        def logits(self, hidden, out, order=order, under_way=under_way):
            under_way.append(order.count("begun") - order.count("summed"))
            return project(self, hidden, out)

        dist.all_gather, Head.logits = begun, logits
        try:
            judge(case, entry, gk.GSPO(), max_chunk_bytes=8 * VOCABULARY, **options)
        finally:
            dist.all_gather, Head.logits = gather, project
        first, second = under_way[:3], under_way[3:]  # the second one has a gradient
        assert first == [0, 1, 1] and second and not any(second), under_way


@of_ranks(2)
def hidden_states_are_gathered_while_a_chunk_is_multiplied():
    """Each product finds those of the next chunk on their way; the last one of a pass has no next."""
    case = make_case("linear", vocabulary=VOCABULARY)
    tokens, rank = len(case.labels), dist.get_rank()
    send, project, order, ahead = dist.broadcast, Head.logits, [], []

    def begun(*tensors, **options):
        order.append("begun")
        return Reduction(send(*tensors, **options), order)

    def logits(self, hidden, out):
        ahead.append(order.count("begun") - order.count("summed"))
        return project(self, hidden, out)

    leaves = cut(case.inputs)
    own = case.inputs["hidden"][tokens * rank // 2 : tokens * (rank + 1) // 2]
    leaves["hidden"] = own.clone().requires_grad_()
    options = {"schedule": "two_pass", "skip_inactive": "none", "max_chunk_bytes": 8 * VOCABULARY}
    options |= {"tp_group": dist.group.WORLD, "sequence_parallel": True}
    dist.broadcast, Head.logits = begun, logits
    try:
        call(case, leaves, LOSSES["linear"], gk.GSPO(), "cpp", **options).loss.backward()
    finally:
        dist.broadcast, Head.logits = send, project
    first, second = ahead[: len(ahead) // 2], ahead[len(ahead) // 2 :]
    for one in (first, second):
        assert len(one) > 2 and all(one[:-1]) and one[-1] == 0, ahead


@of_ranks(2, 4)
def errors():
    """What one rank refuses is an error on all of them, at once and by name."""
    here = dist.get_rank()
    for kind, entry in (*LOSSES.items(), *SCORES.items()):
        case = make_case(kind, "padded", vocabulary=VOCABULARY)

        def wrong(changed, entry=entry, case=case, **options):
            changed = changed if here == 1 else case
            leaves = cut(case.inputs)
            options = {"tp_group": dist.group.WORLD, **options}
            return lambda: call(changed, leaves, entry, gk.GSPO(), "cpp", **options)

        short = replace(case, labels=case.labels[:, 1:])
        assert_all_raise("labels of shape", 1, wrong(short))
        low = replace(case, labels=case.labels - 10**6)
        assert_all_raise("in a counted position", 1, wrong(low))
        if entry in LOSSES.values():
            negative = replace(case, terms={"lengths": torch.full((6,), -1.0)})
            assert_all_raise("lengths: expected positive", 1, wrong(negative))
            if kind == "linear":
                late = wrong(negative, schedule="two_pass")
                assert_all_raise("lengths: expected positive", 1, late)
        cold = replace(case, logit_options={"temperature": torch.zeros(6)})
        assert_all_raise("temperature: expected only positive numbers", 1, wrong(cold))
    case = make_case("linear", "padded", vocabulary=VOCABULARY)
    leaves, group = cut(case.inputs), {"tp_group": dist.group.WORLD}
    other = gk.GSPO() if here else gk.GRPO()
    for expected, options in (
        ("vocab_range: the ranks have", {"vocab_range": shares()[0]}),
        ("objective: differs", {"objective": other}),
        ("skip_inactive: differs", {"skip_inactive": "none" if here else "backward"}),
        ("hidden: the ranks have", {"sequence_parallel": True}),
    ):
        objective = options.pop("objective", gk.GSPO())
        assert_all_raise(
            expected,
            None,
            lambda o=options, one=objective: call(case, leaves, LOSSES["linear"], one, "cpp", **group, **o),
            (ValueError, RanksDisagreeError),
        )
    for message, options in (
        ("tp_group: got int", {"tp_group": 3}),
        ("vocab_range: got (0, 3), expected (first, first + ", {**group, "vocab_range": (0, 3)}),
        ("vocab_range: got (0, 64) without a tp_group", {"vocab_range": (0, 64)}),
        ("sequence_parallel: got True without a tp_group", {"sequence_parallel": True}),
    ):
        with torch.no_grad():
            assert_all_raise(
                message,
                None,
                lambda o=options: call(case, leaves, LOSSES["linear"], gk.GSPO(), "triton", **o),
                (ValueError, TypeError),
            )


@of_ranks(2)
def a_failure_in_the_middle():
    """A rank that runs out of memory between two chunks: the others wait as long as their group allows."""
    group = dist.new_group(timeout=timedelta(seconds=4))
    case = make_case("linear", vocabulary=VOCABULARY)
    theirs, projected = Head.logits, []

    def logits(self, hidden, out):
        projected.append(len(hidden))
        if dist.get_rank() == 1 and len(projected) == 2:
            raise MemoryError("no memory for another chunk")
        return theirs(self, hidden, out)

    leaves, began = cut(case.inputs), time.monotonic()
    Head.logits = logits
    try:
        call(case, leaves, LOSSES["linear"], gk.GSPO(), "cpp", tp_group=group, max_chunk_bytes=256)
    except MemoryError:
        assert dist.get_rank() == 1
    except RuntimeError as error:
        assert dist.get_rank() != 1 and time.monotonic() - began < 30, error
    else:
        raise AssertionError("nothing was raised")
    finally:
        Head.logits = theirs


@of_ranks(2)
def dtensors():
    """The vocabulary in torch's own uneven shares; hidden states replicated, or scattered over tokens."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    case = make_case("linear", vocabulary=61)
    for placement in (Replicate(), Shard(0)):
        leaves = {
            name: distribute_tensor(value, mesh, [placement if name == "hidden" else Shard(0)])
            .detach()
            .requires_grad_()
            for name, value in case.inputs.items()
        }
        out = call(case, leaves, LOSSES["linear"], gk.GSPO(), "cpp")
        out.loss.backward()
        assert_same_bits(loss=out.loss)
        assert leaves["weight"].grad.placements == (Shard(0),)
        grads = {name: leaf.grad.full_tensor() for name, leaf in leaves.items()}
        if dist.get_rank() == 0:
            assert_equals_oracle(Result(out.loss.detach(), out.logprobs, grads), case, gk.GSPO())
    scored = make_case("logits", vocabulary=61)
    whole = scored.inputs["logits"].clone().requires_grad_()
    placed = distribute_tensor(whole.detach(), mesh, [Shard(whole.ndim - 1)]).requires_grad_()
    found, expected = (gk.token_logprobs(logits, scored.labels).logprobs for logits in (placed, whole))
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(each.sum(), leaf)[0] for each, leaf in ((found, placed), (expected, whole))]
    torch.testing.assert_close(grads[0].full_tensor(), grads[1])
    for wrong, expected in (
        ({"weight": Shard(1)}, "weight: is a DTensor with placement Shard(dim=1), expected Replicate()"),
        ({"hidden": Shard(1)}, "hidden: is a DTensor with placement Shard(dim=1)"),
        ({"bias": Replicate()}, "bias: expected a DTensor of weight's placement"),
        ({"hidden": Partial()}, "hidden: is a DTensor with placement Partial"),
    ):
        placements = {"hidden": Replicate(), "weight": Shard(0), "bias": Shard(0), **wrong}
        leaves = {
            name: distribute_tensor(value, mesh, [placements[name]])
            if placements[name] != Partial()
            else DTensor.from_local(value, mesh, [Partial()])
            for name, value in case.inputs.items()
        }
        assert_all_raise(
            expected, None, lambda given=leaves: call(case, given, LOSSES["linear"], gk.GSPO(), "cpp")
        )


@of_ranks(2)
def compiled():
    """One graph, its operators wait for each other inside."""
    case = make_case("linear", vocabulary=VOCABULARY)
    start, end = shares()[dist.get_rank()]

    def loss(hidden, weight):
        return gk.fused_linear_policy_loss(
            hidden, weight, case.labels, case.old_logprobs, case.advantages, cu_seqlens=case.cu_seqlens,
            parallel=gk.Parallel(dist.group.WORLD, (start, end)),
        ).loss  # fmt: skip

    gradients = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaves = [
            value.clone().requires_grad_()
            for value in (case.inputs["hidden"], case.inputs["weight"][start:end])
        ]
        value = function(*leaves)
        gradients.append([value.detach(), *torch.autograd.grad(value, leaves)])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
