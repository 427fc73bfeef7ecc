"""What the formula sheet leaves open: ties, draws, ambiguous shapes, a user's objectives."""

import math

import pytest
import torch

import gspo_kernels as gk
from tests.cases import generator, offsets


def fp64(*values):
    return torch.tensor(values, dtype=torch.float64)


def coefficients(log_ratios, advantages, objective):
    """Return the coefficients for log-ratios [B, T]."""
    logprobs = torch.full_like(log_ratios, -20.0)
    return gk.policy_coefficients(logprobs, logprobs - log_ratios, advantages, objective=objective)


def test_vespo_clamps_each_log_ratio():
    got = coefficients(fp64([1e4, -19.0]), fp64(1.0), gk.VESPO())
    assert got[0, 0].item() == pytest.approx(-math.exp(2 + 3 - 3 * math.exp(1)) / 2, rel=1e-12)


def test_real_has_its_full_gradient_at_infinite_ratios():
    """``w_i / (tau |y_i|)`` with ``w_i`` = 1, which infinitely wrong sequences of one group share."""
    infinite, logprobs = float("inf"), torch.full((6, 2), -20.0, dtype=torch.float64)
    wrong = fp64([-infinite, 0.0], [0.0, 0.0], [0.0, 0.0], [infinite, 0.0], [0.0, infinite], [0.0, 0.0])
    logprobs[wrong == -infinite] = -infinite
    old = torch.where(wrong == infinite, -infinite, torch.where(wrong == 0, logprobs, -20.0))
    got = gk.policy_coefficients(
        logprobs, old, fp64(1.0, 0.0, 1.0, 0.0, 0.0, 0.0), objective=gk.REAL(tau=0.5),
        group_ids=torch.tensor([0, 0, 1, 1, 1, 1]), normalizer=1,
    )  # fmt: skip
    # a sequence's value is its group's loss: a group of n counts n times; exp(0) / (1 + exp(0)) = 1 / 2
    groups = fp64(2.0, 2.0, 4.0, 4.0, 4.0, 4.0)
    shares = fp64(-1.0, 0.5, -0.5, 0.5, 0.5, 0.0)
    torch.testing.assert_close(got, (groups * shares / (0.5 * 2)).unsqueeze(1).expand(6, 2))


def test_m2po_masks_equal_tokens_together():
    got = coefficients(fp64([0.2, 0.2, 0.1]), fp64(1.0), gk.M2PO(threshold=0.026))
    assert got.tolist() == [[0.0, 0.0, pytest.approx(-math.exp(0.1) / 3, rel=1e-12)]]


def test_clip_cov_draws_by_seed_and_between_bounds():
    """Covariances 0.5, -0.5, -0.5, 0.5: two candidates, one is drawn; the fourth has no gradient to lose."""
    logprobs, advantages = fp64([-1.0, -3.0], [-1.0, -3.0]), fp64(1.0, 0.0)

    def lost(**options):
        """Return which tokens have another coefficient than GRPO's."""
        both = (
            gk.policy_coefficients(logprobs, logprobs, advantages, objective=one)
            for one in (gk.ClipCov(**options), gk.GRPO())
        )
        return tuple(torch.ne(*both).flatten().tolist())

    drawn = [lost(clip_cov_lb=0.1, seed=seed) for seed in range(20)]
    assert set(drawn) == {(True, False, False, False), (False,) * 4}
    assert drawn == [lost(clip_cov_lb=0.1, seed=seed) for seed in range(20)]
    for low, high in ((0.5, 0.6), (0.4, 0.5), (0.6, 9.0)):  # a bound itself is outside
        assert not any(lost(clip_cov_ratio=1.0, clip_cov_lb=low, clip_cov_ub=high))


@pytest.mark.parametrize("objective", [gk.GSPO(), gk.GSPOToken(), gk.GRPO()], ids=lambda o: type(o).__name__)
def test_as_many_packed_tokens_as_sequences(objective):
    """With three tokens in three sequences, one of them empty, every function reads [3] as [B]."""
    rng, ends = generator(0), offsets((2, 0, 1))
    hidden, weight, logits = (torch.randn(*size, generator=rng).double() for size in ((3, 5), (7, 5), (3, 7)))
    labels, advantages, weights = torch.tensor([1, 2, 3]), fp64(1.0, -2.0, 0.5), fp64(0.5, 2.0, 3.0)
    terms = {"cu_seqlens": ends, "rollout_weights": weights, "objective": objective}
    logprobs = gk.token_logprobs(logits, labels).logprobs
    for output in (
        gk.policy_loss(logprobs, None, advantages, **terms),
        gk.fused_policy_loss(logits, labels, None, advantages, **terms),
        gk.fused_linear_policy_loss(hidden, weight, labels, None, advantages, **terms),
    ):
        assert output.loss.item() == pytest.approx(-(0.5 * 1.0 + 3.0 * 0.5) / 2, rel=1e-12)
    got = gk.policy_coefficients(logprobs, None, advantages, **terms)
    assert got.tolist() == pytest.approx([-0.5 / 4, -0.5 / 4, -1.5 / 2], rel=1e-12)
    kept = gk.off_policy_mask(logprobs - 1, logprobs, fp64(-1.0, -1.0, 1.0), cu_seqlens=ends, delta=0.1)
    assert kept.tolist() == [0.0, 1.0, 1.0]


def test_dpo_without_a_pair():
    leaf, ref, group_ids = fp64([-0.4], [-0.1]).requires_grad_(), fp64([-0.2], [-0.3]), torch.zeros(2).long()
    terms = {"ref_logprobs": ref, "group_ids": group_ids, "objective": gk.DPO(min_gap=1.5)}
    loss = gk.policy_loss(leaf, None, fp64(1.0, 2.5), **terms).loss
    loss.backward()
    assert loss == 0 and not leaf.grad.any()
