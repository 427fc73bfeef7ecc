"""Distillation losses against their definitions in fp64, and properties that must hold."""

import functools
import itertools
import math

import pytest
import torch

import gspo_kernels as gk
from tests import oracle
from tests.accuracy import assert_draws_as_exact
from tests.cases import AGGREGATIONS, device_of, generator, offsets, scores_of

BETAS = (0.0, 0.3, 1.0)
OPTIONS = {
    "plain": {},
    "transformed": {
        "logit_scale": -0.6, "softcap": 4.0, "temperature": torch.tensor([0.7, 1.2]),
        "teacher_logit_scale": 0.8, "teacher_softcap": 5.0, "teacher_temperature": torch.tensor([1.3, 0.9]),
    },
}  # fmt: skip
OVER_IDS = [
    {"beta": beta, "top_k": 7, "top_k_of": side, "add_tail": tail}
    for beta, side, tail in itertools.product(BETAS, ("teacher", "student"), (True, False))
]
COUNTED = torch.tensor([[1, 1, 0], [0, 1, 1]], dtype=torch.bool)


def transformed(x, options):
    return torch.stack([oracle.transformed(row, i, **options) for i, row in enumerate(x)])


class Problem:
    """Two sequences of three tokens, two of which count; ``draw`` selects other inputs of the same size."""

    def __init__(
        self, *, dtype=torch.float32, teacher_dtype=None, linear=False, options="plain", draw=0, V=613,
        near=False, scored=False,
    ):  # fmt: skip
        rng = generator(300 + draw)

        def normal(*shape, size=1.0):
            return size * torch.randn(*shape, generator=rng, dtype=torch.float64)

        self.linear, self.options = linear, OPTIONS[options]
        if linear:
            own = {"hidden": normal(2, 3, 24), "weight": normal(V, 24, size=0.4), "bias": normal(V)}
            theirs = {"hidden": normal(2, 3, 40), "weight": normal(V, 40, size=0.3), "bias": normal(V)}
        else:
            own, theirs = {"logits": normal(2, 3, V, size=2.0)}, {"logits": normal(2, 3, V, size=2.0)}
            if near:
                theirs = {"logits": own["logits"] + normal(2, 3, V, size=0.03)}
        self.inputs = {name: value.to(dtype) for name, value in own.items()}
        self.teacher = {f"teacher_{name}": value.to(teacher_dtype or dtype) for name, value in theirs.items()}
        if scored:  # log-probs of the teacher's first ids, and then missing and repeated ids
            logprobs, ids = scores_of(theirs).log_softmax(-1).float().topk(7)
            ids = torch.cat([ids, ids[..., :1], torch.tensor([-100, -1]).expand(2, 3, 2)], -1)
            logprobs = torch.cat([logprobs, logprobs[..., :1], torch.full((2, 3, 2), math.nan)], -1)
            self.teacher = {"ids": ids, "teacher_logprobs": logprobs}
        self.weights = torch.randn(2, 3, generator=generator(1)).abs()

    def formulas(self, dtype, beta=0.5, top_k=0, top_k_of="teacher", add_tail=True):
        """Return loss, divergences and gradients by what a user would write in PyTorch."""
        leaves = {name: value.to(dtype, copy=True).requires_grad_() for name, value in self.inputs.items()}
        theirs = {name.removeprefix("teacher_"): value.to(dtype) for name, value in self.teacher.items()}
        sides = ({}, {})
        for name, value in self.options.items():
            sides[name.startswith("teacher_")][name.removeprefix("teacher_")] = value
        z, scored = transformed(scores_of(leaves), sides[0]), "ids" in theirs
        if scored:
            zt, ids = theirs["logprobs"], self.teacher["ids"]
        else:
            zt = transformed(scores_of(theirs), sides[1])
            ids = (z if top_k_of == "student" else zt).topk(top_k).indices
        if scored or top_k:
            found = oracle.divergence_over_ids(z, zt, ids, beta, add_tail, scored)
        else:
            found = oracle.divergence(z.log_softmax(-1), zt.log_softmax(-1), beta)
        found = torch.where(COUNTED, found, 0.0)
        loss = (found * self.weights.to(dtype)).sum() / COUNTED.sum()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        named = {f"grad {name}": grad for name, grad in zip(leaves, grads, strict=True)}
        return {"loss": loss.detach(), "divergence": found.detach(), **named}

    def ours(self, backend, packed=False, call=None, **form):
        """Return the package's results, from inputs that are NaN where they don't count."""
        device = device_of(backend)
        by_row = ("hidden", "logits", "teacher_hidden", "teacher_logits", "teacher_logprobs")

        def moved(values):
            poisoned = {
                name: torch.where(COUNTED.unsqueeze(-1), value, math.nan) if name in by_row else value.clone()
                for name, value in values.items()
            }
            return {name: value.to(device) for name, value in poisoned.items()}

        theirs, leaves = moved(self.teacher), moved(self.inputs)
        leaves = {name: value.requires_grad_() for name, value in leaves.items()}
        by_token = {"loss_mask": COUNTED.to(device), "token_weights": self.weights.to(device)}
        given = {**leaves, **theirs, **by_token}
        if packed:
            flat = (*by_row, "ids", "loss_mask", "token_weights")
            given = {name: value.flatten(0, 1) if name in flat else value for name, value in given.items()}
            given["cu_seqlens"] = offsets((3, 3)).to(device)
        function = gk.fused_linear_distillation_loss if self.linear else gk.distillation_loss
        options = {k: v.to(device) if torch.is_tensor(v) else v for k, v in self.options.items()}
        out = function(**given, **form, **options, backend=backend, **(call or {}))
        out.loss.backward()
        named = {f"grad {name}": leaf.grad for name, leaf in leaves.items()}
        named |= {"loss": out.loss, "divergence": out.divergence.view(2, 3)}
        return {name: value.detach().cpu() for name, value in named.items()}


def check(backend, *, dtype=torch.float32, packed=False, call=None, forms=None, **kind):
    """Check that results are as exact as plain PyTorch's in the dtype of statistics, over a few draws."""
    for form in [{"beta": beta} for beta in BETAS] if forms is None else forms:
        # in one of about twenty draws a row is rounded ten times as much as usual
        draws = range(8 if "top_k" in form else 32)
        problems = [Problem(dtype=dtype, draw=i, **kind) for i in draws]
        pairs = [
            (
                functools.partial(problem.formulas, **form),
                functools.partial(problem.ours, backend, packed, call, **form),
            )
            for problem in problems
        ]
        assert_draws_as_exact(pairs, dtype, compared=2 if backend == "triton" else 4)


CHUNKS = {"max_chunk_bytes": 4 * 613 * 4}  # both sides' logits of two tokens at once
SCORED = [{"beta": beta, "add_tail": tail} for tail in (True, False) for beta in BETAS]
LOW = [{"beta": 0.3}, OVER_IDS[-2]]
CASES = {
    "logits": {},
    "logits transformed, packed": {"options": "transformed", "V": 640, "packed": True},
    # the divergence is a thousandth of its terms or less
    "a student near its teacher": {"near": True},
    "hidden": {"linear": True, "call": CHUNKS},
    "hidden transformed": {"linear": True, "call": CHUNKS, "options": "transformed"},
    "ids": {"forms": OVER_IDS, "options": "transformed"},
    "ids of hidden": {"forms": OVER_IDS[::5], "linear": True, "call": CHUNKS},
    "log-probs of ids": {"forms": SCORED, "scored": True, "packed": True},
    "log-probs of ids, hidden": {"forms": SCORED[::3], "scored": True, "linear": True, "call": CHUNKS},
    "fp16 logits": {"dtype": torch.float16, "forms": LOW, "packed": True},
    "fp16 hidden": {"dtype": torch.float16, "forms": LOW, "packed": True, "linear": True},
    "bf16 hidden": {"dtype": torch.bfloat16, "forms": LOW, "packed": True, "linear": True},
    "fp64 hidden": {"dtype": torch.float64, "forms": LOW, "packed": True, "linear": True},
    **{
        f"a bf16 {side} of {kind}": {"linear": kind == "hidden", "forms": LOW[:1], **dtypes}
        for kind in ("logits", "hidden")
        for side, dtypes in (
            ("teacher", {"teacher_dtype": torch.bfloat16}),
            ("student", {"dtype": torch.bfloat16, "teacher_dtype": torch.float32}),
        )
    },
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_formulas(name, backend):
    case = dict(CASES[name])
    if name == "ids" and backend == "triton":
        case["forms"] = OVER_IDS[::5]  # the interpreter is slow
    check(backend, **case)


def test_rounded_teacher_log_probs_leave_a_tail(backend):
    """If an id's log-prob rounds to 0, a probability of 2^-24 is left for all other ids."""
    logits, ids = torch.randn(1, 2, 5, generator=generator(6)), torch.tensor([[[1], [3]]])
    scored = torch.tensor([[[0.0], [-1e-9]]])
    for beta in BETAS:
        given = [each.to(device_of(backend)) for each in (logits, ids, scored)]
        out = gk.distillation_loss(
            given[0], ids=given[1], teacher_logprobs=given[2], beta=beta, backend=backend
        )
        exact = oracle.divergence_over_ids(logits.double(), scored.double(), ids, beta, True, scored=True)
        torch.testing.assert_close(out.divergence.cpu().double(), exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("beta", BETAS)
def test_ids_that_are_the_whole_vocabulary(beta, backend):
    """There is no tail, even if rounded log-probs sum to less than 1."""
    device, rng = device_of(backend), generator(7)
    start, theirs = (2 * torch.randn(2, 4, 33, generator=rng) for _ in range(2))
    ids = torch.rand(2, 4, 33, generator=rng).argsort(-1)
    scored, exact = theirs.log_softmax(-1), start.double().requires_grad_()
    want = oracle.divergence(exact.log_softmax(-1), scored.double(), beta)
    want.mean().backward()
    logits = start.to(device).requires_grad_()
    given = {"ids": ids, "teacher_logprobs": scored.gather(-1, ids)}
    out = gk.distillation_loss(
        logits, **{name: value.to(device) for name, value in given.items()}, beta=beta, backend=backend
    )
    out.loss.backward()
    torch.testing.assert_close(out.divergence.cpu().double(), want.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.grad.cpu().double(), exact.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregations(aggregation):
    """They are those of the objectives: the loss is Linear's, with divergences in place of log-probs."""
    problem = Problem()
    problem.weights[0, 0] = 2.0  # with a normalizer of 2 its share is 1
    how = {"aggregation": aggregation, "aggregation_constant": 9 if aggregation == "constant" else None}
    tokens = {**problem.inputs, **problem.teacher, "loss_mask": COUNTED, "token_weights": problem.weights}
    flat = {name: value.flatten(0, 1) for name, value in tokens.items()} | {"cu_seqlens": offsets((3, 3))}
    for given in (tokens, flat):
        divisor = torch.tensor([2.0, 2.5]) if aggregation == "prompt_mean" else 2.0
        given |= {"lengths": torch.tensor([5.0, 3.0]), "normalizer": divisor}
        out = gk.distillation_loss(**given, **how)
        terms = {name: value for name, value in given.items() if not name.endswith("logits")}
        same = gk.policy_loss(out.divergence, None, None, **terms, objective=gk.Linear(**how))
        torch.testing.assert_close(out.loss, same.loss, rtol=1e-6, atol=0.0)


# --- properties


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


def test_banned_tokens_infinities_and_nan(backend):
    """An undefined result stays in its row, even if all rows are in one call."""
    students, teachers, kinds, smooth = zip(*SPECIAL.values(), strict=True)
    start, theirs = (torch.tensor(rows).unsqueeze(1).to(device_of(backend)) for rows in (students, teachers))
    z, zt = (rows[:, 0].cpu().double() for rows in (start, theirs))
    p, q = z.softmax(-1), zt.softmax(-1)
    for top_k, (k, beta) in itertools.product((0, 3), enumerate(BETAS)):
        logits = start.clone().requires_grad_()
        out = gk.distillation_loss(logits, theirs, beta=beta, top_k=top_k, aggregation="sum", backend=backend)
        out.loss.backward()
        values = oracle.divergence(z.log_softmax(-1), zt.log_softmax(-1), beta).nan_to_num(0.0)
        student, m = (1.0 if beta == 1 else 1 - beta), (1 - beta) * p + beta * q
        far = (p / (q if beta == 1 else m)).log().nan_to_num(0.0, 0.0, 0.0) * (p > 0)
        slopes = p - q if beta == 0 else student * p * (far - (p * far).sum(-1, keepdim=True))
        for i, name in enumerate(SPECIAL):
            got, grad, where = out.divergence[i, 0].cpu(), logits.grad[i, 0].cpu(), (name, beta, top_k)
            assert ("f" if got.isfinite() else "n" if got.isnan() else "i") == kinds[i][k], where
            assert bool(grad.isfinite().all()) == (smooth[i][k] == "f"), where
            if smooth[i][k] == "f":
                assert (grad - slopes[i]).abs().max() < 1e-6, where
                assert kinds[i][k] != "f" or (got - values[i]).abs() < 1e-6, where


# --- how it is called


def test_teachers_have_no_gradient_under_autocast():
    problem = Problem(linear=True)
    leaves = {name: value.requires_grad_() for name, value in (problem.inputs | problem.teacher).items()}
    with torch.autocast("cpu", torch.bfloat16):
        out = gk.fused_linear_distillation_loss(**leaves)
    low = {name: value.detach().bfloat16() for name, value in leaves.items()}
    assert torch.equal(out.divergence, gk.fused_linear_distillation_loss(**low).divergence)
    out.loss.backward()
    assert {name for name, leaf in leaves.items() if leaf.grad is not None} == set(problem.inputs)


def test_bits_of_gradients_in_batch_invariant_mode():
    """All bits are the same for any chunks, and those of a row among any other rows."""
    rng = generator(3)
    hidden, teacher, weight, teacher_weight = (
        torch.randn(*shape, generator=rng) for shape in ((200, 70), (200, 90), (60, 70), (60, 90))
    )

    def run(rows, chosen=slice(None)):
        leaves = [hidden[chosen].clone().requires_grad_(), weight.clone().requires_grad_()]
        out = gk.fused_linear_distillation_loss(
            *leaves, teacher[chosen], teacher_weight, cu_seqlens=offsets((len(leaves[0]),)), normalizer=7.0,
            max_chunk_bytes=rows * 60 * 8, batch_invariant=True,
        )  # fmt: skip
        return out.divergence, *torch.autograd.grad(0.3 * out.loss, leaves)

    whole = run(200)
    assert all(torch.equal(a, b) for a, b in zip(run(33), whole, strict=True))
    few = run(150, slice(41, 43))
    assert all(torch.equal(a, b[41:43]) for a, b in zip(few[:2], whole[:2], strict=True))


@pytest.mark.parametrize("beta", BETAS)
def test_trl(beta):
    pytest.importorskip("trl")
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    problem, labels = Problem(), torch.tensor([[1, -100, 2], [3, 4, -100]])
    logits, teacher = problem.inputs["logits"].requires_grad_(), problem.teacher["teacher_logits"]
    how = {"beta": beta, "temperature": 1.3}
    ours = gk.distillation_loss(logits, teacher, **how, loss_mask=labels >= 0).loss
    theirs = GKDTrainer.generalized_jsd_loss(logits, teacher, labels, **how)
    (grad,), (their_grad,) = (torch.autograd.grad(loss, logits) for loss in (ours, theirs))
    torch.testing.assert_close((ours, grad), (theirs, their_grad), rtol=2e-4, atol=2e-6)


# --- sampled tokens


def test_advantages_are_teacher_minus_student():
    student = torch.tensor([[-1.0, -math.inf, -2.0, math.nan]], requires_grad=True)
    teacher = torch.tensor([[-0.5, -math.inf, -math.inf, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    found = gk.advantages.reverse_kl(student, teacher, loss_mask=mask, coef=2.0)
    assert found.tolist() == [[1.0, 0.0, -math.inf, 0.0]] and not found.requires_grad
