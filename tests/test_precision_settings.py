"""Operators keep the caller's precision settings, whichever of PyTorch's interfaces set them.

Each case has a process of its own: PyTorch refuses to read old switches once the new ones were used.
"""

import pytest
import torch

from gspo_kernels.ops.library import _ExactMatmul
from tests.forks import exit_code, forked

matmul = torch.backends.cuda.matmul
OLD, NEW = "matmul.allow_tf32 = True", 'matmul.fp32_precision = "tf32"'
SETTINGS = {
    "old, global": ['torch.set_float32_matmul_precision("high")'],
    "new, global": ['torch.backends.fp32_precision = "tf32"'],
    "old, then new": [OLD, NEW],
    "new, then old": [NEW, OLD],
    "split sums": ["matmul.allow_bf16_reduced_precision_reduction = (False, False)"],
}
SWITCHES = (
    "matmul.fp32_precision", "matmul.allow_tf32", "torch.get_float32_matmul_precision()",
    "matmul.allow_bf16_reduced_precision_reduction", "matmul.allow_fp16_reduced_precision_reduction",
    "matmul.allow_bf16_reduced_precision_reduction_split_k",
)  # fmt: skip


def state():
    """Return the value of every switch, or why it can't be read."""
    found = {}
    for switch in SWITCHES:
        try:
            found[switch] = eval(switch)
        except (RuntimeError, AttributeError) as error:
            found[switch] = str(error)
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_survive(name):
    def use():
        for setting in ["", *SETTINGS[name]]:
            exec(setting)
            before = state()
            with _ExactMatmul():
                assert matmul.fp32_precision == "ieee"
                assert not matmul.allow_bf16_reduced_precision_reduction
                assert not matmul.allow_fp16_reduced_precision_reduction
            assert state() == before

    assert exit_code(forked(use)) == 0
