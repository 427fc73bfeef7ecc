"""A packed row whose tokens lie on several processes: context parallelism of the layers.

Each process runs the layers on its own tokens. Attention alone looks further: there the keys and values of
all processes are gathered (as in the training of Llama 3, arXiv 2407.21783), so that a token sees what came
before it, wherever that lies. Sequences are cut in the zigzag of ring attention, with which all processes
have as many pairs of tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad, scaled_dot_product_attention

from gspo_kernels.integrations.layouts import offsets_of, tokens_of_rank
from gspo_kernels.layout import segment_ids
from gspo_kernels.parallel.groups import gathered, sum_
from gspo_kernels.terms import FORMS
from gspo_kernels.trainer.input_errors import ModelError
from gspo_kernels.trainer.rows.attention import AttentionMask, by_layer, causal_mask, implementation_of
from gspo_kernels.trainer.rows.packing import (
    IGNORED,
    LossInputs,
    Tokens,
    compare_with_alone,
    last_hidden_states,
    packed_inputs,
    probe,
)

_LEAST = 2
"""Tokens of a process at least: attention treats one alone as a step of generation."""


@dataclass(frozen=True)
class Context:
    """The process group of those that share sequences; a policy that is copied goes on with the same."""

    group: Any

    def __deepcopy__(self, memo: Any) -> Context:
        return self


class Run(NamedTuple):
    """Tokens of a sequence, one after the other, that a process has."""

    sequence: int
    tokens: int
    seen: int  # tokens of the sequence up to the last of them


@dataclass(frozen=True)
class Cut:
    """What this process has of a row of T tokens.

    Attributes:
        group: the name of the process group.
        own: [n] positions in the row, ascending; then, where there are fewer than ``_LEAST``, the first one
            again, which counts for nothing.
        count: how many of them count.
        most: how many any process has.
        places: [T], where each token of the row is among ``most`` of each process, one after the other.
        runs: of ``own``.
        lengths: of the row's sequences.
    """

    group: str
    own: Tensor
    count: int
    most: int
    places: Tensor
    runs: Sequence[Run]
    lengths: Sequence[int]

    @classmethod
    def of(cls, context: Context, cu_seqlens: Tensor) -> Cut:
        """Of the row of sequences with these offsets, [B + 1]."""
        group, ends = context.group, cu_seqlens.cpu()
        each = [tokens_of_rank(ends, rank, group.size()).values for rank in range(group.size())]
        most = max(_LEAST, *(len(positions) for positions in each))
        places = torch.empty(int(ends[-1]), dtype=torch.int64)
        for rank, positions in enumerate(each):
            places[positions] = rank * most + torch.arange(len(positions))
        own = each[group.rank()]
        more = own.new_zeros(max(_LEAST - len(own), 0))
        sequence = segment_ids(ends, len(places))[own]
        begins = torch.ones_like(own, dtype=torch.bool)
        begins[1:] = (own.diff() != 1) | (sequence.diff() != 0)
        starts = [*begins.nonzero().flatten().tolist(), len(own)]
        runs = [
            Run(int(sequence[first]), last - first, int(own[last - 1] - ends[sequence[first]]) + 1)
            for first, last in itertools.pairwise(starts)
        ]
        runs += [Run(0, 1, 1)] * len(more)
        device = cu_seqlens.device
        return cls(
            group.group_name,
            torch.cat([own, more]).to(device),
            len(own),
            most,
            places.to(device),
            runs,
            ends.diff().tolist(),
        )


class _Gather(torch.autograd.Function):
    """[1, heads, n, D] of this process's tokens -> [1, heads, T, D] of the row's."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        padded = pad(own[:, :, : cut.count], (0, 0, 0, cut.most - cut.count))
        return gathered(cut.group, padded).movedim(0, 2).flatten(2, 3).index_select(2, cut.places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        cut = ctx.cut
        exact = grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous()
        mine = sum_(cut.group, exact.clone() if exact is grad else exact).index_select(2, cut.own)
        mine[:, :, cut.count :] = 0.0
        return mine.to(grad.dtype), None


class CutMask(AttentionMask):
    """Stands for the causal mask of the tokens that are here: SDPA gathers the others' keys and values."""

    cut: Cut
    window: int | None

    @staticmethod
    def __new__(cls, cut: Cut, window: int | None) -> CutMask:
        """Make a tensor of the mask's shape, without storage."""
        shape, device = (1, 1, len(cut.own), len(cut.places)), cut.own.device
        mask: CutMask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.cut, mask.window = cut, window
        return mask

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise ModelError(
            f"parallel.context: the model's attention computes {function} of a mask itself, and leaves no "
            "room for the keys of other processes"
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, **options: Any) -> Tensor:
        """See `AttentionMask.attend`: of this process's queries, [1, heads, n, D], and all keys."""
        cut, window = self.cut, self.window
        widths = [key.shape[-1], value.shape[-1]]
        gathered = _Gather.apply(torch.cat([key, value], -1), cut)
        # split, not slices: the backward of a slice fills a whole row
        sequences = gathered.split(list(cut.lengths), dim=2)
        outputs = []
        for run, q in zip(cut.runs, query.split([run.tokens for run in cut.runs], dim=2), strict=True):
            k, v = sequences[run.sequence][:, :, : run.seen].split(widths, dim=-1)
            mask: Any = None
            if window is not None and run.seen > window:
                mask = causal_mask(run.tokens, run.seen, window, query.device)
            elif run.tokens < run.seen:
                mask = causal_lower_right(run.tokens, run.seen)
            outputs.append(scaled_dot_product_attention(q, k, v, mask, dropout_p, mask is None, **options))
        return torch.cat(outputs, dim=2)


def shared_hidden_states(
    model: Any, prompts: Tokens, completions: Tokens, context: Context
) -> tuple[LossInputs, Tensor]:
    """Run the backbone over this process's tokens of a packed row.

    Equal to `packed_hidden_states` of the whole row, values and gradients, up to rounding; weights' gradients
    are this process's part of the sum. All processes of the context call, with the same sequences.

    Returns:
        Inputs of the loss for this process's completion tokens, n of them, perhaps none, and which of the N
        completion tokens they are, int64 [n]. Empty sequences follow the B that there are, so that on no
        process n is the number of sequences: what is one per token is never taken for one per sequence.

    Raises:
        ModelError: a model whose attention does not leave it to SDPA who sees whom.
    """
    name = implementation_of(model)
    if name != "sdpa":
        raise ModelError(
            f"parallel.context: attention {name!r} cannot see keys of other processes; load the model with "
            "attn_implementation='sdpa'"
        )
    inputs = packed_inputs(prompts, completions)
    labels, cu_seqlens = inputs["shift_labels"].flatten(), inputs["cu_seqlens"]
    cut = Cut.of(context, cu_seqlens)
    hidden = last_hidden_states(
        model,
        {
            "input_ids": inputs["input_ids"][:, cut.own],
            "position_ids": inputs["position_ids"][:, cut.own],
            "attention_mask": by_layer(model, max(cut.lengths), lambda window: CutMask(cut, window)),
            "use_cache": False,
        },
    )
    own = cut.own[: cut.count]
    predicting = (labels[own] != IGNORED).nonzero().flatten()
    where = (labels != IGNORED).cumsum(0)[own[predicting]] - 1
    owners = segment_ids(cu_seqlens, len(labels))[own[predicting]]
    of_each = torch.bincount(cut.places[labels != IGNORED] // cut.most).tolist()
    sequences = next(number for number in itertools.count(len(completions)) if number not in of_each)
    counts = torch.bincount(owners, minlength=sequences)
    return LossInputs(hidden[0, predicting], labels[own[predicting]], offsets_of(counts)), where


def own_terms(
    terms: Mapping[str, Any], where: Tensor, tokens: int, sequences: int, cu_seqlens: Tensor
) -> dict[str, Any]:
    """Return the terms of a loss, of N tokens and B sequences, as the tokens that are here take them; with
    ``cu_seqlens`` of `shared_hidden_states`.
    """
    empty = len(cu_seqlens) - 1 - sequences

    def own(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        never_one_per_sequence = FORMS[name].shape in ("tokens", "broadcast")
        per_token = never_one_per_sequence or (len(value) == tokens and tokens != sequences)
        return value[where] if per_token else pad(value, (0, empty))

    return {name: own(name, value) for name, value in terms.items()}


def check_context(model: Any, context: Context) -> None:
    """Refuse a model whose hidden states change where its tokens lie on several processes.

    Runs a few tokens, once, on all processes.
    """
    prompts, completions = probe(model, [4, 1, 9], [3, 5, 2])

    def together() -> LossInputs:
        inputs, where = shared_hidden_states(model, prompts, completions, context)
        whole = inputs.hidden.new_zeros(sum(map(len, completions)), inputs.hidden.shape[-1])
        sum_(context.group.group_name, whole.index_copy_(0, where, inputs.hidden))
        return inputs._replace(hidden=whole)

    compare_with_alone(model, together, prompts, completions)
