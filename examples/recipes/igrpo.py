"""iGRPO in small: a tiny model sorts three digits, and is trained to improve on the best of its own drafts.

python -m examples.recipes.igrpo
"""

import random
from itertools import product

from examples.recipes.tiny import arguments, make_start, rewards
from examples.rewards import per_digit
from gspo_kernels.trainer import GSPOTrainer, TrainConfig
from gspo_kernels.trainer.demo import exact
from gspo_kernels.trainer.run.config_file import from_mapping

TEMPLATE = "{prompt}{draft};"
"""What a refinement completes: "497=479;"."""


def make_rows(seed):
    """Return (training rows, held-out rows), which share no multiset of digits: no prompt and no answer."""
    generator = random.Random(seed)
    rows = [
        {"prompt": f"{a}{b}{c}=", "answer": "".join(sorted(a + b + c))}
        for a, b, c in product(*["0123456789"] * 3)
    ]
    answers = sorted({row["answer"] for row in rows})
    held_out = set(generator.sample(answers, len(answers) // 5))
    generator.shuffle(rows)
    return (
        [row for row in rows if row["answer"] not in held_out],
        [row for row in rows if row["answer"] in held_out],
    )


def warm_up_pairs(rows, seed):
    """Return (prompt, answer) pairs: of each row without a draft, with a right one, and with a wrong one."""
    generator = random.Random(seed)
    pairs = []
    for row in rows:
        wrong = list(row["answer"])
        i, j = generator.sample(range(3), 2)
        wrong[i], wrong[j] = wrong[j], wrong[i]
        pairs += [(row["prompt"], row["answer"])] * 2
        for draft in (row["answer"], "".join(wrong)):
            pairs.append((TEMPLATE.format(prompt=row["prompt"], draft=draft), row["answer"]))
    return pairs


def make_trainer(output, *, seed, steps, drafts=4):
    """Warm a tiny model up; return its trainer."""
    rows, held_out = make_rows(seed)
    model, tokenizer = make_start(warm_up_pairs(rows, seed), steps=40, seed=seed)
    config = from_mapping(
        {
            "output": str(output),
            "seed": seed,
            "threads": 1,
            "reward_weights": [0.5, 0.5],
            "igrpo": {"drafts": drafts, "template": TEMPLATE},
            "rollout": {"prompts_per_rollout": 16, "group_size": 8, "max_new_tokens": 4},
            "update": {
                "steps": steps,
                "minibatches": 4,
                "layout": "padded",
                "learning_rate": 3e-4,
                "learning_rate_decay": "linear",
                "adam_beta2": 0.99,
            },
            "evaluation": {"every": steps, "accuracy": "exact"},
        },
        TrainConfig,
    )
    return GSPOTrainer(model, tokenizer, [exact, per_digit], rows, held_out, config)


def main() -> None:
    """Train for less than a minute and say what was learned."""
    chosen = arguments(__doc__.splitlines()[0], "runs/igrpo", 60).parse_args()
    trainer = make_trainer(chosen.output, seed=chosen.seed, steps=chosen.steps)
    before = rewards(trainer, range(128))
    trainer.train(overwrite=True)
    after = rewards(trainer, range(128))
    print("\nmean reward on the same 128 prompts, before and after training on refinements")
    for name, words in (
        ("drafts", "drafts: one shot, as the model is used"),
        ("best_drafts", "the best of four drafts, which refinements see"),
        ("refinements", "refinements"),
    ):
        print(f"  {before[f'reward/{name}']:.3f} -> {after[f'reward/{name}']:.3f}   {words}")


if __name__ == "__main__":
    main()
