// Row operations on logits [B, T, V]; see `gspo_kernels.backends.protocol.RowBackend`.
//
// Vectors are contiguous unless noted and have one element per row: labels int64, others in the dtype of
// statistics (fp32, or fp64 for fp64 logits). Null means absent. Rows are scheduled dynamically and never
// split; results do not depend on the number of threads.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

namespace gspo_kernels {

using torch::stable::Tensor;

struct LogitOptions {
    std::optional<Tensor> row_temperature;  // replaces temperature
    std::optional<Tensor> kept;             // sampling masks, int32 [rows, ceil(V / 32)]
    double logit_scale, softcap, temperature;
    int64_t ignore_index;
};

void logprobs_forward(const Tensor& logits, const Tensor& labels, const LogitOptions& options,
                      Tensor& logprobs, Tensor& lse, std::optional<Tensor>& entropy);

// The two gradients are [B, T] with any strides, and are multiplied by `grad_scale`, 0-d.
void logprobs_backward(const Tensor& logits, const Tensor& labels, const LogitOptions& options,
                       const Tensor& logprobs, const Tensor& lse, const std::optional<Tensor>& entropy,
                       const Tensor& grad_logprobs, const std::optional<Tensor>& grad_entropy,
                       const std::optional<Tensor>& grad_scale, bool sharded, Tensor& out);

void logprobs_and_grad(const Tensor& logits, const Tensor& labels, const LogitOptions& options,
                       const Tensor& coefficients, Tensor& logprobs, Tensor& lse, Tensor& out);

// Writes rows to `out`, in the dtype of statistics or, with fp32 statistics, in bf16; d logprob / d logits is
// each row times its factor.
void logprobs_and_rows(const Tensor& logits, const Tensor& labels, const LogitOptions& options,
                       Tensor& logprobs, Tensor& lse, Tensor& factors, Tensor& out);

}  // namespace gspo_kernels
