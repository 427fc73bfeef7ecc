// The operators, which bindings.cpp registers.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace gspo_kernels {

using torch::stable::Tensor;

// --- Row operations on logits [B, T, V]; see `gspo_kernels.backends.protocol.RowBackend`.
//
// Vectors are contiguous unless noted and have one element per row: labels int64, others in the dtype of
// statistics (fp32, or fp64 for fp64 logits). Null means absent. Rows are scheduled dynamically and never
// split; results do not depend on the number of threads.

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

// Statistics of a student's rows and a teacher's, contiguous. The flags tell whether the first two, or all of
// them, are known.
struct PairTensors {
    Tensor lse, teacher_lse, divergences, centers;
    bool normalizers_known, all_known;
};

// Both logits have the same dtype. `grad`, the divergences' gradient, is contiguous and in the dtype of
// statistics; `grad` and `out` are both present or both absent.
void divergence(const Tensor& logits, const Tensor& teacher_logits, const Tensor& labels,
                const LogitOptions& options, const LogitOptions& teacher_options, double beta,
                const std::optional<Tensor>& grad, const PairTensors& pairs, std::optional<Tensor>& out);

// --- Running statistics of rows over blocks of columns.
//
// `sums` is fp64 and contiguous, [rows, 2 + 3 * ceil(V / kBlock)]: whether the label has been read, the
// label's logit, and for each block of columns, without the label's, the maximum and both sums. Blocks are
// added in order, with results that are bitwise identical to those of a row in memory.

// Adds logits [1, rows, columns], the columns of `vocabulary` from `first`, a multiple of kBlock. Other
// arguments are those of row operations, except that `options.kept` covers the whole vocabulary. `sums` is
// initially zero.
void add_columns(const Tensor& logits, const Tensor& labels, const LogitOptions& options, int64_t first,
                 int64_t vocabulary, bool entropy, Tensor& sums);

// The same for hidden [rows, H] @ weight [V, H].T + bias, fp32 or bf16 with any strides, by the tiles of
// `product`: each block of logits is reduced while it is in cache.
void add_products(const Tensor& hidden, const Tensor& labels, const LogitOptions& options,
                  const Tensor& weight, const std::optional<Tensor>& bias, bool entropy, int64_t instructions,
                  Tensor& sums);

// Computes the statistics of rows, fp32 or fp64, after all columns have been added.
void statistics_of_sums(const Tensor& sums, const Tensor& labels, int64_t ignore_index, Tensor& logprobs,
                        Tensor& lse, std::optional<Tensor>& entropy);

// --- Matmuls of fp32 or bf16 operands with fp32 sums, in blocks that stay in cache.
//
// Sums are over pieces of a fixed length along K. An element of the result is bitwise identical for any M, N
// and number of threads.

// out [M, N] (+)= a [M, K] @ b [K, N], with any strides of a and b; `out` fp32, contiguous along N. `bias`
// [N] fp32, contiguous, is added to each row; not with `accumulate`. `ends`, int64 and contiguous, splits K
// into pieces, which are summed separately and added in order. `instructions` is one of tiles.h's.
void product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
             const std::optional<Tensor>& ends, Tensor& out, bool accumulate, int64_t instructions);

// The best `Instructions` (tiles.h) of this processor for fp32 or bf16, the reason why AMX is not used ("" if
// it is), and whether it is an Intel processor.
int64_t product_instructions(bool bf16);
std::string amx_reason();
bool on_intel();

// --- Clipped ratios from log-probs; see `gspo_kernels.backends.protocol.RatioBackend.ratio_step`.

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

// Returns false if values must be rechecked: a log-prob may be above 1 nat, or a sequence's
// advantage, its log-ratio or the loss is NaN.
bool ratio_step(const Tensor& logprobs, const SequenceTokens& tokens, const RatioClip& ratio_clip,
                const SequenceOutputs& outputs);

// Merges a mask (bool, fp32, fp64, int32 or int64) and labels (int64 or absent), all contiguous. Returns
// whether the mask holds only 0 and 1. `counted` becomes true where the mask isn't 0 and the label isn't
// `ignore_index`; `merged` becomes the labels, with `ignore_index` where the mask is 0.
bool merge_mask(const Tensor& mask, const std::optional<Tensor>& labels, int64_t ignore_index, bool* counted,
                std::optional<Tensor>& merged);

}  // namespace gspo_kernels
