"""The README's Python runs, top to bottom, as a reader would paste it."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_every_block_runs():
    assert len(blocks()) == 3
    namespace = {"__name__": "readme"}
    for block in blocks():
        exec(compile(block, str(README), "exec"), namespace)
    assert namespace["hidden"].grad.isfinite().all()
    assert namespace["hidden"].grad.abs().sum() > 0
    assert namespace["logits"].grad.isfinite().all()
    assert float(namespace["out"].metrics["ratio/max"]) == 1.0
