"""The Triton backend: ``protocol.RatioBackend`` as a module, for NVIDIA and AMD GPUs.

Kernels operate on rows and sequences of rows; the only losses are the clip of ``RatioClip`` and its KL
penalty.
"""

from __future__ import annotations

import torch

# "as" tells type checkers that a name is public
from gspo_kernels.backends.triton.batch_invariant_matmul import batch_invariant_mm as batch_invariant_mm
from gspo_kernels.backends.triton.divergences import divergence as divergence
from gspo_kernels.backends.triton.launch import INTERPRETED, platform, triton_version
from gspo_kernels.backends.triton.logprobs import logprobs_and_grad as logprobs_and_grad
from gspo_kernels.backends.triton.logprobs import logprobs_and_rows as logprobs_and_rows
from gspo_kernels.backends.triton.logprobs import logprobs_backward as logprobs_backward
from gspo_kernels.backends.triton.logprobs import logprobs_forward as logprobs_forward
from gspo_kernels.backends.triton.logprobs import one_pass_pays as one_pass_pays
from gspo_kernels.backends.triton.masks import lengths as lengths
from gspo_kernels.backends.triton.masks import merge_mask as merge_mask
from gspo_kernels.backends.triton.ratios import ratio_step as ratio_step
from gspo_kernels.backends.triton.ratios import sequence_ratio_forward as sequence_ratio_forward
from gspo_kernels.backends.triton.row_scaling import product_operand as product_operand
from gspo_kernels.backends.triton.row_scaling import scale_ as scale_
from gspo_kernels.backends.triton.row_scaling import scale_rows_ as scale_rows_
from gspo_kernels.backends.triton.row_scaling import store_hidden as store_hidden
from gspo_kernels.backends.triton.row_scaling import sum_unit as sum_unit

_ORDERED_ON_AMD_FROM = (3, 9)
"""The oldest Triton for AMD GPUs: 3.6 and 3.7 omit a wait in code for gfx942; 3.8 was not tested."""


def unavailable(device: torch.device) -> str | None:
    """Return the reason why the kernels can't run on ``device``, or None; the CPU needs the interpreter."""
    if device.type == "cuda":
        if platform() == "hip" and triton_version() < _ORDERED_ON_AMD_FROM:
            return "Triton before 3.9 may omit a wait between writes and reads on AMD GPUs"
        return None
    if device.type == "cpu":
        return None if INTERPRETED else "Triton kernels run on the CPU only under TRITON_INTERPRET=1"
    return f"Triton kernels support CUDA and ROCm devices, not {device.type}"
