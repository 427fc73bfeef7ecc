"""Rollouts of recipes by hand: the prompts that are completed, the groups, the rewards and the metrics."""

import math
import re

import pytest
import torch

from examples.recipes import dapo
from examples.recipes.igrpo import refined_prompt
from examples.recipes.turns import continued
from gspo_kernels.trainer.rewards import Rewards
from gspo_kernels.trainer.rollout import Completion, Rollout, Sample
from tests.examples.recipes.common import scripted

NAN = math.nan
TEMPLATE = "{prompt}<{draft}>"
ROWS = [{"prompt": "ab", "letter": "a"}, {"prompt": "cd", "letter": "c"}]
LETTERS = [{"prompt": letter, "letter": letter} for letter in "abcdefgh"]


def digit(completions, **columns):
    """Return the first digit of each completion; no reward without a digit."""
    found = [re.search(r"\d", text) for text in completions]
    return [None if match is None else float(match[0]) for match in found]


def answers(completions, rewards, *, letter):
    """Return the environment's feedback: the letter, and the reward as a digit (- for none)."""
    assert len(completions) == len(rewards)
    return [a + ("-" if r is None else f"{r:.0f}") for a, r in zip(letter, rewards, strict=True)]


def texts(tokenizer, rollout):
    prompts = tokenizer.batch_decode([sample.prompt for sample in rollout.samples])
    return prompts, [sample.text for sample in rollout.samples]


def made(recipe, tmp_path, tokenizer, script, rows=ROWS, reward=digit, eval_rows=None, **options):
    if recipe == "turns":
        options = {"count": 3, "feedback": f"{__name__}:answers"} | options
    sections = {"recipe": options, "eval_rows": eval_rows}
    return scripted(recipe, tmp_path / "run", tokenizer, rows, script, reward, **sections)


def test_a_template_is_filled_in_the_last_message():
    filled = refined_prompt("a{draft}", "b{prompt}", "{{prompt}|{draft}|{draft}{x}")
    assert filled == "{a{draft}|b{prompt}|b{prompt}{x}"
    system, question = {"role": "system", "content": "s"}, {"role": "user", "content": "q", "name": "n"}
    begun, again = {"role": "assistant", "content": "w"}, {"role": "user", "content": "r"}
    whole = refined_prompt([system, question, begun, again], "d", TEMPLATE)
    assert whole == [system, question, begun, {"role": "user", "content": "r<d>"}]
    # An answer that has begun is part of the draft, and begins the refinement as well.
    refined = refined_prompt([system, question, begun], "d", TEMPLATE)
    assert refined == [system, {"role": "user", "content": "q<wd>", "name": "n"}, begun]


def test_the_best_draft_goes_into_the_prompt(tmp_path, tokenizer):
    seen = []

    def reward(prompts, completions, letter):
        seen.append((prompts, letter))
        return digit(completions)

    def script(prompt, copy):
        if prompt.endswith(">"):
            return f"{4 + 2 * copy}!"
        return {"ab": ["1x", "3y", "3z"], "cd": ["no", "0u", "none"]}[prompt][copy]

    trainer = made("igrpo", tmp_path, tokenizer, script, drafts=3, template=TEMPLATE, reward=reward)
    rollout = trainer.rollout()
    assert trainer.engine.calls == [["ab"] * 3 + ["cd"] * 3, ["ab<3y>"] * 2 + ["cd<0u>"] * 2]
    assert texts(tokenizer, rollout) == (["ab<3y>"] * 2 + ["cd<0u>"] * 2, ["4!", "6!"] * 2)
    # Rewards see the data's prompts and columns in both stages.
    assert seen[0] == (["ab"] * 3 + ["cd"] * 3, ["a"] * 3 + ["c"] * 3)
    assert seen[1] == (["ab"] * 2 + ["cd"] * 2, ["a"] * 2 + ["c"] * 2)
    assert rollout.metrics["reward/drafts"] == 7 / 4  # over drafts that have a reward
    assert rollout.metrics["reward/best_drafts"] == 3 / 2
    assert rollout.metrics["reward/refinements"] == 5 and rollout.metrics["igrpo/without_draft"] == 0
    batch = trainer.compare(rollout)
    assert batch.group_ids.tolist() == [0, 0, 1, 1] and batch.advantages.sign().tolist() == [-1, 1, -1, 1]
    assert trainer.update(batch)["grad_norm"] > 0


def test_a_prompt_without_a_usable_draft_stays_plain(tmp_path, tokenizer):
    """No reward, or no room: a context of 64 less 5 new tokens leaves 59; prompt and template take 4."""
    for name, draft, length in (("no reward", "no", 2), ("no room", "1" * 56, 2), ("room", "1" * 55, 59)):
        script = {"ab": draft, "cd": "1"}
        options = {"drafts": 2, "template": TEMPLATE}
        trainer = made("igrpo", tmp_path / name, tokenizer, lambda p, _, s=script: s.get(p, "1"), **options)
        rollout = trainer.rollout()
        assert [len(sample.prompt) for sample in rollout.samples] == [length] * 2 + [5] * 2, name
        assert rollout.metrics["igrpo/without_draft"] == (0.5 if length == 2 else 0), name


def test_a_history_grows_by_a_turn():
    question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "He"}
    feedback = {"role": "user", "content": "no"}
    assert continued("q", "a", "b") == "qab"
    assert continued([question], "a", "no") == [question, {"role": "assistant", "content": "a"}, feedback]
    whole = {"role": "assistant", "content": "Hello"}
    assert continued([question, answer], "llo", "no") == [question, whole, feedback]


@pytest.mark.parametrize(
    ("keep", "histories", "best"),
    [
        ("first", ["ab", "cd", "ab0a0", "cd5c5", "ab0a01a1", "cd5c56c6"], 4.5),
        ("best", ["ab", "cd", "ab1a1", "cd5c5", "ab1a12a2", "cd5c56c6"], 5.0),
    ],
)
def test_each_turn_is_a_group_of_one_history(tmp_path, tokenizer, keep, histories, best):
    def script(prompt, copy):
        turn = (len(prompt) - 2) // 3
        return str({"a": (0, 1), "c": (5, 4)}[prompt[0]][copy] + turn)

    trainer = made("turns", tmp_path, tokenizer, script, keep=keep)
    rollout = trainer.rollout()
    prompts, completions = texts(tokenizer, rollout)
    assert prompts == [history for history in histories for _ in range(2)]
    assert completions == ["0", "1", "5", "4", "1", "2", "6", "5", "2", "3", "7", "6"]
    assert [rollout.metrics[f"reward/turn_{turn}"] for turn in (1, 2, 3)] == [2.5, 3.5, 4.5]
    assert rollout.metrics["reward/best_turn"] == best and rollout.metrics["turns/ended_early"] == 0
    batch = trainer.compare(rollout)
    assert batch.group_ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert batch.advantages.sign().tolist() == [-1, 1, 1, -1] * 3
    assert trainer.update(batch)["grad_norm"] > 0


def test_a_history_without_room_ends_its_trajectory(tmp_path, tokenizer):
    """A history has room for 59 tokens: "ab" + 55 + feedback of 2 fits once, "cd" + 56 + 2 not at all."""
    length = {"ab": 55, "cd": 56}
    trainer = made("turns", tmp_path, tokenizer, lambda prompt, copy: "1" * length[prompt[:2]])
    rollout = trainer.rollout()
    assert [len(sample.prompt) for sample in rollout.samples] == [2, 2, 2, 2, 59, 59]
    assert rollout.metrics["reward/turn_2"] == 1 and "reward/turn_3" not in rollout.metrics
    assert rollout.metrics["turns/ended_early"] == 1 and len(trainer.engine.calls) == 2


def test_evaluation_of_the_first_and_the_best_turn(tmp_path, tokenizer):
    script = {"ab": "4", "ab4a4": "6", "ab4a46a6": "2", "cd": "3", "cd3c3": "no", "cd3c3noc-": "1"}
    trainer = made("turns", tmp_path, tokenizer, lambda prompt, _: script[prompt], eval_rows=ROWS)
    metrics = trainer.evaluate()
    for label in ("greedy", "sampled"):
        assert metrics[f"eval/{label}_reward"] == 3.5 and metrics[f"eval/{label}/best_turn"] == 4.5


def shaped(lengths, rewards):
    """Return a rollout of completions of these lengths, two in a group."""
    samples = [Sample(0, [1], "", Completion(torch.zeros(n, dtype=torch.int64), True)) for n in lengths]
    values = torch.tensor(rewards)
    return Rollout(samples, Rewards(values, {"right": values}, {"right": 1.0}), 2)


def test_the_penalty_is_the_papers():
    """With at most 10 tokens and a buffer of 4: 0 up to 6 tokens, then -1/4 per token, -1 from 10 on."""
    rollout = shaped((1, 6, 7, 9, 10, 12, 9), (1.0, 1.0, 1.0, 0.0, 1.0, 0.0, NAN))
    rewards = dapo.penalized(rollout, 10, 4, 2.0).rewards
    assert rewards.by_name["overlong"].tolist()[:6] == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]
    assert rewards.total.tolist()[:6] == [1.0, 1.0, 0.5, -1.5, -1.0, -2.0]
    assert rewards.by_name["right"].tolist()[:6] == [1.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    assert rewards.total[6].isnan() and rewards.by_name["overlong"][6].isnan()
    assert rewards.weights == {"right": 1.0, "overlong": 2.0}


def test_prompts_are_sampled_until_groups_differ(tmp_path, tokenizer):
    def script(prompt, copy):
        return str(copy) if prompt in "bef" else "1"

    def sampled(batches):
        return made("dapo", tmp_path / str(batches), tokenizer, script, LETTERS, batches=batches)

    trainer = sampled(4)
    rollout = trainer.rollout()
    assert texts(tokenizer, rollout)[0] == ["b", "b", "e", "e"]
    assert rollout.metrics["dapo/batches"] == 3 and rollout.metrics["dapo/groups_that_differ"] == 1
    # Prompts a, c and d were sampled as well: three of the six groups differ.
    assert rollout.metrics["groups_without_variance"] == 0.5 and rollout.metrics["reward/mean"] == 0.75
    # The next rollout continues after f, where this one stopped.
    assert trainer.rollout().metrics["dapo/batches"] == 4 and trainer.engine.calls[3] == ["g", "g", "h", "h"]
    # If too few groups differ, others fill the rollout.
    rollout = sampled(1).rollout()
    assert texts(tokenizer, rollout)[0] == ["a", "a", "b", "b"]
    assert rollout.metrics["dapo/groups_that_differ"] == 0.5


def longer(prompt, copy):
    """Return completions of two lengths with the same reward for a, and with different rewards for c."""
    return {"a": ("1", "1..."), "b": ("1", "1"), "c": ("0", "1...")}.get(prompt, ("1", "1"))[copy]


def length(completion_ids):
    return [float(len(ids)) for ids in completion_ids]


def test_groups_are_compared_before_the_penalty(tmp_path, tokenizer):
    """Completions of "a" differ in length alone: they have advantages, but their group does not differ."""
    for name, reward, metric in (("one", digit, None), ("two", [digit, length], "digit")):
        recipe = {"batches": 2, "overlong_buffer": 2, "overlong_penalty": 0.5, "metric": metric}
        trainer = made("dapo", tmp_path / name, tokenizer, longer, LETTERS, reward, **recipe)
        rollout = trainer.rollout()
        assert rollout.metrics["dapo/batches"] == 2 and rollout.metrics["dapo/groups_that_differ"] == 0.5
        assert texts(tokenizer, rollout)[0] == ["a", "a", "c", "c"]
        # Two of four completions have 4 of at most 5 tokens: with a buffer of 2, half of the penalty.
        assert rollout.metrics["reward/overlong"] == -0.25
        if metric is None:
            advantages = trainer.compare(rollout).advantages
            assert rollout.metrics["reward/mean"] == 7 / 8  # without the penalty
            assert advantages[0] > 0 > advantages[1] and advantages[3] > 0 > advantages[2]
