"""Peak memory of the fused loss from hidden states: a chunk of logits, the gradients, and little else.

Each measurement is a process of its own: inputs are built, the high-water mark of its resident memory is
read, a forward and backward run, and it is read again. That mark (VmHWM, Linux) is what ``getrusage`` reports
too, except that a child's ru_maxrss starts at the peak of the process that started it, here all of pytest.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.ops.memory import Workspace

MIB = 2**20
# Schedule, dtype and number of sequences. A chunk holds 110 rows: whole sequences only where there are 12.
CASES = (
    ("auto", "fp32", 6),
    ("auto", "bf16", 6),
    ("aligned", "fp32", 12),
    ("deferred", "fp32", 6),
    ("frozen", "fp32", 6),
    ("two_pass", "fp32", 6),
)
# Schedules that keep, or may choose to keep, a further fp32 [V, H] accumulator.
FURTHER_ACCUMULATORS = {"auto": 1, "deferred": 1}
TOKENS, VOCABULARY, WIDTH = 768, 151936, 32
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Twice the allowance, for which a second chunk alive can't pass.
CHUNK = 64 * MIB
# Buffers of the matrix library, compacted rows, statistics per token, a slab of a raised weight: 10 MiB here.
ALLOWANCE = 32 * MIB
# Short enough to measure plain PyTorch, long enough for its logits to outweigh all else.
NAIVE_TOKENS = 256

# Two chunks of logits, had they to be written.
SCORED_TOKENS = 192

# Bytes per logit of plain PyTorch at its peak, in the backward of log_softmax: the logits, which a variable
# holds (4, or 2 in bf16); the log_softmax that its backward needs (4); the gradient of that, which gather's
# backward makes from zeros (4); the gradient of the logits, in bf16 of their fp32 copy, whose own 4 were
# released in the forward (4).
NAIVE_BYTES = {"fp32": 4 + 4 + 4 + 4, "bf16": 2 + 4 + 4 + 4}


def naive(hidden, weight, labels, old, advantages):
    logits = torch.nn.functional.linear(hidden, weight)
    logprobs = logits.float().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    ratio = (logprobs - old).mean(-1).exp()
    clipped = ratio.clamp(1 - 3e-4, 1 + 4e-4)
    (-torch.minimum(ratio * advantages, clipped * advantages).mean()).backward()


def ours(*arguments, **options):
    gk.fused_linear_policy_loss(*arguments, **options).loss.backward()


def promised(*arguments, **options):
    """What the package itself says it takes beyond inputs and gradients."""
    return gk.explain_schedule(*arguments, **options).peak_bytes


def inputs(tokens, vocabulary, dtype, sequences, trains_weight):
    """Nothing is clipped: ratios are far below 1 and advantages positive. So every row has a gradient."""
    generator = torch.Generator().manual_seed(0)
    shape = (sequences, tokens // sequences)
    # filled in place: a temporary would raise the mark beforehand
    hidden = torch.empty(*shape, WIDTH, dtype=dtype).normal_(generator=generator).requires_grad_()
    weight = torch.empty(vocabulary, WIDTH, dtype=dtype).normal_(std=0.1, generator=generator)
    labels = torch.randint(vocabulary, shape, generator=generator)
    return hidden, weight.requires_grad_(trains_weight), labels, torch.zeros(shape), torch.ones(sequences)


def resident(what):
    """Bytes of resident memory: "VmRSS" now, "VmHWM" at most so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{what}:")[1].split()[0]) * 1024


def child(contestant, tokens, dtype, sequences):
    """Print by how many bytes a forward and backward raise the peak, and what was promised."""
    plain, case = contestant == "naive", (DTYPES[dtype], int(sequences))

    def problem(*size):
        options = {} if plain else {"schedule": contestant, "max_chunk_bytes": CHUNK}
        return inputs(*size, *case, contestant != "frozen"), options

    call = naive if plain else ours
    arguments, options = problem(64, 1000)
    call(*arguments, **options)
    arguments, options = problem(int(tokens), VOCABULARY)
    promise = 0 if plain else promised(*arguments, **options)
    before = resident("VmHWM")
    # an earlier peak could hide what comes
    assert before - resident("VmRSS") < 4 * MIB
    call(*arguments, **options)
    assert bool((arguments[0].grad != 0).any(-1).all())
    print(resident("VmHWM") - before, promise)


def scoring_child(dtype):
    """Print by how many bytes scoring raises the peak, where no logits are written and where chunks are."""
    import gspo_kernels as gk
    from gspo_kernels import cpp

    torch.set_num_threads(2)
    hidden, weight, labels, *_ = inputs(SCORED_TOKENS, VOCABULARY, DTYPES[dtype], 8, False)
    gk.linear_token_logprobs(hidden.detach()[:, :1], weight, labels[:, :1], return_entropy=True)
    for _ in range(2):
        before = resident("VmHWM")
        gk.linear_token_logprobs(hidden.detach(), weight, labels, max_chunk_bytes=CHUNK, return_entropy=True)
        print(resident("VmHWM") - before)
        vars(cpp).pop("folds", None)


def measure(contestant, tokens, dtype, sequences):
    command = [sys.executable, __file__, contestant, str(tokens), dtype, str(sequences)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    used, promise = map(int, run.stdout.split())
    return used, promise


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "dtype", "sequences"), CASES)
def test_peak_is_a_chunk_and_the_gradients(schedule, dtype, sequences):
    itemsize = DTYPES[dtype].itemsize
    trained = 0 if schedule == "frozen" else VOCABULARY * WIDTH
    accumulators = FURTHER_ACCUMULATORS.get(schedule, 0) + (itemsize < 4)
    gradients = (TOKENS * WIDTH + trained) * itemsize
    limit = CHUNK + gradients + accumulators * trained * 4 + ALLOWANCE
    used, promise = measure(schedule, TOKENS, dtype, sequences)
    assert used <= limit, f"{used / MIB:.0f} MiB, expected at most {limit / MIB:.0f}"
    assert used <= promise + gradients + ALLOWANCE, f"{used / MIB:.0f} MiB, promised {promise / MIB:.0f}"
    assert used <= NAIVE_BYTES[dtype] * TOKENS * VOCABULARY / 10


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_take_no_chunk(dtype):
    run = subprocess.run(
        [sys.executable, __file__, "scoring", dtype], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    folded, written = map(int, run.stdout.split())
    assert folded <= ALLOWANCE, f"{folded / MIB:.0f} MiB, expected at most {ALLOWANCE / MIB:.0f}"
    assert CHUNK / 2 <= written <= CHUNK + ALLOWANCE, f"{written / MIB:.0f} MiB of written logits"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_plain_pytorch_takes(dtype):
    """The formula that ours is compared with, and the measurement itself."""
    expected = NAIVE_BYTES[dtype] * NAIVE_TOKENS * VOCABULARY
    assert measure("naive", NAIVE_TOKENS, dtype, 8)[0] == pytest.approx(expected, rel=0.05)


def mapping(address):
    """What the kernel says of the mapping that holds an address: its lines by their names."""
    found, inside = {}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            start, end = (int(bound, 16) for bound in first.split("-"))
            inside = start <= address < end
        elif inside:
            found[first[:-1]] = rest
    return found


def lazily_free(address):
    """Bytes of the mapping that holds an address that the kernel may take without writing them anywhere."""
    return int(mapping(address)["LazyFree"].split()[0]) * 1024


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="a kernel without huge pages"
)
def test_large_blocks_ask_for_huge_pages():
    from gspo_kernels.ops.memory import used_memory

    memory = used_memory(torch.Size((64, MIB // 4)), torch.float32, torch.device("cpu"))
    assert memory.shape == (64, MIB // 4) and memory.dtype == torch.float32
    assert "hg" in mapping(memory.data_ptr() + 32 * MIB)["VmFlags"].split()


@pytest.fixture
def given_back():
    """Pages of gradients that were dropped, none of them from or for other tests."""
    from gspo_kernels.ops import memory

    memory.release()
    yield memory._given_back
    memory.release()


def gradient_memory(mib=64, dtype=torch.float32):
    from gspo_kernels.ops.memory import used_memory

    return used_memory(torch.Size((mib, MIB // dtype.itemsize)), dtype, torch.device("cpu"))


on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are kept on Linux")


@on_linux
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_gradient_that_was_dropped_makes_room_for_the_next(given_back, dtype):
    first = gradient_memory(64, dtype).fill_(1.0)
    address = first.data_ptr()
    beside = gradient_memory(64, dtype)
    assert (
        beside.data_ptr() != address and first.dtype == dtype and first.shape == (64, MIB // dtype.itemsize)
    )
    del first
    assert gradient_memory(40, dtype).data_ptr() == address  # dropped at once
    assert gradient_memory(64, dtype).data_ptr() == address
    assert gradient_memory(31, dtype).data_ptr() != address  # half of its pages would lie idle
    del beside
    assert len(given_back) == 1


@on_linux
def test_a_sum_that_was_rounded_makes_room_for_the_next(given_back):
    hidden, weight = torch.randn(2, 3, 256).bfloat16(), torch.randn(20_000, 256).bfloat16()
    labels, gradients = torch.randint(20_000, (2, 3)), []
    for _ in range(2):
        leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
        loss = gk.fused_linear_policy_loss(*leaves, labels, None, torch.ones(2), schedule="two_pass").loss
        loss.backward()
        gradients.append(leaves[1].grad)
        assert len(given_back) == 1 and len(given_back[0]) == 4 * weight.numel()
    assert torch.equal(*gradients) and gradients[0].count_nonzero() > 0


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
def test_the_system_may_take_the_pages_of_a_dropped_gradient(given_back):
    memory = gradient_memory(64).fill_(1.0)
    address = memory.data_ptr()
    assert lazily_free(address) == 0
    del memory
    assert lazily_free(address) >= 62 * MIB
    from gspo_kernels.ops import memory

    memory.release()
    assert not given_back


@on_linux
def test_small_gradients_are_left_to_malloc(given_back):
    del_me = gradient_memory(15)
    del del_me
    assert not given_back


@on_linux
def test_a_second_step_finds_the_first_one_s_gradient(given_back):
    logits = torch.randn(1, 64, 2**17, requires_grad=True)
    labels = torch.zeros(1, 64, dtype=torch.int64)

    def gradient():
        logits.grad = None
        gk.fused_policy_loss(logits, labels, None, torch.ones(1)).loss.backward()
        return logits.grad

    expected = gradient().clone()
    address = logits.grad.data_ptr()
    assert torch.equal(gradient(), expected) and logits.grad.data_ptr() == address


@pytest.fixture
def kept():
    """What stays between calls, nothing of it from or for other tests."""
    from gspo_kernels.ops import memory

    memory.release()
    yield memory._kept
    memory.release()


def linear_call(tokens=64, **options):
    """Loss and gradients of a call whose chunk takes more than malloc keeps by itself."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, tokens // 4, 8, generator=generator).requires_grad_()
    weight = torch.randn(2**20, 8, generator=generator).requires_grad_()
    labels = torch.randint(2**20, (4, tokens // 4), generator=generator)
    out = gk.fused_linear_policy_loss(
        hidden, weight, labels, None, torch.randn(4, generator=generator), **options
    )
    out.loss.backward()
    return out.loss.detach(), out.logprobs, hidden.grad, weight.grad


def test_the_next_call_finds_the_chunk_again(kept):
    fresh = linear_call()
    (block,) = kept
    address = block.data_ptr()
    block.fill_(255)  # NaN in every dtype: nothing may be read before it is written
    del block
    for tokens in (64, 32, 64):
        again = linear_call(tokens)
        assert [each.data_ptr() for each in kept] == [address]
    for before, after in zip(fresh, again, strict=True):
        assert torch.equal(before, after)
    linear_call(128)
    assert len(kept) == 1 and kept[0].numel() >= 128 * 2**20 * 4


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("tokens", "free"), [(48, 0), (128, 256)])
def test_the_system_may_take_some_of_what_is_kept(kept, monkeypatch, tokens, free):
    from gspo_kernels.ops import memory

    monkeypatch.setattr(memory, "host_memory", lambda: 4096 * MIB)  # a default chunk: 256 MiB at most
    linear_call(tokens, max_chunk_bytes=512 * MIB)
    (block,) = kept
    assert block.numel() == tokens * 4 * MIB
    assert (free - 1) * MIB <= lazily_free(block.data_ptr() + block.numel() - MIB) <= free * MIB


def test_calls_at_the_same_time_share_no_memory(kept):
    one, other = Workspace(), Workspace()
    one.rows(16, MIB, torch.float32)
    one.close()
    first, second = (workspace.rows(16, MIB, torch.float32) for workspace in (one, other))
    assert first.data_ptr() != second.data_ptr()
    one.close()
    other.close()
    assert len(kept) == 1


def test_what_inference_mode_kept_serves_training(kept):
    with torch.inference_mode():
        gk.linear_token_logprobs(
            torch.randn(1, 64, 8), torch.randn(2**20, 8), torch.zeros(1, 64, dtype=torch.int64)
        )
    linear_call()


def test_little_memory_is_left_to_malloc(kept):
    linear_call(16, max_chunk_bytes=4 * MIB)
    assert not kept


if __name__ == "__main__":
    scoring_child(sys.argv[2]) if sys.argv[1] == "scoring" else child(*sys.argv[1:])
