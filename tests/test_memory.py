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
from gspo_kernels.linear.sums import ROUNDED_COLUMNS
from gspo_kernels.ops import memory
from gspo_kernels.ops.memory import used_memory
from tests.cases import generator

MIB = 2**20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# A chunk holds half of the tokens.
TOKENS, VOCABULARY, WIDTH = 880, 151936, 128
CHUNK = 440 * VOCABULARY * 4
# Buffers of the matrix library, compacted rows, statistics per token, a slab of a raised weight: 10 MiB here.
ALLOWANCE = 32 * MIB
# Schedule, dtype, number of sequences, how many fp32 [V, H] sums it keeps besides dWeight, and how many times
# ``CHUNK`` it needs, which holds whole sequences only where there are two. With KL "auto" can't defer.
CASES = {
    "auto, bf16": ("auto", "bf16", 1, 2, 1.0),
    "auto, bf16, KL": ("auto", "bf16", 1, 0, 0.25),
    "aligned": ("aligned", "fp32", 2, 0, 1.0),
    "aligned, bf16": ("aligned", "bf16", 2, 1, 1.0),
    "aligned, bf16, one chunk": ("aligned", "bf16", 2, 0, 2.0),
    "known, bf16, one chunk": ("known", "bf16", 2, 0, 2.0),
    "deferred": ("deferred", "fp32", 1, 1, 1.0),
    "frozen": ("frozen", "fp32", 1, 0, 1.0),
    "two_pass": ("two_pass", "fp32", 1, 0, 1.0),
    "two_pass, bf16": ("two_pass", "bf16", 1, 0, 0.25),
}
# Schedule, dtype, tokens of a chunk, and how many ids of a token are centred.
CENTRED = {
    "known": ("known", "fp32", 440, 500),
    "known, bf16": ("known", "bf16", 88, 500),
    "known, one chunk": ("known", "fp32", 880, 500),
    "known, chunks of the same size": ("known", "fp32", 600, 8),
    "two_pass": ("two_pass", "fp32", 88, 500),
    "two_pass, bf16": ("two_pass", "bf16", 440, 8),
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
    from gspo_kernels.linear.products.blocks import StreamedProducts

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
            if "KL" in name:
                options |= {"ref_logprobs": arguments[3], "kl_beta": 0.1}
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
        shown[f"centred, {name}"] = [used, gk.explain_schedule(*arguments, **options).peak_bytes]
    streams = StreamedProducts.streams
    for name, dtype in DTYPES.items():
        StreamedProducts.streams = streams
        hidden, weight, labels, *_ = inputs(440, VOCABULARY, dtype, 8, False)
        call = {"max_chunk_bytes": CHUNK, "return_entropy": True}
        gk.linear_token_logprobs(hidden.detach()[:, :1], weight, labels[:, :1], **call)
        shown[f"scoring, {name}"] = []
        for _ in range(2):
            used = raised(gk.linear_token_logprobs, hidden.detach(), weight, labels, **call)
            shown[f"scoring, {name}"].append(used)
            StreamedProducts.streams = False
    print(json.dumps(shown))


@pytest.fixture(scope="module")
def peaks():
    command, root = [sys.executable, "-m", "tests.test_memory"], Path(__file__).parents[1]
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
    used, promise = peaks[f"centred, {name}"]
    assert used == pytest.approx(promise, rel=0.02)


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_take_no_chunk(peaks, dtype):
    folded, written = peaks[f"scoring, {dtype}"]
    assert folded <= ALLOWANCE, f"{folded / MIB:.0f} MiB, expected at most {ALLOWANCE / MIB:.0f}"
    assert CHUNK / 2 <= written <= CHUNK + ALLOWANCE, f"{written / MIB:.0f} MiB of written logits"


# --- pages of gradients


def mapping(address):
    """Return the kernel's lines about the mapping that holds an address, by their names."""
    found, inside = {}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, end = (int(bound, 16) for bound in first.split("-"))
            inside = start <= address < end
        elif inside:
            found[first] = rest
    return found


def lazily_free(address):
    """Return how many bytes of an address's mapping the kernel may take without writing them anywhere."""
    return int(mapping(address)["LazyFree:"][0]) * 1024


@pytest.fixture
def given_back():
    """Yield the list of pages of dropped gradients. Other tests' pages are not in it, and it leaves none."""
    memory.release()
    yield memory._given_back
    memory.release()


def gradient_memory(mib=64, dtype=torch.float32):
    return used_memory(torch.Size((mib, MIB // dtype.itemsize)), dtype, torch.device("cpu"))


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="a kernel without huge pages"
)
def test_large_blocks_ask_for_huge_pages(given_back):
    assert "hg" in mapping(gradient_memory().data_ptr() + 32 * MIB)["VmFlags:"]


@on_linux
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_gradient_that_was_dropped_makes_room_for_the_next(given_back, dtype):
    first = gradient_memory(64, dtype).fill_(1.0)
    address = first.data_ptr()
    other = gradient_memory(64, dtype)
    assert other.data_ptr() != address
    assert first.dtype == dtype and first.shape == (64, MIB // dtype.itemsize)
    assert lazily_free(address) == 0
    del first
    assert lazily_free(address) >= 62 * MIB  # the system may take them
    assert gradient_memory(40, dtype).data_ptr() == address  # this one is dropped at once
    assert gradient_memory(64, dtype).data_ptr() == address
    assert gradient_memory(31, dtype).data_ptr() != address  # half of its pages would lie idle
    del other
    assert len(given_back) == 2  # the two that were dropped last
    memory.release()
    small = gradient_memory(15, dtype)
    del small
    assert not given_back  # left to malloc


@on_linux
def test_whatever_refers_to_a_gradient_keeps_its_pages(given_back):
    leaf = torch.zeros(4, requires_grad=True)
    whole = gradient_memory(64).fill_(3.0)
    views = [whole[5:7], whole.numpy()[60:], whole.untyped_storage(), whole.view(torch.int32).T]
    leaf.grad = whole[0, :4]
    del whole
    while views:
        assert not given_back
        gradient_memory(64).fill_(7.0)
        given_back.clear()
        views.pop()
    assert (leaf.grad == 3).all()
    leaf.grad = None
    assert len(given_back) == 1


@on_linux
def test_a_second_step_takes_the_pages_of_the_first_ones_gradient(given_back):
    """From logits they are the gradient's own, from 16-bit weights those of columns in fp32."""
    logits = torch.randn(1, 64, 2**17, requires_grad=True)
    labels = torch.zeros(1, 64, dtype=torch.int64)
    shown = []
    for _ in range(2):
        logits.grad = None
        gk.fused_policy_loss(logits, labels, None, torch.ones(1)).loss.backward()
        shown.append((logits.grad.data_ptr(), logits.grad.clone()))
    assert shown[0][0] == shown[1][0] and torch.equal(shown[0][1], shown[1][1])
    memory.release()
    hidden, weight = torch.randn(2, 3, 256).bfloat16(), torch.randn(20_000, 256).bfloat16()
    labels, gradients = torch.randint(20_000, (2, 3)), []
    for _ in range(2):
        leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
        loss = gk.fused_linear_policy_loss(*leaves, labels, None, torch.ones(2)).loss
        loss.backward()
        gradients.append(leaves[1].grad)
        assert [len(pages) for pages in given_back] == [4 * ROUNDED_COLUMNS * 256]
    assert torch.equal(*gradients) and gradients[0].count_nonzero() > 0


# --- chunks of logits

WIDE = 2**18
"""A vocabulary size: a row of fp32 logits takes a MiB."""


def linear_call(tokens=64, **options):
    """Return results of a call; with the default ``tokens``, its chunk is too large for malloc to keep."""
    rng = generator(0)
    hidden = torch.randn(4, tokens // 4, 8, generator=rng).requires_grad_()
    weight = torch.randn(WIDE, 8, generator=rng).requires_grad_()
    labels = torch.randint(WIDE, (4, tokens // 4), generator=rng)
    advantages = torch.randn(4, generator=rng)
    out = gk.fused_linear_policy_loss(hidden, weight, labels, None, advantages, **options)
    out.loss.backward()
    return out.loss.detach(), out.logprobs, hidden.grad, weight.grad


@on_linux
def test_the_next_call_finds_the_chunk_again(given_back):
    fresh = linear_call()
    (pages,) = given_back
    assert len(pages) == 64 * WIDE * 4
    pages[:] = b"\xff" * len(pages)  # NaN in every dtype: nothing may be read before it is written
    for tokens in (64, 36, 64):
        again = linear_call(tokens)
        assert given_back == [pages]
    for before, after in zip(fresh, again, strict=True):
        assert torch.equal(before, after)
    linear_call(128)
    assert [len(each) for each in given_back] == [128 * WIDE * 4, 64 * WIDE * 4]
    memory.release()
    linear_call(12)
    assert not given_back  # left to malloc
    with torch.inference_mode():
        labels = torch.zeros(1, 64, dtype=torch.int64)
        gk.linear_token_logprobs(torch.randn(1, 64, 8), torch.randn(WIDE, 8), labels)
    linear_call()


if __name__ == "__main__":
    measure()
