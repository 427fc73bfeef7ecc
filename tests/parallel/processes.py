"""Runs the cases of a module in several gloo processes."""

import json
import os
import subprocess
import sys
from pathlib import Path


def run_cases(module: str, size: int, folder: Path) -> dict[str, str]:
    """What the cases had to say on all ranks together, by name: "" where they passed on each."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.parallel.worker",
                module,
                str(rank),
                str(size),
                str(folder / "store"),
                str(folder / f"result{rank}"),
            ],
            cwd=Path(__file__).parents[2],
            env=environment,
        )
        for rank in range(size)
    ]
    try:
        for process in processes:
            assert process.wait(timeout=400) == 0
    finally:
        for process in processes:
            process.kill()
    said = [json.loads((folder / f"result{rank}").read_text()) for rank in range(size)]
    return {case: "".join(each[case] for each in said) for case in said[0]}
