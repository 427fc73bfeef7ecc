"""On-policy distillation in small: a tiny model sorts three digits, and a better one scores what it samples.

python -m examples.recipes.distillation
"""

from pathlib import Path

from examples.recipes.igrpo import make_rows
from examples.recipes.tiny import arguments, first_and_last, make_start
from examples.rewards import per_digit
from gspo_kernels.trainer import GSPOTrainer, TrainConfig
from gspo_kernels.trainer.demo import exact
from gspo_kernels.trainer.run.config_file import from_mapping


def make_teacher(directory, rows, *, steps, seed):
    """Train a tiny model on right answers for many steps; return its directory."""
    pairs = [(row["prompt"], row["answer"]) for row in rows]
    model, tokenizer = make_start(pairs, steps=steps, seed=seed + 1)
    for part in (model, tokenizer):
        part.save_pretrained(directory)
    return directory


def make_trainer(output, *, seed, steps, teacher_steps=300):
    """Train a teacher, warm a student up; return the student's trainer."""
    rows, held_out = make_rows(seed)
    teacher = make_teacher(Path(f"{output}_teacher"), rows, steps=teacher_steps, seed=seed)
    model, tokenizer = make_start([(row["prompt"], row["answer"]) for row in rows], steps=40, seed=seed)
    config = from_mapping(
        {
            "output": str(output),
            "seed": seed,
            "threads": 1,
            "distillation": {"teacher": str(teacher)},
            "objective": {"name": "GRPO", "aggregation": "token_mean"},
            "rollout": {"prompts_per_rollout": 64, "group_size": 2, "max_new_tokens": 4},
            "update": {
                "steps": steps,
                "minibatches": 2,
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
    chosen = arguments(__doc__.splitlines()[0], "runs/distillation", 60).parse_args()
    trainer = make_trainer(chosen.output, seed=chosen.seed, steps=chosen.steps)
    before = trainer.evaluate()
    after = trainer.train(overwrite=True)
    first, last = first_and_last(chosen.output, "distillation/reverse_kl")
    print("\nbefore and after learning from the teacher, of prompts that are never trained on")
    for kind in ("greedy", "sampled"):
        name = f"eval/{kind}_accuracy"
        print(f"  {before[name]:.3f} -> {after[name]:.3f}   accuracy, {kind}")
    print(f"  {first:.3f} -> {last:.3f}   nats per sampled token between student and teacher")


if __name__ == "__main__":
    main()
