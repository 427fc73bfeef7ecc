"""The suite ``trl_memory``: peak memory of one loss and its gradient in TRL's trainer and in ours.

The vocabulary is that of Qwen. The model has one narrow layer, so that the head dominates. Gradients of the
two [V, H] weights are part of the peak in both trainers. Each trainer runs in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.registry import Options, suite
from benchmarks.resident import give_memory_back, peak_of_this_process
from benchmarks.tables import aligned, number

VOCABULARY, WIDTH, SEQUENCES = 151936, 64, 4
MIB = 2**20
TRAINERS: dict[str, dict[str, Any]] = {
    "TRL": {},
    "ours": {},
    "ours, 64 MiB of logits": {"max_chunk_bytes": 64 * MIB},
}
"""Options of each trainer, by name."""


def make_trainer(name: str, folder: str) -> Any:
    """Create a GSPO trainer with fp32 weights."""
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from gspo_kernels.demo import make_tokenizer
    from gspo_kernels.integrations.trl import FusedGRPOTrainer

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=WIDTH,
    )  # fmt: skip
    args = GRPOConfig(
        folder, use_cpu=True, bf16=False, report_to="none", loss_type="grpo",
        importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4,
        per_device_train_batch_size=SEQUENCES, num_generations=SEQUENCES,
    )  # fmt: skip
    kind = GRPOTrainer if name == "TRL" else FusedGRPOTrainer
    return kind(
        Qwen3ForCausalLM(config),
        lambda completions, **_: [0.0] * len(completions),
        args,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * SEQUENCES}),
        processing_class=make_tokenizer(),
        **TRAINERS[name],
    )


def inputs(prompt: int, completion: int) -> dict[str, torch.Tensor]:
    """Return inputs like those of TRL's generation. Nothing is clipped, so every token has a gradient."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (SEQUENCES, prompt + completion), generator=rng)
    return {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": torch.ones_like(ids[:, :prompt]),
        "completion_ids": ids[:, prompt:],
        "completion_mask": torch.ones_like(ids[:, prompt:]),
        "advantages": torch.ones(SEQUENCES),
        "old_per_token_logps": torch.zeros(SEQUENCES, completion),
        "num_items_in_batch": torch.tensor(SEQUENCES * completion),
    }


def print_peak(name: str, prompt: int, completion: int) -> None:
    """Print by how many bytes a loss and its gradient raise the peak of this process's resident memory."""
    give_memory_back()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(name, folder)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    # a small call first, in which libraries load and the matrix products get their buffers
    trainer.compute_loss(trainer.model, inputs(2, 2)).backward()
    trainer.model.zero_grad()
    batch = inputs(prompt, completion)
    with peak_of_this_process() as peak:
        trainer.compute_loss(trainer.model, batch).backward()
        print(peak())


def measure(name: str, prompt: int, completion: int) -> int:
    """Return the peak in bytes, measured in a process of its own.

    Raises:
        RuntimeError: the process failed; the message is the end of its standard error.
    """
    code = f"from benchmarks import trl_memory; trl_memory.print_peak({name!r}, {prompt}, {completion})"
    command, root = [sys.executable, "-c", code], Path(__file__).parents[1]
    run = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    if run.returncode:
        raise RuntimeError(run.stderr[-3000:])
    return int(run.stdout.split()[-1])


@suite("trl_memory", "Peak memory of a loss in TRL's trainer", everything=False)
def trl_memory(options: Options) -> dict[str, Any]:
    """Measure on a CPU under Linux, which tells a process's peak; needs TRL."""
    tokens = 8 if options.tiny else 256
    peaks = {name: measure(name, tokens, tokens) for name in TRAINERS}
    about = f"{SEQUENCES} sequences of {tokens} + {tokens} tokens, V={VOCABULARY:,}, H={WIDTH}"
    table = [[about, "peak MiB"], *([name, number(peak / MIB)] for name, peak in peaks.items())]
    print(aligned(table))
    return {"table": table}
