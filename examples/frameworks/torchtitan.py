"""GSPO as a loss of torchtitan's RL trainer, from hidden states.

Read at torchtitan 0.3.0, whose own RL losses, DAPO and GRPO, have a ratio per token: `ChunkedLossWrapper`
runs their backward chunk by chunk along the sequence. This loss takes its place. Tested on a CPU with
torchtitan's packing, trainer step, model and FSDP2; not run with vLLM or on a GPU. In the configuration:

    trainer=PolicyTrainer.Config(loss=GSPOLoss.Config(), ...),
    batcher=SequenceBatcher.Config(...),

The trainer passes no positions to a loss, so `SequenceBatcher` marks where sequences begin in a packed row:
the label of a sequence's first token, but not of a row's, is stored as -1 - label. Logits never exist as a
whole, and prompts and padding are not projected.

The trainer counts tokens, so the loss is a mean over tokens, where GSPO's is one over sequences. The paper's
clip range is for log-probs that the trainer recomputed. Here old log-probs are the generator's: a range of
3e-4 clips most sequences unless both compute alike. Data parallelism and FSDP2 are served; tensor, context
and pipeline parallelism are not. Another objective goes into `__init__`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
from torchtitan.config import CompileConfig
from torchtitan.experiments.rl.components.batcher import Batcher

import gspo_kernels as gk


class SequenceBatcher(Batcher):
    """torchtitan's batcher, whose rows say where sequences begin."""

    @dataclass(kw_only=True, slots=True)
    class Config(Batcher.Config):
        """Options of torchtitan's batcher."""

    def _pack_training_sample_row(self, training_samples: list[Any]) -> dict[str, Any]:
        row = super()._pack_training_sample_row(training_samples)
        starts = torch.tensor(row["seq_lens"], dtype=torch.int64).cumsum(0)[:-1]
        row["labels"][0, starts] = -1 - row["labels"][0, starts]
        return row


class GSPOLoss(ChunkedLossWrapper):
    """GSPO over whole sequences. As a `ChunkedLossWrapper` it gets hidden states and the lm_head."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """Options of the loss."""

        clip_low: float = 3e-4
        """Clip range of the sequence's ratio below 1."""

        clip_high: float = 4e-4
        """Clip range of the sequence's ratio above 1."""

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        del compile_config  # the loss is one operator
        # with advantages per token; where these are equal in a sequence it is GSPO
        self.objective = gk.GSPOToken(config.clip_low, config.clip_high, aggregation="token_mean")

    def set_lm_head(self, lm_head: torch.nn.Module) -> None:
        """Make ``lm_head`` compute the loss instead of logits, so that FSDP's hooks run around it."""
        kind = type(lm_head).forward.__qualname__
        if kind not in ("Linear.forward", "CastLinear.forward"):
            raise ValueError(f"lm_head: got {kind}, expected a linear layer without scale or softcap")
        self.lm_head = lm_head
        lm_head.forward = functools.partial(self._loss, lm_head)

    def __call__(
        self,
        pred: Tensor,
        labels: Tensor,
        global_valid_tokens: float | None = None,
        *,
        generator_logprobs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return one micro-batch's part of the loss, and metrics that add up like it.

        Args:
            pred: hidden states [B, L, H].
            labels: [B, L], from ``SequenceBatcher``.
            global_valid_tokens: how many tokens of the step count, on all ranks.
            generator_logprobs, advantages, loss_mask: [B, L]; tokens without a finite log-prob are masked.
        """
        for name, value in {"pred": pred, "labels": labels}.items():
            if isinstance(value, DTensor):
                raise ValueError(
                    f"{name}: got a DTensor, expected a tensor; tensor parallelism is not served"
                )
        return self.lm_head(pred, labels, global_valid_tokens, generator_logprobs, advantages, loss_mask)

    def _loss(
        self,
        lm_head: torch.nn.Linear,
        hidden: Tensor,
        labels: Tensor,
        global_valid_tokens: float | None,
        generator_logprobs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        begins = labels < 0
        labels = torch.where(begins, -1 - labels, labels)
        begins[:, 0] = True
        starts = begins.flatten().nonzero().squeeze(1)
        mask = loss_mask & generator_logprobs.isfinite()
        tokens = mask.sum()
        count = max(global_valid_tokens, 1) if global_valid_tokens is not None else 1
        out = gk.fused_linear_policy_loss(
            hidden.flatten(0, 1),
            lm_head.weight,
            labels.flatten(),
            generator_logprobs.flatten(),
            advantages.flatten(),
            bias=lm_head.bias,
            loss_mask=mask.flatten(),
            cu_seqlens=torch.cat([starts, starts.new_tensor([labels.numel()])]).int(),
            normalizer=count,
            objective=self.objective,
        )
        share = tokens / count
        return out.loss, {
            "loss/mean": out.loss.detach(),
            "loss/ratio_mean": out.metrics["ratio/mean"] * share,
            "loss/ratio_clipped_frac": out.metrics["clip_fraction/tokens"] * share,
            "loss/ratio/max": torch.where(tokens > 0, out.metrics["ratio/max"], 0.0),
        }
