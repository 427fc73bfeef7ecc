"""If ranks compare their arguments, all of them raise, and none waits, when one rank's are wrong."""

import contextlib
import functools
import itertools
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import gspo_kernels as gk
from tests.cases import call, make_case, over_ranks
from tests.distributed.ranks import (
    ENTRIES,
    GSPO,
    KINDS,
    LENGTHS,
    LOSSES,
    VOCABULARY,
    Wire,
    assert_all_raise,
    leaves_of,
    of_ranks,
    place_of,
    run,
    share,
    validated,
)

SECONDS = 5
"""The timeout of groups: a rank that waits longer waits for nobody."""
OBJECTIVE = gk.GSPOToken(0.2, 0.2)
B = len(LENGTHS)


def local_case(kind, split, terms="plain"):
    """Return a case as this rank has it, and the rank's groups."""
    place = place_of(split, SECONDS)
    case = make_case(kind, "packed", terms, vocabulary=VOCABULARY, lengths=LENGTHS)
    return share(case, place), place.groups


def calling(kind, case, *, entry=None, objective=OBJECTIVE, **options):
    """Return a function that runs forward and backward."""
    run = functools.partial(call, case, leaves_of(case), entry or ENTRIES[kind], objective, "cpp", **options)
    return lambda: run().loss.backward()


def changes(kind, split, case):
    """Yield what one rank passes differently: the expected error, the changed case, and options."""
    tokens = case.labels.shape
    for name, value in {"kl_beta": 1.25, "kl_estimator": "k1", "token_weights": torch.ones(tokens)}.items():
        yield f"{name}: differs", case, {name: value}
    yield "objective.clip_high: differs", case, {"objective": gk.GSPOToken(0.2, 0.3)}
    yield "objective: ", case, {"objective": gk.GRPO()}
    yield "old_logprobs: differs", replace(case, old_logprobs=None), {}
    yield "old_logprobs: got shape", replace(case, old_logprobs=torch.zeros(99)), {}
    yield "advantages: differs", replace(case, advantages=case.advantages + 1), {}
    yield "normalizer: ", case, {"normalizer": -2.0}
    if split != "tp":
        shrinks = torch.tensor([0, 5, *case.cu_seqlens[2:]], dtype=torch.int32)
        yield "cu_seqlens: got decreasing", replace(case, cu_seqlens=shrinks), {}
    if split == "cp":  # an empty sequence at the end
        ends, values = torch.cat([case.cu_seqlens, case.cu_seqlens[-1:]]), torch.ones(B + 1)
        options = {} if kind == "logprobs" else {"temperature": values}
        yield "cu_seqlens: differs", replace(case, cu_seqlens=ends, advantages=values), options
        nan = torch.full_like(case.old_logprobs, float("nan"))
        yield "old_logprobs: got NaN", replace(case, old_logprobs=nan), {}
    if kind == "logprobs":
        return
    outside, half = torch.full_like(case.labels, VOCABULARY + 7), VOCABULARY // 2
    cut = torch.where(case.labels < half, case.labels + half, case.labels - half).unsqueeze(-1)
    everything = torch.arange(VOCABULARY).expand(*tokens, -1)
    yield f"labels: got {VOCABULARY + 7} in a counted position", replace(case, labels=outside), {}
    yield "in the sampling mask", case, {"kept_mask": gk.kept_mask(cut, VOCABULARY)}
    yield "temperature: got 0", case, {"temperature": 0.0}
    yield "temperature: differs", case, {"temperature": torch.full((B,), 0.5)}
    yield "kept_mask: differs", case, {"kept_mask": gk.kept_mask(everything, VOCABULARY)}
    if kind == "linear":
        yield "schedule: got 'none'", case, {"schedule": "none"}
        yield "logits_dtype: differs", replace(case, logits_dtype="input"), {}
        yield "weight: differs", replace(case, frozen=("weight",)), {}
        inputs = {name: value for name, value in case.inputs.items() if name != "bias"}
        yield "bias: differs", replace(case, inputs=inputs), {}
    if split != "cp":
        yield "labels: differs", replace(case, labels=case.labels.flip(0)), {}
        yield "old_logprobs: differs", replace(case, old_logprobs=case.old_logprobs - 0.5), {}


@of_ranks(2, 4)
def an_argument_of_one_rank():
    """In a grid of ranks, all learn of a wrong argument in two steps, whichever rank has it."""
    for split in ("both",) if dist.get_world_size() == 4 else ("cp", "tp"):
        for kind in ("linear",) if split == "both" else KINDS[split]:
            case, groups = local_case(kind, split)
            shared = {"ref_logprobs": case.old_logprobs, "kl_beta": 0.25, "normalizer": 7.0, **groups}
            shared |= {} if kind == "logprobs" else {"temperature": torch.ones(B)}
            for expected, other, options in changes(kind, split, case):
                for culprit in (0, 3) if split == "both" else (1,):
                    one, more = (other, options) if dist.get_rank() == culprit else (case, {})
                    refuses = culprit if "got shape" in expected else None
                    assert_all_raise(expected, calling(kind, one, **shared | more), refuses)


@of_ranks(2)
def what_no_rank_sees_alone():
    second = dist.get_rank() == 1
    for kind in LOSSES:
        case, groups = local_case(kind, "tp")
        with gk.set_batch_invariant(True) if second else contextlib.nullcontext():
            assert_all_raise("in batch-invariant mode", calling(kind, case, **groups))
        first = {"vocab_range": (0, VOCABULARY // 2)}
        expected = "vocab_range: the ranks have 0 to 32, 0 to 32"
        assert_all_raise(expected, calling(kind, case, **groups, **first))
    linear, groups = local_case("linear", "tp")
    for message, options in (
        ("hidden: the ranks have", {**groups, "sequence_parallel": True}),
        ("vocab_range: got (0, 3), expected (first, first + ", {**groups, "vocab_range": (0, 3)}),
        ("vocab_range: got (0, 64) without a tp_group", {"vocab_range": (0, 64)}),
        ("sequence_parallel: got True, expected False without a tp_group", {"sequence_parallel": True}),
    ):
        assert_all_raise(message, calling("linear", linear, **options))
    for name in ("tp_group", "cp_group"):
        assert_all_raise(f"{name}: got int", lambda n=name: gk.Parallel(**{n: 3}))
    by_token = make_case("linear", "padded", "plain+token_advantages", vocabulary=VOCABULARY)
    message = "skip_inactive: got 'all', expected 'backward': with cp_group"
    assert_all_raise(message, lambda: run(by_token, "cp", gk.GRPO(), skip_inactive="all"))


@of_ranks(2)
def other_functions():
    """Log-probs, selected ids, distillation and coefficients compare their arguments, too."""
    here = dist.get_rank()
    case, groups = local_case("linear", "tp")
    hidden, weight = case.inputs["hidden"], case.inputs["weight"]
    logits = local_case("logits", "tp")[0].inputs["logits"]
    ids = torch.stack([case.labels.clamp(min=0)] * 2, -1)
    beyond = ids + VOCABULARY * here
    labels = case.labels.flip(0) if here else case.labels
    groups = over_ranks(groups)
    packed = {"cu_seqlens": case.cu_seqlens, **groups}
    sides, both = (hidden, weight) * 2, (logits, logits)
    beta = {"beta": 2.0 if here else 0.5}
    head = gk.LoRAHead(weight, torch.ones(2, hidden.shape[-1]), torch.ones(len(weight), 2), 1.0 + here)
    centered = {"objective": gk.GPG(), **packed}

    def center(chosen):
        centering = None if chosen is None else gk.ScoreCentering(chosen, torch.full(ids.shape, -2.0))
        return gk.fused_linear_policy_loss(
            hidden, weight, case.labels, None, case.advantages, centering=centering, **centered
        )

    def other():
        if here:
            gk.token_logprobs(logits, case.labels, **groups)
        else:
            gk.fused_policy_loss(logits, case.labels, None, case.advantages, **packed)

    for expected, function in (
        ("labels: differs", lambda: gk.linear_token_logprobs(hidden, weight, labels, **groups)),
        ("weight.scale: differs", lambda: gk.linear_token_logprobs(hidden, head, case.labels, **groups)),
        ("ids: got", lambda: gk.selected_logprobs(logits, beyond, **groups)),
        ("beta: differs", lambda: gk.distillation_loss(*both, beta=0.5 + here / 4, **packed)),
        ("beta: got 2.0", lambda: gk.fused_linear_distillation_loss(*sides, **beta, **packed)),
        ("call: differs", other),
        ("centering.ids: got", lambda: center(beyond)),
        ("centering: differs", lambda: center(None if here else ids)),
    ):
        assert_all_raise(expected, function)
    local, groups = local_case("logprobs", "cp")
    arguments = (local.inputs["logprobs"], local.old_logprobs, local.advantages)
    packed = {"cu_seqlens": local.cu_seqlens, **over_ranks(groups)}
    for expected, options in (
        ("objective.clip_low: differs", {"objective": gk.GSPO(0.1 * (1 + here), 0.2)}),
        ("lengths: differs", {"objective": GSPO, "lengths": torch.full((B,), 30.0 + here)}),
    ):
        assert_all_raise(expected, lambda o=options: gk.policy_coefficients(*arguments, **packed, **o))


@of_ranks(2)
def contradicting_dtensors():
    """One rank's weight, bias, hidden states or group do not go with the other rank's DTensors."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    case = make_case("linear", "packed", vocabulary=VOCABULARY, lengths=LENGTHS)
    placements = {"hidden": Replicate(), "weight": Shard(0), "bias": Shard(0)}

    def on_mesh(name, placement):
        value = case.inputs[name]
        if placement is None:
            return value
        if placement == Partial():
            return DTensor.from_local(value, mesh, [placement])
        return distribute_tensor(value, mesh, [placement])

    for expected, changed, options in (
        ("weight: is a DTensor with placement", {"weight": Shard(1)}, {}),
        ("bias: got a plain tensor, expected a DTensor, as weight is", {"bias": None}, {}),
        ("bias: expected a DTensor with the placement of weight", {"bias": Replicate()}, {}),
        ("weight: differs", {"weight": Replicate(), "bias": Replicate()}, {}),
        ("hidden: is a DTensor with placement", {"hidden": Shard(1)}, {}),
        ("hidden: is a DTensor with placement Partial", {"hidden": Partial()}, {}),
        ("tp_group: expected None, as the DTensors hidden, weight, bias", {}, {"tp_group": mesh["tp"]}),
        ("schedule: differs", {}, {"schedule": "two_pass"}),
        ("temperature: got -1", {}, {"temperature": -1.0}),
    ):  # fmt: skip
        tensors = {name: on_mesh(name, placement) for name, placement in placements.items()}
        others = {name: on_mesh(name, placement) for name, placement in changed.items()}  # needs all ranks
        second = dist.get_rank() == 1
        one = replace(case, inputs=tensors | (others if second else {}))
        loss = functools.partial(call, one, one.inputs, LOSSES["linear"], OBJECTIVE, "cpp")
        assert_all_raise(expected, functools.partial(loss, **(options if second else {})))


@of_ranks(2, 4)
def ranks_that_agree():
    """Nothing is refused, and one gather in each group comes before any other work."""
    for split in ("both",) if dist.get_world_size() == 4 else ("cp", "tp"):
        for kind, terms in itertools.product(KINDS[split], ("all", "kl_tensor", "on_policy", "weighted")):
            case, groups = local_case(kind, split, terms)
            loss = calling(kind, case, **groups)
            with Wire() as plain:
                loss()
            with Wire() as compared, validated():
                loss()
            first, others = compared.seen[: len(groups)], compared.seen[len(groups) :]
            assert others == plain.seen, (split, kind, terms)
            order = [groups[name].group_name for name in ("tp_group", "cp_group") if name in groups]
            assert [(what, where) for what, where, _ in first] == [("all_gather", name) for name in order]


@of_ranks(4)
def arguments_of_normalizers():
    """Arguments are compared over data-parallel ranks, each of which shares its sequences with another."""
    place = place_of("both", SECONDS)
    groups = {"group": place.groups["tp_group"], "parallel": gk.Parallel(cp_group=place.groups["cp_group"])}
    mask, last = torch.ones(3, 4), dist.get_rank() == 3
    for expected, objective, counted, options in (
        ("loss_mask: ", GSPO, mask * (1 + last), {}),
        ("objective: differs", gk.DAPO() if last else GSPO, mask, {}),
        ("lengths: differs", gk.DAPO(), mask, {"lengths": torch.full((3,), 9.0 + last)}),
    ):
        normalizer = functools.partial(gk.normalizer, objective, counted, **options, **groups)
        assert_all_raise(expected, normalizer)
