"""Peak memory of the fused loss from hidden states, and pages that one call leaves to the next.

Peaks are measured in a process of their own. It builds inputs, resets the high-water mark of its resident
memory (VmHWM, Linux), runs a forward and backward, and reads the mark.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.core import memory
from gspo_kernels.core.memory import reused_memory
from tests.cases import generator

MIB = 2**20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# A chunk holds half of the tokens.
TOKENS, VOCABULARY, WIDTH = 440, 151936, 64
CHUNK = 220 * VOCABULARY * 4
# Buffers of the matrix library, compacted rows, statistics per token, a slab of a raised weight: 10 MiB here.
ALLOWANCE = 32 * MIB
# Schedule, dtype, number of sequences, how many fp32 [V, H] sums it keeps besides dWeight, and how many times
# ``CHUNK`` it needs, which holds whole sequences only where there are two.
CASES = {
    "auto, bf16": ("auto", "bf16", 1, 2, 1.0),
    "aligned, bf16": ("aligned", "bf16", 2, 1, 1.0),
    "aligned, bf16, one chunk": ("aligned", "bf16", 2, 0, 2.0),
    "deferred": ("deferred", "fp32", 1, 1, 1.0),
    "frozen": ("frozen", "fp32", 1, 0, 1.0),
    "two_pass": ("two_pass", "fp32", 1, 0, 1.0),
    "two_pass, bf16": ("two_pass", "bf16", 1, 0, 0.25),
}
# Schedule, dtype, tokens of a chunk, and how many ids of a token are centered.
CENTRED = {
    "known, bf16": ("known", "bf16", 44, 500),
    "known, one chunk": ("known", "fp32", 440, 500),
    "two_pass, bf16": ("two_pass", "bf16", 220, 8),
}
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are kept on Linux")


# --- peaks


def inputs(tokens, vocabulary, dtype, sequences, trains_weight):
    """Nothing is clipped: ratios are far below 1 and advantages positive. So every row has a gradient."""
    rng, shape = generator(0), (sequences, tokens // sequences)
    # filled in place: a temporary would raise the mark beforehand
    hidden = torch.empty(*shape, WIDTH, dtype=dtype).normal_(generator=rng).requires_grad_()
    weight = torch.empty(vocabulary, WIDTH, dtype=dtype).normal_(std=0.1, generator=rng)
    labels = torch.randint(vocabulary, shape, generator=rng)
    return hidden, weight.requires_grad_(trains_weight), labels, torch.zeros(shape), torch.ones(sequences)


def naive(hidden, weight, labels, old, advantages):
    logits = torch.nn.functional.linear(hidden, weight)
    logprobs = logits.float().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    ratio = (logprobs - old).mean(-1).exp()
    clipped = ratio.clamp(1 - 3e-4, 1 + 4e-4)
    (-torch.minimum(ratio * advantages, clipped * advantages).mean()).backward()


def ours(*arguments, **options):
    gk.fused_linear_policy_loss(*arguments, **options).loss.backward()


def resident(what):
    """Return bytes of resident memory: "VmRSS" now, "VmHWM" at most since the mark was reset."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{what}:")[1].split()[0]) * 1024


def raised(call, *arguments, **options):
    """Return by how many bytes a call raises the peak."""
    memory.release()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmHWM")
    # otherwise an earlier peak could hide the call's
    assert before - resident("VmRSS") < 4 * MIB
    call(*arguments, **options)
    return resident("VmHWM") - before


def measure():
    """Print bytes by case: those of plain PyTorch, those used and promised, and those of scoring (without
    chunks of logits, then with them).
    """
    from benchmarks.measure import give_memory_back
    from gspo_kernels.hidden.matmul.cpp_blocks import StreamedMatmul

    torch.set_num_threads(2)
    give_memory_back()
    shown = {}
    naive(*inputs(64, 1000, torch.float32, 4, True))
    arguments = inputs(128, VOCABULARY, torch.float32, 4, True)
    shown["plain"] = [raised(naive, *arguments)]
    for name, (schedule, dtype, sequences, *_) in CASES.items():
        options = {"schedule": schedule, "max_chunk_bytes": CHUNK * (1 + ("one chunk" in name))}
        options["objective"] = gk.GRPO() if schedule == "known" else gk.GSPO()
        for tokens, vocabulary in ((64, 1000), (TOKENS, VOCABULARY)):
            arguments = inputs(tokens, vocabulary, DTYPES[dtype], sequences, schedule != "frozen")
            used = raised(ours, *arguments, **options)
        assert bool((arguments[0].grad != 0).any(-1).all())
        shown[name] = [used, gk.explain_schedule(*arguments, **options).peak_bytes]
    for name, (schedule, dtype, rows, ids) in CENTRED.items():
        options = {"schedule": schedule, "objective": gk.CISPO(), "max_chunk_bytes": rows * VOCABULARY * 4}
        for tokens, vocabulary in ((64, 1000), (TOKENS, VOCABULARY)):
            arguments = inputs(tokens, vocabulary, DTYPES[dtype], 8, True)
            of_ids = torch.randint(vocabulary, (*arguments[2].shape, ids), generator=generator(1))
            options["centering"] = gk.ScoreCentering(of_ids, torch.full(of_ids.shape, -20.0))
            used = raised(ours, *arguments, **options)
        shown[f"centered, {name}"] = [used, gk.explain_schedule(*arguments, **options).peak_bytes]
    streams = StreamedMatmul.streams
    for name, dtype in DTYPES.items():
        StreamedMatmul.streams = streams
        hidden, weight, labels, *_ = inputs(440, VOCABULARY, dtype, 8, False)
        call = {"max_chunk_bytes": CHUNK, "return_entropy": True}
        gk.linear_token_logprobs(hidden.detach()[:, :1], weight, labels[:, :1], **call)
        shown[f"scoring, {name}"] = []
        for _ in range(2):
            used = raised(gk.linear_token_logprobs, hidden.detach(), weight, labels, **call)
            shown[f"scoring, {name}"].append(used)
            StreamedMatmul.streams = False
    print(json.dumps(shown))


@pytest.fixture(scope="module")
def peaks():
    command, root = [sys.executable, "-m", "tests.hidden.test_peak_memory"], Path(__file__).parents[2]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@on_linux
@pytest.mark.slow
def test_plain_pytorch_takes_four_times_its_logits(peaks):
    """This checks the measurement. Four tensors live in log_softmax's backward: the logits, which a variable
    holds; the result, which it needs; the result's gradient, made by gather's backward; the logits' gradient.
    """
    assert peaks["plain"][0] == pytest.approx((4 + 4 + 4 + 4) * 128 * VOCABULARY, rel=0.05)


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_peak_is_a_chunk_and_the_gradients(peaks, name):
    (schedule, dtype, _, sums, chunk), (used, promise) = CASES[name], peaks[name]
    trained = 0 if schedule == "frozen" else VOCABULARY * WIDTH
    gradients = (TOKENS * WIDTH + trained) * DTYPES[dtype].itemsize
    limit = chunk * CHUNK + gradients + sums * trained * 4 + ALLOWANCE
    assert used <= limit, f"{used / MIB:.0f} MiB, expected at most {limit / MIB:.0f}"
    assert used == pytest.approx(promise, rel=0.02)


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize("name", CENTRED)
def test_peak_has_the_ids_of_centering(peaks, name):
    used, promise = peaks[f"centered, {name}"]
    assert used == pytest.approx(promise, rel=0.02)


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probs_allocate_no_chunk(peaks, dtype):
    folded, written = peaks[f"scoring, {dtype}"]
    assert folded <= ALLOWANCE, f"{folded / MIB:.0f} MiB, expected at most {ALLOWANCE / MIB:.0f}"
    assert CHUNK / 2 <= written <= CHUNK + ALLOWANCE, f"{written / MIB:.0f} MiB of written logits"


# --- pages of gradients


@pytest.fixture
def given_back():
    """Yield the list of pages of dropped gradients. Other tests' pages are not in it, and it leaves none."""
    memory.release()
    yield memory._given_back
    memory.release()


def gradient_memory():
    return reused_memory(torch.Size((64, MIB // 4)), torch.float32, torch.device("cpu"))


@on_linux
def test_views_of_a_gradient_keep_its_pages(given_back):
    leaf = torch.zeros(4, requires_grad=True)
    whole = gradient_memory().fill_(3.0)
    views = [whole[5:7], whole.numpy()[60:], whole.untyped_storage(), whole.view(torch.int32).T]
    leaf.grad = whole[0, :4]
    del whole
    while views:
        assert not given_back
        gradient_memory().fill_(7.0)
        given_back.clear()
        views.pop()
    assert (leaf.grad == 3).all()
    leaf.grad = None
    assert len(given_back) == 1


# --- chunks of logits

WIDE = 2**18
"""A vocabulary size: a row of fp32 logits takes a MiB."""


def linear_call():
    """Return results of a call whose chunk is too large for malloc to keep."""
    rng = generator(0)
    hidden = torch.randn(4, 16, 8, generator=rng).requires_grad_()
    weight = torch.randn(WIDE, 8, generator=rng).requires_grad_()
    labels = torch.randint(WIDE, (4, 16), generator=rng)
    out = gk.fused_linear_policy_loss(hidden, weight, labels, None, torch.randn(4, generator=rng))
    out.loss.backward()
    return out.loss.detach(), out.logprobs, hidden.grad, weight.grad


@on_linux
def test_the_next_call_finds_the_chunk_again(given_back):
    fresh = linear_call()
    (pages,) = given_back
    assert len(pages) == 64 * WIDE * 4
    pages[:] = b"\xff" * len(pages)  # NaN in every dtype: nothing may be read before it is written
    again = linear_call()
    assert given_back == [pages] and all(map(torch.equal, fresh, again))


if __name__ == "__main__":
    measure()
