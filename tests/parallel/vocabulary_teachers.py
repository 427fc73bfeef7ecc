"""Distillation on several ranks, alone and beside an objective: both sides are cut in the same places."""

import functools
import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import gspo_kernels as gk
from gspo_kernels.linear.chunks import SIZES_BYTES
from gspo_kernels.parallel.agreement import RanksDisagreeError
from tests.draws import shifted_seed
from tests.parallel.ranks import VOCABULARY, Wire, assert_all_raise, assert_same_bits, every, of_ranks
from tests.parallel.vocabulary import shares

FORMS = (
    {"beta": 0.0},
    {"beta": 0.3},
    {"beta": 1.0},
    {"beta": 0.3, "top_k": 5},
    {"beta": 1.0, "top_k": 5, "top_k_of": "student", "add_tail": False},
    {"beta": 0.0, "ids": 4},
)
MASK = torch.tensor([[1, 1, 0], [0, 1, 1]])
CUT = {"logits": -1, "weight": 0, "bias": 0}


class Sides:
    """A student and a teacher of two sequences, in fp64, where another order of sums hardly shows.

    Attributes:
        explain: makes the plan of the last call beside an objective, from hidden states.
    """

    def __init__(self, linear, dtype=torch.float64):
        rng = torch.Generator().manual_seed(shifted_seed(5))

        def normal(*shape):
            return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)

        def side(width):
            if not linear:
                return {"logits": 2 * normal(2, 3, VOCABULARY)}
            return {
                "hidden": normal(2, 3, width),
                "weight": normal(VOCABULARY, width),
                "bias": normal(VOCABULARY),
            }

        self.linear, self.student, self.teacher = linear, side(8), side(12)
        self.mask, self.chunk_bytes = MASK, 4096
        self.labels = torch.randint(0, VOCABULARY, (2, 3), generator=rng)
        self.old = -4 + 0.1 * normal(2, 3)
        self.ids = torch.randint(0, VOCABULARY, (2, 3, 4), generator=rng)
        self.logprobs = normal(2, 3, 4).abs().neg() - 2

    def run(self, form, beside, backend="cpp", columns=None, **group):
        """Loss, divergences or log-probs, and the gradients of what this rank has."""
        start, end = (0, VOCABULARY) if columns is None else columns
        leaves, theirs = (
            {
                name: (value.narrow(CUT[name], start, end - start) if name in CUT else value).clone()
                for name, value in side.items()
            }
            for side in (self.student, self.teacher)
        )
        leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
        form = dict(form)
        if form.pop("ids", None):
            theirs, form = {}, form | {"ids": self.ids, "logprobs": self.logprobs}
        options = {"loss_mask": self.mask, "temperature": 0.7, "backend": backend, **group}
        if self.linear:
            options["max_chunk_bytes"] = self.chunk_bytes
        if beside:
            function = gk.fused_linear_policy_loss if self.linear else gk.fused_policy_loss
            given = {
                "labels": self.labels, "old_logprobs": self.old, "advantages": torch.tensor([1.0, -1.0]),
                "objective": gk.GSPO(0.1, 0.1), "teacher": gk.Teacher(**theirs, **form, coef=0.3),
            }  # fmt: skip
            if self.linear:
                known = {name: options[name] for name in options if name not in ("temperature", "backend")}
                self.explain = functools.partial(gk.explain_schedule, **leaves, **given, **known)
            out = function(**leaves, **given, **options)
            shown = out.logprobs, out.metrics["divergence"]
        else:
            function = gk.fused_linear_distillation_loss if self.linear else gk.distillation_loss
            renamed = {f"teacher_{name}": value for name, value in theirs.items()}
            form = {
                ("teacher_logprobs" if name == "logprobs" else name): value for name, value in form.items()
            }
            out = function(**leaves, **renamed, **form, **options)
            shown = (out.divergence,)
        return out.loss, shown, dict(zip(leaves, torch.autograd.grad(out.loss, leaves.values()), strict=True))


def sent_by(plan):
    """Bytes and messages."""
    return plan.sent_bytes, plan.messages


@of_ranks(2)
def teachers():
    """One process's numbers, from shards of one column and of all others."""
    for linear, beside in ((False, False), (True, False), (False, True), (True, True)):
        sides = Sides(linear)
        for uneven, backend in ((True, "cpp"), (False, "reference")):
            columns = shares(uneven=uneven)[dist.get_rank()]
            group = {"tp_group": dist.group.WORLD} | ({"vocab_range": columns} if uneven else {})
            for form in FORMS if backend == "cpp" else FORMS[1::2]:
                whole, shown, grads = sides.run(form, beside, backend)
                loss, ours, own = sides.run(form, beside, backend, columns, **group)
                assert_same_bits(loss=loss, **{str(i): each for i, each in enumerate(ours)})
                for got, wanted in ((loss, whole), *zip(ours, shown, strict=True)):
                    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
                parts = every(own)
                for name, wanted in grads.items():
                    got = torch.cat([part[name] for part in parts], CUT[name]) if name in CUT else own[name]
                    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


@of_ranks(2)
def teachers_beside_parts_of_sequences():
    """Context parallelism: the loss is everyone's, gradients are those of a rank's own tokens."""
    for linear, form in ((False, FORMS[1]), (True, FORMS[3])):
        sides, rank = Sides(linear), dist.get_rank()
        whole, (_, mean), grads = sides.run(form, True)
        here = slice(0, 2) if rank == 0 else slice(2, 3)
        for side in (sides.student, sides.teacher):
            side |= {name: value[:, here] for name, value in side.items() if name in ("logits", "hidden")}
        sides.labels, sides.old, sides.mask = (each[:, here] for each in (sides.labels, sides.old, MASK))
        with Wire() as wire:
            loss, (_, own_mean), own = sides.run(form, True, cp_group=dist.group.WORLD)
        if linear:
            assert sent_by(sides.explain()) == wire.total
        assert_same_bits(loss=loss, mean=own_mean)
        pairs = [(loss, whole), (own_mean, mean)]
        parts = every(own)
        for name, wanted in grads.items():
            shared = name in ("weight", "bias")
            pairs.append(
                (sum(p[name] for p in parts) if shared else torch.cat([p[name] for p in parts], 1), wanted)
            )
        for got, wanted in pairs:
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


@of_ranks(2)
def teachers_on_the_wire():
    """Whatever the vocabulary: two log-sum-exps and log-probs, the two sums, and dHidden."""
    sides, rank = Sides(True, torch.float32), dist.get_rank()
    counted, columns = int(MASK.sum()), shares()[rank]
    for form, bytes_of_row in ((FORMS[1], 12 + 12 + 16), (FORMS[3], 2 * 8 * 5 + 2 * 8 * (2 * 5 + 1))):
        with Wire() as wire:
            sides.run(form, False, "cpp", columns, tp_group=dist.group.WORLD)
        assert wire.sent["all_gather"] == SIZES_BYTES + counted * bytes_of_row
        assert wire.sent["all_reduce"] == counted * 8 * 4
    sides.chunk_bytes = 2 * 2 * 4 * (columns[1] - columns[0])  # two rows of either side
    for form, schedule in itertools.product((FORMS[1], FORMS[3], FORMS[5]), ("aligned", "two_pass")):
        with Wire() as wire:
            sides.run(form, True, "cpp", columns, tp_group=dist.group.WORLD, schedule=schedule)
        assert sent_by(sides.explain()) == wire.total, (form, schedule)


@of_ranks(2)
def wrong_teachers():
    """What one rank refuses none goes on with; DTensors say their ranges themselves."""
    sides, rank, group = Sides(True), dist.get_rank(), {"tp_group": dist.group.WORLD}
    form = {"beta": 0.3 if rank else 0.4}
    assert_all_raise(
        "beta: differs", None, lambda: sides.run(form, False, "cpp", shares()[rank], **group),
        RanksDisagreeError,
    )  # fmt: skip
    wrong = {"beta": 1.5 if rank else 0.5}
    for beside in (False, True):
        assert_all_raise(
            "beta: got 1.5", 1, lambda b=beside: sides.run(wrong, b, "cpp", shares()[rank], **group)
        )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, _, grads = sides.run(FORMS[2], False)

    def dtensors(**changed):
        placed = {"hidden": Replicate(), "teacher_hidden": Replicate()} | changed
        given = {**sides.student, **{f"teacher_{name}": value for name, value in sides.teacher.items()}}
        leaves = {
            name: distribute_tensor(value, mesh, [placed.get(name, Shard(0))]).detach().requires_grad_()
            for name, value in given.items()
        }
        options = {"loss_mask": MASK, "temperature": 0.7, "beta": 1.0, "backend": "cpp"}
        return leaves, gk.fused_linear_distillation_loss(**leaves, **options)

    leaves, out = dtensors()
    out.loss.backward()
    torch.testing.assert_close(out.loss, whole, rtol=1e-10, atol=1e-12)
    for name, wanted in grads.items():
        torch.testing.assert_close(leaves[name].grad.full_tensor(), wanted, rtol=1e-9, atol=1e-12)
    for changed, message in (
        ({"teacher_weight": Replicate()}, "teacher_weight: expected a DTensor of weight's placement"),
        ({"teacher_hidden": Shard(0)}, "teacher_hidden: is a DTensor with placement"),
        ({"hidden": Shard(1)}, "hidden: is sharded over tokens, expected"),
    ):
        assert_all_raise(message, None, lambda c=changed: dtensors(**c))
