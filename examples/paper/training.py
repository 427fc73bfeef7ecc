"""One training run of the trainer, with old log-probs from a chosen source, as one record."""

import copy
import time
from dataclasses import replace

import torch

import gspo_kernels as gk
from examples.paper.old_logprobs import RoutingRecorder, changed_experts, parse
from examples.rewards import per_digit
from gspo_kernels.trainer import GSPOTrainer, TrainConfig, demo
from gspo_kernels.trainer.batch import rollout_metrics
from gspo_kernels.trainer.processes import seed_everything

MINIBATCHES = 4
OBJECTIVES = {
    "GRPO": gk.GRPO(clip_low=0.2, clip_high=0.27),
    "GSPO": gk.GSPO(clip_low=3e-4, clip_high=4e-4),
    "GSPO, GRPO's range": gk.GSPO(clip_low=0.2, clip_high=0.27),
}
"""The first two as in the paper's section 5.1; the third tells the effect of the ratio from the range's."""


def train(start, rows, held_out, *, objective, source, seed, steps, prompts=16, learning_rate=2e-4):
    """Train a copy of a starting point; return curves by step, and held-out accuracy before and after.

    "clip_tokens" and "experts_changed" have a value for each minibatch of each step; the latter compares
    with the pass that gave the old log-probs, and is None for a step with a minibatch without gradient.
    """
    started = time.process_time()
    trainer = make_trainer(
        start, rows, held_out, objective, seed, steps=steps, prompts=prompts, learning_rate=learning_rate
    )
    torch.set_num_threads(1)  # quickest for models as small as these
    before, every, experts_changed = trainer.evaluate(), [], []
    for trainer.step in range(1, steps + 1):
        seed_everything(seed, trainer.step)
        rollout = trainer.rollout()
        metrics, changed = update(trainer, trainer.compare(rollout), source)
        every.append(rollout_metrics(rollout) | metrics)
        experts_changed += changed
    after = trainer.evaluate()
    numbers = range(1, MINIBATCHES + 1)
    return {
        "objective": objective,
        "old_logprobs": source,
        "seed": seed,
        "cpu_seconds": time.process_time() - started,
        "reward": [metrics["reward/mean"] for metrics in every],
        "clip_tokens": [[m[f"minibatch_{n}/clip_fraction/tokens"] for n in numbers] for m in every],
        "experts_changed": experts_changed,
        "greedy_accuracy": [values["eval/greedy_accuracy"] for values in (before, after)],
        "sampled_accuracy": [values["eval/sampled_accuracy"] for values in (before, after)],
    }


def make_trainer(start, rows, held_out, objective, seed, *, steps, prompts, learning_rate):
    """Return the trainer of a copy of a starting point; its loop is driven from outside."""
    model, tokenizer = copy.deepcopy(start[0]), start[1]
    chosen = OBJECTIVES[objective]
    config = TrainConfig(
        seed=seed,
        reward_weights=(0.5, 0.5),
        rollout={"prompts_per_rollout": prompts, "group_size": 8, "max_new_tokens": demo.DIGITS + 1},
        update={
            "steps": steps,
            "minibatches": MINIBATCHES,
            "learning_rate": learning_rate,
            "learning_rate_decay": "linear",
        },
        objective={
            "name": type(chosen).__name__,
            "clip_low": chosen.clip_low,
            "clip_high": chosen.clip_high,
        },
        evaluation={"prompts": len(held_out)},
    )
    return GSPOTrainer(model, tokenizer, [demo.exact, per_digit], rows, held_out, config)


def update(trainer, batch, source):
    """Learn from a batch with old log-probs from a source; return metrics, and how many experts changed.

    Scoring takes the micro-batches of the update in the same order, so the n-th pass of both sees the same
    tokens. A minibatch whose groups all lack variance has no pass, and then nothing is compared.
    """
    updater = trainer.updater
    with parse(source)(updater.policy) as (engine, on_logprobs), RoutingRecorder(engine.model) as scored:
        old = on_logprobs(updater.score(engine, batch, trainer.step).logprobs)
    with RoutingRecorder(trainer.model) as learned:
        metrics = updater.update(replace(batch, old_logprobs=old), trainer.step)
    whole = len(scored.passes) == len(learned.passes) == MINIBATCHES
    pairs = zip(scored.passes, learned.passes, strict=True) if whole else ()
    return metrics, [[changed_experts(*pair) for pair in pairs] or None] if learned.routers else []
