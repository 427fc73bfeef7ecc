"""What a token's coefficient depends on in a call, and so which schedules are exact for it."""

from __future__ import annotations

from gspo_kernels.linear.schedule import Refusals
from gspo_kernels.objectives.base import Objective
from gspo_kernels.plan import coefficients_depend_on
from gspo_kernels.terms import Terms


def compares_none(terms: Terms) -> bool:
    """Whether no log-probs are given, so that nobody sees the last bits of those that the call computes.

    Given ones make a ratio of exactly 1 where weights and path are the same.
    """
    return terms.old_logprobs is None and terms.ref_logprobs is None


def what_couples_tokens(objective: Objective, terms: Terms) -> str:
    """What makes coefficients depend on more than a token, in words."""
    name = f"{type(objective).__name__} off-policy" if objective.ratio_only else type(objective).__name__
    if terms.kl_beta is not None and terms.kl_ratio_weighted:
        return f"kl_ratio_weighted with {name}"
    return name


def evaluated_at_once(objective: Objective, terms: Terms, invariant: bool) -> bool:
    """Whether coefficients are to come from one evaluation of the whole call, so that sums over its sequences
    have one order.
    """
    return invariant and coefficients_depend_on(objective, terms) in ("group", "batch")


def refusals(objective: Objective, terms: Terms, trains_head: bool, invariant: bool) -> Refusals:
    """Why schedules are not exact for a call, or not batch-invariant where that is asked for."""
    name, scope = type(objective).__name__, coefficients_depend_on(objective, terms)
    reasons = {}
    if scope not in ("nothing", "token"):
        what = what_couples_tokens(objective, terms)
        reasons["known"] = (
            f"it needs coefficients that depend on one token alone, but {what} makes them "
            f"depend on the {scope}"
        )
    if terms.kl_beta is not None:
        reasons["deferred"] = "kl_beta adds a coefficient of each token's own"
    elif not objective.factorizes:
        reasons["deferred"] = f"{name}'s coefficients are not one number per sequence"
    elif terms.advantages is not None and terms.advantages.ndim == 2:
        reasons["deferred"] = f"advantages per token give {name} coefficients per token"
    elif terms.rollout_weights is not None and terms.rollout_weights.ndim == 2 and objective.level == "token":
        reasons["deferred"] = f"rollout_weights per token give {name} coefficients per token"
    if terms.entropy_coef is not None:
        for schedule in ("deferred", "frozen"):
            reasons[schedule] = "entropy_coef adds a gradient that is no multiple of the log-prob's"
    if trains_head:
        reasons.setdefault("frozen", "the lm_head's weight or bias needs a gradient")
    if terms.cp_group:
        for schedule in ("aligned", "deferred"):
            reasons[schedule] = "cp_group has tokens of the same sequences on other ranks"
    if invariant:
        reasons.setdefault("deferred", "batch-invariant mode sums dWeight in segments, not in sequences")
        if scope == "token":
            reasons.setdefault(
                "known", "batch-invariant mode takes coefficients from whole sequences, as other schedules do"
            )
        if evaluated_at_once(objective, terms, invariant):
            for schedule in ("aligned", "frozen"):
                reasons[schedule] = (
                    f"batch-invariant mode evaluates coefficients that depend on the {scope} all at once"
                )
    if terms.skipped is not None and scope in ("group", "batch"):
        for schedule in ("aligned", "frozen"):
            reasons[schedule] = f"skip_inactive='all' leaves out sequences that {name}'s coefficients look at"
    return Refusals(reasons)
