"""Compiled equals eager, and gradients equal finite differences."""

import pytest
import torch

import gspo_kernels as gk
from tests.cases import KIND, call, generator, make_case

ENTRIES = (
    "policy_loss",
    "token_logprobs",
    "fused_policy_loss",
    "linear_token_logprobs",
    "fused_linear_policy_loss",
)
SCHEDULES = {
    "known": (gk.GRPO(), "weighted"),
    "auto": (gk.GSPO(), "weighted"),
    "aligned": (gk.GSPO(), "all"),
    "deferred": (gk.GSPO(), "weighted"),
    "two_pass": (gk.GSPO(), "weighted"),
    "known on-policy": (gk.GSPO(), "on_policy_terms"),
}


def outcome(function, case):
    leaves = {name: value.detach().requires_grad_() for name, value in case.inputs.items()}
    output = function(leaves)
    output.loss.backward()
    return output, {name: leaf.grad for name, leaf in leaves.items()}


def assert_compiles(case, entry, objective, backend="auto", compiler="aot_eager", **options):
    def step(leaves):
        return call(case, leaves, entry, objective, backend, **options)

    torch._dynamo.reset()
    eager, eager_grads = outcome(step, case)
    compiled, grads = outcome(torch.compile(step, fullgraph=True, backend=compiler), case)
    assert isinstance(compiled, gk.LossOutput)
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if compiler == "inductor" else {"rtol": 0.0, "atol": 0.0}
    if case.terms == {} and case.old_logprobs is None and entry == "fused_policy_loss":
        # eager takes the one-pass kernel here, a compiled graph the two separate ones
        tolerance = {"rtol": 1e-6, "atol": 1e-7}
    torch.testing.assert_close(compiled.loss, eager.loss, **tolerance)
    torch.testing.assert_close(compiled.logprobs, eager.logprobs, **tolerance)
    assert compiled.metrics.keys() == eager.metrics.keys()
    for name, metric in eager.metrics.items():
        torch.testing.assert_close(compiled.metrics[name], metric, **tolerance)
    for name, grad in eager_grads.items():
        assert (grad != 0).any()
        torch.testing.assert_close(grads[name], grad, **tolerance)


@pytest.mark.parametrize(
    ("name", "layout"), [("GSPO", "packed"), ("GSPOToken", "padded"), ("GRPO", "packed")]
)
@pytest.mark.parametrize("entry", ENTRIES)
def test_compiled_equals_eager(entry, name, layout):
    case = make_case(KIND[entry], layout, "all")
    assert_compiles(case, entry, getattr(gk, name)())


@pytest.mark.parametrize("entry", ENTRIES)
def test_compiled_equals_eager_on_policy(entry):
    assert_compiles(make_case(KIND[entry], "padded", "on_policy"), entry, gk.GSPO())


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("skip_inactive", "layout"), [("backward", "packed"), ("none", "padded")])
def test_compiled_schedules(skip_inactive, name, layout):
    objective, terms = SCHEDULES[name]
    options = {"schedule": name.split()[0], "skip_inactive": skip_inactive, "max_chunk_bytes": 6 * 61 * 4}
    assert_compiles(make_case("linear", layout, terms), "fused_linear_policy_loss", objective, **options)


@pytest.mark.parametrize("entry", ["fused_policy_loss", "fused_linear_policy_loss"])
def test_compiled_on_every_backend(entry, backend):
    if torch.cuda.is_available() and backend == "triton":
        pytest.skip("compiled on the device in tests/kernels")
    assert_compiles(make_case(KIND[entry], "packed", "weighted"), entry, gk.GSPO(), backend)


@pytest.mark.parametrize("entry", ["fused_policy_loss", "linear_token_logprobs"])
def test_compiled_with_a_sampling_mask(entry):
    assert_compiles(make_case(KIND[entry], "packed", "weighted", logit_options="kept"), entry, gk.GSPO())


@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
def test_compiled_selected_ids(linear, K):
    def step(scores, weight):
        if linear:
            out = gk.linear_selected_logprobs(scores, weight, ids)
        else:
            out = gk.selected_logprobs(scores @ weight.T, ids)
        return (out.logprobs.sum() + 0.5 * out.tail.sum(),)

    ids = torch.randint(0, 31, (2, 3, K), generator=generator(0))
    leaves = [torch.randn(*shape, 8, generator=generator(1)) for shape in ((2, 3), (31,))]
    torch._dynamo.reset()
    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        own = [leaf.clone().requires_grad_() for leaf in leaves]
        (loss,) = function(*own)
        loss.backward()
        results.append([loss, *(leaf.grad for leaf in own)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("entry", ["policy_loss", "fused_policy_loss", "fused_linear_policy_loss"])
def test_inductor(entry):
    """Graphs consist of opaque operators, so there is little that inductor could change."""
    assert_compiles(make_case(KIND[entry], "padded", "all"), entry, gk.GSPO(), compiler="inductor")


@pytest.mark.parametrize("entry", ["policy_loss", "fused_policy_loss", "fused_linear_policy_loss"])
def test_dynamic_shapes(entry):
    """One graph serves any number of sequences and tokens."""
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def loss_of(leaf, weight, labels, old, advantages):
        if entry == "policy_loss":
            return gk.policy_loss(leaf, old, advantages).loss
        if entry == "fused_policy_loss":
            return gk.fused_policy_loss(leaf, labels, old, advantages).loss
        # chunks of four rows: a call that fits one may take plain products, but not while it is traced
        return gk.fused_linear_policy_loss(
            leaf, weight, labels, old, advantages, max_chunk_bytes=4 * 23 * 4
        ).loss

    torch._dynamo.reset()
    compiled = torch.compile(loss_of, fullgraph=True, dynamic=True, backend=counting)
    weight = torch.randn(23, 4, generator=generator(1))
    for batch, length in ((2, 3), (5, 4), (3, 9), (7, 2)):
        rng = generator(batch)
        shape = {
            "policy_loss": (batch, length),
            "fused_policy_loss": (batch, length, 23),
            "fused_linear_policy_loss": (batch, length, 4),
        }[entry]
        value = torch.randn(*shape, generator=rng)
        value = -value.abs() if entry == "policy_loss" else value
        labels = torch.randint(0, 23, (batch, length), generator=rng)
        old, advantages = -torch.rand(batch, length, generator=rng), torch.randn(batch, generator=rng)
        grads = []
        for function in (loss_of, compiled):
            leaf = value.clone().requires_grad_()
            function(leaf, weight, labels, old, advantages).backward()
            grads.append(leaf.grad)
        torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)
    assert len(graphs) == 1


def test_objectives_made_in_compiled_code_keep_their_options():
    """Also where an option has become a symbol: a stale or default value would be silent."""
    logprobs = torch.tensor([[-1.0, -2.0]])

    def loss_of(logprobs, clip_high, aggregation):
        objective = gk.GSPO(clip_high=clip_high, aggregation=aggregation)
        return gk.policy_loss(logprobs, logprobs - 0.3, torch.tensor([1.0]), objective=objective).loss

    def loss_with(logprobs, objective):
        return gk.policy_loss(logprobs, logprobs - 0.3, torch.tensor([1.0]), objective=objective).loss

    torch._dynamo.reset()
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    for clip_high in (0.1, 0.2, 0.25):
        for aggregation in ("sequence_mean", "sum"):
            assert torch.equal(
                compiled(logprobs, clip_high, aggregation), loss_of(logprobs, clip_high, aggregation)
            )
    compiled = torch.compile(loss_with, fullgraph=True, backend="aot_eager")
    for objective in (
        gk.GSPO(),
        gk.GSPO(clip_high=0.1),
        gk.GSPO(clip_high=0.2),
        gk.GRPO(),
        gk.GRPO(clip_high=1),
    ):
        assert torch.equal(compiled(logprobs, objective), loss_with(logprobs, objective))


# --- finite differences


def gradcheck(function, *inputs):
    assert torch.autograd.gradcheck(function, inputs, eps=1e-6, atol=1e-7, rtol=1e-5)


def small(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64).requires_grad_()


LABELS = torch.tensor([[0, 3, 2], [4, -100, 1]])


OLD = -torch.tensor([[1.0, 1.5, 2.0], [0.5, 1.0, 1.2]], dtype=torch.float64)
TERMS = {
    "ref_logprobs": OLD + 0.3, "kl_beta": 0.2, "rollout_weights": torch.tensor([0.7, 1.2]), "normalizer": 3.0,
    "token_weights": torch.tensor([[1.0, 0.5, 2.0], [1.0, 1.0, 0.7]]), "entropy_coef": 0.3,
}  # fmt: skip
WIDE = {"clip_low": 0.9, "clip_high": 1e6}  # gradients everywhere: the bounds themselves have none


@pytest.mark.parametrize("kl_ratio_weighted", [False, True])
@pytest.mark.parametrize("kl_estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", ["GSPO", "GRPO"])
def test_gradcheck_policy_loss(name, kl_estimator, kl_ratio_weighted):
    def function(logprobs, entropy):
        return gk.policy_loss(
            logprobs, OLD, torch.tensor([0.7, -1.1]), entropy=entropy, kl_estimator=kl_estimator,
            kl_ratio_weighted=kl_ratio_weighted, objective=getattr(gk, name)(**WIDE), **TERMS,
        ).loss  # fmt: skip

    logprobs = -small(2, 3).detach().abs()
    gradcheck(function, logprobs.requires_grad_(), small(2, 3, seed=1))


def test_compiled_calls_follow_the_switch_of_batch_invariance():
    """A graph belongs to the mode that it was traced in, and has its bits."""
    rng = generator(0)
    hidden, weight = torch.randn(3, 60, 90, generator=rng), torch.randn(70, 90, generator=rng)
    labels, old = torch.randint(70, (3, 60), generator=rng), torch.randn(3, 60, generator=rng) - 5
    advantages = torch.tensor([1.0, -0.5, 2.0])

    def loss(hidden, weight):
        out = gk.fused_linear_policy_loss(
            hidden, weight, labels, old, advantages, objective=gk.GRPO(0.9, 0.9), max_chunk_bytes=50 * 70 * 4
        )
        return out.loss * 0.3

    def gradients(function):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        return torch.autograd.grad(function(*leaves), leaves)

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = {}
    for mode in (False, True, False):
        with gk.set_batch_invariant(mode):
            traced, eager = gradients(compiled), gradients(loss)
        assert all(torch.equal(got, expected) for got, expected in zip(traced, eager, strict=True))
        found[mode] = traced
    assert not torch.equal(found[True][1], found[False][1])
