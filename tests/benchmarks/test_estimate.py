"""The estimate of a step by counting, which docs/scaling.md rests on."""

import pytest

from benchmarks.estimate import BANDWIDTH, OPERATIONS, Step


def test_one_chunk_by_hand():
    """4,096 rows of width 2,048 and V = 8,192: products are bound by operations, narrow ones by bytes."""
    step = Step(tokens=4096, width=2048, vocabulary=8192, chunk_rows=4096)
    logits, weight = 4096 * 8192, 8192 * 2048
    bare = 6 * logits * 2048 / OPERATIONS
    assert step.over_products(True) == pytest.approx(1 + 10 * logits / BANDWIDTH / bare)
    assert step.over_products(True, held=True) == pytest.approx(1 + 6 * logits / BANDWIDTH / bare)
    assert step.over_products(False) == pytest.approx(1 + (10 * logits + 8 * weight) / BANDWIDTH / bare)
    assert Step(width=64).product(1e9) == pytest.approx(1e9 / BANDWIDTH)
