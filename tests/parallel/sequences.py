"""Sequences cut up over ranks: the same numbers, and the same bits on all of them."""

import itertools
from dataclasses import replace

import torch
import torch.distributed as dist

import gspo_kernels as gk
from gspo_kernels.integrations.layouts import tokens_of_rank
from tests.cases import Result, call, make_case, over_ranks
from tests.judging import assert_equals_oracle
from tests.objectives.sample_batches import examples, make_batch
from tests.parallel.ranks import LOSSES, VOCABULARY, assert_all_raise, assert_same_bits, every, of_ranks

ENTRIES = {"logprobs": "policy_loss", **LOSSES}


ORDERS = ("zigzag", "contiguous", "stream")


BY_TOKEN = ("hidden", "logits", "logprobs", "entropy")


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


@of_ranks(2, 4)
def layouts_and_terms():
    """Padded and packed, each way to cut; no and one token, sequences over every rank, holes, every term."""
    for kind, layout, terms in itertools.product(ENTRIES, ("padded", "packed"), ("all", "plain")):
        case = make_case(kind, layout, terms, vocabulary=VOCABULARY, lengths=LENGTHS)
        for order in ORDERS:
            judge(case, order, gk.GSPOToken(0.2, 0.2))
            if terms == "plain":
                judge(case, order, gk.GSPO())


@of_ranks(2)
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
        terms={**{name: cut(value) for name, value in batch.terms.items()}, **over_ranks(group)},
    )


@of_ranks(2)
def every_objective():
    """Loss, metrics and coefficients of one process in fp64."""
    group = {"cp_group": dist.group.WORLD}
    for objective, everything in itertools.product(examples(), (False, True)):
        batch = make_batch(objective, everything=everything)
        whole = torch.tensor([0, batch.logprobs.shape[1]])
        where = tokens_of_rank(whole, dist.get_rank(), dist.get_world_size()).values
        own = rows_of(batch, where, **group)
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


@of_ranks(2, 4)
def objectives_beyond_sums():
    """Over turns and the batch: tokens are gathered; packed, with ranks that have none of a sequence."""
    case = make_case("linear", "packed", "entropy", vocabulary=VOCABULARY, lengths=LENGTHS)
    tokens = len(case.labels)
    turns = torch.arange(tokens) // 2 % 3 - 1
    old, advantages = case.old_logprobs.double() + 0.3, torch.linspace(-2.0, 2.0, tokens)
    for objective, terms in (
        (gk.KLCov(kl_cov_ratio=0.3), {"advantages": advantages}),
        (gk.ClipCov(clip_cov_ratio=0.3, clip_cov_lb=-9.0, clip_cov_ub=9.0), {"advantages": advantages}),
        (gk.TLGRPO(), {"advantages": case.advantages, "turn_ids": turns}),
    ):
        case = replace(case, advantages=terms["advantages"], old_logprobs=old.float())
        given = {name: value for name, value in terms.items() if name == "turn_ids"}
        case = replace(case, terms={"entropy_coef": case.terms["entropy_coef"], **given})
        for order, schedule in itertools.product(ORDERS, ("auto", "two_pass")):
            result, out = run(case, order, objective, schedule=schedule)
            leaves = {name: value.clone().requires_grad_() for name, value in case.inputs.items()}
            alone = call(case, leaves, LOSSES["linear"], objective, "cpp")
            alone.loss.backward()
            grads = {name: leaf.grad for name, leaf in leaves.items()}
            assert any(grad.any() for grad in grads.values())
            torch.testing.assert_close(out.loss.detach(), alone.loss.detach(), rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(result.grads, grads, rtol=1e-5, atol=1e-6)
            for name, value in alone.metrics.items():
                torch.testing.assert_close(out.metrics[name], value, rtol=1e-5, atol=1e-7, msg=name)


@of_ranks(2)
def schedules():
    """Those that wait for whole sequences, chunk by chunk; the others are refused with the reason."""
    for schedule, skip in itertools.product(("two_pass", "auto"), ("backward", "all", "none")):
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
    for trained, schedule, reason in ((False, "frozen", "frozen"), (True, "two_pass", "cp_group")):
        plan = gk.explain_schedule(
            own.inputs["hidden"].requires_grad_(), own.inputs["weight"].requires_grad_(trained), own.labels,
            own.old_logprobs, own.advantages, cu_seqlens=own.cu_seqlens,
            parallel=gk.Parallel(cp_group=dist.group.WORLD),
        )  # fmt: skip
        assert plan.schedule == schedule and reason in plan.reason


@of_ranks(2)
def backends_and_dtypes():
    for kind, backend in itertools.product(LOSSES, ("reference", "triton")):
        case = make_case(kind, "packed", "entropy", vocabulary=VOCABULARY, logit_options="together")
        judge(case, "zigzag", gk.GSPO(), backend)
    for kind, dtype in itertools.product(ENTRIES, (torch.bfloat16, torch.float64)):
        judge(make_case(kind, "padded", "kl_ratio_weighted", vocabulary=VOCABULARY, dtype=dtype))


@of_ranks(2, 4)
def ranks_without_tokens():
    """One token in all, none counted, no sequences: the same on all ranks, and no waiting."""
    for kind, lengths in itertools.product(ENTRIES, ((1, 0), (0, 0), ())):
        case = make_case(kind, lengths=lengths, vocabulary=VOCABULARY)
        for objective, order in itertools.product((gk.GSPO(), gk.GRPO()), ("contiguous", "stream")):
            judge(case, order, objective)
    case = make_case("linear", "padded", vocabulary=VOCABULARY)
    result, _ = run(replace(case, loss_mask=torch.zeros_like(case.labels, dtype=torch.bool)))
    assert result.loss == 0 and not any(grad.any() for grad in result.grads.values())


@of_ranks(2)
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
