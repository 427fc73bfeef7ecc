"""How long a step from hidden states takes beside its three products, by counting: no device is involved.

``python -m benchmarks.estimate`` prints it. Products take as long as their operations, or their bytes where
those take longer; what lies between them takes as long as its bytes. Launches, looks at the device and the
work per token are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

OPERATIONS, BANDWIDTH = 6.7e14, 0.85 * 3.35e12
"""An H100's, per second: what large 16-bit products are taken to reach, 85% of its memory's data sheet."""


@dataclass(frozen=True)
class Step:
    """A step in chunks, every row with a gradient: 16-bit operands, fp32 logits and fp32 sums."""

    tokens: int = 16384
    width: int = 4096
    vocabulary: int = 151936
    chunk_rows: int = 4096

    @property
    def chunks(self) -> int:
        """How many."""
        return -(-self.tokens // self.chunk_rows)

    @property
    def operations(self) -> float:
        """Of each product of a chunk."""
        return 2.0 * self.chunk_rows * self.width * self.vocabulary

    def product(self, moved: float) -> float:
        """Seconds of a chunk's product that moves so many bytes."""
        return max(self.operations / OPERATIONS, moved / BANDWIDTH)

    def over_products(self, summed_inside: bool, held: bool = False) -> float:
        """Time beside that of the operations alone; ``summed_inside``: dWeight is summed by its product;
        ``held``: a row stays on the chip between its log-prob and its gradient.
        """
        logits, hidden = self.chunk_rows * self.vocabulary, self.chunk_rows * self.width
        sums = self.vocabulary * self.width  # as many as the weight has elements
        bare = self.chunks * 3 * self.operations / OPERATIONS
        products = self.chunks * (
            self.product(2.0 * hidden + 2.0 * sums + 4.0 * logits)
            + self.product(2.0 * logits + 2.0 * sums + 4.0 * hidden)
            + self.product(2.0 * logits + 2.0 * hidden + (8.0 if summed_inside else 4.0) * sums)
        )
        # log-probs read fp32 logits; the gradient writes 16-bit rows, and reads logits that aren't held
        between = self.chunks * (6.0 if held else 10.0) * logits
        if not summed_inside:
            # the product is read and the sum written, from the second chunk on the sum is read, too
            between += (12.0 * self.chunks - 4.0) * sums
        return (products + between / BANDWIDTH) / bare


if __name__ == "__main__":
    for name, *ways in (
        ("dWeight added to its sum", False),
        ("dWeight summed inside of its product, logits read twice so that rows can be left out", True),
        ("the same on-policy, each logit read once", True, True),
    ):
        print(f"{name}: {Step().over_products(*ways):.2f} x the three products, counted, not measured")
