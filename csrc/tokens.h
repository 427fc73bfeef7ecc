// Vectorized loops over a sequence's tokens, with one number per token: log-probs, masks, labels.
#pragma once

#include <cstdint>

namespace gspo_kernels {

// Sums over the tokens that a mask counts; other values are ignored.
struct CountedSum {
    int64_t count;
    double log_ratio;
};

// In nats. Log-probs are at most 0, but may exceed it a little if they were rounded to 16 bits.
constexpr double kHighestLogprob = 1;

// Sums now - old in fp64. Equal log-probs have the difference 0, even if both are -inf. Token i is added to
// lane i % 16, independent of padding after a sequence.
#define GSPO_DECLARE_COUNTED_SUM(S, O) \
    CountedSum counted_sum(const S* now, const O* old, const bool* mask, int64_t n);
GSPO_DECLARE_COUNTED_SUM(float, float)
GSPO_DECLARE_COUNTED_SUM(float, double)
GSPO_DECLARE_COUNTED_SUM(double, float)
GSPO_DECLARE_COUNTED_SUM(double, double)
#undef GSPO_DECLARE_COUNTED_SUM

// Whether any value is above kHighestLogprob, or is a NaN with the sign of a positive number. Values of
// tokens that don't count are checked, too.
bool any_above(const float* values, int64_t n);
bool any_above(const double* values, int64_t n);

// Writes `value` where the mask counts, 0 elsewhere.
void write_counted(const bool* mask, int64_t n, float value, float* out);
void write_counted(const bool* mask, int64_t n, double value, double* out);

// Implements `merge_mask`; labels and merged may be null. Returns whether the mask holds only 0 and 1.
#define GSPO_DECLARE_MERGE(N)                                                                        \
    bool merge(const N* mask, const int64_t* labels, int64_t ignore_index, int64_t n, bool* counted, \
               int64_t* merged);
GSPO_DECLARE_MERGE(bool)
GSPO_DECLARE_MERGE(float)
GSPO_DECLARE_MERGE(double)
GSPO_DECLARE_MERGE(int32_t)
GSPO_DECLARE_MERGE(int64_t)
#undef GSPO_DECLARE_MERGE

}  // namespace gspo_kernels
