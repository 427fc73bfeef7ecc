"""Sets up the session: Triton kernels run on CPU tensors by the interpreter unless there is a GPU."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", params=("reference", "cpp", "triton"))
def backend(request):
    """Every backend in turn. One that can't serve is skipped for its own reason; cpp must be there."""
    from gspo_kernels.ops.backends import why_not

    on_gpu = request.param == "triton" and torch.cuda.is_available()
    reason = why_not(request.param, torch.device("cuda" if on_gpu else "cpu"))
    if reason is not None and request.param == "cpp":
        pytest.fail(f"{reason}; build it with `python setup.py build_ext --inplace`")
    if reason is not None:
        pytest.skip(reason)
    return request.param
