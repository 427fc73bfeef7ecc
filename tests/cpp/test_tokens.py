"""The C++ loops over a sequence's tokens: sums of any length, holes, masks of any dtype."""

import itertools

import pytest
import torch

from gspo_kernels import cpp
from gspo_kernels.types import RatioClip

INF = float("inf")
# wide enough that nothing is clipped, and a mean of tokens: the drift is the mean of the log-ratios
FORM = RatioClip(-INF, INF, INF, False, "sequences", 1.0, "sequence")
NOTHING = dict.fromkeys(("weights", "lengths", "normalizer", "cu_seqlens"))
FLOATS = (torch.float32, torch.float64)
KL_OLD = 6


def drawn(length, dtype, old_dtype):
    """Log-probs, old ones, and a mask with holes, behind which nothing is a number."""
    logprobs = -3 * torch.rand(2, length, dtype=torch.float64)
    old = logprobs + 1e-2 * torch.randn(2, length, dtype=torch.float64)
    mask = torch.rand(2, length) < 0.7
    mask[0, -1] = True
    mask[1] = False
    logprobs, old = logprobs.to(dtype), old.to(old_dtype)
    logprobs[~mask] = float("nan")
    logprobs[0, -1] = old[0, -1] = -INF
    return logprobs, old, mask


@pytest.mark.parametrize(("dtype", "old_dtype"), list(itertools.product(FLOATS, FLOATS)), ids=str)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 127, 128, 129, 160, 1000])
def test_only_counted_tokens_are_summed_up(length, dtype, old_dtype):
    logprobs, old, mask = drawn(length, dtype, old_dtype)
    step = cpp.ratio_step(logprobs, mask, old, torch.ones(2), FORM, **NOTHING)
    exact = torch.where(mask, logprobs.double() - old.double(), 0.0)
    exact[0, -1] = 0.0
    mean = exact.sum() / mask.sum()
    resolution = torch.finfo(dtype).eps
    torch.testing.assert_close(step.metrics[KL_OLD].double(), -mean, rtol=4 * resolution, atol=1e-15)
    torch.testing.assert_close(step.loss.double(), -mean.exp(), rtol=4 * resolution, atol=0)
    slope = (-mean.exp() / mask.sum()).to(dtype)
    torch.testing.assert_close(step.grad_logprobs, torch.where(mask, slope, 0.0), rtol=4 * resolution, atol=0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_padding_behind_a_sequence_changes_no_bit(dtype):
    logprobs, old, mask = drawn(200, dtype, dtype)
    behind = [torch.nn.functional.pad(each, (0, 75)) for each in (logprobs, old, mask)]
    step, padded = (
        cpp.ratio_step(new, counted, before, torch.ones(2), FORM, **NOTHING)
        for new, before, counted in ((logprobs, old, mask), behind)
    )
    assert torch.equal(step.loss, padded.loss) and torch.equal(step.metrics, padded.metrics)
    assert torch.equal(step.grad_logprobs, padded.grad_logprobs[:, :200])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, *FLOATS], ids=str)
@pytest.mark.parametrize("length", [5, 70_000])
def test_masks_of_numbers_are_read_as_they_are(length, dtype):
    logprobs, old, mask = drawn(length, torch.float32, torch.float32)
    assert cpp.reads_mask(mask.to(dtype))
    of_bools, of_numbers = (
        cpp.ratio_step(logprobs, counted, old, torch.ones(2), FORM, **NOTHING)
        for counted in (mask, mask.to(dtype))
    )
    assert all(torch.equal(a, b) for a, b in zip(of_bools, of_numbers, strict=True))
    if dtype != torch.bool:
        wrong = mask.to(dtype)
        wrong[1, -1] = 2
        with pytest.raises(ValueError, match="loss_mask: expected only 0 and 1"):
            cpp.ratio_step(logprobs, wrong, old, torch.ones(2), FORM, **NOTHING)
    assert not cpp.reads_mask(mask.to(torch.float16))
