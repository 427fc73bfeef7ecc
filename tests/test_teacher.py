"""A policy objective beside a teacher: both parts from one pass, against their definitions in fp64."""

import itertools
import math

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.linear.head import Head
from gspo_kernels.ops.backends import load
from gspo_kernels.types import stats_dtype
from tests import oracle
from tests.accuracy import Spread, assert_as_exact, differences
from tests.cases import device_of, generator, offsets
from tests.test_distillation import COUNTED, DRAWS, Problem, transformed

FORMS = (
    {"beta": 0.0},
    {"beta": 0.3},
    {"beta": 1.0},
    {"beta": 0.3, "top_k": 7},
    {"beta": 1.0, "top_k": 7, "top_k_of": "student", "add_tail": False},
)
OBJECTIVES = {"sequences": gk.GSPO(0.5, 0.5), "tokens": gk.GRPO(0.5, 0.5, aggregation="token_mean")}
ADVANTAGES, COEF = torch.tensor([1.0, -0.7]), torch.tensor([[0.4, 1.3, 0.7], [0.9, 0.2, 0.0]])


class Lesson(Problem):
    """A problem with labels, one of which is nearly certain, and log-probs of an older policy."""

    def __init__(self, **kind):
        super().__init__(**kind)
        self.labels = torch.randint(0, self.vocabulary, (2, 3), generator=generator(kind.get("draw", 0)))
        if not self.linear:
            self.inputs["logits"][1, 1, self.labels[1, 1]] = 16.0
        self.drift = 0.3 * torch.randn(2, 3, generator=generator(9), dtype=torch.float64)
        self.old = None
        self.old = self.formulas(torch.float64)["logprobs"] + self.drift

    def formulas(self, dtype, objective="sequences", beta=0.5, top_k=0, top_k_of="teacher", add_tail=True):
        leaves = {name: value.to(dtype, copy=True).requires_grad_() for name, value in self.inputs.items()}
        theirs = {name: value.to(dtype) for name, value in self.teacher.items()}
        if self.linear:
            x = leaves["hidden"] @ leaves["weight"].T + leaves["bias"]
            xt = theirs["teacher_hidden"] @ theirs["teacher_weight"].T + theirs["teacher_bias"]
        else:
            x, xt = leaves["logits"], theirs["teacher_logits"]
        z, zt = transformed(x, self.options), transformed(xt, self.options, "teacher_")
        log_p = z.log_softmax(-1)
        logprobs = torch.where(COUNTED, log_p.gather(-1, self.labels.unsqueeze(-1)).squeeze(-1), 0.0)
        if self.old is None:
            return {"logprobs": logprobs.detach()}
        if not top_k:
            found = oracle.divergence(log_p, zt.log_softmax(-1), beta)
        else:
            ids = (z if top_k_of == "student" else zt).topk(top_k).indices
            found = oracle.divergence_over_ids(z, zt, ids, beta, add_tail)
        found = torch.where(COUNTED, found, 0.0)
        objective = OBJECTIVES[objective]
        policy = gk.policy_loss(logprobs, self.old, ADVANTAGES, loss_mask=COUNTED, objective=objective).loss
        counts = COUNTED.sum(-1, keepdim=True) * len(COUNTED)
        divisors = counts if objective.aggregation == "sequence_mean" else COUNTED.sum()
        divergence = (found * COEF.to(dtype) / divisors).sum()
        loss = policy + divergence
        grads = torch.autograd.grad(loss, list(leaves.values()))
        named = {f"grad {name}": grad for name, grad in zip(leaves, grads, strict=True)}
        shown = {"loss": loss, "logprobs": logprobs, "policy": policy, "divergence": divergence}
        return named | {name: value.detach() for name, value in shown.items()}

    def ours(self, backend, packed=False, call=None, objective="sequences", **form):
        device = device_of(backend)
        leaves = {name: value.clone().to(device).requires_grad_() for name, value in self.inputs.items()}
        theirs = {name.removeprefix("teacher_"): value.to(device) for name, value in self.teacher.items()}
        given = {"labels": self.labels, "old_logprobs": self.old, "loss_mask": COUNTED, "coef": COEF}
        given = leaves | {name: value.to(device) for name, value in given.items()}
        if packed:
            by_row = ("hidden", "logits", "labels", "old_logprobs", "loss_mask", "coef")
            flat = (
                {n: v.flatten(0, 1) if n in by_row else v for n, v in side.items()}
                for side in (given, theirs)
            )
            given, theirs = flat
            given["cu_seqlens"] = offsets((3, 3)).to(device)
        options = {n: v.to(device) if torch.is_tensor(v) else v for n, v in self.options.items()}
        of_teacher = {n: options.pop(n) for n in list(options) if n.startswith("teacher_")}
        form |= {name.removeprefix("teacher_"): value for name, value in of_teacher.items()}
        teacher = gk.Teacher(**theirs, **form, coef=given.pop("coef"))
        function = gk.fused_linear_policy_loss if self.linear else gk.fused_policy_loss
        out = function(
            **given, **options, advantages=ADVANTAGES.to(device), objective=OBJECTIVES[objective],
            teacher=teacher, backend=backend, **(call or {}),
        )  # fmt: skip
        out.loss.backward()
        named = {f"grad {name}": leaf.grad for name, leaf in leaves.items()}
        parts = {name: out.metrics[f"loss/{name}"] for name in ("policy", "divergence")}
        named |= {"loss": out.loss, "logprobs": out.logprobs.view(2, 3)} | parts
        return {name: value.detach().cpu() for name, value in named.items()}


def check(backend, forms=FORMS, dtype=torch.float32, packed=False, call=None, objective="sequences", **kind):
    """As exact as plain PyTorch in the statistics' dtype, over a few draws."""
    # of a scalar a few draws of plain PyTorch's error say little
    lessons = [Lesson(dtype=dtype, draw=draw, **kind) for draw in range(8)]
    for form in forms:
        errors, ours, exacts = {}, {}, {}
        for draw, lesson in enumerate(lessons):
            exact, plain = (
                lesson.formulas(kind, objective, **form) for kind in (torch.float64, stats_dtype(dtype))
            )
            for name, value in plain.items():
                errors.setdefault(name, []).append(value.double() - exact[name])
            if draw < (2 if backend == "triton" else DRAWS):
                for name, got in lesson.ours(backend, packed, call, objective, **form).items():
                    ours.setdefault(name, []).append(got)
                    exacts.setdefault(name, []).append(exact[name])
        for name, results in ours.items():
            spread = Spread.of(errors[name], by_row=name in ("grad logits", "grad hidden", "grad weight"))
            eps = torch.finfo(results[0].dtype).eps
            assert_as_exact(f"{form} {name}", differences(results, exacts[name]), spread, exacts[name], eps)


def test_from_logits(backend):
    check(backend, FORMS[1::2] if backend == "triton" else FORMS, packed=True)
    check(backend, FORMS[:3:2], objective="tokens", options="transformed")


def test_from_hidden_states(backend):
    # where a chunk holds all, a sequence of both sides, or one row
    for budget, forms in ((None, FORMS), (6 * 4 * 613 * 2, FORMS[:2]), (1, FORMS[2:4])):
        check(
            backend,
            forms[::2] if backend == "triton" else forms,
            linear=True,
            call={"max_chunk_bytes": budget},
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype, backend):
    few = FORMS[1:2] if backend == "triton" else FORMS[1::2]
    for linear in (False, True):
        check(backend, few, dtype=dtype, linear=linear, packed=True, objective="tokens")


@pytest.mark.parametrize("schedule", ["known", "aligned", "two_pass", "auto"])
def test_schedules(schedule):
    call = {"schedule": schedule, "max_chunk_bytes": 3 * 2 * 613 * 4, "skip_inactive": "none"}
    check(
        "cpp", FORMS[1::2], linear=True, call=call, objective="tokens" if schedule == "known" else "sequences"
    )


def test_schedules_that_need_one_coefficient_are_refused():
    lesson = Lesson(linear=True)
    for schedule in ("deferred", "frozen"):
        with pytest.raises(ValueError, match="the teacher adds a gradient that is no multiple"):
            lesson.ours("cpp", call={"schedule": schedule})
    with pytest.raises(ValueError, match="'all' leaves sequences out that the teacher gives a gradient"):
        lesson.ours("cpp", call={"skip_inactive": "all"})


@pytest.mark.parametrize("form", [FORMS[1], FORMS[3]], ids=["whole", "over ids"])
def test_logits_are_computed_and_read_once(form, monkeypatch):
    """One projection of either side and the products of one loss; from logits a read forward, one
    backward.
    """
    counts = dict.fromkeys(
        ("logits", "grad_hidden", "divergence", "logprobs_forward", "logprobs_backward"), 0
    )

    def counted(owner, name):
        original = getattr(owner, name)

        def call(*arguments, **named):
            counts[name] += 1
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, call)

    for owner, name in itertools.chain(
        ((Head, name) for name in ("logits", "grad_hidden")),
        ((load("cpp"), name) for name in ("divergence", "logprobs_forward", "logprobs_backward")),
    ):
        counted(owner, name)
    Lesson(linear=True).ours("cpp", **form)
    assert (counts["logits"], counts["grad_hidden"]) == (2, 1)
    counts.update(dict.fromkeys(counts, 0))
    Lesson().ours("cpp", **form)
    over_both = {"divergence": 2, "logprobs_forward": 0, "logprobs_backward": 0}
    # the student's and the teacher's rows, and once more before the backward, which keeps none of K numbers
    over_some = {"divergence": 0, "logprobs_forward": 4, "logprobs_backward": 1}
    assert counts == {"logits": 0, "grad_hidden": 0} | (over_some if "top_k" in form else over_both)


def test_parts_add_up_and_a_coefficient_of_zero_leaves_the_objective():
    for linear, backend in itertools.product((False, True), ("cpp", "reference")):
        lesson, shown = Lesson(linear=linear), []
        function = gk.fused_linear_policy_loss if linear else gk.fused_policy_loss
        own = (lesson.labels, lesson.old, ADVANTAGES)
        theirs = {name.removeprefix("teacher_"): value for name, value in lesson.teacher.items()}
        for teacher in (None, gk.Teacher(**theirs, coef=0.0), gk.Teacher(**theirs, coef=2.0)):
            leaves = {name: value.clone().requires_grad_() for name, value in lesson.inputs.items()}
            head = [leaves.pop(name) for name in ("hidden", "weight", "logits") if name in leaves]
            out = function(*head, *own, **leaves, loss_mask=COUNTED, backend=backend, teacher=teacher)
            shown.append((out, torch.autograd.grad(out.loss, head)))
        (alone, grads), (idle, idle_grads), (both, _) = shown
        for got, wanted in zip((idle.loss, *idle_grads), (alone.loss, *grads), strict=True):
            assert (got - wanted).norm() <= 1e-6 * wanted.norm()
        assert idle.metrics["divergence"] == both.metrics["divergence"] > 0
        parts = both.metrics["loss/policy"] + both.metrics["loss/divergence"]
        assert both.loss == parts and set(both.metrics) > set(alone.metrics)
        with torch.no_grad():
            still = function(*head, *own, **leaves, loss_mask=COUNTED, backend=backend, teacher=teacher)
        assert abs(still.loss - both.loss) <= 1e-6 * abs(both.loss)
        assert abs(still.metrics["divergence"] - both.metrics["divergence"]) <= 1e-6


def test_masked_tokens_are_inert_and_infinities_stay_on_their_side(backend):
    lesson = Lesson()
    clean = lesson.ours(backend, beta=0.3)
    lesson.inputs["logits"][~COUNTED], lesson.teacher["teacher_logits"][~COUNTED] = math.nan, math.nan
    lesson.old[~COUNTED] = math.nan
    dirty = lesson.ours(backend, beta=0.3)
    assert all(torch.equal(clean[name], dirty[name]) for name in clean)
    for position, silent in (((0, 1), False), ((1, 2), True)):
        lesson = Lesson()
        lesson.teacher["teacher_logits"][position] = math.nan
        found = lesson.ours(backend, beta=0.3)
        # with a coefficient of 0 a token learns from the objective alone, whatever the teacher says
        assert bool(found["grad logits"][position].isfinite().all()) == silent
        assert bool(found["loss"].isfinite()) == silent and found["policy"].isfinite()
        assert found["grad logits"][0, 0].isfinite().all()


def test_compiled_equals_eager_and_backwards_repeat():
    for linear in (False, True):
        lesson = Lesson(linear=linear, V=61)
        theirs = {name.removeprefix("teacher_"): value for name, value in lesson.teacher.items()}

        def step(*leaves, lesson=lesson, theirs=theirs):
            given = dict(zip(lesson.inputs, leaves, strict=True))
            function = gk.fused_linear_policy_loss if lesson.linear else gk.fused_policy_loss
            teacher = gk.Teacher(**theirs, beta=0.3, coef=0.7)
            own = {"labels": lesson.labels, "old_logprobs": lesson.old, "advantages": ADVANTAGES}
            return function(**given, **own, loss_mask=COUNTED, teacher=teacher).loss

        torch._dynamo.reset()
        results = []
        for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            leaves = [value.clone().requires_grad_() for value in lesson.inputs.values()]
            loss = function(*leaves)
            first = torch.autograd.grad(3.0 * loss, leaves, retain_graph=function is step)
            results.append([loss.detach(), *first])
            if function is step:
                again = torch.autograd.grad(3.0 * loss, leaves)
                assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        for eager, compiled in zip(*results, strict=True):
            torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-8)


def test_gradients_keep_their_bits_in_batch_invariant_mode():
    """Whatever the chunks, and whether sequences fit one."""
    rng = generator(3)
    hidden, theirs, weight, their_weight = (
        torch.randn(*shape, generator=rng) for shape in ((200, 70), (200, 90), (60, 70), (60, 90))
    )
    labels, old = torch.randint(0, 60, (200,), generator=rng), torch.randn(200, generator=rng) - 4
    teacher, ends = gk.Teacher(hidden=theirs, weight=their_weight, coef=0.3), torch.tensor([0, 60, 200])
    shown = []
    for rows, schedule in ((200, "auto"), (33, "auto"), (150, "two_pass")):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = gk.fused_linear_policy_loss(
            *leaves, labels, old, ADVANTAGES, cu_seqlens=ends.int(), objective=gk.GSPO(0.9, 99.0),
            teacher=teacher, max_chunk_bytes=rows * 60 * 8, schedule=schedule, batch_invariant=True,
        )  # fmt: skip
        shown.append((out.loss.detach(), out.logprobs, *torch.autograd.grad(0.3 * out.loss, leaves)))
    whole, *others = shown
    assert all(torch.equal(a, b) for other in others for a, b in zip(whole, other, strict=True))


LOGITS, IDS = torch.zeros(2, 3, 9), torch.zeros(2, 3, 4, dtype=torch.int64)
WRONG = {
    "teacher: got dict": ({}, {}),
    r"teacher.hidden: got a tensor, expected None beside the student's logits": ({"hidden": LOGITS}, {}),
    r"teacher.logits: got None": ({}, {}),
    r"teacher.logits: got shape \(2, 3, 8\)": ({"logits": LOGITS[..., :8]}, {}),
    r"teacher.beta: got 2": ({"logits": LOGITS, "beta": 2}, {}),
    r"teacher.coef: got shape \(4,\)": ({"logits": LOGITS, "coef": torch.ones(4)}, {}),
    r"teacher.ids: got 9": ({"ids": IDS + 9, "logprobs": IDS.float()}, {}),
    r"teacher.logprobs: got shape": ({"ids": IDS, "logprobs": IDS.float()[..., :2]}, {}),
    "teacher: got one along with an entropy": ({"logits": LOGITS}, {"entropy_coef": 0.1}),
    "kept_ids: got ids, but the teacher": ({"logits": LOGITS, "top_k": 2}, {"kept_ids": IDS}),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_teachers(message):
    given, options = WRONG[message]
    teacher = given if "dict" in message else gk.Teacher(**given)
    labels = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises((TypeError, ValueError), match=message):
        gk.fused_policy_loss(LOGITS, labels, None, ADVANTAGES, teacher=teacher, **options)


def test_wrong_heads_of_teachers():
    hidden, labels = torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    given = {"hidden": torch.zeros(2, 3, 5), "weight": torch.zeros(9, 5)}
    for message, change in {
        r"teacher.weight: got shape \(8, 5\)": {"weight": torch.zeros(8, 5)},
        "teacher.weight: got None": {"weight": None},
        "teacher.logits: got a tensor, expected None beside the student's hidden": {"logits": LOGITS},
        "teacher.weight: got torch.bfloat16": {"weight": torch.zeros(9, 5).bfloat16()},
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            gk.fused_linear_policy_loss(
                hidden, torch.zeros(9, 4), labels, None, ADVANTAGES, teacher=gk.Teacher(**(given | change))
            )


def test_a_sampling_mask_holds_for_both_sides(backend):
    """Over the kept ids alone, as if there were no others."""
    lesson, device = Lesson(V=40), device_of(backend)
    kept = torch.cat([lesson.labels.unsqueeze(-1), torch.arange(9).expand(2, 3, 9)], -1)
    cut = torch.ones(2, 3, 40, dtype=torch.bool).scatter_(-1, kept, False)
    logits, theirs = lesson.inputs["logits"], lesson.teacher["teacher_logits"]
    found = []
    for fill, masked in ((0.0, {"kept_ids": kept.to(device)}), (-math.inf, {})):
        own = logits.masked_fill(cut, fill).to(device).requires_grad_()
        teacher = gk.Teacher(logits=theirs.masked_fill(cut, fill).to(device), beta=0.3)
        arguments = (lesson.labels.to(device), lesson.old.to(device), ADVANTAGES.to(device))
        out = gk.fused_policy_loss(own, *arguments, teacher=teacher, backend=backend, **masked)
        out.loss.backward()
        found.append((out.loss.detach(), own.grad))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)
    assert (found[0][1].cpu()[cut] == 0).all()
