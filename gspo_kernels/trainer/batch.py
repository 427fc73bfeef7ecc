"""From a scored rollout to the input of an update, and its micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo_kernels.core.layout import queued
from gspo_kernels.logits.centering import ScoreCentering
from gspo_kernels.models.rows import offsets_on, ranges, token_budget_batches
from gspo_kernels.off_policy import SamplingMask
from gspo_kernels.trainer.rewards import Rewards, differing
from gspo_kernels.trainer.rollout import Completion


@dataclass(frozen=True)
class Sample:
    """A completion of C tokens, and the prompt that it completes."""

    row: int  # the prompt's index in the dataset
    prompt: list[int]  # token ids
    text: str  # what the reward functions see
    completion: Completion

    @property
    def ids(self) -> Tensor:
        """Token ids of the completion, [C], with the end token if there is one."""
        return self.completion.ids


class Rollout(NamedTuple):
    """B scored completions; the completions of a group are consecutive."""

    samples: list[Sample]
    rewards: Rewards
    group_size: int
    metrics: Mapping[str, float] = {}  # that a recipe adds


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """Return rewards, lengths, and the share of groups with equal rewards."""
    rewards, samples = rollout.rewards, rollout.samples
    if not samples:  # a recipe's step that uses an earlier rollout
        return dict(rollout.metrics)
    same = ~differing(rewards.total, rollout.group_size)
    return {
        "reward/mean": float(rewards.total.nanmean()),
        **{f"reward/{name}": float(values.nanmean()) for name, values in rewards.by_name.items()},
        "groups_without_variance": float(same.float().mean()),
        "completions/length": sum(len(sample.ids) for sample in samples) / len(samples),
        "completions/finished": sum(sample.completion.finished for sample in samples) / len(samples),
        **rollout.metrics,
    }


@dataclass(frozen=True)
class Batch:
    """The input of an update: B completions with N tokens in total, groups consecutive, on one device.

    Values per token are packed: one completion after the other, without padding.
    """

    prompts: Sequence[Tensor]  # B of token ids, [P_i]
    completions: Sequence[Tensor]  # B of token ids, [C_i], C_i > 0
    advantages: Tensor  # [B] fp32, or what the objective takes instead (rewards, levels); or [N], per token
    loss_mask: Tensor  # [N] bool, tokens that the loss counts
    group_ids: Tensor  # [B] int64, the group of each row
    rollout_logprobs: Tensor | None = None  # [N] fp32, from the engine that sampled; None: it returned none
    turn_ids: Tensor | None = None  # [N] int64, -1 outside turns; None: every completion is one turn
    old_logprobs: Tensor | None = None  # [N] fp32, by the policy; None: the updater scores them
    ref_logprobs: Tensor | None = None  # [N] fp32, by the reference; None: the updater scores them
    masks: Sequence[SamplingMask] | None = None  # B, log-probs are over the tokens in them; None: over all
    centering: ScoreCentering | None = None  # [N, K], from the engine that sampled; None: it returned none

    @cached_property
    def lengths(self) -> list[int]:
        """Number of tokens of each completion."""
        return [len(completion) for completion in self.completions]

    @cached_property
    def groups_on_host(self) -> list[int]:
        """The group of each row."""
        return list(self.group_ids.tolist())

    @cached_property
    def masks_on_host(self) -> tuple[Tensor, ...]:
        """Each row's part of the loss mask, on the CPU."""
        return self.loss_mask.to("cpu").split(self.lengths)

    @cached_property
    def counted(self) -> Tensor:
        """Number of tokens of each row that the loss counts, [B] int64 on the CPU."""
        return torch.stack([tokens.sum() for tokens in self.masks_on_host])

    def places(self, rows: Tensor) -> Tensor:
        """Return the indices of the tokens of these rows, which are on the CPU, among the N tokens, int64."""
        ends, chosen = list(itertools.accumulate(self.lengths)), rows.tolist()
        lengths = [self.lengths[row] for row in chosen]
        return ranges([ends[row] - self.lengths[row] for row in chosen], lengths, self.loss_mask.device)

    def inputs(self, rows: Tensor) -> tuple[list[Tensor], list[Tensor], SamplingMask | None]:
        """Return the prompts and completions of these rows, and their sampling mask, if any."""
        chosen, masks = rows.tolist(), self.masks
        mask = None if masks is None else SamplingMask.concatenate([masks[row] for row in chosen])
        return [self.prompts[row] for row in chosen], [self.completions[row] for row in chosen], mask

    def pick(self, terms: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
        """Return these rows' part of a loss's terms, tensors of which are [B] or [N], with ``cu_seqlens``."""
        places, B, device = self.places(rows), len(self.completions), self.loss_mask.device
        chosen = queued(rows, device)
        part = {
            name: value[chosen if len(value) == B else places] if isinstance(value, Tensor) else value
            for name, value in terms.items()
        }
        if isinstance(centering := terms.get("centering"), ScoreCentering):
            part["centering"] = ScoreCentering(centering.ids[places], centering.logprobs[places])
        return part | {"cu_seqlens": offsets_on([self.lengths[row] for row in rows.tolist()], device)}

    def by_token(self, values: Tensor) -> Tensor:
        """Repeat one value per row, [B], for each of its tokens, [N]."""
        return values.repeat_interleave(torch.tensor(self.lengths, dtype=torch.int64, device=values.device))


def make_batch(rollout: Rollout, advantages: Tensor, truncated: str, device: torch.device) -> Batch:
    """Return the update's input; completions without a reward (NaN) are masked."""
    samples, size = rollout.samples, rollout.group_size
    completions = [sample.completion for sample in samples]
    applies = (~rollout.rewards.total.isnan()).tolist()

    def packed(name: str) -> Tensor | None:
        values = [getattr(completion, name) for completion in completions]
        return None if any(value is None for value in values) else torch.cat(values).to(device)

    tops = [completion.centering for completion in completions if completion.centering is not None]
    centering = None
    if len(tops) == len(completions):
        ids, logprobs = ([getattr(top, name) for top in tops] for name in ("ids", "logprobs"))
        centering = ScoreCentering(torch.cat(ids).to(device), torch.cat(logprobs).to(device))
    masks = [completion.mask for completion in completions]
    counted = [c.counted(truncated) & known for c, known in zip(completions, applies, strict=True)]
    return Batch(
        prompts=[torch.tensor(sample.prompt, dtype=torch.int64, device=device) for sample in samples],
        completions=[completion.ids.to(device) for completion in completions],
        advantages=advantages.nan_to_num(0.0).to(device),
        loss_mask=torch.cat(counted).to(device),
        group_ids=torch.arange(len(samples), device=device) // size,
        rollout_logprobs=packed("logprobs"),
        turn_ids=packed("turn_ids"),
        masks=None if None in masks else [mask.to(device) for mask in masks if mask is not None],
        centering=centering,
    )


def micro_batches(batch: Batch, rows: Tensor, grouped: bool, budget: int, accelerator: Any) -> list[Tensor]:
    """Return this process's micro-batches within a token budget, the same number in all, some empty.

    If ``grouped``, a prompt occurs once in a micro-batch, and its completions stay together if they fit.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    units, lengths = list[list[int]](), list[int]()
    for row in sorted(rows.tolist()) if grouped else rows.tolist():
        more = batch.lengths[row] - 1
        same = grouped and units and batch.groups_on_host[units[-1][0]] == batch.groups_on_host[row]
        if same and lengths[-1] + more <= budget:
            units[-1].append(row)
            lengths[-1] += more
        else:
            units.append([row])
            lengths.append(len(batch.prompts[row]) + more)
    shares = token_budget_batches(lengths, max(sum(lengths), 1), count=world)
    parts = [[lengths[unit] for unit in share] for share in shares]
    count = max(len(token_budget_batches(part, budget)) for part in parts)
    cut = token_budget_batches(parts[rank], budget, count=count)
    chosen = [[row for i in part for row in units[shares[rank][i]]] for part in cut]
    return [torch.tensor(part, dtype=torch.int64, device="cpu") for part in chosen]
