"""A scored rollout, and how it is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.integrations.layouts import offsets_of
from gspo_kernels.trainer.rollout import SamplingMask
from gspo_kernels.trainer.rows.packing import token_budget_batches
from gspo_kernels.trainer.rows.shared_prefix import shared_prefix_tokens


@dataclass(frozen=True)
class Experience:
    """One rollout, scored: B completions of N tokens in all, the rows of a group consecutive, on one device.

    What belongs to tokens is packed: one completion after the other, without padding.

    Attributes:
        prompts: B tensors of token ids, [P_i].
        completions: B tensors of token ids, [C_i], C_i > 0.
        advantages: [B] fp32, or what the objective takes for them.
        loss_mask: [N] bool, tokens that the loss counts.
        group_ids: [B] int64, which prompt a row completes.
        rollout_logprobs: [N] fp32, by the engine that sampled; None where it gave none.
        turn_ids: [N] int64, -1 outside turns; None: every completion is one turn.
        ref_logprobs: [N] fp32, by the reference; None where the updater's own one is to score them.
        masks: of B completions, what could have been drawn: every log-prob is one among that. None: anything.
    """

    prompts: Sequence[Tensor]
    completions: Sequence[Tensor]
    advantages: Tensor
    loss_mask: Tensor
    group_ids: Tensor
    rollout_logprobs: Tensor | None = None
    turn_ids: Tensor | None = None
    ref_logprobs: Tensor | None = None
    masks: Sequence[SamplingMask] | None = None

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each completion."""
        return [len(completion) for completion in self.completions]

    @cached_property
    def counted(self) -> Tensor:
        """[B] int64, how many tokens of each row the loss counts."""
        return torch.stack([tokens.sum() for tokens in self.loss_mask.split(self.lengths)])

    @cached_property
    def _places(self) -> Sequence[Tensor]:
        """Where among the N tokens each row's are, int64."""
        return torch.arange(len(self.loss_mask), device=self.loss_mask.device).split(self.lengths)

    def places(self, rows: Tensor) -> Tensor:
        """Return where among the N tokens these rows' are, one row after the other, int64."""
        return torch.cat([rows[:0], *(self._places[row] for row in rows.tolist())])

    def tokens(self, rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the prompts and the completions of these rows."""
        chosen = rows.tolist()
        return [self.prompts[row] for row in chosen], [self.completions[row] for row in chosen]

    def mask(self, rows: Tensor) -> SamplingMask | None:
        """Return what could have been drawn at the tokens of these rows, if not everything."""
        return None if self.masks is None else SamplingMask.joined([self.masks[row] for row in rows.tolist()])

    def offsets(self, rows: Tensor) -> Tensor:
        """Return ``cu_seqlens`` of these rows' tokens."""
        lengths = [self.lengths[row] for row in rows.tolist()]
        return offsets_of(torch.tensor(lengths, dtype=torch.int64, device=self.loss_mask.device))

    def pick(self, terms: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
        """Return the part of some terms of a loss that belongs to rows.

        Terms are [B], or [N] and more, or the same for all.
        """
        places, B = self.places(rows), len(self.completions)

        def part(value: Any) -> Any:
            return value[rows if len(value) == B else places] if isinstance(value, Tensor) else value

        return {name: part(value) for name, value in terms.items()}

    def by_token(self, values: Tensor) -> Tensor:
        """Repeat one value per row, [B], for each of its tokens, [N]."""
        return values.repeat_interleave(torch.tensor(self.lengths, device=values.device))


def micro_batches(
    experience: Experience, rows: Tensor, layout: str, budget: int, world: int, rank: int
) -> list[Tensor]:
    """Cut rows by a budget of tokens and return the part of process ``rank`` among ``world``.

    Every process gets the same number, so some may be empty.
    """
    units = [[row] for row in rows.tolist()]
    if layout == "shared_prefix":  # completions of one prompt stay together
        group_of = experience.group_ids.tolist().__getitem__
        units = [list(group) for _, group in groupby(sorted(rows.tolist()), group_of)]
    sizes = experience.lengths
    lengths = [shared_prefix_tokens(len(experience.prompts[u[0]]), [sizes[row] for row in u]) for u in units]
    if layout != "packed" and lengths:
        # Padded rows are as long as the longest of their micro-batch, which may hold the longest of all.
        lengths = [max(lengths)] * len(lengths)
    shares = token_budget_batches(lengths, max(sum(lengths), 1), count=world)
    parts = [[lengths[unit] for unit in share] for share in shares]
    count = max(len(token_budget_batches(part, budget)) for part in parts)
    cut = token_budget_batches(parts[rank], budget, count=count)
    chosen = [[row for i in batch for row in units[shares[rank][i]]] for batch in cut]
    return [torch.tensor(batch, dtype=torch.int64, device=rows.device) for batch in chosen]
