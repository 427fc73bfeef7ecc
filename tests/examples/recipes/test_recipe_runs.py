"""Whole runs of recipes: they learn, restart exactly in several processes, and refuse wrong options."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.recipes import veripo
from gspo_kernels import demo
from gspo_kernels.objectives import DPO
from gspo_kernels.trainer import InputError
from gspo_kernels.trainer.processes import on_main
from gspo_kernels.trainer.report import read_metrics
from gspo_kernels.trainer.update import Batch
from gspo_kernels.trainer.vllm import VLLMServer
from tests.draws import shifted_seed
from tests.examples.recipes.common import make_trainer
from tests.forks import in_processes
from tests.trainer.conftest import (
    ROWS,
    copy_after,
    make_accelerator,
    odd_share,
    plain_logprobs,
    tiny_qwen3,
    untimed,
)

NAN = math.nan


def odd(completion_ids, *, letter):
    """Return rewards that differ within some groups only, and None for long completions of "f"."""
    pairs = zip(completion_ids, letter, strict=True)
    return [
        None if first == "f" and len(ids) > 3 else float(first in "ace" and sum(ids) % 2)
        for ids, first in pairs
    ]


def small(completion_ids):
    """Return the share of ids below 128, which is independent of whether ids are odd."""
    return [sum(i < 128 for i in ids) / len(ids) for ids in completion_ids]


def goes_on(completions):
    return ["?"] * len(completions)


def too_few(completions, **columns):
    return ["a"]


def raises(completions, **columns):
    raise ValueError("out of order")


def wants_a_color(completions, color):
    return [0.0] * len(completions)


@pytest.fixture(scope="module")
def learned(tmp_path_factory, tokenizer):
    """Train a random model with VeriPO; return the trainer and its metrics."""
    output, verifier = tmp_path_factory.mktemp("veripo"), f"{__name__}:small"
    trainer = make_trainer(
        "veripo", output, tokenizer, ROWS, odd_share,
        recipe={"grpo_steps": 4, "dpo_steps": 3, "verifier": verifier, "reward_weight": 0.1},
        objective={"name": "GRPO"},
        rollout={"prompts_per_rollout": 6, "group_size": 16, "max_new_tokens": 5},
        update={"steps": 11, "minibatches": 4, "learning_rate": 2e-2, "micro_batch_tokens": 4096},
        seed=shifted_seed(0) % 8,
    )  # fmt: skip
    trainer.train()
    return trainer, read_metrics(output / "metrics.jsonl")[1:]


def test_veripo_learns(learned):
    """Over eight seeds rewards gained 0.31 to 0.51. The verifier gained 0.14 to 0.33 over 24 seeds, and -0.12
    to 0.13 over 16 seeds with pairs at random.
    """

    def gain(metric):
        measured = [record[metric] for record in learned[1] if record.get(metric) is not None]
        return sum(measured[-3:]) / len(measured[-3:]) - sum(measured[:2]) / 2

    assert gain("reward/odd_share") > 0.25 and gain("verifier/mean") > 0.1


@pytest.mark.parametrize("name", ["dapo", "veripo"])
def test_two_processes_train_alike_and_resume_exactly(tmp_path, tokenizer, name):
    """The checkpoints of these recipes hold more: taken prompts; kept rollouts, and the phase."""
    sections, stop, last = {
        "dapo": ({"recipe": {"batches": 3, "overlong_buffer": 3}, "update": {"minibatches": 1}}, 2, 3),
        "veripo": ({"recipe": {"grpo_steps": 2, "dpo_steps": 2, "verifier": f"{__name__}:small"}}, 3, 4),
    }[name]
    sections = {"evaluation": {"every": 100}, "checkpoint": {"every": stop}} | sections

    def train(rank):
        def ended(run, steps, resume=False):
            make_accelerator()
            changes = sections | {"update": {"steps": steps} | sections.get("update", {})}
            trainer = make_trainer(name, tmp_path / run, tokenizer, ROWS, odd, **changes)
            assert trainer.accelerator.num_processes == 2
            trainer.train(resume=resume)
            return torch.cat([p.flatten() for p in trainer.model.state_dict().values()])

        straight = ended("straight", last)
        on_main(lambda: copy_after(stop, tmp_path / "straight", tmp_path / "stopped"))
        assert torch.equal(ended("stopped", last, resume=True), straight)
        both = [torch.zeros_like(straight) for _ in range(2)]
        torch.distributed.all_gather(both, straight)
        assert torch.equal(*both)

    in_processes(2, train)
    straight = untimed(tmp_path / "straight")
    assert any(record.get("grad_norm", 0.0) > 0 for record in straight)
    assert untimed(tmp_path / "stopped") == straight and len(straight) == last + 1
    if name == "dapo":  # the checkpoint knows how many prompts were taken
        assert max(record["dapo/batches"] for record in straight[1:3]) > 1


GRPO = {"objective": {"name": "GRPO"}}
REFUSED = [
    ("igrpo", {"recipe": {"template": "{draft}"}}, r"recipe.template must be a text with \{prompt\}"),
    ("igrpo", {}, "training dataset, row 7: .*last message of the user"),
    ("turns", {}, "recipe.feedback is missing"),
    ("turns", {"recipe": {"count": 1}}, "recipe.count must be greater than or equal to 2"),
    ("turns", {"recipe": {"feedback": f"{__name__}:wants_a_color"}}, "recipe.feedback .*'color'"),
    ("dapo", {"recipe": {"batches": 1, "metric": "odd"}}, "recipe.batches must be above 1 .* recipe.metric"),
    ("dapo", {"recipe": {"overlong_buffer": 6}}, r"recipe.overlong_buffer must be at most .*\(5\), got 6"),
    ("dapo", {"recipe": {"overlong_penalty": 0.5}}, "recipe.overlong_penalty .* recipe.overlong_buffer"),
    ("dapo", {"recipe": {"metric": "even"}}, "recipe.metric: no reward 'even'; there are odd"),
    ("veripo", {"recipe": {"dpo_steps": 21}}, r"recipe.dpo_steps must be at most recipe.grpo_steps \(20\)"),
    ("veripo", {"recipe": {"reward_weight": 0}}, "recipe.reward_weight must be above 0 .*no recipe.verifier"),
    ("veripo", {"kl": {"beta": 0.1}}, "kl.beta must be 0"),
    ("veripo", {"update": {"minibatches": 4}}, "update.minibatches must be at most the 3 prompts"),
    ("veripo", {"objective": {"name": "TRPA"}}, "objective.name: TRPA has a reference"),
    (
        "veripo",
        {"recipe": {"verifier": f"{__name__}:wants_a_color"}},
        "wants_a_color cannot be called.*color",
    ),
    ("distillation", {"advantages": "gdpo"}, "advantages must be .* without recipe.reward_coef"),
    ("distillation", {}, "either recipe.teacher or recipe.url"),
    ("distillation", {"recipe": {"teacher": "any"}}, "GSPO takes no advantages per token"),
    ("distillation", {"recipe": {"teacher": "nowhere"}} | GRPO, "nowhere"),
    ("distillation", {"recipe": {"url": "http://localhost:9"}} | GRPO, "cannot be reached"),
    (
        "distillation",
        {"recipe": {"url": "http://b"}, "rollout": {"temperature": 0.5}},
        "rollout.temperature must be 1",
    ),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[0]} {case[2]:.30}")
def test_wrong_options_are_refused_before_any_write(tmp_path, tokenizer, monkeypatch, case):
    name, sections, words = case
    rows = ROWS
    monkeypatch.setattr("gspo_kernels.trainer.vllm.WAIT", 0.0)  # for a server that is not there
    if "row 7" in words:
        monkeypatch.setattr(tokenizer, "chat_template", "{{ messages[0].content }}", raising=False)
        rows = [*ROWS, {"prompt": [{"role": "system", "content": "only"}], "letter": "x"}]
    with pytest.raises(InputError, match=words):
        make_trainer(name, tmp_path / "run", tokenizer, rows, odd, **sections)
    assert not (tmp_path / "run").exists()


def test_wrong_feedback_is_named_and_nothing_is_lost(tmp_path, tokenizer):
    for name, words in (
        ("too_few", r"returned \['a'\], expected a list of 3 texts"),
        ("raises", "raised ValueError.*out of order"),
    ):
        recipe = {"feedback": f"{__name__}:{name}"}
        trainer = make_trainer("turns", tmp_path / name, tokenizer, ROWS, odd, recipe=recipe)
        with pytest.raises(InputError, match=f"recipe.feedback .*{name} {words}"):
            trainer.train()
        assert (tmp_path / name / "checkpoints" / "step_000000").is_dir()


def test_pairs_by_hand():
    """In two groups of four, completions without a score, a counted token or a rival are in no pair."""
    scores = torch.tensor([1.0, 0.0, NAN, 0.9, 0.5, 0.5, 0.5, 9.0])
    mask = torch.ones(16, dtype=torch.bool)
    mask[14:] = False  # the last completion, masked as if truncated
    tokens = [torch.tensor([1, 2])] * 8
    batch = Batch(tokens, tokens, torch.randn(8), mask, torch.arange(8) // 4, torch.randn(16))
    found = veripo.in_pairs(DPO(min_gap=0.5), batch, scores)
    assert found.counted.bool().tolist() == [True, True, False, True, False, False, False, False]
    assert found.rollout_logprobs is None and found.ref_logprobs is None
    # The first and the fourth beat the second; their scores are too near to each other for a pair.
    present = found.counted > 0
    assert DPO(min_gap=0.5).count_pairs(found.advantages.double(), found.group_ids, present) == 2


def test_phases_of_veripo(learned):
    trainer, records = learned
    assert [record["phase"] for record in records] == [0] * 4 + [1] * 3 + [0] * 4
    assert ["reward/mean" in record for record in records] == [record["phase"] == 0 for record in records]
    # The verifier scores only the rollouts that DPO will use.
    scored = [False, True, True, True]
    assert ["verifier/mean" in record for record in records] == [*scored, *[False] * 3, *scored]
    # The reference of a DPO phase is the policy at its start, so the first loss is log 2.
    assert records[4]["pairs"] > 0 and records[5]["pairs"] > 0
    assert records[4]["minibatch_1/loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert records[5]["minibatch_1/loss"] != pytest.approx(math.log(2), rel=1e-6)
    assert trainer.prompts_used == 8 * 6  # steps of DPO skip no prompt


@pytest.fixture
def teacher(tmp_path, tokenizer):
    """Return the directory of a model with other weights than the policy's."""
    for each in (tiny_qwen3(tokenizer, seed=1), tokenizer):
        each.save_pretrained(tmp_path / "teacher")
    return str(tmp_path / "teacher")


@pytest.mark.parametrize(
    ("name", "recipe", "metric"),
    [
        ("igrpo", {"drafts": 2, "template": "{prompt};{draft};"}, "reward/refinements"),
        ("turns", {"count": 2, "feedback": f"{__name__}:goes_on"}, "reward/turn_2"),
        ("distillation", {}, "distillation/reverse_kl"),
    ],
)
def test_short_runs(tmp_path, tokenizer, teacher, name, recipe, metric):
    recipe = recipe or {"teacher": teacher}
    sections = GRPO | {"recipe": recipe, "update": {"steps": 2}, "evaluation": {"every": 2}}
    make_trainer(name, tmp_path / "run", tokenizer, ROWS, odd_share, eval_rows=ROWS, **sections).train()
    start, *records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(math.isfinite(record[metric]) and record["grad_norm"] > 0 for record in records)
    assert "eval/sampled_reward" in start and len(records) == 2


def served(tokenizer):
    """Return a stand-in for `VLLMServer.ask`; the log-prob of a token is minus its id over 100."""

    def ask(self, path, body=None, read=lambda answer: answer):
        if path == "/v1/models":
            return read({"data": [{"id": "teacher"}]})
        if path == "/tokenize":
            return {"tokens": tokenizer.encode(body["prompt"], add_special_tokens=False)}
        assert body["model"] == "teacher" and body["prompt_logprobs"] == 0 and body["max_tokens"] == 1
        scored = [None, *({str(token): {"logprob": -token / 100}} for token in body["prompt"][1:])]
        return {"choices": [{"prompt_logprobs": scored}]}

    return ask


@pytest.mark.parametrize("where", ["in process", "served"])
def test_advantages_are_teacher_minus_policy(tmp_path, tokenizer, teacher, monkeypatch, where):
    place = {"teacher": teacher}
    if where == "served":
        monkeypatch.setattr(VLLMServer, "ask", served(tokenizer))
        place = {"url": "http://localhost:8000"}
    sections = {"recipe": {"coef": 2.0, "reward_coef": 0.5} | place} | GRPO
    trainer = make_trainer("distillation", tmp_path / "run", tokenizer, ROWS, odd, **sections)
    trainer.step = 1
    rollout = trainer.rollout()
    batch = trainer.compare(rollout)
    sequences = (batch.prompts, batch.completions)
    policy = plain_logprobs(trainer.model, *sequences)
    scored = -torch.cat(list(batch.completions)) / 100
    if where != "served":
        scored = plain_logprobs(AutoModelForCausalLM.from_pretrained(teacher), *sequences)
    plain = super(type(trainer), trainer).compare(rollout)
    expected = 2.0 * (scored - policy) + 0.5 * plain.by_token(plain.advantages)
    mask = batch.loss_mask
    torch.testing.assert_close(batch.advantages[mask], expected[mask], rtol=1e-4, atol=1e-5)
    distance = float((policy - scored)[mask].mean())
    assert rollout.metrics["distillation/reverse_kl"] == pytest.approx(distance, rel=1e-4)
    # The old log-probs are those of the advantages, so ratios of the first minibatch are 1.
    assert trainer.update(batch)["minibatch_1/ratio/max"] == pytest.approx(1.0)


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path, tokenizer, teacher):
    other = demo.make_tokenizer()
    other.add_tokens(["<|more|>"])
    other.save_pretrained(teacher)
    sections = {"recipe": {"teacher": teacher}} | GRPO
    with pytest.raises(InputError, match="another tokenizer"):
        make_trainer("distillation", tmp_path / "run", tokenizer, ROWS, odd, **sections)
