"""Operators leave the caller's precision settings as they were, whichever of PyTorch's interfaces set them.

Each case has a process of its own: PyTorch refuses to read old switches once the new ones were used.
"""

import pytest
import torch

from gspo_kernels.ops.library import _exact_matmul
from tests.forks import exit_code, forked


def old(matmul):
    matmul.allow_tf32 = True


def new(matmul):
    matmul.fp32_precision = "tf32"


def split(matmul):
    matmul.allow_bf16_reduced_precision_reduction = (False, False)


SETTINGS = {
    "old, global": [lambda matmul: torch.set_float32_matmul_precision("high")],
    "new, global": [lambda matmul: setattr(torch.backends, "fp32_precision", "tf32")],
    "old, then new": [old, new],
    "new, then old": [new, old],
    "split sums": [split],
}


def state(matmul):
    """What every switch says, or why it can't be read."""
    reductions = ("bf16_reduced_precision_reduction", "fp16_reduced_precision_reduction")
    names = ("fp32_precision", "allow_tf32", *(f"allow_{name}" for name in reductions))
    readers = {name: lambda name=name: getattr(matmul, name) for name in names}
    readers["split"] = lambda: getattr(matmul, "allow_bf16_reduced_precision_reduction_split_k", None)
    readers["global"] = torch.get_float32_matmul_precision
    found = {}
    for name, read in readers.items():
        try:
            found[name] = read()
        except RuntimeError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_survive(name):
    def use():
        matmul = torch.backends.cuda.matmul
        for setting in [lambda matmul: None, *SETTINGS[name]]:
            setting(matmul)
            before = state(matmul)
            with _exact_matmul("cuda"):
                assert matmul.fp32_precision == "ieee"
                assert not matmul.allow_bf16_reduced_precision_reduction
                assert not matmul.allow_fp16_reduced_precision_reduction
            assert state(matmul) == before

    assert exit_code(forked(use)) == 0
