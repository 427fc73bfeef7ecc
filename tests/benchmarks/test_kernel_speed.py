"""Speed of single kernels for pytest-benchmark.

``pytest tests/benchmarks/test_kernel_speed.py --benchmark-only --benchmark-autosave`` keeps a run; add
``--benchmark-compare`` to compare a later run with it. Without these flags each kernel runs once on a small
shape. Other tests check the answers; ``python -m benchmarks`` compares with other packages.
"""

import pytest
import torch

import gspo_kernels as gk
from benchmarks.judging import posed
from benchmarks.measure import synchronize
from gspo_kernels.backends import dispatch as backends
from gspo_kernels.core.types import LogitRows, LogitTransform, RowGradients

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


@pytest.fixture
def timed(request, benchmark):
    """Return whether ``--benchmark-only`` is set, and a function that runs and times a call."""
    asked = request.config.getoption("benchmark_only", False)
    benchmark.disabled = not asked

    def run(call):
        def waited():
            result = call()
            synchronize(DEVICE)
            return result

        return benchmark.pedantic(waited, rounds=10, warmup_rounds=1)

    return asked, run


KERNELS = {
    "logprobs_forward": lambda kernel, rows, stats, c, out: kernel(rows, False),
    "logprobs_forward with entropy": lambda kernel, rows, stats, c, out: kernel(rows, True),
    "logprobs_backward": lambda kernel, rows, stats, c, out: kernel(rows, stats, RowGradients(c), out),
    "logprobs_and_grad": lambda kernel, rows, stats, c, out: kernel(rows, c, out),
    "scale_": lambda kernel, rows, stats, c, out: kernel(rows.logits, torch.tensor(0.5, device=DEVICE)),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def test_kernel(timed, name, dtype):
    asked, run = timed
    backend = backends.load("triton" if GPU else "cpp")
    N, V = (1024, 32000) if asked else (8, 300)
    generator = torch.Generator(DEVICE).manual_seed(0)
    logits = torch.randn(1, N, V, generator=generator, device=DEVICE).to(dtype)
    labels = torch.randint(V, (1, N), generator=generator, device=DEVICE)
    c, out = torch.randn(1, N, generator=generator, device=DEVICE), torch.zeros_like(logits)
    rows = LogitRows(logits, labels, LogitTransform(), -100)
    stats = backend.logprobs_forward(rows, False)
    kernel = getattr(backend, name.split()[0])
    run(lambda: KERNELS[name](kernel, rows, stats, c, out))
    assert out.isfinite().all() and logits.isfinite().all()


@pytest.mark.parametrize("schedule", ("", "aligned", "deferred", "two_pass"))
def test_from_hidden_states(timed, schedule):
    """Without a schedule only log-probs are computed; with one, a loss and its gradients."""
    size = (512, 16000, 512, 4) if timed[0] else (16, 300, 16, 2)
    (N, V, H, B), dtype = size, torch.bfloat16 if GPU else torch.float32
    generator = torch.Generator(DEVICE).manual_seed(0)
    inputs = tuple(torch.randn(n, H, generator=generator, device=DEVICE).to(dtype) for n in (N, V))
    problem = posed("hidden", inputs, B, generator)
    leaves, terms = problem.leaves(), (problem.labels, problem.old_logprobs, problem.advantages)

    def run():
        if not schedule:
            return [gk.linear_token_logprobs(*problem.inputs, problem.labels).logprobs]
        loss = gk.fused_linear_policy_loss(*leaves, *terms, schedule=schedule).loss
        return torch.autograd.grad(loss, leaves)

    assert all(one.isfinite().all() for one in timed[1](run))


def test_policy_loss(timed):
    """Everything except the log-probs is computed: the least that a loss costs."""
    leaf = (-torch.rand(64, 1024 if timed[0] else 16, device=DEVICE)).requires_grad_()
    terms = (leaf.detach(), torch.ones(64, device=DEVICE))
    assert timed[1](lambda: torch.autograd.grad(gk.policy_loss(leaf, *terms).loss, leaf))[0].isfinite().all()
