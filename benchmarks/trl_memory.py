"""Peak memory of one loss and its gradient in TRL's trainer and in ours, at a vocabulary of 152k.

Each contestant runs in a process of its own: trainer and inputs are built, the high-water mark of resident
memory is read (VmHWM, Linux), ``compute_loss`` and ``backward`` run, and it is read again. The model is one
narrow layer, so that the head is what shows. Gradients of the two [V, H] weights are part of it for both.

    python -m benchmarks.trl_memory --prompt 256 --completion 256
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

VOCABULARY, WIDTH, SEQUENCES = 151936, 64, 4
MIB = 2**20
CONTESTANTS = ("TRL", "ours", "ours, 64 MiB of logits")


def make_trainer(contestant: str, folder: str) -> Any:
    """A GSPO trainer of fp32 weights."""
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from gspo_kernels.integrations.trl import FusedGRPOTrainer
    from gspo_kernels.trainer.demo import make_tokenizer

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=WIDTH,
    )  # fmt: skip
    arguments = GRPOConfig(
        folder, use_cpu=True, bf16=False, report_to="none", loss_type="grpo",
        importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4,
        per_device_train_batch_size=SEQUENCES, num_generations=SEQUENCES,
    )  # fmt: skip
    kind = GRPOTrainer if contestant == "TRL" else FusedGRPOTrainer
    limited: dict[str, Any] = {"max_chunk_bytes": 64 * MIB} if "64" in contestant else {}
    return kind(
        Qwen3ForCausalLM(config),
        lambda completions, **_: [0.0] * len(completions),
        arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * SEQUENCES}),
        processing_class=make_tokenizer(),
        **limited,
    )


def inputs(prompt: int, completion: int) -> dict[str, torch.Tensor]:
    """What TRL's generation would hand over; nothing is clipped, so that every token has a gradient."""
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


def resident(what: str) -> int:
    """Bytes of resident memory: "VmRSS" now, "VmHWM" at most so far."""
    return int(Path("/proc/self/status").read_text().split(f"{what}:")[1].split()[0]) * 1024


def child(contestant: str, prompt: int, completion: int) -> None:
    """Print by how many bytes a loss and its gradient raise the peak."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(contestant, folder)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1

    def step(*shape: int) -> None:
        trainer.compute_loss(trainer.model, inputs(*shape)).backward()
        trainer.model.zero_grad()

    step(2, 2)  # libraries load, buffers of the matrix products come into being
    batch = inputs(prompt, completion)
    # the mark starts anew
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmHWM")
    trainer.compute_loss(trainer.model, batch).backward()
    print(resident("VmHWM") - before)


def measure(contestant: str, prompt: int, completion: int) -> int:
    """Bytes, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.trl_memory", "--prompt", str(prompt)]
    command += ["--completion", str(completion), "--contestant", contestant]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    if run.returncode:
        raise RuntimeError(run.stderr[-3000:])
    return int(run.stdout.split()[-1])


def main() -> None:
    """Run one contestant, or all of them and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=256, help="tokens per prompt")
    parser.add_argument("--completion", type=int, default=256, help="tokens per completion")
    parser.add_argument("--contestant", choices=CONTESTANTS, help="this one alone, in this process")
    asked = parser.parse_args()
    if asked.contestant:
        child(asked.contestant, asked.prompt, asked.completion)
        return
    print(f"V={VOCABULARY}, H={WIDTH}, {SEQUENCES} sequences of {asked.prompt} + {asked.completion} tokens")
    for contestant in CONTESTANTS:
        print(f"{contestant:24} {measure(contestant, asked.prompt, asked.completion) / MIB:7.0f} MiB")


if __name__ == "__main__":
    main()
