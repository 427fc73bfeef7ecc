"""Log-probs of several ids per token and of all other ids together, against the formulas in fp64."""

import functools
import math

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.core.types import stats_dtype
from tests import oracle
from tests.accuracy import assert_draws_as_exact
from tests.cases import device_of, generator, scores_of

TRANSFORMED = {"logit_scale": -0.6, "softcap": 4.0, "temperature": 0.7}
by_entry = pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
by_set = pytest.mark.parametrize("within", [False, True], ids=["of all", "within"])


class Problem:
    """Ids, upstream gradients and inputs of a call; ``draw`` gives other inputs of the same size."""

    def __init__(self, K, *, V=613, dtype=torch.float32, linear=False, options=None, packed=False, draw=0):
        rng, fixed = generator(100 + draw), generator(K)
        tokens = (6,) if packed else (2, 3)
        if K == V:
            ids = torch.randperm(V, generator=fixed).expand(*tokens, V).clone()
        else:
            ids = torch.randint(0, V, (*tokens, K), generator=fixed)
            if K > 2:
                ids[..., K // 2] = ids[..., 0]  # repeated
                ids[torch.rand(ids.shape, generator=fixed) < 0.2] = -100
                ids.view(-1, K)[4] = -100  # no ids
                ids[(ids < 0) & (torch.arange(K) % 2 == 0)] = -1
        self.ids, self.options, self.linear = ids, options or {}, linear
        self.grads = [
            torch.randn(*shape, generator=fixed, dtype=torch.float64).to(stats_dtype(dtype))
            for shape in ((*tokens, K), tokens)
        ]
        shapes = {"logits": (*tokens, V)}
        if linear:
            shapes = {"hidden": (*tokens, 24), "weight": (V, 24), "bias": (V,)}
        self.inputs = {
            name: torch.randn(*shape, generator=rng, dtype=torch.float64) * (0.5 if name == "weight" else 2.0)
            for name, shape in shapes.items()
        }
        self.inputs = {name: value.to(dtype) for name, value in self.inputs.items()}

    def results(self, leaves, logprobs, tail):
        """Return log-probs, tail, and the inputs' gradients for the upstream gradients."""
        loss = (logprobs * self.grads[0].to(logprobs)).sum()
        if tail is not None:
            loss = loss + (tail.where(tail > -math.inf, 0.0) * self.grads[1].to(tail)).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        named = {"logprobs": logprobs, **{f"grad {n}": grad for n, grad in zip(leaves, grads, strict=True)}}
        named |= {} if tail is None else {"tail": tail}
        return {name: value.detach().cpu() for name, value in named.items()}

    def formulas(self, dtype, within):
        """Return the results of what a user would write in PyTorch."""
        leaves = {name: value.to(dtype, copy=True).requires_grad_() for name, value in self.inputs.items()}
        z = oracle.transformed(scores_of(leaves), 0, **self.options)
        chosen = torch.zeros(*z.shape[:-1], z.shape[-1] + 1, dtype=torch.bool)
        chosen = chosen.scatter_(-1, torch.where(self.ids >= 0, self.ids, z.shape[-1]), True)[..., :-1]
        some, whole = chosen.any(-1), chosen.all(-1)
        over = z.masked_fill(~chosen & some.unsqueeze(-1), -math.inf) if within else z
        logp = (z - over.logsumexp(-1, keepdim=True)).gather(-1, self.ids.clamp(min=0))
        tail = None
        if not within:
            rest = torch.where(whole.unsqueeze(-1), 0.0, z.masked_fill(chosen, -math.inf))
            tail = torch.where(some & ~whole, rest.logsumexp(-1) - z.logsumexp(-1), 0.0)
            tail = tail.masked_fill(whole, -math.inf)
        return self.results(leaves, torch.where(self.ids >= 0, logp, 0.0), tail)

    def ours(self, within, backend, **options):
        device = device_of(backend)
        leaves = {name: value.clone().to(device).requires_grad_() for name, value in self.inputs.items()}
        function = gk.linear_selected_logprobs if self.linear else gk.selected_logprobs
        out = function(
            **leaves, ids=self.ids.to(device), normalize_within=within, backend=backend, **self.options,
            **options,
        )  # fmt: skip
        assert (out.tail is None) == within
        return self.results(leaves, *out)


def check(K, backend, *, within=False, dtype=torch.float32, call=None, **kind):
    """Check that results are as exact as plain PyTorch's in the dtype of statistics, over a few draws."""
    problems = [Problem(K, dtype=dtype, draw=i, **kind) for i in range(2 if backend == "triton" else 4)]
    draws = [
        (
            functools.partial(problem.formulas, within=within),
            functools.partial(problem.ours, within, backend, **(call or {})),
        )
        for problem in problems
    ]
    assert_draws_as_exact(draws, dtype)


@by_set
@pytest.mark.parametrize("K", [1, 2, 20, 613])
def test_equals_the_formulas(K, within, backend):
    check(K, backend, within=within, options=TRANSFORMED)
    if K in (1, 20):
        check(K, backend, within=within)
    # chunks of four rows and of two
    chunks = {"max_chunk_bytes": 4 * 613 * 4}
    check(K, backend, within=within, linear=True, options=TRANSFORMED, call=chunks)


def test_a_thousand_ids(backend):
    check(1024, backend, V=4097)


@by_entry
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype, linear, backend):
    check(20, backend, dtype=dtype, linear=linear, packed=True)


# --- properties


@by_entry
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("gap", [7.0, 18.0, 32.0, None])
def test_the_tail_of_a_sure_token(gap, dtype, linear, backend):
    """In the end the token's log-prob underflows to 0, and log(1 - exp(0)) would be -inf."""
    gap, device = gap or (110.0 if dtype != torch.float64 else 800.0), device_of(backend)
    rows = torch.tensor([[gap, 1.0, 0.0, -2.0], [0.0, 1.0, 2.0, 3.0], [0.5, gap, 1.0, 0.0]], dtype=dtype)
    sure, upstream = torch.tensor([0, 2, 1]), torch.tensor([1.0, -0.5, 2.0])
    exact = rows.to(torch.float64, copy=True).requires_grad_()
    left = exact.masked_fill(torch.nn.functional.one_hot(sure, 4).bool(), -math.inf)
    tail = left.logsumexp(-1) - exact.logsumexp(-1)
    (tail * upstream.double()).sum().backward()
    for K in (1, 2):
        ids = sure.view(1, 3, 1).expand(1, 3, K).to(device)
        if linear:
            leaf = rows.T.contiguous().to(device).requires_grad_()
            hidden = torch.eye(3, dtype=dtype, device=device).unsqueeze(0)
            out = gk.linear_selected_logprobs(hidden, leaf, ids, backend=backend)
        else:
            leaf = rows.unsqueeze(0).to(device).requires_grad_()
            out = gk.selected_logprobs(leaf, ids, backend=backend)
        (out.tail * upstream.to(device)).sum().backward()
        grad = (leaf.grad.T if linear else leaf.grad[0]).cpu().double()
        eps, coarse = torch.finfo(out.tail.dtype).eps, torch.finfo(dtype).eps
        torch.testing.assert_close(out.tail[0].cpu().double(), tail.detach(), rtol=2 * eps, atol=2 * eps)
        # exp(tail) carries the tail's rounding
        torch.testing.assert_close(grad, exact.grad, rtol=2 * coarse, atol=2 * coarse + 2 * gap * eps)


@by_set
@pytest.mark.parametrize("K", [1, 2, 4])
def test_nan_only_in_rows_without_a_softmax(K, within, backend):
    """That is a row (with ``normalize_within`` a set of ids) of -inf alone, or with NaN or +inf."""
    device, V = device_of(backend), 4
    part = K if within else V
    rows = torch.tensor([1.0, -1.0, 0.5, 2.0]).repeat(4, 1)
    rows[1, :part], rows[2, 0], rows[3, 0] = -math.inf, math.nan, math.inf
    logits = rows.unsqueeze(0).to(device).requires_grad_()
    ids = torch.arange(K, device=device).expand(1, 4, K)
    out = gk.selected_logprobs(logits, ids, normalize_within=within, backend=backend)
    loss = (out.logprobs * torch.arange(1.0, K + 1, device=device)).sum()
    (loss + (0.0 if within or K == V else out.tail.sum())).backward()
    logprobs, (grad,) = out.logprobs[0], logits.grad
    assert logprobs[0].isfinite().all() and grad[0].isfinite().all()
    assert logprobs[1:].isnan().all() and grad[1:, :part].isnan().all() and (grad[1:, part:] == 0).all()
    assert within or out.tail[0].isnan().tolist() == [False, True, True, True]


@by_set
def test_rows_without_ids_or_gradient_are_inert(within, backend):
    problem = Problem(20)
    problem.inputs["logits"][1, 1] = math.nan
    assert (problem.ids[1, 1] < 0).all()
    ours = problem.ours(within, backend)
    assert all(value.isfinite().all() for value in ours.values())
    assert (ours["logprobs"][1, 1] == 0).all() and (ours["grad logits"][1, 1] == 0).all()
    for K in (1, 2):
        logits = torch.full((1, 1, 4), -math.inf).to(device_of(backend)).requires_grad_()
        ids = torch.arange(K, device=logits.device).view(1, 1, K)
        out = gk.selected_logprobs(logits, ids, normalize_within=within, backend=backend)
        (grad,) = torch.autograd.grad(out.logprobs, logits, torch.zeros_like(out.logprobs))
        assert (grad == 0).all()


def test_ids_with_a_sampling_mask(backend):
    logits = torch.randn(2, 3, 613, generator=generator(1)).to(device_of(backend))
    mask, ids = gk.sampling_mask(logits, top_k=40), logits.topk(8).indices
    cut = logits < logits.topk(40).values[..., -1:]
    results = []
    for how in ({"kept_mask": mask}, {}):
        leaf = logits.clone().requires_grad_()
        out = gk.selected_logprobs(
            leaf if how else leaf.masked_fill(cut, -math.inf), ids, **how, backend=backend
        )
        (out.logprobs.sum() + out.tail.sum()).backward()
        results.append((*out, leaf.grad))
    assert all((one - other).abs().max() < 1e-6 for one, other in zip(*results, strict=True))
    ids[0, 2, 3] = logits[0, 2].argmin()
    with pytest.raises(ValueError, match=rf"ids: got {int(ids[0, 2, 3])} at position \[0, 2\]"):
        gk.selected_logprobs(logits, ids, kept_mask=mask, backend=backend)
