"""Every operator keeps PyTorch's rules, with the operands that public calls give it."""

from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.arguments.terms import Terms
from gspo_kernels.arguments.values import mask_of_shard
from gspo_kernels.core.operators import Operator, can_bypass_dispatcher, flat
from gspo_kernels.core.types import NO_RATIO, Shard
from gspo_kernels.logits.policy_step import policy_step
from tests.cases import forward, make_case
from tests.every_call import CALLS, INPLACE, centered, prepare

BRIEF = {"lengths": (2, 1), "vocabulary": 7, "width": 4, "advantages": (1.0, -1.0), "log_s": (0.1, 0.0)}


def calls():
    """Call all that has an operator, with several forms of operands where an operator has branches."""
    for build in (*CALLS.values(), *INPLACE.values(), centered):
        _, leaves, found = prepare(build)
        torch.autograd.grad([value.sum() for value in found], leaves)
    for backend in ("cpp", "triton", "reference"):
        for objective, terms in ((gk.GSPO(), "weighted"), (gk.GRPO(), "on_policy")):
            # not poisoned: opcheck takes NaN in results for a difference
            case = make_case("logits", "padded", terms, **BRIEF)
            forward(case, "fused_policy_loss", objective, backend)[1].loss.backward()
    case = make_case("logprobs", "packed", "holes+lengths+k3", dtype=torch.bfloat16, **BRIEF)
    forward(case, "policy_loss", gk.GSPO())[1].loss.backward()
    frozen = replace(make_case("linear", "padded", "plain", **BRIEF), frozen=("weight", "bias"))
    forward(frozen, "linear_token_logprobs", gk.GRPO())[1].loss.backward()
    with torch.no_grad():
        forward(make_case("linear", "padded", "plain", **BRIEF), "linear_token_logprobs", gk.GRPO())
    logits, teacher = torch.randn(2, 3, 7).requires_grad_() * 1.0, torch.randn(2, 3, 7)
    gk.distillation_loss(logits, teacher, inplace_backward=True).loss.backward()
    half = torch.randn(2, 3, 7).half().requires_grad_()
    gk.distillation_loss(half, teacher.half()).loss.backward()
    gk.rollout_weights(-torch.ones(2, 3), -torch.ones(2, 3), high=2.0)
    gk.advantages.leave_one_out(torch.arange(4.0), group_size=2)
    mask_of_shard(gk.kept_mask(torch.tensor([[[0, 6, 2]]]), 7), Shard("a group", 2), 3)


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
            form = tuple(getattr(each, "dtype", type(each)) for each in leaves)
            found.setdefault(self.name, {}).setdefault(form, leaves)
            return called(self, *args)

        patch.setattr(Operator, "__call__", recorded)
        calls()
    return {name: list(forms.values()) for name, forms in found.items()}


def registered():
    for name in gk.__all__:  # imports the modules that register operators
        getattr(gk, name)
    names = torch._C._dispatch_get_all_op_names()
    return sorted({name.split("::")[1].split(".")[0] for name in names if name.startswith("gspo_kernels::")})


@pytest.mark.parametrize("name", registered())
def test_opcheck(name, operands):
    """The first form of operands is also traced by AOTAutograd, which takes most of the time."""
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    for i, each in enumerate(operands[name]):
        checks = {} if i == 0 else {"test_utils": quick}
        torch.library.opcheck(getattr(torch.ops.gspo_kernels, name).default, tuple(each), **checks)


def test_tensor_subclasses_are_noticed_inside_structs():
    class Subclass(torch.Tensor):
        pass

    def bypasses(old_logprobs):
        operands = (plain, None, Terms(old_logprobs=old_logprobs), "cpp", NO_RATIO, True)
        return can_bypass_dispatcher(policy_step.arguments.collect_tensors(operands, []))

    plain = torch.zeros(2, 3)
    assert bypasses(plain) and not bypasses(plain.as_subclass(Subclass))
