"""Where ranks compare their arguments all of them raise, and none waits, if those of one are wrong."""

import contextlib
import functools
import time
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import gspo_kernels as gk
from gspo_kernels.parallel.agreement import RanksDisagreeError
from tests.cases import call, make_case, over_ranks
from tests.parallel.ranks import LOSSES, VOCABULARY, Wire, every, of_ranks, validated
from tests.parallel.sequences import LENGTHS, part, positions

LIMIT = timedelta(seconds=5)
"""A rank that waits longer waits for nobody."""
OBJECTIVE = gk.GSPOToken(0.2, 0.2)
B = len(LENGTHS)


@functools.cache
def group(*ranks):
    """Of some ranks; all call this."""
    return dist.new_group(list(ranks), timeout=LIMIT)


def places(over):
    """This rank's places among ranks that have parts of the sequences, and shards of the vocabulary; and the
    groups of these, by argument. ``over``: "tp", "cp", or both as a grid of two times two.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if over == "both":
        rows, columns = ([group(0, 1), group(2, 3)], [group(0, 2), group(1, 3)])
        cp, tp = divmod(rank, 2)
        return cp, tp, {"cp_group": columns[tp], "tp_group": rows[cp]}
    whole = group(*range(size))
    return (rank, 0, {"cp_group": whole}) if over == "cp" else (0, rank, {"tp_group": whole})


def own(kind, over, terms="plain"):
    """A case as this rank has it, and its groups."""
    cp, tp, groups = places(over)
    case = make_case(kind, "packed", terms, vocabulary=VOCABULARY, lengths=LENGTHS)
    if "cp_group" in groups:
        case = part(case, *positions(case, "zigzag", cp, 2))
    inputs = dict(case.inputs)
    if "tp_group" in groups:
        half = slice(tp * VOCABULARY // 2, (tp + 1) * VOCABULARY // 2)
        inputs |= {name: inputs[name][half] for name in ("weight", "bias") if name in inputs}
        inputs |= {"logits": inputs["logits"][:, half]} if kind == "logits" else {}
    return replace(case, inputs=inputs), groups


def loss(kind, case, **options):
    """Loss and gradients."""
    options = {"objective": OBJECTIVE, **options}
    leaves = {name: value.clone().requires_grad_() for name, value in case.inputs.items()}
    entry = LOSSES.get(kind, "policy_loss")
    call(case, leaves, entry, options.pop("objective"), "cpp", **options).loss.backward()


def assert_all_say(expected, run, culprit=None):
    """All ranks raise the sentence, soon: the culprit as its error, others as another rank's, or, without a
    culprit, as what ranks disagree about.
    """
    began, raised = time.monotonic(), None
    try:
        with validated():
            run()
    except (ValueError, TypeError, RanksDisagreeError) as error:
        raised = type(error).__name__, str(error)
    except Exception as error:  # gloo's, of a rank that waited
        raised = "waited", str(error)
    ranks = every((raised, time.monotonic() - began))
    for rank, (said, seconds) in enumerate(ranks):
        assert said is not None and expected in said[1], (expected, rank, ranks)
        alone = said[0] in ("ValueError", "TypeError")
        assert said[0] != "waited" and alone == (rank == culprit), (expected, rank, ranks)
        assert seconds < LIMIT.total_seconds(), (expected, rank, ranks)


def wrong_alone(kind, case):
    """What a rank refuses by itself: the sentence, its case, its options."""
    yield "old_logprobs: got shape", replace(case, old_logprobs=torch.zeros(99)), {}
    yield "lengths: expected positive", case, {"lengths": torch.full((B,), -1.0)}
    yield "normalizer: got -2.0", case, {"normalizer": -2.0}
    if kind == "logprobs":
        return
    outside = torch.full_like(case.labels, VOCABULARY + 7)
    yield f"labels: got {VOCABULARY + 7} in a counted position", replace(case, labels=outside), {}
    yield "temperature: expected only positive", case, {"temperature": torch.zeros(B)}
    yield "temperature: got 0", case, {"temperature": 0.0}
    half = VOCABULARY // 2
    cut = torch.where(case.labels < half, case.labels + half, case.labels - half).unsqueeze(-1)
    yield "which the sampling mask there cuts", case, {"kept_ids": cut}
    if kind == "linear":
        yield "schedule: got 'none'", case, {"schedule": "none"}
        yield "batch_invariant: got int", case, {"batch_invariant": 3}


@of_ranks(2, 4)
def a_wrong_argument_on_one_rank():
    for over in ("both",) if dist.get_world_size() == 4 else ("cp", "tp"):
        for kind in ("linear", "logits", "logprobs") if over == "cp" else ("linear", "logits"):
            case, groups = own(kind, over)
            for culprit in (0, 3) if over == "both" else (1,):
                for expected, wrong, options in wrong_alone(kind, case):
                    here = dist.get_rank() == culprit
                    given = (wrong, groups | options) if here else (case, groups)
                    assert_all_say(expected, lambda k=kind, g=given: loss(k, g[0], **g[1]), culprit)


def disagreeing(kind, over, case):
    """What two ranks differ in without one of them being wrong: the argument, a case and options."""
    tokens = case.labels.shape
    for name, options in (
        ("ref_logprobs", {"ref_logprobs": case.old_logprobs, "kl_beta": 0.125}),
        ("entropy_coef", {"entropy_coef": 0.125}),
        ("rollout_weights", {"rollout_weights": torch.ones(B)}),
        ("token_weights", {"token_weights": torch.ones(tokens)}),
        ("normalizer", {"normalizer": 7.0}),
        ("lengths", {"lengths": torch.full((B,), 30.0)}),
        ("kl_estimator", {"kl_estimator": "k1"}),
        ("objective", {"objective": gk.GSPOToken(0.2, 0.3)}),
    ):
        if kind != "logprobs" or name != "entropy_coef":
            yield name, case, options
    yield "old_logprobs", replace(case, old_logprobs=None), {}
    yield "advantages", replace(case, advantages=case.advantages + 1), {}
    if kind == "logprobs":
        return
    for name, options in (
        ("temperature", {"temperature": 0.5}),
        ("softcap", {"softcap": 3.0}),
        ("return_entropy", {"return_entropy": True}),
        ("kept_ids", {"kept_ids": torch.arange(VOCABULARY).expand(*tokens, -1)}),
    ):
        yield name, case, options
    if kind == "linear":
        yield "logits_dtype", replace(case, logits_dtype="input"), {}
        yield "schedule", case, {"schedule": "two_pass"}
        yield "skip_inactive", case, {"skip_inactive": "none"}
        yield "bias", replace(case, inputs={k: v for k, v in case.inputs.items() if k != "bias"}), {}
    if over != "cp":
        yield "labels", replace(case, labels=case.labels.flip(0)), {}
        yield "old_logprobs", replace(case, old_logprobs=case.old_logprobs - 0.5), {}
        yield "token_weights", case, {"token_weights": torch.arange(1.0, tokens[0] + 1)}


@of_ranks(2, 4)
def something_else_on_one_rank():
    for over in ("both",) if dist.get_world_size() == 4 else ("cp", "tp"):
        for kind in ("linear", "logits", "logprobs") if over == "cp" else ("linear", "logits"):
            case, groups = own(kind, over)
            for name, other, options in disagreeing(kind, over, case):
                given = (other, groups | options) if dist.get_rank() == 1 else (case, groups)
                assert_all_say(f"{name}: differs", lambda k=kind, g=given: loss(k, g[0], **g[1]))
            for name in ("kl_beta", "normalizer"):
                options = {"kl_beta": 0.25, "normalizer": 7.0, "ref_logprobs": case.old_logprobs}
                options[name] += dist.get_rank() == 1
                run = functools.partial(loss, kind, case, **groups, **options)
                assert_all_say(f"{name}: differs", run)


@of_ranks(2, 4)
def batch_invariant_mode_on_one_rank():
    """Which refuses process groups."""
    for kind in LOSSES:
        case, groups = own(kind, "both" if dist.get_world_size() == 4 else "tp")
        here = dist.get_rank() == 1
        with gk.set_batch_invariant(True) if here else contextlib.nullcontext():
            assert_all_say("in batch-invariant mode", lambda k=kind, c=case, g=groups: loss(k, c, **g), 1)


@of_ranks(2)
def shards_that_make_no_vocabulary():
    """What no rank sees alone."""
    for kind in LOSSES:
        case, groups = own(kind, "tp")
        ids = {"vocab_range": (0, VOCABULARY // 2)}
        run = functools.partial(loss, kind, case, **groups, **ids)
        try:
            with validated():
                run()
        except ValueError as error:
            assert "vocab_range: the ranks have 0 to 32, 0 to 32" in str(error)
        else:
            raise AssertionError("nothing was raised")


@of_ranks(2)
def other_functions():
    """Scores, selected ids, distillation and coefficients."""
    here = dist.get_rank()
    case, groups = own("linear", "tp")
    hidden, weight = case.inputs["hidden"], case.inputs["weight"]
    logits = own("logits", "tp")[0].inputs["logits"]
    ids = torch.stack([case.labels.clamp(min=0)] * 2, -1)
    beyond = ids + VOCABULARY * here
    labels = case.labels.flip(0) if here else case.labels
    turned = ids.flip(0) if here else ids
    groups = over_ranks(groups)
    packed = {"cu_seqlens": case.cu_seqlens, **groups}
    sides, both = (hidden, weight) * 2, (logits, logits)
    beta = {"beta": 2.0 if here else 0.5}

    def other():
        if here:
            gk.token_logprobs(logits, case.labels, **groups)
        else:
            gk.fused_policy_loss(logits, case.labels, None, case.advantages, **packed)

    for expected, culprit, run in (
        ("labels: differs", None, lambda: gk.token_logprobs(logits, labels, **groups)),
        ("labels: differs", None, lambda: gk.linear_token_logprobs(hidden, weight, labels, **groups)),
        ("ids: got", 1, lambda: gk.selected_logprobs(logits, beyond, **groups)),
        ("ids: differs", None, lambda: gk.linear_selected_logprobs(hidden, weight, turned, **groups)),
        ("beta: differs", None, lambda: gk.distillation_loss(*both, beta=0.5 + here / 4, **packed)),
        ("beta: got 2.0", 1, lambda: gk.fused_linear_distillation_loss(*sides, **beta, **packed)),
        ("teacher_logits: got shape", 1, lambda: gk.distillation_loss(logits, logits[here:], **packed)),
        ("call: differs", None, other),
    ):
        assert_all_say(expected, run, culprit)
    part_of, groups = own("logprobs", "cp")
    given = (part_of.inputs["logprobs"], part_of.old_logprobs, part_of.advantages)
    for expected, options in (
        ("objective: differs", {"objective": gk.GSPO(0.1 * (1 + here), 0.2)}),
        ("lengths: differs", {"objective": gk.GSPO(), "lengths": torch.full((B,), 30.0 + here)}),
    ):
        assert_all_say(
            expected,
            lambda o=options: gk.policy_coefficients(
                *given, cu_seqlens=part_of.cu_seqlens, **o, **over_ranks(groups)
            ),
        )


@of_ranks(4)
def normalizers():
    """Over data-parallel ranks, each of which shares its sequences with another."""
    rows, columns = (group(0, 1), group(2, 3)), (group(0, 2), group(1, 3))
    cp, dp = divmod(dist.get_rank(), 2)
    groups = {"group": rows[cp], "parallel": gk.Parallel(cp_group=columns[dp])}
    mask = torch.ones(3, 4)
    two = 2 * mask if dist.get_rank() == 3 else mask
    assert_all_say("loss_mask: ", lambda: gk.normalizer(gk.GSPO(), two, **groups), 3)
    other = gk.DAPO() if dist.get_rank() == 3 else gk.GSPO()
    assert_all_say("objective: differs", lambda: gk.normalizer(other, mask, **groups))
    lengths = torch.full((3,), 9.0 + (dist.get_rank() == 3))
    assert_all_say("lengths: differs", lambda: gk.normalizer(gk.DAPO(), mask, lengths=lengths, **groups))


@of_ranks(2, 4)
def contradicting_dtensors():
    """One rank's weight, bias, hidden states or group do not go with the other ranks' DTensors."""
    four = dist.get_world_size() == 4
    mesh = init_device_mesh("cpu", (2, 2) if four else (2,), mesh_dim_names=("cp", "tp") if four else ("tp",))
    cp = mesh.get_local_rank("cp") if four else 0
    whole = make_case("linear", "packed", vocabulary=VOCABULARY, lengths=LENGTHS)
    case = part(whole, *positions(whole, "stream", cp, 2)) if four else whole
    placements = {"hidden": Replicate(), "weight": Shard(0), "bias": Shard(0)}

    def on_mesh(name, placement):
        over_cp = [Shard(0) if name == "hidden" else Replicate()] if four else []
        return distribute_tensor(whole.inputs[name], mesh, [*over_cp, placement])

    def placed(changed):
        """All ranks place alike, which takes all of them; one of them takes what is changed."""
        tensors = {name: on_mesh(name, placement) for name, placement in placements.items()}
        for name, placement in changed.items():
            other = whole.inputs[name] if placement is None else on_mesh(name, placement)
            tensors[name] = other if dist.get_rank() == 1 else tensors[name]
        return tensors

    for expected, culprit, changed, options in (
        ("weight: is a DTensor with placement", 1, {"weight": Shard(1)}, {}),
        ("bias: expected a DTensor of weight's placement", 1, {"bias": None}, {}),
        ("weight: the DTensor: differs", None, {"weight": Replicate(), "bias": Replicate()}, {}),
        ("hidden: is a DTensor with placement", 1, {"hidden": Shard(1)}, {}),
        ("tp_group: hidden, weight, bias as DTensors say it themselves", 1, {}, {"tp_group": mesh["tp"]}),
        ("schedule: differs", None, {}, {"schedule": "two_pass"}),
        ("temperature: got -1", 1, {}, {"temperature": -1.0}),
    ):  # fmt: skip
        given = replace(case, inputs=placed(changed))
        more = options if dist.get_rank() == 1 else {}
        assert_all_say(expected, lambda g=given, m=more: loss("linear", g, **m), culprit)


@of_ranks(2, 4)
def ranks_that_agree():
    """Nothing is refused, and one gather in each group comes before any other work."""
    for over in ("both",) if dist.get_world_size() == 4 else ("cp", "tp"):
        for kind in ("linear", "logits", "logprobs") if over == "cp" else ("linear", "logits"):
            for terms in ("all", "kl_tensor", "weighted", "on_policy", "rollout_token"):
                case, groups = own(kind, over, terms)
                plain, compared = Collectives(), Collectives()
                with plain:
                    loss(kind, case, **groups)
                with compared, validated():
                    loss(kind, case, **groups)
                first, others = compared.seen[: len(groups)], compared.seen[len(groups) :]
                assert others == plain.seen, (over, kind, terms)
                by_name = {name: each.group_name for name, each in groups.items()}
                order = [by_name[name] for name in ("tp_group", "cp_group") if name in by_name]
                assert [(what, where) for what, where, _ in first] == [("all_gather", name) for name in order]


@of_ranks(2)
def scores_of_tokens_on_several_ranks():
    """DTensors cut over tokens, unevenly, of which each rank has the labels and the temperatures."""
    mesh = init_device_mesh("cpu", (2,))
    logits = make_case("logits", "packed", vocabulary=VOCABULARY, lengths=(3, 4)).inputs["logits"]
    here = slice(0, 4) if dist.get_rank() == 0 else slice(4, 7)
    labels, temperature = torch.arange(7)[here], torch.linspace(0.5, 2.0, 7)[here]
    with validated():
        placed = distribute_tensor(logits, mesh, [Shard(0)])
        scores = gk.token_logprobs(placed, labels, temperature=temperature).logprobs
    torch.testing.assert_close(
        scores, gk.token_logprobs(logits[here], labels, temperature=temperature).logprobs
    )


class Collectives(Wire):
    """Which collectives come in which groups, with how many bytes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _counted(self, kind, function):
        def counted(*tensors, **options):
            self.seen.append((kind, options["group"].group_name, tensors[-1].nbytes))
            return function(*tensors, **options)

        return counted
