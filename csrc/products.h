// Matmuls of fp32 or bf16 operands with fp32 sums, in blocks that stay in cache.
//
// Sums are over pieces of a fixed length along K. An element of the result is bitwise identical for any M, N
// and number of threads.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

namespace gspo_kernels {

using torch::stable::Tensor;

// out [M, N] (+)= a [M, K] @ b [K, N], with any strides of a and b; `out` fp32, contiguous along N. `bias`
// [N] fp32, contiguous, is added to each row; not with `accumulate`. `ends`, int64 and contiguous, splits K
// into pieces, which are summed separately and added in order. `instructions` is one of tiles.h's.
void product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
             const std::optional<Tensor>& ends, Tensor& out, bool accumulate, int64_t instructions);

// The best `Instructions` (tiles.h) of this processor for fp32 or bf16, whether it has certain ones, the
// reason why AMX is not used ("" if it is), and whether it is an Intel processor.
int64_t product_instructions(bool bf16);
bool has_product_instructions(int64_t instructions, bool bf16);
std::string amx_reason();
bool on_intel();

}  // namespace gspo_kernels
