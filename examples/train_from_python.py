"""The trainer from Python, with objects instead of files: teach a tiny model to prefer capital letters.

python examples/train_from_python.py
"""

from gspo_kernels.demo import make_model, make_tokenizer
from gspo_kernels.trainer import GSPOTrainer, TrainConfig


def capitals(completions):
    """Return the share of capital letters in each completion."""
    return [sum("A" <= char <= "Z" for char in text) / max(len(text), 1) for text in completions]


def main() -> None:
    """Train for a minute and show what the model writes."""
    tokenizer = make_tokenizer()
    prompts = [{"prompt": f"{number}:"} for number in range(100)]
    config = TrainConfig(
        output="runs/capitals",
        rollout={"prompts_per_rollout": 8, "group_size": 8, "max_new_tokens": 8},
        update={"steps": 60, "minibatches": 4, "learning_rate": 3e-4},
    )
    trainer = GSPOTrainer(
        make_model(tokenizer, seed=0), tokenizer, capitals, prompts[:80], prompts[80:], config
    )
    trainer.train(overwrite=True)


if __name__ == "__main__":
    main()
