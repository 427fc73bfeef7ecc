"""Operators leave the caller's precision settings as they were, whichever of PyTorch's interfaces set them.

Each case has a process of its own: PyTorch refuses to read old switches once the new ones were used.
"""

import subprocess
import sys

import pytest

READ = """
import torch
from gspo_kernels.ops.library import _exact_matmul
matmul = torch.backends.cuda.matmul

def state():
    found = {}
    for name in ("fp32_precision", "allow_tf32", "allow_bf16_reduced_precision_reduction",
                 "allow_bf16_reduced_precision_reduction_split_k", "allow_fp16_reduced_precision_reduction"):
        try:
            found[name] = getattr(matmul, name, None)
        except RuntimeError as error:
            found[name] = str(error)
    try:
        found["global"] = torch.get_float32_matmul_precision()
    except RuntimeError as error:
        found["global"] = str(error)
    return found

def use():
    before = state()
    with _exact_matmul("cuda"):
        assert matmul.fp32_precision == "ieee"
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert not matmul.allow_fp16_reduced_precision_reduction
    assert state() == before, (before, state())
"""
OLD, OLD_GLOBAL = "matmul.allow_tf32 = True", 'torch.set_float32_matmul_precision("high")'
NEW, NEW_GLOBAL = 'matmul.fp32_precision = "tf32"', 'torch.backends.fp32_precision = "tf32"'
SPLIT = "matmul.allow_bf16_reduced_precision_reduction = (False, False)"
CASES = {
    "old, global": (OLD_GLOBAL,),
    "new, global": (NEW_GLOBAL,),
    "old, then new": (OLD, NEW),
    "new, then old": (NEW, OLD),
    "split sums": (SPLIT,),
}


@pytest.mark.parametrize("name", CASES)
def test_settings_survive(name):
    script = "use()\n".join([READ, *(f"{setting}\n" for setting in CASES[name])]) + "use()\nuse()\n"
    if name == "old, global":
        script += "assert torch.get_float32_matmul_precision() == 'high'\n"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
