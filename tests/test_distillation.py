"""Distillation losses against their definitions in fp64, and what must hold of them."""

import itertools
import math

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.types import stats_dtype
from tests import oracle
from tests.accuracy import Spread, assert_as_exact, differences
from tests.cases import AGGREGATIONS, LAYOUTS, device_of, generator, offsets

BETAS = (0.0, 0.3, 1.0)
OPTIONS = {
    "plain": {},
    "transformed": {
        "logit_scale": -0.6,
        "softcap": 4.0,
        "temperature": torch.tensor([0.7, 1.2]),
        "teacher_logit_scale": 1.4,
        "teacher_softcap": 5.0,
        "teacher_temperature": torch.tensor([1.3, 0.9]),
    },
}
OVER_IDS = [
    {"beta": beta, "top_k": 7, "top_k_of": side, "add_tail": tail}
    for beta, side, tail in itertools.product(BETAS, ("teacher", "student"), (True, False))
]
DRAWS = 4
COUNTED = torch.tensor([[1, 1, 0], [0, 1, 1]], dtype=torch.bool)


def transformed(x, options, prefix=""):
    z = x * options.get(f"{prefix}logit_scale", 1.0)
    if f"{prefix}softcap" in options:
        cap = options[f"{prefix}softcap"]
        z = cap * torch.tanh(z / cap)
    heat = options.get(f"{prefix}temperature", torch.ones(2))
    return z / heat.to(x.dtype).view(2, 1, 1)


class Problem:
    """Two sequences of three tokens, two of which count in each; ``draw`` gives other inputs of the size."""

    def __init__(self, *, dtype=torch.float32, linear=False, options="plain", draw=0, V=613, near=False):
        rng = generator(300 + draw)

        def normal(*shape, size=1.0):
            return (size * torch.randn(*shape, generator=rng, dtype=torch.float64)).to(dtype)

        self.linear, self.options, self.vocabulary = linear, OPTIONS[options], V
        if linear:
            self.inputs = {"hidden": normal(2, 3, 24), "weight": normal(V, 24, size=0.4), "bias": normal(V)}
            self.teacher = {
                "teacher_hidden": normal(2, 3, 40),
                "teacher_weight": normal(V, 40, size=0.3),
                "teacher_bias": normal(V),
            }
        else:
            self.inputs = {"logits": normal(2, 3, V, size=2.0)}
            theirs = self.inputs["logits"] + normal(2, 3, V, size=0.03) if near else normal(2, 3, V, size=2.0)
            self.teacher = {"teacher_logits": theirs}
        self.weights = torch.randn(2, 3, generator=generator(1)).abs()

    def formulas(self, dtype, beta=0.5, top_k=0, top_k_of="teacher", add_tail=True):
        """What a user would write in PyTorch, and its gradients."""
        leaves = {name: value.to(dtype, copy=True).requires_grad_() for name, value in self.inputs.items()}
        theirs = {name: value.to(dtype) for name, value in self.teacher.items()}
        if self.linear:
            x = leaves["hidden"] @ leaves["weight"].T + leaves["bias"]
            xt = theirs["teacher_hidden"] @ theirs["teacher_weight"].T + theirs["teacher_bias"]
        else:
            x, xt = leaves["logits"], theirs["teacher_logits"]
        z, zt = transformed(x, self.options), transformed(xt, self.options, "teacher_")
        if not top_k:
            found = oracle.divergence(z.log_softmax(-1), zt.log_softmax(-1), beta)
        else:
            ids = (z if top_k_of == "student" else zt).topk(top_k).indices
            found = oracle.divergence_over_ids(z, zt, ids, beta, add_tail)
        found = torch.where(COUNTED, found, 0.0)
        loss = (found * self.weights.to(dtype)).sum() / COUNTED.sum()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        named = {f"grad {name}": grad for name, grad in zip(leaves, grads, strict=True)}
        return {"loss": loss.detach(), "divergence": found.detach(), **named}

    def ours(self, backend, packed=False, call=None, **form):
        device = device_of(backend)
        leaves = {name: value.clone().to(device).requires_grad_() for name, value in self.inputs.items()}
        theirs = {name: value.to(device) for name, value in self.teacher.items()}
        by_token = {"loss_mask": COUNTED.to(device), "token_weights": self.weights.to(device)}
        given = {**leaves, **theirs, **by_token}
        if packed:
            flat = ("hidden", "teacher_hidden", "logits", "teacher_logits", "loss_mask", "token_weights")
            given = {name: value.flatten(0, 1) if name in flat else value for name, value in given.items()}
            given["cu_seqlens"] = offsets((3, 3)).to(device)
        function = gk.fused_linear_distillation_loss if self.linear else gk.distillation_loss
        options = {
            name: value.to(device) if torch.is_tensor(value) else value
            for name, value in self.options.items()
        }
        out = function(**given, **form, **options, backend=backend, **(call or {}))
        out.loss.backward()
        named = {f"grad {name}": leaf.grad for name, leaf in leaves.items()}
        named |= {"loss": out.loss, "divergence": out.divergence.view(2, 3)}
        return {name: value.detach().cpu() for name, value in named.items()}


def check(backend, *, dtype=torch.float32, packed=False, call=None, forms=None, first=0, **kind):
    """As exact as plain PyTorch in the statistics' dtype, over a few draws from the ``first`` on."""
    for form in [{"beta": beta} for beta in BETAS] if forms is None else forms:
        errors, ours, exacts = {}, {}, {}
        in_double = dtype == torch.float64
        scale = 2 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps if in_double else 1.0
        for draw in range(first, first + (2 if backend == "triton" else DRAWS)):
            problem = Problem(dtype=dtype, draw=draw, **kind)
            exact = problem.formulas(torch.float64, **form)
            plain = problem.formulas(torch.float32 if in_double else stats_dtype(dtype), **form)
            for name, got in problem.ours(backend, packed, call, **form).items():
                errors.setdefault(name, []).append(scale * (plain[name].double() - exact[name]))
                ours.setdefault(name, []).append(got)
                exacts.setdefault(name, []).append(exact[name])
        for name, results in ours.items():
            by_row = name in ("grad logits", "grad hidden", "grad weight")
            spread = Spread.of(errors[name], by_row=by_row)
            eps = torch.finfo(results[0].dtype).eps
            found = differences(results, exacts[name])
            assert_as_exact(f"{form} {name}", found, spread, exacts[name], eps)


@pytest.mark.parametrize("options", OPTIONS)
def test_from_logits(options, backend):
    check(backend, options=options)
    check(backend, options=options, V=640, packed=True)


def test_a_student_near_its_teacher(backend):
    """Where the divergence is a thousandth of what its terms are, and below."""
    check(backend, near=True)


@pytest.mark.parametrize("options", OPTIONS)
def test_from_hidden_states(options, backend):
    # both sides' logits of two tokens at once
    check(backend, linear=True, options=options, call={"max_chunk_bytes": 4 * 613 * 4})


def test_over_ids(backend):
    # the interpreter takes its time
    check(backend, forms=OVER_IDS[::5] if backend == "triton" else OVER_IDS, options="transformed")
    check(backend, forms=OVER_IDS[::5], linear=True, call={"max_chunk_bytes": 4 * 613 * 4})


@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype, linear, backend):
    check(backend, dtype=dtype, linear=linear, packed=True, forms=[{"beta": 0.3}, OVER_IDS[-2]])


def test_two_dtypes(backend):
    """A teacher in another dtype than the student's, on both entries."""
    for linear, beta in itertools.product((False, True), BETAS):
        problem = Problem(linear=linear)
        problem.teacher = {name: value.bfloat16() for name, value in problem.teacher.items()}
        exact, ours = problem.formulas(torch.float64, beta), problem.ours(backend, beta=beta)
        plain = problem.formulas(torch.float32, beta)
        for name, got in ours.items():
            allowed = 4 * (plain[name] - exact[name]).norm() + 1e-6 * exact[name].norm()
            assert (got - exact[name]).norm() <= allowed, name
        problem.inputs = {name: value.bfloat16() for name, value in problem.inputs.items()}
        problem.teacher = {name: value.float() for name, value in problem.teacher.items()}
        exact, ours = problem.formulas(torch.float64, beta), problem.ours(backend, beta=beta)
        assert (ours["divergence"] - exact["divergence"]).abs().max() < 1e-5


@pytest.mark.parametrize("tail", [True, False], ids=["with the tail", "within"])
def test_ids_that_an_engine_has_scored(tail, backend):
    """As the teacher's own top k; ids that are missing, repeated, or all that there are."""
    device = device_of(backend)
    for linear, beta in itertools.product((False, True), BETAS):
        problem = Problem(linear=linear)
        shown = problem.ours(backend, beta=beta, top_k=7, add_tail=tail)
        theirs = list(problem.teacher.values())
        logits = theirs[0] if not linear else theirs[0] @ theirs[1].T + theirs[2]
        logprobs, ids = logits.log_softmax(-1).topk(7)
        ids, logprobs = (torch.cat([each, each[..., :1]], -1) for each in (ids, logprobs))
        ids = torch.cat([ids, torch.full((2, 3, 1), -100)], -1)
        logprobs = torch.cat([logprobs, torch.full((2, 3, 1), math.nan)], -1)
        problem.teacher = {"ids": ids.to(device), "teacher_logprobs": logprobs.to(device)}
        given = problem.ours(backend, beta=beta, add_tail=tail)
        for name, value in shown.items():
            torch.testing.assert_close(given[name], value, rtol=1e-4, atol=1e-6 * float(value.abs().max()))


def test_a_sure_engine_leaves_a_little(backend):
    """Where its log-prob rounds to 0, 2^-24 is left for all other ids."""
    logits, ids = torch.randn(1, 2, 5, generator=generator(6)), torch.tensor([[[1], [3]]])
    scored = torch.tensor([[[0.0], [-1e-9]]])
    for beta in BETAS:
        given = [each.to(device_of(backend)) for each in (logits, ids, scored)]
        out = gk.distillation_loss(
            given[0], ids=given[1], teacher_logprobs=given[2], beta=beta, backend=backend
        )
        exact = oracle.divergence_over_ids(logits.double(), scored.double(), ids, beta, True, scored=True)
        torch.testing.assert_close(out.divergence.cpu().double(), exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregations(aggregation, layout):
    """Those of the objectives: the loss is Linear's of the negative divergences as log-probs."""
    problem = Problem()
    given = {**problem.inputs, **problem.teacher}
    layout_terms = {"loss_mask": COUNTED, "lengths": torch.tensor([5.0, 3.0]), "normalizer": 1.7}
    weights = problem.weights
    if layout == "packed":
        given = {name: value.flatten(0, 1) for name, value in given.items()}
        layout_terms |= {"loss_mask": COUNTED.flatten(), "cu_seqlens": offsets((3, 3))}
        weights = weights.flatten()
    how = {"aggregation": aggregation, "aggregation_constant": 9 if aggregation == "constant" else None}
    out = gk.distillation_loss(**given, **layout_terms, **how, token_weights=weights)
    same = gk.policy_loss(
        out.divergence, None, None, **layout_terms, token_weights=weights, objective=gk.Linear(**how)
    )
    torch.testing.assert_close(out.loss, same.loss, rtol=1e-6, atol=0.0)


# --- what must hold


def test_tokens_that_do_not_count_are_inert(backend):
    for linear, form in itertools.product((False, True), ({"beta": 0.3}, {"beta": 1.0, "top_k": 3})):
        problem = Problem(linear=linear)
        clean = problem.ours(backend, **form)
        for name in ("logits", "hidden"):
            if name in problem.inputs:
                problem.inputs[name][~COUNTED] = math.nan
                problem.teacher[f"teacher_{name}"][~COUNTED] = math.nan
        dirty = problem.ours(backend, **form)
        assert all(torch.equal(clean[name], dirty[name]) for name in clean)


def test_equal_sides_have_no_divergence(backend):
    for form in [{"beta": beta} for beta in BETAS] + OVER_IDS[::5]:
        problem = Problem()
        problem.teacher = {"teacher_logits": problem.inputs["logits"].clone()}
        ours = problem.ours(backend, **form)
        assert ours["divergence"].abs().max() <= 1e-6, form
        assert ours["grad logits"].abs().max() <= 1e-7, form


# Rows of the student and of the teacher; for betas 0, 0.3 and 1 whether the value is finite, infinite or NaN,
# and whether the gradient is finite.
BANNED, INF, NAN = -math.inf, math.inf, math.nan
SPECIAL = {
    "both ban the same": ([1.0, BANNED, 0.5], [0.3, BANNED, 0.1], "fff", "fff"),
    "the student bans more": ([1.0, BANNED, 0.5], [0.3, 0.2, 0.1], "iff", "fff"),
    "the teacher bans more": ([1.0, 0.2, 0.5], [0.3, BANNED, 0.1], "ffi", "ffn"),
    "one is left, the same": ([BANNED, 1.0, BANNED], [BANNED, 0.0, BANNED], "fff", "fff"),
    "nothing in common": ([BANNED, 1.0, 0.0], [0.0, BANNED, BANNED], "ifi", "ffn"),
    "all banned": ([BANNED] * 3, [0.0, 0.1, 0.2], "nnn", "nnn"),
    "all banned by the teacher": ([0.0, 0.1, 0.2], [BANNED] * 3, "nnn", "nnn"),
    "+inf": ([INF, 0.0, 1.0], [0.0, 0.1, 0.2], "nnn", "nnn"),
    "NaN": ([0.0, 0.0, 1.0], [0.0, NAN, 0.2], "nnn", "nnn"),
    "masked by the lowest number": ([1.0, -3.4e38, 0.5], [0.3, -3.4e38, 0.1], "fff", "fff"),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_banned_tokens_infinities_and_nan(name, backend):
    student, teacher, values, gradients = SPECIAL[name]
    for top_k, (beta, value, gradient) in itertools.product(
        (0, 3), zip(BETAS, values, gradients, strict=True)
    ):
        logits = torch.tensor([[student, [0.1, 0.2, 0.3]]], device=device_of(backend)).requires_grad_()
        theirs = torch.tensor([[teacher, [0.3, 0.2, 0.1]]], device=logits.device)
        out = gk.distillation_loss(logits, theirs, beta=beta, top_k=top_k, backend=backend)
        out.loss.backward()
        got, grad = out.divergence[0, 0].cpu(), logits.grad[0, 0].cpu()
        assert {"f": got.isfinite(), "i": got == math.inf, "n": got.isnan()}[value], (beta, top_k, got)
        assert bool(grad.isfinite().all()) == (gradient == "f"), (beta, top_k, grad)
        assert logits.grad[0, 1].isfinite().all() and out.divergence[0, 1].isfinite()
        if gradient == "f":
            z, zt = (torch.tensor(row, dtype=torch.float64) for row in (student, teacher))
            p, q = z.softmax(-1), zt.softmax(-1)
            m = (1 - beta) * p + beta * q
            far = (p / (q if beta == 1 else m)).log().nan_to_num(0.0, 0.0, 0.0) * (p > 0)
            want = p - q if beta == 0 else (1.0 if beta == 1 else 1 - beta) * p * (far - (p * far).sum())
            assert (grad - want / 2).abs().max() < 1e-6, (beta, top_k)
            if value == "f":
                direct_value = oracle.divergence(z.log_softmax(-1), zt.log_softmax(-1), beta).nan_to_num(0.0)
                assert (got - direct_value).abs() < 1e-6


def test_the_backward_may_overwrite_the_logits(backend):
    for form in ({"beta": 0.0}, {"beta": 0.3}, {"beta": 1.0}, OVER_IDS[3]):
        problem = Problem()
        leaf = problem.inputs["logits"].clone().to(device_of(backend)).requires_grad_()
        theirs = problem.teacher["teacher_logits"].to(leaf.device)
        apart = gk.distillation_loss(leaf, theirs, **form, backend=backend)
        (grad,) = torch.autograd.grad(apart.loss, leaf)
        logits = leaf.clone()
        out = gk.distillation_loss(logits, theirs, **form, inplace_backward=True, backend=backend)
        out.loss.backward()
        assert torch.equal(leaf.grad, logits.detach())
        # here statistics are kept until the backward, there they are still what the row was folded to
        exact = problem.formulas(torch.float64, **form)["grad logits"]
        errors = [float((each.cpu() - exact).norm()) for each in (leaf.grad, grad)]
        assert max(errors) <= 2 * min(errors) + 1e-7 * float(exact.norm())
