// The vectorised loops over a sequence's tokens, of which there is one number each: log-probs, masks, labels.
#pragma once

#include <cstdint>

namespace gspo_kernels {

// Of the tokens that a mask counts; the others are never looked at.
struct CountedSum {
    int64_t count;
    double log_ratio;
};

// Nats. Log-probs are at most 0; those that were rounded to 16 bits may pass it by a little.
constexpr double kHighestLogprob = 1;

// now - old summed up in fp64, where equal ones have the difference 0, also where both are -inf. Token i is
// added to lane i % 16: padding behind a sequence doesn't change the order.
#define GSPO_DECLARE_COUNTED_SUM(S, O) \
    CountedSum counted_sum(const S* now, const O* old, const bool* mask, int64_t n);
GSPO_DECLARE_COUNTED_SUM(float, float)
GSPO_DECLARE_COUNTED_SUM(float, double)
GSPO_DECLARE_COUNTED_SUM(double, float)
GSPO_DECLARE_COUNTED_SUM(double, double)
#undef GSPO_DECLARE_COUNTED_SUM

// Whether one of the values is above kHighestLogprob, or a NaN with the sign of a positive number; of those
// that don't count, too.
bool any_above(const float* values, int64_t n);
bool any_above(const double* values, int64_t n);

// `value` where the mask counts, 0 elsewhere.
void write_counted(const bool* mask, int64_t n, float value, float* out);
void write_counted(const bool* mask, int64_t n, double value, double* out);

// What `merge_mask` does; labels and merged may be null. Whether the mask holds only 0 and 1.
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
