"""The reproduction of the paper runs at a tiny size, and its page says what its results say."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch

from examples.paper import __main__ as paper
from examples.paper import probe, report
from examples.paper.models import make_start, routers
from examples.paper.old_logprobs import changed_experts, parse
from examples.paper.probe import gradient, sample_batch
from examples.paper.training import OBJECTIVES
from gspo_kernels.trainer import demo
from gspo_kernels.trainer.model import Policy
from tests.draws import shifted_seed

PAGE = Path(paper.__file__).parent
TINY = {"seeds": 0, "steps": 2, "prompts": 4, "held-out": 8, "warm-up": 20, "lengths": 5}


@pytest.fixture(scope="module")
def moe():
    rows, _ = demo.make_rows(0)
    model, tokenizer = make_start("moe", rows, seed=0, warm_up_steps=1)
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows[:8]]
    torch.manual_seed(shifted_seed(0))
    return Policy(model, temperature=1.0), sample_batch(model, tokenizer, prompts, 5)


def test_a_tiny_run_writes_results_and_plots_and_continues(tmp_path, monkeypatch):
    sources = {"dense": ("exact",), "moe": ("exact", "routing=0.5")}
    monkeypatch.setattr(paper, "SOURCES", sources)
    monkeypatch.setattr(probe, "SOURCES", {"dense": ("bf16",), "moe": ("routing=0.5",)})
    monkeypatch.setattr(probe, "SEQUENCES", 8)
    arguments = ["--output", str(tmp_path), *(f"--{name}={value}" for name, value in TINY.items())]
    paper.main(arguments)
    records = paper.read(tmp_path / "results.jsonl")
    runs = [record for record in records if record["kind"] == "run"]
    assert len(runs) == 8
    for run in runs:
        # None: a minibatch whose groups all lack variance
        clipped = torch.tensor([[value or 0.0 for value in step] for step in run["clip_tokens"]])
        assert clipped.shape == (2, 4) and clipped.min() >= 0 and clipped.max() <= 1
        assert len(run["reward"]) == 2 and all(0 <= reward <= 1 for reward in run["reward"])
        changed = torch.tensor([step or [math.nan] * 4 for step in run["experts_changed"]])
        assert changed.numel() == (8 if run["model"] == "moe" else 0)
        changed = changed[~changed.isnan()].view(-1, 4)
        if run["objective"] == "GSPO, GRPO's range":
            assert run["old_logprobs"] == "exact"
        if run["old_logprobs"] == "exact":
            assert (clipped[:, 0] == 0).all() and (changed[..., :1] == 0).all()
        if run["old_logprobs"].startswith("routing"):
            assert (changed[:, 0] > 0).all()
    for name in ("training.png", "perturbation.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    before = (tmp_path / "results.jsonl").read_text()
    paper.main(arguments)
    assert (tmp_path / "results.jsonl").read_text() == before


@pytest.mark.parametrize("source", ["bf16", "noise=0.02", "routing=0.5"])
def test_a_source_differs_only_while_it_is_open(moe, source):
    policy, batch = moe
    exact, _ = probe.score(policy, batch, "exact")
    torch.manual_seed(shifted_seed(1))
    old, _ = probe.score(policy, batch, source)
    difference = (old.double() - exact.double()).abs().max()
    assert 0 < difference < 0.5
    assert torch.equal(probe.score(policy, batch, "exact")[0], exact)


def test_noise_has_the_deviation_that_was_asked_for(moe):
    torch.manual_seed(shifted_seed(0))
    with parse("noise=0.05")(moe[0]) as (_, on_logprobs):
        drawn = on_logprobs(torch.zeros(20_000))
    # five standard errors of a deviation from 20,000 draws
    assert abs(float(drawn.std()) / 0.05 - 1) < 5 / (2 * 20_000) ** 0.5
    for source in ("fp8", "noise", "noise=x", "routing=-1"):
        with pytest.raises(ValueError, match="old log-probs"):
            parse(source)


def test_changed_experts_counts_what_left(moe):
    policy, batch = moe
    before = [torch.tensor([[0, 1], [2, 3]]), torch.tensor([[4, 5], [6, 7]])]
    after = [torch.tensor([[1, 0], [2, 5]]), torch.tensor([[4, 5], [0, 1]])]
    assert changed_experts(before, after) == 3 / 8
    _, passes = probe.score(policy, batch, "exact")
    assert len(passes) == 1 and len(passes[0]) == len(routers(policy.model)) == 3


def test_before_any_update_both_objectives_have_the_policy_gradient(moe):
    policy, batch = moe
    exact, _ = probe.score(policy, batch, "exact")
    parameters = list(policy.parameters())
    mean = policy(batch["prompts"], batch["completions"]).logprobs.view(8, 5).mean(1)
    plain = torch.autograd.grad(-(mean * batch["advantages"]).mean(), parameters, materialize_grads=True)
    plain = torch.cat([each.flatten() for each in plain]).double()
    for objective in OBJECTIVES.values():
        found, clipped = gradient(policy, batch, exact, objective)
        assert clipped == 0
        assert torch.nn.functional.cosine_similarity(found, plain, dim=0) > 1 - 1e-6
        assert abs(found.norm() / plain.norm() - 1) < 1e-4


def test_the_committed_page_is_what_its_results_say():
    text = (PAGE / "README.md").read_text()
    for line in (PAGE / "results.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # no NaN
    records = paper.read(PAGE / "results.jsonl")
    assert text.count("<!-- end -->") == 4
    assert report.renewed(text, records) == text
    wrong = copy.deepcopy(records)
    next(record for record in wrong if record["kind"] == "run")["reward"][-1] += 1
    assert report.renewed(text, wrong) != text


def test_the_cosines_in_the_text_are_those_of_the_results():
    """Means of the seeds at each length, and single seeds, of the probes with other experts."""
    text = " ".join((PAGE / "README.md").read_text().split())
    found = {}
    for record in paper.read(PAGE / "results.jsonl"):
        for entry in record.get("entries", ()) if record["kind"] == "probe" else ():
            if entry["old_logprobs"] == "routing=0.2":
                found.setdefault((entry["objective"], entry["length"]), []).append(entry["cosine"])
    for objective, sentence in (
        ("GSPO, GRPO's range", "(cosine {}, means of two seeds at each of three lengths; {} in single"),
        ("GRPO", "(means {}; {} in single"),
    ):
        groups = [values for (name, _), values in found.items() if name == objective]
        assert [len(values) for values in groups] == [2, 2, 2]
        means, single = [sum(values) / 2 for values in groups], [v for values in groups for v in values]
        ranges = [f"{min(values):.2f} to {max(values):.2f}" for values in (means, single)]
        assert sentence.format(*ranges) in text
