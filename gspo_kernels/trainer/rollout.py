"""Rollouts: completions sampled from the current policy, by an engine or by the model itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple, Protocol

import torch
import transformers
from torch import Tensor

from gspo_kernels.core import bits
from gspo_kernels.core.exact import exact
from gspo_kernels.logits.centering import ScoreCentering
from gspo_kernels.models.rope import own_frequencies, varying_ropes
from gspo_kernels.off_policy import SamplingMask, sampling_mask
from gspo_kernels.trainer.config import InputError, RolloutConfig
from gspo_kernels.trainer.rewards import Rewards, differing


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; ``temperature`` 0 is greedy. top_k applies before top_p."""

    max_new_tokens: int
    temperature: float = 1.0  # divides the logits
    top_p: float = 1.0  # draw from the most likely tokens whose probabilities reach this sum
    top_k: int = 0  # draw from this many of the most likely tokens; 0: all
    return_mask: bool = False  # whether completions must have the mask of tokens they were drawn from
    top_logprobs: int = 0  # number of most likely tokens whose log-probs completions must have

    def __post_init__(self) -> None:
        if self.return_mask and (self.temperature == 0 or not self.cuts):
            raise ValueError("return_mask: expected top_p or top_k, and a temperature above 0")

    @property
    def cuts(self) -> bool:
        """Whether top_p or top_k exclude tokens."""
        return self.top_p < 1.0 or self.top_k > 0


def sampling_of(config: RolloutConfig, *, greedy: bool = False) -> Sampling:
    """Return the sampling of a run's rollouts, or greedy sampling, in both cases without masks."""
    if greedy:
        return Sampling(config.max_new_tokens, temperature=0.0)
    return Sampling(config.max_new_tokens, config.temperature, config.top_p, config.top_k)


@dataclass(frozen=True)
class Completion:
    """A completion of a prompt: C > 0 tokens, on the CPU."""

    ids: Tensor  # [C] int64, up to and including the first end token
    finished: bool  # whether there is an end token
    # [C] fp32, of the distribution that a token was drawn from, after temperature, top_k and top_p; None if
    # the engine returns none, and for greedy completions.
    logprobs: Tensor | None = None
    # [C] int64, the turn of each token, from 0; -1: a token of a tool or an environment, not trained on.
    # None: all tokens are one turn.
    turn_ids: Tensor | None = None
    mask: SamplingMask | None = None  # tokens that it was drawn from; None: not requested, or not known
    # [C, K]: the most likely tokens and log-probs as above; ids of -1: there are fewer, or a tool wrote it.
    centering: ScoreCentering | None = None

    def counted(self, truncated: str = "keep") -> Tensor:
        """Return [C] bool, the tokens that a loss counts: those that the policy wrote.

        ``truncated`` is "keep", or "mask" to exclude a completion without an end token.
        """
        if truncated not in ("keep", "mask"):
            raise ValueError(f"truncated: got {truncated!r}, expected 'keep' or 'mask'")
        written = torch.ones_like(self.ids) if self.turn_ids is None else self.turn_ids + 1
        return (written > 0) & (self.finished or truncated == "keep")


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


class RolloutEngine(Protocol):
    """An engine that completes prompts for the trainer."""

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        """Complete every prompt once, in order, with the policy's current weights.

        Prompts are non-empty lists of token ids; a prompt is repeated for each of its completions. Random
        numbers come from torch's default generator.
        """
        ...


@dataclass
class ModelEngine:
    """An engine that samples from the trained model itself, in a loop over tokens.

    A prompt is encoded once for all of its completions in a batch. Ended completions are removed from the
    batch when they are half of it. Prompts of similar length are batched together. The model's generation
    config is not used.
    """

    model: Any  # the trained model, with its current weights
    end_ids: list[int]  # tokens that end a completion
    pad_id: int  # token that pads rows on the left
    batch_size: int  # completions generated at a time; affects memory, speed and random numbers

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        """See `RolloutEngine.generate`; an `InputError` reports probabilities that are not numbers."""
        longest_first = sorted(range(len(prompts)), key=lambda row: -len(prompts[row]))
        completions: dict[int, Completion] = {}
        for start in range(0, len(prompts), self.batch_size):
            rows = longest_first[start : start + self.batch_size]
            batch = self._complete([prompts[row] for row in rows], sampling)
            completions |= dict(zip(rows, batch, strict=True))
        return [completions[row] for row in range(len(prompts))]

    def _complete(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        device, B, C = self.model.device, len(prompts), sampling.max_new_tokens
        places: dict[tuple[int, ...], int] = {}
        prompt_of = [places.setdefault(tuple(ids), len(places)) for ids in prompts]
        owners = torch.tensor(prompt_of, dtype=torch.int64, device=device)
        padding = [max(map(len, places)) - len(ids) for ids in places]
        filled = [[self.pad_id] * n + list(ids) for n, ids in zip(padding, places, strict=True)]
        tokens = torch.tensor(filled, dtype=torch.int64, device=device)  # [prompts, P], padded on the left
        left_out = torch.tensor(padding, dtype=torch.int64, device=device).unsqueeze(1)
        mask = (torch.arange(tokens.shape[1], device=device) >= left_out).long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        rows, going = torch.arange(B, device=device), torch.ones(B, dtype=torch.bool, device=device)
        end_ids = torch.tensor(self.end_ids, dtype=torch.int64, device=device)
        ids = torch.zeros(B, C, dtype=torch.int64, device=device)
        logprobs = torch.zeros(B, C, dtype=torch.float32, device=device)
        sets: list[list[Tensor]] = [[] for _ in prompts]
        ropes, (cache, options) = varying_ropes(self.model), new_cache(self.model)
        K = sampling.top_logprobs if sampling.temperature > 0 else 0
        top_ids = torch.full((B, C, K), -1, dtype=torch.int32, device=device)
        top_logprobs = torch.zeros(B, C, K, dtype=torch.float32, device=device)
        for place in range(C):
            inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
            with own_frequencies(ropes, (positions[:, -1:] + 1).expand_as(positions)):
                logits = self.model(**inputs, **options).logits[:, -1].float()
            if place == 0:  # a row for each prompt becomes a row for each completion
                cache.reorder_cache(owners)
                logits, mask, positions = (x[owners] for x in (logits, mask, positions))
            uniforms = torch.rand(len(rows), 1, dtype=torch.float32, device=device)
            drawn, probs, drawable, top = draw(logits, sampling, uniforms)
            ids[rows, place], logprobs[rows, place] = drawn, probs.log().float()
            if top is not None:
                k = top.ids.shape[1]
                top_ids[rows, place, :k], top_logprobs[rows, place, :k] = top.ids, top.logprobs
            for row, each in zip(rows.tolist() if drawable else (), drawable, strict=True):
                sets[row].append(each)
            going &= ~torch.isin(drawn, end_ids)
            left = int(going.sum())
            if left == 0 or place == C - 1:
                break
            if 2 * left <= len(going):
                chosen = going.nonzero().flatten()
                cache.reorder_cache(chosen)
                rows, drawn, mask, positions, going = (
                    x[chosen] for x in (rows, drawn, mask, positions, going)
                )
            tokens, positions = drawn.unsqueeze(1), positions[:, -1:] + 1
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        ids, logprobs, top_ids, top_logprobs = (x.cpu() for x in (ids, logprobs, top_ids, top_logprobs))
        ends = torch.isin(ids, end_ids.cpu())
        finished = ends.any(1)
        lengths = torch.where(finished, ends.to(torch.int8).argmax(1) + 1, C)
        inside = torch.arange(C, device="cpu") < lengths.unsqueeze(1)
        if bool((logprobs.isnan() & inside).any()):
            raise InputError("the model's probabilities are NaN: its weights or logits are not finite")
        completions = []
        for row, length in enumerate(lengths.tolist()):
            sampled_from = None
            if sampling.return_mask:
                counts = ids.new_tensor([len(each) for each in sets[row][:length]])
                sampled_from = SamplingMask(torch.cat(sets[row][:length]), counts)
            # Copies: a slice would be pickled for other processes with its whole tensor.
            logp = None if sampling.temperature == 0 else logprobs[row, :length].clone()
            done, centering = bool(finished[row]), None
            if K:
                centering = ScoreCentering(top_ids[row, :length].clone(), top_logprobs[row, :length].clone())
            own = ids[row, :length].clone()
            completions.append(Completion(own, done, logp, mask=sampled_from, centering=centering))
        return completions


def new_cache(model: Any) -> tuple[Any, dict[str, Any]]:
    """Return an empty cache, and the options of a model's forward that fill it and return the last logits.

    Under autocast it has 16 bits: norms return keys in fp32, which attention rounds.
    """
    cache: Any = transformers.DynamicCache(config=model.config)
    if torch.is_autocast_enabled(model.device.type):
        dtype, update = torch.get_autocast_dtype(model.device.type), cache.update
        cache.update = lambda k, v, *args, **options: update(k.to(dtype), v.to(dtype), *args, **options)
    # transformers 5.40 removes the older name
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    return cache, {name: cache, "use_cache": True, "logits_to_keep": 1}


def draw(
    logits: Tensor, sampling: Sampling, uniforms: Tensor
) -> tuple[Tensor, Tensor, Sequence[Tensor], ScoreCentering | None]:
    """Draw a token from each row of logits [b, V]; the most likely one if the temperature is 0.

    A uniform number in [0, 1), [b, 1], selects a token by the cumulative probabilities. One softmax and one
    cumulative sum in fp64 take half the time of `torch.multinomial`. Returns the tokens, [b] int64; their
    probabilities, [b]; with ``return_mask``, b tensors of possible ids; with ``top_logprobs`` k, the k most
    likely ids and their log-probs, [b, k].
    """
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.ones_like(logits[:, 0]), (), None
    if sampling.temperature != 1.0:  # subtract the maximum first, for accuracy
        logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    sets: Sequence[Tensor] = ()
    if sampling.cuts:
        mask = sampling_mask(logits, top_k=sampling.top_k, top_p=sampling.top_p)
        drawable = bits.columns(mask, logits.shape[1])
        logits = logits.masked_fill(~drawable, -torch.inf)
        if sampling.return_mask:
            sets = drawable.nonzero()[:, 1].to("cpu", torch.int32).split(drawable.sum(-1).tolist())
    probs = logits.softmax(-1)
    cumulative = exact(probs).cumsum(-1)
    # The last factor keeps the product from rounding up to the total.
    shares = exact(uniforms) * cumulative[:, -1:] * (1.0 - max(2.0**-40, torch.finfo(cumulative.dtype).eps))
    # right=True: the first sum above the share, never a token of probability 0; NaN is beyond the end.
    tokens = torch.searchsorted(cumulative, shares, right=True).clamp(max=logits.shape[1] - 1)
    top = None
    if sampling.top_logprobs:
        largest, ids = probs.topk(min(sampling.top_logprobs, probs.shape[1]))
        top_logprobs = (largest / cumulative[:, -1:]).log().float()
        top = ScoreCentering(ids.masked_fill(largest == 0, -1).int(), top_logprobs)
    probs = probs.gather(-1, tokens) / cumulative[:, -1:]
    return tokens.squeeze(-1), probs.squeeze(-1), sets, top
