"""What tests of the verl adapter share."""

import inspect
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gspo_kernels.integrations import verl as adapter
from tests.draws import shifted_seed

ROOT = Path(__file__).parents[2]
MODES = tuple(adapter.AGGREGATIONS)
LENGTHS = (8, 3, 5, 6, 1, 4)
MASK = torch.arange(8) < torch.tensor(LENGTHS).unsqueeze(1)


def config(**changed):
    """What verl's ActorConfig holds, with its defaults but for the clip ranges."""
    values = {
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": 1.5,
        "tau_pos": 1.0,
        "tau_neg": 1.05,
        "policy_loss": SimpleNamespace(dro_beta=0.3),
        "global_batch_info": {},
    }
    return SimpleNamespace(**{**values, **changed})


def batch(seed=0, dtype=torch.float64):
    """Log-probs, old ones, advantages one per sequence, and weights per token; NaN where not counted."""
    rng = torch.Generator().manual_seed(shifted_seed(seed))
    start = -torch.rand(MASK.shape, generator=rng, dtype=torch.float64) - 0.2
    shift = torch.tensor([0.3, -0.3, 0.3, -0.3, 0.0, 0.6]).double().unsqueeze(1)
    old = (start - shift - 0.2 * torch.randn(MASK.shape, generator=rng, dtype=torch.float64)).clamp(max=-0.01)
    advantages = torch.tensor([1.0, -0.5, -1.2, 0.8, 0.0, -2.0]).double().unsqueeze(1).expand(MASK.shape)
    weights = 0.5 + torch.rand(MASK.shape, generator=rng, dtype=torch.float64)
    return tuple(torch.where(MASK, each, 0.0).to(dtype) for each in (start, old, advantages, weights))


def values(loss_fn, start, old, advantages, weights=None, mask=MASK, mode="token-mean", config=None):
    """Loss, gradient and metrics, called as verl's actor does."""
    start = start.clone().requires_grad_()
    loss, metrics = loss_fn(
        old_log_prob=old, log_prob=start, advantages=advantages, response_mask=mask,
        loss_agg_mode=mode, config=config, rollout_is_weights=weights,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, start)
    return loss.detach(), gradient, metrics


def quietly(*arguments, **keywords):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return values(*arguments, **keywords)


def assert_equal(one, other, guard=0.0):
    torch.testing.assert_close(one, other, rtol=1e-10 + guard, atol=1e-14 + guard)


SIGNATURE = {
    "old_log_prob": inspect.Parameter.empty,
    "log_prob": inspect.Parameter.empty,
    "advantages": inspect.Parameter.empty,
    "response_mask": inspect.Parameter.empty,
    "loss_agg_mode": "token-mean",
    "config": None,
    "rollout_is_weights": None,
}
INFO = {"dp_size": 2, "batch_num_tokens": sum(LENGTHS), "global_batch_size": 6, "loss_scale_factor": 16}


def entry_points():
    """The plugin's line of pyproject.toml, as an installed package has it."""
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((name, target),) = project["entry-points"]["verl.plugins"].items()
    return name, target
