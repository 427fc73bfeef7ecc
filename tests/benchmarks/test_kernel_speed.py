"""Speed of single kernels for pytest-benchmark.

``pytest tests/benchmarks/test_kernel_speed.py --benchmark-only --benchmark-autosave`` keeps a run; one
with ``--benchmark-compare`` later stands beside it. Without the flag each runs once, on a small shape.
Whether answers are right is tested elsewhere; how fast others are is for ``python -m benchmarks``.
"""

import pytest
import torch

import gspo_kernels as gk
from benchmarks import problem as gspo
from benchmarks.measure import synchronize
from gspo_kernels.ops import backends
from gspo_kernels.types import LogitTransform

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
BACKEND = "triton" if GPU else "cpp"
PLAIN = LogitTransform()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture
def timed(request, benchmark):
    """Rounds that count only where they were asked for."""
    asked = request.config.getoption("benchmark_only", False)
    benchmark.disabled = not asked

    def run(call):
        def waited():
            call()
            synchronize(DEVICE)

        return benchmark.pedantic(waited, rounds=10, warmup_rounds=1)

    return asked, run


@pytest.fixture(params=DTYPES)
def rows(request, timed):
    """(backend, logits, labels, coefficients, out)"""
    N, V = (1024, 32000) if timed[0] else (8, 300)
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = torch.randn(1, N, V, generator=generator, device=DEVICE).to(DTYPES[request.param])
    labels = torch.randint(V, (1, N), generator=generator, device=DEVICE)
    c = torch.randn(1, N, generator=generator, device=DEVICE)
    return backends.load(BACKEND), logits, labels, c, torch.empty_like(logits)


def test_logprobs_forward(timed, rows):
    backend, logits, labels, *_ = rows
    timed[1](lambda: backend.logprobs_forward(logits, labels, PLAIN, ignore_index=-100, entropy=False))


def test_logprobs_forward_with_entropy(timed, rows):
    backend, logits, labels, *_ = rows
    timed[1](lambda: backend.logprobs_forward(logits, labels, PLAIN, ignore_index=-100, entropy=True))


def test_logprobs_backward(timed, rows):
    backend, logits, labels, c, out = rows
    stats = backend.logprobs_forward(logits, labels, PLAIN, ignore_index=-100, entropy=False)
    terms = (logits, labels, stats, c, None, None, PLAIN)
    timed[1](lambda: backend.logprobs_backward(*terms, ignore_index=-100, out=out))
    assert out.isfinite().all()


def test_logprobs_and_grad(timed, rows):
    backend, logits, labels, c, out = rows
    timed[1](lambda: backend.logprobs_and_grad(logits, labels, c, PLAIN, ignore_index=-100, out=out))
    assert out.isfinite().all()


@pytest.mark.parametrize("factor", (1.0, 0.5))
def test_scale(timed, rows, factor):
    backend, logits, *_ = rows
    number = torch.tensor(factor, device=DEVICE)
    timed[1](lambda: backend.scale_(logits, number))


@pytest.fixture
def hidden(timed):
    size = (512, 16000, 512, 4) if timed[0] else (16, 300, 16, 2)
    return gspo.draw("hidden", *size, torch.bfloat16 if GPU else torch.float32, DEVICE)


def test_linear_token_logprobs(timed, hidden):
    timed[1](lambda: gk.linear_token_logprobs(*hidden.inputs, hidden.labels))


@pytest.mark.parametrize("schedule", ("aligned", "deferred", "two_pass"))
def test_fused_linear_policy_loss(timed, hidden, schedule):
    leaves = hidden.leaves()
    terms = (hidden.labels, hidden.old_logprobs, hidden.advantages)

    def run():
        loss = gk.fused_linear_policy_loss(*leaves, *terms, schedule=schedule).loss
        return torch.autograd.grad(loss, leaves)

    timed[1](run)


def test_policy_loss(timed):
    """Everything but log-probs: what a loss costs at least."""
    logprobs = -torch.rand(64, 1024 if timed[0] else 16, device=DEVICE)
    leaf, advantages = logprobs.requires_grad_(), torch.ones(64, device=DEVICE)

    def run():
        return torch.autograd.grad(gk.policy_loss(leaf, leaf.detach(), advantages).loss, leaf)

    timed[1](run)
