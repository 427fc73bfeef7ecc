"""Large tensors, another device, graphs, and the memory that was promised."""

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.types import LogitTransform
from tests.gpu.calls import CALLS, problem

kernels = pytest.importorskip("gspo_kernels.kernels", reason="needs Triton")
PLAIN = LogitTransform()


@pytest.mark.parametrize("name", CALLS)
def test_a_device_that_is_not_the_current_one(name, device, scale):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    wanted = CALLS[name](device, scale)
    with torch.cuda.device(0):
        for got, want in zip(CALLS[name](torch.device("cuda", 1), scale), wanted, strict=True):
            assert got.device.index == 1
            torch.testing.assert_close(got.cpu(), want.cpu())


def _rows(logits, labels, old, advantages, which):
    """Loss terms of some sequences alone."""
    leaf = logits[which].detach().requires_grad_()
    out = gk.fused_policy_loss(
        leaf, labels[which], old[which], advantages[which], backend="triton", normalizer=1.0
    )
    return out.logprobs, torch.autograd.grad(out.loss, leaf)[0]


def test_more_elements_than_an_int32_counts(device):
    """The last sequences lie beyond element 2^31; alone they give the same bits."""
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
    for which in (slice(0, 1), slice(3, 4)):
        logprobs, alone = _rows(logits, labels, old, advantages, which)
        assert torch.equal(out.logprobs[which], logprobs)
        assert torch.equal(grad[which], alone)


def test_more_rows_than_a_grid_dimension_takes(device):
    """65,535 is the limit of grid y; rows lie along x."""
    N, V = (70_000, 1000) if device.type == "cuda" else (6, 10)
    logits = torch.randn(1, N, V, device=device)
    labels = torch.randint(V, (1, N), device=device)
    got = kernels.logprobs_forward(logits, labels, PLAIN, ignore_index=-100, entropy=False).logprobs
    want = logits.double().log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    plain = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    budget = 2 * (plain - want).abs().max() + torch.finfo(torch.float32).eps * want.abs().max()
    assert (got - want).abs().max() <= budget


def test_a_captured_graph_replays_the_loss(device, scale):
    """From logits nothing is read from the device, so a step can be captured; it sees new logits."""
    if device.type != "cuda":
        pytest.skip("graphs are CUDA's")
    logits, labels, old, advantages = problem(device, scale.tokens, scale.vocabulary)
    other, *_ = problem(device, scale.tokens, scale.vocabulary, seed=1)
    static = logits.clone().requires_grad_()

    def step():
        loss = gk.fused_policy_loss(static, labels, old, advantages, backend="triton").loss
        return loss.detach(), torch.autograd.grad(loss, static)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss, grad = step()
    for values in (logits, other):
        with torch.no_grad():
            static.copy_(values)
        graph.replay()
        want_loss, want_grad = step()
        assert torch.equal(loss, want_loss) and torch.equal(grad, want_grad)


@pytest.mark.parametrize("schedule", ("auto", "aligned", "deferred", "two_pass"))
def test_peak_memory_is_what_was_promised(schedule, device, scale):
    """A chunk, the schedule's extra and the gradients; 32 MiB for what libraries keep."""
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
