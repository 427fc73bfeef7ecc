"""The loss of every objective in the notation of its source, in fp64 PyTorch, sequence by sequence.

``detach`` stands for a stop-gradient; coefficients come from autograd. Nothing here comes from the package.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Sequence:
    """The counted tokens of one sequence, [n] fp64 each; values per sequence are repeated for each token."""

    logp: Tensor
    old: Tensor
    advantage: Tensor
    rollout: Tensor
    weight: Tensor
    ref: Tensor
    entropy: Tensor
    turn: Tensor
    length: float
    group: int
    index: int

    @property
    def log_r(self) -> Tensor:
        return self.weight * (self.logp - self.old)

    @property
    def log_s(self) -> Tensor:
        return self.log_r.sum() / self.length

    @property
    def log_ref(self) -> Tensor:
        return self.weight * (self.logp - self.ref)


def attached(value: Tensor, to: Tensor) -> Tensor:
    """Return ``value`` with the gradient of ``to``."""
    return value.detach() + to - to.detach()


def clip(r, a, low, high, dual=None):
    """Return PPO's clipped loss; for A < 0 it is at most ``-dual A``."""
    loss = -torch.minimum(r * a, torch.clamp(r, 1 - low, 1 + high) * a)
    return loss if dual is None else torch.where(a < 0, torch.minimum(loss, -dual * a), loss)


def by_sign(a, positive, negative):
    return torch.where(a > 0, a.new_tensor(positive), a.new_tensor(negative))


# Formulas of one sequence: a value per token, or one for the sequence.


def grpo(o, q):
    return clip(q.log_r.exp(), q.advantage, o.clip_low, o.clip_high, o.dual_clip)


def gspo_token(o, q):
    r = attached(q.log_s, q.log_r).exp()
    return clip(r, q.advantage, o.clip_low, o.clip_high, o.dual_clip)


def tl_grpo(o, q):
    nothing = q.log_r.new_zeros(())
    log_turn = torch.stack([q.log_r[q.turn == k].mean() if k >= 0 else nothing for k in q.turn.tolist()])
    return clip(attached(log_turn, q.log_r).exp(), q.advantage, o.clip_low, o.clip_high, o.dual_clip)


def gspo(o, q):
    return clip(q.log_s.exp(), q.advantage[0], o.clip_low, o.clip_high, o.dual_clip)


def espo(o, q):
    # the value is multiplied by rollout weights later, which must leave this KL alone
    kl = o.elbo_kl_beta * q.log_ref.sum().square() / (2 * q.length)
    return gspo(o, q) + kl / q.rollout.mean()


def gmpo(o, q):
    a = q.advantage[0]
    bounded = q.log_r.clamp(max=o.log_clip_high) if a > 0 else q.log_r.clamp(min=-o.log_clip_low)
    return -a * (bounded.sum() / q.length).exp()


def soft_gate(o, q):
    tau = by_sign(q.advantage, o.tau_positive, o.tau_negative)
    return 4 / tau * torch.sigmoid(tau * (q.log_r.exp() - 1))


def sapo(o, q):
    return -q.advantage * soft_gate(o, q)


def sspo(o, q):
    gate = soft_gate(o, q) if o.gate == "sigmoid" else q.log_r.exp()
    return -q.advantage[0] * (gate.log().sum() / q.length).exp()


def abc_grpo(o, q):
    low = by_sign(q.advantage, 1 - o.positive_low, 1 - o.negative_low)
    high = by_sign(q.advantage, 1 + o.positive_high, 1 + o.negative_high)
    return -q.advantage * torch.clamp(q.log_r.exp(), low, high)


def dhpo(o, q):
    spread = q.entropy.max() - q.entropy.min()
    alpha = o.mix
    if o.mix == "entropy":
        alpha = (q.entropy - q.entropy.min()) / spread if spread > 0 else 0.5
    tokens = clip(q.log_r.exp(), q.advantage, o.clip_low, o.clip_high)
    whole = clip(q.log_s.exp(), q.advantage, o.sequence_clip_low, o.sequence_clip_high)
    return alpha * tokens + (1 - alpha) * whole


def fspo(o, q):
    total, a, root = q.log_r.sum(), q.advantage[0], math.sqrt(q.length)
    bounded = total.clamp(-o.log_clip_low * root, o.log_clip_high * root)
    return -torch.minimum(total.exp() * a, bounded.exp() * a)


def ctpo(o, q):
    width = torch.arange(1.0, len(q.logp) + 1, dtype=torch.float64) ** o.power
    c = attached(q.log_r.clamp(-20, 20).cumsum(0), q.log_r).exp()
    dual = None if o.log_dual_clip is None else (o.log_dual_clip * width).exp()
    low, high = 1 - (-o.log_clip_low * width).exp(), (o.log_clip_high * width).exp() - 1
    return clip(c, q.advantage, low, high, dual)


def fipo(o, q):
    r = q.log_r.exp()
    moved = q.log_r.clamp(-20, 20).where(r <= (o.dual_clip or math.inf), 0.0)
    decay = 0.5 ** (torch.arange(len(r), dtype=torch.float64) / o.half_life)
    future = torch.stack([(decay[: len(r) - t] * moved[t:]).sum() for t in range(len(r))])
    factor = future.exp().clamp(1 - o.influence_low, 1 + o.influence_high)
    factor = torch.where((q.advantage < 0) & (r > o.safe_ratio), factor.clamp(max=1.0), factor)
    return factor.detach() * grpo(o, q)


def prime_ipo(o, q):
    keep = (q.logp.exp() - q.old.exp()).abs() <= o.eps
    r = attached(q.log_r.clamp(max=math.log(o.max_ratio)), q.log_r).exp()
    return -(keep * q.advantage * r) + o.kl_tau * q.log_r.square()


def spo(o, q):
    scale = q.old.exp() if type(o).__name__ == "DRPO" else 1.0
    r = q.log_r.exp()
    return -q.advantage * r + q.advantage.abs() * scale * (r - 1).square() / (2 * o.eps)


def cppo(o, q):
    d, t = (q.logp.exp() - q.old.exp()).abs().detach(), torch.arange(len(q.logp), dtype=torch.float64)
    w = 1 - (1 - o.min_weight) * t / max(len(t) - 1, 1)
    budget = d.quantile(0.9).clamp(o.prefix_bound_low, o.prefix_bound_high)
    keep = [
        q.advantage[i] * q.log_r[i] <= 0
        or w[i] * d[i] <= min(o.bound, o.bound + budget * w[:i].sum() - (w * d)[:i].sum())
        for i in range(len(t))
    ]
    return -torch.where(torch.tensor(keep), q.advantage * q.log_r.exp(), 0.0)


def dro(o, q):
    return -(q.advantage * q.weight * q.logp - o.beta / 2 * q.log_r.square())


def policy_gradient(weight):
    """Return the formula ``-sg[weight] A logp``."""

    def formula(o, q):
        return -weight(o, q).detach() * q.advantage * q.weight * q.logp

    return formula


def cispo_weight(o, q):
    return q.log_r.exp().clamp(o.min_ratio, o.max_ratio)


def minpro_weight(o, q):
    r = q.log_r.exp()
    before = [r[:i].min() if i else torch.ones(()).to(r) for i in range(len(r))]
    return (torch.stack(before) * r).clamp(o.min_ratio, o.max_ratio)


def topr_weight(o, q):
    ratio = (q.log_r.sum() if o.ratio_level == "sequence" else q.log_r).exp()
    return torch.where(q.advantage > 0, 1.0, ratio.clamp(max=1.0))


def vespo_weight(o, q):
    w = q.log_r.clamp(-20, 20).sum().clamp(math.log(1e-8), 20).exp()
    positive = w**o.k_positive * (o.lambda_positive * (1 - w)).exp()
    negative = w**o.k_negative * (o.lambda_negative * (1 - w)).exp()
    return torch.where(q.advantage >= 0, positive, negative)


def dppo_weight(o, q):
    p, old = q.logp.exp(), q.old.exp()
    if o.divergence == "tv":
        keep = torch.where(q.advantage > 0, p - old <= o.bound_high, p - old >= -o.bound_low)
    else:
        kl = old * (old / p).log() + (1 - old) * ((1 - old) / (1 - p)).log()
        up, down = (kl <= o.bound_high) | (p <= old), (kl <= o.bound_low) | (p >= old)
        keep = torch.where(q.advantage > 0, up, down)
    return q.log_r.exp().clamp(max=o.max_ratio) * keep


OF_A_SEQUENCE = {
    **dict.fromkeys(("GRPO", "DrGRPO", "DAPO", "BNPO"), grpo),
    "GSPOToken": gspo_token,
    "TLGRPO": tl_grpo,
    **dict.fromkeys(("GSPO", "LUSPO"), gspo),
    "ESPO": espo,
    "GMPO": gmpo,
    "SAPO": sapo,
    "SSPO": sspo,
    "ABCGRPO": abc_grpo,
    "DHPO": dhpo,
    "FSPO": fspo,
    "CTPO": ctpo,
    "FIPO": fipo,
    "PrimeIPO": prime_ipo,
    **dict.fromkeys(("SPO", "DRPO"), spo),
    "CPPO": cppo,
    "DRO": dro,
    "Linear": lambda o, q: q.weight * q.logp,
    "GPG": policy_gradient(lambda o, q: torch.ones_like(q.logp)),
    "CISPO": policy_gradient(cispo_weight),
    "MinPRO": policy_gradient(minpro_weight),
    "TOPR": policy_gradient(topr_weight),
    "VESPO": policy_gradient(vespo_weight),
    "DPPO": policy_gradient(dppo_weight),
}


# Formulas of a batch, from a list of sequences to a list of their values.


def groups(qs):
    """Return the indices of each group's sequences."""
    return [[i for i, q in enumerate(qs) if q.group == group] for group in {q.group for q in qs}]


def agro(o, qs):
    regularized = [q.advantage[0] - o.beta * q.log_ref.sum() for q in qs]
    values = list(regularized)
    for members in groups(qs):
        mean = sum(regularized[i] for i in members) / len(members)
        for i in members:
            values[i] = (regularized[i] - mean).square() / 2
    return values


def egsw(o, qs):
    merit = torch.stack([(q.advantage.mean() + o.alpha * q.entropy.mean()) / o.temperature for q in qs])
    share = torch.empty_like(merit)
    for members in groups(qs):
        share[members] = merit[members].softmax(0)
    return [share[i].detach() * grpo(o, q) for i, q in enumerate(qs)]


def real(o, qs):
    values = [q.log_s * 0 for q in qs]
    for members in groups(qs):
        score = {i: qs[i].log_s / o.tau for i in members}
        success = [i for i in members if qs[i].advantage[0] > o.threshold]
        failure = [i for i in members if i not in success]
        if success and failure:
            of_successes = 1 + sum((-score[i]).exp() for i in success)
            of_failures = 1 + sum(score[i].exp() for i in failure)
            for i in members:
                values[i] = of_successes.log() + of_failures.log()
    return values


def covariances(qs):
    a, logp = (torch.cat([getattr(q, name) for q in qs]).detach() for name in ("advantage", "logp"))
    return (a - a.mean()) * (logp - logp.mean())


def clip_cov(o, qs):
    plain = [clip(q.log_r.exp(), q.advantage, o.clip_low, o.clip_high) for q in qs]
    r, a = (torch.cat(x) for x in ([q.log_r.exp() for q in qs], [q.advantage for q in qs]))
    cut = ((a > 0) & (r > 1 + o.clip_high)) | ((a < 0) & (r < 1 - o.clip_low))
    cov, keep = covariances(qs), torch.ones(len(r))
    candidates = [k for k in cov.argsort().tolist() if o.clip_cov_lb < cov[k] < o.clip_cov_ub and not cut[k]]
    shuffled = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(o.seed))
    for k in shuffled[: max(1, int(o.clip_cov_ratio * len(r)))].tolist():
        keep[candidates[k]] = 0.0
    return [k * value for k, value in zip(keep.split([len(q.logp) for q in qs]), plain, strict=True)]


def kl_cov(o, qs):
    cov = covariances(qs)
    count = max(1, int(o.kl_cov_ratio * len(cov)))
    largest = (cov >= cov.sort().values[-count]).split([len(q.logp) for q in qs])
    return [
        -q.advantage * q.log_r.exp() + o.ppo_kl_coef * q.log_r.abs() * chosen
        for q, chosen in zip(qs, largest, strict=True)
    ]


def m2po(o, qs):
    squares = [
        x**2
        for q in qs
        for x, a in zip(q.log_r.tolist(), q.advantage.tolist(), strict=True)
        if x * a > 0 or not o.one_sided
    ]
    squares.sort()
    left_out = math.inf
    while squares and sum(squares) / len(squares) > o.threshold:
        left_out = squares.pop()
    values = []
    for q in qs:
        pushed = (q.log_r * q.advantage > 0) | (not o.one_sided)
        out = pushed & (q.log_r**2 >= left_out)
        values.append(-q.advantage * q.log_r.exp() * ~out)
    return values


OF_A_BATCH = {
    "AGRO": agro, "EGSW": egsw, "REAL": real, "ClipCov": clip_cov, "KLCov": kl_cov, "M2PO": m2po,
}  # fmt: skip


# Formulas of the pairs within groups, from a list of sequences to the losses of pairs (i, j).


def pairs_within_groups(qs):
    return [(i, j) for i, j in itertools.permutations(range(len(qs)), 2) if qs[i].group == qs[j].group]


def level(q):
    return q.advantage[0]


def dpo(o, qs):
    score = [q.log_ref.sum() for q in qs]
    return {
        (i, j): -torch.nn.functional.logsigmoid(o.beta * (score[i] - score[j]))
        for i, j in pairs_within_groups(qs)
        if level(qs[j]) - level(qs[i]) > o.min_gap
    }


def trpa(o, qs):
    score = [q.log_ref.sum() / q.length for q in qs]
    return {
        (i, j): -torch.nn.functional.logsigmoid(
            (o.anisotropy if level(qs[i]) == 1 else 1) * o.beta * (score[i] - score[j])
        )
        for i, j in pairs_within_groups(qs)
        if level(qs[i]) < level(qs[j])
    }


def trpa_penalty(o, q):
    return o.kl_coef * ((-q.log_r).exp() + q.log_r - 1).sum() / q.length


def rebel(o, qs):
    score = [q.log_r.sum() for q in qs]
    return {
        (i, j): (score[i] - score[j] - o.eta * (qs[i].advantage[0] - qs[j].advantage[0])).square()
        for i, j in pairs_within_groups(qs)
        if i < j
    }


OF_PAIRS = {"DPO": dpo, "TRPA": trpa, "REBEL": rebel}


def loss(o, qs: list[Sequence], beyond: list[Tensor] | None = None, normalizer=None) -> Tensor:
    """Return the loss of a batch's sequences with a counted token.

    ``beyond`` are terms per token that no rollout weight multiplies, such as a KL; ``normalizer`` replaces
    the outer divisor, for "prompt_mean" those of all sequences.
    """
    name, pairs = type(o).__name__, None
    if name in OF_A_SEQUENCE:
        values = [OF_A_SEQUENCE[name](o, q) for q in qs]
    elif name in OF_A_BATCH:
        values = OF_A_BATCH[name](o, qs)
    else:
        pairs = OF_PAIRS[name](o, qs)
        values = [q.logp.new_zeros(()) for q in qs]
        for pair, value in pairs.items():
            for i in pair:
                values[i] = values[i] + value / 2
                if name == "TRPA":  # a pair has the mean of its two sequences' penalties
                    values[i] = values[i] + trpa_penalty(o, qs[i]) / 2
    for i, (q, value) in enumerate(zip(qs, values, strict=True)):
        by_token = value.ndim == 1
        value = (value * q.rollout).sum() if by_token else value * q.rollout.mean()
        by_mean = o.aggregation == "sequence_mean"
        if by_token and by_mean:
            value = value / q.length
        elif not by_token and not by_mean:
            value = value * q.length
        if beyond is not None:
            value = value + beyond[i].sum() / (q.length if by_mean else 1)
        values[i] = value
    if o.aggregation == "prompt_mean":
        tokens = {g: sum(q.length for q in qs if q.group == g) for g in {q.group for q in qs}}
        divisors = [len(tokens) * tokens[q.group] for q in qs] if normalizer is None else normalizer
        return sum(value / divisor for value, divisor in zip(values, divisors, strict=True))
    total = sum(values)
    divisor = {
        "sequence_mean": len(qs) if pairs is None else max(1, len(pairs)),
        "token_mean": sum(q.length for q in qs),
        "sequence_mean_token_sum": len(qs),
        "constant": len(qs),
        "sum": 1,
    }[o.aggregation]
    divisor = divisor if normalizer is None else float(normalizer)
    return total / (divisor * (o.aggregation_constant or 1))
