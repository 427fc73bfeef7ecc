"""GSPO on one page: sample, reward, compare, update, plot. Copy this file and make it yours.

    python examples/one_page.py                              # a tiny model learns to sort four digits
    python examples/one_page.py --model DIR --learning-rate 1e-6 --precision bf16

For another task, write another `make_rows` and `reward`. Loss and advantages are public functions of
gspo_kernels; all else is plain PyTorch and transformers. `gspo train` adds what a long run needs: checkpoints
and resume, several devices, packed rows, adapters, vLLM.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import tyro
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

import gspo_kernels as gk

IGNORED = -100  # the label of a position that has no part in the loss
SHOWN = ("step", "reward", "ratio/max", "held_out/greedy", "held_out/sampled", "seconds")  # on the terminal
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Options:
    """The options of a run."""

    model: str | None = None  # a directory, or a name on the Hub; none: a tiny model, made here
    output: Path = Path("runs/one_page")  # metrics.jsonl, progress.png and model/ go there
    seed: int = 0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    precision: Literal["fp32", "bf16"] = "fp32"  # of products; weights and log-probs are fp32
    steps: int = 200  # rollouts
    prompts: int = 128  # in a rollout
    group_size: int = 4  # completions of a prompt, which are compared with each other
    max_new_tokens: int = 5
    temperature: float = 1.0
    minibatches: int = 4  # optimizer updates for each rollout
    micro_batch: int = 128  # sequences in one forward pass: memory, not results
    learning_rate: float = 3e-4
    clip_low: float = 3e-4  # the paper's range around a ratio of 1
    clip_high: float = 4e-4
    evaluate_every: int = 50  # steps


def make_rows(seed: int) -> tuple[Rows, Rows]:
    """Return rows to train on and rows to evaluate on, which share no answer: none can be memorized."""
    generator = random.Random(seed)
    answers = ["".join(digits) for digits in itertools.combinations_with_replacement("0123456789", 4)]
    generator.shuffle(answers)

    def rows(answers: list[str], count: int) -> Rows:
        drawn = generator.choices(answers, k=count)
        return [{"prompt": "".join(generator.sample(each, 4)) + "=", "answer": each} for each in drawn]

    held_out = len(answers) // 5
    return rows(answers[held_out:], 4096), rows(answers[:held_out], 512)


def reward(row: dict[str, str], completion: str) -> float:
    """Return 1 if the completion is exactly the right answer, else 0."""
    return float(completion == row["answer"])


def make_tiny_model(rows: Rows, seed: int, device: str) -> tuple[Any, Any]:
    """Return a tiny Qwen3, warmed up on a few right answers, and a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte_level.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level, pad_token="<|pad|>", eos_token="<|end|>")
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
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = random.Random(seed)
    for _ in range(60):
        texts = [row["prompt"] + row["answer"] + tokenizer.eos_token for row in generator.sample(rows, 64)]
        ids = torch.tensor(tokenizer(texts)["input_ids"], device=device)
        labels = ids.clone()
        labels[:, : len(rows[0]["prompt"])] = IGNORED
        model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


class Rollout(NamedTuple):
    """B completions, consecutive for a prompt; prompts have up to P tokens, completions up to C."""

    ids: Tensor  # [B, P + C]: prompts, padded on the left, and completions, padded on the right
    mask: Tensor  # [B, P + C] bool: False for padding
    labels: Tensor  # [B, C]: the completions' tokens and the end token, IGNORED after it
    rewards: Tensor  # [B] fp32

    def rows(self, index: Tensor) -> Rollout:
        """Return the completions with these indices."""
        return Rollout(*(field[index] for field in self))


@torch.no_grad()
def sample(model: Any, tokenizer: Any, rows: Rows, options: Options, greedy: bool = False) -> Rollout:
    """Complete the prompt of every row once, and score the completion."""
    prompts = [row["prompt"] for row in rows]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(options.device)
    # Every setting is stated, as a model's defaults would sample from another policy.
    drawn = {"do_sample": True, "temperature": options.temperature, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        repetition_penalty=1.0,
        **({"do_sample": False} if greedy else drawn),
    )
    with autocast(options):
        ids = model.generate(**inputs, generation_config=config)
    tokens = ids[:, inputs.input_ids.shape[1] :]
    ends = (tokens == tokenizer.eos_token_id).int()
    written = ends.cumsum(1) - ends == 0  # up to and including the first end token
    completions = tokenizer.batch_decode(
        tokens.where(written, tokenizer.pad_token_id), skip_special_tokens=True
    )
    rewards = torch.tensor([reward(*pair) for pair in zip(rows, completions, strict=True)])
    return Rollout(
        ids,
        mask=torch.cat([inputs.attention_mask.bool(), written], 1),
        labels=tokens.where(written, IGNORED),
        rewards=rewards.to(options.device),
    )


def autocast(options: Options) -> torch.autocast:
    """Return the context in which products have the precision of the options."""
    return torch.autocast(options.device.split(":")[0], torch.bfloat16, enabled=options.precision == "bf16")


def hidden_states(model: Any, rollout: Rollout) -> Tensor:
    """Return for each label the hidden state that predicts it, at the position before: [B, C, H]."""
    last = model.base_model(
        input_ids=rollout.ids,
        attention_mask=rollout.mask,
        position_ids=(rollout.mask.cumsum(1) - 1).clamp(min=0),
        use_cache=False,
    ).last_hidden_state
    return last[:, -rollout.labels.shape[1] - 1 : -1]


@torch.no_grad()
def old_logprobs(model: Any, rollout: Rollout, options: Options) -> Tensor:
    """Return fp32 log-probs [B, C], by the path of the new ones: a sampler's rounding exceeds clip ranges."""
    parts = []
    for index in torch.arange(len(rollout.ids)).split(options.micro_batch):
        part = rollout.rows(index)
        with autocast(options):
            hidden, weight = hidden_states(model, part), model.get_output_embeddings().weight
            scored = gk.linear_token_logprobs(hidden, weight, part.labels, temperature=options.temperature)
        parts.append(scored.logprobs)
    return torch.cat(parts)


def update(
    model: Any, optimizer: torch.optim.Optimizer, rollout: Rollout, options: Options
) -> dict[str, float]:
    """Take one optimizer step for each minibatch; return the metrics of the last one."""
    objective = gk.GSPO(options.clip_low, options.clip_high)
    advantages = gk.advantages.group_normalized(rollout.rewards, group_size=options.group_size)
    steps = []
    for index in torch.randperm(len(advantages)).chunk(options.minibatches):
        count = gk.normalizer(objective, rollout.labels[index] != IGNORED)
        # A completion without advantage has no gradient: it counts in the divisor and costs nothing.
        index = index[advantages[index].cpu() != 0]
        if len(index) > 0:
            # The first step has the weights that sampled: its old log-probs are the new ones, its ratios 1.
            old = old_logprobs(model, rollout.rows(index), options) if steps else None
            steps.append((index, count, old))
    metrics = {}
    for index, count, old in steps:
        for at in torch.arange(len(index)).split(options.micro_batch):
            part = rollout.rows(index[at])
            with autocast(options):
                out = gk.fused_linear_policy_loss(
                    hidden_states(model, part),
                    model.get_output_embeddings().weight,
                    part.labels,
                    old_logprobs=None if old is None else old[at],
                    advantages=advantages[index[at]],
                    temperature=options.temperature,
                    normalizer=count,
                    objective=objective,
                )
            out.loss.backward()
            metrics = {name: float(value) for name, value in out.metrics.items()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        metrics["grad_norm"] = float(norm)
    return metrics


def evaluate(model: Any, tokenizer: Any, rows: Rows, options: Options) -> dict[str, float]:
    """Return the mean reward on prompts that are never trained on."""
    ways = {"held_out/greedy": True, "held_out/sampled": False}
    return {
        name: float(sample(model, tokenizer, rows, options, greedy).rewards.mean())
        for name, greedy in ways.items()
    }


def plot(records: list[dict[str, float]], path: Path) -> None:
    """Draw the rewards, and how much of each step's last minibatch was clipped."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    for axes, what, names in zip(
        figure.subplots(1, 2),
        ("mean reward", "share of sequences"),
        (("reward", "held_out/greedy", "held_out/sampled"), ("clip_fraction/low", "clip_fraction/high")),
        strict=True,
    ):
        for name in names:
            points = [(record["step"], record[name]) for record in records if name in record]
            axes.plot(*zip(*points, strict=True), label=name, marker=".")
        axes.set(xlabel="step", ylabel=what)
        axes.legend()
    figure.savefig(path, dpi=120)


def main(options: Options) -> list[dict[str, float]]:
    """Train; return the metrics of every step, which are written to ``metrics.jsonl`` as well."""
    train_rows, held_out = make_rows(options.seed)
    if options.model is None:
        model, tokenizer = make_tiny_model(train_rows, options.seed, options.device)
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(options.device)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    optimizer = torch.optim.AdamW(
        model.parameters(), options.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
    )
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / options.steps)
    model.eval()  # without dropout, which would make old and new log-probs differ
    torch.manual_seed(options.seed)
    generator = random.Random(options.seed)
    options.output.mkdir(parents=True, exist_ok=True)
    records = []
    for step in range(options.steps + 1):
        record, start = {"step": float(step)}, time.monotonic()
        if step > 0:
            picked = generator.sample(train_rows, options.prompts)
            rows = [row for row in picked for _ in range(options.group_size)]
            rollout = sample(model, tokenizer, rows, options)
            record["reward"] = float(rollout.rewards.mean())
            record |= update(model, optimizer, rollout, options)
            decay.step()
            record["seconds"] = time.monotonic() - start
        if step % options.evaluate_every == 0 or step == options.steps:
            record |= evaluate(model, tokenizer, held_out, options)
        records.append(record)
        if step % 10 == 0:
            print("  ".join(f"{name} {value:.4g}" for name, value in record.items() if name in SHOWN))
    lines = (json.dumps(record) + "\n" for record in records)
    (options.output / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    plot(records, options.output / "progress.png")
    model.save_pretrained(options.output / "model")
    tokenizer.save_pretrained(options.output / "model")
    return records


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
