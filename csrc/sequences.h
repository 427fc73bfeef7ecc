// Loss, gradient and metrics of a clipped ratio from log-probs; see
// `gspo_kernels.backends.protocol.RatioBackend.ratio_step`.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

namespace gspo_kernels {

using torch::stable::Tensor;

struct RatioClip {
    double log_low, log_high, log_dual;
    bool count_tokens;
    int64_t divisor;  // 0: number of sequences, 1: of tokens, 2: one
    double divisor_scale;
    bool per_token;  // ratios and losses are those of tokens, not of sequences
};

// Inputs of `ratio_step` besides log-probs, all contiguous, null if absent. Numbers are fp32 or fp64.
struct SequenceTokens {
    const bool* mask;                      // of tokens, which are [B, T] or [1, N]
    std::optional<Tensor> old_logprobs;    // the same shape; absent: logprobs themselves
    std::optional<Tensor> offsets;         // [B + 1] int64, of packed sequences
    std::optional<Tensor> advantages;      // [B], or like logprobs where ratios are per token; never absent
    std::optional<Tensor> weights;         // the same
    std::optional<Tensor> lengths;         // [B]
    std::optional<Tensor> normalizer;      // 0-d
    std::optional<Tensor> ref_logprobs{};  // like logprobs; absent: neither penalty nor its metric
    std::optional<Tensor> kl_beta{};       // the same shape; absent: only the metric
    int64_t kl_estimator = 3;              // k1, k2 or k3
};

// All have the dtype of logprobs, which is fp32 or fp64.
struct SequenceOutputs {
    Tensor loss, metrics;
    // of sequences, before division by `divisor`, for rows that are yet to be multiplied; absent: not wanted
    std::optional<Tensor> coefficients{}, divisor{};
    std::optional<Tensor> grad_logprobs{};  // like logprobs; absent: not wanted
};

// Returns false if values must be rechecked: a log-prob may be above kHighestLogprob, or a sequence's
// advantage, its log-ratio or the loss is NaN.
bool ratio_step(const Tensor& logprobs, const SequenceTokens& tokens, const RatioClip& ratio_clip,
                const SequenceOutputs& outputs);

// A mask and labels, of which `ignore_index` also masks tokens; all contiguous.
struct LabeledMask {
    Tensor mask;                   // bool, fp32, fp64, int32 or int64
    std::optional<Tensor> labels;  // int64; absent: the mask alone decides
    int64_t ignore_index;
};

// Returns whether the mask holds only 0 and 1. `counted` becomes true where the mask isn't 0 and the label
// isn't `ignore_index`; `merged` becomes the labels, with `ignore_index` where the mask is 0.
bool merge_mask(const LabeledMask& input, bool* counted, std::optional<Tensor>& merged);

}  // namespace gspo_kernels
