"""Small calls on the CPU keep their logits until the backward, unless plain products could spoil the results.

tests/test_invariants.py shows that their results equal those of all other ways.
"""

from dataclasses import replace

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import losses
from gspo_kernels.hidden import small
from tests.cases import make_case, run

NARROW = {"vocabulary": 40, "width": 8}
CALL = make_case("linear", "packed", lengths=(6, 6, 6), **NARROW)
BYTES = 4 * 40 * 18


@pytest.fixture
def kept(monkeypatch):
    """Record for each call whether its logits stayed until the backward. ``BYTES`` are small enough."""
    monkeypatch.setattr(small, "SMALL_BYTES", BYTES)
    found, small_loss = [], losses.small_loss

    def watched(*args):
        result = small_loss(*args)
        found.append(result is not None)
        return result

    monkeypatch.setattr(losses, "small_loss", watched)
    return found


def nan_without_advantage():
    hidden = CALL.inputs["hidden"].clone()
    hidden[6:12] = torch.nan
    advantages = torch.tensor([1.0, 0.0, -1.0])
    return replace(CALL, inputs=CALL.inputs | {"hidden": hidden}, advantages=advantages)


KL = {"kl_beta": 0.1, "ref_logprobs": CALL.old_logprobs - 0.1}
# A case, its objective and options, and whether logits are kept.
CALLS = {
    "plain": (CALL, gk.GSPO(), {}, True),
    "fp64": (make_case("linear", lengths=(6, 3), dtype=torch.float64, **NARROW), gk.GSPO(), {}, True),
    "one token more": (make_case("linear", lengths=(6, 6, 7), **NARROW), gk.GSPO(), {}, False),
    "masked": (replace(CALL, loss_mask=torch.arange(18) % 6 < 5), gk.GSPO(), {}, False),
    "NaN without advantage": (nan_without_advantage(), gk.GSPO(), {}, False),
    "large ratios": (replace(CALL, old_logprobs=CALL.old_logprobs - 60), gk.GSPO(1.0, 1e30), {}, False),
    "budget": (CALL, gk.GSPO(), {"max_chunk_bytes": BYTES - 4 * 40}, False),
    "skip all": (CALL, gk.GSPO(), {"skip_inactive": "all"}, False),
    "entropy": (CALL, gk.GSPO(), {"return_entropy": True}, False),
    "KL": (replace(CALL, terms=KL), gk.GSPO(), {}, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_which_calls_keep_their_logits(kept, name):
    case, objective, options, expected = CALLS[name]
    result = run(case, "fused_linear_policy_loss", objective, **options)
    assert any(kept) == expected
    assert all(gradient.isfinite().all() for gradient in result.grads.values())
