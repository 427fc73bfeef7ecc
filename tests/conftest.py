"""Sets up the session: Triton kernels run on CPU tensors by the interpreter unless there is a GPU."""

import gc
import importlib.util
import os
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.version import Version

from tests.draws import VARIABLE, shifted_seed

TESTS = Path(__file__).parent

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Inductor caches kernels of all vector widths under one key. Those of another width write past their tensors.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    f"{tempfile.gettempdir()}/torchinductor_gspo_{os.getuid()}_{torch.backends.cpu.get_cpu_capability()}",
)


def fuse_interpreted_fma():
    """Let ``tl.fma`` of the interpreter round once, as hardware does; before Triton 3.9 it rounds twice.

    The product of two fp32 numbers is exact in fp64. Operands of other dtypes keep Triton's way.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    theirs = InterpreterBuilder.create_fma

    def create_fma(self, x, y, z):
        if z.data.dtype != np.float32:
            return theirs(self, x, y, z)
        with np.errstate(over="ignore", invalid="ignore"):
            product = x.data.astype(np.float64) * y.data.astype(np.float64)
            return TensorHandle((product + z.data).astype(np.float32), z.dtype.scalar)

    InterpreterBuilder.create_fma = create_fma


def index_by_one_element():
    """Let numbers end loops: before Triton 3.9 they are arrays of one element, no indices to NumPy 2.4."""
    from triton.runtime import interpreter

    theirs = interpreter._patch_lang_tensor

    def patch_tensor(tensor, scope):
        theirs(tensor, scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch_tensor


def prefer_numbers_to_nan():
    """Let minima and maxima of the interpreter be numbers where one side is NaN, as hardware does."""
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)
    InterpreterBuilder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    import triton

    if Version(triton.__version__) < Version("3.9"):
        fuse_interpreted_fma()
        index_by_one_element()
        prefer_numbers_to_nan()


def pytest_addoption(parser):
    parser.addoption("--seed-shift", type=int, help="other numbers in every random draw of the suite")
    parser.addoption("--extension", help="the file of a C++ extension to test in place of the built one")
    parser.addoption("--results", type=Path, help="a folder for what tests measure, as JSON")
    parser.addoption("--triton", help="a folder with the Triton to compile kernels with")


def pytest_configure(config):
    """Apply the options. The seed shift becomes an environment variable, which reaches data made at import,
    workers of pytest-xdist, and processes that tests start.
    """
    if (shift := config.getoption("--seed-shift")) is not None:
        os.environ[VARIABLE] = str(shift)
    if (file := config.getoption("--extension")) is not None:
        spec = importlib.util.spec_from_file_location("gspo_kernels._C", file)
        sys.modules["gspo_kernels._C"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["gspo_kernels._C"])
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import core

        core.global_force_seed = shifted_seed(0)


NOT_QUICK = [
    TESTS / name for name in ("trainer", "mismatch", "benchmarks", "examples", "gpu", "test_compile.py")
]


def pytest_ignore_collect(collection_path, config):
    """Do not import files that ``-m quick`` deselects."""
    left_out = config.option.markexpr == "quick" and collection_path in NOT_QUICK
    return True if left_out else None


LONG = ("triton_compile", "fused_situations", "mismatch", "runs", "fake_gpu", "docs", "parallel", "processes")
"""Files that take longest. They come first, so that no process of pytest-xdist ends long after the others."""


def pytest_collection_modifyitems(items):
    """Sort long files to the front. Mark the first example of every test outside of NOT_QUICK as quick,
    unless it is slow.
    """
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)
    seen = set()
    for item in items:
        test = item.nodeid.split("[")[0]
        inside = not any(item.path.is_relative_to(path) for path in NOT_QUICK)
        if inside and test not in seen and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.quick)
        seen.add(test)


def pytest_collection_finish():
    """Exclude the objects of imports and collection from garbage collections, a tenth of the suite's time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """Unfreeze, so that the interpreter frees them at exit; otherwise Triton's bindings report leaks."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seeded():
    """Seed the global generators of PyTorch, Python and NumPy before every test."""
    torch.manual_seed(shifted_seed(0))
    random.seed(shifted_seed(0))
    np.random.seed(shifted_seed(0))


@pytest.fixture(autouse=True)
def forget_the_accelerator():
    """Reset Accelerate after every test; it would keep its first device and precision for the process."""
    yield
    if "accelerate.state" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


# Under pytest-xdist the processes share the cores.
PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, torch.get_num_threads() // PROCESSES))


@pytest.fixture(scope="session", params=("reference", "cpp", "triton"))
def backend(request):
    """Return every backend in turn. Skip one that can't serve, with its reason; fail if that is cpp."""
    from gspo_kernels.backends.dispatch import unavailable_reason

    on_gpu = request.param == "triton" and torch.cuda.is_available()
    reason = unavailable_reason(request.param, torch.device("cuda" if on_gpu else "cpu"))
    if reason is not None and request.param == "cpp":
        pytest.fail(f"{reason}; build it with `python setup.py build_ext --inplace`")
    if reason is not None:
        pytest.skip(reason)
    return request.param


@pytest.fixture(scope="session", autouse=True)
def checked_interpreter():
    """Make Triton's interpreter faster, and check that launches access elements of their tensors only."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        yield
        return
    from tests.backends.accesses import within_bounds
    from tests.backends.interpreter import faster

    with faster(), within_bounds():
        yield


@pytest.fixture
def group_of_one():
    """Yield a process group of this process alone."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()
