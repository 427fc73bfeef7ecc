"""The demo: a tiny model learns to sort digits on a CPU in minutes, without any download.

Model, tokenizer and datasets are made in code and written as a model directory and jsonl files, which `gspo
train` uses like any others. The task is to sort four digits, ``"4097="`` to ``"0479"``. The digits of an eval
prompt, as a multiset, never occur in training, neither in the supervised warm-up nor in RL: the model can
memorize neither the prompt nor its answer.
"""

from __future__ import annotations

import json
import random
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import torch

from gspo_kernels.trainer.config import TrainConfig, from_mapping

DIGITS = 4
STEPS = 300
TRAIN_PROMPTS, HELD_OUT_PROMPTS = 4096, 512
FILES = ("base", "train.jsonl", "held_out.jsonl")
"""What `prepare` writes: the model's directory and two files of prompts."""


def exact(completions: list[str], answer: list[str]) -> list[float]:
    """Return 1 if a completion is exactly the sorted digits, otherwise 0."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def make_rows(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return training rows and held-out rows, without a common multiset of digits."""
    generator = random.Random(seed)
    multisets = list(combinations_with_replacement("0123456789", DIGITS))
    generator.shuffle(multisets)
    cut = len(multisets) // 5

    def draw(answers: list[tuple[str, ...]], count: int) -> list[dict[str, str]]:
        prompts: dict[str, str] = {}
        while len(prompts) < count:
            answer = generator.choice(answers)
            prompts["".join(generator.sample(answer, DIGITS)) + "="] = "".join(answer)
        return [{"prompt": prompt, "answer": answer} for prompt, answer in prompts.items()]

    return draw(multisets[cut:], TRAIN_PROMPTS), draw(multisets[:cut], HELD_OUT_PROMPTS)


def make_tokenizer() -> Any:
    """Return a tokenizer with one token for each byte, and two for padding and the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")


def make_model(tokenizer: Any, seed: int) -> Any:
    """Return a Qwen3 of 3 layers and width 96 with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=24,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def warm_up(model: Any, tokenizer: Any, rows: list[dict[str, str]], *, steps: int, seed: int) -> None:
    """Train on right answers for a few steps: sampling then finds some."""
    generator = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    model.train()
    for _ in range(steps):
        texts = [row["prompt"] + row["answer"] + tokenizer.eos_token for row in generator.sample(rows, 64)]
        ids = torch.tensor(tokenizer(texts)["input_ids"], dtype=torch.int64, device="cpu")
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, DIGITS:-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, DIGITS + 1 :].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()


def prepare(directory: Path, *, seed: int, warm_up_steps: int = 60) -> None:
    """Write ``base/`` (model and tokenizer), ``train.jsonl`` and ``held_out.jsonl`` into a directory."""
    train, held_out = make_rows(seed)
    directory.mkdir(parents=True, exist_ok=True)
    base, *names = FILES
    for name, rows in zip(names, (train, held_out), strict=True):
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed)
    warm_up(model, tokenizer, train, steps=warm_up_steps, seed=seed)
    model.save_pretrained(directory / base)
    tokenizer.save_pretrained(directory / base)


def make_config(directory: Path, *, seed: int, steps: int = STEPS) -> TrainConfig:
    """Return the configuration of the demo, with the files of `prepare`."""
    values: dict[str, Any] = {
        "model": str(directory / "base"),
        "dataset": str(directory / "train.jsonl"),
        "eval_dataset": str(directory / "held_out.jsonl"),
        "reward": "gspo_kernels.demo:exact",
        "output": str(directory),
        "seed": seed,
        "rollout": {
            "prompts_per_rollout": 128,
            "group_size": 4,
            "max_new_tokens": DIGITS + 1,
            "batch_size": 256,
        },
        "update": {"steps": steps, "learning_rate": 5e-4, "learning_rate_decay": "linear"},
        "objective": {"name": "GSPO", "clip_low": 3e-4, "clip_high": 4e-4},
        "evaluation": {"every": 25},
        "checkpoint": {"every": 100},
    }
    config: TrainConfig = from_mapping(values)
    return config
