"""One training run of the trainer, with old log-probs from a chosen source, as one record."""

import copy
import time

import torch

import gspo_kernels as gk
from examples.paper.old_logprobs import RoutingRecorder, changed_experts, parse
from examples.rewards import per_digit
from gspo_kernels.trainer import GSPOTrainer, TrainConfig, demo
from gspo_kernels.trainer.run.config_file import from_mapping

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
    experts_changed = use_source(trainer, source)
    torch.manual_seed(seed)
    before, every = trainer.evaluate(), []
    for trainer.step in range(1, steps + 1):
        experience, metrics = trainer.rollout()
        every.append(metrics | trainer.updater.update(experience, trainer.step))
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
    config = from_mapping(
        {
            "seed": seed,
            "threads": 1,
            "reward_weights": [0.5, 0.5],
            "rollout": {
                "prompts_per_rollout": prompts,
                "group_size": 8,
                "max_new_tokens": demo.DIGITS + 1,
            },
            "update": {
                "steps": steps,
                "minibatches": MINIBATCHES,
                "layout": "padded",
                "learning_rate": learning_rate,
                "learning_rate_decay": "linear",
                "adam_beta2": 0.99,
            },
            "objective": {
                "name": type(chosen).__name__,
                "clip_low": chosen.clip_low,
                "clip_high": chosen.clip_high,
            },
            "evaluation": {"prompts": len(held_out), "accuracy": "exact"},
        },
        TrainConfig,
    )
    return GSPOTrainer(model, tokenizer, [demo.exact, per_digit], rows, held_out, config)


def use_source(trainer, source):
    """Make a trainer take all old log-probs from a source; return the list that expert changes will go to.

    The updater scores the micro-batches of all minibatches in one call, and then runs the same micro-batches
    in the same order: the n-th pass of both sees the same tokens.
    """
    updater, open_source, changes = trainer.updater, parse(source), []
    updater.scores_first = True
    score, update = updater.score, updater.update
    scored = []

    def score_from_source(policy, experience, micro_batches):
        with open_source(policy) as (engine, on_logprobs), RoutingRecorder(engine.model) as recorder:
            found = score(engine, experience, micro_batches)
        scored[:] = recorder.passes
        return found._replace(logprobs=on_logprobs(found.logprobs))

    def update_and_compare(experience, step=0):
        with RoutingRecorder(trainer.model) as recorder:
            metrics = update(experience, step)
        # A minibatch whose groups all lack variance has no pass; the last passes are those of minibatches.
        whole = len(scored) == MINIBATCHES
        pairs = zip(scored, recorder.passes[-MINIBATCHES:], strict=True) if whole else ()
        if recorder.routers:
            changes.append([changed_experts(*pair) for pair in pairs] or None)
        return metrics

    updater.score, updater.update = score_from_source, update_and_compare
    return changes
