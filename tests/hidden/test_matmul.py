"""Matmuls with a head's weight on the CPU: selection of the library, losses, and log-probs without logits."""

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.core.types import LogitTransform, RowOptions
from gspo_kernels.hidden import matmul as products
from gspo_kernels.hidden.gradients import Accumulators
from gspo_kernels.hidden.matmul import cpp_blocks as blocks
from gspo_kernels.hidden.matmul import pytorch
from tests.backends.row_calls import same
from tests.cases import draw_kept, generator, make_case, run
from tests.judging import assert_equals_oracle

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(params=["torch", "cpp"])
def library(request, monkeypatch):
    """Select the library that multiplies fp32 and bf16 heads, on any processor and for any weight."""
    ours = request.param == "cpp"
    monkeypatch.setattr(products, "multiplies", lambda dtype: ours and dtype in (BF16, FP32))
    monkeypatch.setattr(products, "MIN_CPP_ELEMENTS", 0)
    return request.param


def select_matmul(weight, bias=None, logits_dtype="float32"):
    options = RowOptions(LogitTransform(), -100, "cpp")
    return products.select_matmul(weight, bias, None, logits_dtype, False, options)


@pytest.mark.parametrize("schedule", ["aligned", "deferred", "two_pass", "known"])
@pytest.mark.parametrize(("dtype", "backend"), [(FP32, "cpp"), (BF16, "cpp"), (BF16, "reference")])
def test_losses_equal_the_oracle_whoever_multiplies(library, backend, dtype, schedule):
    case = make_case("linear", "packed", "on_policy" if schedule == "known" else "holes", dtype=dtype)
    options = {"schedule": schedule, "max_chunk_bytes": 4 * 4 * case.inputs["weight"].shape[0]}
    got = run(case, "fused_linear_policy_loss", gk.GSPO(), backend, **options)
    assert_equals_oracle(got, case, gk.GSPO())


@pytest.mark.parametrize("library", ["torch"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("known", [True, False])
def test_rounded_logits_with_and_without_onednn(library, monkeypatch, dtype, known):
    """Logits are PyTorch's product of that dtype, or else the rounded product of fp32 copies."""
    monkeypatch.setattr(pytorch, "onednn_multiplies", lambda asked: asked == dtype and known)
    rng, V = generator(4), 2048 + 77
    hidden, weight, bias = (torch.randn(*size, generator=rng).to(dtype) for size in ((5, 40), (V, 40), (V,)))
    wide = select_matmul(weight, bias).logits(hidden, torch.empty(5, V))
    rounded = select_matmul(weight, bias, "input").logits(hidden, torch.empty(5, V, dtype=dtype))
    assert torch.equal(rounded, torch.addmm(bias, hidden, weight.t()) if known else wide.to(dtype))


# --- scores: they write no logits, and have the bits of scores that do

B, T, H = 3, 20, 33
# one column; less and more than a tile; a whole block, and one column more; three blocks, the last in part
VOCABULARIES = (1, 31, 33, blocks.BLOCK, blocks.BLOCK + 1, 2 * blocks.BLOCK + 77)


def drawn(dtype, V):
    """Return hidden (NaN in ignored rows), weight, bias, labels with holes, and sets of ids with them. Some
    labels are at the ends of the vocabulary and of its last block.
    """
    rng = generator(5)
    hidden, weight = torch.randn(B, T, H, generator=rng), torch.randn(V, H, generator=rng)
    labels = torch.randint(0, V, (B, T), generator=rng)
    labels[1, :3] = torch.tensor([0, V - 1, (V - 1) // blocks.BLOCK * blocks.BLOCK])
    kept = draw_kept(labels, V, 3000, rng)
    labels[0, 3:7], labels[2, -1] = -100, -100
    hidden[labels == -100] = torch.nan
    return hidden.to(dtype), weight.to(dtype), torch.randn(V, generator=rng).to(dtype), labels, kept


@pytest.mark.parametrize(
    ("dtype", "V"),
    [(dtype, VOCABULARIES[-1]) for dtype in (FP32, BF16, torch.float16, torch.float64)]
    + [(FP32, V) for V in VOCABULARIES[:-1]],
)
def test_statistics_equal_those_of_written_logits(library, dtype, V, monkeypatch):
    hidden, weight, bias, labels, kept = drawn(dtype, V)
    calls = [
        {},
        *({"max_chunk_bytes": rows * V * 4} for rows in (1, 7)),
        {"bias": bias, "return_entropy": True},
        {"bias": bias, "logit_scale": 0.7, "softcap": 4.0, "temperature": torch.tensor([0.6, 1.0, 1.7])},
        {"kept_mask": gk.kept_mask(kept, V), "softcap": 6.0, "return_entropy": True},
    ]
    calls += [{"batch_invariant": True, "softcap": 3.0}] if dtype != torch.float64 else []

    def scores():
        return [gk.linear_token_logprobs(hidden, weight, labels, **options) for options in calls]

    folded = scores()
    packed = gk.linear_token_logprobs(hidden.flatten(0, 1), weight, labels.flatten())
    assert torch.equal(packed.logprobs.view(B, T), folded[0].logprobs)
    if library == "cpp" and dtype in (FP32, BF16):  # whatever rows are projected together
        assert all(torch.equal(each.logprobs, folded[0].logprobs) for each in folded[1:3])
    with monkeypatch.context() as patch:
        patch.setattr(Accumulators, "logits_memory", None)
        if library == "cpp" and dtype in (FP32, BF16):
            patch.setattr(pytorch.SlabMatmul, "slabs", None)  # product and reduction are one operation
        leaf = hidden.nan_to_num().requires_grad_()
        new = gk.linear_token_logprobs(leaf, weight, labels)
        assert torch.equal(new.logprobs, folded[0].logprobs)
        scores()
    # the backward needs logits
    new.logprobs.sum().backward()
    assert V == 1 or leaf.grad[labels != -100].any(-1).all()
    monkeypatch.setattr(blocks.StreamedMatmul, "streams", False)
    assert all(same(mine, theirs) for mine, theirs in zip(folded, scores(), strict=True))
