"""Sampling masks, selected ids, teachers and normalizers over ranks give one process's results."""

import itertools
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import gspo_kernels as gk
from gspo_kernels import bits
from tests.cases import make_case, over_ranks
from tests.draws import shifted_seed
from tests.judging import assert_equals_oracle
from tests.objectives.sample_batches import examples, make_batch
from tests.parallel.ranks import (
    GSPO,
    LENGTHS,
    LOSSES,
    SHARDED,
    VOCABULARY,
    assert_all_raise,
    assert_same_bits,
    every,
    of_ranks,
    place_of,
    run,
    share,
)


@of_ranks(2)
def sampling_masks():
    """Masks are bits of the whole vocabulary; shards begin at any column. No label may be cut by its mask."""
    for kind, backend in itertools.product(LOSSES, ("cpp", "triton")):
        case = make_case(kind, "packed", "entropy", vocabulary=VOCABULARY, logit_options="kept")
        ids = case.logit_options["kept_ids"]
        by_bits = replace(case, logit_options={"kept_mask": bits.packed_ids(ids, VOCABULARY)})
        result, _ = run(by_bits, "tp", backend=backend, uneven=True)
        if dist.get_rank() == 0:
            assert_equals_oracle(result, case, GSPO)
    labels, everything = torch.tensor([3, 40]), torch.full((2, 2), -1, dtype=torch.int32)
    without = everything.clone()
    without[1, 1] ^= 1 << (40 - 32)
    logits, group = torch.zeros(2, VOCABULARY // 2), {"parallel": gk.Parallel(dist.group.WORLD)}
    gk.token_logprobs(logits, labels, kept_mask=everything, **group)
    for message, culprit, options in (
        ("labels: got 40 at position", 1, {"kept_mask": without}),
        ("kept_mask: got 1 words, expected 2", "all", {"kept_mask": everything[..., :1]}),
        ("kept_ids: got 64, expected", "all", {"kept_ids": torch.full((2, 1), VOCABULARY)}),
    ):
        assert_all_raise(message, culprit, lambda o=options: gk.token_logprobs(logits, labels, **group, **o))


@of_ranks(2)
def selected_ids():
    """Log-probs, tail and gradients of ids on several ranks; rows may have an id twice, or one id alone."""
    generator = torch.Generator().manual_seed(shifted_seed(2))
    hidden = torch.randn(2, 3, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, 8, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, VOCABULARY, (2, 3, 6), generator=generator)
    ids[..., 3] = ids[..., 0]
    ids[0, 0, 1:], ids[0, 1], ids[1, 0] = -100, -100, torch.arange(6)
    upstream = torch.randn(2, 3, 7, generator=generator, dtype=torch.float64)
    kept = torch.cat([ids, torch.randint(0, VOCABULARY, (2, 3, 9), generator=generator)], -1)
    start, end = place_of("tp").columns(uneven=True)
    group = {"parallel": gk.Parallel(dist.group.WORLD, (start, end))}
    for linear, (within, masked, K) in itertools.product(
        (False, True),
        ((False, False, 6), (False, True, 6), (True, True, 6), (True, False, 6), (False, False, 1)),
    ):
        found = []
        for options, columns in (({}, slice(None)), (group, slice(start, end))):
            local = [hidden.clone().requires_grad_(), weight[columns].clone().requires_grad_()]
            options = {"normalize_within": within, "temperature": 0.7, "backend": "cpp", **options}
            options |= {"kept_ids": kept} if masked else {}
            if linear:
                out = gk.linear_selected_logprobs(*local, ids[..., :K], max_chunk_bytes=256, **options)
            else:
                out = gk.selected_logprobs(local[0] @ local[1].T, ids[..., :K], **options)
            loss = (out.logprobs * upstream[..., :K]).sum()
            tail = () if within else (out.tail,)
            loss = loss + sum((each * upstream[..., 6]).sum() for each in tail)
            found.append([*torch.autograd.grad(loss, local), out.logprobs.detach(), *tail])
        (*wanted, whole), (*got, last) = ([*each[:1], *each[2:], each[1]] for each in found)
        assert_same_bits(**{str(i): value for i, value in enumerate(got[1:])})
        if not linear:  # autograd's product is of this rank's columns alone
            got[0] = sum(every(got[0]))
        for one, expected in zip([*got, last], [*wanted, whole[start:end]], strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-10, atol=1e-12)
    for message, changed, options in (
        ("ids: got -3", ids.clone().index_fill_(-1, torch.tensor([2]), -3), {}),
        ("which the sampling mask there cuts", ids, {"kept_ids": torch.full((2, 3, 1), VOCABULARY - 1)}),
    ):
        assert_all_raise(
            message,
            "all",
            lambda i=changed, o=options: gk.linear_selected_logprobs(
                hidden, weight[start:end], i, **group, **o
            ),
        )


FORMS = (
    {"beta": 0.0},
    {"beta": 0.3},
    {"beta": 1.0},
    {"beta": 0.3, "top_k": 5},
    {"beta": 1.0, "top_k": 5, "top_k_of": "student", "add_tail": False},
    {"beta": 0.0, "ids": 4},
)
TEACHER_MASK = torch.tensor([[1, 1, 0], [0, 1, 1]])


def sides(linear, dtype=torch.float64):
    """Draw a student and a teacher of two sequences; in fp64, the order of sums changes almost nothing."""
    rng = torch.Generator().manual_seed(shifted_seed(5))

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)

    def side(width, prefix=""):
        shapes = {"hidden": (2, 3, width), "weight": (VOCABULARY, width), "bias": (VOCABULARY,)}
        shapes = shapes if linear else {"logits": (2, 3, VOCABULARY)}
        return {prefix + name: 2 * normal(*shape) for name, shape in shapes.items()}

    return side(8), side(12, "teacher_")


def distill(student, teacher, form, **options):
    """Return loss, divergences, and the gradients of the student's tensors."""
    leaves = {name: value.detach().requires_grad_() for name, value in student.items()}
    if "ids" in form:
        rng = torch.Generator().manual_seed(shifted_seed(6))
        ids = torch.randint(0, VOCABULARY, (2, 3, form["ids"]), generator=rng)
        logprobs = -2 - torch.rand(ids.shape, generator=rng, dtype=torch.float64)
        form, teacher = form | {"ids": ids, "teacher_logprobs": logprobs}, {}
    options = {"loss_mask": TEACHER_MASK, "temperature": 0.7, "backend": "cpp", **over_ranks(options)}
    if "hidden" in student:
        function = gk.fused_linear_distillation_loss
        options["max_chunk_bytes"] = 4096
    else:
        function = gk.distillation_loss
    out = function(**leaves, **teacher, **form, **options)
    out.loss.backward()
    return out.loss.detach(), out.divergence, {name: leaf.grad for name, leaf in leaves.items()}


def columns_of(side, start, end):
    dims = {name: SHARDED.get(name.removeprefix("teacher_")) for name in side}
    return {n: v if dims[n] is None else v.narrow(dims[n], start, end - start) for n, v in side.items()}


@of_ranks(2)
def teachers():
    """Results are one process's, also from shards of one column and of all others, and from DTensors."""
    for linear, (uneven, backend) in itertools.product((False, True), ((True, "cpp"), (False, "reference"))):
        student, teacher = sides(linear)
        start, end = place_of("tp").columns(uneven)
        group = {"tp_group": dist.group.WORLD} | ({"vocab_range": (start, end)} if uneven else {})
        for form in FORMS if backend == "cpp" else FORMS[1::2]:
            whole, shown, grads = distill(student, teacher, form, backend=backend)
            parts = (columns_of(side, start, end) for side in (student, teacher))
            loss, ours, local = distill(*parts, form, backend=backend, **group)
            assert_same_bits(loss=loss, divergence=ours)
            for got, wanted in ((loss, whole), (ours, shown)):
                torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
            for name, wanted in columns_of(grads, start, end).items():
                torch.testing.assert_close(local[name], wanted, rtol=1e-9, atol=1e-12)
    mesh = init_device_mesh("cpu", (2,))

    def dtensors(**changed):
        placed = {"hidden": Replicate(), "teacher_hidden": Replicate()} | changed
        on_mesh = (
            {name: distribute_tensor(v, mesh, [placed.get(name, Shard(0))]) for name, v in side.items()}
            for side in (student, teacher)
        )
        return distill(*on_mesh, {"beta": 1.0})

    whole, _, grads = distill(student, teacher, {"beta": 1.0})
    loss, _, local = dtensors()
    torch.testing.assert_close(loss, whole, rtol=1e-10, atol=1e-12)
    for name, wanted in grads.items():
        torch.testing.assert_close(local[name].full_tensor(), wanted, rtol=1e-9, atol=1e-12)
    for message, changed in (
        ("teacher_weight: expected a DTensor of weight's placement", {"teacher_weight": Replicate()}),
        ("teacher_hidden: is a DTensor with placement", {"teacher_hidden": Shard(0)}),
        ("hidden: is sharded over tokens, expected", {"hidden": Shard(1)}),
    ):
        assert_all_raise(message, "all", lambda c=changed: dtensors(**c))


@of_ranks(2, 4)
def normalizers():
    """Normalizers of data-parallel ranks make averaged losses and gradients those of the whole batch."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    for objective in examples(max_scope="group"):
        batches = [make_batch(objective, seed=s, length=4 + s, everything=True) for s in range(size)]
        others = {"token_mean", "sum", "sequence_mean_token_sum"} - {objective.aggregation}
        others = set() if objective.aggregation == "constant" else others
        for aggregation in sorted(others | {objective.aggregation}):
            one = replace(objective, aggregation=aggregation)

            def counted(batch, one=one, **groups):
                terms = {"lengths": batch.terms.get("lengths")}
                if one.outer_divisor()[0] == "pairs":
                    terms |= {"advantages": batch.advantages, "group_ids": batch.terms["group_ids"]}
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
    case = make_case("logprobs", "packed", "holes", lengths=LENGTHS)
    local = share(case, place_of("cp"), "stream")
    for one in (GSPO, gk.DAPO()):
        alone = gk.normalizer(one, case.loss_mask, cu_seqlens=case.cu_seqlens)
        parallel = gk.Parallel(**place_of("cp").groups)
        together = gk.normalizer(one, local.loss_mask, cu_seqlens=local.cu_seqlens, parallel=parallel)
        assert_same_bits(together=together)
        assert alone == together
