"""Every registered objective as a parameter of tests, and what they share."""

import dataclasses

import pytest
import torch

import gspo_kernels as gk
from tests.objectives.formulas import Sequence
from tests.objectives.sample_batches import examples

ALL = examples()
ALONE = examples(max_scope="sequence")
"""Those whose coefficients don't look at other sequences."""


def options(objective):
    return {field.name: getattr(objective, field.name) for field in dataclasses.fields(objective)}


def name_of(objective):
    given = {k: v for k, v in options(objective).items() if v != getattr(type(objective), k, None)}
    return " ".join([type(objective).__name__, *(f"{k}={v}" for k, v in given.items())])


every = pytest.mark.parametrize("objective", ALL, ids=name_of)
alone = pytest.mark.parametrize("objective", ALONE, ids=name_of)
layouts = pytest.mark.parametrize("layout", ["padded", "packed"])


def coefficients(batch, objective, **changes):
    return batch.call(gk.policy_coefficients, objective, **changes)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def sequences(batch):
    """The counted tokens of each sequence of a padded batch."""
    for i, mask in enumerate(batch.loss_mask):
        count = int(mask.sum())

        def pick(values, default, i=i, mask=mask, count=count):
            if values is None:
                return (default,) * count
            return tuple(values[i][mask].tolist()) if values.ndim == 2 else (float(values[i]),) * count

        get = batch.terms.get
        lengths = get("lengths")
        yield Sequence(
            pick(batch.logprobs, 0.0), pick(batch.old_logprobs, 0.0), pick(batch.advantages, 0.0),
            count if lengths is None else float(lengths[i]), pick(get("token_weights"), 1.0),
            pick(get("ref_logprobs"), 0.0), pick(get("entropy"), 0.0), pick(get("turn_ids"), 0),
        )  # fmt: skip
