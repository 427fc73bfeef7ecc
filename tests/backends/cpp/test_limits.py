"""The C++ backend at its limits: threads, sizes, refusals, and each instruction set's clone of its loops."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from gspo_kernels.backends import cpp
from gspo_kernels.core.types import RatioClip
from tests.backends.cpp.clones import ROOT, build
from tests.backends.row_calls import DTYPES, IGNORE, Rows, draw, same
from tests.cases import generator

ROWS = Rows("cpp")


@pytest.fixture
def threads():
    """Yield ``torch.set_num_threads``; restore the number of threads after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_depend_neither_on_threads_nor_on_the_run(threads, dtype):
    logits, labels, grad, grad_entropy = draw(4099, dtype, B=3, T=17)
    rng, size = generator(0), (64, 4096)  # several times the tokens that one thread takes at once
    logprobs = -torch.rand(size, generator=rng)
    old = logprobs + 1e-3 * torch.randn(size, generator=rng)
    mask = torch.rand(size, generator=rng) < 0.9
    operands = cpp.RatioOperands(old, torch.randn(64, generator=rng))
    form = RatioClip(-1e-3, 1e-3, 1.0, False, "sequences", 1.0)

    def everything():
        stats = ROWS.forward(logits, labels)
        known, both = ROWS.and_grad(logits, labels, grad)
        with_rows, *rest = ROWS.and_rows(logits, labels)
        of_rows = *stats, *known[:2], both, *with_rows[:2], *rest
        gradient = ROWS.backward(logits, labels, stats, grad, grad_entropy)
        return *of_rows, gradient, *cpp.ratio_step(logprobs, mask, operands, form)

    threads(1)
    want = everything()
    for count in (1, 2, 2, 3, 64):
        threads(count)
        assert same(everything(), want)


@pytest.mark.parametrize("vocabulary", [32000, 30011])
def test_large_gradients_are_written_like_any(vocabulary):
    """Above 32 MiB, a gradient may bypass the caches where a row begins at a cache line."""
    logits, labels, grad, _ = draw(vocabulary, torch.float32, T=150)
    stats = ROWS.forward(logits, labels)
    large = ROWS.backward(logits, labels, stats, grad)
    assert large.nbytes > 2**25
    for t in range(0, 150, 7):
        at = (slice(None), slice(t, t + 1))
        one = ROWS.backward(logits[at], labels[at], stats.each(lambda x, at=at: x[at]), grad[at])
        assert torch.equal(large[at], one)


def test_offsets_beyond_32_bits():
    """The memory is only reserved: apart from the few rows in use, it is never touched."""
    far, vocabulary = 2**31 + 64, 1000
    rows, labels, grad, _ = draw(vocabulary, torch.bfloat16, B=1, T=2)
    labels[0] = torch.tensor([1, 2])

    def spread_out():
        memory = torch.empty(far + vocabulary, dtype=torch.bfloat16)
        return memory.as_strided((1, 2, vocabulary), (0, far, 1))

    logits, out = spread_out(), spread_out()
    logits.copy_(rows)
    stats = ROWS.forward(logits, labels)
    assert same(stats, ROWS.forward(rows, labels))
    want = ROWS.backward(rows, labels, stats, grad)
    assert torch.equal(ROWS.backward(logits, labels, stats, grad, out=out), want)
    columns = torch.empty(2**32 + 1, dtype=torch.bfloat16).as_strided((1, 1, 3), (0, 0, 2**31))
    columns.copy_(rows[:, :1, :3])
    assert same(
        ROWS.forward(columns, labels[:, 1:]), ROWS.forward(rows[:, :1, :3].contiguous(), labels[:, 1:])
    )


def test_more_than_2_to_31_logits():
    logits = torch.randn(32768).bfloat16().expand(1, 70000, 32768)
    assert logits.numel() > 2**31
    labels = torch.full((1, 70000), IGNORE)
    labels[0, [0, 69999]] = torch.tensor([32767, 5])
    logprobs = ROWS.forward(logits, labels, entropy=False).logprobs
    want = torch.log_softmax(logits[0, 0].double(), -1)
    torch.testing.assert_close(logprobs[0, [0, 69999]].double(), want[[32767, 5]], rtol=2e-7, atol=0)
    assert logprobs.count_nonzero() == 2


def test_the_thread_keeps_its_subnormals():
    ROWS.forward(torch.randn(1, 2, 100), torch.zeros(1, 2, dtype=torch.int64))
    assert (torch.tensor([1e-40]) * 1.0).item() != 0.0


# --- clones of the loops for other instruction sets than the one that the loader picks here


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="there are clones for x86-64 alone")
@pytest.mark.skipif("GSPO_KERNELS_TEST_CLONES" not in os.environ, reason="compiles csrc; CI sets it")
def test_the_oldest_clone_is_within_budget(tmp_path):
    """It has no fused multiply-add. ``python -m tests.backends.cpp.clones`` builds those in between."""
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("the loader picks it here, so that every other test runs it")
    tests = [f"tests/backends/test_{name}.py" for name in ("rows", "sequence_ratio")]
    chosen = ["-k", "cpp and (vocabularies or transforms or far_apart or counted_tokens) or 16_bit"]
    file = build("x86-64", tmp_path / "tree")
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", f"--extension={file}"]
    command = [sys.executable, "-m", "pytest", *options, *tests, *chosen]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
