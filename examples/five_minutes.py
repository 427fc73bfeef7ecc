"""From a plain GRPO loss in PyTorch to a fused GSPO loss from hidden states, one change at a time.

python -m examples.five_minutes

Prints what changes in the code, then what the change costs or saves: the time of forward and backward, and
the memory that they take on top of their inputs. All versions but the first compute the same loss.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import inspect
import math
import statistics
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import gspo_kernels as gk
from benchmarks.resident import peak_of_this_process


@dataclass
class Batch:
    """The inputs of a training step, for prompts with several completions each.

    Attributes:
        hidden: [B, T, H], the output of the model's backbone; requires a gradient.
        labels: [B, T], the token that follows each position, -100 where it does not count.
        old_logprobs: [B, T], log-probs of the labels under the policy that sampled.
        advantages: [B]; 0 where all completions of a prompt had the same reward.
    """

    hidden: Tensor
    labels: Tensor
    old_logprobs: Tensor
    advantages: Tensor


def plain_grpo(batch: Batch, head: nn.Linear) -> Tensor:
    """GRPO as its formula says: one ratio per token."""
    mask = batch.labels != -100
    logits = head(batch.hidden).float()
    index = batch.labels.clamp(min=0).unsqueeze(-1)
    logprobs = logits.log_softmax(-1).gather(-1, index).squeeze(-1)
    log_ratio = (logprobs - batch.old_logprobs) * mask
    ratio, advantages = log_ratio.exp(), batch.advantages.unsqueeze(1)
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - 0.2, 1 + 0.2) * advantages)
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


def plain_gspo(batch: Batch, head: nn.Linear) -> Tensor:
    """GSPO: one ratio per sequence, the geometric mean over its tokens, and a much smaller clip range."""
    mask = batch.labels != -100
    logits = head(batch.hidden).float()
    index = batch.labels.clamp(min=0).unsqueeze(-1)
    logprobs = logits.log_softmax(-1).gather(-1, index).squeeze(-1)
    log_ratio = (logprobs - batch.old_logprobs) * mask
    ratio, advantages = (log_ratio.sum(1) / mask.sum(1)).exp(), batch.advantages
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - 3e-4, 1 + 4e-4) * advantages)
    return losses.mean()


def fused_from_logits(batch: Batch, head: nn.Linear) -> Tensor:
    """One pass over the logits, the only large tensor that is kept: no log-softmax, no mask, no gather."""
    logits = head(batch.hidden)
    return gk.fused_policy_loss(
        logits,
        batch.labels,
        old_logprobs=batch.old_logprobs,
        advantages=batch.advantages,
        objective=gk.GSPO(3e-4, 4e-4),
    ).loss


def fused_from_hidden(batch: Batch, head: nn.Linear) -> Tensor:
    """The loss includes the output layer: logits exist a chunk at a time, and sequences without a gradient
    are left out of the backward's products.
    """
    return gk.fused_linear_policy_loss(
        batch.hidden,
        head.weight,
        batch.labels,
        old_logprobs=batch.old_logprobs,
        advantages=batch.advantages,
        objective=gk.GSPO(3e-4, 4e-4),
    ).loss


def without_idle_sequences(batch: Batch, head: nn.Linear) -> Tensor:
    """Sequences without an advantage are left out of the forward's product as well: their log-probs are
    NaN, and metrics are those of the other sequences.
    """
    return gk.fused_linear_policy_loss(
        batch.hidden,
        head.weight,
        batch.labels,
        old_logprobs=batch.old_logprobs,
        advantages=batch.advantages,
        objective=gk.GSPO(3e-4, 4e-4),
        skip_inactive="all",
    ).loss


Version = Callable[[Batch, nn.Linear], Tensor]
VERSIONS: tuple[Version, ...] = (
    plain_grpo,
    plain_gspo,
    fused_from_logits,
    fused_from_hidden,
    without_idle_sequences,
)


def make_problem(options: argparse.Namespace) -> tuple[Batch, nn.Linear]:
    """Return a random batch and a head; half of the prompts have completions of equal reward."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    generator = torch.Generator().manual_seed(0)
    sequences = options.prompts * options.completions
    head = nn.Linear(options.width, options.vocabulary, bias=False, device=device, dtype=dtype)
    hidden = torch.randn(sequences, options.tokens, options.width, generator=generator)
    labels = torch.randint(options.vocabulary, (sequences, options.tokens), generator=generator)
    lengths = torch.randint(options.tokens // 2, options.tokens + 1, (sequences, 1), generator=generator)
    labels[torch.arange(options.tokens) >= lengths] = -100
    rewards = torch.rand(options.prompts, options.completions, generator=generator)
    rewards[::2] = 1.0
    spread = rewards.std(1, keepdim=True)
    advantages = torch.where(spread > 0, (rewards - rewards.mean(1, keepdim=True)) / spread, 0.0).flatten()
    hidden, labels, advantages = (x.to(device) for x in (hidden.to(dtype), labels, advantages))
    with torch.no_grad():
        now = gk.linear_token_logprobs(hidden, head.weight, labels).logprobs
    noise = 0.01 * torch.randn(now.shape, generator=generator).to(device)
    return Batch(hidden.requires_grad_(), labels, (now + noise) * (labels != -100), advantages), head


def step(version: Version, batch: Batch, head: nn.Linear) -> Tensor:
    """Run forward and backward, without gradients from before; return the loss."""
    batch.hidden.grad = head.weight.grad = None
    loss = version(batch, head)
    loss.backward()
    return loss.detach()


def seconds(run: Callable[[], Tensor], rounds: int) -> float:
    """Return the median seconds of ``rounds`` runs, after one that doesn't count."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        run().item()  # waits for the device
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def peak(version: Version, batch: Batch, head: nn.Linear) -> float:
    """Return the peak bytes of a step on top of its inputs; NaN if the system doesn't report them."""
    batch.hidden.grad = head.weight.grad = None
    if batch.hidden.is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(version, batch, head)
        return torch.cuda.max_memory_allocated() - before
    if not Path("/proc/self/clear_refs").exists():
        return math.nan
    with peak_of_this_process() as measured:
        step(version, batch, head)
        return measured()


def changes(before: Version | None, after: Version) -> str:
    """Return the lines of a version's body, with the differences from the previous version marked."""

    def body(version: Version) -> list[str]:
        return textwrap.dedent(inspect.getsource(version).split('"""')[2]).strip("\n").splitlines()

    lines = body(after)
    if before is None:
        return textwrap.indent("\n".join(lines), "    ")
    return "\n".join(f"  {line}" for line in difflib.ndiff(body(before), lines) if not line.startswith("?"))


def main(arguments: list[str] | None = None) -> None:
    """Print the code, time and memory of all versions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--completions", type=int, default=4, help="for each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="of the longest completion")
    parser.add_argument("--width", type=int, default=512, help="of the hidden states")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    batch, head = make_problem(options)
    shape = f"[{options.prompts * options.completions}, {options.tokens}]"
    print(f"{shape} tokens, V={options.vocabulary:,}, H={options.width}, {options.dtype}, {options.device}")
    before: Version | None = None
    first = (math.nan, math.nan)
    for version in VERSIONS:
        loss = step(version, batch, head).item()
        took = seconds(functools.partial(step, version, batch, head), options.rounds)
        held = peak(version, batch, head)
        first = (took, held) if before is None else first
        print(f"\n## {version.__name__}\n\n{inspect.getdoc(version)}\n\n{changes(before, version)}\n")
        print(f"    loss {loss:.6f}   {took * 1e3:,.0f} ms, {took / first[0]:.2f} of the first   ", end="")
        print(f"{held / 2**20:,.0f} MiB, {held / first[1]:.2f} of the first", flush=True)
        before = version


if __name__ == "__main__":
    main()
