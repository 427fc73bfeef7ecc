"""Rows in segments, however they come."""

from __future__ import annotations

import itertools

import torch

from gspo_kernels.linear.sums import SEGMENT, Segments
from tests.cases import generator


def test_segments_are_the_same_however_rows_come():
    rng = generator(0)
    ranks = torch.arange(1000)[torch.rand(1000, generator=rng) > 0.2]
    values = torch.randn(len(ranks), 3, generator=rng)
    for step in (1, 2, SEGMENT):
        expected = None
        for sizes in ([len(ranks)], [1] * len(ranks), [100, 0, 300, 5, len(ranks) - 405]):
            segments, found = Segments(step), []
            parts = zip(values.split(sizes), ranks.split(sizes), strict=True)
            for segmented in itertools.chain(
                *(segments.cut((own,), ranks) for own, ranks in parts), segments.rest()
            ):
                (rows,), ends = segmented
                assert ends[-1] == len(rows) and all(end % step == 0 for end in ends[:-1])
                found += [rows[a:b] for a, b in itertools.pairwise([0, *ends.tolist()])]
            expected = found if expected is None else expected
            # zeros behind a segment's last row say nothing
            for got, own in zip(found, expected, strict=True):
                most = max(len(got), len(own))
                got, own = (torch.nn.functional.pad(x, (0, 0, 0, most - len(x))) for x in (got, own))
                assert torch.equal(got, own)
        assert len(expected) == -(-1000 // SEGMENT)
        total = torch.cat([rows.sum(0, keepdim=True) for rows in expected]).sum(0)
        torch.testing.assert_close(total, values.sum(0))
