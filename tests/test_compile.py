"""Compiled calls are whole graphs, and equal eager ones."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.objectives.base import Objective, ObjectiveLoss
from tests import every_call
from tests.cases import KIND, generator
from tests.every_call import CALLS, prepare

pytestmark = pytest.mark.filterwarnings("error:Dynamo detected")  # users could not act on this warning
POLICY, ROWS, FUSED, LINEAR_ROWS, LINEAR = KIND


def assert_compiles(build, backend="auto", compiler="aot_eager", constant=lambda value: value, **tolerance):
    """Compare what a call of ``tests.every_call`` returns, and its gradients, compiled and eager."""
    torch._dynamo.reset()
    function, leaves, _ = prepare(build, backend, constant)
    results = []
    for each in (function, torch.compile(function, fullgraph=True, backend=compiler)):
        found = each(*leaves)
        grads = torch.autograd.grad([value.sum() for value in found if value.requires_grad], leaves)
        results.append([value.detach() for value in found] + list(grads))
    torch.testing.assert_close(*results[::-1], **{"rtol": 0.0, "atol": 0.0, **tolerance})


# calls with the operators of others, with other terms or schedules
SIMILAR = (
    "policy_loss, entropy", "tokens", "coefficient", "head alone", "known coefficients", "deferred", "frozen"
)  # fmt: skip
COMPILED = [name for name in CALLS if not name.endswith(SIMILAR)]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_equals_eager(name):
    # an eager call may take the kernel of one pass, or plain products, where a compiled one does not
    other = name.startswith("fused_policy_loss") or name.endswith("small") or name == "distillation_loss"
    assert_compiles(CALLS[name], **({"rtol": 1e-13, "atol": 1e-15} if other else {}))


def test_compiled_on_every_backend(backend):
    if torch.cuda.is_available() and backend == "triton":
        pytest.skip("compiled on the device in tests/backends")
    assert_compiles(CALLS["fused_policy_loss"], backend)


def test_inductor():
    """Graphs consist of opaque operators, so there is little that inductor could change."""
    assert_compiles(CALLS["fused_linear_policy_loss, aligned"], compiler="inductor", rtol=1e-12, atol=1e-14)


def test_centering():
    assert_compiles(every_call.centered, rtol=1e-12, atol=1e-14)


@dataclass(frozen=True)
class Squared(Objective):
    """An objective in ten lines: (log r - target)^2 / 2."""

    target: float = 0.1

    coefficient_scope = "token"
    zero_advantage_is_inactive = False

    def evaluate(self, batch):
        return ObjectiveLoss(0.5 * (batch.log_ratio - self.target) ** 2, batch.log_ratio)


@pytest.mark.parametrize("objective", [Squared(), gk.TOPR(ratio_level="token")], ids=["own", "declaring"])
def test_objectives_that_declare_by_options(objective):
    assert_compiles(every_call.loss(LINEAR, objective, "holes"))


@pytest.mark.parametrize("entry", [POLICY, FUSED, LINEAR])
def test_one_graph_serves_any_batch_size(entry):
    graphs, weight = [], torch.randn(23, 4, generator=generator(1))

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def loss(leaf, labels, old, advantages):
        if entry == POLICY:
            return gk.policy_loss(-leaf[..., 0].abs(), old, advantages).loss
        if entry == FUSED:
            return gk.fused_policy_loss(leaf, labels, old, advantages).loss
        # chunks of four rows: a call that fits one may take plain products, but not while it is traced
        chunk = {"max_chunk_bytes": 4 * 23 * 4}
        return gk.fused_linear_policy_loss(leaf, weight, labels, old, advantages, **chunk).loss

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counting)
    for batch, length in ((2, 3), (5, 4), (3, 9), (7, 2)):
        rng = generator(batch)
        leaf = torch.randn(batch, length, 4 if entry == LINEAR else 23, generator=rng).requires_grad_()
        labels = torch.randint(0, 23, (batch, length), generator=rng)
        old, advantages = -torch.rand(batch, length, generator=rng), torch.randn(batch, generator=rng)
        (eager,), (got,) = (
            torch.autograd.grad(function(leaf, labels, old, advantages), leaf)
            for function in (loss, compiled)
        )
        assert torch.equal(got, eager)
    assert len(graphs) == 1


def test_objectives_made_in_compiled_code():
    """So do those whose options have become symbols. A stale or default value would raise no error."""
    logprobs = torch.tensor([[-1.0, -2.0]])

    def with_objective(objective):
        return gk.policy_loss(logprobs, logprobs - 0.3, torch.tensor([1.0]), objective=objective).loss

    def with_options(clip_high, aggregation):
        return with_objective(gk.GSPO(clip_high=clip_high, aggregation=aggregation))

    for function, calls in (
        (with_options, [(0.1, "sum"), (0.2, "sum"), (0.25, "sum"), (0.25, "sequence_mean")]),
        (with_objective, [(gk.GSPO(),), (gk.GSPO(clip_high=0.2),), (gk.GRPO(),), (gk.GRPO(clip_high=1),)]),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for arguments in calls:
            assert torch.equal(compiled(*arguments), function(*arguments))


def test_compiled_calls_in_batch_invariant_mode():
    """In either mode a compiled call has the eager one's bits, while another thread is in the other mode."""
    rng = generator(0)
    leaves = [torch.randn(*shape, 90, generator=rng).requires_grad_() for shape in ((3, 60), (70,))]
    labels, old = torch.randint(70, (3, 60), generator=rng), torch.randn(3, 60, generator=rng) - 5
    terms = labels, old, torch.tensor([1.0, -0.5, 2.0])

    def loss(*inputs):
        options = {"objective": gk.GRPO(clip_low=0.9, clip_high=0.9), "max_chunk_bytes": 50 * 70 * 4}
        return gk.fused_linear_policy_loss(*inputs, *terms, **options).loss * 0.3

    torch._dynamo.reset()
    compiled, found = torch.compile(loss, fullgraph=True, backend="aot_eager"), {}
    for mode in (False, True, False):
        with (
            gk.set_batch_invariant(mode),
            ThreadPoolExecutor(1) as other,
            other.submit(gk.set_batch_invariant, not mode).result(),
        ):
            found[mode], eager = (
                torch.autograd.grad(function(*leaves), leaves) for function in (compiled, loss)
            )
        assert all(map(torch.equal, found[mode], eager))
    assert not torch.equal(found[True][1], found[False][1])
