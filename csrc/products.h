// Matrix products with fp32 sums, of fp32 or of bf16 operands, in blocks that stay in cache.
//
// An element of the result is the same whatever rows and columns are computed along with it and however many
// threads do so: its sum runs in pieces of a fixed length along K.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

namespace gspo_kernels {

using torch::stable::Tensor;

// out [M, N] (+)= a [M, K] @ b [K, N], with any strides of a and b; `out` fp32, contiguous along N. `bias`
// [N] fp32, contiguous, is added to each row; not together with `accumulate`. `ends`, int64 and contiguous,
// cuts K into pieces with these ends: each piece is summed up by itself, then added to the total, in order.
// `instructions` is one of tiles.h's.
void product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
             const std::optional<Tensor>& ends, Tensor& out, bool accumulate, int64_t instructions);

// Of this processor: the best `Instructions` (tiles.h) for fp32 or bf16, whether it has certain ones, why AMX
// is not used ("" if it is), and whether it is an Intel processor.
int64_t product_instructions(bool bf16);
bool has_product_instructions(int64_t instructions, bool bf16);
std::string amx_reason();
bool on_intel();

}  // namespace gspo_kernels
