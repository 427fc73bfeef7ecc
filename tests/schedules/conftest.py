"""Fixtures of tests of schedules."""

import pytest

from gspo_kernels.linear.head import Head
from gspo_kernels.linear.sums import HeadSums


@pytest.fixture
def products(monkeypatch):
    """Rows that enter each kind of product, and the most that exist at once; "projected" are the numbers that
    rows of the forward have.
    """
    rows = {"forward": 0, "hidden": 0, "weight": 0, "most": 0, "projected": 0}
    logits, fold_logits = Head.logits, Head.fold_logits
    grad_hidden, sum_head = Head.grad_hidden, HeadSums.add

    def counted_logits(self, hidden, out):
        rows["forward"] += hidden.shape[0]
        rows["projected"] += hidden.numel()
        rows["most"] = max(rows["most"], hidden.shape[0])
        return logits(self, hidden, out)

    def counted_folds(self, hidden, folds):
        rows["forward"] += hidden.shape[0]
        rows["projected"] += hidden.numel()
        return fold_logits(self, hidden, folds)

    def counted_hidden(self, scores):
        rows["hidden"] += scores.shape[0]
        return grad_hidden(self, scores)

    def counted_weight(self, scores, *args):
        rows["weight"] += scores.values.shape[0]
        return sum_head(self, scores, *args)

    monkeypatch.setattr(Head, "logits", counted_logits)
    monkeypatch.setattr(Head, "fold_logits", counted_folds)
    monkeypatch.setattr(Head, "grad_hidden", counted_hidden)
    monkeypatch.setattr(HeadSums, "add", counted_weight)
    return rows
