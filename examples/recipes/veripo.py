"""VerIPO in small: a tiny model sorts digits, and a verifier who looks at the form of answers steers DPO.

python -m examples.recipes.veripo

The model puts up to four dots before its answer: "4097=" -> "..0479". The reward looks at the outcome alone,
the last four characters, so dots cost nothing. The verifier prefers answers without them.
"""

import argparse
import random

from examples.recipes.tiny import first_and_last, make_start
from gspo_kernels.trainer import GSPOTrainer, TrainConfig
from gspo_kernels.trainer.demo import DIGITS, make_rows
from gspo_kernels.trainer.run.config_file import from_mapping

DOTS = 4


def outcome(completions, *, answer, **columns):
    """Share of the last four characters that are right; 1 for the right answer, whatever stands before it."""
    return [
        sum(a == b for a, b in zip(text[-DIGITS:], right, strict=False)) / DIGITS
        for text, right in zip(completions, answer, strict=True)
    ]


def form(completions, **columns):
    """The verifier: 1 without a dot, 0 with four of them."""
    return [1.0 - min(text.count("."), DOTS) / DOTS for text in completions]


def warm_up_pairs(rows, seed):
    """Return (prompt, answer) pairs with zero to four dots before the answer."""
    generator = random.Random(seed)
    return [(row["prompt"], "." * generator.randint(0, DOTS) + row["answer"]) for row in rows]


def train(output, *, seed=0, steps=70, dpo_steps=5):
    """Make the model, train it, and return the trainer; with 0 DPO steps by the reward alone."""
    rows, held_out = make_rows(seed)
    model, tokenizer = make_start(warm_up_pairs(rows, seed), steps=60, seed=seed)
    phases = {"grpo_steps": 10, "dpo_steps": dpo_steps, "verifier": "examples.recipes.veripo:form"}
    config = from_mapping(
        {
            "output": str(output),
            "seed": seed,
            "threads": 1,
            "veripo": phases if dpo_steps else {},
            "rollout": {"prompts_per_rollout": 16, "group_size": 8, "max_new_tokens": DOTS + DIGITS + 1},
            "update": {"steps": steps, "minibatches": 4, "layout": "padded", "learning_rate": 1e-4},
            "evaluation": {"every": steps},
        },
        TrainConfig,
    )
    trainer = GSPOTrainer(model, tokenizer, outcome, rows, held_out, config)
    trainer.train(overwrite=True)
    return trainer


def main() -> None:
    """Train for less than a minute and say what was learned."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="runs/veripo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--dpo-steps", type=int, default=5, help="in each phase; 0: the reward alone")
    chosen = parser.parse_args()
    train(chosen.output, seed=chosen.seed, steps=chosen.steps, dpo_steps=chosen.dpo_steps)
    print("\nmean of the first and of the last ten rollouts (a right answer without dots has 5 tokens)")
    for name, key in (("reward", "reward/mean"), ("tokens", "completions/length")):
        first, last = first_and_last(chosen.output, key)
        print(f"  {name:<7} {first:.2f} -> {last:.2f}")


if __name__ == "__main__":
    main()
