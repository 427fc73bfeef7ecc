"""Every operator keeps PyTorch's rules, with the operands that public calls give it."""

from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.ops.library import Operator, can_bypass_dispatcher, flat
from gspo_kernels.ops.value_checks import mask_of_shard
from gspo_kernels.policy_step import policy_step
from gspo_kernels.terms import Terms
from gspo_kernels.types import NO_RATIO, Shard
from tests.cases import KIND, forward, generator, make_case

FUSED, LINEAR = "fused_policy_loss", "fused_linear_policy_loss"
BRIEF = {"lengths": (2, 1), "vocabulary": 7, "width": 4, "advantages": (1.0, -1.0), "log_s": (0.1, 0.0)}


def losses():
    """Run losses from log-probs, logits and hidden states, several where an operator has branches."""

    def loss(
        entry, objective, terms, backend="cpp", layout="padded", frozen=(), dtype=torch.float32, **options
    ):
        case = make_case(KIND[entry], layout, terms, dtype=dtype, **BRIEF)
        # not poisoned: opcheck takes NaN in results for a difference
        _, out = forward(replace(case, frozen=frozen), entry, objective, backend, **options)
        out.loss.backward()

    for layout, dtype in (("padded", torch.float32), ("packed", torch.float64), ("packed", torch.bfloat16)):
        loss("policy_loss", gk.GSPO(), "holes+lengths+k3", layout=layout, dtype=dtype)
    loss("policy_loss", gk.GRPO(), "all")
    for backend in ("cpp", "triton", "reference"):
        loss(FUSED, gk.GSPO(), "plain", backend)
        loss(FUSED, gk.GSPO(), "weighted", backend, layout="packed")
        loss(FUSED, gk.GRPO(), "on_policy", backend)
    loss("token_logprobs", gk.GRPO(), "entropy", "reference", layout="packed")
    in_memory = torch.randn(2, 3, 7, generator=generator(0)).requires_grad_() * 1.0
    labels = torch.tensor([[0, 6, -100], [3, 2, 1]])
    gk.token_logprobs(in_memory, labels, inplace_backward=True).logprobs.sum().backward()
    loss("linear_token_logprobs", gk.GRPO(), "entropy", max_chunk_bytes=56)
    loss("linear_token_logprobs", gk.GRPO(), "plain", frozen=("weight", "bias"))
    for schedule, objective, terms in (
        ("known", gk.GRPO(), "all"), ("deferred", gk.GSPO(), "weighted"), ("aligned", gk.GSPO(), "all"),
        ("auto", gk.GSPO(), "holes"), ("two_pass", gk.GSPO(), "kl_tensor"),
    ):  # fmt: skip
        loss(LINEAR, objective, terms, schedule=schedule, max_chunk_bytes=56)
    loss(LINEAR, gk.GSPO(), "holes", schedule="frozen", frozen=("weight", "bias"), return_entropy=True)
    weight, A, B = (torch.randn(*shape, generator=generator(1)) for shape in ((7, 4), (2, 4), (7, 2)))
    lora = gk.LoRAHead(weight, A.requires_grad_(), B.requires_grad_(), 0.5)
    for schedule in ("auto", "two_pass"):
        gk.fused_linear_policy_loss(
            torch.randn(2, 3, 4), lora, labels, None, torch.ones(2), schedule=schedule
        ).loss.backward()


def selected_ids():
    shapes = (2, 3, 7), (2, 3, 4), (7, 4)
    logits, hidden, weight = (torch.randn(*shape, generator=generator(0)) for shape in shapes)
    ids = torch.tensor([[[0, 6, 2]] * 3, [[3, -100, -100]] * 3])
    masked = {"kept_mask": gk.kept_mask(ids, 7), "temperature": torch.tensor([0.5, 2.0])}
    for K, options in ((1, {}), (3, masked),
                       (3, {"normalize_within": True}), (2, {"inplace_backward": True})):  # fmt: skip
        out = gk.selected_logprobs(logits.clone().requires_grad_() * 1.0, ids[..., :K], **options)
        (out.logprobs.sum() + (0 if out.tail is None else out.tail.sum())).backward()
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_(K == 1)
        options.pop("inplace_backward", None)
        gk.linear_selected_logprobs(*leaves, ids[..., :K], **options).logprobs.sum().backward()


def centered():
    shapes = (2, 3, 7), (2, 3, 4), (7, 4)
    logits, hidden, weight = (torch.randn(*x, generator=generator(2)).requires_grad_() for x in shapes)
    ids, labels = torch.tensor([[[0, 6, 2]] * 3, [[3, -1, -1]] * 3]), torch.tensor([[0, 6, -100], [3, 2, 1]])
    given = {"old_logprobs": -torch.ones(2, 3), "advantages": torch.ones(2), "objective": gk.PrimeIPO()}
    given["centering"] = gk.ScoreCentering(ids, torch.full(ids.shape, -2.0))
    gk.fused_linear_policy_loss(hidden, weight, labels, **given, max_chunk_bytes=56).loss.backward()
    selected = gk.selected_logprobs(logits, ids.masked_fill(ids < 0, -100))
    gk.policy_loss(-torch.ones(2, 3), **given, selected_logprobs=selected).loss.backward()


def teachers():
    def normal(*shape):
        return torch.randn(*shape, generator=generator(len(shape) + shape[-1])).requires_grad_()

    ids = torch.tensor([[[0, 6, 2]] * 3, [[3, -100, -100]] * 3])
    scores = torch.full(ids.shape, -1.5)
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    gk.distillation_loss(normal(2, 3, 7), normal(2, 3, 7).detach(), beta=0.3, loss_mask=mask).loss.backward()
    for logits, inplace in ((normal(2, 3, 7) * 1.0, True), (normal(2, 3, 7).half(), False)):
        teacher = normal(2, 3, 7).detach().to(logits.dtype)
        gk.distillation_loss(logits, teacher, inplace_backward=inplace).loss.backward()
    with torch.no_grad():
        gk.distillation_loss(normal(2, 3, 7), ids=ids, teacher_logprobs=scores, beta=1.0)
    heads = normal(2, 3, 8).detach(), normal(7, 8).detach()
    gk.fused_linear_distillation_loss(normal(2, 3, 4), normal(7, 4), *heads, beta=0.5).loss.backward()
    gk.fused_linear_distillation_loss(
        normal(2, 3, 4), normal(7, 4).detach(), ids=ids, teacher_logprobs=scores
    ).loss.backward()


@pytest.fixture(scope="module")
def operands():
    """Return each operator's operands by its name, from its first call with each form of operands."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        called = Operator.__call__

        def recorded(self, *args):
            leaves = [
                each.detach().clone() if isinstance(each, torch.Tensor) else each for each in flat(args)
            ]
            form = tuple(getattr(each, "dtype", each) for each in leaves)
            found.setdefault(self.name, {}).setdefault(form, leaves)
            return called(self, *args)

        patch.setattr(Operator, "__call__", recorded)
        losses()
        selected_ids()
        centered()
        teachers()
        gk.rollout_weights(-torch.ones(2, 3), -torch.ones(2, 3), high=2.0)
        mask_of_shard(gk.kept_mask(torch.tensor([[[0, 6, 2]]]), 7), Shard("a group", 2), 3)
    return {name: list(forms.values()) for name, forms in found.items()}


def registered():
    for name in gk.__all__:  # imports the modules that register operators
        getattr(gk, name)
    names = torch._C._dispatch_get_all_op_names()
    return sorted({name.split("::")[1].split(".")[0] for name in names if name.startswith("gspo_kernels::")})


def test_every_operator_is_reached(operands):
    assert registered() == sorted(operands)


@pytest.mark.parametrize("name", registered())
def test_opcheck(name, operands):
    for each in operands[name]:
        torch.library.opcheck(getattr(torch.ops.gspo_kernels, name).default, tuple(each))


def test_tensor_subclasses_are_noticed_inside_structs():
    class Subclass(torch.Tensor):
        pass

    def bypasses(old_logprobs):
        terms = Terms(old_logprobs=old_logprobs)
        return can_bypass_dispatcher(policy_step.tensors(plain, None, terms, "cpp", NO_RATIO, True))

    plain = torch.zeros(2, 3)
    assert bypasses(plain) and not bypasses(plain.as_subclass(Subclass))
