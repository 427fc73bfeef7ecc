"""A tiny model and fixed rollouts for TRL's trainer and ours, so that nothing but the loss can differ."""

import os
import random
import warnings
from pathlib import Path

import torch
from transformers import PrinterCallback
from trl import GRPOConfig

from gspo_kernels.trainer.demo import make_tokenizer
from tests.draws import shifted_seed

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout functions

LETTERS = 40
COMPLETION = 8
# the number of prompts that two processes take for one generation
PROMPTS = ["ab", "bcd", "c", "dabc", "ea", "fgh", "hgfe", "aa"] * 2


def save_model(folder: Path, seed: int = 0, **changes) -> str:
    """Save a random Qwen3, with experts if ``changes`` have some. TRL loads references from disk, too."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(shifted_seed(seed))
    options = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        # large enough for log-probs to differ from token to token
        "initializer_range": 0.1,
    }  # fmt: skip
    if "num_experts" in changes:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(options | changes)))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**(options | changes)))
    model.save_pretrained(folder)
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


def make_trainer(
    kind, model, output, *, tool_tokens=False, peft_config=None, max_chunk_bytes=None, **options
):
    """Return a trainer of class ``kind`` for the model at path ``model`` with GRPOConfig ``options``."""
    from datasets import Dataset

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
            **({} if max_chunk_bytes is None else {"max_chunk_bytes": max_chunk_bytes}),
        )
    trainer.remove_callback(PrinterCallback)
    return trainer


def weights(model) -> torch.Tensor:
    """Return all parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
