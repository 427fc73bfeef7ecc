"""The product of a head whose epilogue takes exponentials, against plain PyTorch in fp64."""

import pytest
import torch

from gspo_kernels.backends.dispatch import unavailable_reason
from gspo_kernels.core.types import LogitTransform
from tests.accuracy import assert_draws_as_exact
from tests.backends.row_calls import IGNORE, NEGATIVE, PLAIN, SOFT, WARM
from tests.cases import device_of, generator

BF16 = torch.bfloat16
PER_ROW = LogitTransform(1.7, 4.0, 1.0, torch.rand(1, 21, generator=generator(9)) + 0.5)
TRANSFORMS = {"plain": PLAIN, "warm": WARM, "negative": NEGATIVE, "softcap": SOFT, "per row": PER_ROW}


@pytest.fixture(scope="module")
def functions():
    """The module, and the device of its tensors."""
    pytest.importorskip("triton")
    device = device_of("triton")
    if (reason := unavailable_reason("triton", device)) is not None:
        pytest.skip(reason)
    from gspo_kernels.backends.triton import exponentials

    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in (9, 10):
        pytest.skip("no tensor descriptors in hardware, or not enough shared memory")
    return exponentials, device


def draw(n, V, H, seed=0, spread=3.0):
    """Return hidden states, weight, bias and labels, every other one the likeliest id."""
    rng = generator(seed)
    hidden, bias = torch.randn(n, H, generator=rng).to(BF16), torch.randn(V, generator=rng).to(BF16)
    weight = (torch.randn(V, H, generator=rng) * spread / H**0.5).to(BF16)
    labels = torch.randint(0, V, (1, n), generator=rng)
    labels[:, ::2] = (hidden.float() @ weight.float().t()).argmax(-1)[::2]
    return hidden, weight, bias, labels


def logits_of(hidden, weight, bias, transform, dtype):
    z = hidden.to(dtype) @ weight.to(dtype).t()
    z = transform.logit_scale * (z if bias is None else z + bias.to(dtype))
    if transform.softcap:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    per_row = transform.row_temperature
    return z / (transform.temperature if per_row is None else per_row.to(dtype).t())


def formulas_of(hidden, weight, bias, labels, transform, mix=None):
    """Return the formulas: statistics, and the gradient of ``mix`` (or of log-probs) in the logits."""

    def formulas(dtype):
        raw = hidden.to(dtype) @ weight.to(dtype).t()
        raw = (raw if bias is None else raw + bias.to(dtype)).requires_grad_()
        identity = torch.eye(raw.shape[1], dtype=dtype)
        logp = logits_of(raw, identity, None, transform, dtype).log_softmax(-1)
        logprobs = logp.gather(1, labels.t()).squeeze(1)
        entropy = -(logp.exp() * logp).sum(-1)
        a, b = (torch.ones_like(logprobs), 0 * logprobs) if mix is None else mix.to(dtype)
        (grad,) = torch.autograd.grad((a * logprobs + b * entropy).sum(), raw)
        values = {"logprobs": logprobs, "entropy": entropy, "grad": grad, "by columns": grad}
        return {name: value.detach() for name, value in values.items()}

    return formulas


def memory(n, V, device):
    """Return memory for exponentials amid NaN, rows a multiple of 16 bytes apart."""
    return torch.full((n, -(-V // 8) * 8), torch.nan, dtype=BF16, device=device)[:, :V]


def on_device(functions, hidden, weight, bias, labels, transform):
    device = functions[1]
    tensors = (None if each is None else each.to(device) for each in (hidden, weight, bias, labels))
    return *tensors, transform.rows(lambda row: row.to(device)), IGNORE


def run(functions, hidden, weight, bias, labels, transform, *, out=None, **options):
    given = on_device(functions, hidden, weight, bias, labels, transform)
    return functions[0].exponentials(*given, out, **options)


def columns_of(
    functions, hidden, weight, bias, labels, transform, stats, *, width=48, coefficient=-0.75, mix=None
):
    """Return the same rows from known statistics, ``width`` columns at a time; with ``mix`` those that also
    have the entropy's gradient.
    """
    module, device = functions
    given = on_device(functions, hidden, weight, bias, labels, transform)
    out, (n, V) = torch.empty(len(hidden), len(weight), dtype=BF16), (len(hidden), len(weight))
    coefficients = torch.full((n,), coefficient, device=device) if mix is None else None
    active = torch.full((n,), coefficient != 0, device=device)
    known = module.KnownRows(*given, stats, coefficients, active)
    for first in range(0, V, width):
        part = memory(n, min(width, V - first), device)
        known.exponentials(part, first)
        if mix is not None:
            labels_here, transform = given[3] - first, given[4]
            module.entropy_rows_(part, labels_here, transform, IGNORE - first, known.head, *mix.to(device))
        out[:, first : first + width] = part.cpu()
    return rows_of(known.head, out, labels.cpu()) / (coefficient or 1) if mix is None else out


def rows_of(head, out, labels):
    """Return d logprob/dlogits of the rows, in fp64."""
    rows = out.cpu().double()
    counted = labels.squeeze(0).clamp(0, rows.shape[1] - 1)
    rows[torch.arange(len(rows)), counted] += head.label_residual.cpu().double()
    return rows * head.factors.cpu().double().unsqueeze(1)


@pytest.mark.parametrize(
    ("name", "mixed"), [*((name, False) for name in TRANSFORMS), ("plain", True), ("per row", True)]
)
def test_values(functions, name, mixed):
    """Statistics, rows of the gradient of log-probs, and those of log-probs and entropy, at once and from the
    statistics some columns at a time.
    """
    module, device = functions
    transform, n, V = TRANSFORMS[name], 21, 131

    def draws():
        for seed in range(4):
            hidden, weight, bias, labels = draw(n, V, 72, seed)
            bias = bias if seed % 2 else None
            mix = torch.randn(2, n, generator=generator(seed)) if mixed else None

            def ours(given=(hidden, weight, bias, labels, transform), mix=mix):
                out = memory(n, V, device)
                head = run(functions, *given, out=out, entropy=True, with_softcap_grad=mix is None)
                if mix is None:
                    grad = rows_of(head, out, given[3])
                else:
                    there = transform.rows(lambda row: row.to(device))
                    module.entropy_rows_(out, given[3].to(device), there, IGNORE, head, *mix.to(device))
                    grad = out.cpu()
                logprobs, lse, entropy = (each.squeeze(0).cpu() for each in head.stats)
                exact = logits_of(*given[:3], transform, torch.float64).logsumexp(-1)
                torch.testing.assert_close(lse, exact, rtol=1e-6, atol=1e-5)
                columns = columns_of(functions, *given, head.stats, mix=mix).to(BF16)
                return {
                    "logprobs": logprobs,
                    "entropy": entropy,
                    "grad": grad.to(BF16),
                    "by columns": columns,
                }

            yield formulas_of(hidden, weight, bias, labels, transform, mix), ours

    assert_draws_as_exact(draws(), BF16, compared=2)


@pytest.mark.parametrize(("n", "V", "H"), [(1, 1, 8), (16, 64, 64), (17, 65, 136), (33, 200, 40)])
def test_edges_of_tiles_and_rows_that_do_not_count(functions, n, V, H):
    """Labels at every edge of a tile and of its pieces; an ignored row is inert, a label outside is NaN."""
    hidden, weight, bias, labels = draw(n, V, H, spread=1.0)
    edges = [v for v in (0, 31, 32, 63, 64, 127, 128, V - 1) if v < V][:n]
    labels[0, : len(edges)] = torch.tensor(edges)
    ignored, outside = torch.zeros(2, n, dtype=torch.bool)
    if n > 12:
        ignored[9], outside[10], outside[11] = True, True, True
        labels[0, 9], labels[0, 10], labels[0, 11] = IGNORE, V, -1
        hidden[9] = torch.nan
    out = memory(n, V, functions[1])
    head = run(functions, hidden, weight, bias, labels, PLAIN, out=out, entropy=True)
    stats, rows = head.stats.each(lambda each: each.squeeze(0).cpu()), rows_of(head, out, labels)
    z = logits_of(hidden, weight, bias, PLAIN, torch.float64)
    counted, place = ~(ignored | outside), labels.squeeze(0).clamp(0, V - 1)
    want = z.log_softmax(-1)[torch.arange(n), place]
    assert all((stat[ignored] == 0).all() for stat in stats) and stats.logprobs[outside].isnan().all()
    torch.testing.assert_close(stats.logprobs[counted].double(), want[counted], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(stats.lse[~ignored], z.logsumexp(-1)[~ignored], rtol=1e-6, atol=1e-5)
    assert (rows[~counted] == 0).all() and (out.cpu()[ignored] == 0).all() and not out.isnan().any()
    columns = columns_of(functions, hidden, weight, bias, labels, PLAIN, head.stats)
    assert (columns[~counted] == 0).all()
    torch.testing.assert_close(columns, rows, rtol=2.0**-7, atol=1e-7)
    exact = torch.nn.functional.one_hot(place, V) - z.softmax(-1)
    torch.testing.assert_close(rows[counted], exact[counted], rtol=2.0**-8, atol=1e-7)


def extreme(nats, H=64, V=100):
    """Return a row, weight and label whose log-prob is near ``-nats``, or near 0 for a negative number: the
    other ids together have a probability of e^nats then.
    """
    hidden, weight, *_ = draw(1, V, H, spread=1.0)
    z = hidden.double() @ weight.double().t()
    if nats < 0:
        weight[0] = 0
        weight[1:] = -hidden.sign() * weight[1:].abs()
        z = hidden.double() @ weight.double().t()
        return (hidden * (nats / z[0, 1:].max())).to(BF16), weight, torch.zeros(1, 1, dtype=torch.int64)
    return (hidden * (nats / float(z.max() - z.min()))).to(BF16), weight, z.argmin(1, keepdim=True)


@pytest.mark.parametrize("nats", [60, 67, 70, 90, 130, 1e3, 1e4, -40, -80, -1e3, -1e4])
def test_labels_far_from_the_other_logits(functions, nats):
    """Where the label is no good offset the row is computed again: as exact as any, finite, not above 0."""
    hidden, weight, labels = extreme(nats)
    out = memory(1, 100, functions[1])
    head = run(functions, hidden, weight, None, labels, PLAIN, out=out, entropy=True)
    z = logits_of(hidden, weight, None, PLAIN, torch.float64)
    others = z.scatter(1, labels, -torch.inf).logsumexp(-1)
    excess = others - z.gather(1, labels).squeeze(1)
    logp = -torch.logaddexp(excess, torch.zeros_like(excess))
    # what fp32 makes of logits of this size
    close = {"rtol": 1e-5, "atol": 2.0**-22 * float(z.abs().max()) * float(excess.exp().clamp(max=1))}
    torch.testing.assert_close(head.stats.logprobs[0].cpu().double(), logp, **close)
    assert (head.stats.logprobs <= 0).all()
    p = z.softmax(-1)
    entropy = -(p * z.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(head.stats.entropy[0].cpu().double(), entropy, rtol=1e-4, atol=1e-5)
    rows = rows_of(head, out, labels)
    exact = (-p).scatter(1, labels, (1 - logp.exp()).unsqueeze(1))
    slack = 2.0**-8 + 2.0**-21 * float(z.abs().max())
    torch.testing.assert_close(rows, exact, rtol=slack, atol=1e-16)
    columns = columns_of(functions, hidden, weight, None, labels, PLAIN, head.stats)
    torch.testing.assert_close(columns, exact, rtol=slack, atol=1e-16)
