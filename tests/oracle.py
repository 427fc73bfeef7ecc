"""The reference for every loss: loops over sequences and tokens, plain autograd.

The oracle does not use the package. An objective is any object with the option names of the formula sheet,
identified by its class name. It computes in the dtype of its inputs. fp64 is the reference, fp32 is plain
PyTorch; the kernels' error may be twice that of the latter.
"""

import math

import torch
from torch import Tensor

from tests.objectives import formulas


class Sequence:
    """One sequence: which tokens it has, and which of them count."""

    def __init__(self, index, where, counted):
        self.index, self.where, self.counted = index, where, counted[where]
        self.count = int(self.counted.sum())

    def pick(self, tokens):
        """The counted tokens of a token tensor, in order."""
        return tokens[self.where][self.counted]


def sequences(counted: Tensor, cu_seqlens: Tensor | None) -> list[Sequence]:
    if cu_seqlens is None:
        return [Sequence(i, (i, slice(None)), counted) for i in range(counted.shape[0])]
    ends = cu_seqlens.tolist()
    return [Sequence(i, slice(ends[i], ends[i + 1]), counted) for i in range(len(ends) - 1)]


def counted_tokens(labels: Tensor, loss_mask: Tensor | None, ignore_index: int) -> Tensor:
    counted = labels != ignore_index
    return counted if loss_mask is None else counted & (loss_mask != 0)


def transformed(
    logits: Tensor,
    index: int,
    *,
    temperature: float | Tensor = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Return z, the transformed logits, of sequence ``index``."""
    z = logit_scale * logits
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if isinstance(temperature, Tensor) and temperature.ndim:
        temperature = temperature[index].to(z.dtype)
    return z / temperature


def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    counted: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    kept_mask: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropy, 0 where not counted. A tensor ``temperature`` is per sequence."""
    logprobs = torch.zeros(labels.shape, dtype=logits.dtype)
    entropy = torch.zeros(labels.shape, dtype=logits.dtype)
    for sequence in sequences(counted, cu_seqlens):
        if sequence.count == 0:
            continue
        z = transformed(sequence.pick(logits), sequence.index, **options)
        if kept_mask is not None:
            words = sequence.pick(kept_mask).tolist()
            kept = [[row[v // 32] >> v % 32 & 1 for v in range(z.shape[-1])] for row in words]
            z = z.masked_fill(torch.tensor(kept) == 0, -math.inf)
        logp = torch.log_softmax(z, dim=-1)
        chosen = logp.gather(-1, sequence.pick(labels).long().unsqueeze(-1)).squeeze(-1)
        possible = logp.masked_fill(logp == -math.inf, 0.0)  # p log p is 0 where p is 0
        here = torch.zeros_like(counted)
        here[sequence.where] = sequence.counted
        logprobs = logprobs.masked_scatter(here, chosen)
        entropy = entropy.masked_scatter(here, -(logp.exp() * possible).sum(-1))
    return logprobs, entropy


def divergence(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """Return the divergence of p (student) from q (teacher) over the last dimension: KL(q || p) for beta 0,
    KL(p || q) for 1, else beta KL(q || m) + (1 - beta) KL(p || m) with m = (1 - beta) p + beta q.
    """

    def kl(log_a, log_b):
        return torch.where(log_a == -math.inf, 0.0, log_a.exp() * (log_a - log_b)).sum(-1)

    if beta == 0:
        return kl(log_q, log_p)
    if beta == 1:
        return kl(log_p, log_q)
    log_m = torch.logaddexp(log_p + math.log(1 - beta), log_q + math.log(beta))
    return beta * kl(log_q, log_m) + (1 - beta) * kl(log_p, log_m)


def divergence_over_ids(
    z: Tensor, theirs: Tensor, ids: Tensor, beta: float, tail: bool, scored: bool = False
) -> Tensor:
    """Return the divergence over ids [.., K] and, with ``tail``, all others as one id; 0 without any ids.

    Repeated ids count once. ``theirs`` is the teacher's z, or with ``scored`` its log-probs of the ids; then
    at least 2^-24 is left for the other ids.
    """
    earlier = torch.ones(ids.shape[-1:] * 2, dtype=torch.bool).tril(-1)
    repeated = ((ids.unsqueeze(-1) == ids.unsqueeze(-2)) & earlier).any(-1)
    first, V = (ids >= 0) & ~repeated, z.shape[-1]
    some = first.any(-1, keepdim=True)
    chosen = torch.zeros(*z.shape[:-1], V + 1, dtype=torch.bool)
    chosen = chosen.scatter(-1, torch.where(ids < 0, V, ids), True)[..., :V]

    def columns(logits):
        logp = (logits if tail else logits.masked_fill(some & ~chosen, -math.inf)).log_softmax(-1)
        left = logp.masked_fill(chosen, -math.inf).logsumexp(-1, keepdim=True)
        return logp.gather(-1, ids.clamp(min=0)), left

    def said(logprobs):
        mass = logprobs.masked_fill(~first, -math.inf).logsumexp(-1, keepdim=True)
        left = torch.log(-torch.expm1(mass.clamp(max=-(2.0**-24))))
        return logprobs if tail else logprobs - mass, left

    own, other = columns(z), (said if scored else columns)(theirs)
    counts = torch.cat([first, some], -1) if tail else first
    # a column that doesn't count gets probability 1 on both sides, and so adds 0
    log_p, log_q = (
        torch.where(counts, torch.cat(each, -1) if tail else each[0], 0.0) for each in (own, other)
    )
    return divergence(log_p, log_q, beta)


KL = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: torch.exp(-d) + d - 1}
LOG_RATIO = {
    "GSPO": lambda q: q.log_s,
    "GSPOToken": lambda q: formulas.attached(q.log_s, q.log_r),
    "GRPO": lambda q: q.log_r,
}


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor | None,
    loss_mask: Tensor,
    objective,
    *,
    cu_seqlens: Tensor | None = None,
    entropy: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    kl_beta: float | Tensor = 0.0,
    kl_estimator: str = "k3",
    kl_ratio_weighted: bool = False,
    entropy_coef: float | Tensor = 0.0,
    rollout_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    lengths: Tensor | None = None,
    group_ids: Tensor | None = None,
    turn_ids: Tensor | None = None,
    normalizer: float | Tensor | None = None,
) -> Tensor:
    """Return the objective's formula, KL term and entropy bonus as a 0-d tensor, differentiable in
    ``logprobs`` and ``entropy``.
    """
    counted, qs, beyond = loss_mask != 0, [], []
    for sequence in sequences(counted, cu_seqlens):
        if sequence.count == 0:
            continue

        def tokens(values, default=0.0, sequence=sequence):
            if values is None:
                return logprobs.new_full((sequence.count,), default)
            if values.shape == counted.shape:
                return sequence.pick(values).to(logprobs.dtype)
            return values[sequence.index].to(logprobs.dtype).expand(sequence.count)

        logp, i = tokens(logprobs), sequence.index
        q = formulas.Sequence(
            logp=logp,
            old=logp.detach() if old_logprobs is None else tokens(old_logprobs),
            advantage=tokens(advantages),
            rollout=tokens(rollout_weights, 1.0),
            weight=tokens(token_weights, 1.0),
            ref=tokens(ref_logprobs),
            entropy=tokens(entropy).detach(),
            turn=tokens(turn_ids),
            length=float(sequence.count if lengths is None else lengths[i]),
            group=0 if group_ids is None else int(group_ids[i]),
            index=i,
        )
        beta, coef = (
            tokens(torch.as_tensor(x, dtype=torch.float64).expand(counted.shape))
            for x in (kl_beta, entropy_coef)
        )
        term = -coef * tokens(entropy)
        if ref_logprobs is not None:
            weight = LOG_RATIO[type(objective).__name__](q).exp() if kl_ratio_weighted else 1.0
            term = term + beta * KL[kl_estimator](logp - q.ref) * weight
        qs.append(q)
        beyond.append(term)
    if isinstance(normalizer, Tensor) and normalizer.ndim:
        normalizer = [float(normalizer[q.index]) for q in qs]
    loss = formulas.loss(objective, qs, beyond, normalizer) if qs else logprobs.new_zeros(())
    # an empty batch is differentiable, too
    return loss + 0.0 * torch.where(counted, logprobs, 0.0).sum()
