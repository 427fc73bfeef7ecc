"""Random calls of every entry against the naive fp64 oracle.

``python -m tests.fuzz --backend cpp --seconds 60`` draws entries, objectives, lengths, layouts, dtypes,
strides, terms, holes with NaN and infinities, schedules, chunks, upstream gradients, ids and teachers. The
tests' own checks decide what is wrong. The first failure ends it, with the command that repeats the call.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from functools import partial
from typing import Any

import torch

import gspo_kernels as gk
from tests import test_distillation, test_selected
from tests.cases import AGGREGATIONS, KIND, LAYOUTS, LOGIT_OPTIONS, for_objective, make_case, run
from tests.judging import assert_equals_oracle

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LARGEST = {"reference": 5000, "cpp": 5000, "triton": 5000 if torch.cuda.is_available() else 200}
"""Vocabularies that a backend computes in little time."""
SCHEDULES = ("auto", "known", "aligned", "deferred", "two_pass")
# parts of a call: at most one of each line
PARTS = (
    ("loss_mask",),
    ("on_policy",),
    ("lengths",),
    ("k1", "k2", "k3", "k3+beta_tensor", "k1+ratio_weighted"),
    ("entropy", "entropy_tensor"),
    ("rollout_sequence", "rollout_token"),
    ("token_weights",),
    ("normalizer", "normalizer_tensor"),
)


def sizes(dice: random.Random, largest: int) -> tuple[torch.dtype, int]:
    """Draw a dtype and a vocabulary. For fp16 it is small, so that gradients are normal numbers."""
    dtype = dice.choice(DTYPES)
    largest = min(largest, 61) if dtype == torch.float16 else largest
    return dtype, max(1, round(math.exp(dice.uniform(0.0, math.log(largest)))))


def draw_objective(dice: random.Random) -> Any:
    aggregation = dice.choice(AGGREGATIONS)
    shared = {"aggregation": aggregation, "aggregation_constant": 6.0 if aggregation == "constant" else None}
    kind = dice.choice((gk.GSPO, gk.GSPO, gk.GSPOToken, gk.GRPO, gk.Linear))
    if kind is gk.Linear:
        return gk.Linear(**shared)
    low, high = dice.choice(((0.2, 0.2), (0.1, 0.3)) if kind is gk.GRPO else ((3e-4, 4e-4), (0.2, 0.2)))
    return kind(clip_low=low, clip_high=high, dual_clip=dice.choice((None, None, 1.5)), **shared)


def policy_call(seed: int, largest: int) -> tuple[str, partial[bool]]:
    """Draw a call of an entry that takes labels or log-probs. Return its description and the attempt."""
    dice = random.Random(seed)
    entry, objective = dice.choice(list(KIND)), draw_objective(dice)
    dtype, vocabulary = sizes(dice, largest)
    linear = isinstance(objective, gk.Linear)
    terms = [dice.choice(line) for line in PARTS if dice.random() < 0.25]
    terms = [part for part in terms if not (linear and part.endswith("ratio_weighted"))]
    if not isinstance(objective, gk.GSPO | gk.Linear) and dice.random() < 0.3:
        terms.append("token_advantages")
    lengths = [dice.choice((0, 0, 1, 1, 2, 3, 5, 8)) for _ in range(6)]
    lengths[-1] += sum(lengths) == 6  # were N = B, shapes would not tell sequences from tokens
    arguments = {
        "kind": KIND[entry],
        "layout": dice.choice(LAYOUTS),
        "terms": "+".join(["plain", *terms]),
        "lengths": tuple(lengths),
        "vocabulary": vocabulary,
        "width": dice.choice((1, 3, 16, 40)),
        "dtype": dtype,
        "padding": dice.choice((0, 2)),
        "logit_options": dice.choice(list(LOGIT_OPTIONS)),
        "bias": dice.random() < 0.5,
        "label_dtype": dice.choice((torch.int64, torch.int32)),
        "seed": seed,
    }
    options: dict[str, Any] = {"factor": dice.choice((1.0, 0.5, -2.0))}
    if "linear" in entry and dice.random() < 0.6:
        options["max_chunk_bytes"] = dice.choice((1, 3, 7)) * vocabulary * 8
    if entry == "fused_linear_policy_loss":
        options |= {"schedule": dice.choice(SCHEDULES), "skip_inactive": dice.choice(("backward", "none"))}
    options["strides"] = dice.choice(("contiguous", "gaps", "reversed axes"))
    attempt = partial(attempt_policy, arguments, entry, objective, options)
    return f"{entry} {objective} {arguments} {options}", attempt


def attempt_policy(
    arguments: dict[str, Any], entry: str, objective: Any, options: dict[str, Any], backend: str
) -> bool:
    """Run and judge a call. Return False if the package refuses a schedule that can't serve it."""
    case = for_objective(make_case.__wrapped__(**arguments), objective)
    try:
        result = run(case, entry, objective, backend, **options)
    except ValueError as refusal:
        if "schedule" in str(refusal):
            return False
        raise
    assert_equals_oracle(result, case, objective)
    return True


def other_call(seed: int, largest: int) -> tuple[str, partial[None]]:
    """Draw a problem of test_selected.py or test_distillation.py. Return description and attempt."""
    dice = random.Random(seed)
    (dtype, V), linear = sizes(dice, largest), dice.random() < 0.5
    V, dtype = max(V, 2), torch.float32 if dtype == torch.float64 else dtype
    given: dict[str, Any] = {"V": V, "linear": linear, "dtype": dtype}
    if linear:
        given["call"] = {"max_chunk_bytes": dice.choice((1, 2, 5)) * V * 8}
    if dice.random() < 0.5:
        given |= {"K": min(V, dice.choice((1, 2, 5, 20, V))), "within": dice.random() < 0.3}
        return f"selected ids {given}", partial(test_selected.check, **given)
    form: dict[str, Any] = {"beta": dice.choice((0.0, 0.1, 0.5, 1.0))}
    # rounding may change the choice of ids where two logits are close
    if not linear and dtype == torch.float32 and dice.random() < 0.4:
        form |= {"top_k": min(V, dice.choice((1, 3, 30))), "top_k_of": dice.choice(("teacher", "student"))}
        form["add_tail"] = form["top_k"] == 1 or dice.random() < 0.5
    options = dice.choice(("plain", "transformed"))
    given |= {"forms": [form], "packed": dice.random() < 0.3, "options": options}
    return f"distillation {given}", partial(test_distillation.check, **given)


def attempt(seed: int, backend: str, largest: int) -> bool:
    """Draw a call, run and judge it. Return False if the package refuses its schedule."""
    # every fourth has ids or a teacher instead of labels
    description, call = (other_call if seed % 4 == 3 else policy_call)(seed, largest)
    try:
        return call(backend=backend) is not False
    except Exception as error:
        raise AssertionError(
            f"{description}\npython -m tests.fuzz --seconds 0 --backend {backend} --seed {seed}"
        ) from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", default="cpp", choices=("reference", "cpp", "triton"))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first call")
    options = parser.parse_args()
    end, served = time.monotonic() + options.seconds, []
    while not served or time.monotonic() < end:
        served.append(attempt(options.seed + len(served), options.backend, LARGEST[options.backend]))
    print(f"{len(served)} calls of {options.backend}, {served.count(False)} refused for their schedule")


if __name__ == "__main__":
    main()
