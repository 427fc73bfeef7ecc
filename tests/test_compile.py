"""Compiled calls are whole graphs, and equal eager ones."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.objectives.base import Objective, ObjectiveLoss
from tests.cases import KIND, call, generator, make_case

pytestmark = pytest.mark.filterwarnings("error:Dynamo detected")  # users could not act on this warning
POLICY, ROWS, FUSED, LINEAR_ROWS, LINEAR = KIND


def assert_compiles(function, inputs, compiler="aot_eager", **tolerance):
    """Compare compiled and eager ``function``, which takes leaves and returns a loss and tensors by name."""
    torch._dynamo.reset()
    results = []
    for each in (function, torch.compile(function, fullgraph=True, backend=compiler)):
        leaves = {name: value.detach().clone().requires_grad_() for name, value in inputs.items()}
        loss, named = each(leaves)
        loss.backward()
        results.append(named | {"loss": loss} | {f"grad {name}": leaf.grad for name, leaf in leaves.items()})
    eager, compiled = results
    assert eager.keys() == compiled.keys()
    for name, value in eager.items():
        torch.testing.assert_close(compiled[name], value, **({"rtol": 0.0, "atol": 0.0} | tolerance))
        assert not name.startswith("grad") or (value != 0).any()


def check(case, entry, objective, backend="auto", compiler="aot_eager", **options):
    def step(leaves):
        output = call(case, leaves, entry, objective, backend, **options)
        assert isinstance(output, gk.LossOutput)
        return output.loss, {"logprobs": output.logprobs, **output.metrics}

    # on-policy from logits, an eager call takes the one-pass kernel, a compiled one two separate kernels
    exact = compiler != "inductor" and (entry != FUSED or case.old_logprobs is not None)
    assert_compiles(step, case.inputs, compiler, **({} if exact else {"rtol": 1e-6, "atol": 1e-7}))


CHUNKS = {"max_chunk_bytes": 6 * 61 * 4}
CALLS = [
    (POLICY, gk.GSPO(), "packed", "all", {}),
    (ROWS, gk.GSPOToken(), "padded", "all", {}),
    (FUSED, gk.GRPO(), "packed", "all", {}),
    (FUSED, gk.GSPO(), "padded", "on_policy", {}),
    (LINEAR_ROWS, gk.GSPO(), "padded", "all", {}),
    (LINEAR, gk.GSPOToken(), "packed", "all", {}),
    (LINEAR, gk.GRPO(), "packed", "weighted", {"schedule": "known"} | CHUNKS),
    (LINEAR, gk.GSPO(), "padded", "on_policy_terms", {"schedule": "known", "skip_inactive": "none"} | CHUNKS),
    (LINEAR, gk.GSPO(), "padded", "weighted", {"schedule": "auto", "skip_inactive": "none"} | CHUNKS),
    (LINEAR, gk.GSPO(), "padded", "all", {"schedule": "aligned"} | CHUNKS),
    (LINEAR, gk.GSPO(), "packed", "weighted", {"schedule": "deferred"} | CHUNKS),
    (LINEAR, gk.GSPO(), "packed", "weighted", {"schedule": "two_pass"} | CHUNKS),
]


@pytest.mark.parametrize(("entry", "objective", "layout", "terms", "options"), CALLS)
def test_compiled_equals_eager(entry, objective, layout, terms, options):
    check(make_case(KIND[entry], layout, terms), entry, objective, **options)


def test_compiled_on_every_backend(backend):
    if torch.cuda.is_available() and backend == "triton":
        pytest.skip("compiled on the device in tests/kernels")
    check(make_case("logits", "packed", "weighted", logit_options="kept"), FUSED, gk.GSPO(), backend)


def test_inductor():
    """Graphs consist of opaque operators, so there is little that inductor could change."""
    check(make_case("linear", "padded", "all"), LINEAR, gk.GSPO(), compiler="inductor")


def test_selected_ids_a_teacher_and_centering():
    ids, rng = torch.randint(0, 31, (2, 3, 3), generator=generator(0)), generator(1)
    inputs = {"hidden": torch.randn(2, 3, 8, generator=rng), "weight": torch.randn(31, 8, generator=rng)}
    teacher, options = torch.randn(2, 3, 31, generator=rng), {"softcap": 4.0, "temperature": torch.ones(2)}
    their_head = {"teacher_hidden": torch.randn(2, 3, 5), "teacher_weight": torch.randn(31, 5)}

    def selected(leaves):
        one = gk.selected_logprobs(leaves["hidden"] @ leaves["weight"].T, ids[..., :1])
        several = gk.linear_selected_logprobs(leaves["hidden"], leaves["weight"], ids)
        return several.logprobs.sum() + 0.5 * several.tail.sum() + one.logprobs.sum() + one.tail.sum(), {}

    def taught(leaves):
        logits = leaves["hidden"] @ leaves["weight"].T
        loss = gk.distillation_loss(logits, teacher, beta=0.3, teacher_softcap=5.0, **options).loss
        return loss + gk.distillation_loss(logits, teacher, beta=1.0, top_k=4).loss, {}

    def taught_by_a_head(leaves):
        whole = gk.fused_linear_distillation_loss(**leaves, **their_head, beta=0.3, **options)
        over = gk.fused_linear_distillation_loss(
            **leaves, **their_head, beta=1.0, top_k=4, aggregation="sequence_mean"
        )
        return whole.loss + over.loss, {"divergence": over.divergence}

    def centered(leaves):
        centering = gk.ScoreCentering(ids, torch.full(ids.shape, -2.0))
        given = {"labels": ids[..., 0], "old_logprobs": None, "objective": gk.GPG(), "centering": centering}
        given["advantages"] = torch.tensor([1.0, -0.5])
        known = gk.fused_linear_policy_loss(**leaves, **given).loss
        again = gk.fused_linear_policy_loss(**leaves, **given, schedule="two_pass").loss
        of_logits = gk.fused_policy_loss(leaves["hidden"] @ leaves["weight"].T, **given)
        return known + again + of_logits.loss, {"logprobs": of_logits.logprobs}

    for function in (selected, taught, taught_by_a_head, centered):
        assert_compiles(function, inputs, rtol=1e-6, atol=1e-8)


@dataclass(frozen=True)
class Squared(Objective):
    """An objective in ten lines: (log r - target)^2 / 2."""

    target: float = 0.1

    coefficient_scope = "token"
    needs_advantages = False
    zero_advantage_is_inactive = False

    def evaluate(self, batch):
        return ObjectiveLoss(0.5 * (batch.log_ratio - self.target) ** 2, batch.log_ratio)


def test_an_objective_of_ones_own_and_one_whose_options_change_what_it_declares():
    case = make_case("linear", "packed", "holes")
    check(replace(case, advantages=None), LINEAR, Squared())
    check(case, LINEAR, gk.TOPR(ratio_level="token"))


@pytest.mark.parametrize("entry", [POLICY, FUSED, LINEAR])
def test_one_graph_serves_any_number_of_sequences_and_tokens(entry):
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


def test_objectives_made_in_compiled_code_keep_their_options():
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


def test_compiled_calls_follow_the_switch_of_batch_invariance():
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
