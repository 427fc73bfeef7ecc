"""A tiny model and fixed rollouts for TRL's trainer and ours, so that nothing but the loss can differ."""

import os
import random
import warnings
from pathlib import Path

import torch
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import PrinterCallback
from trl import GRPOConfig

from gspo_kernels.demo import make_tokenizer
from tests.draws import shifted_seed
from tests.trainer.conftest import tiny_model

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout functions

LETTERS = 40
COMPLETION = 8
# the number of prompts that two processes take for one generation
PROMPTS = ["ab", "bcd", "c", "dabc", "ea", "fgh", "hgfe", "aa"] * 2


def save_model(folder: Path, family: str = "qwen3") -> str:
    """Save a random model with its tokenizer. TRL loads references from disk, too."""
    tokenizer = make_tokenizer()
    # weights large enough for log-probs to differ from token to token
    tiny_model(family, tokenizer, initializer_range=0.1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class Rollouts:
    """A rollout function that ignores the model: its nth call returns the same in every run."""

    def __init__(self, tool_tokens: bool = False):
        self.calls, self.tool_tokens = 0, tool_tokens

    def __call__(self, prompts, trainer):
        tokenizer = trainer.processing_class
        rng = random.Random(shifted_seed(1000 * self.calls + trainer.accelerator.process_index))
        self.calls += 1
        completions = []
        # First tokens differ: between equal contexts the last bit would decide which entropy is larger.
        for first in rng.sample(range(LETTERS), len(prompts)):
            ids = [first] + [rng.randrange(LETTERS) for _ in range(rng.randint(0, COMPLETION - 1))]
            completions.append(ids if len(ids) == COMPLETION else [*ids, tokenizer.eos_token_id])
        rollout = {
            "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": completions,
            "logprobs": None,
        }
        if self.tool_tokens:
            rollout["env_mask"] = [[int(i % 3 != 0) for i in range(len(ids))] for ids in completions]
        return rollout


def reward(prompts, completions, completion_ids, **columns):
    """Return each completion's share of odd token ids."""
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]


def configuration(output: Path, **options) -> GRPOConfig:
    values = {
        "output_dir": str(output), "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "report_to": "none", "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "seed": 3,
        "per_device_train_batch_size": 8, "num_generations": 4, "steps_per_generation": 4, "max_steps": 1,
        "max_completion_length": COMPLETION, "lr_scheduler_type": "constant", "learning_rate": 0.05,
        "optim": "sgd", "max_grad_norm": 0.0,
    }  # fmt: skip
    return GRPOConfig(**(values | options))


def make_trainer(kind, model, output, *, tool_tokens=False, peft_config=None, ours=None, **options):
    """Return a trainer of class ``kind`` for the model at path ``model`` with GRPOConfig ``options``.

    ``ours`` are arguments that TRL's trainer does not take.
    """
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = kind(
            model,
            reward,
            configuration(output, **options),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=tokenizer,
            rollout_func=Rollouts(tool_tokens),
            peft_config=peft_config,
            **(ours or {}),
        )
    trainer.remove_callback(PrinterCallback)
    return trainer


def whole(parameters) -> torch.Tensor:
    """Return all trained parameters as one vector, gathered where they are sharded."""
    trained = [p.detach() for p in parameters if p.requires_grad]
    return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).flatten() for p in trained])
