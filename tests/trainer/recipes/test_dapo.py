"""DAPO's dynamic sampling and soft penalty on length: by hand, what is refused, restart."""

import math

import pytest
import torch

from gspo_kernels.trainer import GSPOTrainer
from gspo_kernels.trainer.input_errors import ConfigError
from gspo_kernels.trainer.recipes.dapo import chosen, groups_of, penalised
from gspo_kernels.trainer.recipes.samples import Sample, Samples
from gspo_kernels.trainer.rewards import Rewards
from gspo_kernels.trainer.rewards.comparing import differing
from gspo_kernels.trainer.rollout import Completion
from gspo_kernels.trainer.run.metrics import read_metrics
from tests.forks import in_processes
from tests.trainer.conftest import make_accelerator, small_config, tiny_qwen3
from tests.trainer.recipes.test_recipe_runs import run
from tests.trainer.recipes.test_recipes import scripted_trainer, texts
from tests.trainer.test_trainer import same

NAN = math.nan


def samples_of(lengths, rewards):
    each = [
        Sample(0, [1], "", Completion(torch.zeros(n, dtype=torch.int64), True), torch.ones(n) > 0)
        for n in lengths
    ]
    values = torch.tensor(rewards)
    return Samples(each, Rewards(values, {"right": values}, {"right": 1.0}))


def test_the_penalty_is_the_papers():
    """At most 10 tokens and a buffer of 4: 0 up to 6, then a quarter per token, -1 from 10 on."""
    got = penalised(samples_of((1, 6, 7, 9, 10, 12, 9), (1.0, 1.0, 1.0, 0.0, 1.0, 0.0, NAN)), 10, 4, 2.0)
    values = [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]
    assert got.rewards.by_name["overlong"].tolist()[:6] == values
    assert got.rewards.total.tolist()[:6] == [1.0, 1.0, 0.5, -1.5, -1.0, -2.0]
    assert got.rewards.by_name["right"].tolist()[:6] == [1.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    assert got.rewards.total[6].isnan() and got.rewards.by_name["overlong"][6].isnan()
    assert got.rewards.weights == {"right": 1.0, "overlong": 2.0}


def test_groups_differ_by_rewards_that_are_there():
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, NAN, 1.0, NAN, NAN])
    assert differing(rewards, 2).tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    ("differs", "groups"),
    [("0110", [1, 2]), ("0111", [1, 2]), ("0001", [0, 3]), ("0000", [0, 1]), ("1000", [0, 1])],
)
def test_groups_that_differ_come_first_and_the_size_is_kept(differs, groups):
    assert chosen(torch.tensor([each == "1" for each in differs]), 2) == groups
    taken = groups_of(samples_of(range(8), [float(i) for i in range(8)]), groups, 2)
    assert taken.rewards.total.tolist() == [float(2 * g + i) for g in groups for i in (0, 1)]
    assert [len(sample.ids) for sample in taken.each] == taken.rewards.by_name["right"].tolist()


def sampled(tmp_path, tokenizer, rows, script, steps=1, **sections):
    """Some rollouts of the rows in their order, two prompts in each, two completions of a prompt."""
    trainer = scripted_trainer(tmp_path, tokenizer, rows, script, **sections)
    trainer.recipe.order.indices = lambda start, count: [i % len(rows) for i in range(start, start + count)]
    for trainer.step in range(1, steps + 1):
        experience, metrics = trainer.rollout()
    return trainer, experience, metrics


ROWS = [{"prompt": letter, "letter": letter} for letter in "abcdefgh"]


def says(differing_prompts):
    """ "0" and "1" for these prompts, "1" twice for the others."""
    return lambda text, copy: str(copy) if text in differing_prompts else "1"


def test_prompts_are_sampled_until_enough_groups_differ(tmp_path, tokenizer):
    dapo = {"dapo": {"batches": 4}}
    trainer, experience, metrics = sampled(tmp_path, tokenizer, ROWS, says("bef"), **dapo)
    assert texts(tokenizer, experience)[0] == ["b", "b", "e", "e"]
    assert metrics["dapo/batches"] == 3 and metrics["dapo/groups_that_differ"] == 1
    # a, c and d are seen as well: six groups of which three differ
    assert metrics["groups_without_variance"] == 0.5 and metrics["reward/mean"] == 0.75
    seeds = trainer.engine.seeds
    assert len(seeds) == len(set(seeds)) == 12
    # the next rollout goes on where this one stopped: after f
    trainer.step = 2
    experience, metrics = trainer.rollout()
    assert texts(tokenizer, experience)[0] == ["b", "b", "e", "e"] and metrics["dapo/batches"] == 4
    assert trainer.engine.calls[3] == ["g", "g", "h", "h"]


def test_too_few_groups_are_filled_up(tmp_path, tokenizer):
    _, experience, metrics = sampled(tmp_path, tokenizer, ROWS, says("d"), dapo={"batches": 2})
    assert texts(tokenizer, experience)[0] == ["a", "a", "d", "d"]
    assert metrics["dapo/batches"] == 2 and metrics["dapo/groups_that_differ"] == 0.5
    assert (experience.advantages[:2] == 0).all() and (experience.advantages[2:] != 0).all()


def test_off_it_samples_once(tmp_path, tokenizer):
    trainer, experience, metrics = sampled(tmp_path, tokenizer, ROWS, says("b"), steps=2)
    assert texts(tokenizer, experience)[0] == ["c", "c", "d", "d"]
    assert len(trainer.engine.calls) == 2 and not any(name.startswith("dapo") for name in metrics)


def longer(text, copy):
    """The same reward at two lengths for a, different rewards for c."""
    return {"a": ("1", "1..."), "b": ("1", "1"), "c": ("0", "1...")}.get(text, ("1", "1"))[copy]


def test_groups_are_compared_before_the_penalty_shapes_rewards(tmp_path, tokenizer):
    """a's completions differ by their length alone, which makes an advantage but no informative group."""
    dapo = {"batches": 2, "overlong_buffer": 2, "overlong_penalty": 0.5}
    rollout = {"max_new_tokens": 5}
    _, experience, metrics = sampled(tmp_path, tokenizer, ROWS, longer, dapo=dapo, rollout=rollout)
    assert metrics["dapo/batches"] == 2 and metrics["dapo/groups_that_differ"] == 0.5
    assert texts(tokenizer, experience)[0] == ["a", "a", "c", "c"]
    assert metrics["reward/mean"] == 7 / 8  # as the rewards are
    # four tokens of at most five, of which the last two count: half of the penalty, for two of four
    assert metrics["reward/overlong"] == -0.25
    assert experience.advantages[0] > 0 > experience.advantages[1]  # 1 and 0.75
    assert experience.advantages[3] > 0 > experience.advantages[2]


def length(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


def test_the_metric_may_be_one_of_several_rewards(tmp_path, tokenizer):
    from tests.trainer.recipes.test_recipes import digit

    dapo = {"batches": 2, "metric": "digit"}
    _, experience, _ = sampled(tmp_path, tokenizer, ROWS, longer, reward=[digit, length], dapo=dapo)
    assert texts(tokenizer, experience)[0] == ["a", "a", "c", "c"]
    with pytest.raises(ConfigError, match=r"dapo.metric: no reward 'digits'; there are digit, length"):
        sampled(
            tmp_path / "x", tokenizer, ROWS, longer, reward=[digit, length], dapo=dapo | {"metric": "digits"}
        )


def test_refinements_are_sampled_until_they_differ(tmp_path, tokenizer):
    igrpo = {"drafts": 2, "template": "{prompt}{draft}"}
    script = lambda text, copy: str(copy) if text in ("d", "d1") else "1"  # noqa: E731
    sections = {"dapo": {"batches": 3}, "igrpo": igrpo, "rollout": {"prompts_per_rollout": 1}}
    trainer, experience, metrics = sampled(tmp_path, tokenizer, ROWS[2:], script, **sections)
    assert texts(tokenizer, experience)[0] == ["d1", "d1"] and metrics["dapo/batches"] == 2
    assert metrics["reward/drafts"] == 0.75  # of c and of d
    assert len(trainer.engine.seeds) == len(set(trainer.engine.seeds)) == 8


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"dapo": {"batches": 0}}, "dapo.batches"),
        ({"dapo": {"metric": "digit"}}, "dapo.batches must be above 1 where there is a dapo.metric"),
        (
            {"dapo": {"overlong_buffer": 6}},
            r"dapo.overlong_buffer must be at most rollout.max_new_tokens \(5\)",
        ),
        ({"dapo": {"overlong_buffer": 2, "overlong_penalty": 0.0}}, "dapo.overlong_penalty"),
        (
            {"dapo": {"batches": 2}, "turns": {"count": 2, "feedback": "f.py:f"}},
            "dapo.batches must be 1 where turns.count is more than 1",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, sections, message):
    with pytest.raises(ConfigError, match=message):
        small_config(tmp_path, **sections)


def test_a_reward_of_the_penaltys_name_is_refused(tmp_path, tokenizer):
    def overlong(completion_ids, **columns):
        return [0.0] * len(completion_ids)

    with pytest.raises(ConfigError, match=r"dapo.overlong_buffer: the penalty is a reward 'overlong'"):
        sampled(tmp_path, tokenizer, ROWS, longer, reward=overlong, dapo={"overlong_buffer": 2})


VERIPO = {"veripo": {"grpo_steps": 2, "dpo_steps": 1}}


@pytest.mark.parametrize("sections", [{}, VERIPO], ids=["plain", "veripo"])
def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path, tokenizer, rows, sections):
    """The checkpoint knows how many prompts were taken: a third of these groups differ."""
    crashes = []

    def rare(completion_ids, *, letter, **columns):
        if crashes and len(crashes) == crashes[0]:
            raise KeyboardInterrupt
        if crashes:
            crashes.append(1)
        pairs = zip(completion_ids, letter, strict=True)
        return [float(first in "ace" and sum(ids) % 2) for ids, first in pairs]

    short = {
        "update": {"steps": 4, "minibatches": 1},
        "rollout": {"prompts_per_rollout": 2, "group_size": 3},
        "dapo": {"batches": 3, "overlong_buffer": 3},
        "checkpoint": {"every": 2},
        "evaluation": {"every": 9},
    } | sections
    expected = run(tmp_path / "straight", tokenizer, rows, rare, **short)
    taken = [record.get("dapo/batches") for record in read_metrics(tmp_path / "straight" / "metrics.jsonl")]
    assert max(each or 0 for each in taken[1:3]) > 1  # before the checkpoint
    before = 2 + sum(int(each or 0) for each in taken[1:3])  # two calls for the first evaluation
    crashes.append(before + 2)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", tokenizer, rows, rare, **short)
    assert [r["step"] for r in read_metrics(tmp_path / "stopped" / "metrics.jsonl")][-1] in (2, 3)
    crashes.clear()
    found = run(tmp_path / "stopped", tokenizer, rows, rare, resume=True, **short)
    assert same(found, expected)


def odd(completion_ids, *, letter, **columns):
    return [float(first in "ace" and sum(ids) % 2) for ids, first in zip(completion_ids, letter, strict=True)]


def test_two_processes_take_the_same_prompts_as_one(tmp_path, tokenizer, rows):
    sections = {
        "update": {"steps": 2, "minibatches": 1},
        "rollout": {"prompts_per_rollout": 2, "group_size": 3},
        "dapo": {"batches": 3, "overlong_buffer": 3},
        "evaluation": {"every": 9},
    }
    run(tmp_path / "one", tokenizer, rows, odd, **sections)

    def train(rank):
        accelerator = make_accelerator()
        assert accelerator.num_processes == 2
        config = small_config(tmp_path / "two", **sections)
        GSPOTrainer(
            tiny_qwen3(tokenizer), tokenizer, odd, rows, rows[:3], config, accelerator=accelerator
        ).train()

    in_processes(2, train)
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert one[1]["dapo/batches"] > 1
    for a, b in zip(one, two, strict=True):
        for key in a:
            if key.startswith(("reward/", "dapo/", "completions/")):
                assert b[key] == pytest.approx(a[key], rel=1e-6), key
