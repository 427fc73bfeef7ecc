"""Write docs/plan.png, the plan of a call: ``python docs/generate_plan.py``."""

from __future__ import annotations

from pathlib import Path

import torch

import gspo_kernels as gk
from gspo_kernels.linear.plan import SchedulePlan

LENGTHS = (4000, 2600, 1500, 900, 800, 700, 640, 500, 420, 380, 300, 250, 200, 180, 120, 100)


def plan() -> SchedulePlan:
    """Of a packed batch of sequences of very different lengths, with a KL term; only shapes count."""
    tokens, vocabulary, width = sum(LENGTHS), 32_000, 512
    hidden = torch.zeros(1, 1, requires_grad=True).expand(tokens, width)
    weight = torch.zeros(1, 1, requires_grad=True).expand(vocabulary, width)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    old, advantages = torch.zeros(tokens), torch.ones(len(LENGTHS))
    labels = torch.zeros(tokens, dtype=torch.int64)
    return gk.explain_schedule(
        hidden, weight, labels, old, advantages, cu_seqlens=offsets, ref_logprobs=old, kl_beta=0.05
    )


if __name__ == "__main__":
    plan().plot(Path(__file__).with_name("plan.png"))
