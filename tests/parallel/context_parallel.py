"""What every rank of a context-parallel group does; the cases of ``test_context_parallel``."""

import itertools
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gspo_kernels as gk
from gspo_kernels.integrations.layouts import tokens_of_rank
from gspo_kernels.parallel.agreement import AGREEMENT_BYTES, RanksDisagreeError
from tests.cases import Result, assert_equals_oracle, call, make_case
from tests.objectives.sample_batches import EVERY, examples, make_batch
from tests.parallel.tensor_parallel import (
    LOSSES,
    VOCABULARY,
    Wire,
    assert_all_raise,
    assert_same_bits,
    every,
)

ENTRIES = {"logprobs": "policy_loss", **LOSSES}
ORDERS = ("zigzag", "contiguous", "stream")
BY_TOKEN = ("hidden", "logits", "logprobs", "entropy")
REFUSED = ("TLGRPO", "ClipCov", "KLCov")
LENGTHS = (3, 0, 1, 9, 2, 1)
GSPO = gk.GSPO()


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


def gathered(case, value, order):
    """A value of all tokens from those of each rank."""
    dim = 0 if case.cu_seqlens is not None else 1
    parts = every(value)
    whole = value.new_empty(*case.labels.shape, *value.shape[case.labels.ndim :])
    for rank, own in enumerate(parts):
        whole.index_copy_(dim, positions(case, order, rank)[0], own)
    return whole


def run(case, order="zigzag", objective=GSPO, backend="cpp", frozen=False, **options):
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


def judge(case, order="zigzag", objective=GSPO, backend="cpp", **options):
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


def metrics():
    """Those of one process, to rounding, where ranks see different numbers of tokens."""
    for terms, objective in itertools.product(("all", "k3"), (gk.GSPO(), gk.GRPO())):
        case = make_case("logprobs", "packed", terms, lengths=LENGTHS)
        _, out = run(case, "contiguous", objective)
        whole = call(case, case.inputs, "policy_loss", objective, "cpp")
        assert out.metrics.keys() == whole.metrics.keys()
        for name, value in whole.metrics.items():
            torch.testing.assert_close(out.metrics[name], value, rtol=1e-6, atol=1e-12, msg=name)


def rows_of(batch, where, **group):
    """Some columns of a padded batch, as a rank's own."""

    def cut(value):
        return value[:, where] if value is not None and value.ndim == 2 else value

    return replace(
        batch,
        logprobs=cut(batch.logprobs),
        old_logprobs=cut(batch.old_logprobs),
        advantages=cut(batch.advantages),
        loss_mask=cut(batch.loss_mask),
        terms={**{name: cut(value) for name, value in batch.terms.items()}, **group},
    )


def every_objective():
    """Loss, metrics and coefficients of one process in fp64; or a reason why not."""
    group = {"cp_group": dist.group.WORLD}
    refused = set()
    for objective, everything in itertools.product(examples(), (False, True)):
        batch = make_batch(objective, everything=everything)
        whole = torch.tensor([0, batch.logprobs.shape[1]])
        where = tokens_of_rank(whole, dist.get_rank(), dist.get_world_size()).values
        own = rows_of(batch, where, **group)
        if type(objective).__name__ in REFUSED:
            assert_all_raise("cp_group: ", None, lambda one=own, o=objective: one.call(gk.policy_loss, o))
            refused.add(type(objective).__name__)
            continue
        got, want = own.call(gk.policy_loss, objective), batch.call(gk.policy_loss, objective)
        assert_same_bits(loss=got.loss, **got.metrics)
        torch.testing.assert_close(got.loss, want.loss, rtol=1e-12, atol=1e-14, msg=str(objective))
        for name, value in want.metrics.items():
            torch.testing.assert_close(got.metrics[name], value, rtol=1e-12, atol=1e-14, msg=name)
        extra = {"kl_beta": 0.1, "kl_ratio_weighted": objective.coefficient_scope != "nothing"}
        extra = extra if "ref_logprobs" in batch.terms else {}
        for given in ({}, extra):
            wanted = batch.call(gk.policy_coefficients, objective, **given)[:, where]
            found = own.call(gk.policy_coefficients, objective, **given)
            scale = float(wanted.abs().max()) if wanted.numel() else 0.0
            torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13 * scale, msg=str(objective))
    assert refused == {*REFUSED} <= {*EVERY}


def schedules():
    """Those that wait for whole sequences, chunk by chunk; the others are refused with the reason."""
    for schedule, skip in itertools.product(("two_pass", "cached", "auto"), ("backward", "all", "none")):
        terms = "holes" if skip == "all" else "plain"  # with holes nothing counted is idle, so nothing is NaN
        case = make_case("linear", "packed", terms, vocabulary=VOCABULARY, lengths=LENGTHS)
        out = judge(case, objective=gk.GSPO(), schedule=schedule, skip_inactive=skip, max_chunk_bytes=1024)
        if skip != "all":  # sequences without advantage are in metrics, too
            logprobs = gathered(case, out.logprobs, "zigzag")
            alone = gk.policy_loss(logprobs, case.old_logprobs, case.advantages, cu_seqlens=case.cu_seqlens)
            for name, value in alone.metrics.items():
                torch.testing.assert_close(out.metrics[name], value, rtol=1e-6, atol=1e-12, msg=name)
    for terms, objective in (
        ("kl_tensor", gk.GRPO()),
        ("on_policy", gk.GSPO()),
        ("on_policy_terms", gk.GSPO()),
    ):
        for schedule in ("known", "auto"):
            known = make_case("linear", "packed", terms, vocabulary=VOCABULARY, lengths=LENGTHS)
            judge(known, "stream", objective, schedule=schedule, max_chunk_bytes=1024)
    case = make_case("linear", "packed", "holes", vocabulary=VOCABULARY, lengths=LENGTHS)
    for skip in ("backward", "all"):
        frozen, _ = run(case, "contiguous", frozen=True, schedule="frozen", skip_inactive=skip)
        trained, _ = run(case, "contiguous")
        if dist.get_rank() == 0:
            grads = {**trained.grads, **frozen.grads}
            assert_equals_oracle(replace(frozen, grads=grads), case, gk.GSPO())
    for schedule, objective in itertools.product(("aligned", "deferred"), (gk.GSPO(), gk.GRPO())):
        assert_all_raise(
            "cp_group has tokens of the same sequences on other ranks",
            None,
            lambda s=schedule, o=objective: run(case, "zigzag", o, schedule=s),
        )
    own = part(case, *positions(case, "zigzag"))
    plan = gk.explain_schedule(
        own.inputs["hidden"].requires_grad_(), own.inputs["weight"], own.labels, own.old_logprobs,
        own.advantages, cu_seqlens=own.cu_seqlens, cp_group=dist.group.WORLD,
    )  # fmt: skip
    assert plan.schedule == "two_pass" and "cp_group" in plan.reason


def backends_and_dtypes():
    for kind, backend in itertools.product(LOSSES, ("reference", "triton")):
        case = make_case(kind, "packed", "entropy", vocabulary=VOCABULARY, logit_options="together")
        judge(case, "zigzag", gk.GSPO(), backend)
    for kind, dtype in itertools.product(ENTRIES, (torch.bfloat16, torch.float64)):
        judge(make_case(kind, "padded", "kl_ratio_weighted", vocabulary=VOCABULARY, dtype=dtype))


def ranks_without_tokens():
    """One token in all, none counted, no sequences: the same on all ranks, and no waiting."""
    for kind, lengths in itertools.product(ENTRIES, ((1, 0), (0, 0), ())):
        case = make_case(kind, lengths=lengths, vocabulary=VOCABULARY)
        for objective, order in itertools.product((gk.GSPO(), gk.GRPO()), ("contiguous", "stream")):
            judge(case, order, objective)
    case = make_case("linear", "padded", vocabulary=VOCABULARY)
    result, _ = run(replace(case, loss_mask=torch.zeros_like(case.labels, dtype=torch.bool)))
    assert result.loss == 0 and not any(grad.any() for grad in result.grads.values())


def once_more():
    """A second backward, upstream gradients, and the gradient that data parallelism averages."""
    case = make_case("linear", "packed", vocabulary=VOCABULARY, lengths=LENGTHS)
    first, _ = run(case)
    own = part(case, *positions(case, "zigzag"))
    leaves = {name: value.clone().requires_grad_() for name, value in own.inputs.items()}
    out = call(own, leaves, LOSSES["linear"], gk.GSPO(), "cpp", cp_group=dist.group.WORLD)
    (out.loss * dist.get_world_size()).backward(retain_graph=True)
    averaged = sum(every(leaves["weight"].grad)) / dist.get_world_size()
    torch.testing.assert_close(averaged, first.grads["weight"], rtol=1e-6, atol=1e-9)
    before = leaves["hidden"].grad.clone()
    (out.loss * dist.get_world_size()).backward()
    assert torch.equal(leaves["hidden"].grad, 2 * before)


def with_the_vocabulary_cut_too():
    """Context parallel 2 x tensor parallel 2."""
    if dist.get_world_size() != 4:
        return
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

    try:
        wrong()
    except (ValueError, RanksDisagreeError) as error:
        assert isinstance(error, ValueError) == (dist.get_rank() == 3), error
    else:
        raise AssertionError("nothing was raised")


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
            assert wire.sent["all_gather"] == AGREEMENT_BYTES + 16 * extremes, (objective, wire.sent)
            assert not wire.sent["broadcast"] and not wire.sent["reduce"]


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
        together = gk.normalizer(one, cut.loss_mask, cu_seqlens=cut.cu_seqlens, cp_group=group)
        assert_same_bits(together=together)
        assert alone == together
    for message, culprit, given, error in (
        ("loss_mask: got shape", 1, {"loss_mask": torch.ones(3) if rank == 1 else mine}, ValueError),
        ("objective: differs", None, {"objective": gk.DAPO() if rank else gk.GSPO()}, RanksDisagreeError),
    ):
        given = {"objective": objective, "loss_mask": mine, **given}
        assert_all_raise(message, culprit, lambda g=given: gk.normalizer(**g, group=group), error)


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
            ("differs between the ranks", of_one(old_logprobs=None), {}),
            ("a number, or a term of whole", replace(own, terms={"normalizer": 3.0 + (here == 1)}), {}),
            ("the number of sequences", of_one(**more_sequences(own)), {}),
            ("the call, its objective", own, {"objective": gk.GSPO() if here else gk.GSPO(0.1, 0.2)}),
        ):
            assert_all_raise(expected, None, calling(one, **options), RanksDisagreeError)
        assert_all_raise("cp_group: got int", None, calling(own, cp_group=3), TypeError)
    by_token = make_case("linear", "padded", "plain+token_advantages", vocabulary=VOCABULARY)
    assert_all_raise(
        "skip_inactive: 'all' needs one advantage per sequence",
        None,
        lambda: run(by_token, objective=gk.GRPO(), skip_inactive="all"),
    )


def more_sequences(case):
    """An empty one at the end."""
    ends = torch.cat([case.cu_seqlens, case.cu_seqlens[-1:]])
    return {"cu_seqlens": ends, "advantages": torch.cat([case.advantages, torch.ones(1)])}


def compiled():
    """One graph, its operators wait for each other inside."""
    case = make_case("logits", vocabulary=VOCABULARY, lengths=LENGTHS)
    own = part(case, *positions(case, "zigzag"))

    def loss(logits):
        return gk.fused_policy_loss(
            logits, own.labels, own.old_logprobs, own.advantages, cu_seqlens=own.cu_seqlens,
            cp_group=dist.group.WORLD,
        ).loss  # fmt: skip

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaf = own.inputs["logits"].clone().requires_grad_()
        value = function(leaf)
        results.append((value.detach(), *torch.autograd.grad(value, leaf)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


CASES = {
    2: (
        layouts_and_terms,
        metrics,
        every_objective,
        schedules,
        backends_and_dtypes,
        ranks_without_tokens,
        once_more,
        with_the_vocabulary_cut_too,
        bytes_on_the_wire,
        normalizers,
        errors,
        compiled,
    ),
    4: (
        layouts_and_terms,
        every_objective,
        ranks_without_tokens,
        with_the_vocabulary_cut_too,
        bytes_on_the_wire,
        normalizers,
    ),
}
"""By the number of ranks: what more of them can change is run with four."""
