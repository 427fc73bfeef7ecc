"""The formula sheet in plain Python floats: what each objective's loss and coefficient must be.

``value`` is a sequence's loss before aggregation (one number, or one per token); it takes what is under a
stop-gradient from ``frozen``. ``slopes`` are the stated coefficients. Nothing here comes from the package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Sequence:
    """The counted tokens of one sequence."""

    logp: tuple[float, ...]
    old: tuple[float, ...]
    advantage: tuple[float, ...]  # per token, all equal where there is one per sequence
    length: float
    weights: tuple[float, ...]
    ref: tuple[float, ...] = ()
    entropy: tuple[float, ...] = ()
    turns: tuple[int, ...] = ()

    @property
    def l(self):  # noqa: E743
        return [w * (a - b) for w, a, b in zip(self.weights, self.logp, self.old, strict=True)]

    @property
    def weighted_logp(self):
        return [w * a for w, a in zip(self.weights, self.logp, strict=True)]

    @property
    def log_s(self):
        return sum(self.l) / self.length

    def moved(self, t: int, step: float) -> Sequence:
        """One log-prob moved."""
        return replace(self, logp=(*self.logp[:t], self.logp[t] + step, *self.logp[t + 1 :]))


def clipped(r, a, low, high, dual=None):
    """PPO's loss and its slope in log r."""
    value = -min(r * a, min(max(r, 1 - low), 1 + high) * a)
    cut = (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low)
    if dual is not None and a < 0 and r > dual:
        return -dual * a, 0.0
    return value, 0.0 if cut else -r * a


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def mean_over_turn(q: Sequence):
    out = []
    for k in q.turns:
        members = [x for x, j in zip(q.l, q.turns, strict=True) if j == k]
        out.append(sum(members) / len(members) if k >= 0 else 0.0)
    return out


def segment_log_ratios(o, q: Sequence):
    level = {"GSPOToken": "sequence", "TLGRPO": "turn"}.get(type(o).__name__, "token")
    return {"token": q.l, "sequence": [q.log_s] * len(q.l), "turn": mean_over_turn(q) if q.turns else []}[
        level
    ]


def clipped_tokens(o, q, z):
    """GRPO and its kin, GSPO-token, TL-GRPO."""
    values, slopes = [], []
    now = q.l
    for base, x, x0, a in zip(segment_log_ratios(o, z), now, z.l, q.advantage, strict=True):
        v, g = clipped(math.exp(base + (x - x0)), a, o.clip_low, o.clip_high, o.dual_clip)
        values.append(v)
        slopes.append(g)
    return values, slopes


def gspo(o, q, z):
    value, slope = clipped(math.exp(q.log_s), q.advantage[0], o.clip_low, o.clip_high, o.dual_clip)
    return value, [slope / q.length] * len(q.l)


def espo(o, q, z):
    value, slopes = gspo(o, q, z)
    if o.elbo_kl_beta:
        distance = sum(w * (a - b) for w, a, b in zip(q.weights, q.logp, q.ref, strict=True))
        value += o.elbo_kl_beta * distance**2 / (2 * q.length)
        slopes = [g + o.elbo_kl_beta * distance / q.length for g in slopes]
    return value, slopes


def gmpo(o, q, z):
    a = q.advantage[0]
    cut = [(a > 0 and x > o.log_clip_high) or (a < 0 and x < -o.log_clip_low) for x in q.l]
    bounded = [
        (o.log_clip_high if a > 0 else -o.log_clip_low) if c else x for x, c in zip(q.l, cut, strict=True)
    ]
    w = math.exp(sum(bounded) / q.length)
    return -a * w, [0.0 if c else -a * w / q.length for c in cut]


def sapo(o, q, z):
    values, slopes = [], []
    for x, a in zip(q.l, q.advantage, strict=True):
        tau, r = (o.tau_positive if a > 0 else o.tau_negative), math.exp(x)
        sig = sigmoid(tau * (r - 1))
        values.append(-a * 4 / tau * sig)
        slopes.append(-4 * a * sig * (1 - sig) * r)
    return values, slopes


def sspo(o, q, z):
    a = q.advantage[0]
    tau = o.tau_positive if a > 0 else o.tau_negative
    r = [math.exp(x) for x in q.l]
    if o.gate == "sigmoid":
        gates = [4 / tau * sigmoid(tau * (x - 1)) for x in r]
        phi = [tau * (1 - sigmoid(tau * (x - 1))) * x for x in r]
    else:
        gates, phi = r, [1.0] * len(r)
    w = math.exp(sum(map(math.log, gates)) / q.length)
    return -a * w, [-a * w / q.length * p for p in phi]


def abc(o, q, z):
    values, slopes = [], []
    for x, a in zip(q.l, q.advantage, strict=True):
        low = o.positive_low if a > 0 else o.negative_low
        high = o.positive_high if a > 0 else o.negative_high
        r = math.exp(x)
        values.append(-a * min(max(r, 1 - low), 1 + high))
        slopes.append(-a * r if 1 - low <= r <= 1 + high else 0.0)
    return values, slopes


def dhpo(o, q, z):
    n = len(q.l)
    if o.mix == "entropy":
        least, most = min(q.entropy), max(q.entropy)
        alpha = [(h - least) / (most - least) if most > least else 0.5 for h in q.entropy]
    else:
        alpha = [o.mix] * n
    tokens = [clipped(math.exp(x), a, o.clip_low, o.clip_high) for x, a in zip(q.l, q.advantage, strict=True)]
    s = math.exp(q.log_s)
    whole = [clipped(s, a, o.sequence_clip_low, o.sequence_clip_high) for a in q.advantage]
    shared = sum((1 - al) * w[1] for al, w in zip(alpha, whole, strict=True)) / q.length
    values = [al * t[0] + (1 - al) * w[0] for al, t, w in zip(alpha, tokens, whole, strict=True)]
    return values, [al * t[1] + shared for al, t in zip(alpha, tokens, strict=True)]


def weighted(weight):
    """-sg[weight] A logp."""

    def both(o, q, z):
        slopes = [-w * a for w, a in zip(weight(o, z), q.advantage, strict=True)]
        return [g * x for g, x in zip(slopes, q.weighted_logp, strict=True)], slopes

    return both


def cispo_weight(o, z):
    return [min(max(math.exp(x), o.min_ratio), o.max_ratio) for x in z.l]


def topr_weight(o, z):
    whole = [sum(z.l)] * len(z.l) if o.ratio_level == "sequence" else z.l
    return [1.0 if a > 0 else min(math.exp(x), 1.0) for x, a in zip(whole, z.advantage, strict=True)]


def vespo_weight(o, z):
    log_w = sum(min(max(x, -20.0), 20.0) for x in z.l)
    w = math.exp(min(max(log_w, math.log(1e-8)), 20.0))
    out = []
    for a in z.advantage:
        k, lam = (o.k_positive, o.lambda_positive) if a >= 0 else (o.k_negative, o.lambda_negative)
        out.append(math.exp(lam) * w**k * math.exp(-lam * w))
    return out


def dppo_weight(o, z):
    out = []
    for x, a, new, old in zip(z.l, z.advantage, z.logp, z.old, strict=True):
        p, p_old = math.exp(new), math.exp(old)
        if o.divergence == "tv":
            keep = p - p_old <= o.bound_high if a > 0 else p - p_old >= -o.bound_low
        else:
            kl = p_old * math.log(p_old / p) + (1 - p_old) * math.log((1 - p_old) / (1 - p))
            keep = (kl <= o.bound_high or p <= p_old) if a > 0 else (kl <= o.bound_low or p >= p_old)
        out.append(min(math.exp(x), o.max_ratio) * keep)
    return out


def prime_ipo(o, q, z):
    values, slopes = [], []
    for x, x0, a, new, old in zip(q.l, z.l, q.advantage, z.logp, z.old, strict=True):
        keep = abs(math.exp(new) - math.exp(old)) <= o.eps
        r = min(math.exp(x0), o.max_ratio) * math.exp(x - x0)
        values.append(-keep * a * r + o.kl_tau * x * x)
        slopes.append(-keep * a * r + 2 * o.kl_tau * x)
    return values, slopes


def fspo(o, q, z):
    a, total, root = q.advantage[0], sum(q.l), math.sqrt(q.length)
    inside = min(max(total, -o.log_clip_low * root), o.log_clip_high * root)
    value = -min(math.exp(total) * a, math.exp(inside) * a)
    cut = (a > 0 and total > inside) or (a < 0 and total < inside)
    return value, [0.0 if cut else -a * math.exp(total)] * len(q.l)


def ctpo(o, q, z):
    values, slopes = [], []
    for t, (x, a) in enumerate(zip(q.l, q.advantage, strict=True)):
        width = (t + 1) ** o.power
        log_c = sum(min(max(y, -20.0), 20.0) for y in z.l[: t + 1]) + (x - z.l[t])
        dual = math.inf if o.log_dual_clip is None else math.exp(o.log_dual_clip * width)
        low, high = math.exp(-o.log_clip_low * width), math.exp(o.log_clip_high * width)
        value, slope = clipped(math.exp(log_c), a, 1 - low, high - 1, dual)
        values.append(value)
        slopes.append(slope)
    return values, slopes


def fipo(o, q, z):
    most = math.inf if o.dual_clip is None else math.log(o.dual_clip)
    moved = [0.0 if x > most else min(max(x, -20.0), 20.0) for x in z.l]
    values, slopes = [], []
    for t, (x, a) in enumerate(zip(q.l, q.advantage, strict=True)):
        future = sum(0.5 ** (k / o.half_life) * y for k, y in enumerate(moved[t:]))
        f = min(max(math.exp(future), 1 - o.influence_low), 1 + o.influence_high)
        if a < 0 and math.exp(z.l[t]) > o.safe_ratio:
            f = min(f, 1.0)
        value, slope = clipped(math.exp(x), a, o.clip_low, o.clip_high, o.dual_clip)
        values.append(f * value)
        slopes.append(f * slope)
    return values, slopes


def dro(o, q, z):
    values = [
        -(a * y - o.beta / 2 * x * x) for a, y, x in zip(q.advantage, q.weighted_logp, q.l, strict=True)
    ]
    return values, [-a + o.beta * x for a, x in zip(q.advantage, q.l, strict=True)]


def linear(o, q, z):
    return q.weighted_logp, [1.0] * len(q.l)


FORMULAS = {
    **dict.fromkeys(("GRPO", "DrGRPO", "DAPO", "BNPO", "GSPOToken", "TLGRPO"), clipped_tokens),
    **dict.fromkeys(("GSPO", "LUSPO"), gspo),
    "ESPO": espo,
    "GMPO": gmpo,
    "SAPO": sapo,
    "SSPO": sspo,
    "ABCGRPO": abc,
    "DHPO": dhpo,
    "DRO": dro,
    "PrimeIPO": prime_ipo,
    "FSPO": fspo,
    "CTPO": ctpo,
    "FIPO": fipo,
    "Linear": linear,
    "GPG": weighted(lambda o, z: [1.0] * len(z.l)),
    "CISPO": weighted(cispo_weight),
    "TOPR": weighted(topr_weight),
    "VESPO": weighted(vespo_weight),
    "DPPO": weighted(dppo_weight),
}


def value(o, q: Sequence, frozen: Sequence):
    """A number for a sequence-level loss, a list for a token-level one."""
    return FORMULAS[type(o).__name__](o, q, frozen)[0]


def slopes(o, q: Sequence):
    """d(sum of the sequence's values)/dlogp_t, as stated."""
    return [g * w for g, w in zip(FORMULAS[type(o).__name__](o, q, q)[1], q.weights, strict=True)]
