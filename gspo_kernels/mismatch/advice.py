"""What a report says in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gspo_kernels.mismatch.measure import Comparison
from gspo_kernels.mismatch.switches import Switched

EXPLAINED = 0.5
"""A switch explains a difference if it takes away this share of the mean."""
_HARMLESS = 0.01
"""Share of sequences outside of the clip range that changes nothing."""


def explanation(switched: Sequence[Switched], before: float) -> Switched | None:
    """Return the switch that brings training nearest to the sampler, if it explains the difference.

    What makes tokens impossible that were sampled explains nothing.
    """
    candidates = [s for s in switched if bool(s.comparison.possible.all())]
    sizes = [s.comparison.summary()["tokens/mean"] for s in candidates]
    if not sizes or not before > 0 or min(sizes) > (1 - EXPLAINED) * before:
        return None
    return candidates[sizes.index(min(sizes))]


def advise(comparison: Comparison, switched: Sequence[Switched]) -> list[str]:
    """Return sentences: how bad it is, where it comes from, what to do."""
    numbers = comparison.summary()
    mean, outside = numbers["tokens/mean"], numbers["sequences/outside"]
    low, high = comparison.clip
    said = []
    if outside == 0 and not numbers["tokens/impossible"]:
        said.append(f"No sequence leaves the clip range ({low:g}, {high:g}): either may give old log-probs.")
    else:
        said.append(
            f"{outside:.1%} of the sequences leave the clip range ({low:g}, {high:g}) although nothing was "
            "trained. Take old log-probs from training itself, as the bundled trainer does, never from the "
            "sampler."
        )
    if numbers["tokens/impossible"]:
        said.append(
            f"{numbers['tokens/impossible']:.0f} tokens are impossible to one side (a log-prob of -inf): "
            "a mask, or a vocabulary, that only one of them has."
        )
    cause = explanation(switched, mean)
    if cause is not None:
        left = cause.comparison.summary()["tokens/mean"] / mean
        said.append(f"Where it comes from: with {cause.name}, {left:.1%} of the mean difference is left.")
        said += _remedy(cause)
    elif switched and outside > _HARMLESS:
        said.append("No single switch explains it: other weights, or another tokenizer, may have sampled.")
    movers = sorted(switched, key=lambda s: -_or_zero(s.moved))[:1]
    if movers and cause is None and mean == 0:
        said.append(f"Training agrees with the sampler; what would move it most is: {movers[0].name}.")
    if outside > _HARMLESS:
        said += _correction(comparison, "Correct" if cause is None else "Where that can't be had, correct")
    return said


def _remedy(cause: Switched) -> list[str]:
    change = cause.change
    if "top_p" in change or "top_k" in change:
        return [
            "Sample with top_p=1 and top_k=0, or give the losses the same mask (kept_mask=, from "
            "gk.sampling_mask; in the bundled trainer rollout.keep_sampling_mask): log-probs over the whole "
            "vocabulary are smaller by the log of the probability that was cut off."
        ]
    if "recorded" in change:
        return [
            "The sampler's log-probs are over the whole vocabulary: let it give them after its cuts (vLLM: "
            "logprobs_mode=processed_logprobs), or train without rollout.keep_sampling_mask."
        ]
    if "order" in change:
        return ["Ask the sampler for log-probs after temperature (vLLM: logprobs_mode=processed_logprobs)."]
    if change.keys() <= {"weights", "head"}:
        return [
            "Sample in the precision that trains where memory allows; fp16 rounds eight times finer than "
            "bf16. Otherwise the difference is noise around 0, which rollout weights bound."
        ]
    if "softmax" in change:
        return ["Let the sampler take its log-softmax in fp32."]
    return ["Let both sides compute alike in this."]


def _correction(comparison: Comparison, correct: str) -> list[str]:
    effects = comparison.corrections()
    token, sequence, total = effects.values()
    holds = comparison.range_that_holds(0.99)
    if 0.0 in holds:
        mean = comparison.summary()["sequences/mean_log_s"]
        said = [
            f"The difference has one sign (log s is {mean:.1e} in the mean): no clip range makes up for it."
        ]
    else:
        said = [
            f"If old log-probs must be the sampler's, a clip range of ({holds[0]:.2g}, {holds[1]:.2g}) holds "
            "99% of the untrained sequences; a narrower one clips them by chance."
        ]
    better = "token" if token["ess"] >= sequence["ess"] else "sequence"
    best = token if better == "token" else sequence
    said.append(
        f'{correct} with gk.rollout_weights(..., level="{better}", mode="truncate", high=2.0), which leaves '
        f"{best['ess']:.1%} of the batch's effective size and {best['gradient_norm']:.2f} of its gradient's "
        "norm."
    )
    if total["gradient_norm"] < 0.9 * best["gradient_norm"] or total["ess"] < 0.9 * best["ess"]:
        said.append(
            f'The sum over a sequence (reduce="sum") would leave {total["ess"]:.1%} and '
            f"{total['gradient_norm']:.2f}: it grows with the length."
        )
    return said


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
