"""Turn-level groups in small: a tiny model guesses a hidden number, and reads after each guess where it lies.

python -m examples.recipes.turns

A guess earns 1 less a tenth of its distance. Who knows nothing does best to guess the middle, which earns
0.75 on average; who then halves what is left earns 0.90 in the second turn and 0.97 in the third.
"""

import random
import re

from examples.recipes.tiny import arguments, make_start, rewards
from gspo_kernels.trainer import GSPOTrainer, TrainConfig
from gspo_kernels.trainer.run.config_file import from_mapping

NUMBERS, TURNS = 10, 3
HALVING = (0.75, 0.90, 0.97)
"""What guesses earn that halve what is left: by adding up the ten cases."""


def closeness(completions, *, target, **columns):
    """1 less a tenth of the distance; 0 for what is not a digit."""
    return [
        1 - abs(int(text) - right) / NUMBERS if re.fullmatch(r"\d", text) else 0.0
        for text, right in zip(completions, target, strict=True)
    ]


def higher_or_lower(completions, *, target, **columns):
    """The environment: is the hidden number above (+), below (-) or equal (=)? (!): that was no number."""
    return [
        "!" if not re.fullmatch(r"\d", text) else "-=+"[(right > int(text)) - (right < int(text)) + 1]
        for text, right in zip(completions, target, strict=True)
    ]


def warm_up_pairs(seed):
    """Return (history, guess) pairs of games of one to three guesses; half of them heed the answers."""
    generator = random.Random(seed)
    pairs = []
    for number in range(4000):
        target, history, possible = generator.randrange(NUMBERS), "?", range(NUMBERS)
        for _ in range(number % TURNS):
            guess = generator.choice(possible)
            (said,) = higher_or_lower([str(guess)], target=[target])
            history += f"{guess}{said}"
            heeded = [n for n in possible if (n > guess) - (n < guess) == (target > guess) - (target < guess)]
            possible = heeded if number % 2 else possible
        pairs.append((history, str(generator.choice(possible))))
    return pairs


def make_trainer(output, *, seed, steps, keep="first"):
    """Warm a tiny model up; return its trainer."""
    model, tokenizer = make_start(warm_up_pairs(seed), steps=60, seed=seed)
    rows = [{"prompt": "?", "target": target} for target in range(NUMBERS)]
    config = from_mapping(
        {
            "output": str(output),
            "seed": seed,
            "threads": 1,
            "turns": {"count": TURNS, "keep": keep, "feedback": f"{__file__}:higher_or_lower"},
            "rollout": {"prompts_per_rollout": 16, "group_size": 8, "max_new_tokens": 2},
            "update": {
                "steps": steps,
                "minibatches": 4,
                "layout": "padded",
                "learning_rate": 1e-3,
                "learning_rate_decay": "linear",
                "adam_beta2": 0.99,
            },
            # The paper's range is for long sequences; the ratio of two tokens leaves it at once.
            "objective": {"name": "GSPO", "clip_low": 0.2, "clip_high": 0.27},
            "evaluation": {"every": steps},
        },
        TrainConfig,
    )
    return GSPOTrainer(model, tokenizer, closeness, rows, rows, config)


def main() -> None:
    """Train for less than a minute and say what was learned."""
    parser = arguments(__doc__.splitlines()[0], "runs/turns", 60)
    parser.add_argument("--keep", choices=("first", "best"), default="first", help="turns.keep")
    chosen = parser.parse_args()
    trainer = make_trainer(chosen.output, seed=chosen.seed, steps=chosen.steps, keep=chosen.keep)
    rows = list(range(NUMBERS)) * 8
    before = rewards(trainer, rows)
    trainer.train(overwrite=True)
    after = rewards(trainer, rows)
    print("\nmean reward of a guess before and after training, and what halving would earn")
    for turn, halving in enumerate(HALVING, start=1):
        name = f"reward/turn_{turn}"
        print(f"  turn {turn}: {before[name]:.3f} -> {after[name]:.3f}   ({halving:.2f})")


if __name__ == "__main__":
    main()
