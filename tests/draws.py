"""Random draws of the suite: ``--seed-shift N`` (GSPO_KERNELS_SEED_SHIFT) changes the numbers of all of them.

A test that passes with one seed may pass by luck, one that passes with twenty does not. The environment
variable reaches processes that tests start, and the workers of pytest-xdist.
"""

import os

VARIABLE = "GSPO_KERNELS_SEED_SHIFT"


def shifted_seed(seed: int) -> int:
    """Return the shifted seed of a draw. Seeds in use are far below a million."""
    return seed + 1_000_000 * int(os.environ.get(VARIABLE, "0"))
