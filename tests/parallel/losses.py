"""Losses with vocabulary or sequences split over ranks: one process's numbers, the same bits on all ranks."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import gspo_kernels as gk
from tests.cases import ADVANTAGES, LAYOUTS, Case, Result, call, make_case, over_ranks
from tests.draws import shifted_seed
from tests.judging import assert_equals_oracle
from tests.objectives.sample_batches import examples, make_batch
from tests.parallel.ranks import (
    GSPO,
    KINDS,
    LENGTHS,
    LOSSES,
    ORDERS,
    SCORES,
    VOCABULARY,
    assert_all_raise,
    assert_same_bits,
    every,
    judge,
    leaves_of,
    of_ranks,
    place_of,
    run,
    share,
    tokens_of,
    validated,
)


def case_of(kind, layout="packed", terms="plain", **options):
    return make_case(kind, layout, terms, **{"vocabulary": VOCABULARY, "lengths": LENGTHS, **options})


@of_ranks(2, 4)
def layouts_and_terms():
    """Cover both layouts, each cut, sequences of no and one token and over every rank, holes, every term."""
    for split in ("tp", "cp") if dist.get_world_size() == 2 else ("both",):
        for kind, layout in itertools.product(KINDS[split], LAYOUTS):
            for order in ("zigzag",) if split == "tp" else ORDERS:
                everything = case_of(kind, layout, "all")
                judge(everything, split, gk.GSPOToken(0.2, 0.2), order=order, uneven=split == "tp")
            judge(case_of(kind, layout), split, order="stream")
    for kind, layout in itertools.product(LOSSES, LAYOUTS):  # on four ranks shards of one and of 61 columns
        judge(case_of(kind, layout, "all"), "tp", gk.GSPOToken(0.2, 0.2), SCORES[kind], uneven=True)
    judge(case_of("linear", "packed", "all"), "cp", gk.GSPOToken(0.2, 0.2))


@of_ranks(2)
def backends_dtypes_and_logit_options():
    for split, kind in itertools.product(("tp", "cp"), LOSSES):
        uneven = {"uneven": split == "tp"}
        for backend, terms in (("reference", "entropy"), ("triton", "entropy"), ("triton", "on_policy")):
            options = {"logit_options": "kept and the rest", "lengths": (3, 0, 1, 4, 2, 1)}
            judge(case_of(kind, "packed", terms, **options), split, backend=backend, **uneven)
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            judge(case_of(kind, "padded", "kl_ratio_weighted", dtype=dtype), split, **uneven)
        judge(case_of(kind, "padded", "entropy", logit_options="together"), split)
    judge(case_of("linear", dtype=torch.bfloat16, logits_dtype="input"), "tp")


@of_ranks(2)
def schedules():
    """Chunks have a few rows, equally many on all ranks although shards are uneven; some rows are skipped."""
    for split in ("tp", "cp"):
        small = {"uneven": split == "tp", "max_chunk_bytes": 1024}
        waiting = ("deferred", "two_pass", "auto") if split == "tp" else ("two_pass", "auto")
        for schedule, skip in itertools.product(waiting, ("backward", "none")):
            judge(case_of("linear"), split, schedule=schedule, skip_inactive=skip, **small)
        # with holes no counted token is inactive, so no log-prob is NaN
        judge(case_of("linear", "packed", "holes"), split, skip_inactive="all", **small)
        for terms, objective in (("kl_tensor", gk.GRPO()), ("on_policy", GSPO), ("on_policy_terms", GSPO)):
            case, options = case_of("linear", "packed", terms), {"schedule": "known", **small}
            judge(case, split, objective, order="stream", **options)
        case = case_of("linear", "packed", "holes")
        trained, _ = run(case, split)
        for skip in ("backward", "all"):
            frozen, _ = run(case, split, frozen=True, schedule="frozen", skip_inactive=skip, **small)
            if dist.get_rank() == 0:
                both = replace(frozen, grads={**trained.grads, **frozen.grads})
                assert_equals_oracle(both, case, GSPO)
    judge(case_of("linear"), "tp", schedule="aligned")
    _, out = run(case_of("linear", "padded"), "tp", skip_inactive="all")
    idle = torch.tensor(ADVANTAGES) == 0
    assert torch.equal(out.logprobs.isnan(), idle.unsqueeze(1) & case_of("linear", "padded").counted)
    for schedule, objective in itertools.product(("aligned", "deferred"), (GSPO, gk.GRPO())):
        with pytest.raises(ValueError, match="cp_group has tokens of the same sequences on other ranks"):
            run(case_of("linear"), "cp", objective, schedule=schedule)
    local, place = share(case_of("linear"), place_of("cp")), place_of("cp")
    for frozen, schedule, reason in ((True, "frozen", "frozen"), (False, "two_pass", "cp_group")):
        leaves = leaves_of(local, frozen)
        plan = gk.explain_schedule(
            leaves["hidden"], leaves["weight"], local.labels, local.old_logprobs, local.advantages,
            cu_seqlens=local.cu_seqlens, **over_ranks(place.groups),
        )  # fmt: skip
        assert plan.schedule == schedule and reason in plan.reason


@of_ranks(2)
def every_objective():
    """Loss, metrics, gradients and coefficients in fp64 are those of one process."""
    rng = torch.Generator().manual_seed(shifted_seed(0))
    hidden = torch.randn(6, 7, 16, generator=rng, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, 16, generator=rng, dtype=torch.float64)
    labels = torch.randint(0, VOCABULARY, (6, 7), generator=rng)
    scores = torch.log_softmax(hidden @ weight.T, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    for objective, everything in itertools.product(examples(), (False, True)):
        batch = make_batch(objective, everything=everything)
        moved = scores - batch.logprobs  # ratios as in the batch
        terms = {name: value for name, value in batch.terms.items() if name != "entropy"}
        if "ref_logprobs" in terms:
            terms["ref_logprobs"] = terms["ref_logprobs"] + moved
        case = Case(
            "linear", labels, {"hidden": hidden, "weight": weight}, batch.old_logprobs + moved,
            batch.advantages, loss_mask=batch.loss_mask, terms=terms,
        )  # fmt: skip
        leaves = leaves_of(case)
        alone = call(case, leaves, LOSSES["linear"], objective, "cpp", return_entropy=True)
        alone.loss.backward()
        close = {"rtol": 1e-9, "atol": 1e-12, "msg": str(objective)}
        for split in ("cp",) if everything else ("tp", "cp"):
            if split == "cp" and objective.needs_token_order:
                with pytest.raises(ValueError, match=r"cp_group: .* looks at the order of tokens"):
                    run(case, split, objective)
                continue
            found, out = run(case, split, objective, uneven=split == "tp", return_entropy=True)
            torch.testing.assert_close(out.loss, alone.loss, **close)
            for name, value in alone.metrics.items():
                torch.testing.assert_close(out.metrics[name], value, **close)
            for name, leaf in leaves.items():
                torch.testing.assert_close(found.grads[name], leaf.grad, **close)
        if not everything or objective.needs_token_order:
            continue
        whole = replace(case, inputs={"logprobs": scores, "entropy": alone.entropy}, terms=dict(batch.terms))
        extra = {"kl_beta": 0.1, "kl_ratio_weighted": objective.coefficient_scope != "nothing"}
        extra = extra if "ref_logprobs" in terms else {}
        wanted, got = (
            gk.policy_coefficients(
                each.inputs["logprobs"], each.old_logprobs, each.advantages, loss_mask=each.loss_mask,
                objective=objective, **each.terms, **extra, **over_ranks(groups),
            )
            for each, groups in ((whole, {}), (share(whole, place_of("cp")), place_of("cp").groups))
        )  # fmt: skip
        wanted = wanted[:, tokens_of(whole, dist.get_rank(), 2)[0]]
        torch.testing.assert_close(got, wanted, **close)


@of_ranks(2)
def edges():
    """Labels lie at both ends of shards; shards, also the label's, and rows are banned; inf and NaN occur."""
    parallel = gk.Parallel(dist.group.WORLD)
    (start, end), last = place_of("tp").columns(), VOCABULARY - 1
    labels = torch.tensor([0, 31, 32, last, 0, last, 1, 1, 1, 1, 2, -100])
    generator = torch.Generator().manual_seed(shifted_seed(1))
    logits = 3 * torch.randn(len(labels), VOCABULARY, generator=generator)
    for row, columns, value in (
        (2, slice(0, 32), "-inf"),  # a shard
        (-7, slice(0, 32), "-inf"),
        (-6, slice(0, 32), "-inf"),  # the label's
        (-5, last - 1, "inf"),
        (-4, last - 1, "nan"),
        (-3, slice(None), "-inf"),
        (-2, slice(3, None), "-inf"),  # all shards but one
        (-1, slice(None), "nan"),
    ):
        logits[row, columns] = float(value)
    alone, weights = logits.clone().requires_grad_(), torch.linspace(-1.0, 2.0, len(labels))
    want = gk.token_logprobs(alone, labels, return_entropy=True)
    (whole,) = torch.autograd.grad((want.logprobs * weights).sum(), alone)
    # a log-prob has the roundings of the label's logit and of the log-sum-exp, in both computations
    allowed = 4 * torch.finfo(torch.float32).eps * float(logits.nan_to_num(0.0, 0.0, 0.0).abs().max())
    for backend in ("cpp", "reference", "triton"):
        local = logits[:, start:end].clone().requires_grad_()
        got = gk.token_logprobs(local, labels, return_entropy=True, parallel=parallel, backend=backend)
        assert_same_bits(logprobs=got.logprobs.nan_to_num(1.0), entropy=got.entropy.nan_to_num(1.0))
        (grad,) = torch.autograd.grad((got.logprobs * weights).sum(), local)
        pairs = ((got.logprobs, want.logprobs), (got.entropy, want.entropy), (grad, whole[:, start:end]))
        for one, expected in pairs:
            torch.testing.assert_close(one, expected, rtol=0, atol=allowed, equal_nan=True)


@of_ranks(4)
def ranks_without_tokens():
    """One token in all, none, or no sequences: no rank waits. With none counted, loss and gradient are 0."""
    for split, lengths in itertools.product(KINDS, ((1, 0), (0, 0), ())):
        for kind, objective in itertools.product(KINDS[split], (GSPO, gk.GRPO())):
            judge(case_of(kind, lengths=lengths), split, objective, order="stream")
    for split in KINDS:
        case = case_of("linear", "padded")
        masked = replace(case, loss_mask=torch.zeros_like(case.labels, dtype=torch.bool))
        result, _ = run(masked, split)
        assert result.loss == 0 and not any(grad.any() for grad in result.grads.values())


@of_ranks(2)
def scores_and_gradients_in_place():
    """Scores without gradient are the loss's log-probs; logits may be overwritten by their gradient."""
    groups, local = place_of("tp").groups, share(case_of("linear"), place_of("tp"))
    with torch.no_grad():
        scored = call(local, local.inputs, SCORES["linear"], GSPO, "cpp", **groups)
    assert torch.equal(scored.logprobs, run(case_of("linear"), "tp")[0].logprobs)
    local, grads = share(case_of("logits"), place_of("tp")), []
    for inplace in (False, True):
        leaf = local.inputs["logits"].clone().requires_grad_()
        options = {"inplace_backward": inplace, **groups}
        call(local, {"logits": leaf * 1.0}, LOSSES["logits"], GSPO, "cpp", **options).loss.backward()
        grads.append(leaf.grad)
    assert grads[0].any() and torch.equal(*grads)


@of_ranks(2, 4)
def hidden_states_of_ranks():
    """Tokens may be scattered unevenly, one rank without any; or the caller sums the ranks' gradients."""
    for layout, schedule, dtype in (
        ("packed", "deferred", torch.float32),
        ("packed", "two_pass", torch.bfloat16),
        ("padded", "auto", torch.float32),
    ):
        options = {"schedule": schedule, "max_chunk_bytes": 256}
        with validated():  # the ranks compare what they have
            judge(case_of("linear", layout, dtype=dtype), "tp", sequence_parallel=True, **options)
    judge(case_of("linear"), "tp", reduce_hidden_grad=False)


@of_ranks(2, 4)
def dtensors():
    """DTensors determine the groups: the vocabulary in torch's uneven shares, tokens over ranks, or both."""
    four = dist.get_world_size() == 4
    for split in ("both",) if four else ("tp", "cp"):
        names = ("cp", "tp") if four else (split,)
        mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
        cp = mesh.get_local_rank("cp") if "cp" in names else 0
        over = {  # by dimension of the mesh
            "hidden": {"cp": Shard(0), "tp": Replicate()},
            "weight": {"cp": Replicate(), "tp": Shard(0)},
            "bias": {"cp": Replicate(), "tp": Shard(0)},
            "logits": {"cp": Shard(0), "tp": Shard(1)},
        }
        for kind, objective, sharded in (
            ("linear", GSPO, False), ("linear", gk.GRPO(), split == "tp"), ("logits", GSPO, False)
        ):  # fmt: skip
            case = case_of(kind, vocabulary=61)
            placements = {name: [over[name][dim] for dim in names] for name in case.inputs}
            placements |= {"hidden": [Shard(0)]} if sharded else {}
            leaves = {
                name: distribute_tensor(value, mesh, placements[name]).detach().requires_grad_()
                for name, value in case.inputs.items()
            }
            local = share(case, place_of("cp")._replace(cp=cp, cps=1 if split == "tp" else 2), "stream")
            out = call(local, leaves, LOSSES[kind], objective, "cpp")
            out.loss.backward()
            assert_same_bits(loss=out.loss, **out.metrics)
            if kind == "linear" and "tp" in names:
                assert leaves["weight"].grad.placements[-1] == Shard(0)
            grads = {name: leaf.grad.full_tensor() for name, leaf in leaves.items()}
            scores = every(out.logprobs)
            scores = scores[0] if split == "tp" else torch.cat(scores[:: 2 if four else 1])
            if dist.get_rank() == 0:
                assert_equals_oracle(Result(out.loss.detach(), scores, grads), case, objective)
        for name in ("cp_group", "tp_group") if "cp" in names else ():
            said = f"{name}: the DTensors logits determine it, expected None"
            again = partial(call, local, leaves, LOSSES["logits"], GSPO, "cpp", **{name: mesh[names[0]]})
            assert_all_raise(said, "all", again)
    if four:
        twice = {"logits": distribute_tensor(case.inputs["logits"], mesh, [Shard(1), Shard(1)])}
        said = "logits: 2 dimensions of device meshes cut the vocabulary"
        assert_all_raise(said, "all", partial(call, local, twice, LOSSES["logits"], GSPO, "cpp"))
    logits = case_of("logits").inputs["logits"][:7]  # scores of tokens that are split unevenly
    ids, temperature = torch.arange(len(logits)), torch.linspace(0.5, 2.0, len(logits))
    placed = distribute_tensor(logits, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    here = ids.chunk(dist.get_world_size())[dist.get_rank()]
    with validated():
        found = gk.token_logprobs(placed, ids[here], temperature=temperature[here]).logprobs
    expected = gk.token_logprobs(logits, ids, temperature=temperature).logprobs
    torch.testing.assert_close(found, expected[here])


@of_ranks(2)
def compiled():
    """A loss compiles to one graph, whose operators wait for other ranks inside."""
    for split, kind in (("tp", "linear"), ("cp", "logits")):
        local, groups = share(case_of(kind), place_of(split)), place_of(split).groups

        def loss(leaves, local=local, groups=groups, kind=kind):
            return call(local, leaves, LOSSES[kind], GSPO, "cpp", **groups).loss

        results = []
        for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
            leaves = leaves_of(local)
            value = function(leaves)
            results.append([value.detach(), *torch.autograd.grad(value, leaves.values())])
        assert all(map(torch.equal, *results))


@of_ranks(2)
def a_head_with_an_adapter():
    """A rank has some rows of the weight and of B, and all of A: it gets all of dA, and dB of its rows."""
    place, shapes = place_of("tp"), ((2, 5, 8), (VOCABULARY, 8), (3, 8), (VOCABULARY, 3))
    torch.manual_seed(shifted_seed(0))
    hidden, weight, A, B = (torch.randn(*shape).double() for shape in shapes)
    labels, advantages = torch.randint(VOCABULARY, (2, 5)), torch.tensor([1.0, -0.5])
    old = -torch.rand(2, 5).double() - 3

    def gradients(rows, **options):
        leaves = [each.clone().requires_grad_() for each in (hidden, A, B[rows])]
        head = gk.LoRAHead(weight[rows], *leaves[1:], 0.5)
        rest = (labels, old, advantages)
        out = gk.fused_linear_policy_loss(leaves[0], head, *rest, objective=gk.GRPO(), **options)
        out.loss.backward()
        return out.loss.detach(), *(leaf.grad for leaf in leaves)

    here, parallel = slice(*place.columns()), gk.Parallel(tp_group=place.groups["tp_group"])
    for schedule in ("aligned", "two_pass"):
        whole = gradients(slice(None), schedule=schedule)
        with validated():
            parts = gradients(here, schedule=schedule, parallel=parallel)
        for part, value in zip(parts, (*whole[:3], whole[3][here]), strict=True):
            torch.testing.assert_close(part, value, rtol=1e-12, atol=1e-13)
