// From log-probs of sequences to a clipped sequence ratio's loss, coefficients and metrics;
// `gspo_kernels.ops.backends.SequenceRatioBackend.sequence_ratio_step` says what they mean.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

namespace gspo_kernels {

using torch::stable::Tensor;

struct ClippedSequenceRatio {
    double log_low, log_high, log_dual;
    bool count_tokens;
    int64_t divisor;  // what it counts: 0 sequences, 1 tokens, 2 is one
    double divisor_scale;
};

// The inputs, all contiguous and fp64 unless said otherwise; null means absent.
struct SequenceTokens {
    Tensor logprobs;                     // [B, T] or [1, N], fp32 or fp64
    Tensor mask;                         // the same shape, bool
    std::optional<Tensor> old_logprobs;  // the same shape; absent: logprobs themselves
    std::optional<Tensor> offsets;       // [B + 1] int64, of packed sequences
    Tensor advantages;                   // [B]
    std::optional<Tensor> weights;       // [B]
    std::optional<Tensor> lengths;       // [B]
    std::optional<Tensor> normalizer;    // 0-d
};

// Outputs have logprobs' dtype.
void sequence_ratio_step(const SequenceTokens& tokens, const ClippedSequenceRatio& form, Tensor& loss,
                         Tensor& coefficients, Tensor& divisor, Tensor& metrics);

}  // namespace gspo_kernels
