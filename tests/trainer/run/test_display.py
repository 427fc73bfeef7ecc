"""Metrics files, warnings, the display without a terminal and with one, and the plot."""

import io
import json
import math

import pytest
from rich.console import Console

from gspo_kernels.trainer.config import TrainConfig
from gspo_kernels.trainer.run.config_file import from_mapping
from gspo_kernels.trainer.run.display import Display, evaluation_line, summary_line
from gspo_kernels.trainer.run.health import Health
from gspo_kernels.trainer.run.metrics import append_metrics, keep_until, read_metrics
from gspo_kernels.trainer.run.plot import panels, plot_progress, smoothed

STEP = {
    "step": 1,
    "reward/mean": 0.25,
    "groups_without_variance": 0.5,
    "ratio/min": 0.99,
    "ratio/max": 1.01,
    "clip_fraction/low": 0.1,
    "clip_fraction/high": 0.2,
    "entropy": 1.5,
    "tokens_per_second": 1234.0,
}


def test_metrics_are_finite_or_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_metrics(path, {"step": 1, "a": math.nan, "b": -math.inf, "c": 0.5, "d": None})
    assert path.read_text() == '{"step": 1, "a": null, "b": null, "c": 0.5, "d": null}\n'


def test_a_line_cut_short_by_a_crash_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in range(4):
        append_metrics(path, {"step": step})
    with path.open("a") as file:
        file.write('{"step": 4, "rew')
    assert [record["step"] for record in read_metrics(path)] == [0, 1, 2, 3]
    keep_until(path, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_warnings_come_after_some_steps_and_once():
    health = Health(patience=3)
    fine = {"reward/mean": 0.5, "groups_without_variance": 0.5, "completions/finished": 0.5}
    flat = fine | {"groups_without_variance": 1.0}
    assert [len(health.check(metrics)) for metrics in (flat, flat, fine, flat, flat, flat, flat)] == [
        0, 0, 0, 0, 0, 1, 0,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("symptom", "words"),
    [
        ({"groups_without_variance": 1.0}, "nothing can be learned"),
        ({"clip_fraction/after_first": 0.99}, "clipped"),
        ({"completions/finished": 0.0}, "truncated"),
        ({"reward/mean": None}, "no reward applies"),
        ({"updates_left_out": 1.0}, "not finite"),
        ({"minibatch_2/ratio/max": 1.0, "ratio/min": 1.0, "ratio/max": 1.0}, "do not change the policy"),
        ({"mismatch/mean": 0.2, "mismatch/ratio": 1.0}, "mismatch/mean"),
        ({"mismatch/mean": 0.01, "mismatch/ratio": 0.85}, "ratio from 1, is at least 0.1"),
    ],
)
def test_every_symptom_has_words(symptom, words):
    health = Health(patience=1, mismatch=0.1)
    fine = {"reward/mean": 0.5, "groups_without_variance": 0.5, "completions/finished": 0.5}
    assert health.check(fine) == []
    (warning,) = health.check(fine | symptom)
    assert words in warning


def test_what_looks_like_a_symptom_and_is_none():
    """Ratios of 1 where no reward differs or there is one minibatch; rounding; a mismatch that is meant."""
    still = {"ratio/min": 1.0, "ratio/max": 1.0, "groups_without_variance": 0.5}
    for metrics in (
        still,
        still | {"minibatch_2/ratio/max": None, "ratio/min": None, "ratio/max": None},
        still | {"minibatch_2/ratio/max": 1.01, "ratio/max": 1.01},
        {"mismatch/mean": 0.05, "mismatch/ratio": 0.95},
        {"mismatch/mean": None, "mismatch/ratio": None},
    ):
        assert Health(patience=1, mismatch=0.1).check(metrics) == []
    equal = still | {"minibatch_2/ratio/max": 1.0, "groups_without_variance": 1.0}
    (equal,) = Health(patience=1).check(equal)
    assert "all rewards are equal" in equal
    assert Health(patience=1).check({"mismatch/mean": 9.0, "mismatch/ratio": 9.0}) == []


def test_steps_without_a_rollout_interrupt_no_symptom():
    health = Health(patience=3)
    flat, dpo = {"groups_without_variance": 1.0}, {"phase": 1.0, "loss": 0.69}
    assert [len(health.check(metrics)) for metrics in (flat, dpo, flat, dpo, dpo, flat)] == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("sections", "bound"),
    [
        ({}, 1e-3),
        ({"update": {"precision": "bf16"}}, 0.1),
        ({"rollout": {"top_k": 5}}, None),
        ({"rollout": {"top_p": 0.9}}, None),
        ({"rollout": {"top_p": 0.9, "keep_sampling_mask": True}}, 1e-3),
    ],
)
def test_the_bound_of_a_mismatch_follows_the_run(sections, bound):
    assert Health.of(from_mapping(sections, TrainConfig)).mismatch == bound


def test_plain_lines_without_a_terminal():
    out = io.StringIO()
    with Display(20, console=Console(file=out, width=300), log_every=5) as display:
        display.step(0, {"eval/greedy_accuracy": 0.5, "eval/sampled_accuracy": None})
        for step in range(1, 21):
            display.step(step, STEP | {"step": step})
        display.warn("[watch] out")
    lines = out.getvalue().splitlines()
    assert lines[0] == "step 0/20  held-out accuracy: greedy 50.0%, sampled -"
    assert [line.split()[1] for line in lines[1:5]] == ["5/20", "10/20", "15/20", "20/20"]
    for words in (
        "reward 0.250",
        "groups 50%",
        "ratio 0.9900..1.0100",
        "10% low 20% high",
        "1,234 tok/s",
    ):
        assert words in lines[1]
    assert lines[-1] == "warning: [watch] out"


def test_lines_of_phases():
    out = io.StringIO()
    dpo = {"phase": 1.0, "pairs": 34.0, "groups_with_pairs": 0.875, "loss": 0.6, "grad_norm": 1.5}
    with Display(2, console=Console(file=out, width=300), log_every=1) as display:
        display.step(1, STEP | {"phase": 0.0})
        display.step(2, dpo)
    first, second = out.getvalue().splitlines()
    assert "policy phase  reward 0.250" in first
    assert "DPO phase  pairs 34 in 88% of the groups  loss 0.6000" in second


def test_live_display_on_a_terminal():
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    with Display(3, console=console) as display:
        display.step(0, {"eval/greedy_accuracy": 0.5, "eval/sampled_accuracy": 0.25})
        display.step(1, STEP)
        display.live.refresh()
    assert "reward 0.250" in out.getvalue()
    assert "greedy 50.0%" in out.getvalue()


def test_table_of_samples():
    out = io.StringIO()
    display = Display(3, console=Console(file=out, width=200))
    display.samples(4, [("2+2=", "4[/b]", 1.0), ([{"role": "user", "content": "hi"}], "x" * 999, -0.5)])
    text = out.getvalue()
    for words in ("step 4", "2+2=", "4[/b]", "1.000", "hi", "[...]", "-0.500"):
        assert words in text
    out.truncate(0)
    display.samples(5, [])
    assert not out.getvalue().strip("\0")


def test_table_of_gains():
    out = io.StringIO()
    display = Display(3, console=Console(file=out, width=100))
    before = {"eval/greedy_accuracy": 0.25, "eval/sampled_accuracy": 0.1}
    display.accuracy_table("title", before, {"eval/greedy_accuracy": 0.75, "eval/sampled_accuracy": None})
    assert "+50.0 points" in out.getvalue()


def test_lines_without_values():
    assert "reward -" in summary_line({})
    assert "greedy -" in evaluation_line({})


@pytest.mark.parametrize("evaluated", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 40])
def test_plot_of_any_run(tmp_path, steps, evaluated):
    records = [{"step": 0}]
    for step in range(1, steps + 1):
        record = STEP | {"step": step, "reward/mean": None if step == 3 else step / 40}
        record |= {f"minibatch_{n}/clip_fraction/{side}": 0.1 * n for n in (1, 2) for side in ("low", "high")}
        records.append(record)
    if evaluated:
        for record in records[::2]:
            record |= {"eval/greedy_accuracy": 0.5, "eval/sampled_accuracy": 0.25}
    plot_progress(records, tmp_path / "plots" / "progress.png")
    assert (tmp_path / "plots" / "progress.png").read_bytes().startswith(b"\x89PNG")
    titles = [title for title, _ in panels(records)]
    assert ("Accuracy on held-out prompts" in titles) == evaluated
    assert ("Clipped share by minibatch" in titles) == ("Entropy, nats per token" in titles) == (steps > 0)
    assert "Gradient norm before clipping" not in titles and "DPO's loss" not in titles


def test_plot_of_everything(tmp_path):
    """Every metric has a panel, and a panel shows what its metric says."""
    from matplotlib.figure import Figure

    everything = STEP | {
        "reward/a": 0.5, "reward/b": 0.0, "completions/finished": 0.75, "completions/length": 9.0,
        "kl/ref": 0.1, "kl/old": 0.2, "grad_norm": 3.0, "mismatch/mean": 1e-6, "mismatch/max": 1e-5,
        "seconds/rollout": 2.0,
        "seconds/update": 3.0, "minibatch_1/clip_fraction/low": 0.125, "minibatch_1/clip_fraction/high": 0.25,
    }  # fmt: skip
    records = [everything | {"step": step} for step in range(1, 7)]
    records += [{"step": 7, "phase": 1.0, "loss": 0.5}, {"step": 7, "phase": 1.0, "loss": None}]
    plot_progress(records, tmp_path / "progress.png")
    shown = {}
    for title, draw in panels(records):
        ax = Figure().subplots()
        draw(ax)
        lines = {line.get_label(): line.get_ydata()[-1] for line in ax.get_lines()}
        shown[title] = {label: y for label, y in lines.items() if not label.startswith("_")}
    assert len(shown) == 12
    assert shown["Mean reward of the rollouts"] == {"weighted sum": 0.25, "a": 0.5, "b": 0.0}
    assert shown["Shares of a rollout"] == {"groups without variance": 0.5, "truncated completions": 0.25}
    assert shown["Clipped share by minibatch"] == {"minibatch 1": 0.375}
    assert shown["Largest and smallest ratio of a step"] == {"largest": 1.01, "smallest": 0.99}
    assert "KL to the reference, nats per token" in shown


def test_smoothing_skips_what_is_missing():
    assert smoothed([1.0, None, 3.0, 5.0], 2) == [1.0, 1.0, 3.0, 4.0]
    assert math.isnan(smoothed([None], 2)[0])
