"""Banned tokens, infinities and NaN do what docs/precision.md says, on every backend and in every entry.

The tables are read from the page. How accurate finite values are is judged elsewhere; here each must be
recognisably the one that the page names.
"""

import math
from pathlib import Path

import pytest
import torch

import gspo_kernels as gk
from tests.cases import device_of

PAGE = Path(__file__).parent.parent / "docs" / "precision.md"
LABEL = 3
INF, NAN = math.inf, math.nan


def table(after):
    """Rows of the table below a heading as cells, its head first."""
    lines = PAGE.read_text().split(f"## {after}\n", 1)[1].split("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("|")]
    return [cells[0], *cells[2:]]


ROWS = {name: dict(zip(table("The log-prob of a token")[0][1:], cells, strict=True))
        for name, *cells in table("The log-prob of a token")[1:]}  # fmt: skip


def all_but(*kept):
    def banned(row):
        mask = torch.ones_like(row, dtype=torch.bool)
        mask[list(kept)] = False
        return row.masked_fill(mask, -INF)

    return banned


def with_values(**values):
    """``at_5=inf``: the value of that column."""

    def changed(row):
        for place, value in values.items():
            row[int(place.removeprefix("at_"))] = value
        return row

    return changed


# Several rows of logits for each line of the table: what is banned may stand anywhere.
MAKERS = {
    "nothing is banned": (lambda row: row,),
    "others are banned": (
        with_values(at_5=-INF),
        with_values(at_0=-INF),
        lambda row: row.index_fill(0, torch.arange(LABEL), -INF),
        lambda row: row.index_fill(0, torch.arange(LABEL + 1, row.numel() - 1), -INF),
        lambda row: row.index_fill(0, torch.arange(row.numel() // 2, row.numel()), -INF),
        lambda row: row.index_fill(0, torch.arange(4, row.numel(), 2), -INF),
        all_but(LABEL, 6),
    ),
    "all others are banned": (all_but(LABEL),),
    "the label is banned": (
        with_values(at_3=-INF),
        lambda row: row.index_fill(0, torch.arange(row.numel() // 2), -INF),
        lambda row: row.index_fill(0, torch.arange(1, row.numel(), 2), -INF),
    ),
    "all but one are banned, and the label is": (all_but(0), all_but(4), all_but(-1)),
    "all are banned": (all_but(),),
    "another token is at +inf": (with_values(at_5=INF), with_values(at_0=INF, at_6=INF)),
    "the label is at +inf": (with_values(at_3=INF), with_values(at_3=INF, at_5=INF)),
    "the label is banned, another is at +inf": (with_values(at_3=-INF, at_5=INF),),
    "another token is NaN": (
        with_values(at_5=NAN),
        with_values(at_0=NAN, at_1=INF),
        with_values(at_6=NAN, at_1=-INF),
    ),
    "the label is NaN": (with_values(at_3=NAN),),
    "all are banned but one that is NaN": (
        lambda row: with_values(at_5=NAN)(all_but()(row)),
        lambda row: with_values(at_3=NAN)(all_but()(row)),
    ),
}  # fmt: skip

OPTIONS = {torch.float32: {}, torch.bfloat16: {"temperature": 0.7, "logit_scale": 1.7}}


def test_the_table_has_these_rows():
    assert ROWS.keys() == MAKERS.keys()


class Wanted:
    """What a line of the table says about one row, in fp64 and without an infinity in any operation."""

    def __init__(self, cells, z):
        self.cells, self.z = cells, z.double()
        allowed = self.z > -INF
        self.allowed = allowed
        self.p = torch.zeros_like(self.z)
        if not self.undefined:
            self.p[allowed] = torch.softmax(self.z[allowed], -1)
        self.log_p = torch.where(self.p > 0, self.p.clamp(min=1e-300).log(), 0.0)
        self.entropy = -(self.p * self.log_p).sum()

    @property
    def undefined(self):
        return self.cells["log-prob"] == "NaN"

    def named(self, name, place=None):
        """The number, or numbers, that a cell's words stand for."""
        numbers = {
            "log p": self.log_p[LABEL],
            "H": self.entropy,
            "1 - p": 1 - self.p,
            "-p": -self.p,
            "-p (log p + H)": -self.p * (self.log_p + self.entropy),
        }
        value = numbers[name] if name in numbers else torch.tensor(float(name), dtype=torch.float64)
        return value if place is None else value.expand_as(self.z)[place]

    def gradient(self):
        want = torch.empty_like(self.z)
        label = torch.arange(self.z.numel()) == LABEL
        for column, place in (
            ("its gradient at the label", label),
            ("at other allowed tokens", self.allowed & ~label),
            ("at banned tokens", ~self.allowed & ~label),
        ):
            if place.any():
                want[place] = self.named(self.cells[column], place)
        return want

    def entropy_gradient(self):
        return self.named(self.cells["the entropy's gradient"]).expand_as(self.z)


def assert_is(got, want, dtype, message=None):
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        got.detach().cpu().double(), want, rtol=64 * eps, atol=16 * eps, equal_nan=True, msg=message
    )


def transform(logits, options):
    return logits.double() * options.get("logit_scale", 1.0) / options.get("temperature", 1.0)


class Call:
    """One token through an entry: log-prob, entropy, and their gradients on the logits or, on hidden states,
    the bias."""

    def __init__(self, entry, row, backend, options, schedule=None):
        device = device_of(backend)
        labels = torch.tensor([[LABEL]], device=device)
        options = {**options, "backend": backend, "return_entropy": True}
        self.hidden = None
        if "linear" in entry:
            self.hidden, weight = (
                torch.randn(*shape).to(row.dtype).to(device).requires_grad_()
                for shape in ((1, 1, 8), (row.numel(), 8))
            )
            self.leaf = row.to(device).requires_grad_()
            self.logits = (self.hidden.double() @ weight.double().T).flatten().detach().cpu() + row.double()
            self.weight = weight
            inputs, options["bias"] = (self.hidden, weight), self.leaf
        else:
            self.leaf = row.to(device).view(1, 1, -1).requires_grad_()
            self.logits, inputs = row.double(), (self.leaf,)
        if entry.endswith("logprobs"):
            self.logprobs, self.entropy = getattr(gk, entry)(*inputs, labels, **options)
            self.differentiable = {"logprobs": self.logprobs, "entropy": self.entropy}
            return
        if schedule is not None:
            options["schedule"] = schedule
        one = torch.ones(1, 1, device=device)
        out = getattr(gk, entry)(
            *inputs, labels, None, None, token_weights=one, objective=gk.Linear(), **options
        )
        self.logprobs, self.entropy, self.differentiable = out.logprobs, out.entropy, {"logprobs": out.loss}

    def gradients(self, of):
        leaves = [self.leaf] if self.hidden is None else [self.leaf, self.hidden, self.weight]
        of = self.differentiable[of].sum()
        first, *rest = torch.autograd.grad(of, leaves, retain_graph=True)
        return first.flatten(), *rest


@pytest.mark.parametrize("dtype", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "entry", ["token_logprobs", "linear_token_logprobs", "fused_policy_loss", "fused_linear_policy_loss"]
)
@pytest.mark.parametrize("case", MAKERS)
def test_rows(case, entry, dtype, backend):
    options = OPTIONS[dtype]
    for make in MAKERS[case]:
        row = make(torch.randn(37)).to(dtype)
        call = Call(entry, row, backend, options)
        slope = transform(torch.ones(1), options).item()
        want = Wanted(ROWS[case], transform(call.logits, options))
        assert_is(call.logprobs.flatten(), want.named(want.cells["log-prob"]).view(1), torch.float32)
        assert_is(call.entropy.flatten(), want.named(want.cells["entropy"]).view(1), torch.float32)
        wanted = {"logprobs": want.gradient(), "entropy": want.entropy_gradient()}
        for name in call.differentiable:
            got, *shared = call.gradients(name)
            assert_is(got, slope * wanted[name], dtype)
            for each in shared:
                assert each.isnan().all() if want.undefined else each.isfinite().all()


@pytest.mark.parametrize("case", MAKERS)
def test_rows_of_many_blocks(case, backend):
    """Whole blocks, and whole pieces of blocks, are banned."""
    for make in MAKERS[case]:
        call = Call("token_logprobs", make(torch.randn(9001)), backend, {})
        want = Wanted(ROWS[case], call.logits)
        assert_is(call.logprobs.flatten(), want.named(want.cells["log-prob"]).view(1), torch.float32)
        assert_is(call.gradients("logprobs")[0], want.gradient(), torch.float32)
        assert_is(call.gradients("entropy")[0], want.entropy_gradient(), torch.float32)


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("entry", ["token_logprobs", "linear_token_logprobs"])
def test_a_nan_stays_in_its_row(entry, bad, backend):
    device = device_of(backend)
    labels = torch.randint(0, 37, (1, 3), device=device)
    rows = torch.randn(1, 3, 8 if "linear" in entry else 37, device=device)
    weight = (torch.randn(37, 8, device=device, requires_grad=True),) if "linear" in entry else ()
    results = []
    for change in (0.0, bad):
        leaf = rows.clone()
        leaf[0, 1, 5] += change
        leaf.requires_grad_()
        out = getattr(gk, entry)(leaf, *weight, labels, backend=backend)
        results.append((out.logprobs.detach(), *torch.autograd.grad(out.logprobs.sum(), (leaf, *weight))))
    (clean, *clean_grads), (got, *grads) = results
    others = torch.tensor([0, 2], device=device)
    assert got[0, 1].isnan() and torch.equal(got[:, others], clean[:, others])
    assert grads[0][0, 1].isnan().all() and torch.equal(grads[0][:, others], clean_grads[0][:, others])
    assert all(grad.isnan().all() for grad in grads[1:])


# --- the loss

LOSSES = table("The ratio and the loss")
INFINITE = {"-inf": -INF, "+inf": INF, "NaN": NAN}


def log_s_and_loss(objective, log_ratios, advantage):
    """Loss and coefficient of a sequence by its formula, and whether a bound cut it off."""
    log_s = sum(log_ratios) / len(log_ratios)
    if advantage == 0:
        return 0.0, 0.0
    if math.isnan(log_s):
        return NAN, NAN
    if advantage > 0 and log_s > math.log1p(objective.clip_high):
        return -(1 + objective.clip_high) * advantage, 0.0
    if advantage < 0 and log_s < math.log1p(-objective.clip_low):
        return -(1 - objective.clip_low) * advantage, 0.0
    value = -math.exp(log_s) * advantage
    return value, value / len(log_ratios)


def number(cell, words):
    """What a cell of the table stands for."""
    return words[cell] if cell in words else float(cell)


@pytest.mark.parametrize("advantage", [2.0, -2.0, 0.0])
@pytest.mark.parametrize("line", LOSSES[1:], ids=lambda line: f"{line[0]} {line[1]}")
@pytest.mark.parametrize("entry", ["policy_loss", "fused_policy_loss", *(
    f"fused_linear_policy_loss {name}" for name in ("auto", "aligned", "deferred", "two_pass"))
])  # fmt: skip
def test_the_loss(entry, line, advantage, backend):
    """Two sequences of two tokens; one token of the first has the log-probs of the line."""
    if entry == "policy_loss" and backend != "reference":
        pytest.skip("starts from log-probs, without a backend")
    new, old, change, *cells = line
    objective = gk.GSPO(clip_low=0.9, clip_high=2.0)
    device = device_of(backend)
    entry, _, schedule = entry.partition(" ")
    labels = torch.tensor([[1, LABEL], [2, 2]], device=device)
    bias = torch.zeros(16)
    if new == "-inf":
        bias[LABEL] = -INF
    hidden, weight = torch.randn(2, 2, 8), torch.randn(16, 8)
    logits = hidden @ weight.T + bias
    if new == "NaN":
        hidden[0, 1, 0] = logits[0, 1, 7] = NAN
    logprobs = torch.log_softmax(logits.double(), -1).gather(-1, labels.cpu().unsqueeze(-1)).squeeze(-1)
    shifts, old_logprobs = torch.zeros(2, 2), None
    if old != "none: on-policy":
        shifts = torch.tensor([[0.1, 0.2], [-0.1, 0.1]])
        old_logprobs = logprobs.float() - shifts
        if (new, old) != ("finite", "finite"):
            old_logprobs[0, 1] = number(old, {"finite": -1.5, **INFINITE})
    log_ratio = number(change, {"finite": shifts[0, 1].item(), **INFINITE})
    value, coefficient = log_s_and_loss(objective, [shifts[0, 0].item(), log_ratio], advantage)
    bounds = {"clipped low": -(1 - 0.9) * advantage, "clipped high": -(1 + 2.0) * advantage}
    cell = cells[{2.0: 0, -2.0: 2, 0.0: 4}[advantage] :]
    refused = cell[0] == "refused"
    if refused:
        cell = ["NaN", "NaN"]  # without a look at the values
    assert value == pytest.approx(number(cell[0], {"finite": value, **bounds, **INFINITE}), nan_ok=True)
    assert coefficient == pytest.approx(number(cell[1], {"finite": coefficient, **INFINITE}), nan_ok=True)
    assert ("finite" in cell[:2]) == (math.isfinite(value) and coefficient != 0)
    other = -math.exp(shifts[1].mean().item()) * 0.5
    advantages = torch.tensor([advantage, 0.5], device=device)
    on_device = None if old_logprobs is None else old_logprobs.to(device)
    shared = {"objective": objective, "normalizer": 1}
    if refused and device.type == "cpu":
        inputs = {
            "policy_loss": (logprobs.float(),),
            "fused_policy_loss": (logits, labels),
            "fused_linear_policy_loss": (hidden, weight, labels),
        }
        if entry != "policy_loss":
            shared |= {"backend": backend} | ({"schedule": schedule} if schedule else {})
        with pytest.raises(ValueError, match=r"old_logprobs: got NaN at position \[0, 1\]"):
            getattr(gk, entry)(*inputs[entry], on_device, advantages, **shared)
        return
    if entry == "policy_loss":
        leaf = logprobs.float().requires_grad_()
        out = gk.policy_loss(leaf, old_logprobs, advantages, **shared)
        (grad,) = torch.autograd.grad(out.loss, leaf)
        want = torch.tensor([[coefficient] * 2, [other / 2] * 2])
        torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-6, equal_nan=True)
    else:
        shared["backend"] = backend
        if entry == "fused_policy_loss":
            leaf = logits.to(device).requires_grad_()
            out = gk.fused_policy_loss(leaf, labels, on_device, advantages, **shared)
        else:
            leaf = hidden.to(device).requires_grad_()
            out = gk.fused_linear_policy_loss(
                leaf, weight.to(device), labels, on_device, advantages, bias=bias.to(device),
                schedule=schedule, **shared,
            )  # fmt: skip
        (grad,) = (each.cpu() for each in torch.autograd.grad(out.loss, leaf))
        # The other sequence's gradient is its own.
        assert grad[1].isfinite().all() and (grad[1] != 0).any()
        if coefficient == 0:
            assert (grad[0] == 0).all()
        elif math.isfinite(coefficient):
            assert grad[0].isfinite().all() and (grad[0] != 0).any(-1).all()
        else:
            assert not grad[0, 1].isfinite().any()
            # On-policy the coefficient may have been known before there were log-probs.
            assert old_logprobs is None or not grad[0, 0].isfinite().any()
    assert out.loss.item() == pytest.approx(value + other, rel=1e-5, nan_ok=True)
    assert out.logprobs[0, 1].item() == pytest.approx(logprobs[0, 1].item(), rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_is_zero_where_both_ban_the_label(estimator):
    logprobs = torch.tensor([[-1.0, -INF]], requires_grad=True)
    for reference, finite in ((-INF, True), (-3.0, False)):
        out = gk.policy_loss(
            logprobs, torch.tensor([[-1.0, -INF]]), torch.tensor([0.0]), kl_beta=1.0, kl_estimator=estimator,
            ref_logprobs=torch.tensor([[-1.0, reference]]),
        )  # fmt: skip
        out.loss.backward()
        assert out.loss.item() == 0.0 if finite else abs(out.loss.item()) == INF
    weights = gk.rollout_weights(torch.tensor([[-INF, -1.0]]), torch.tensor([[-INF, -1.0]]), high=2.0)
    assert (weights == 1).all()
