"""Log-probs of several ids per token, and the log of what they leave, against the formulas in fp64."""

import math

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.types import stats_dtype
from tests.accuracy import Spread, assert_as_exact, differences
from tests.cases import LAYOUTS, device_of, generator

OPTIONS = {
    "plain": {},
    "transformed": {"logit_scale": -0.6, "softcap": 4.0, "temperature": 0.7},
}
DRAWS = 4


class Problem:
    """Ids, upstream gradients and inputs of a call; ``draw`` gives other inputs of the same size."""

    def __init__(
        self, K, *, V=613, dtype=torch.float32, linear=False, options="plain", layout="padded", draw=0
    ):
        rng, fixed = generator(100 + draw), generator(K)
        tokens = (2, 3) if layout == "padded" else (6,)
        if K == V:
            ids = torch.randperm(V, generator=fixed).expand(*tokens, V).clone()
        else:
            ids = torch.randint(0, V, (*tokens, K), generator=fixed)
            if K > 2:
                ids[..., K // 2] = ids[..., 0]  # twice
                ids[torch.rand(ids.shape, generator=fixed) < 0.2] = -100
                ids.view(-1, K)[4] = -100  # nothing
        self.ids, self.options, self.linear, self.vocabulary = ids, dict(OPTIONS[options]), linear, V
        kind = torch.float64
        self.grads = (
            torch.randn(ids.shape, generator=fixed, dtype=kind).to(stats_dtype(dtype)),
            torch.randn(tokens, generator=fixed, dtype=kind).to(stats_dtype(dtype)),
        )
        if linear:
            shapes = {"hidden": (*tokens, 24), "weight": (V, 24), "bias": (V,)}
        else:
            shapes = {"logits": (*tokens, V)}
        self.inputs = {
            name: ((0.5 if name == "weight" else 2.0) * torch.randn(*shape, generator=rng, dtype=kind)).to(
                dtype
            )
            for name, shape in shapes.items()
        }

    def formulas(self, dtype, within):
        """What a user would write in PyTorch, and its gradients; in ``dtype``, for the tail in fp64 sums."""
        leaves = {name: value.to(dtype, copy=True).requires_grad_() for name, value in self.inputs.items()}
        x = leaves["logits"] if not self.linear else leaves["hidden"] @ leaves["weight"].T + leaves["bias"]
        z = x * self.options.get("logit_scale", 1.0)
        if "softcap" in self.options:
            z = self.options["softcap"] * torch.tanh(z / self.options["softcap"])
        z = z / self.options.get("temperature", 1.0)
        chosen = torch.zeros(*z.shape[:-1], z.shape[-1] + 1, dtype=torch.bool)
        chosen = chosen.scatter_(-1, torch.where(self.ids >= 0, self.ids, z.shape[-1]), True)[..., :-1]
        over = z.masked_fill(~chosen, -math.inf) if within else z
        some = (self.ids >= 0).any(-1)
        logp = (z - torch.where(some.unsqueeze(-1), over, z).logsumexp(-1, keepdim=True)).gather(
            -1, self.ids.clamp(min=0)
        )
        logprobs = torch.where(self.ids >= 0, logp, 0.0)
        loss = (logprobs * self.grads[0].to(dtype)).sum()
        tail = None
        if not within:
            lefts = torch.where(chosen.all(-1, keepdim=True), 0.0, z.masked_fill(chosen, -math.inf))
            tail = torch.where(some & ~chosen.all(-1), lefts.logsumexp(-1) - z.logsumexp(-1), 0.0)
            loss = loss + (tail * self.grads[1].to(dtype)).sum()
            tail = torch.where(chosen.all(-1), -math.inf, tail)
        grads = torch.autograd.grad(loss, list(leaves.values()))
        named = {"logprobs": logprobs, **{f"grad {n}": g for n, g in zip(leaves, grads, strict=True)}}
        if tail is not None:
            named["tail"] = tail
        return {name: value.detach() for name, value in named.items()}

    def ours(self, within, backend, **options):
        device = device_of(backend)
        leaves = {name: value.clone().to(device).requires_grad_() for name, value in self.inputs.items()}
        arguments = {"ids": self.ids.to(device), "normalize_within": within, "backend": backend}
        function = gk.linear_selected_logprobs if self.linear else gk.selected_logprobs
        out = function(**leaves, **arguments, **self.options, **options)
        loss = (out.logprobs * self.grads[0].to(device)).sum()
        if out.tail is not None and self.ids.shape[-1] < self.vocabulary:
            loss = loss + (out.tail * self.grads[1].to(device)).sum()
        assert (out.tail is None) == within
        loss.backward()
        named = {"logprobs": out.logprobs, **{f"grad {name}": leaf.grad for name, leaf in leaves.items()}}
        if out.tail is not None:
            named["tail"] = out.tail
        return {name: value.detach().cpu() for name, value in named.items()}


def check(K, backend, *, within=False, dtype=torch.float32, call=None, first=0, **kind):
    """As exact as plain PyTorch in the statistics' dtype, over a few draws from the ``first`` on."""
    errors, ours, exacts = {}, {}, {}
    for draw in range(first, first + (2 if backend == "triton" else DRAWS)):
        problem = Problem(K, dtype=dtype, draw=draw, **kind)
        exact = problem.formulas(torch.float64, within)
        in_double = dtype == torch.float64
        plain = problem.formulas(torch.float32 if in_double else stats_dtype(dtype), within)
        scale = 2 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps if in_double else 1.0
        for name, got in problem.ours(within, backend, **(call or {})).items():
            want = exact[name]
            assert got.shape == want.shape, name
            assert torch.equal(got == -math.inf, want == -math.inf), name
            finite = want.masked_fill(want == -math.inf, 0.0)
            usual = plain[name].double().masked_fill(want == -math.inf, 0.0)
            errors.setdefault(name, []).append(scale * (usual - finite))
            ours.setdefault(name, []).append(got.masked_fill(got == -math.inf, 0.0))
            exacts.setdefault(name, []).append(finite)
    for name, results in ours.items():
        by_row = name in ("grad logits", "grad hidden", "grad weight")
        eps = torch.finfo(results[0].dtype).eps
        spread = Spread.of(errors[name], by_row=by_row)
        assert_as_exact(name, differences(results, exacts[name]), spread, exacts[name], eps)


@pytest.mark.parametrize("within", [False, True], ids=["of all", "within"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("K", [1, 2, 20, 128, 613])
def test_from_logits(K, options, within, backend):
    check(K, backend, within=within, options=options)


@pytest.mark.parametrize("within", [False, True], ids=["of all", "within"])
@pytest.mark.parametrize("K", [1, 2, 20, 128, 613])
def test_from_hidden_states(K, within, backend):
    # chunks of four rows and of two
    check(
        K, backend, within=within, linear=True, options="transformed", call={"max_chunk_bytes": 4 * 613 * 4}
    )


def test_a_thousand_ids(backend):
    check(1024, backend, V=4097)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes_and_layouts(dtype, linear, layout, backend):
    check(20, backend, dtype=dtype, linear=linear, layout=layout)


# --- what must hold


@pytest.mark.parametrize("left", [1e-3, 1e-8, 1e-14, 1e-25])
@pytest.mark.parametrize("K", [1, 4])
def test_a_small_tail_keeps_its_relative_accuracy(left, K, backend):
    logits = torch.zeros(1, 2, 1009, dtype=torch.float64)
    ids = torch.arange(5, 5 + K).expand(1, 2, K)
    logits[..., 5 : 5 + K] = math.log((1009 - K) / left / K)
    logits = logits.float().to(device_of(backend)).requires_grad_()
    odds = (1009 - K) / (K * logits[0, 0, 5].double().exp().item())
    tail = gk.selected_logprobs(logits, ids.to(logits.device), backend=backend).tail
    expected = math.log(odds) - math.log1p(odds)
    assert tail.double().sub(expected).abs().max() < 4 * torch.finfo(torch.float32).eps * (1 + abs(expected))
    tail.sum().backward()
    # each of those that are left has its share of what moves the tail: (1 - tail) / their number
    elsewhere = logits.grad[..., 100]
    assert (elsewhere * (1009 - K) - 1 / (1 + odds)).abs().max() < 1e-5


@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("K", [1, 2])
def test_the_tail_of_a_sure_token(K, dtype, linear, backend):
    """Its log-prob underflows to 0, and log(1 - exp(0)) would be -inf."""
    gap = 110.0 if dtype != torch.float64 else 800.0
    rows = torch.tensor([[gap, 1.0, 0.0, -2.0], [0.0, 1.0, 2.0, 3.0], [0.5, gap, 1.0, 0.0]], dtype=dtype)
    ids = torch.tensor([0, 2, 1]).view(1, 3, 1).expand(1, 3, K)
    exact = rows.to(torch.float64, copy=True).requires_grad_()
    left = exact.masked_fill(torch.nn.functional.one_hot(ids[0, :, 0], 4).bool(), -math.inf)
    tail = left.logsumexp(-1) - exact.logsumexp(-1)
    upstream = torch.tensor([1.0, -0.5, 2.0])
    (tail * upstream.double()).sum().backward()

    device = device_of(backend)
    if linear:
        leaf = rows.T.contiguous().to(device).requires_grad_()
        hidden = torch.eye(3, dtype=dtype, device=device).unsqueeze(0)
        out = gk.linear_selected_logprobs(hidden, leaf, ids.to(device), backend=backend)
    else:
        leaf = rows.unsqueeze(0).to(device).requires_grad_()
        out = gk.selected_logprobs(leaf, ids.to(device), backend=backend)
    (out.tail * upstream.to(device)).sum().backward()
    grad = leaf.grad.T if linear else leaf.grad[0]
    eps, coarse = torch.finfo(out.tail.dtype).eps, torch.finfo(dtype).eps
    torch.testing.assert_close(out.tail[0].cpu().double(), tail.detach(), rtol=2 * eps, atol=2 * eps)
    # exp(tail) is as far off as the tail's rounding says
    torch.testing.assert_close(
        grad.cpu().double(), exact.grad, rtol=2 * coarse, atol=2 * coarse + 2 * gap * eps
    )


@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
@pytest.mark.parametrize("within", [False, True], ids=["of all", "within"])
@pytest.mark.parametrize("K", [1, 2, 4])
def test_what_has_no_softmax_is_nan_in_its_row_alone(K, within, linear, backend):
    """A row, or with ``normalize_within`` a set, of nothing but -inf, or with NaN or +inf."""
    device, V = device_of(backend), 4
    fine = torch.tensor([1.0, -1.0, 0.5, 2.0])
    nothing = fine.clone()
    nothing[: K if within else V] = -math.inf
    undefined = [nothing] + [fine.index_fill(0, torch.tensor([0]), bad) for bad in (math.nan, math.inf)]
    ids = torch.arange(K).expand(1, 2, K).to(device)
    weights = torch.arange(1.0, K + 1).to(device)
    for row in undefined:
        leaf = torch.stack([row, fine]).to(device)
        if linear:
            # each row is a bias of its own
            results = []
            for bias in leaf:
                bias = bias.clone().requires_grad_()
                zeros = torch.zeros(1, 1, 8, device=device), torch.zeros(V, 8, device=device)
                out = gk.linear_selected_logprobs(
                    *zeros, ids[:, :1], bias=bias, normalize_within=within, backend=backend
                )
                loss = (out.logprobs * weights).sum() + (0.0 if within or K == V else out.tail.sum())
                loss.backward()
                results.append((out.logprobs[0, 0], None if within else out.tail[0, 0], bias.grad))
        else:
            leaf = leaf.unsqueeze(0).requires_grad_()
            out = gk.selected_logprobs(leaf, ids, normalize_within=within, backend=backend)
            loss = (out.logprobs * weights).sum() + (0.0 if within or K == V else out.tail.sum())
            loss.backward()
            tails = [None, None] if within else out.tail[0]
            results = list(zip(out.logprobs[0], tails, leaf.grad[0], strict=True))
        (logprobs, tail, grad), (others, other_tail, other_grad) = results
        assert logprobs.isnan().all() and (within or tail.isnan())
        assert grad[: K if within else V].isnan().all() and (not within or (grad[K:] == 0).all())
        assert others.isfinite().all() and other_grad.isfinite().all()
        assert within or not other_tail.isnan()


@pytest.mark.parametrize("within", [False, True], ids=["of all", "within"])
@pytest.mark.parametrize("K", [1, 2])
def test_a_row_without_upstream_gradient_has_none(K, within, backend):
    logits = torch.full((1, 1, 4), -math.inf).to(device_of(backend)).requires_grad_()
    ids = torch.arange(K, device=logits.device).view(1, 1, K)
    out = gk.selected_logprobs(logits, ids, normalize_within=within, backend=backend)
    (grad,) = torch.autograd.grad(out.logprobs, logits, torch.zeros_like(out.logprobs))
    assert (grad == 0).all()


@pytest.mark.parametrize("within", [False, True])
def test_rows_without_ids_are_inert(within, backend):
    problem = Problem(20)
    problem.inputs["logits"][1, 1] = math.nan
    assert (problem.ids[1, 1] == -100).all()
    ours = problem.ours(within, backend)
    assert all(value.isfinite().all() for value in ours.values())
    assert (ours["logprobs"][1, 1] == 0).all() and (ours["grad logits"][1, 1] == 0).all()


def test_the_backward_may_overwrite_the_logits(backend):
    problem = Problem(20)
    apart = problem.ours(False, backend)
    leaf = problem.inputs["logits"].detach().clone().to(device_of(backend)).requires_grad_()
    logits = leaf.clone()
    out = gk.selected_logprobs(logits, problem.ids.to(leaf.device), inplace_backward=True, backend=backend)
    torch.autograd.backward(list(out), [grad.to(leaf.device) for grad in problem.grads])
    assert torch.equal(leaf.grad.cpu(), apart["grad logits"])
    assert torch.equal(logits.detach().cpu(), apart["grad logits"])


def test_ids_among_what_the_sampler_kept(backend):
    logits = torch.randn(2, 3, 613, generator=generator(1)).to(device_of(backend))
    mask = gk.sampling_mask(logits, top_k=40)
    ids = logits.topk(8).indices
    leaves = [logits.clone().requires_grad_() for _ in range(2)]
    kept = gk.selected_logprobs(leaves[0], ids, kept_mask=mask, backend=backend)
    cut = leaves[1].masked_fill(logits < logits.topk(40).values[..., -1:], -math.inf)
    same = gk.selected_logprobs(cut, ids, backend=backend)
    for one, other in zip(kept, same, strict=True):
        assert (one - other).abs().max() < 1e-6
    for out in (kept, same):
        (out.logprobs.sum() + out.tail.sum()).backward()
    assert (leaves[0].grad - leaves[1].grad).abs().max() < 1e-6
    ids[0, 2, 3] = logits[0, 2].argmin()
    with pytest.raises(ValueError, match=rf"ids: got {int(ids[0, 2, 3])} at position \[0, 2\]"):
        gk.selected_logprobs(logits, ids, kept_mask=mask, backend=backend)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), ValueError, "logits: got shape"),
        (torch.zeros(2, dtype=torch.int64), ValueError, r"ids: got shape \(2,\)"),
        (torch.zeros(2, 3, 0, dtype=torch.int64), ValueError, "K >= 1"),
        (torch.zeros(2, 3, 4), TypeError, "ids: got torch.float32"),
        (torch.full((2, 3, 4), 9), ValueError, "ids: got 9, expected 0 <= id < 9"),
        (torch.full((2, 3, 1), 9), ValueError, "ids: got 9, expected 0 <= id < 9"),
        (torch.full((2, 3, 4), -1), ValueError, "ids: got -1"),
    ],
)
def test_wrong_ids(ids, error, message):
    with pytest.raises(error, match=message):
        gk.selected_logprobs(torch.randn(2, 3, 9), ids)
    with pytest.raises(error, match=message.replace("logits", "hidden")):
        gk.linear_selected_logprobs(torch.randn(2, 3, 4), torch.randn(9, 4), ids)
