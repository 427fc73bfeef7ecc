"""The same call gives the same bits, whatever else the device does; compute-sanitizer minds no access."""

import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest
import torch

from tests.gpu.calls import CALLS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", CALLS)
def test_every_run_gives_the_same_bits(name, device, scale):
    """Other work in a second stream moves blocks of threads against each other."""
    wanted = [one.clone() for one in CALLS[name](device, scale)]
    assert all(one.isfinite().all() for one in wanted)
    noise = torch.randn(2048, 2048, device=device) if device.type == "cuda" else None
    stream = torch.cuda.Stream() if noise is not None else None
    for run in range(scale.runs):
        if stream is not None and run % 2:
            with torch.cuda.stream(stream):
                for _ in range(run % 7):
                    noise @ noise
        for got, want in zip(CALLS[name](device, scale), wanted, strict=True):
            assert torch.equal(got, want), run


@pytest.mark.parametrize("tool", ("memcheck", "racecheck", "synccheck", "initcheck"))
def test_compute_sanitizer_finds_nothing(tool, device):
    sanitizer = which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("compute-sanitizer is not installed")
    # racecheck and initcheck stop at cuBLAS's own kernels
    ours_alone = tool in ("racecheck", "initcheck")
    names = [name for name in CALLS if not (ours_alone and "hidden" in name)]
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "tests.gpu.calls"]
    # memory that torch keeps would hide an access beyond a tensor
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    run = subprocess.run(
        [*command, *names], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
