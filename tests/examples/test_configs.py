"""The example configurations are valid, whatever the options are called by now."""

from pathlib import Path

import pytest

from gspo_kernels.trainer import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_loads(name):
    config = load_config(EXAMPLES / name)
    assert config.reward and config.dataset.startswith("examples/")
    assert (EXAMPLES.parent / config.dataset).exists()
