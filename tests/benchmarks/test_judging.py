"""The fp64 answers are autograd's, and nobody with a wrong one is timed."""

import dataclasses
import functools

import pytest
import torch

from benchmarks import contestants, measure, registry, step, suites
from benchmarks import problem as gspo
from benchmarks.judge import Judge

SHAPE = (48, 130, 16, 8)
CPU = torch.device("cpu")


def tiny_problem(task, situation="all active", dtype=torch.float32):
    return gspo.draw(task, *SHAPE, dtype).situation(situation)


def real_problem(task, dtype=torch.float32):
    return gspo.realistic(task, 16, 12, 130, 16, dtype)


def widened(problem):
    """The same problem in fp64, for autograd."""
    old = problem.old_logprobs
    return dataclasses.replace(
        problem,
        inputs=tuple(one.double() for one in problem.inputs),
        advantages=problem.advantages.double(),
        old_logprobs=None if old is None else old.double(),
    )


def autograd(problem):
    wide = widened(problem)
    leaves = wide.leaves()
    if problem.task == "logprobs":
        logprobs = leaves[0]
    else:
        logits = leaves[0] if problem.task == "logits" else gspo.project(*leaves, "float32", native=True)
        logprobs = gspo.picked(logits, wide.labels)
    loss = gspo.losses(wide, logprobs).mean()
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return loss, dict(zip(problem.names, torch.autograd.grad(loss, wanted), strict=False))


@pytest.mark.parametrize("situation", (*gspo.SITUATIONS, "realistic"))
@pytest.mark.parametrize("task", ("logits", "hidden", "logprobs"))
def test_the_reference_is_that_of_autograd(task, situation):
    problem = real_problem(task) if situation == "realistic" else tiny_problem(task, situation)
    answer, (loss, gradients) = gspo.exact(problem), autograd(problem)
    found = answer.gradients
    if task == "logits":
        _, c = gspo.coefficients(problem, problem.logprobs)
        rows = gspo.logit_gradients(problem, slice(None), None, c)
        found = {"logits": rows.view(problem.inputs[0].shape)}
    assert found.keys() == gradients.keys()
    assert ("weight" in found) == (task == "hidden" and situation != "frozen head")
    assert (answer.loss.mean() - loss).abs() <= 1e-12 * loss.abs()
    for name, wanted in gradients.items():
        assert (found[name] - wanted).abs().max() <= 1e-12 * wanted.abs().max()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_problem_is_what_its_name_says(dtype):
    problem = tiny_problem("hidden", dtype=dtype)
    _, c = gspo.coefficients(problem, problem.logprobs)
    assert bool((c != 0).all())
    half = problem.situation("half inactive")
    assert gspo.coefficients(half, half.logprobs)[1].count_nonzero() == SHAPE[0] // 2


def test_a_realistic_batch():
    problem = gspo.realistic("hidden", 64, 64, 50, 8, torch.float32)
    about = gspo.about(problem)
    assert 0.3 < about["padding"] < 0.9
    groups = (problem.advantages.view(-1, 4) == 0).all(1)
    assert groups.sum() == round(0.4 * 16) and (problem.advantages == 0).sum() == 4 * groups.sum()
    assert about["clipped tokens"] == pytest.approx(0.15, abs=0.03)
    assert about["tokens at zero advantage"] == pytest.approx(0.4, abs=0.05)
    total = sum(about[name] for name in about if name.startswith("tokens") or name == "clipped tokens")
    assert total == pytest.approx(1)


def test_unequal_sequences_are_refused():
    with pytest.raises(ValueError, match="equal length"):
        gspo.draw("hidden", 10, 20, 4, 3, torch.float32)


@pytest.mark.parametrize("task", ("logits", "hidden"))
def test_layouts(task):
    problem = real_problem(task)
    packed, longer = problem.layout("packed"), problem.layout("next")
    counted = problem.mask.bool()
    assert packed.cu_seqlens.tolist() == [0, *problem.mask.sum(1).cumsum(0).int().tolist()]
    assert torch.equal(packed.inputs[0], problem.inputs[0][counted])
    assert torch.equal(longer.inputs[0][:, :-1], problem.inputs[0])
    assert longer.inputs[0].shape[1] == problem.inputs[0].shape[1] + 1


# --- who may be timed


def honest(problem, *leaves, **changes):
    return contestants._naive(problem, *leaves)


class Spoiled(torch.autograd.Function):
    """The identity, but for what it does to the gradient."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


def of_leaf(index, change, problem, *leaves):
    spoiled = [Spoiled.apply(leaf, change) if i == index else leaf for i, leaf in enumerate(leaves)]
    return contestants._naive(problem, *spoiled)


def one_row_lost(grad):
    return grad.index_fill(1, torch.tensor([0]), 0.0)


HIDDEN = {
    "gradient off by a thousandth": ("hidden", functools.partial(of_leaf, 0, lambda grad: grad * 1.001)),
    "gradient of another sign": ("weight", functools.partial(of_leaf, 1, torch.neg)),
    "one row lost": ("hidden", functools.partial(of_leaf, 0, one_row_lost)),
    "loss not a number": ("loss", lambda *to: honest(*to) * float("nan")),
    "loss off": ("loss", lambda *to: honest(*to) + 1e-3),
}
LOGITS = {
    "dLogits off by a thousandth": ("logits", functools.partial(of_leaf, 0, lambda grad: grad * 1.001)),
    "one row lost": ("logits", functools.partial(of_leaf, 0, one_row_lost)),
}


LOGPROBS = {
    "gradient off by a millionth": ("logprobs", functools.partial(of_leaf, 0, lambda grad: grad * 1.000001)),
    "one row lost": ("logprobs", functools.partial(of_leaf, 0, one_row_lost)),
    "loss off": ("loss", lambda *to: honest(*to) + 1e-6),
}


def outcomes(task, calls, monkeypatch, problem, options=None, **about):
    monkeypatch.setattr(registry, "CONTESTANTS", {})
    for name, call in calls.items():
        registry.contestant(name, task, **about)(lambda device, call=call: call)
    monkeypatch.setattr(measure, "CONTESTANTS", registry.CONTESTANTS)
    case = measure.Case(
        "case", lambda device: problem, {}, (".*",), suites.PRODUCTS if task == "hidden" else {}
    )
    options = options or registry.Options(CPU, repeats=1, memory=False)
    record = measure.run_case(case, options)
    return {result["contestant"]: result for result in record["results"]}


@pytest.mark.parametrize(("task", "wrong"), (("hidden", HIDDEN), ("logits", LOGITS), ("logprobs", LOGPROBS)))
@pytest.mark.parametrize("make", (tiny_problem, real_problem))
def test_a_wrong_contestant_is_refused_its_time(task, wrong, make, monkeypatch):
    calls = {"honest": honest, **{name: call for name, (_, call) in wrong.items()}}
    found = outcomes(task, calls, monkeypatch, make(task))
    assert found["honest"]["status"] == "right" and len(found["honest"]["seconds"]["both"]) == 1
    for name, (what, _) in wrong.items():
        assert found[name]["status"] == "wrong", name
        assert "seconds" not in found[name]
        assert f"{what} is off by" in found[name]["reason"]


@pytest.mark.parametrize("precision", ("float32", "input"))
def test_scores_are_judged_by_their_own_precision(precision, monkeypatch):
    problem = tiny_problem("scoring", dtype=torch.bfloat16)

    def rounded(problem, hidden, weight):
        return gspo.picked(gspo.project(hidden, weight, "input", native=False), problem.labels)

    found = outcomes("scoring", {"16-bit logits": rounded}, monkeypatch, problem, precision=precision)
    assert found["16-bit logits"]["status"] == ("right" if precision == "input" else "wrong")


def test_errors_and_absence_have_reasons(monkeypatch):
    def fails(problem, hidden, weight):
        raise RuntimeError("not for this shape\nand more")

    options = registry.Options(CPU, repeats=1, memory=False, without={"left out": "broke the device"})
    calls = {"honest": honest, "fails": fails, "left out": honest}
    found = outcomes("hidden", calls, monkeypatch, tiny_problem("hidden"), options)
    assert (
        found["fails"] | {"status": "refused", "reason": "RuntimeError: not for this shape"} == found["fails"]
    )
    assert found["left out"]["status"] == "missing" and found["left out"]["reason"] == "broke the device"


def test_who_fails_while_being_timed_is_refused(monkeypatch):
    calls = iter(range(100))

    def tires(problem, *leaves):
        if next(calls) == 3:
            raise RuntimeError("enough")
        return honest(problem, *leaves)

    monkeypatch.setattr(measure, "_LEAST", 0.0)
    options = registry.Options(CPU, repeats=3, memory=False)
    found = outcomes(
        "hidden", {"honest": honest, "tires": tires}, monkeypatch, tiny_problem("hidden"), options
    )
    assert found["tires"]["status"] == "refused" and found["tires"]["reason"] == "RuntimeError: enough"
    assert "seconds" not in found["tires"] and "tires" not in found["honest"]["x_contestants"]
    assert len(found["honest"]["seconds"]["both"]) == 3


def test_a_missing_package_says_so():
    with pytest.raises(registry.Missing, match="no_such_package is not installed"):
        contestants.package("no_such_package.module", CPU)
    with pytest.raises(registry.Missing, match="need a GPU"):
        contestants.package("torch", CPU, gpu_only=True)
    lost = registry.Contestant("lost", ("hidden",), lambda device: torch.no_such_name)
    with pytest.raises(registry.Missing, match="no_such_name"):
        lost.get(CPU)


def test_the_slow_are_timed_once(monkeypatch):
    monkeypatch.setattr(measure, "PATIENCE", 0.0)
    options = registry.Options(CPU, repeats=3, memory=False)
    found = outcomes("hidden", {"honest": honest}, monkeypatch, tiny_problem("hidden"), options)
    assert len(found["honest"]["seconds"]["both"]) == 1


def test_ratios_are_to_the_floor_and_to_each_other(monkeypatch):
    options = registry.Options(CPU, repeats=3, memory=False)
    monkeypatch.setattr(measure, "_LEAST", 0.0)
    ticks = iter(range(10_000))

    class Steady(measure.Clock):
        """A second from mark to mark."""

        def mark(self):
            self.marks.append(next(ticks))

    monkeypatch.setattr(measure, "Clock", Steady)
    found = outcomes("hidden", {"a": honest, "b": honest}, monkeypatch, tiny_problem("hidden"), options)
    # forward and backward are a second each, the three products of the floor too
    for name, other in ("ab", "ba"):
        assert found[name]["seconds"] == {"forward": [1] * 3, "backward": [1] * 3, "both": [2] * 3}
        assert found[name]["x_floor"] == {phase: pytest.approx(2 / 3) for phase in ("median", "low", "high")}
        assert found[name]["x_contestants"] == {other: 1}


def test_peak_memory_of_a_process_of_its_own():
    """In place, no gradient is allocated; elsewhere one of the logits' size is."""
    problem = gspo.draw("logits", 256, 8000, 0, 4, torch.float32)
    names = ("ours, cpp", "ours, cpp, in place")
    found = [measure.Entrant(registry.CONTESTANTS[name], problem) for name in names]
    peaks = measure.peaks_in_a_process(found, problem)
    size = problem.inputs[0].numel() * 4
    assert 0.9 * size <= peaks["ours, cpp"] <= 1.3 * size
    assert peaks["ours, cpp, in place"] <= 0.3 * size


# --- a whole step


def test_a_step_judges_every_parameter():
    made = step.make(2, 6, 50, 64, 1, CPU, torch.float32)
    judge = step.StepJudge(made)
    contestant = registry.CONTESTANTS["ours, auto"]

    def verdict(spoil=None):
        entrant = measure.Entrant(contestant, made, contestant.get(CPU))
        *_, (loss, gradients) = entrant.once(CPU)
        if spoil is not None:
            gradients = tuple(g * 1.01 if i == spoil else g for i, g in enumerate(gradients))
        return judge.verdict(contestant, loss, gradients)

    assert not verdict().complaint
    for index in (0, 5, len(judge.names) - 1):
        assert judge.names[index] in verdict(index).complaint


def test_everyone_is_asked():
    """Backends and schedules of ours, and the packages that the page names, in each task."""
    options = registry.Options(CPU)
    names = {
        task: {one.name for one in registry.entrants(task, (".*",), options, torch.bfloat16)}
        for task in registry.TASKS
    }
    for backend in ("triton", "cpp", "reference"):
        assert f"ours, {backend}" in names["logits"]
    for schedule in ("auto", "known", "aligned", "deferred", "frozen", "two_pass"):
        assert f"ours, {schedule}" in names["hidden"]
    for task, packages in {
        "logits": ("naive", "torch.compile", "TRL", "Liger triton_grpo_loss", "QuACK", "verl"),
        "hidden": (
            "naive",
            "torch.compile",
            "TRL",
            "Liger LigerFusedLinearGRPOLoss",
            "Liger scaled",
            "CCE",
            "QuACK",
        ),
        "scoring": ("naive", "torch.compile", "TRL", "Liger scaled", "CCE", "verl"),
    }.items():
        for package in packages:
            assert any(name.startswith(package) for name in names[task]), (task, package)


def test_the_judge_allows_what_plain_pytorch_does():
    problem = tiny_problem("hidden", dtype=torch.bfloat16)
    contestant = registry.CONTESTANTS["naive PyTorch, fp32 logits"]
    verdict = Judge(problem).verdict(contestant, None, (None, None))
    assert set(verdict.errors) == {"loss", "hidden", "weight"}
    assert all(error == float("inf") for error in verdict.errors.values()) and verdict.complaint
