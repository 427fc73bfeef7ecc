"""Peak memory of a step at a vocabulary of 152k beside TRL's own, each measured in a process of its own."""

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason='TRL is missing: pip install "gspo_kernels[trl]"'
)


@pytest.mark.slow
def test_peak_is_the_logits_of_completions_and_below_trl():
    from benchmarks import trl_memory

    prompt, completion = 64, 128
    theirs, ours = (trl_memory.measure(name, prompt, completion) for name in ("TRL", "ours"))
    # all completions fit the default chunk; embedding and head have a gradient; buffers, layers, statistics
    logits = trl_memory.SEQUENCES * completion * trl_memory.VOCABULARY * 4
    gradients = 2 * trl_memory.VOCABULARY * trl_memory.WIDTH * 4
    assert ours <= logits + gradients + 32 * trl_memory.MIB
    assert ours <= theirs / 2
