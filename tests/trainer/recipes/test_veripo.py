"""VerIPO: phases, pairs and reference by hand, restart in the middle of them, and what it learns."""

import copy
import math

import pytest
import torch

from examples.recipes import veripo
from gspo_kernels.objectives import DPO
from gspo_kernels.trainer import GSPOTrainer
from gspo_kernels.trainer.config import TrainConfig, VeriPOConfig
from gspo_kernels.trainer.input_errors import ConfigError, RewardError
from gspo_kernels.trainer.recipes.veripo import combined, in_pairs
from gspo_kernels.trainer.rows.experience import Experience
from gspo_kernels.trainer.run.config_file import from_mapping
from gspo_kernels.trainer.run.metrics import read_metrics
from tests.forks import in_processes
from tests.trainer.conftest import letter_share, make_accelerator, small_config, tiny_qwen3
from tests.trainer.run.test_processes import fsdp2, vector
from tests.trainer.run.test_restart import outcome
from tests.trainer.test_trainer import same, weights

NAN = math.nan
SEEN = []


def judge(prompts, completions, completion_ids, *, letter):
    """Prefers small token ids, so it disagrees with `letter_share` often."""
    SEEN.append((list(prompts), list(letter), list(completion_ids)))
    return [-sum(ids) / len(ids) for ids in completion_ids]


def goes_on(completions, **columns):
    return ["?"] * len(completions)


def indifferent(completions, **columns):
    return [0.5] * len(completions)


def wants_a_column(completions, *, color, **columns):
    return [0.0] * len(completions)


VERIPO = {"grpo_steps": 3, "dpo_steps": 2, "verifier": f"{__name__}:judge"}


def make_trainer(output, tokenizer, rows, *, accelerator=None, **sections):
    sections["veripo"] = VERIPO | sections.get("veripo", {})
    sections["update"] = {"steps": 8, "micro_batch_tokens": 40} | sections.get("update", {})
    config = small_config(output, **sections)
    model = tiny_qwen3(tokenizer)
    return GSPOTrainer(model, tokenizer, letter_share, rows, rows[:2], config, accelerator=accelerator)


def test_phases():
    config = VeriPOConfig(grpo_steps=3, dpo_steps=2)
    steps = range(1, 12)
    assert "".join("GD"[config.compares(step)] for step in steps) == "GGGDDGGGDDG"
    assert "".join(".k"[config.keeps(step)] for step in steps) == ".kk...kk..."
    assert [config.rollouts_until(step) for step in range(12)] == [0, 1, 2, 3, 3, 3, 4, 5, 6, 6, 6, 7]
    off = VeriPOConfig()
    assert not any(off.compares(step) or off.keeps(step) for step in range(1, 100))
    assert [off.rollouts_until(step) for step in range(100)] == list(range(100))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"veripo": {"dpo_steps": 21}}, ["veripo.dpo_steps", "0 to veripo.grpo_steps (20)"]),
        ({"veripo": {"grpo_steps": 0}}, ["veripo.grpo_steps", "at least 1"]),
        ({"veripo": {"dpo_steps": 1, "beta": 0}}, ["veripo.beta", "above 0"]),
        ({"veripo": {"dpo_steps": 1, "min_gap": -1}}, ["veripo.min_gap"]),
        ({"veripo": {"dpo_steps": 1, "reward_weight": 0}}, ["veripo.reward_weight", "no veripo.verifier"]),
        ({"veripo": {"verifier": "a:b"}}, ["veripo.dpo_steps", "above 0", "verifier"]),
        ({"veripo": {"dpo_steps": 1}, "kl": {"beta": 0.1}}, ["veripo.dpo_steps", "kl.beta 0.1"]),
        ({"veripo": {"dpo_steps": 1}, "objective": {"name": "TRPA"}}, ["veripo.dpo_steps", "TRPA"]),
        (
            {"veripo": {"dpo_steps": 1}, "update": {"minibatches": 64}},
            ["veripo.dpo_steps", "update.minibatches", "32 prompts"],
        ),
    ],
)
def test_what_does_not_fit_is_refused(sections, words):
    with pytest.raises(ConfigError) as caught:
        from_mapping(sections, TrainConfig)
    for word in words:
        assert word in str(caught.value)


def test_scores_of_rewards_and_verifier():
    rewards, judged = torch.tensor([1.0, 0.0, NAN, 1.0]), torch.tensor([0.25, 0.5, 0.5, NAN])
    expected = [
        (combined(rewards, None, 2.0), [2.0, 0.0, NAN, 2.0]),
        (combined(rewards, judged, 2.0), [2.25, 0.5, NAN, NAN]),
        (combined(rewards, judged, 0.0), [0.25, 0.5, 0.5, NAN]),
    ]
    for found, values in expected:
        torch.testing.assert_close(found, torch.tensor(values), rtol=0, atol=0, equal_nan=True)


def test_pairs_by_hand():
    """Two groups of four: what has no score or no counted token is in no pair, nor is what has no rival."""
    scores = torch.tensor([1.0, 0.0, NAN, 0.9, 0.5, 0.5, 0.5, 9.0])
    mask = torch.ones(16, dtype=torch.bool)
    mask[14:] = False  # truncated, and masked for it
    tokens = [torch.tensor([1, 2])] * 8
    experience = Experience(tokens, tokens, torch.randn(8), mask, torch.arange(8) // 4, torch.randn(16))
    found = in_pairs(DPO(min_gap=0.5), experience, scores)
    assert found.counted.bool().tolist() == [True, True, False, True, False, False, False, False]
    assert found.loss_mask[:2].all()
    assert found.rollout_logprobs is None and found.ref_logprobs is None
    present = found.counted > 0
    # the first and the fourth beat the second, but are too near to each other
    assert DPO(min_gap=0.5).count_pairs(found.advantages.double(), found.group_ids, present) == 2
    wide = in_pairs(DPO(min_gap=0.95), experience, scores)
    assert wide.counted.nonzero().flatten().tolist() == [0, 1]


def test_what_a_run_does(tmp_path, tokenizer, rows):
    SEEN.clear()
    trainer = make_trainer(tmp_path / "run", tokenizer, rows)
    trainer.train()
    plain = make_trainer(
        tmp_path / "plain", tokenizer, rows, veripo={"dpo_steps": 0, "verifier": None}, update={"steps": 3}
    )
    plain.train()
    first, *records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert "phase" not in first
    assert [record["phase"] for record in records] == [0, 0, 0, 1, 1, 0, 0, 0]
    assert ["reward/mean" in record for record in records] == [record["phase"] == 0 for record in records]
    # the verifier sees the rollouts that DPO will take, whole, with the columns of the data, and nothing else
    assert ["verifier/mean" in record for record in records] == [False, True, True] + [False] * 3 + [True] * 2
    assert [len(prompts) for prompts, _, _ in SEEN] == [12] * 4
    assert all([prompt[0] for prompt in prompts] == letters for prompts, letters, _ in SEEN)
    # without KL or entropy a first phase is that of a plain run
    for mine, other in zip(records[:3], read_metrics(tmp_path / "plain" / "metrics.jsonl")[1:], strict=True):
        assert other["reward/mean"] == mine["reward/mean"] and other["loss"] == mine["loss"]
    # the policy that a phase of DPO begins with is its reference: no pair is decided yet
    for place in (3, 4):
        assert records[place]["pairs"] > 0 and 0 < records[place]["groups_with_pairs"] <= 1
    assert records[3]["minibatch_1/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert records[3]["minibatch_1/ratio/min"] == records[3]["minibatch_1/ratio/max"] == 1.0
    assert records[4]["minibatch_1/loss"] != pytest.approx(math.log(2), rel=1e-6)
    assert "mismatch/mean" in records[2] and "mismatch/mean" not in records[3]
    # every step takes its optimizer updates
    assert trainer.updater.scheduler.last_epoch == 8 * 2


def test_steps_of_dpo_skip_no_prompt(tmp_path, tokenizer, rows):
    """Six prompts, three to a rollout: two rollouts see all of them, whatever steps lie between."""
    trainer = make_trainer(tmp_path, tokenizer, rows, veripo={"grpo_steps": 1, "dpo_steps": 1})
    seen = []
    for trainer.step in (1, 3):
        experience, _ = trainer.rollout()
        seen += [tokenizer.decode(prompt) for prompt in experience.prompts[::4]]
    assert sorted(seen) == sorted(row["prompt"] for row in rows)


@pytest.mark.parametrize("sections", [{}, {"lora": {"rank": 2}, "update": {"learning_rate": 0.05}}], ids=str)
def test_gradient_and_reference_against_plain_pytorch(tmp_path, tokenizer, rows, sections):
    """The second DPO step, with a copy of the policy at the start of its phase as the reference."""
    if "lora" in sections:
        pytest.importorskip("peft")
    trainer = make_trainer(tmp_path, tokenizer, rows, **sections)
    for trainer.step in (1, 2, 3):
        trainer.updater.update(trainer.rollout()[0], trainer.step)
    reference = copy.deepcopy(trainer.model)
    trainer.recipe.updater.update(trainer.recipe.pairs(4)[0], 4)
    experience, metrics = trainer.recipe.pairs(5)
    updater, found = trainer.recipe.updater, []
    parameters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}

    def stop():
        found.append({name: p.grad.clone() for name, p in parameters.items()})
        updater.optimizer.zero_grad()
        return {}

    updater._step = stop
    updater.update(experience, 5)
    scores = -experience.advantages
    pairs = 0
    for rows_, gradients in zip(updater._minibatches(experience, 5), found, strict=True):
        losses = []
        for group in experience.group_ids[rows_].unique():
            chosen = [i for i in rows_.tolist() if experience.group_ids[i] == group]
            for i in chosen:
                for j in chosen:
                    if scores[i] > scores[j]:
                        ours, theirs = (
                            plain_logprob(model, experience, i) - plain_logprob(model, experience, j)
                            for model in (trainer.model, reference)
                        )
                        losses.append(-torch.nn.functional.logsigmoid(0.1 * (ours - theirs.detach())))
        pairs += len(losses)
        trainer.model.zero_grad()
        torch.stack(losses).mean().backward()
        for name, p in parameters.items():
            torch.testing.assert_close(gradients[name], p.grad, atol=2e-6, rtol=2e-4)
        trainer.model.zero_grad()
    assert metrics["pairs"] == pairs > 0


def plain_logprob(model, experience, row):
    prompt, completion = experience.prompts[row], experience.completions[row]
    logits = model(torch.cat([prompt, completion]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, completion.unsqueeze(-1)).sum()


@pytest.mark.parametrize(
    "sections",
    [{}, {"lora": {"rank": 2}, "update": {"learning_rate": 0.05, "epochs": 2}}],
    ids=["weights", "adapters"],
)
@pytest.mark.parametrize("stop", [2, 4], ids=["while rollouts are kept", "between two steps of DPO"])
def test_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path, tokenizer, rows, stop, sections):
    if "lora" in sections:
        pytest.importorskip("peft")
    update = sections.get("update", {})
    for name, steps, resume in (("straight", 6, False), ("stopped", stop, False), ("stopped", 6, True)):
        changes = sections | {"update": update | {"steps": steps}}
        trainer = make_trainer(tmp_path / name, tokenizer, rows, evaluation={"every": 100}, **changes)
        if name == "straight":
            trainer.train()
            straight = weights(trainer.model)
        else:
            trainer.train(resume=resume)
    assert same(weights(trainer.model), straight)
    records = [outcome(tmp_path / name)[0] for name in ("straight", "stopped")]
    plain = [[{k: v for k, v in r.items() if not k.startswith("eval")} for r in each] for each in records]
    assert plain[0] == plain[1]


@pytest.mark.parametrize(
    ("sections", "groups"),
    [
        ({"igrpo": {"drafts": 2, "template": "{prompt};{draft};"}}, 3),
        ({"turns": {"count": 2, "feedback": f"{__name__}:goes_on"}}, 6),
    ],
    ids=["igrpo", "turns"],
)
def test_pairs_of_recipes(tmp_path, tokenizer, rows, sections, groups):
    """Of refinements, and within turns."""
    trainer = make_trainer(tmp_path, tokenizer, rows, **sections)
    for trainer.step in (1, 2, 3):
        rollout, _ = trainer.rollout()
    for _ in range(2):
        experience, metrics = trainer.recipe.pairs(4)
    assert torch.equal(torch.cat(list(experience.prompts)), torch.cat(list(rollout.prompts)))
    assert experience.group_ids.unique().numel() == groups
    assert 0 < metrics["pairs"] <= groups * 6
    assert trainer.recipe.updater.update(experience, 4)["grad_norm"] > 0


def test_a_step_without_pairs_is_no_failure(tmp_path, tokenizer, rows):
    veripo = {"verifier": f"{__name__}:indifferent", "reward_weight": 0.0}
    trainer = make_trainer(tmp_path, tokenizer, rows, veripo=veripo, update={"steps": 5})
    trainer.train()
    for record in read_metrics(tmp_path / "metrics.jsonl")[-2:]:
        assert record["phase"] == 1 and record["pairs"] == record["groups_with_pairs"] == 0
        assert record["loss"] == record["grad_norm"] == record["updates_left_out"] == 0


def test_a_verifier_that_cannot_be_used_is_refused_before_anything_is_written(tmp_path, tokenizer, rows):
    for name, words in (("nowhere", "has no 'nowhere'"), ("wants_a_column", "color")):
        with pytest.raises(RewardError, match=words):
            make_trainer(tmp_path / "run", tokenizer, rows, veripo={"verifier": f"{__name__}:{name}"})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_take_the_steps_of_one(tmp_path, tokenizer, rows, kind):
    """Steps of both phases, with a restart between two steps of DPO."""

    def train(rank):
        for steps, resume in ((4, False), (5, True)):
            accelerator = make_accelerator()
            assert accelerator.num_processes == 2
            if kind == "fsdp2":
                accelerator = fsdp2(accelerator)
            trainer = make_trainer(
                tmp_path / "two", tokenizer, rows, accelerator=accelerator, update={"steps": steps}
            )
            trainer.train(resume=resume)

    single = make_trainer(tmp_path / "one", tokenizer, rows, update={"steps": 5})
    before = vector(single.model)
    single.train()
    in_processes(2, train)
    from transformers import AutoModelForCausalLM

    one, two = (
        vector(AutoModelForCausalLM.from_pretrained(tmp_path / name / "model")) for name in ("one", "two")
    )
    assert (two - one).norm() < 5e-3 * (one - before).norm()
    records = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two")]
    for a, b in list(zip(*records, strict=True))[1:]:
        assert a.keys() == b.keys()
        for key in {"reward/mean", "verifier/mean", "pairs", "minibatch_1/loss"} & a.keys():
            assert b[key] == pytest.approx(a[key], rel=1e-4)


@pytest.mark.slow
def test_the_verifier_is_learned_from_and_the_reward_is_kept(tmp_path):
    """After one phase of DPO. Seeds 0 to 4: 1.1 to 1.9 tokens shorter; by the reward alone 0.1 to 0.2."""
    veripo.train(tmp_path, seed=0, steps=25)
    rollouts = [r for r in read_metrics(tmp_path / "metrics.jsonl") if "reward/mean" in r]
    before, after = rollouts[:10], rollouts[10:]
    assert [len(before), len(after)] == [10, 10]

    def mean(records, key):
        return sum(record[key] for record in records) / len(records)

    assert mean(after, "completions/length") < mean(before, "completions/length") - 0.7
    assert mean(after, "reward/mean") > mean(before, "reward/mean") - 0.05
    assert mean(after[-5:], "verifier/mean") > mean(before[-5:], "verifier/mean") + 0.2
