"""Log-probs over the ids that a sampler could have drawn: ``kept_mask``, of ids or rebuilt from logits."""

import itertools
import math

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import off_policy as sampling
from gspo_kernels.core import bits
from tests.backends.row_calls import same
from tests.cases import device_of, draw_kept, generator

V = 2048 + 77  # a second block, and words that end within it


def problem(backend="auto"):
    """Return logits, labels, and sets of ids with the labels in them."""
    rng, device = generator(0), device_of(backend)
    labels = torch.randint(0, V, (2, 3), generator=rng)
    ids = draw_kept(labels, V, 40, rng)
    return torch.randn(2, 3, V, generator=rng).to(device), labels.to(device), ids.to(device)


def columns(ids):
    """Return the ids as bool [..., V], by way of one-hot rows."""
    return torch.nn.functional.one_hot(ids.where(ids >= 0, V), V + 1).amax(-2)[..., :V].bool()


def results(logits, labels, backend, factor=1.0, **options):
    """Return log-probs, entropy, and the gradient of their sum, with log-probs times ``factor``."""
    leaf = logits.clone().requires_grad_()
    out = gk.token_logprobs(leaf, labels, return_entropy=True, backend=backend, **options)
    (out.logprobs * factor + out.entropy).sum().backward()
    return out.logprobs.detach(), out.entropy.detach(), leaf.grad


def assert_same_bits(results):
    first, *others = results
    assert all(same(other, first) for other in others)


# --- what a mask is


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 64, 70])
def test_words_hold_the_bits_of_their_ids(vocabulary):
    ids = torch.randint(0, vocabulary, (5, 40), generator=generator(vocabulary))
    ids = ids.masked_fill(torch.arange(40) % 3 == 0, -100).masked_fill(torch.arange(40) % 7 == 0, -1)
    mask = gk.kept_mask(ids, vocabulary)
    assert mask.dtype == torch.int32 and mask.shape == (5, math.ceil(vocabulary / 32))
    assert torch.equal(mask, sampling.SamplingMask.of(ids.tolist()).bitmask(vocabulary))
    for words, row in zip(mask.tolist(), ids.tolist(), strict=True):
        as_number = sum((word % 2**32) << (32 * i) for i, word in enumerate(words))
        assert as_number == sum(1 << i for i in set(row) if i >= 0)
    kept = bits.columns(mask, vocabulary)
    assert torch.equal(bits.packed_columns(kept), mask)
    every = [bits.holds(mask, torch.full((5,), i)) for i in range(vocabulary)]
    assert torch.equal(torch.stack(every, 1), kept)


def test_order_repeats_and_strides_do_not_matter(backend):
    logits, labels, ids = problem(backend)
    masks = [gk.kept_mask(each, V) for each in (ids, ids.flip(-1), torch.cat([ids, ids], -1).int())]
    masks.append(torch.stack([masks[0], ~masks[0]], -1)[..., 0])
    assert_same_bits(results(logits, labels, backend, kept_mask=mask) for mask in masks)


# --- logits outside of the set have no effect


@pytest.mark.parametrize(
    ("options", "factor"),
    [({}, math.inf), ({"softcap": 3.0, "logit_scale": -2.0, "temperature": 0.5}, 1.0)],
    ids=["an infinite gradient", "transformed"],
)
def test_masked_logits_are_inert(options, factor, backend):
    logits, labels, ids = problem(backend)
    cut = ~columns(ids)
    options = options | {"kept_mask": gk.kept_mask(ids, V)}
    found = [
        results(logits.masked_fill(cut, what), labels, backend, factor, **options)
        for what in (0.0, math.nan, math.inf, -math.inf)
    ]
    assert_same_bits(found)
    assert all((grad[cut] == 0).all() for *_, grad in found)


@pytest.mark.parametrize("schedule", ["known", "two_pass"])
def test_rows_of_gradient_products_are_inert_too(schedule, backend):
    """From hidden states; the bias is infinite for ids that are in no set."""
    rng, device = generator(3), device_of(backend)
    hidden, weight = (torch.randn(*shape, 8, generator=rng).to(device) for shape in ((2, 3), (V,)))
    _, labels, ids = problem(backend)
    ids = ids.masked_fill(ids > V // 2, -100).masked_fill(ids == labels.unsqueeze(-1), 5)
    grads = []
    for what in (0.0, math.inf):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        bias = torch.zeros(V).masked_fill(torch.arange(V) > V // 2, what).to(device)
        gk.fused_linear_policy_loss(
            *leaves, torch.full_like(labels, 5), None, torch.tensor([1.0, -1.0], device=device), bias=bias,
            kept_mask=gk.kept_mask(ids, V), schedule=schedule, max_chunk_bytes=2 * V * 4, backend=backend,
        ).loss.backward()  # fmt: skip
        grads.append([leaf.grad for leaf in leaves])
    assert_same_bits(grads)
    assert all(grad.isfinite().all() and grad.any() for grad in grads[0])


def test_sets_of_only_the_label_and_of_all_ids(backend):
    logits, labels, _ = problem(backend)
    label_alone = gk.kept_mask(labels.unsqueeze(-1), V)
    assert not any(x.any() for x in results(logits, labels, backend, kept_mask=label_alone))
    everything = torch.full((2, 3, bits.words(V)), -1, dtype=torch.int32, device=logits.device)
    assert_same_bits(results(logits, labels, backend, **kept) for kept in ({}, {"kept_mask": everything}))


# --- errors


@pytest.mark.parametrize("wrong", [V, -2])
def test_ids_outside_of_the_vocabulary(wrong):
    """A mask of positions is checked once the vocabulary is known; unchecked, such ids are ignored."""
    mask = sampling.SamplingMask.of([[3], [wrong, 5], [7]])
    with pytest.raises(ValueError, match=f"^ids: got {wrong}, expected 0 <= id < {V}"):
        mask.bitmask(V)
    assert torch.equal(
        bits.packed_rows(*mask, V), gk.kept_mask(torch.tensor([[3, 3], [5, -1], [7, -100]]), V)
    )


def test_a_label_outside_of_its_set(backend, monkeypatch):
    """It raises an error with its position. Where values are not checked, its log-prob is NaN."""
    logits, labels, ids = problem(backend)
    labels[1, 2] = next(i for i in range(V) if i not in ids[1, 2].tolist())
    shared = {"kept_mask": gk.kept_mask(ids, V), "backend": backend}
    hidden, weight = torch.randn(2, 3, 4).to(labels.device), torch.randn(V, 4).to(labels.device)
    for call in (
        lambda: gk.token_logprobs(logits, labels, **shared),
        lambda: gk.fused_policy_loss(logits, labels, None, torch.ones(2, device=labels.device), **shared),
        lambda: gk.linear_token_logprobs(hidden, weight, labels, **shared),
    ):
        with pytest.raises(ValueError, match=rf"^labels: got {int(labels[1, 2])} at position \[1, 2\]"):
            call()
    monkeypatch.setattr("gspo_kernels.logits.logprobs.must_check_values", lambda device: False)
    leaf = logits.clone().requires_grad_()
    logprobs = gk.token_logprobs(leaf, labels, **shared).logprobs
    assert logprobs.isnan().nonzero().tolist() == [[1, 2]]
    torch.where(logprobs.isnan(), 0.0, logprobs).sum().backward()
    assert leaf.grad.isfinite().all() and (leaf.grad[1, 2] == 0).all()
    monkeypatch.undo()
    labels[1, 2] = -100  # ignored labels are not checked
    assert gk.token_logprobs(logits, labels, **shared).logprobs[1, 2] == 0


# --- rebuilt sets


def warped(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, engine="transformers"):
    """Return what transformers' own warpers keep, as bool [n, V]. vLLM's order puts min-p first."""
    transformers = pytest.importorskip("transformers")
    z = logits / temperature
    by_min_p = [transformers.MinPLogitsWarper(min_p)] if min_p else []
    others = [transformers.TopKLogitsWarper(top_k)] if top_k else []
    others += [transformers.TopPLogitsWarper(top_p)] if top_p < 1 else []
    for warper in by_min_p + others if engine == "vllm" else others + by_min_p:
        z = warper(None, z)
    return z > -math.inf


RULES = [
    {},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.7},
    {"top_p": 0.95, "min_p": 0.02},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.1, "temperature": 0.6},
]


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_sets_are_those_of_the_engines(rules, engine):
    # in fp64 no side's rounding moves an id across the edge of a set
    flat = torch.randn(12, 3001, generator=generator(1), dtype=torch.float64)
    for scale in (0.1, 3.0, 20.0):
        kept = bits.columns(gk.sampling_mask(scale * flat, engine=engine, **rules), 3001)
        assert torch.equal(kept, warped(scale * flat, engine=engine, **rules))


def test_sets_of_thousands_of_ids():
    """One row's set is among the first candidates, one's among sixteen times as many, and one row is flat."""
    spreads = torch.tensor([[4.0], [2.5], [0.5]])
    logits = spreads * torch.randn(3, 70001, generator=generator(4), dtype=torch.float64)
    kept = bits.columns(gk.sampling_mask(logits, top_p=0.8), 70001)
    sizes = kept.sum(-1).tolist()
    assert sizes[0] < 1024 < sizes[1] < 16384 < sizes[2]
    assert torch.equal(kept, warped(logits, top_p=0.8))


def test_ties_are_kept_together():
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    for rules in ({"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.9}):
        assert bits.columns(gk.sampling_mask(logits, **rules), 6)[0].tolist() == [1, 0, 1, 1, 1, 0], rules


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_padded_packed_and_temperatures_per_sequence(dtype):
    logits = torch.randn(3, 4, 70, generator=generator(2)).to(dtype)
    temperature = torch.tensor([0.5, 1.0, 1.7])
    padded = gk.sampling_mask(logits, top_p=0.8, temperature=temperature)
    packed = gk.sampling_mask(logits.flatten(0, 1), top_p=0.8, temperature=temperature.repeat_interleave(4))
    alone = [gk.sampling_mask(logits[i], top_p=0.8, temperature=float(temperature[i])) for i in range(3)]
    assert padded.shape == (3, 4, 3) and torch.equal(padded, torch.stack(alone))
    assert torch.equal(padded.flatten(0, 1), packed)


def test_drawn_ids_are_in_their_set():
    logits, labels, _ = problem()
    labels[0, 1] = -100
    mask = gk.sampling_mask(logits, top_k=1, labels=labels)
    assert bits.columns(mask, V).sum(-1).tolist() == [[2, 1, 2], [2, 2, 2]]
    assert gk.token_logprobs(logits, labels, kept_mask=mask).logprobs.isfinite().all()
    for wrong, (shape, place) in itertools.product((V, -1, -99), (((2, 3), r"\[1, 1\]"), ((6,), r"\[4\]"))):
        labels[1, 1] = wrong
        message = rf"labels: got {wrong} at position {place}, expected 0 <= label < {V}, or -100"
        with pytest.raises(ValueError, match=message):
            gk.sampling_mask(logits.view(*shape, V), top_k=2, labels=labels.view(shape))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("rules", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_rows_without_a_softmax_are_errors(monkeypatch, rules, bad):
    logits = torch.randn(2, 3, 40)
    plain = gk.sampling_mask(logits, **rules)
    logits[1, 1, 7] = bad
    with pytest.raises(ValueError, match=r"logits: got NaN or \+inf at position \[1, 1\]"):
        gk.sampling_mask(logits, **rules)
    with pytest.raises(ValueError, match=r"logits: got NaN or \+inf at position \[4\]"):
        gk.sampling_mask(logits.flatten(0, 1), labels=torch.zeros(6, dtype=torch.int64), **rules)
    # if no id was drawn, or without checks, such a row keeps everything
    inert = gk.sampling_mask(logits, labels=torch.full((2, 3), -100), **rules)
    monkeypatch.setattr(sampling, "must_check_values", lambda device: False)
    for mask in (inert, gk.sampling_mask(logits, **rules)):
        assert bits.columns(mask, 40)[1, 1].all()
        mask[1, 1] = plain[1, 1]
        assert torch.equal(mask, plain)
