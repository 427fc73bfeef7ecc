"""Distillation on several ranks: both sides are cut in the same places."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import gspo_kernels as gk
from gspo_kernels.linear.chunks import SIZES_BYTES
from gspo_kernels.parallel.agreement import RanksDisagreeError
from tests.cases import over_ranks
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
    """A student and a teacher of two sequences, in fp64, where another order of sums hardly shows."""

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
        self.ids = torch.randint(0, VOCABULARY, (2, 3, 4), generator=rng)
        self.logprobs = normal(2, 3, 4).abs().neg() - 2

    def run(self, form, backend="cpp", columns=None, **group):
        """Loss, divergences, and the gradients of what this rank has."""
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
        options = {"loss_mask": MASK, "temperature": 0.7, "backend": backend, **over_ranks(group)}
        if self.linear:
            options["max_chunk_bytes"] = 4096
        function = gk.fused_linear_distillation_loss if self.linear else gk.distillation_loss
        renamed = {f"teacher_{name}": value for name, value in theirs.items()}
        form = {("teacher_logprobs" if name == "logprobs" else name): value for name, value in form.items()}
        out = function(**leaves, **renamed, **form, **options)
        return (
            out.loss,
            out.divergence,
            dict(zip(leaves, torch.autograd.grad(out.loss, leaves.values()), strict=True)),
        )


@of_ranks(2)
def teachers():
    """One process's numbers, from shards of one column and of all others."""
    for linear in (False, True):
        sides = Sides(linear)
        for uneven, backend in ((True, "cpp"), (False, "reference")):
            columns = shares(uneven=uneven)[dist.get_rank()]
            group = {"tp_group": dist.group.WORLD} | ({"vocab_range": columns} if uneven else {})
            for form in FORMS if backend == "cpp" else FORMS[1::2]:
                whole, shown, grads = sides.run(form, backend)
                loss, ours, own = sides.run(form, backend, columns, **group)
                assert_same_bits(loss=loss, divergence=ours)
                for got, wanted in ((loss, whole), (ours, shown)):
                    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
                parts = every(own)
                for name, wanted in grads.items():
                    got = torch.cat([part[name] for part in parts], CUT[name]) if name in CUT else own[name]
                    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


@of_ranks(2)
def teachers_on_the_wire():
    """Whatever the vocabulary: two log-sum-exps and log-probs, the two sums, and dHidden."""
    sides, rank = Sides(True, torch.float32), dist.get_rank()
    counted, columns = int(MASK.sum()), shares()[rank]
    for form, bytes_of_row in ((FORMS[1], 12 + 12 + 16), (FORMS[3], 2 * 8 * 5 + 2 * 8 * (2 * 5 + 1))):
        with Wire() as wire:
            sides.run(form, "cpp", columns, tp_group=dist.group.WORLD)
        assert wire.sent["all_gather"] == SIZES_BYTES + counted * bytes_of_row
        assert wire.sent["all_reduce"] == counted * 8 * 4


@of_ranks(2)
def wrong_teachers():
    """What one rank refuses none goes on with; DTensors say their ranges themselves."""
    sides, rank, group = Sides(True), dist.get_rank(), {"tp_group": dist.group.WORLD}
    form = {"beta": 0.3 if rank else 0.4}
    assert_all_raise(
        "beta: differs", None, lambda: sides.run(form, "cpp", shares()[rank], **group),
        RanksDisagreeError,
    )  # fmt: skip
    wrong = {"beta": 1.5 if rank else 0.5}
    assert_all_raise("beta: got 1.5", 1, lambda: sides.run(wrong, "cpp", shares()[rank], **group))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, _, grads = sides.run(FORMS[2])

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
