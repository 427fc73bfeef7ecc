// Matrix products with fp32 sums, of fp32 or of bf16 operands, in blocks that stay in cache.
//
// An element of the result is the same whatever rows and columns are computed along with it and however many
// threads do so: its sum runs in pieces of a fixed length along K.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace gspo_kernels {

using torch::stable::Tensor;

// out [M, N] (+)= a [M, K] @ b [K, N], with any strides of a and b; `out` fp32, contiguous along N. `bias` [N]
// fp32, contiguous, is added to each row; not together with `accumulate`.
void product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, Tensor& out, bool accumulate,
             bool portable);

// Whether this processor has instructions for it.
bool multiplies_fp32();
bool multiplies_bf16();

}  // namespace gspo_kernels
