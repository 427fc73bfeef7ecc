"""Rows whose logits come some columns at a time: statistics are those of written logits, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from gspo_kernels import bits, cpp
from gspo_kernels.cpp.folding import BLOCK, Folds
from gspo_kernels.cpp.products import INSTRUCTIONS, has_instructions, multiply
from gspo_kernels.types import LogitTransform, RowStats
from tests.cpp.cpp_oracle import IGNORE
from tests.cpp.row_calls import DTYPES, TRANSFORMS, equal, forward

pytestmark = pytest.mark.skipif(
    cpp.unavailable(torch.device("cpu")) is not None, reason=str(cpp.unavailable(torch.device("cpu")))
)

# One column, less and more than a tile, less and more than a block, three blocks
VOCABULARIES = (1, 31, 33, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 77)


def labels_of(rows: int, vocabulary: int) -> Tensor:
    """One of them ignored, two out of range, the last column, and the first of the last block."""
    labels = torch.randint(0, vocabulary, (1, rows))
    special = [IGNORE, vocabulary, -1, vocabulary - 1, (vocabulary - 1) // BLOCK * BLOCK]
    labels[0, : min(rows, 5)] = torch.tensor(special[:rows])
    return labels


def transforms(rows: int, vocabulary: int):
    kept = torch.rand(1, rows, vocabulary) < 0.7
    mask = bits.packed_columns(kept)
    yield from TRANSFORMS.values()
    yield LogitTransform(row_temperature=torch.rand(1, rows) + 0.5, kept=mask)
    yield LogitTransform(softcap=3.0, kept=mask)


def folds(
    labels: Tensor, transform: LogitTransform, vocabulary: int, dtype: torch.dtype, entropy: bool
) -> Folds:
    return cpp.folds(labels, transform, vocabulary, dtype, ignore_index=IGNORE, entropy=entropy)


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns(dtype):
    """In slabs of a block or two, of rows with infinities and NaN among others."""
    for vocabulary, entropy in itertools.product(VOCABULARIES, (False, True)):
        logits = (3 * torch.randn(1, 12, vocabulary + 3, dtype=torch.float64)).to(dtype)[..., :vocabulary]
        logits[0, 5, 0], logits[0, 6, -1], logits[0, 7] = float("inf"), float("nan"), float("-inf")
        logits[0, 8, : vocabulary // 2], logits[0, 9, vocabulary // 2 :] = float("-inf"), 300.0
        labels = labels_of(12, vocabulary)
        for transform, width in itertools.product(transforms(12, vocabulary), (BLOCK, 2 * BLOCK)):
            parts = folds(labels, transform, vocabulary, dtype, entropy)
            for first in range(0, vocabulary, width):
                parts.add(logits[0, :, first : first + width], first)
            assert equal(parts.statistics(), forward(logits, labels, transform, entropy))


def of_product(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, transform: LogitTransform, **how: str
) -> tuple[RowStats, RowStats]:
    """Folded, and written."""
    logits = torch.full((hidden.shape[0], weight.shape[0]), torch.nan)
    multiply(hidden, weight.t(), logits, bias=bias, **how)
    folded = folds(labels, transform, weight.shape[0], hidden.dtype, True)
    folded.add_product(hidden, weight, bias, **how)
    return folded.statistics(), forward(logits.unsqueeze(0), labels, transform)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(dtype):
    shapes = [(13, vocabulary, 40) for vocabulary in VOCABULARIES]
    shapes += [(1, 70, 1), (5, BLOCK + 1, 600), (500, 300, 257)]
    for rows, vocabulary, width in shapes:
        hidden, weight = torch.randn(rows, width).to(dtype), torch.randn(vocabulary, width).to(dtype)
        hidden[0], labels = torch.nan, labels_of(rows, vocabulary)
        bias = torch.randn(vocabulary).to(dtype)
        for transform in transforms(rows, vocabulary):
            assert equal(*of_product(hidden, weight, bias, labels, transform))
        for how, given in itertools.product(INSTRUCTIONS, (None, bias)):
            if has_instructions(how, dtype):
                assert equal(*of_product(hidden, weight, given, labels, LogitTransform(), instructions=how))
        across = (hidden.t().contiguous().t(), torch.stack([weight, weight], 1)[:, 1])
        assert equal(*of_product(*across, bias, labels, LogitTransform()))


def test_who_computes_a_block_leaves_no_trace():
    hidden, weight, labels = torch.randn(100, 30), torch.randn(3 * BLOCK, 30), labels_of(100, 3 * BLOCK)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(of_product(hidden, weight, None, labels, LogitTransform())[0])
    finally:
        torch.set_num_threads(threads)
    some = of_product(hidden[20:40], weight, None, labels[:, 20:40], LogitTransform())[0]
    assert equal(found[0], found[1]) and equal(found[0], found[2])
    assert equal(some, found[0].each(lambda stat: stat[:, 20:40]))


def test_no_rows():
    labels = torch.empty(1, 0, dtype=torch.int64)
    stats = of_product(torch.empty(0, 4), torch.empty(7, 4), None, labels, LogitTransform())[0]
    assert stats.logprobs.shape == stats.lse.shape == (1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.empty(4, 3)}, "folds: their shape"),
        ({"hidden": torch.empty(5, 2)}, "shapes of hidden, weight"),
        ({"weight": torch.empty(BLOCK + 1, 3)}, "folds: their shape"),
        ({"bias": torch.empty(6)}, "bias"),
        ({"hidden": torch.empty(5, 3).double()}, "both be fp32 or both bf16"),
    ],
)
def test_products_that_do_not_fit_are_refused(change, message):
    parts = folds(labels_of(5, 7), LogitTransform(), 7, torch.float32, False)
    with pytest.raises(RuntimeError, match=message):
        parts.add_product(
            **({"hidden": torch.empty(5, 3), "weight": torch.empty(7, 3), "bias": None} | change)
        )


@pytest.mark.parametrize("first", [1, BLOCK])
def test_columns_that_do_not_fit_are_refused(first):
    parts = folds(labels_of(5, 2 * BLOCK), LogitTransform(), 2 * BLOCK, torch.float32, False)
    with pytest.raises(RuntimeError, match="must begin with a block"):
        parts.add(torch.empty(5, BLOCK + 1), first)
