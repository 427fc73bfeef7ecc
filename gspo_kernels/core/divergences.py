"""Divergences of a student's distribution p from a teacher's q over the same columns, in plain PyTorch.

``beta`` selects the divergence, as in GKD (arXiv 2306.13649, Eq. 1), TRL and Liger:

    0            forward KL(q || p) = sum q log(q / p)
    1            reverse KL(p || q) = sum p log(p / q)
    between them generalized Jensen-Shannon: beta KL(q || m) + (1 - beta) KL(p || m), m = (1 - beta) p + beta
    q

With z the student's logits and p = softmax(z), the gradients d/dz_j are, in the same order,

    p_j - q_j
    p_j (log(p_j / q_j) - KL(p || q))
    (1 - beta) p_j (log(p_j / m_j) - KL(p || m)).

Each is a slope d/dlog p_j minus p_j times the sum of all slopes. A product of a probability 0 and a logarithm
counts as 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Columns(NamedTuple):
    """Each column's term of the divergence and its slope d/dlog p, in the shape of the log-probs.

    The slope omits a constant times p, which cancels in the softmax backward.
    """

    value: Tensor
    slope: Tensor


def of_columns(log_p: Tensor, log_q: Tensor, beta: float) -> Columns:
    """Return the divergence of p from q column by column.

    A column of a KL is ``q log(q / p) - q + p``, which has the same sum over columns, is never negative, and
    cancels rounding errors of the log-sum-exp.
    """
    p, q = log_p.exp(), log_q.exp()
    if beta == 0:
        return Columns(_relative_entropy(q, log_q, p, log_p), -q)
    if beta == 1:
        return Columns(_relative_entropy(p, log_p, q, log_q), _times(p, log_p - log_q))
    log_m = torch.logaddexp(log_p + math.log1p(-beta), log_q + math.log(beta))
    of_student, of_teacher = _times(p, log_p - log_m), _times(q, log_q - log_m)
    return Columns((1 - beta) * of_student + beta * of_teacher, (1 - beta) * of_student)


def _relative_entropy(q: Tensor, log_q: Tensor, p: Tensor, log_p: Tensor) -> Tensor:
    return _times(q, log_q - log_p) + (p - q)


def _times(p: Tensor, log_ratio: Tensor) -> Tensor:
    return torch.where(p == 0, 0.0, p * torch.where(p == 0, 0.0, log_ratio))
