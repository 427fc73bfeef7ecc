"""Helpers of the tests of recipes: their trainers, and an engine that follows a script."""

import torch

from examples.recipes import dapo, distillation, igrpo, turns, veripo
from gspo_kernels.trainer.rollout import Completion
from tests.trainer.conftest import small_config, tiny_qwen3

RECIPES = {
    "igrpo": (igrpo.IGRPO, igrpo.Config),
    "turns": (turns.Turns, turns.Config),
    "dapo": (dapo.DAPO, dapo.Config),
    "veripo": (veripo.VeriPO, veripo.Config),
    "distillation": (distillation.Distillation, distillation.Config),
}


def make_trainer(
    name, output, tokenizer, rows, reward, *, engine=None, model=None, eval_rows=None, **sections
):
    trainer, kind = RECIPES[name]
    sections["update"] = {"micro_batch_tokens": 60} | sections.get("update", {})
    config = small_config(output, kind, **sections)
    model = model or tiny_qwen3(tokenizer)
    return trainer(model, tokenizer, reward, rows, eval_rows, config, engine=engine)


class Scripted:
    """An engine that completes the n-th copy of a prompt with ``script(prompt, n)`` and records its calls."""

    def __init__(self, tokenizer, script):
        self.tokenizer, self.script, self.calls = tokenizer, script, []

    def generate(self, prompts, sampling):
        texts = self.tokenizer.batch_decode(prompts)
        self.calls.append(texts)
        copies = [texts[:i].count(text) for i, text in enumerate(texts)]
        answers = [self.script(text, copy) for text, copy in zip(texts, copies, strict=True)]
        ids = self.tokenizer(answers)["input_ids"]
        return [Completion(torch.tensor(each), True, torch.full((len(each),), -1.0)) for each in ids]


def scripted(name, output, tokenizer, rows, script, reward, **sections):
    """Return a trainer at step 1: by default two prompts per rollout, in data order, two completions each."""
    sections["rollout"] = {"prompts_per_rollout": 2, "group_size": 2} | sections.get("rollout", {})
    engine = Scripted(tokenizer, script)
    trainer = make_trainer(name, output, tokenizer, rows, reward, engine=engine, **sections)

    def next_rows():
        count = trainer.config.rollout.prompts_per_rollout
        start, trainer.prompts_used = trainer.prompts_used, trainer.prompts_used + count
        return [place % len(rows) for place in range(start, start + count)]

    trainer.next_rows, trainer.step = next_rows, 1
    return trainer
