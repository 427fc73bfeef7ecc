"""Statistics of rows whose logits come some columns at a time have the bits of those of written logits."""

import itertools

import pytest
import torch

from gspo_kernels.backends.cpp.products import INSTRUCTIONS, has_instructions, multiply
from gspo_kernels.core import bits
from gspo_kernels.core.types import LogitTransform, RowOptions
from gspo_kernels.hidden.chunk import Chunk
from gspo_kernels.hidden.matmul.cpp_blocks import BLOCK, OnlineSoftmax
from tests.backends.row_calls import DTYPES, IGNORE, NEGATIVE, PLAIN, SOFT, WARM, Rows, same

ROWS = Rows("cpp")
# One column, less and more than a tile, less and more than a block, three blocks
VOCABULARIES = (1, 31, 33, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 77)


def labels_of(rows, vocabulary):
    """Draw labels, among them an ignored one, two out of range, the last column, the last block's first."""
    labels = torch.randint(0, vocabulary, (1, rows))
    special = [IGNORE, vocabulary, -1, vocabulary - 1, (vocabulary - 1) // BLOCK * BLOCK]
    labels[0, : min(rows, 5)] = torch.tensor(special[:rows])
    return labels


def transforms(rows, vocabulary):
    mask = bits.packed_columns(torch.rand(1, rows, vocabulary) < 0.7)
    yield from (PLAIN, WARM, SOFT, NEGATIVE)
    yield LogitTransform(row_temperature=torch.rand(1, rows) + 0.5, kept=mask)
    yield LogitTransform(softcap=3.0, kept=mask)


def online_softmax(labels, transform, vocabulary, dtype=torch.float32, entropy=True):
    chunk = Chunk(slice(0), labels, labels, RowOptions(transform, IGNORE, "cpp"), labels.numel())
    return OnlineSoftmax(chunk, vocabulary, dtype, entropy)


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns(dtype):
    """Columns come in slabs of one block or two; some rows have infinities or NaN."""
    for vocabulary, entropy in itertools.product(VOCABULARIES, (False, True)):
        logits = (3 * torch.randn(1, 12, vocabulary + 3, dtype=torch.float64)).to(dtype)[..., :vocabulary]
        logits[0, 5, 0], logits[0, 6, -1], logits[0, 7] = torch.inf, torch.nan, -torch.inf
        logits[0, 8, : vocabulary // 2], logits[0, 9, vocabulary // 2 :] = -torch.inf, 300.0
        labels = labels_of(12, vocabulary)
        for transform, width in itertools.product(transforms(12, vocabulary), (BLOCK, 2 * BLOCK)):
            parts = online_softmax(labels, transform, vocabulary, dtype, entropy)
            for first in range(0, vocabulary, width):
                parts.add(logits[0, :, first : first + width], first)
            assert same(parts.statistics(), ROWS.forward(logits, labels, transform, entropy=entropy))


def of_product(hidden, weight, bias, labels, transform=PLAIN, **options):
    """Return the statistics of a product that is reduced as it is computed, and of its written logits."""
    logits = torch.full((hidden.shape[0], weight.shape[0]), torch.nan)
    multiply(hidden, weight.t(), logits, bias=bias, **options)
    sums = online_softmax(labels, transform, weight.shape[0], hidden.dtype)
    sums.add_product(hidden, weight, bias, **options)
    return sums.statistics(), ROWS.forward(logits.unsqueeze(0), labels, transform)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(dtype):
    shapes = [(13, vocabulary, 40) for vocabulary in VOCABULARIES]
    for rows, vocabulary, width in [*shapes, (1, 70, 1), (5, BLOCK + 1, 600), (500, 300, 257), (0, 7, 4)]:
        hidden, weight = torch.randn(rows, width).to(dtype), torch.randn(vocabulary, width).to(dtype)
        hidden[:1], labels = torch.nan, labels_of(rows, vocabulary)
        bias = torch.randn(vocabulary).to(dtype)
        for transform in transforms(rows, vocabulary):
            assert same(*of_product(hidden, weight, bias, labels, transform))
        for how, added in itertools.product(INSTRUCTIONS, (None, bias)):
            if has_instructions(how, dtype):
                assert same(*of_product(hidden, weight, added, labels, instructions=how))
        across = (hidden.t().contiguous().t(), torch.stack([weight, weight], 1)[:, 1])
        assert same(*of_product(*across, bias, labels))


def test_who_computes_a_block_leaves_no_trace():
    hidden, weight, labels = torch.randn(100, 30), torch.randn(3 * BLOCK, 30), labels_of(100, 3 * BLOCK)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(of_product(hidden, weight, None, labels)[0])
    finally:
        torch.set_num_threads(threads)
    some = of_product(hidden[20:40], weight, None, labels[:, 20:40])[0]
    assert same(results[0], results[1]) and same(results[0], results[2])
    assert same(some, results[0].each(lambda stat: stat[:, 20:40]))
