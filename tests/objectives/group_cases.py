"""Batches for objectives over groups."""

import functools

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.objectives.agro import AGRO
from gspo_kernels.objectives.clip_cov import ClipCov
from gspo_kernels.objectives.dpo import DPO
from gspo_kernels.objectives.egsw import EGSW
from gspo_kernels.objectives.kl_cov import KLCov
from gspo_kernels.objectives.m2po import M2PO
from gspo_kernels.objectives.real import REAL
from gspo_kernels.objectives.rebel import REBEL
from gspo_kernels.objectives.trpa import TRPA
from tests.cases import generator, make_case, pad, replace

# Groups of four (one sequence without a token), of two and of three, not side by side.
LENGTHS = (3, 2, 1, 4, 2, 0, 3, 2, 5)
IDS = (5, -1, 5, 7, -1, 5, 7, 5, 7)
LEVELS = (1.0, 2.0, 3.0, 2.0, 2.0, 1.0, 1.0, 1.0, 4.0)  # the group of two has no pair
REWARDS = (0.7, -1.2, 0.0, 2.0, 1.4, 9.0, -0.5, 0.3, 1.1)
OBJECTIVES = {
    "TRPA": TRPA(beta=0.7, kl_coef=0.2),
    "DPO": DPO(beta=0.3),
    "REBEL": REBEL(eta=0.8),
    "AGRO": AGRO(beta=0.4),
    "EGSW": EGSW(alpha=0.7, temperature=0.6, dual_clip=1.5),
    "ClipCov": ClipCov(clip_cov_ratio=0.1, clip_cov_lb=0.001, clip_cov_ub=5.0),
    "KLCov": KLCov(kl_cov_ratio=0.2, ppo_kl_coef=0.6),
    "REAL": REAL(tau=0.4),
    "M2PO": M2PO(threshold=0.05, aggregation="sequence_mean"),
}
PAIRWISE, BATCHWIDE = ("TRPA", "DPO", "REBEL"), ("ClipCov", "KLCov", "M2PO")
every = pytest.mark.parametrize("name", OBJECTIVES)


@functools.cache
def case_of(name, layout="packed", kind="logprobs", rollout=False):
    """A case with all that an objective needs, and a hole in its first sequence."""
    values = LEVELS if name in ("TRPA", "DPO") else REWARDS
    log_s = (0.2, -0.3, 0.1, 0.4, -0.2, 0.0, -0.4, 0.05, 0.3)
    case = make_case(
        kind, "packed", lengths=LENGTHS, advantages=values, log_s=log_s, dtype=torch.float64, noise=0.15
    )
    rng, needs, tokens = generator(7), OBJECTIVES[name].needs, sum(LENGTHS)
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[1] = False
    terms = {}
    if "ref_logprobs" in needs:
        terms["ref_logprobs"] = case.old_logprobs + 0.3 * torch.randn(tokens, generator=rng).double()
    if "group_ids" in needs:
        terms["group_ids"] = torch.tensor(IDS)
    if rollout:
        terms["rollout_weights"] = 0.5 + torch.rand(len(LENGTHS), generator=rng).double()
    inputs = dict(case.inputs)
    if "entropy" in needs and kind == "logprobs":
        inputs["entropy"] = torch.rand(tokens, generator=rng).double()
    case = replace(case, inputs=inputs, terms=terms, loss_mask=mask)
    return case if layout == "packed" else pad(case, 2)


def arguments(case, objective, **changes):
    """Keywords of ``policy_loss`` from logprobs."""
    given = {"loss_mask": case.loss_mask, "cu_seqlens": case.cu_seqlens, **case.terms, "objective": objective}
    if "entropy" in case.inputs:
        given["entropy"] = case.inputs["entropy"]
    return {**given, **changes}


def coefficients(case, objective, **changes):
    return gk.policy_coefficients(
        case.inputs["logprobs"], case.old_logprobs, case.advantages, **arguments(case, objective, **changes)
    )
