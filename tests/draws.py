"""Random draws of the suite: ``--seed-shift N`` (GSPO_KERNELS_SEED_SHIFT) gives every one other numbers.

What holds for one seed may hold by luck; what holds for twenty does not. The environment variable reaches the
processes that tests start and those that share the tests among them.
"""

import os

VARIABLE = "GSPO_KERNELS_SEED_SHIFT"


def shifted_seed(seed: int) -> int:
    """The seed of a draw; seeds in use are far below a million."""
    return seed + 1_000_000 * int(os.environ.get(VARIABLE, "0"))
