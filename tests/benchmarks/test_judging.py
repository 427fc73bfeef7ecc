"""The fp64 answer equals autograd's, and a contestant with a wrong answer is not timed."""

import dataclasses
import functools
import itertools
from unittest.mock import Mock

import pytest
import torch

from benchmarks import hidden, judging, logits, measure, step
from benchmarks.judging import Judge

SHAPE = (48, 130, 16, 8)  # tokens, vocabulary, width, sequences
CPU = torch.device("cpu")


def tiny_problem(task, situation="all active", dtype=torch.float32):
    tokens, vocabulary, width, sequences = SHAPE
    if task == "logits":
        drawn = logits.draw(tokens, vocabulary, sequences, dtype)
    else:
        drawn = hidden.draw(task, tokens, vocabulary, width, sequences, dtype)
    return drawn.situation(situation)


def padded_problem(task):
    problem = hidden.realistic(16, 12, 130, 16, torch.float32)
    if task != "logits":
        return dataclasses.replace(problem, task=task)
    scores = problem.inputs[0] @ problem.inputs[1].T
    logprobs = judging.picked(scores.double(), problem.labels)
    return dataclasses.replace(problem, task="logits", inputs=(scores,), logprobs=logprobs)


def autograd(problem):
    """Return loss and gradients of the same problem by autograd in fp64."""
    wide = dataclasses.replace(problem, inputs=tuple(one.double() for one in problem.inputs))
    leaves = wide.leaves()
    scores = leaves[0] if problem.task == "logits" else leaves[0] @ leaves[1].T
    loss = judging.losses(wide, judging.picked(scores, wide.labels)).mean()
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return loss, dict(zip(problem.names, torch.autograd.grad(loss, wanted), strict=False))


@pytest.mark.parametrize(
    "situation", ("all active", "half inactive", "10% clipped", "frozen head", "on-policy", "realistic")
)
@pytest.mark.parametrize("task", ("logits", "hidden"))
def test_exact_answers_are_autograds(task, situation, monkeypatch):
    monkeypatch.setattr(
        judging, "row_chunks", lambda rows, *_: (slice(i, i + 17) for i in range(0, rows, 17))
    )
    problem = padded_problem(task) if situation == "realistic" else tiny_problem(task, situation)
    answer, (loss, gradients) = judging.answer(problem, "exact"), autograd(problem)
    assert answer.gradients.keys() == gradients.keys()
    torch.testing.assert_close(answer.loss.mean(), loss, rtol=1e-12, atol=0, check_dtype=False)
    for name, wanted in gradients.items():
        assert (answer.gradients[name] - wanted).abs().max() <= 1e-12 * wanted.abs().max()


def test_problems_are_what_their_names_say():
    def clipped(problem):
        return int((judging.coefficients(problem, problem.logprobs)[1] == 0).all(1).sum())

    twenty = hidden.draw("hidden", 40, 50, 8, 20, torch.float32)
    assert clipped(tiny_problem("hidden")) == 0 and clipped(twenty.situation("10% clipped")) == 2
    assert clipped(tiny_problem("hidden", "half inactive")) == SHAPE[3] // 2


# --- which contestants are timed


NAIVE = {"hidden": hidden.naive, "logits": logits.naive}


def spoil(index, change, problem, *leaves):
    """Run naive PyTorch with a changed gradient of one leaf."""
    changed = leaves[index].view_as(leaves[index])
    changed.register_hook(change)
    return NAIVE[problem.task](problem, *leaves[:index], changed, *leaves[index + 1 :])


def outcomes(task, calls, monkeypatch, problem, repeats=1, without=None, **about):
    """Run a case with these contestants alone; return results by name."""
    monkeypatch.setattr(measure, "CONTESTANTS", {})
    for name, call in calls.items():
        measure.contestant(name, task, **about)(lambda device, call=call: call)
    floor = hidden.PRODUCTS if task == "hidden" else {}
    case = measure.Case("case", lambda device: problem, {}, (".*",), floor, hidden.products)
    options = measure.Options(CPU, repeats=repeats, size="tiny", without=without or {})
    record = measure.run_case(case, options)
    return {result["contestant"]: result for result in record["results"]}


@pytest.mark.parametrize(("task", "make"), (("hidden", tiny_problem), ("logits", padded_problem)))
def test_only_a_right_contestant_has_a_time(task, make, monkeypatch):
    """Contestants that are wrong, fail or are skipped have a reason and no time."""
    count = itertools.count()

    def fails(problem, *leaves):
        raise RuntimeError("not for this shape\nand more")

    def tires(problem, *leaves):
        if next(count) == 3:
            raise RuntimeError("enough")
        return NAIVE[task](problem, *leaves)

    monkeypatch.setattr(measure, "_LEAST", 0.0)
    lost = functools.partial(spoil, 0, lambda grad: grad.index_fill(1, torch.tensor([0]), 0.0))
    others = {
        "a thousandth more": (functools.partial(spoil, 0, lambda grad: grad * 1.001), f"{task} is off by"),
        "a row lost": (lost, f"{task} is off by"),
        "loss not a number": (lambda *to: NAIVE[task](*to) * float("nan"), "loss is off by"),
        "loss off": (lambda *to: NAIVE[task](*to) + 1e-3, "loss is off by"),
        "fails": (fails, "RuntimeError: not for this shape"),
        "tires": (tires, "RuntimeError: enough"),
        "left out": (NAIVE[task], "broke the device"),
    }
    if task == "hidden":
        others["sign"] = (functools.partial(spoil, 1, torch.neg), "weight is off by")
    calls = {"honest": NAIVE[task], **{name: call for name, (call, _) in others.items()}}
    found = outcomes(task, calls, monkeypatch, make(task), 3, {"left out": "broke the device"})
    assert found["honest"]["status"] == "right" and len(found["honest"]["seconds"]["both"]) == 3
    kinds = {"fails": "refused", "tires": "refused", "left out": "missing"}
    for name, (_, why) in others.items():
        assert found[name]["status"] == kinds.get(name, "wrong") and "seconds" not in found[name], name
        assert why in found[name]["reason"]


@pytest.mark.parametrize("precision", ("float32", "input"))
def test_log_probs_are_judged_by_precision(precision, monkeypatch):
    problem = tiny_problem("scoring", dtype=torch.bfloat16)

    def rounded(problem, hidden, weight):
        return judging.picked(judging.project(hidden, weight, "input", native=False), problem.labels)

    found = outcomes("scoring", {"16-bit logits": rounded}, monkeypatch, problem, precision=precision)
    assert found["16-bit logits"]["status"] == ("right" if precision == "input" else "wrong")


def test_ratios_are_to_the_floor(monkeypatch):
    """Forward, backward and each of the floor's three products take one second."""
    ticks = iter(range(10_000))
    monkeypatch.setattr(measure, "_LEAST", 0.0)
    monkeypatch.setattr(measure.Clock, "mark", lambda self: self.marks.append(next(ticks)))
    calls = {"a": hidden.naive, "b": hidden.naive}
    for one in outcomes("hidden", calls, monkeypatch, tiny_problem("hidden"), 3).values():
        assert one["seconds"]["both"] == [2] * 3 and one["x_floor"]["median"] == pytest.approx(2 / 3)


def test_peak_memory_is_measured_in_a_process():
    """In place, no gradient is allocated; otherwise one of the logits' size is."""
    problem = logits.draw(256, 8000, 4, torch.float32)
    names = ("ours, cpp", "ours, cpp, in place")
    entrants = [measure.Entrant(measure.CONTESTANTS["logits", name], problem) for name in names]
    measure.measure_peaks_in_a_process(entrants, problem)
    plain, in_place = (one.record["peak_bytes"] for one in entrants)
    size = problem.inputs[0].numel() * 4
    assert 0.9 * size <= plain <= 1.3 * size and in_place <= 0.3 * size


def test_faults_are_not_missing_contestants():
    """Only other packages may be missing; a process that fails leaves the reason in the records."""
    for error, ours in itertools.product((AttributeError, ImportError), (True, False)):
        load = Mock(side_effect=error("renamed"))
        with pytest.raises(error if ours else measure.Missing, match="renamed"):
            measure.Contestant("new", "logits", load, ours=ours).get(CPU)
    problem = tiny_problem("logits")
    unknown = [measure.Entrant(measure.Contestant(name, "logits", autograd), problem) for name in "ab"]
    measure.measure_peaks_in_a_process(unknown, problem)
    for entrant in unknown:
        assert "KeyError" in entrant.record["reason"] and "peak_bytes" not in entrant.record


def test_a_step_judges_every_parameter():
    made = step.make(2, 6, 50, 64, 1, CPU, torch.float32)
    judge = step.StepJudge(made)
    contestant = measure.CONTESTANTS["hidden", "ours, auto"]
    *_, (loss, gradients) = measure.Entrant(contestant, made, contestant.get(CPU)).once(CPU)
    assert not judge.verdict(contestant, loss, gradients).complaint
    for index in (0, 5, len(judge.names) - 1):
        wrong = tuple(g * 1.01 if i == index else g for i, g in enumerate(gradients))
        assert judge.names[index] in judge.verdict(contestant, loss, wrong).complaint


@pytest.mark.parametrize("task", ("logits", "hidden", "scoring"))
def test_peers_on_a_cpu_compute_the_same(task):
    """Peers may use three times their allowance: on tiny problems rounding errors do not average out."""
    problem = padded_problem(task)
    judge, seen = Judge(problem), set()
    for contestant in measure.chosen_contestants(
        task, ("TRL.*|Liger.*",), measure.Options(CPU), torch.float32
    ):
        try:
            call = contestant.get(CPU)
        except measure.Missing:
            continue
        *_, results = measure.Entrant(contestant, problem.layout(contestant.layout), call).once(CPU)
        assert judge.verdict(contestant, *results).share < 3, contestant.name
        seen.add(contestant.name.split()[0])
    if not seen:
        pytest.skip("trl and liger-kernel are not installed")
