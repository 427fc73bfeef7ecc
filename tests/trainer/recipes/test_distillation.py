"""On-policy distillation in the trainer: a teacher's log-probs as advantages."""

import pytest
import torch

import gspo_kernels as gk
from examples.recipes import distillation as example
from examples.recipes.igrpo import make_rows
from gspo_kernels.trainer import GSPOTrainer, demo
from gspo_kernels.trainer.input_errors import ConfigError, ModelError
from tests.draws import shifted_seed
from tests.trainer.conftest import small_config, tiny_qwen3

TAUGHT = {"objective": {"name": "GRPO"}}


@pytest.fixture
def teacher(tmp_path, tokenizer):
    for part in (tiny_qwen3(tokenizer, seed=5, hidden_size=48), tokenizer):
        part.save_pretrained(tmp_path / "teacher")
    return str(tmp_path / "teacher")


def make_trainer(output, tokenizer, rows, reward, teacher, **changes):
    config = small_config(output, **TAUGHT, distillation={"teacher": teacher, **changes})
    return GSPOTrainer(tiny_qwen3(tokenizer), tokenizer, reward, rows, rows[:3], config)


@pytest.mark.parametrize("reward_coef", [0.0, 0.5])
def test_advantages_are_the_teachers_log_probs_minus_the_policys(
    tmp_path, tokenizer, rows, reward, teacher, reward_coef
):
    trainer = make_trainer(
        tmp_path / "run", tokenizer, rows, reward, teacher, coef=2.0, reward_coef=reward_coef
    )
    trainer.step = 1
    experience, _ = trainer.rollout()
    updater, seen = trainer.updater, {}
    sound = updater._update_minibatch

    def noted(experience, terms, part, *, on_policy):
        assert "teacher" not in terms and not on_policy  # ratios are to what the advantages compare with
        seen.setdefault("advantages", terms["advantages"].clone())
        return sound(experience, terms, part, on_policy=on_policy)

    updater._update_minibatch = noted

    def by_hand(model):
        found = []
        for prompt, completion in zip(experience.prompts, experience.completions, strict=True):
            logits = model(torch.cat([prompt, completion]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
            found.append(logits.log_softmax(-1).gather(-1, completion.unsqueeze(-1)).squeeze(-1))
        return torch.cat(found)

    with torch.no_grad():
        far = by_hand(updater.teacher.model) - by_hand(trainer.model)
    expected = 2.0 * far + reward_coef * experience.by_token(experience.advantages)
    metrics = trainer.recipe.update(experience, 1)
    mask = experience.loss_mask
    torch.testing.assert_close(seen["advantages"][mask], expected[mask], rtol=1e-4, atol=1e-5)
    assert metrics["distillation/reverse_kl"] == pytest.approx(-float(far[mask].mean()), rel=1e-4)
    assert all(not parameter.requires_grad for parameter in updater.teacher.parameters())


def test_a_teacher_is_as_batch_invariant_as_the_policy(tmp_path, tokenizer, rows, reward, teacher):
    """Its log-probs are advantages, and so a part of every coefficient."""
    sections = {**TAUGHT, "distillation": {"teacher": teacher}, "update": {"batch_invariant": True}}
    config = small_config(tmp_path / "run", **sections)
    updater = GSPOTrainer(tiny_qwen3(tokenizer), tokenizer, reward, rows, rows[:3], config).updater
    assert updater.teacher.batch_invariant is True and updater.policy.batch_invariant is True


@pytest.mark.slow
def test_the_example_comes_nearer_to_its_teacher(tmp_path):
    """By the divergence over the whole vocabulary of answers' tokens, which no sampling blurs."""
    trainer = example.make_trainer(tmp_path / "run", seed=shifted_seed(0), steps=8, teacher_steps=120)
    rows, _ = make_rows(shifted_seed(0))
    ids = torch.tensor(trainer.tokenizer([row["prompt"] + row["answer"][:2] for row in rows])["input_ids"])

    @torch.no_grad()
    def distance():
        models = (trainer.model, trainer.updater.teacher.model)
        student, teacher = (model(ids).logits[:, 3:] for model in models)
        return float(gk.distillation_loss(student, teacher, beta=1.0).loss)

    before = distance()
    trainer.train()
    assert distance() < 0.85 * before


def test_what_cannot_be_distilled_is_refused(tmp_path, tokenizer, rows, reward, teacher):
    for message, sections in {
        "teacher must be none with GSPO, which takes no advantages per token": {
            "objective": {"name": "GSPO"}
        },
        "none with veripo.dpo_steps": TAUGHT | {"veripo": {"grpo_steps": 2, "dpo_steps": 1}},
    }.items():
        with pytest.raises(ConfigError, match=message):
            small_config(tmp_path, distillation={"teacher": teacher}, **sections)
    with pytest.raises(ConfigError, match="0 where there is no distillation"):
        small_config(tmp_path, distillation={"reward_coef": 1.0})
    other = demo.make_tokenizer()
    other.add_tokens(["<|more|>"])
    other.save_pretrained(teacher)
    with pytest.raises(ModelError, match="has another tokenizer"):
        make_trainer(tmp_path / "run", tokenizer, rows, reward, teacher)
    with pytest.raises(ModelError, match="nowhere"):
        make_trainer(tmp_path / "run", tokenizer, rows, reward, str(tmp_path / "nowhere"))
