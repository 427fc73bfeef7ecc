"""What only a GPU shows: races, large tensors, another device, graphs, and the promised peak memory.

``GSPO_KERNELS_REHEARSE=1`` runs the code on tiny CPU tensors, interpreted.
"""

import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest
import torch

import gspo_kernels as gk
from tests.backends.row_calls import Rows, chunk_of
from tests.draws import shifted_seed
from tests.gpu.calls import CALLS, CAPTURED, Scale, chunk, inputs_of, problem, step

kernels = pytest.importorskip("gspo_kernels.backends.triton", reason="needs Triton")
pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def device():
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if os.environ.get("GSPO_KERNELS_REHEARSE") == "1":
        return torch.device("cpu")
    pytest.skip("no CUDA device: torch.cuda.is_available() is False")


@pytest.fixture(scope="module")
def scale(device):
    return Scale(4, 300, 32, 2) if device.type == "cpu" else Scale(512, 151936, 1024, 50)


# --- the same call gives the same bits, whatever else the device does; compute-sanitizer finds nothing


@pytest.mark.parametrize("name", CALLS)
def test_every_run_gives_the_same_bits(name, device, scale):
    """Other work in a second stream changes when blocks of threads run."""
    wanted = [one.clone() for one in CALLS[name](device, scale)]
    assert all(one.isfinite().all() for one in wanted)
    noise = torch.randn(2048, 2048, device=device) if device.type == "cuda" else None
    stream = torch.cuda.Stream() if noise is not None else None
    for run in range(scale.runs):
        if stream is not None and run % 2:
            with torch.cuda.stream(stream):
                for _ in range(run % 7):
                    noise @ noise
        for got, want in zip(CALLS[name](device, scale), wanted, strict=True):
            assert torch.equal(got, want), run


@pytest.mark.parametrize("tool", ("memcheck", "racecheck", "synccheck", "initcheck"))
def test_compute_sanitizer_finds_nothing(tool, device):
    sanitizer = which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("compute-sanitizer is not installed")
    # racecheck and initcheck stop at cuBLAS's own kernels
    ours_alone = tool in ("racecheck", "initcheck")
    names = [name for name in CALLS if not (ours_alone and "hidden" in name)]
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "tests.gpu.calls"]
    # memory that torch keeps would hide an access beyond a tensor
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    run = subprocess.run(
        [*command, *names], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]


@pytest.mark.parametrize("V", (32000, 50257, 151936))
def test_narrowing_in_place_races_with_nothing(V, device, scale):
    """A row's 16-bit gradient overwrites its own fp32 logits; the interpreter would show one order only."""
    tokens, V = (1024, V) if device.type == "cuda" else (2, V // 100)
    rng = torch.Generator(device).manual_seed(shifted_seed(0))
    logits = torch.randn(1, tokens, V, device=device, generator=rng)
    labels = torch.randint(0, V, (1, tokens), device=device, generator=rng)
    grad, rows = torch.ones(1, tokens, device=device), Rows("triton")
    stats = rows.forward(logits, labels, entropy=False)
    want = rows.backward(logits, labels, stats, grad, out=torch.empty_like(logits, dtype=torch.bfloat16))
    for _ in range(min(scale.runs, 20)):
        chunk, out = chunk_of(logits, torch.bfloat16)
        assert torch.equal(rows.backward(chunk, labels, stats, grad, out=out), want)
        chunk, out = chunk_of(logits, torch.bfloat16)
        torch.testing.assert_close(rows.and_grad(chunk, labels, grad, out=out)[1], want)


# --- large tensors, another device, graphs, memory


@pytest.mark.parametrize("name", CALLS)
def test_a_device_that_is_not_the_current_one(name, device, scale):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    wanted = CALLS[name](device, scale)
    with torch.cuda.device(0):
        for got, want in zip(CALLS[name](torch.device("cuda", 1), scale), wanted, strict=True):
            assert got.device.index == 1
            torch.testing.assert_close(got.cpu(), want.cpu())


def test_more_elements_than_an_int32_counts(device):
    """The last sequences are beyond element 2^31; results equal those of these sequences only."""
    V = 151936 if device.type == "cuda" else 300
    T = 2**31 // (4 * V) + 8 if device.type == "cuda" else 4
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 14 * 2**30:
        pytest.skip("needs 14 GiB of free memory")
    logits, labels, old, advantages = problem(device, 4 * T, V)
    advantages[3] = -0.5
    if device.type == "cuda":
        assert logits.numel() > 2**31 and logits[3, -1, 0].storage_offset() > 2**31
    leaf = logits.requires_grad_()
    out = gk.fused_policy_loss(leaf, labels, old, advantages, backend="triton", normalizer=1.0)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    for one in (slice(0, 1), slice(3, 4)):
        few = logits[one].detach().requires_grad_()
        terms = labels[one], old[one], advantages[one]
        alone = gk.fused_policy_loss(few, *terms, backend="triton", normalizer=1.0)
        assert torch.equal(out.logprobs[one], alone.logprobs)
        assert torch.equal(grad[one], torch.autograd.grad(alone.loss, few)[0])


def captured(run, device):
    """Capture a step in a graph; return its outputs, and what replays it. A rehearsal runs the step again."""
    if device.type != "cuda":
        outputs = run()
        return outputs, lambda: [one.copy_(new) for one, new in zip(outputs, run(), strict=True)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    return outputs, graph.replay


@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize(("kind", "options"), CAPTURED)
def test_a_captured_graph_replays_forward_and_backward(kind, options, packed, device, scale):
    """A step that reads nothing from the device can be captured. Replays see other logits, labels, old
    log-probs, advantages, masks and lengths, and give the bits of a call.
    """
    if kind == "hidden":
        scale = scale._replace(vocabulary=min(scale.vocabulary, 32000))
        options = options | ({} if "memory" in options else chunk(scale))
    static = inputs_of(device, scale, kind, packed, 0)
    outputs, replay = captured(lambda: step(kind, static, **options), device)
    for seed in (0, 1, 2):
        values = inputs_of(device, scale, kind, packed, seed)
        with torch.no_grad():
            for name, value in static.items():
                value.copy_(values[name])
        replay()
        for got, want in zip(outputs, step(kind, values, **options), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("schedule", ("auto", "aligned", "deferred", "two_pass"))
def test_peak_memory_equals_the_plan(schedule, device, scale):
    """The peak is at most a chunk, the schedule's extra, the gradients, and 32 MiB that libraries keep."""
    if device.type != "cuda":
        pytest.skip("the allocator's peak is CUDA's")
    (hidden, weight), labels, old, advantages = problem(device, 8192, 65536, 512)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    options = {"schedule": schedule, "max_chunk_bytes": 2**30}
    terms = (labels, old, advantages)

    def run():
        loss = gk.fused_linear_policy_loss(*leaves, *terms, **options).loss
        return torch.autograd.grad(loss, leaves)

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    used = torch.cuda.max_memory_allocated() - before
    promise = gk.explain_schedule(*leaves, *terms, **options).peak_bytes
    gradients = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    assert used <= promise + gradients + 32 * 2**20
