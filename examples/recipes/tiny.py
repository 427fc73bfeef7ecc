"""What the examples of recipes share: a tiny model that knows the form of its task, and little more."""

import argparse
import random
from pathlib import Path

import torch

from gspo_kernels.trainer.demo import make_model, make_tokenizer
from gspo_kernels.trainer.run.metrics import read_metrics

IGNORED = -100


def make_start(pairs, *, steps, seed):
    """Return a tiny Qwen3, trained for some steps on (prompt, completion) pairs, and its tokenizer."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    generator = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for _ in range(steps):
        rows = []
        for prompt, completion in generator.sample(pairs, 64):
            given, rest = tokenizer([prompt, completion + tokenizer.eos_token])["input_ids"]
            rows.append((torch.tensor(given + rest), torch.tensor([IGNORED] * len(given) + rest)))
        ids, labels = (
            torch.nn.utils.rnn.pad_sequence(column, batch_first=True, padding_value=filling)
            for column, filling in zip(zip(*rows, strict=True), (0, IGNORED), strict=True)
        )
        model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), tokenizer


def first_and_last(output, key, steps=10):
    """Return the mean of a metric over the first and over the last steps of a run."""
    values = [record[key] for record in read_metrics(Path(output) / "metrics.jsonl") if key in record]
    return sum(values[:steps]) / steps, sum(values[-steps:]) / steps


def rewards(trainer, rows):
    """Return the mean rewards that the recipe reports for a rollout of these rows, always with one seed."""
    _, metrics = trainer.recipe.rollout(rows, trainer.recipe.sampler.stages(0))
    return {name: value for name, value in metrics.items() if name.startswith("reward/")}


def arguments(description, output, steps):
    """Return the parser of an example's command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", default=output, help="directory of the run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=steps, help="rollouts")
    return parser
