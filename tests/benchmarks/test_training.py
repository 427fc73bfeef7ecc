"""Whole steps: everyone's gradients are right, who is wrong or does other work has no time."""

import dataclasses
import importlib.util
import json
import os

import pytest
import torch

from benchmarks import __main__ as command_line
from benchmarks import compare, plain_loop, registry, report, trainers, training
from benchmarks.registry import CONTESTANTS

CPU = torch.device("cpu")
TINY = trainers.Setting(100, 32, 1, 6, 4, prompts=5, group=2, minibatches=2)
PLAIN = "plain PyTorch loop"
TRL = "TRL GRPOTrainer"
EVERYONE = [name for name, one in CONTESTANTS.items() if "training" in one.tasks]


@pytest.fixture(scope="module")
def judge():
    return training.TrainingJudge(TINY)


@pytest.mark.parametrize("name", EVERYONE)
def test_everyone_has_the_gradients_of_the_plain_loop_in_fp64(name, judge):
    if "TRL" in name and importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed")
    verdict = judge.verdict(training.gradients(CONTESTANTS[name].get(CPU), judge.setting))
    assert set(verdict.errors) == {"update 1", "update 2"}
    assert not verdict.complaint


def test_what_is_judged_has_sequences_of_all_kinds(judge, monkeypatch):
    """Without an advantage, clipped above and below, and inside: in the second update."""
    seen = []

    def spy(logprobs, old, advantages, mask):
        seen.append((((logprobs - old) * mask).sum(1) / mask.sum(1), advantages))
        return plain_loop_loss(logprobs, old, advantages, mask)

    plain_loop_loss = plain_loop.gspo_loss
    monkeypatch.setattr(plain_loop, "gspo_loss", spy)
    training.gradients(CONTESTANTS[PLAIN].get(CPU), judge.setting)
    assert bool((seen[0][0] == 0).all())
    log_s, advantages = seen[1]
    above = (log_s > plain_loop.CLIP_HIGH) & (advantages > 0)
    below = (log_s < -plain_loop.CLIP_LOW) & (advantages < 0)
    inside = ~above & ~below & (advantages != 0)
    assert (advantages == 0).sum() == 4
    assert above.any() and below.any() and inside.sum() >= 2
    # none so near to a bound that rounding decides
    bounds = torch.tensor([plain_loop.CLIP_HIGH, -plain_loop.CLIP_LOW]).log1p()
    assert (log_s.unsqueeze(1) - bounds).abs().min() > 1e-5


def tokenwise(logprobs, old, advantages, mask):
    """GRPO's loss."""
    ratio, advantages = (logprobs - old).exp(), advantages.unsqueeze(1)
    clipped = ratio.clamp(1 - plain_loop.CLIP_LOW, 1 + plain_loop.CLIP_HIGH)
    return -torch.min(ratio * advantages, clipped * advantages).mean()


def unclipped(logprobs, old, advantages, mask):
    return -((((logprobs - old) * mask).sum(1) / mask.sum(1)).exp() * advantages).mean()


LOSSES = {
    "ratios of tokens": (tokenwise, "update 2"),
    "nothing clipped": (unclipped, "update 2"),
    "a thousandth more": (lambda *terms: 1.001 * PLAIN_LOSS(*terms), "update 1"),
    "other old log-probs": (lambda new, old, *more: PLAIN_LOSS(new, old + 1e-3, *more), "update 1"),
}
PLAIN_LOSS = plain_loop.gspo_loss


@pytest.mark.parametrize("wrong", LOSSES)
def test_a_wrong_loss_is_red(wrong, judge, monkeypatch):
    loss, update = LOSSES[wrong]
    monkeypatch.setattr(plain_loop, "gspo_loss", loss)
    verdict = judge.verdict(training.gradients(CONTESTANTS[PLAIN].get(CPU), judge.setting))
    assert f"{update} is off by" in verdict.complaint


def test_missing_updates_and_parameters_are_red(judge):
    right = judge.exact
    assert "1 updates instead of 2" in judge.verdict(right[:1]).complaint
    name = next(iter(right[1]))
    lost = [right[0], {other: value for other, value in right[1].items() if other != name}]
    nan = [right[0], right[1] | {name: right[1][name] * torch.nan}]
    for found in (lost, nan):
        assert judge.verdict(found).complaint.startswith("update 2 is off by inf")


# --- the suite


def run(tmp_path, *options):
    arguments = ["run", "training", "--size", "tiny", "--repeats", "2", "--out", str(tmp_path), *options]
    assert command_line.main(arguments) == 0
    return json.loads((tmp_path / "training.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A rehearsal's results."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("results")
    run(out, "--contestants", "ours, packed rows", PLAIN)
    torch.set_num_threads(threads)
    return out


def test_a_rehearsal(folder):
    record = json.loads((folder / "training.json").read_text())
    every, some = record["cases"]
    assert (every["name"], some["name"]) == ("V=100, every prompt counts", "V=100, 2 of 5 prompts flat")
    for case in (every, some):
        names = {one["contestant"]: one["status"] for one in case["results"]}
        assert names == {"ours, packed rows": "right", PLAIN: "right"}
    assert all(one["peak_bytes"] > 0 for one in every["results"])
    for one in every["results"] + some["results"]:
        seconds = one["seconds"]
        assert list(seconds) == ["rollout", "update", "both"]
        assert {len(values) for values in seconds.values()} == {2}
        for rollout, update, both in zip(
            *(seconds[name] for name in ("rollout", "update", "both")), strict=True
        ):
            assert rollout > 0 and update > 0 and rollout + update == pytest.approx(both, rel=1e-3)
        speeds = sorted(TINY.tokens / both for both in seconds["both"])
        assert one["tokens_per_second"]["low"] == pytest.approx(speeds[0], rel=1e-3)


def test_a_report_on_steps(folder, capsys):
    assert command_line.main(["report", "--results", str(folder)]) == 0
    text = (folder / "benchmarks.md").read_text()
    assert "| rollout | update | tokens/s | x ours, packed rows |" in text
    case = json.loads((folder / "training.json").read_text())["cases"][0]
    assert compare.ratios(case)["ours, packed rows"] == {"median": 1, "low": 1, "high": 1}
    assert report.TRAINING in text


def test_trl_that_is_missing_says_so(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "trl" else find(name)
    )
    record = run(tmp_path, "--contestants", "TRL", "--cases", "every", "--no-memory")
    results = record["cases"][0]["results"]
    assert len(results) == 2
    for one in results:
        assert (one["status"], one["reason"]) == ("missing", "trl is not installed")
        assert "seconds" not in one


def _load_dying(device):
    return _dies


def _dies(setting, model, turns):
    os._exit(3)


def test_a_process_that_dies_is_refused(judge):
    """And its contestant has another one in the next case."""
    entrant = training.Entrant(registry.Contestant("it", ("training",), _load_dying), registry.Options(CPU))
    entrant.begin(judge.setting)
    entrant.be_judged(judge)
    assert entrant.record["status"] == "refused" and "status 3" in entrant.record["reason"]
    assert not entrant.right and not entrant.workers


class Answers:
    """A worker that has its answers ready."""

    def __init__(self, *answers):
        self.answers = iter(answers)

    def ask(self, *request):
        return next(self.answers)

    def close(self):
        pass


def test_other_work_is_refused():
    done = {"seconds": {"both": 1.0}, "tokens": TINY.tokens, "updates": TINY.updates}
    for change in ({"tokens": TINY.tokens - 1}, {"updates": TINY.updates + 1}):
        entrant = training.Entrant(CONTESTANTS[PLAIN], registry.Options(CPU))
        entrant.record = {"status": "right"}
        entrant.workers[False] = Answers(done, done | change)
        entrant.step(TINY, counts=True)
        assert entrant.right and entrant.record["seconds"] == {"both": [1.0]}
        entrant.step(TINY, counts=True)
        assert entrant.record["status"] == "refused"
        assert f"expected {TINY.tokens} and {TINY.updates}" in entrant.record["reason"]


def test_on_a_gpu_it_refuses():
    with pytest.raises(SystemExit, match="on the CPU only"):
        training.training(registry.Options(torch.device("cuda")))


def test_flat_prompts_have_one_reward():
    setting = dataclasses.replace(TINY, flat=2)
    turns = trainers.Turns(lambda done: True)
    prompts = [prompt for prompt in trainers.make_prompts(setting) for _ in range(2)]
    ids = trainers.given_completions(setting, [[number // 2] for number in range(10)])
    rewards = torch.tensor(trainers.make_reward(setting, turns)(prompts, [], ids)).view(5, 2)
    assert (rewards[:2] == 0).all() and (rewards[2:].std(1) > 0).all()
    assert turns.tokens == setting.tokens
