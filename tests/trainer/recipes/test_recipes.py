"""iGRPO and turn-level groups: samples by hand, and what is refused."""

import math
import os
import re
import time

import pytest
import torch

from gspo_kernels.rewards import exact_match
from gspo_kernels.trainer import GSPOTrainer
from gspo_kernels.trainer.input_errors import ConfigError, DataError, RewardError
from gspo_kernels.trainer.recipes.igrpo import refined_prompt
from gspo_kernels.trainer.recipes.turns import continued
from gspo_kernels.trainer.rewards.comparing import best_of
from gspo_kernels.trainer.rollout import Segment, join_segments
from tests.trainer.conftest import small_config, tiny_qwen3
from tests.trainer.test_data import CHATML

TEMPLATE = "{prompt}<{draft}>"
IGRPO = {"igrpo": {"drafts": 2, "template": TEMPLATE}}


def answers(prompts, completions, rewards, *, letter):
    """The environment of these tests: the letter, and the reward as a digit (- for none)."""
    return [a + ("-" if r is None else f"{r:.0f}") for a, r in zip(letter, rewards, strict=True)]


TURNS = {"turns": {"count": 3, "feedback": f"{__name__}:answers"}}


class Scripted:
    """Completes the n-th copy of a prompt in a call with ``script(prompt, n)``; remembers the calls."""

    def __init__(self, tokenizer, script):
        self.tokenizer, self.script, self.calls, self.seeds = tokenizer, script, [], []

    def generate(self, prompts, sampling, *, seeds=None):
        texts = self.tokenizer.batch_decode(prompts)
        self.calls.append(texts)
        self.seeds += seeds
        copies = [texts[:i].count(text) for i, text in enumerate(texts)]
        said = [self.script(text, copy) for text, copy in zip(texts, copies, strict=True)]
        ids = self.tokenizer(said)["input_ids"]
        segments = [[Segment(each, [-1.0] * len(each))] for each in ids]
        return [join_segments(each, True) for each in segments]


def digit(prompts, completions, completion_ids, **columns):
    """The first digit of a completion; no reward without one."""
    found = [re.search(r"\d", text) for text in completions]
    return [None if digit is None else float(digit[0]) for digit in found]


def scripted_trainer(tmp_path, tokenizer, rows, script, *, reward=digit, model=None, **sections):
    sections["rollout"] = {"prompts_per_rollout": 2, "group_size": 2} | sections.get("rollout", {})
    trainer = GSPOTrainer(
        model or tiny_qwen3(tokenizer),
        tokenizer,
        reward,
        rows,
        rows,
        small_config(tmp_path / "run", **sections),
        engine=Scripted(tokenizer, script),
    )
    trainer.recipe.order.indices = lambda start, count: list(range(count))
    trainer.step = 1
    return trainer


def texts(tokenizer, experience):
    return tokenizer.batch_decode(experience.prompts), tokenizer.batch_decode(experience.completions)


@pytest.fixture
def two():
    return [{"prompt": "ab", "letter": "a"}, {"prompt": "cd", "letter": "c"}]


@pytest.fixture
def chat(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", CHATML)
    return tokenizer


# What is pure


def test_the_best_is_the_first_of_the_highest_and_has_a_reward():
    nan = math.nan
    rewards = torch.tensor([0.1, 0.5, 0.5, nan, -1.0, nan, nan, nan, nan, -2.0, -3.0, -2.0])
    best, scored = best_of(rewards, 3)
    assert best.tolist() == [1, 4, 6, 9]
    assert scored.tolist() == [True, True, False, True]


def test_a_template_is_filled_once():
    filled = refined_prompt("a{draft}", "b{prompt}", "{{prompt}|{draft}|{draft}{x}")
    assert filled == "{a{draft}|b{prompt}|b{prompt}{x}"


def test_a_template_fills_the_last_message_of_the_user():
    system, question = {"role": "system", "content": "s"}, {"role": "user", "content": "q", "name": "n"}
    answer, again = {"role": "assistant", "content": "w"}, {"role": "user", "content": "r"}
    conversation = [system, question, answer, again]
    assert refined_prompt(conversation, "d", TEMPLATE) == [
        *conversation[:3],
        {"role": "user", "content": "r<d>"},
    ]
    # an answer that had begun is part of the draft, and begins the refinement as well
    assert refined_prompt([system, question, answer], "d", TEMPLATE) == [
        system,
        {"role": "user", "content": "q<wd>", "name": "n"},
        answer,
    ]
    assert conversation == [system, question, answer, again]


def test_a_history_grows_by_a_turn():
    question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "He"}
    told = {"role": "user", "content": "no"}
    assert continued("q", "a", "b") == "qab"
    assert continued([question], "a", "no") == [question, {"role": "assistant", "content": "a"}, told]
    assert continued([question, answer], "llo", "no") == [
        question,
        {"role": "assistant", "content": "Hello"},
        told,
    ]


# iGRPO


def test_the_best_draft_goes_into_the_prompt_and_refinements_are_trained(tmp_path, tokenizer, two):
    seen = []

    def reward(prompts, completions, completion_ids, *, letter):
        seen.append((prompts, letter))
        return digit(prompts, completions, completion_ids)

    def script(prompt, copy):
        if prompt.endswith(">"):
            return f"{4 + 2 * copy}!"
        return {"ab": ["1x", "3y", "3z"], "cd": ["no", "0u", "none"]}[prompt][copy]

    drafts = {"igrpo": {"drafts": 3, "template": TEMPLATE}}
    trainer = scripted_trainer(tmp_path, tokenizer, two, script, reward=reward, **drafts)
    experience, metrics = trainer.rollout()
    assert trainer.engine.calls == [["ab"] * 3 + ["cd"] * 3, ["ab<3y>"] * 2 + ["cd<0u>"] * 2]
    assert texts(tokenizer, experience) == (["ab<3y>"] * 2 + ["cd<0u>"] * 2, ["4!", "6!"] * 2)
    assert experience.group_ids.tolist() == [0, 0, 1, 1]
    assert experience.advantages.sign().tolist() == [-1, 1, -1, 1]
    # rewards see the data's prompts and columns in both stages
    assert seen[0] == (["ab"] * 3 + ["cd"] * 3, ["a"] * 3 + ["c"] * 3)
    assert seen[1] == (["ab"] * 2 + ["cd"] * 2, ["a"] * 2 + ["c"] * 2)
    assert metrics["reward/drafts"] == 7 / 4  # of those that have one
    assert metrics["reward/best_drafts"] == 3 / 2
    assert metrics["reward/refinements"] == metrics["reward/mean"] == 5
    assert metrics["igrpo/without_draft"] == 0
    assert trainer.recipe.shown[-1] == ("cd<0u>", "6!", 6.0)
    assert len(set(trainer.engine.seeds)) == 10
    trainer.updater.update(experience, 1)


@pytest.mark.parametrize(("draft", "why"), [("no", "no reward"), ("1" * 60, "no room")])
def test_a_prompt_without_a_usable_draft_stays_plain(tmp_path, tokenizer, two, draft, why):
    def script(prompt, copy):
        return draft if (prompt, copy) == ("ab", 0) else "no" if prompt == "ab" else "1"

    trainer = scripted_trainer(tmp_path, tokenizer, two, script, **IGRPO)
    experience, metrics = trainer.rollout()
    assert texts(tokenizer, experience)[0] == ["ab"] * 2 + ["cd<1>"] * 2, why
    assert metrics["igrpo/without_draft"] == 0.5


def test_a_draft_may_fill_the_context_to_the_last_token(tmp_path, tokenizer, two):
    """64 tokens of context less 5 of a completion leave 59, of which prompt and template take 4."""

    def script(prompt, copy):
        return "1" * (55 if prompt == "ab" else 56)

    experience, metrics = scripted_trainer(tmp_path, tokenizer, two, script, **IGRPO).rollout()
    assert [len(prompt) for prompt in experience.prompts] == [59, 59, 2, 2]
    assert metrics["igrpo/without_draft"] == 0.5


def test_drafts_of_conversations(tmp_path, chat):
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("ab", "cd")]
    trainer = scripted_trainer(tmp_path, chat, rows, lambda prompt, copy: str(copy), **IGRPO)
    experience, _ = trainer.rollout()
    assert texts(chat, experience)[0] == [
        f"<|user|>{p}<1><|end|><|assistant|>" for p in ("ab", "ab", "cd", "cd")
    ]
    rows.append({"prompt": [{"role": "system", "content": "only"}]})
    with pytest.raises(DataError, match=r"training dataset, row 3: .*last message of the user"):
        scripted_trainer(tmp_path, chat, rows, lambda prompt, copy: "0", **IGRPO)
    assert not (tmp_path / "run").exists()


def test_evaluation_is_of_plain_prompts(tmp_path, tokenizer, rows, reward):
    found = [
        GSPOTrainer(
            tiny_qwen3(tokenizer), tokenizer, reward, rows, rows, small_config(tmp_path, **sections)
        ).evaluate()
        for sections in ({}, IGRPO)
    ]
    assert found[0] == found[1]


# Turns


def turn_script(prompt, copy):
    """In turn t, from 0, candidate c of "ab" says the digit t + c, that of "cd" says t - c + 5."""
    turn = len(re.findall(r"[ac][-\d]", prompt[2:]))
    return str(turn + copy if prompt.startswith("ab") else turn - copy + 5)


@pytest.mark.parametrize(
    ("keep", "second", "third", "best"),
    [
        ("first", ("ab0a0", "cd5c5"), ("ab0a01a1", "cd5c56c6"), (2 + 7) / 2),
        ("best", ("ab1a1", "cd5c5"), ("ab1a12a2", "cd5c56c6"), (3 + 7) / 2),
    ],
)
def test_every_turn_of_a_prompt_is_a_group(tmp_path, tokenizer, two, keep, second, third, best):
    sections = {"turns": TURNS["turns"] | {"keep": keep}}
    trainer = scripted_trainer(tmp_path, tokenizer, two, turn_script, **sections)
    experience, metrics = trainer.rollout()
    histories = [*("ab", "cd"), *second, *third]
    assert trainer.engine.calls == [
        [h for h in pair for _ in range(2)] for pair in (("ab", "cd"), second, third)
    ]
    prompts, completions = texts(tokenizer, experience)
    assert prompts == [history for history in histories for _ in range(2)]
    assert completions == ["0", "1", "5", "4", "1", "2", "6", "5", "2", "3", "7", "6"]
    assert experience.group_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert experience.advantages.sign().tolist() == [-1, 1, 1, -1] * 3
    assert [metrics[f"reward/turn_{turn}"] for turn in (1, 2, 3)] == [2.5, 3.5, 4.5]
    assert metrics["reward/best_turn"] == best
    assert metrics["turns/ended_early"] == 0
    assert len(set(trainer.engine.seeds)) == 12
    trainer.updater.update(experience, 1)


@pytest.mark.parametrize(
    ("keep", "kept", "told", "best"), [("first", "no", "-", math.nan), ("best", "1", "1", 1.0)]
)
def test_a_kept_completion_without_a_reward(tmp_path, tokenizer, two, keep, kept, told, best):
    sections = {"turns": TURNS["turns"] | {"keep": keep, "count": 2}}
    trainer = scripted_trainer(tmp_path, tokenizer, two, lambda _, copy: ["no", "1"][copy], **sections)
    _, metrics = trainer.rollout()
    assert trainer.engine.calls[1] == [f"ab{kept}a{told}"] * 2 + [f"cd{kept}c{told}"] * 2
    assert metrics["reward/turn_1"] == 1
    assert metrics["reward/best_turn"] == pytest.approx(best, nan_ok=True)


def test_a_history_without_room_ends_its_trajectory(tmp_path, tokenizer, two):
    """Of 59 tokens: "ab" with 55 and an answer of 2 fits once, "cd" with 56 not at all."""
    length = {"ab": 55, "cd": 56}
    trainer = scripted_trainer(
        tmp_path, tokenizer, two, lambda prompt, copy: "1" * length[prompt[:2]], **TURNS
    )
    experience, metrics = trainer.rollout()
    assert [len(prompt) for prompt in experience.prompts] == [2, 2, 2, 2, 59, 59]
    assert experience.group_ids.tolist() == [0, 0, 1, 1, 2, 2]
    assert metrics["reward/turn_2"] == 1 and math.isnan(metrics["reward/turn_3"])
    assert metrics["turns/ended_early"] == 1
    assert len(trainer.engine.calls) == 2
    # fewer groups than the bound on minibatches counts with
    trainer = scripted_trainer(
        tmp_path, tokenizer, two, lambda prompt, copy: str(copy) * 57, update={"minibatches": 12}, **TURNS
    )
    experience, metrics = trainer.rollout()
    assert metrics["reward/turn_1"] == 0.5 and math.isnan(metrics["reward/turn_2"])
    found = trainer.updater.update(experience, 1)
    assert found["minibatch_1/loss"] is not None and found["updates_left_out"] == 0


def test_turns_of_conversations(tmp_path, chat):
    rows = [{"prompt": [{"role": "user", "content": text}], "letter": text[0]} for text in ("ab", "cd")]
    long = tiny_qwen3(chat, max_position_embeddings=200)
    trainer = scripted_trainer(
        tmp_path, chat, rows, lambda prompt, copy: "7", model=long, turns=TURNS["turns"] | {"count": 2}
    )
    experience, _ = trainer.rollout()
    end, assistant = "<|end|>", "<|assistant|>"
    assert texts(chat, experience)[0][4] == f"<|user|>ab{end}{assistant}7{end}<|user|>a7{end}{assistant}"
    chat.chat_template = "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}m"
    with pytest.raises(DataError, match="one only"):
        scripted_trainer(tmp_path, chat, rows, turn_script, **TURNS)


def test_evaluation_is_of_the_first_turn_and_of_the_best(tmp_path, tokenizer, two):
    script = {"ab": "4", "ab4a4": "6", "ab4a46a6": "2", "cd": "3", "cd3c3": "no", "cd3c3noc-": "1"}
    trainer = scripted_trainer(tmp_path, tokenizer, two, lambda prompt, copy: script[prompt], **TURNS)
    metrics = trainer.evaluate()
    for label in ("greedy", "sampled"):
        assert metrics[f"eval/{label}_accuracy"] == metrics[f"eval/{label}/digit"] == 3.5
        assert metrics[f"eval/{label}/best_turn/digit"] == 4.5


def too_few(prompts, completions, rewards, **columns):
    return ["a"] * (len(completions) - 1)


def no_text(prompts, completions, rewards, **columns):
    return ["a", None][: len(completions)]


def one_text(prompts, completions, rewards, **columns):
    return "ab"


def raises(prompts, completions, rewards, **columns):
    raise ValueError("out of order")


def slow(prompts, completions, rewards, **columns):
    time.sleep(3)


async def awaited(prompts, completions, rewards, **columns):
    return completions


def takes_no_letter(prompts, completions, rewards):
    return completions


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("too_few", "feedback function too_few returned 1 texts for 2 completions"),
        ("no_text", "no_text returned None for completion 1; expected a text .*prompt 'cd'"),
        ("one_text", "one_text must return a list of texts, got str"),
        ("raises", r"feedback function raises raised ValueError\('out of order'\).*test_recipes.py, line"),
        ("slow", "feedback function slow took more than 0.2 seconds for 2 completions"),
    ],
)
def test_feedback_that_goes_wrong_is_named(tmp_path, tokenizer, two, name, words):
    sections = {"turns": {"count": 2, "feedback": f"{__name__}:{name}"}, "reward_timeout": 0.2}
    trainer = scripted_trainer(tmp_path, tokenizer, two, turn_script, **sections)
    with pytest.raises(RewardError, match=words):
        trainer.rollout()


@pytest.mark.parametrize(
    ("name", "columns", "error", "words"),
    [
        ("awaited", {}, RewardError, "awaited is async"),
        ("takes_no_letter", {}, RewardError, r"takes_no_letter cannot be called.*\(letter\).*'letter'"),
        ("answers", {"rewards": 1}, RewardError, "answers: a column must not be called 'rewards'"),
        ("nothing", {}, ConfigError, "turns.feedback.*has no 'nothing'"),
    ],
)
def test_feedback_that_cannot_work_is_refused_before_anything_is_written(
    tmp_path, tokenizer, two, name, columns, error, words
):
    sections = {"turns": {"count": 2, "feedback": f"{__name__}:{name}"}}
    rows = [row | columns for row in two]
    with pytest.raises(error, match=words):
        scripted_trainer(tmp_path, tokenizer, rows, turn_script, **sections)
    assert not (tmp_path / "run").exists()


def test_feedback_may_have_a_process_of_its_own(tmp_path, tokenizer):
    file = tmp_path / "environment.py"
    code = "def process(completions, **_):\n    return [str(os.getpid())] * len(completions)"
    file.write_text(f"import os\n{code}")
    rows = [{"prompt": prompt, "answer": "0"} for prompt in ("ab", "cd")]
    sections = {"turns": {"count": 2, "feedback": f"{file}:process"}, "reward_process": True}
    trainer = scripted_trainer(tmp_path, tokenizer, rows, lambda *_: "0", reward=exact_match, **sections)
    trainer.rollout()
    assert trainer.engine.calls[1][0] == f"ab0{trainer.recipe.feedback.function._process.pid}"
    assert trainer.recipe.feedback.function._process.pid != os.getpid()


# The configuration


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"turns": {"count": 2}}, "turns.feedback must be given"),
        ({"turns": {"feedback": "a:b"}}, "turns.feedback must be given .* only there, got 'a:b'"),
        ({"turns": {"count": 2, "feedback": "a:b", "keep": "last"}}, "turns.keep must be"),
        ({"turns": {"count": 0}}, "turns.count must be at least 1"),
        ({"igrpo": {"drafts": -1}}, "igrpo.drafts must be at least 0"),
        ({"igrpo": {"drafts": 2, "template": "{draft}"}}, r"igrpo.template must be a text with \{prompt\}"),
        ({"igrpo": {"drafts": 2, "template": "{prompt}"}}, r"igrpo.template must be a text with \{draft\}"),
        ({**IGRPO, **TURNS}, "igrpo.drafts must be 0 where turns.count is more than 1"),
        ({**TURNS, "update": {"minibatches": 37}}, "minibatches must be at most the 36 completions"),
        (
            {**TURNS, "update": {"minibatches": 10, "layout": "shared_prefix"}},
            "minibatches must be at most the 9 turns of prompts",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, sections, words):
    with pytest.raises(ConfigError, match=words):
        small_config(tmp_path, **sections)


def test_the_bound_on_minibatches_counts_turns(tmp_path):
    small_config(tmp_path, **TURNS, update={"minibatches": 36})
    small_config(tmp_path, **TURNS, update={"minibatches": 9, "layout": "shared_prefix"})
