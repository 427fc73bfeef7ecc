"""From a scored rollout to new weights: old log-probs once, then one optimizer update per minibatch.

Every minibatch uses the log-probs that the rollout's weights gave its tokens, computed by the same kernel
from the same rows; so the ratio of the first minibatch is exactly 1, and what the clip range sees later is
the policy's change and not the difference between two code paths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.trainer.config import UpdateConfig
from gspo_kernels.trainer.models import head_of, hidden_states
from gspo_kernels.trainer.rewards import Rewards
from gspo_kernels.trainer.rollout import Completions


@dataclass(frozen=True)
class Experience:
    """One rollout, scored.

    Attributes:
        completions: B = prompts * group_size rows; a group's rows are consecutive.
        rewards: what the reward functions said.
        advantages: [B] fp32.
        loss_mask: [B, C] bool, tokens that the loss counts.
    """

    completions: Completions
    rewards: Rewards
    advantages: Tensor
    loss_mask: Tensor


def outer_count(objective: Any, loss_mask: Tensor) -> int:
    """Return what the objective divides by over a whole minibatch: its sequences, its tokens, or 1.

    Given to every micro-batch as its normalizer, it makes their gradients add up to the minibatch's.
    """
    counted, _ = objective.outer_divisor()
    counts = {"one": 1, "tokens": int(loss_mask.sum()), "sequences": int(loss_mask.any(1).sum())}
    return max(counts[counted], 1)


def learning_rate_factor(update: int, config: UpdateConfig) -> float:
    """Return what the learning rate is multiplied by in the optimizer update of this index, from 0."""
    warmup = config.warmup_updates
    if update < warmup:
        return (update + 1) / (warmup + 1)
    if config.learning_rate_decay == "none":
        return 1.0
    rest = max(config.steps * config.minibatches - warmup, 1)
    return max(1.0 - (update - warmup) / rest, 0.0)


class PolicyUpdater:
    """Owns the optimizer, the learning rate's schedule and the objective.

    Args:
        accelerator: accelerate's, which runs backward passes and clips gradients.
        model: the causal language model that is trained; it is moved to the accelerator's device.
        objective: the policy objective.
        config: minibatches and AdamW.
        temperature: what the completions were sampled with, and are therefore scored with.
    """

    def __init__(
        self, accelerator: Any, model: Any, objective: Any, config: UpdateConfig, temperature: float
    ) -> None:
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda update: learning_rate_factor(update, config)
        )
        self.accelerator = accelerator
        prepared, self.optimizer = accelerator.prepare(model, optimizer)
        self.model = accelerator.unwrap_model(prepared)
        # Dropout would make the ratio differ from 1 with equal weights, so it stays off in training too.
        self.model.eval()
        self.objective = objective
        self.config = config
        self.temperature = temperature

    def update(self, experience: Experience) -> dict[str, float]:
        """Take one optimizer step for each minibatch; return the metrics, averaged and by minibatch.

        Metrics cover the completions that can have a gradient: those with an advantage.
        """
        B = experience.advantages.shape[0]
        all_rows = torch.randperm(B).to(self.model.device).tensor_split(self.config.minibatches)
        divisors = [outer_count(self.objective, experience.loss_mask[rows]) for rows in all_rows]
        active = self._active(experience)
        minibatches = [rows[active[rows]] for rows in all_rows]
        old_logprobs_BC, entropy = self.score(experience, minibatches)
        each = [
            self._update_minibatch(experience, old_logprobs_BC, rows, divisor)
            for rows, divisor in zip(minibatches, divisors, strict=True)
        ]
        metrics: dict[str, float] = {"entropy": entropy}
        for name in each[0]:
            metrics[name] = sum([values[name] for values in each]) / len(each)
        metrics["ratio/min"] = min(values["ratio/min"] for values in each)
        metrics["ratio/max"] = max(values["ratio/max"] for values in each)
        clipped = [values["clip_fraction/low"] + values["clip_fraction/high"] for values in each]
        metrics["clip_fraction/after_first"] = sum(clipped[1:]) / max(len(clipped) - 1, 1)
        metrics["learning_rate"] = float(self.scheduler.get_last_lr()[0])
        for number, values in enumerate(each, start=1):
            metrics |= {f"minibatch_{number}/{name}": value for name, value in values.items()}
        return metrics

    @torch.no_grad()
    def score(self, experience: Experience, minibatches: Sequence[Tensor]) -> tuple[Tensor, float]:
        """Return ([B, C] log-probs under the current weights, their tokens' mean entropy), in nats.

        Cut into the micro-batches of the update, because results may depend on a batch's shape in the last
        bit.
        """
        logprobs_BC = torch.zeros(experience.loss_mask.shape, device=self.model.device)
        entropy_BC = torch.zeros_like(logprobs_BC)
        head = head_of(self.model)
        for micro in (m for rows in minibatches for m in self._micro_batches(rows)):
            hidden, labels = self._hidden_and_labels(experience.completions, micro)
            scores = gk.linear_token_logprobs(
                hidden,
                head.weight,
                labels,
                temperature=self.temperature,
                return_entropy=True,
                **head.options(),
            )
            logprobs_BC[micro, : labels.shape[1]] = scores.logprobs
            assert scores.entropy is not None
            entropy_BC[micro, : labels.shape[1]] = scores.entropy
        tokens = experience.completions.completion_mask[torch.cat(list(minibatches))].sum()
        return logprobs_BC, float(entropy_BC.sum() / tokens)

    def accumulate(
        self, experience: Experience, old_logprobs_BC: Tensor, rows: Tensor, divisor: int
    ) -> tuple[float, Tensor]:
        """Add the gradient of some rows to the parameters; return (loss, their new log-probs [b, C])."""
        head = head_of(self.model)
        logprobs_BC = old_logprobs_BC.clone()
        loss = 0.0
        for micro in self._micro_batches(rows):
            hidden, labels = self._hidden_and_labels(experience.completions, micro)
            C = labels.shape[1]
            output = gk.fused_linear_policy_loss(
                hidden,
                head.weight,
                labels,
                old_logprobs_BC[micro, :C],
                experience.advantages[micro],
                loss_mask=experience.loss_mask[micro, :C],
                normalizer=divisor,
                temperature=self.temperature,
                objective=self.objective,
                **head.options(),
            )
            self.accelerator.backward(output.loss)
            logprobs_BC[micro, :C] = output.logprobs
            loss += output.loss.item()
        return loss, logprobs_BC[rows]

    def _update_minibatch(
        self, experience: Experience, old_logprobs_BC: Tensor, rows: Tensor, divisor: int
    ) -> dict[str, float]:
        loss, logprobs = self.accumulate(experience, old_logprobs_BC, rows, divisor)
        norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm))
        if math.isfinite(norm):
            self.optimizer.step()
            self.scheduler.step()
        self.optimizer.zero_grad()
        # Over the whole minibatch, so that they do not depend on how it was cut into micro-batches.
        metrics = gk.policy_loss(
            logprobs,
            old_logprobs_BC[rows],
            experience.advantages[rows],
            loss_mask=experience.loss_mask[rows],
            objective=self.objective,
        ).metrics
        values = {name: float(value) for name, value in metrics.items()}
        return values | {"loss": loss, "grad_norm": norm, "updates_left_out": float(not math.isfinite(norm))}

    def _active(self, experience: Experience) -> Tensor:
        """Return [B] bool: rows that can have a gradient; the others cost no forward pass but count."""
        counted = experience.loss_mask.any(1)
        if not self.objective.zero_advantage_is_inactive:
            return counted
        return counted & (experience.advantages != 0)

    def _micro_batches(self, rows: Tensor) -> Sequence[Tensor]:
        return rows.split(self.config.micro_batch_size) if len(rows) else ()

    def _hidden_and_labels(self, completions: Completions, rows: Tensor) -> tuple[Tensor, Tensor]:
        input_ids, attention_mask, labels = completions.inputs(rows)
        first = input_ids.shape[1] - labels.shape[1] - 1
        return hidden_states(self.model, input_ids, attention_mask)[:, first:-1], labels
