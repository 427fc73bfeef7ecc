"""Runs cases in several gloo processes."""

import json
import os
import subprocess
import sys
from pathlib import Path


def run_cases(size: int, folder: Path, modules: tuple[str, ...]) -> dict[str, str]:
    """What the modules' cases had to say on all ranks together, "" where they passed on each.

    By the module's and the case's name, as in ``vocabulary::errors``.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    results = [folder / f"result{rank}" for rank in range(size)]
    command = [sys.executable, "-m", "tests.parallel.worker", str(size), str(folder / "store")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(result), *modules], cwd=Path(__file__).parents[2], env=environment
        )
        for rank, result in enumerate(results)
    ]
    try:
        for process in processes:
            assert process.wait(timeout=400) == 0
    finally:
        for process in processes:
            process.kill()
    said = [json.loads(result.read_text()) for result in results]
    return {case: "".join(each[case] for each in said) for case in said[0]}
