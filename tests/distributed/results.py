"""Results with vocabulary or sequences split over ranks: one process's numbers, with equal bits on all."""

import itertools
import math
from copy import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import gspo_kernels as gk
from gspo_kernels.hidden import gradients
from tests import test_selected
from tests.cases import (
    ADVANTAGES,
    HEAD,
    LAYOUTS,
    Result,
    call,
    for_objective,
    generator,
    make_case,
    over_ranks,
)
from tests.distributed.ranks import (
    GSPO,
    KINDS,
    LENGTHS,
    LOSSES,
    ORDERS,
    SCORES,
    SHARDED,
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
from tests.judging import assert_equals_oracle
from tests.logits import test_centering
from tests.objectives.sample_batches import declaring, from_hidden_states, make_batch
from tests.test_distillation import COUNTED, Problem

PROMPTS = gk.GRPO(aggregation="prompt_mean")
IN_FP64 = {"V": VOCABULARY, "dtype": torch.float64}  # the order of sums changes almost nothing


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
        options = {"logit_options": "kept and the rest", "lengths": (3, 0, 1, 4, 2, 1)}
        alternate = "entropy" if (split, kind) in (("tp", "linear"), ("cp", "logits")) else "on_policy"
        for backend, terms in (("reference", "entropy"), ("triton", alternate)):
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
        for terms, objective in (
            ("kl_tensor", PROMPTS), ("on_policy", GSPO), ("on_policy_terms", GSPO), ("holes", PROMPTS),
        ):  # fmt: skip
            case, options = case_of("linear", "packed", terms), {"schedule": "known", **small}
            case = for_objective(case, objective)
            judge(case, split, objective, order="stream", **options)
        frozen = replace(case_of("linear", "packed", "holes"), frozen=HEAD)
        for skip in ("backward", "all"):
            judge(frozen, split, schedule="frozen", skip_inactive=skip, **small)
    judge(case_of("linear"), "tp", schedule="aligned")
    _, out = run(case_of("linear", "padded"), "tp", skip_inactive="all")
    idle = torch.tensor(ADVANTAGES) == 0
    assert torch.equal(out.logprobs.isnan(), idle.unsqueeze(1) & case_of("linear", "padded").counted)
    for schedule, objective in itertools.product(("aligned", "deferred"), (GSPO, gk.GRPO())):
        with pytest.raises(ValueError, match="cp_group has tokens of the same sequences on other ranks"):
            run(case_of("linear"), "cp", objective, schedule=schedule)


@of_ranks(2)
def every_objective():
    """Loss, metrics, gradients and coefficients in fp64 are those of one process."""
    for objective, everything in itertools.product(declaring(), (False, True)):
        batch = make_batch(objective, everything=everything)
        case = from_hidden_states(batch, objective, VOCABULARY)
        leaves = leaves_of(case)
        alone = call(case, leaves, LOSSES["linear"], objective, "cpp", return_entropy=True)
        alone.loss.backward()
        close = {"rtol": 1e-9, "atol": 1e-12, "msg": str(objective)}
        for split in ("cp",) if everything else ("tp", "cp"):
            if split == "cp" and objective.needs_token_order:
                with pytest.raises(ValueError, match=r"cp_group: .* depends on the order of tokens"):
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
        whole = replace(case, inputs={"logprobs": alone.logprobs}, terms=dict(batch.terms))
        extra = {"kl_beta": 0.1, "kl_ratio_weighted": objective.coefficient_scope != "nothing"}
        extra = extra if "ref_logprobs" in batch.terms else {}
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
    """Labels at both ends of shards; masked rows and shards, including the label's; inf and NaN."""
    parallel = gk.Parallel(dist.group.WORLD)
    (start, end), last = place_of("tp").columns(), VOCABULARY - 1
    labels = torch.tensor([0, 31, 32, last, 0, last, 1, 1, 1, 1, 2, -100])
    logits = 3 * torch.randn(len(labels), VOCABULARY, generator=generator(1))
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
    sure = torch.zeros(1, VOCABULARY)  # in its shard the label is certain, and the other shard has exp(-30)
    sure[0, :32], sure[0, 5] = float("-inf"), 30.0
    got = gk.token_logprobs(sure[:, start:end], torch.tensor([5]), parallel=parallel).logprobs
    near_zero = torch.tensor([-math.log1p((VOCABULARY - 32) * math.exp(-30.0))])
    torch.testing.assert_close(got, near_zero, rtol=1e-6, atol=0)


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
    """Log-probs without gradient equal the loss's; logits may be overwritten by their gradient."""
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
    for layout, terms, schedule, dtype in (
        ("packed", "plain", "deferred", torch.float32),
        ("packed", "plain", "two_pass", torch.bfloat16),
        ("padded", "on_policy", "auto", torch.float32),  # several sequences have a gradient on later ranks
        ("padded", "plain", "two_pass", torch.float32),
    ):
        options = {"schedule": schedule, "max_chunk_bytes": 256}
        with validated():  # the ranks compare what they have
            judge(case_of("linear", layout, terms, dtype=dtype), "tp", sequence_parallel=True, **options)
    judge(case_of("linear"), "tp", reduce_hidden_grad=False)
    with pytest.MonkeyPatch.context() as patch:
        # a rank may have fewer columns than a block
        patch.setattr(gradients, "BLOCK_COLUMNS", {"cpu": 5})
        bf16, options = case_of("linear", dtype=torch.bfloat16), {"max_chunk_bytes": 1024}
        judge(bf16, "tp", uneven=True, schedule="two_pass", **options)


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
    if four:
        twice = {"logits": distribute_tensor(case.inputs["logits"], mesh, [Shard(1), Shard(1)])}
        said = "logits: 2 dimensions of device meshes shard the vocabulary"
        assert_all_raise(said, partial(call, local, twice, LOSSES["logits"], GSPO, "cpp"))
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
    for schedule in ("aligned", "two_pass"):
        with validated():
            judge(case_of("linear", adapter=3), "tp", gk.GRPO(), schedule=schedule)


# --- functions other than losses of policies


@of_ranks(2)
def sampling_masks():
    """Masks are bits of the whole vocabulary; shards begin at any column. No label may be cut by its mask."""
    for kind in LOSSES:
        judge(case_of(kind, "packed", "entropy", logit_options="kept"), "tp", uneven=True)
    labels, everything = torch.tensor([3, 40]), torch.full((2, 2), -1, dtype=torch.int32)
    without = everything.clone()
    without[1, 1] ^= 1 << (40 - 32)
    logits, group = torch.zeros(2, VOCABULARY // 2), {"parallel": gk.Parallel(dist.group.WORLD)}
    gk.token_logprobs(logits, labels, kept_mask=everything, **group)
    for message, culprit, options in (
        ("labels: got 40 at position", 1, {"kept_mask": without}),
        ("kept_mask: got 1 words, expected 2", None, {"kept_mask": everything[..., :1]}),
    ):
        assert_all_raise(message, lambda o=options: gk.token_logprobs(logits, labels, **group, **o), culprit)


def of_shard(problem, start, end):
    """Return a problem with some columns of its logits, or of its heads, alone."""
    local = copy(problem)
    for side in vars(problem).keys() & {"inputs", "teacher"}:
        setattr(local, side, columns_of(getattr(problem, side), start, end))
    return local


def columns_of(values, start, end):
    dims = {name: SHARDED.get(name.removeprefix("grad ").removeprefix("teacher_")) for name in values}
    return {n: v if dims[n] is None else v.narrow(dims[n], start, end - start) for n, v in values.items()}


def assert_part_of(whole, part, start, end):
    """Assert that results of a shard are the columns of those in fp64, with the same bits on all ranks."""
    assert_same_bits(**{n: v for n, v in part.items() if n.removeprefix("grad ") not in SHARDED})
    for name, wanted in columns_of(whole, start, end).items():
        torch.testing.assert_close(part[name], wanted, rtol=1e-9, atol=1e-12)


@of_ranks(2)
def selected_ids():
    """Log-probs, tail and gradients of ids on several ranks; rows may have an id twice, or no id."""
    start, end = place_of("tp").columns(uneven=True)
    group = {"parallel": gk.Parallel(dist.group.WORLD, (start, end))}
    for linear, (within, masked, K) in itertools.product(
        (False, True),
        ((False, False, 6), (False, True, 6), (True, True, 6), (True, False, 6), (False, False, 1)),
    ):
        problem = test_selected.Problem(K, linear=linear, options=test_selected.TRANSFORMED, **IN_FP64)
        options = {"max_chunk_bytes": 256} if linear else {}
        if masked:
            others = torch.randint(0, VOCABULARY, (2, 3, 9), generator=generator(3))
            options["kept_mask"] = gk.kept_mask(torch.cat([problem.ids, others], -1), VOCABULARY)
        whole = problem.ours(within, "cpp", **options)
        part = of_shard(problem, start, end).ours(within, "cpp", **options, **group)
        assert_part_of(whole, part, start, end)
    hidden, weight, _ = columns_of(problem.inputs, start, end).values()
    ids = torch.tensor([0, 40]).expand(2, 3, 2)  # one on each rank
    for message, wrong, options in (
        ("ids: got -3", ids - 3, {}),
        ("in the sampling mask", ids, {"kept_mask": gk.kept_mask(ids + 1, VOCABULARY)}),
    ):
        call = partial(gk.linear_selected_logprobs, hidden, weight, wrong, **group, **options)
        assert_all_raise(message, call)


@of_ranks(2)
def centered_losses():
    """Ids to center are of the whole vocabulary; in a cp_group each rank has those of its tokens."""
    start, end = place_of("tp").columns(uneven=True)
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    for linear, (objective, far) in itertools.product(
        (False, True), ((gk.GPG(), (66.0, 6.0)), (gk.CISPO(0.7, 1.3), None))
    ):
        options = {"return_entropy": True} | ({"max_chunk_bytes": 2 * 8 * VOCABULARY} if linear else {})
        problem = test_centering.Problem(objective, linear=linear, far=far, **IN_FP64)
        whole = problem.ours("cpp", **options)
        shards = {"parallel": gk.Parallel(dist.group.WORLD, (start, end))}
        assert_part_of(whole, of_shard(problem, start, end).ours("cpp", **options, **shards), start, end)
        of_rank = copy(problem)
        of_rank.part = (slice(None), mine)
        found = of_rank.ours("cpp", **options, parallel=gk.Parallel(cp_group=dist.group.WORLD))
        assert_same_bits(loss=found["loss"])
        for name, value in found.items():
            if name.startswith("grad"):
                dist.all_reduce(value)  # each rank has the gradients of its tokens
            torch.testing.assert_close(value, whole[name], rtol=1e-9, atol=1e-12)


IDS = torch.randint(0, VOCABULARY, (2, 3, 4), generator=generator(6))
FORMS = (
    {"beta": 0.0},
    {"beta": 0.3},
    {"beta": 1.0},
    {"beta": 0.3, "top_k": 5},
    {"beta": 1.0, "top_k": 5, "top_k_of": "student", "add_tail": False},
    {"beta": 0.0, "ids": IDS, "teacher_logprobs": torch.linspace(-3, -2, IDS.numel()).view_as(IDS)},
    # the whole vocabulary: no rank has a column that is left
    {
        "beta": 0.0,
        "ids": torch.arange(VOCABULARY).expand(2, 3, -1),
        "teacher_logprobs": torch.linspace(-2, 2, VOCABULARY).log_softmax(-1).expand(2, 3, -1),
    },
)


@of_ranks(2)
def teachers():
    """Results are one process's, also from shards of one column and of all others, and from DTensors."""
    for linear, (uneven, backend) in itertools.product((False, True), ((True, "cpp"), (False, "reference"))):
        start, end = place_of("tp").columns(uneven)
        options = {"temperature": 0.7, **({"max_chunk_bytes": 4096} if linear else {})}
        group = {"parallel": gk.Parallel(dist.group.WORLD, (start, end) if uneven else None)}
        for form in FORMS if backend == "cpp" else FORMS[1::2]:
            problem = Problem(linear=linear, **IN_FP64)
            problem.teacher = {} if "ids" in form else problem.teacher
            whole = problem.ours(backend, call=options, **form)
            part = of_shard(problem, start, end).ours(backend, call=options | group, **form)
            assert_part_of(whole, part, start, end)
    mesh, problem = init_device_mesh("cpu", (2,)), Problem(linear=True, **IN_FP64)

    def dtensors(**changed):
        placed = {"hidden": Replicate(), "teacher_hidden": Replicate()} | changed
        leaves = {
            name: distribute_tensor(value, mesh, [placed.get(name, Shard(0))]).detach()
            for name, value in (problem.inputs | problem.teacher).items()
        }
        trained = [leaves[name].requires_grad_() for name in problem.inputs]
        by_token = {"loss_mask": COUNTED, "token_weights": problem.weights}
        loss = gk.fused_linear_distillation_loss(**leaves, **by_token, beta=1.0).loss
        return loss.detach(), *(grad.full_tensor() for grad in torch.autograd.grad(loss, trained))

    whole = problem.ours("cpp", beta=1.0)
    wanted = (whole["loss"], *(whole[f"grad {name}"] for name in problem.inputs))
    torch.testing.assert_close(dtensors(), wanted, rtol=1e-9, atol=1e-12)
    for message, changed in (
        ("teacher_weight: expected a DTensor with the placement of weight", {"teacher_weight": Replicate()}),
        ("teacher_hidden: is a DTensor with placement", {"teacher_hidden": Shard(0)}),
        ("hidden: is sharded over tokens, expected", {"hidden": Shard(1)}),
    ):
        assert_all_raise(message, partial(dtensors, **changed))


@of_ranks(2, 4)
def normalizers():
    """Normalizers of data-parallel ranks make averaged losses and gradients those of the whole batch."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    for objective in declaring():
        if objective.coefficient_scope == "batch":
            continue
        batches = [make_batch(objective, seed=s, length=4 + s, everything=True) for s in range(size)]
        others = {"token_mean", "sum", "sequence_mean_token_sum"} - {objective.aggregation}
        others = set() if objective.aggregation == "constant" else others
        for aggregation in sorted(others | {objective.aggregation}):
            one = replace(objective, aggregation=aggregation)

            def counted(batch, one=one, **groups):
                terms, unit = {}, one.outer_divisor()[0]
                if unit == "tokens":
                    terms = {"lengths": batch.terms.get("lengths")}
                if unit == "pairs":
                    terms = {"advantages": batch.advantages, "group_ids": batch.terms["group_ids"]}
                return gk.normalizer(one, batch.loss_mask, **terms, **groups)

            got = counted(batches[rank], group=group)
            assert_same_bits(got=got)
            each = [counted(batch) for batch in batches]
            expected = (torch.ones(()).double() if aggregation == "sum" else sum(each)) / size
            torch.testing.assert_close(got, expected, rtol=1e-14, atol=0, msg=str(one))
    masks = [torch.ones(3, 4), torch.zeros(2, 5), torch.zeros(0, 2), torch.ones(1, 1)]
    sequences = sum(int((mask.sum(1) > 0).sum()) for mask in masks[:size])
    assert gk.normalizer(GSPO, masks[rank], group=group) == sequences / size
    assert gk.normalizer(GSPO, torch.zeros(2, 3), group=group) == 1
    # two prompts, none, none and one, with this many tokens
    tokens = torch.tensor([(8.0, 8.0, 4.0), (1.0, 1.0), (), (1.0,)][rank]).double()
    got = gk.normalizer(PROMPTS, masks[rank], group_ids=torch.arange(len(masks[rank])) // 2, group=group)
    assert torch.equal(got, (1.0 if size == 2 else 0.75) * tokens)
    case = case_of("logprobs", "packed", "holes")
    local = share(case, place_of("cp"), "stream")
    for one in (GSPO, gk.DAPO(), PROMPTS):
        ids = {"group_ids": torch.arange(len(case.cu_seqlens) - 1) // 2} if one is PROMPTS else {}
        alone = gk.normalizer(one, case.loss_mask, cu_seqlens=case.cu_seqlens, **ids)
        parallel = gk.Parallel(**place_of("cp").groups)
        together = gk.normalizer(one, local.loss_mask, cu_seqlens=local.cu_seqlens, parallel=parallel, **ids)
        assert_same_bits(together=together)
        assert torch.equal(alone, together)
