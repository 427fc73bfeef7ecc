"""From a scored rollout to rows of the model: micro-batches, packed rows, shared prefixes, attention masks.

Sequences of any length lie in one row without padding, and each attends to itself only. With shared prefixes
(Prefix Grouper, arXiv 2506.05433, does this for prompts) the row is a tree: a prefix that several sequences
share is in the row once. Such a prefix is a prompt, or a prompt and the first tokens of completions that
branch later. A token attends to the earlier tokens of its sequence and has its position in that sequence.
Hidden states and gradients equal those of the sequences alone, up to rounding; other models are refused.
"""

from __future__ import annotations

import heapq
import inspect
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gspo_kernels.integrations.layouts import offsets_of
from gspo_kernels.integrations.lm_head import causal_lm_of
from gspo_kernels.integrations.rope import own_frequencies, varying_ropes
from gspo_kernels.layout import queued
from gspo_kernels.sampling import SamplingMask
from gspo_kernels.trainer.config import InputError
from gspo_kernels.trainer.rewards import Rewards, differing
from gspo_kernels.trainer.rollout import Completion

Tokens = Sequence[Tensor]
"""Token ids of B sequences, [length > 0] each."""


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
    """Return rewards, lengths, and the share of groups that nothing can be learned from."""
    rewards, samples = rollout.rewards, rollout.samples
    if not samples:  # a recipe's step that learns from an earlier rollout
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

    @cached_property
    def lengths(self) -> list[int]:
        """Number of tokens of each completion."""
        return [len(completion) for completion in self.completions]

    @cached_property
    def masks_on_host(self) -> tuple[Tensor, ...]:
        """Each row's part of the loss mask, on the CPU."""
        return self.loss_mask.to("cpu").split(self.lengths)

    @cached_property
    def counted(self) -> Tensor:
        """Number of tokens of each row that the loss counts, [B] int64."""
        return torch.stack([tokens.sum() for tokens in self.loss_mask.split(self.lengths)])

    def places(self, rows: Tensor) -> Tensor:
        """Return the indices of these rows' tokens among the N tokens, one row after the other, int64.

        Here and below, rows are on the CPU, so that no method waits for the device.
        """
        ends, chosen = list(itertools.accumulate(self.lengths)), rows.tolist()
        lengths = [self.lengths[row] for row in chosen]
        return ranges([ends[row] - self.lengths[row] for row in chosen], lengths, self.loss_mask.device)

    def tokens(self, rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the prompts and the completions of these rows."""
        chosen = rows.tolist()
        return [self.prompts[row] for row in chosen], [self.completions[row] for row in chosen]

    def mask(self, rows: Tensor) -> SamplingMask | None:
        """Return the sampling mask of these rows' tokens, or None if the batch has no masks."""
        masks = None if self.masks is None else [self.masks[row] for row in rows.tolist()]
        return None if masks is None else SamplingMask.concatenate(masks)

    def offsets(self, rows: Tensor) -> Tensor:
        """Return ``cu_seqlens`` of these rows' tokens."""
        lengths = [self.lengths[row] for row in rows.tolist()]
        return offsets_on(lengths, self.loss_mask.device)

    def pick(self, terms: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
        """Select these rows' part of a loss's terms: tensors are [B] or [N]; other values stay the same."""
        places, B = self.places(rows), len(self.completions)
        rows = queued(rows, self.loss_mask.device)
        return {
            name: value[rows if len(value) == B else places] if isinstance(value, Tensor) else value
            for name, value in terms.items()
        }

    def by_token(self, values: Tensor) -> Tensor:
        """Repeat one value per row, [B], for each of its tokens, [N]."""
        return values.repeat_interleave(torch.tensor(self.lengths, dtype=torch.int64, device=values.device))


def make_batch(rollout: Rollout, advantages: Tensor, truncated: str, device: torch.device) -> Batch:
    """Return the update's input; completions without a reward (NaN) are left out of the loss mask."""
    samples, size = rollout.samples, rollout.group_size
    completions = [sample.completion for sample in samples]
    applies = (~rollout.rewards.total.isnan()).tolist()

    def packed(name: str) -> Tensor | None:
        values = [getattr(completion, name) for completion in completions]
        return None if any(value is None for value in values) else torch.cat(values).to(device)

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
    )


def micro_batches(
    batch: Batch, rows: Tensor, *, shared_prefix: bool, budget: int, world: int, rank: int
) -> list[Tensor]:
    """Return the micro-batches of process ``rank``, cut by a token budget: as many as others', some empty."""
    units = [[row] for row in rows.tolist()]
    if shared_prefix:  # completions of one prompt stay together
        group_of = batch.group_ids.tolist().__getitem__
        units = [list(group) for _, group in groupby(sorted(rows.tolist()), group_of)]
    lengths = [len(batch.prompts[unit[0]]) + sum(batch.lengths[row] - 1 for row in unit) for unit in units]
    shares = token_budget_batches(lengths, max(sum(lengths), 1), count=world)
    parts = [[lengths[unit] for unit in share] for share in shares]
    count = max(len(token_budget_batches(part, budget)) for part in parts)
    cut = token_budget_batches(parts[rank], budget, count=count)
    chosen = [[row for i in part for row in units[shares[rank][i]]] for part in cut]
    return [torch.tensor(part, dtype=torch.int64, device="cpu") for part in chosen]


def token_budget_batches(lengths: Sequence[int], budget: int, *, count: int | None = None) -> list[list[int]]:
    """Cut sequences into batches of at most ``budget`` tokens with nearly equal numbers of tokens.

    Sequences are placed longest first, each into the batch with the fewest tokens (Graham 1969). A sequence
    longer than the budget goes alone. A batch is an ascending list of indices into ``lengths``. The batch
    with the most tokens comes first, so that processes that go through their batches in step wait little.
    ``count`` is the number of batches, for processes whose collectives must match; some batches may be empty.
    By default it is the smallest number that keeps the budget.
    """
    alone = [[i] for i, length in enumerate(lengths) if length > budget]
    order = sorted((i for i, length in enumerate(lengths) if length <= budget), key=lambda i: -lengths[i])
    for number in itertools.count(-(-sum(lengths[i] for i in order) // budget)):
        batches = _balanced(lengths, order, number)
        if all(sum(lengths[i] for i in batch) <= budget for batch in batches):
            break
    if count is not None:
        batches = _balanced(lengths, order, count - len(alone))
    return sorted(alone + batches, key=lambda batch: (-sum(lengths[i] for i in batch), batch))


def _balanced(lengths: Sequence[int], order: list[int], count: int) -> list[list[int]]:
    heap = [(0, number) for number in range(count)]
    batches: list[list[int]] = [[] for _ in range(count)]
    for i in order:
        tokens, number = heapq.heappop(heap)
        batches[number].append(i)
        heapq.heappush(heap, (tokens + lengths[i], number))
    return [sorted(batch) for batch in batches]


# Rows: the tokens of a forward pass, and the hidden states that predict completion tokens.


class Segment(NamedTuple):
    """Neighbouring tokens of a row, and the earlier segment that they continue."""

    parent: int  # index of the earlier segment; -1: the tokens begin a sequence
    length: int


def packed_inputs(model: Any, prompts: Tokens, completions: Tokens) -> dict[str, Any]:
    """Lay sequences out in one row, as keyword arguments of a causal language model's forward.

    The last token of a sequence predicts nothing and is left out: T = sum(P_i + C_i - 1). A mask keeps the
    sequences apart; for flash-attention their offsets do. A model that cannot be packed is an `InputError`.
    """
    pairs = list(zip(prompts, completions, strict=True))
    lengths, device = [len(p) + len(c) - 1 for p, c in pairs], prompts[0].device
    ids = torch.cat([part for p, c in pairs for part in (p, c[:-1])])
    positions = ranges([0] * len(lengths), lengths, device)
    inputs: dict[str, Any] = {"input_ids": ids[None], "position_ids": positions[None]}
    implementation = attention_of(model)
    if len(lengths) == 1:
        return inputs
    if "flash" in implementation:
        ends = offsets_on(lengths, device)
        inputs |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        inputs |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    else:
        inputs["attention_mask"] = attention_mask(model, [Segment(-1, length) for length in lengths], device)
    return inputs


def lengths_by_token(prompts: Tokens, completions: Tokens) -> Tensor:
    """Return the length P + C of each token's sequence in a packed row, [1, T], on the CPU."""
    sums = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    lengths = torch.tensor(sums, dtype=torch.int64, device="cpu")
    return lengths.repeat_interleave(lengths - 1)[None]


def packed_hidden_states(model: Any, prompts: Tokens, completions: Tokens) -> Tensor:
    """Run the backbone once over all sequences, without padding; return what predicts the completions.

    The result is [N, H], for the N tokens of the completions, one after the other. The model's ``__call__``
    runs; the model may be plain, have a PEFT adapter, or be wrapped (DDP).
    """
    inputs, lengths = packed_inputs(model, prompts, completions), lengths_by_token(prompts, completions)
    hidden = last_hidden_states(model, inputs, lengths)
    counts = [len(completion) for completion in completions]
    ends = itertools.accumulate(len(p) + n - 1 for p, n in zip(prompts, counts, strict=True))
    firsts = [end - count for end, count in zip(ends, counts, strict=True)]
    return hidden[0, ranges(firsts, counts, hidden.device)]


def shared_prefix_hidden_states(model: Any, prompts: Tokens, completions: Tokens) -> Tensor:
    """Return the same as `packed_hidden_states`, from the tree of all sequences: a prefix that several of
    them share, a prompt or also the first tokens of completions, is computed once.
    """
    if "flash" in (name := attention_of(model)):
        raise InputError(f"update.shared_prefix: {name} takes no mask; load the model with sdpa")
    pairs = list(zip(prompts, completions, strict=True))
    device, lengths = prompts[0].device, [len(p) + len(c) - 1 for p, c in pairs]
    left = iter(torch.cat([part for p, c in pairs for part in (p, c[:-1])]).tolist())
    ropes = varying_ropes(model)
    regimes = [tuple(rope.regime(length + 1) for rope in ropes) for length in lengths]
    tree = Tree((list(itertools.islice(left, length)) for length in lengths), regimes)
    own = torch.empty(1, len(tree.tokens), dtype=torch.int64, device="cpu")
    for path, length in zip(tree.paths, lengths, strict=True):
        own[0, path] = length + 1
    row = queued(torch.tensor([tree.tokens, tree.positions], dtype=torch.int64, device="cpu"), device)
    inputs = {"input_ids": row[:1], "position_ids": row[1:]}
    if len(tree.tokens) > 1:  # transformers takes a single token for a step of decoding
        inputs["attention_mask"] = attention_mask(model, tree.segments, device)
    hidden = last_hidden_states(model, inputs, own)
    # a prompt's last token predicts the first token of every completion
    paths = zip(tree.paths, prompts, strict=True)
    predicting = [place for path, prompt in paths for place in path[len(prompt) - 1 :]]
    return hidden[0, queued(torch.tensor(predicting, dtype=torch.int64, device="cpu"), device)]


class Tree:
    """The prefix tree of several sequences, laid out as one row: each shared prefix is in it once.

    Sequences of different ``regimes`` share no prefix, because their tokens have other hidden states.

    Attributes:
        tokens: token ids of the row; each token comes after its predecessor.
        positions: position of each token in its sequences.
        paths: for each sequence, the places of its tokens in the row.
        segments: the row, cut into a list of `Segment`.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], regimes: Sequence[tuple[int, ...]]):
        place_of: dict[tuple[Any, int], int] = {}
        before: list[int] = []  # the place of each token's predecessor, or -1
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.paths: list[list[int]] = []
        for ids, regime in zip(sequences, regimes, strict=True):
            place, path = -1, list[int]()
            for position, token in enumerate(ids):
                after = place if path else regime
                following = place_of.setdefault((after, token), len(self.tokens))
                if following == len(self.tokens):
                    before.append(place)
                    self.tokens.append(token)
                    self.positions.append(position)
                place = following
                path.append(place)
            self.paths.append(path)
        # a segment begins at a token that does not follow its neighbour, and right after a branching point
        jumps = {place: earlier for place, earlier in enumerate(before) if earlier != place - 1}
        starts = sorted({0, *jumps, *(earlier + 1 for earlier in jumps.values())} - {len(self.tokens)})
        ends = [*starts[1:], len(self.tokens)]
        self.segments = [
            Segment(bisect_right(starts, before[start]) - 1, end - start)
            for start, end in zip(starts, ends, strict=True)
        ]


def last_hidden_states(model: Any, inputs: dict[str, Any], lengths: Tensor | None = None) -> Tensor:
    """Call the whole model and return the head's input, [1, T, H]; the head projects only one position.

    ``lengths`` [1, T] says how long the sequence of each token is; None: the row is one sequence.
    """
    causal = causal_lm_of(model)
    captured: list[Any] = []
    # Some models call their decoder, others the base model around it; the outermost called one ends last.
    handles = [
        module.register_forward_hook(lambda module, args, output: captured.append(output))
        for module in {causal.base_model, causal.get_decoder()} - {causal}
    ]
    try:
        with own_frequencies(varying_ropes(model), lengths):
            model(**(inputs | {"use_cache": False, "logits_to_keep": 1}))
    finally:
        for handle in handles:
            handle.remove()
    hidden = getattr(captured[-1], "last_hidden_state", None) if captured else None
    if hidden is None or hidden.shape[:2] != inputs["input_ids"].shape:
        name = type(causal).__name__
        raise InputError(f"{name}: its backbone did not return one hidden state for each input token")
    return hidden


@torch.no_grad()
def check_rows_of(model: Any, *, shared_prefix: bool = False) -> None:
    """Refuse a model whose hidden states in a common row differ from those of the sequences alone.

    Attention that leaks changes hidden states by about their own size, rounding by some multiples of eps. The
    limit is sqrt(eps) times the largest absolute hidden state.
    """
    prompts, completions = probe(model, [4, 1, 6, 2], [3, 5, 1, 2])
    layout: Callable[..., Tensor] = packed_hidden_states
    if shared_prefix:
        layout, prompts = shared_prefix_hidden_states, [prompts[0]] * 3 + [prompts[3]]
    common = layout(model, prompts, completions)
    pairs = zip(prompts, completions, strict=True)
    separate = torch.cat([packed_hidden_states(model, [p], [c]) for p, c in pairs])
    far = _effect_of_a_far_neighbour(model)
    bound = rounding_of(separate) ** 0.5 * separate.abs().max().item()
    difference = max((common - separate).abs().max().item(), far)
    if not difference <= bound:
        raise InputError(
            f"{type(causal_lm_of(model)).__name__} cannot hold several sequences in one row: its hidden "
            f"states differ from those of the sequences alone by {difference:.3g} (rounding: < {bound:.3g})"
        )


def rounding_of(values: Tensor) -> float:
    """Return eps of the values' dtype, or of the dtype that autocast computes in, if that is larger."""
    kind = values.device.type
    rounds = torch.is_autocast_enabled(kind)
    dtypes = [values.dtype, torch.get_autocast_dtype(kind) if rounds else values.dtype]
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def _effect_of_a_far_neighbour(model: Any) -> float:
    """Return by how much hidden states differ if the positions of a neighbour end where the context does.

    So a few tokens show what frequencies of RoPE beyond a length do to shorter sequences in the row.
    """
    context = getattr(causal_lm_of(model).config.get_text_config(), "max_position_embeddings", None) or 0
    reach = max((2 * rope.limit for rope in varying_ropes(model)), default=context)
    prompts, completions = probe(model, [4, 2], [3, 2])
    inputs, lengths = packed_inputs(model, prompts, completions), lengths_by_token(prompts, completions)
    near = last_hidden_states(model, inputs, lengths)
    places = torch.arange(lengths.shape[1], dtype=torch.int64, device="cpu")
    moved = torch.where(places < 6, 0, max(reach - 4, 0))
    inputs["position_ids"] = inputs["position_ids"] + moved.to(near.device)
    far = last_hidden_states(model, inputs, lengths + moved)
    return (near - far)[:, :6].abs().max().item()


def probe(model: Any, prompts: list[int], completions: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return prompts and completions of these lengths, with different token ids, to try a model with."""
    vocabulary = causal_lm_of(model).config.get_text_config().vocab_size
    tokens = (torch.arange(sum(prompts) + sum(completions), device=model.device) * 7 + 3) % vocabulary
    first, rest = tokens.split([sum(prompts), sum(completions)])
    return list(first.split(prompts)), list(rest.split(completions))


def ranges(starts: Sequence[int], lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Return start, ..., start + length - 1 for each start and its length, one after the other, int64."""
    sizes = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    firsts = torch.tensor(starts, dtype=torch.int64, device="cpu") - (sizes.cumsum(0) - sizes)
    found = torch.arange(sum(lengths), device="cpu") + firsts.repeat_interleave(sizes)
    return queued(found, torch.device(device))


def offsets_on(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return ``cu_seqlens`` of sequences of these lengths."""
    return queued(offsets_of(torch.tensor(lengths, dtype=torch.int64, device="cpu")), device)


# Attention: transformers recognizes packed sequences by position_ids that restart, but not in every model and
# not where sequences share a prompt. So this file builds the mask.


def attention_of(model: Any) -> str:
    """Return the name of a model's attention; refuse models that would mix up the sequences of a row."""
    causal = causal_lm_of(model)
    config = causal.config.get_text_config()
    name = str(config._attn_implementation)
    accepted = inspect.signature(causal.forward).parameters
    known = {"full_attention", "sliding_attention"}
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    reason = None
    if "position_ids" not in accepted or "logits_to_keep" not in accepted:
        reason = "its forward takes no position_ids or no logits_to_keep"
    elif getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        reason = "its adapter puts tokens before every row"
    elif unknown or getattr(causal, "_is_stateful", False):
        reason = f"no mask is known that keeps them apart in its layers ({', '.join(unknown) or 'recurrent'})"
    elif name != "sdpa" and "flash" not in name:
        reason = f"its attention implementation is {name!r}; load it with sdpa or flash_attention_2"
    if reason is not None:
        raise InputError(f"{type(causal).__name__} cannot hold several sequences in one row: {reason}")
    return name


def attention_mask(model: Any, segments: Sequence[Segment], device: torch.device) -> Any:
    """Return the `RowMask` of a row; or one by type of layer if the model has several (sliding windows)."""
    config = causal_lm_of(model).config.get_text_config()
    width = getattr(config, "sliding_window", None)
    default = "full_attention" if width is None else "sliding_attention"
    layers = set(getattr(config, "layer_types", None) or (default,))
    masks = {
        layer: RowMask(segments, width if layer == "sliding_attention" else None, device) for layer in layers
    }
    return masks if len(masks) > 1 else next(iter(masks.values()))


class RowMask(Tensor):
    """An attention mask without storage, [1, 1, T, T]: SDPA with this mask runs segment by segment.

    The cost is that of the sequences, not quadratic in the row, and PyTorch may use its flash kernel. The
    mask is an ordinary argument, so the model needs no change; torch's CausalBias works in the same way.
    """

    segments: Sequence[Segment]
    window: int | None
    offsets: Tensor | None  # int32, the offsets of the segments, if each of them begins a sequence

    @staticmethod
    def __new__(cls, segments: Sequence[Segment], window: int | None, device: torch.device) -> RowMask:
        """Make a tensor of the mask's shape, without storage."""
        T = sum(segment.length for segment in segments)
        mask: RowMask = Tensor._make_wrapper_subclass(cls, (1, 1, T, T), dtype=torch.bool, device=device)
        mask.segments, mask.window, mask.offsets = segments, window, None
        if all(segment.parent < 0 for segment in segments):
            ends = [0, *itertools.accumulate(segment.length for segment in segments)]
            mask.offsets = queued(torch.tensor(ends, dtype=torch.int32, device="cpu"), device)
        return mask

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise InputError(f"this model's attention reads its mask ({function}); only plain SDPA can be packed")


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: RowMask,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Run SDPA under a `RowMask` on [1, heads, T, D]: a segment sees itself and those that it continues."""
    device, sizes = query.device, {x.shape[1::2] for x in (query, key, value)}
    kind, launch = device.type, None
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    if attn_mask.offsets is not None and len(sizes) == 1 and dropout_p == 0.0 and options.keys() <= {"scale"}:
        launch = one_launch(device, dtype, query.shape[3], attn_mask.window)
    if launch is None:
        return _attend_by_segments(query, key, value, attn_mask, dropout_p, **options)
    out: Tensor = launch(*(x.to(dtype) for x in (query, key, value)), attn_mask, **options)
    return out


def varlen_attention(device: torch.device) -> Any:
    """Return torch's attention of many sequences in one launch, which CUDA alone has; else None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    accepted = inspect.signature(varlen_attn).parameters
    return varlen_attn if device.type == "cuda" and {"scale", "window_size"} <= accepted.keys() else None


@cache
def one_launch(device: torch.device, dtype: torch.dtype, head_size: int, window: int | None) -> Any:
    """Return `varlen_attention` in the form of SDPA, if it agrees with SDPA by segments on this device."""
    varlen = varlen_attention(device)
    if varlen is None or dtype not in (torch.float16, torch.bfloat16) or head_size > 256:
        return None

    def launch(q: Tensor, k: Tensor, v: Tensor, mask: RowMask, scale: float | None = None) -> Tensor:
        tokens, longest = (x[0].transpose(0, 1) for x in (q, k, v)), max(s.length for s in mask.segments)
        seen = (-1 if window is None else window - 1, 0)  # (-1, 0) is causal
        ends = (mask.offsets, mask.offsets, longest, longest)
        out: Tensor = varlen(*tokens, *ends, scale=scale, window_size=seen)
        return out.transpose(0, 1).unsqueeze(0)

    mask, generator = RowMask([Segment(-1, n) for n in (7, 1, 64, 64, 33)], window, device), torch.Generator()
    draws = torch.randn(
        4, 1, 2, 169, head_size, generator=generator.manual_seed(0), dtype=torch.float32, device="cpu"
    )
    *inputs, upstream = draws.to(device, dtype).requires_grad_()
    results = []
    try:
        with torch.enable_grad():
            both: tuple[Callable[..., Tensor], ...] = (_attend_by_segments, launch)
            for attend in both:
                out = attend(*inputs, mask)
                results.append(torch.stack([out, *torch.autograd.grad(out, inputs, upstream)]).detach())
    except Exception:  # of a kernel that does not take these sizes, or that this GPU does not have
        return None
    expected, found = results
    bound = torch.finfo(dtype).eps ** 0.5 * expected.abs().max()
    return launch if bool((found - expected).abs().max() <= bound) else None


def _attend_by_segments(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: RowMask, dropout_p: float = 0.0, **options: Any
) -> Tensor:
    # Neighbours of equal length that continue the same segment are one batch, which takes less time.
    runs = [(segment, len(list(same))) for segment, same in groupby(attn_mask.segments)]
    # split instead of slices: the backward of a slice fills a tensor of the whole size.
    sizes = [segment.length * count for segment, count in runs]
    parts = zip(*(x.split(sizes, 2) for x in (query, key, value)), strict=True)
    paths: list[tuple[Tensor, Tensor]] = []  # keys and values of each segment and of those that it continues
    outputs, window = [], attn_mask.window
    for ((parent, size), count), part in zip(runs, parts, strict=True):
        q, k, v = (x.reshape(-1, count, size, x.shape[3]).transpose(0, 1) for x in part)
        if parent >= 0:
            before = (x.expand(count, -1, -1, -1) for x in paths[parent])
            k, v = (torch.cat(pair, 2) for pair in zip(before, (k, v), strict=True))
        paths += zip(k.split(1), v.split(1), strict=True)
        keys, mask, plain = k.shape[2], None, parent < 0 and (window is None or size <= window)
        if not plain:  # the queries are the last positions of a sequence, the keys are all of them
            mask = torch.ones(size, keys, dtype=torch.bool, device=q.device).tril(keys - size)
            mask = mask if window is None else mask.triu(keys - size - window + 1)
        out = scaled_dot_product_attention(q, k, v, mask, dropout_p, plain, **options)
        outputs.append(out.transpose(0, 1).reshape(1, -1, size * count, out.shape[3]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
