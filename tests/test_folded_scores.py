"""Scores from hidden states on the CPU write no logits, and have the bits of those that do."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels import cpp
from gspo_kernels.linear.head import Head
from gspo_kernels.ops import products
from tests.cases import draw_kept, generator

pytestmark = pytest.mark.skipif(
    cpp.unavailable(torch.device("cpu")) is not None, reason=str(cpp.unavailable(torch.device("cpu")))
)

B, T, V, H = 3, 20, 2 * 2048 + 77, 33
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OPTIONS = (
    {},
    {"logit_scale": 0.7, "softcap": 4.0, "temperature": 1.3},
    {"temperature": torch.tensor([0.6, 1.0, 1.7])},
    {"kept": True, "softcap": 6.0},
)


@pytest.fixture(params=["torch", "cpp"])
def library(request, monkeypatch):
    """Who multiplies fp32 and bf16 heads, on any processor and for any weight."""
    ours = request.param == "cpp"
    monkeypatch.setattr(products, "multiplies", lambda dtype: ours and dtype == torch.bfloat16)
    monkeypatch.setattr(products, "fp32_library", lambda: request.param)
    monkeypatch.setattr(products, "SMALL", 0)


def draw(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden, weight, bias, labels with holes, and ids that they are among; what is ignored is NaN."""
    rng = generator(5)
    hidden, weight = torch.randn(B, T, H, generator=rng), torch.randn(V, H, generator=rng)
    labels = torch.randint(0, V, (B, T), generator=rng)
    kept = draw_kept(labels, V, 3000, rng)
    labels[0, 3:7], labels[2, -1] = -100, -100
    hidden[labels == -100] = torch.nan
    return hidden.to(dtype), weight.to(dtype), torch.randn(V, generator=rng).to(dtype), labels, kept


def same(a: gk.TokenLogprobs, b: gk.TokenLogprobs) -> bool:
    entropies = (a.entropy is None) == (b.entropy is None)
    return entropies and all(torch.equal(x, y) for x, y in zip(a, b, strict=True) if x is not None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_written_logits(library, dtype, monkeypatch):
    hidden, weight, bias, labels, kept = draw(dtype)
    calls = []
    for options, given, entropy in itertools.product(OPTIONS, (None, bias), (False, True)):
        options = {**options, **({"kept_ids": kept} if "kept" in options else {})}
        options.pop("kept", None)
        calls.append({"bias": given, "return_entropy": entropy, **options})
    calls += [{"max_chunk_bytes": rows * V * 4} for rows in (1, 7)]
    if dtype != torch.float64:
        calls.append({"batch_invariant": True, "softcap": 3.0})
    folded = [gk.linear_token_logprobs(hidden, weight, labels, **options) for options in calls]
    packed = gk.linear_token_logprobs(hidden.flatten(0, 1), weight, labels.flatten())
    monkeypatch.delattr(cpp, "folds")
    written = [gk.linear_token_logprobs(hidden, weight, labels, **options) for options in calls]
    assert all(same(mine, theirs) for mine, theirs in zip(folded, written, strict=True))
    assert torch.equal(packed.logprobs.view(B, T), folded[0].logprobs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_logits_are_written(library, dtype, monkeypatch):
    """But in the backward, which needs them and has the same log-probs."""
    hidden, weight, _, labels, kept = draw(dtype)
    leaf = hidden.nan_to_num().requires_grad_()
    with monkeypatch.context() as patch:
        patch.setattr(Head, "logits", None)
        old = gk.linear_token_logprobs(hidden, weight, labels)
        gk.linear_token_logprobs(hidden, weight, labels, kept_ids=kept)
        new = gk.linear_token_logprobs(leaf, weight, labels)
        assert torch.equal(new.logprobs, old.logprobs)
    new.logprobs.sum().backward()
    assert leaf.grad is not None and leaf.grad[labels != -100].any(-1).all()


@pytest.mark.parametrize("options", [{"logits_dtype": "input"}, {"backend": "reference"}])
def test_rounded_logits_and_the_reference_take_chunks(options, monkeypatch):
    hidden, weight, _, labels, _ = draw(torch.bfloat16)
    project, written = Head.logits, []

    def logits(*args, **kwargs):
        written.append(project(*args, **kwargs))
        return written[-1]

    monkeypatch.setattr(Head, "logits", logits)
    assert gk.linear_token_logprobs(hidden.nan_to_num(), weight, labels, **options).logprobs.any()
    assert sum(chunk.numel() for chunk in written) == (labels != -100).sum() * V
