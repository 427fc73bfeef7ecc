"""What somebody does who has installed a wheel and nothing else: import, doctor, the README's code, the demo.

``python user.py compiled`` or ``python user.py pure`` imports nothing from this folder, so that it can be
carried anywhere: ``release.install`` hands it to bare environments, cibuildwheel to those of its containers.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.metadata import metadata, version
from pathlib import Path

PURE = "it was left out of this build by GSPO_KERNELS_NO_EXT"


def expect(condition: bool, said: str) -> None:
    """End the program with what is wrong; an assert would vanish under -O."""
    if not condition:
        raise SystemExit(f"user.py: {said}")


def use_import() -> None:
    """The package comes from the environment, says its version, and adds little to torch's import."""
    import torch

    start = time.perf_counter()
    import gspo_kernels

    took = time.perf_counter() - start
    where = Path(gspo_kernels.__file__).resolve()
    expect(Path(sysconfig.get_path("purelib")).resolve() in where.parents, f"imported from {where}")
    expect(gspo_kernels.__version__ == version("gspo_kernels"), f"version {gspo_kernels.__version__}")
    print(
        f"gspo_kernels {gspo_kernels.__version__} beside torch {torch.__version__}: import {took:.2f} s more"
    )


def use_doctor(kind: str) -> None:
    """``gspo doctor`` says whether the C++ backend is there, and why not."""
    said = subprocess.run(["gspo", "doctor"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"^ +cpp +(.*)$", said, re.MULTILINE)
    line = found.group(1) if found else said
    expect(line == "ready" if kind == "compiled" else PURE in line, f"gspo doctor: cpp {line}")
    print(f"gspo doctor: cpp {line}")


def use_readme() -> None:
    """The code on the package's page runs, top to bottom."""
    about = metadata("gspo_kernels")
    page = str(about.get_payload() or about["Description"])
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    expect(bool(blocks), "the metadata hold no README")
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)


def use_demo() -> None:
    """Two rollouts of the demonstration leave a model and its metrics."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "demo")
        subprocess.run(["gspo", "demo", "--steps", "2", "--output", str(run)], check=True)
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    expect(len(lines) >= 2, f"the demo wrote {len(lines)} lines of metrics")
    print(f"gspo demo --steps 2: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    (kind,) = sys.argv[1:]
    use_import()
    use_doctor(kind)
    use_readme()
    use_demo()
