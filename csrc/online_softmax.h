// Running statistics of rows over blocks of columns.
//
// `sums` is fp64 and contiguous, [rows, 2 + 3 * ceil(V / kBlock)]: whether the label has been read, the
// label's logit, and for each block of columns, without the label's, the maximum and both sums. Blocks are
// added in order, with results that are bitwise identical to those of a row in memory.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "rows.h"

namespace gspo_kernels {

// Adds logits [1, rows, columns], the columns of `vocabulary` from `first`, a multiple of kBlock. Other
// arguments are those of rows.h, except that `options.kept` covers the whole vocabulary. `sums` is initially
// zero.
void add_columns(const Tensor& logits, const Tensor& labels, const LogitOptions& options, int64_t first,
                 int64_t vocabulary, bool entropy, Tensor& sums);

// The same for hidden [rows, H] @ weight [V, H].T + bias, fp32 or bf16 with any strides, by the tiles of
// `product`: each block of logits is reduced while it is in cache.
void add_products(const Tensor& hidden, const Tensor& weight, const std::optional<Tensor>& bias,
                  const Tensor& labels, const LogitOptions& options, bool entropy, int64_t instructions,
                  Tensor& sums);

// Computes the statistics of rows.h, fp32 or fp64, after all columns have been added.
void statistics_of_sums(const Tensor& sums, const Tensor& labels, int64_t ignore_index, Tensor& logprobs,
                        Tensor& lse, std::optional<Tensor>& entropy);

}  // namespace gspo_kernels
