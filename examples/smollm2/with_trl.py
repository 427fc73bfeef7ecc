"""Steps of `examples.smollm2` by TRL's trainer and by ours, one after the other, for their time.

python -m examples.smollm2.with_trl, after `examples.smollm2`. Batch, group, length, updates and clip range of
both are those of sums.yaml. Times are seconds of the processor, so that other processes matter less.
"""

import json
import time
from typing import Any

import datasets
import yaml
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from examples.smollm2.__main__ import BASE, CONFIG, FOLDER, HELD_OUT, draw, prompt_of, sums
from gspo_kernels.rewards import last_number
from gspo_kernels.trainer import GSPOTrainer
from gspo_kernels.trainer.config import load_config, replaced

ROLLOUTS, AT_ONCE = 2, 32  # the first rollout warms up


class Clock(TrainerCallback):
    """Processor times at the ends of updates, each a step of TRL's trainer."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        """Note the time."""
        self.ends.append(time.process_time())


class TimedTrainer(GSPOTrainer):
    """Our trainer, which notes how long its last step took."""

    def take_step(self, *arguments: Any) -> None:
        """Take a step."""
        begun = time.process_time()
        super().take_step(*arguments)
        self.seconds = time.process_time() - begun


def options() -> dict[str, Any]:
    """Return TRL's options for the run of sums.yaml."""
    run = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    rollout, update, objective = run["rollout"], run["update"], run["objective"]
    passes = rollout["prompts_per_rollout"] * rollout["group_size"] // AT_ONCE
    return {
        "per_device_train_batch_size": AT_ONCE,
        "steps_per_generation": passes,
        "gradient_accumulation_steps": passes // update["minibatches"],
        "num_generations": rollout["group_size"],
        "max_completion_length": rollout["max_new_tokens"],
        "max_steps": ROLLOUTS * update["minibatches"],
        "learning_rate": update["learning_rate"],
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
        "epsilon": objective["clip_low"],
        "epsilon_high": objective["clip_high"],
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "output_dir": str(FOLDER / "trl"),
        "model_init_kwargs": {"dtype": "float32"},
    }


def by_trl() -> float:
    """Return the seconds of TRL's last step: sampling, scoring and all updates of a rollout."""
    rows = [{**row, "prompt": prompt_of(row["prompt"])} for row in sums()[HELD_OUT:]]
    clock, dataset = Clock(), datasets.Dataset.from_list(rows)
    GRPOTrainer(
        str(BASE), last_number, args=GRPOConfig(**options()), train_dataset=dataset, callbacks=[clock]
    ).train()
    return clock.ends[-1] - clock.ends[-1 - len(clock.ends) // ROLLOUTS]


def by_us() -> float:
    """Return the seconds of our last step."""
    config = load_config(CONFIG)
    config = replaced(config, "update", steps=ROLLOUTS)
    config = config.model_copy(update={"output": str(FOLDER / "timed"), "eval_dataset": None})
    trainer = TimedTrainer(str(BASE), None, last_number, sums()[HELD_OUT:], None, config)
    trainer.train(overwrite=True)
    return trainer.seconds


def main() -> None:
    """Time both, write seconds.json and draw."""
    seconds = {"gspo train": by_us(), "TRL": by_trl()}
    (FOLDER / "seconds.json").write_text(json.dumps(seconds) + "\n", encoding="utf-8")
    draw()
    print(seconds)


if __name__ == "__main__":
    main()
