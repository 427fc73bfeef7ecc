// The vectorized loops: each works on one block of a row, of at most kBlock elements, which stays in L1.
//
// S is the dtype of statistics (float, or double for fp64 logits), T the dtype of a tensor. z are transformed
// logits.
#pragma once

#include <cstdint>

#include "vec_math.h"

namespace gspo_kernels {

constexpr int64_t kBlock = 2048;

// z = logit_scale * x;  z = softcap * tanh(z / softcap) unless softcap is 0;  z = z / temperature
template <class S>
struct Transform {
    S logit_scale, softcap, temperature;
    bool is_identity() const { return logit_scale == 1 && softcap == 0 && temperature == 1; }
};

template <class S>
struct ExpSums {
    S exp;       // sum of exp(z - shift)
    S weighted;  // sum of exp(z - shift) * (z - shift)
};

// d/dz of c * logp(label) + entropy_c * entropy, without the one-hot term: -p (c + entropy_c (log p +
// entropy)). log p = (z - shift) - log_sum; two terms because one float can't hold log-sum-exp when the
// logits are large.
template <class S>
struct RowGradient {
    S shift, log_sum, c, entropy_c, entropy;
};

// log p = (z - shift) - log_sum of a student's and of a teacher's row.
template <class S>
struct Normalizers {
    S shift, log_sum, teacher_shift, teacher_log_sum;
};

template <class S>
struct Divergences {
    S value;       // of the two rows
    S to_mixture;  // the student's forward KL to the mixture
};

// beta of the generalized Jensen-Shannon divergence, with the logarithms that go with it.
template <class S>
struct Mixture {
    S beta, log_odds, log_teacher, log_student;  // log(beta / (1 - beta)), log(beta), log(1 - beta)
};

#define GSPO_DECLARE_FOR_STATS(S)                                                                         \
    S maximum(const S* z, int64_t n); /* ignores NaN; -inf if n is 0 */                                   \
    S sum_exp(const S* z, int64_t n, S shift);                                                            \
    ExpSums<S> sum_exp_weighted(const S* z, int64_t n, S shift);                                          \
    S write_exp(const S* z, int64_t n, S shift, S* out); /* out may be z; returns the sum */              \
    /* In place; slope, where not null, becomes d tanh / d its argument. */                               \
    void transform(S* z, int64_t n, const Transform<S>& parameters, S* slope);                            \
    void gradient(const S* z, int64_t n, const RowGradient<S>& row, S* out); /* out may be z */           \
    /* Writes fill where the mask's bit is 0; element i has bit i % 32 of word i / 32. */                 \
    void cut(S* z, int64_t n, const int32_t* kept, S fill);                                               \
    void scale(const S* z, int64_t n, S factor, S* out); /* out may be z */                               \
    void multiply(S* out, const S* factor, int64_t n);                                                    \
    void shrink(S* out, int64_t n, S factor); /* values >= 0; subnormal results are 0 */                  \
    /* Sums over a block of student's and teacher's logits, and c times their gradients in out, which */  \
    /* may be z or, in forward_kl, null. The _gradient functions take sums over the whole row. */         \
    S forward_kl(const S* z, const S* t, int64_t n, const Normalizers<S>& rows, S c, S* out);             \
    S reverse_kl(const S* z, const S* t, int64_t n, const Normalizers<S>& rows);                          \
    void reverse_kl_gradient(const S* z, const S* t, int64_t n, const Normalizers<S>& rows, S c, S value, \
                             S* out);                                                                     \
    Divergences<S> jensen_shannon(const S* z, const S* t, int64_t n, const Normalizers<S>& rows,          \
                                  const Mixture<S>& mixture);                                             \
    void jensen_shannon_gradient(const S* z, const S* t, int64_t n, const Normalizers<S>& rows,           \
                                 const Mixture<S>& mixture, S c, S to_mixture, S* out);
GSPO_DECLARE_FOR_STATS(float)
GSPO_DECLARE_FOR_STATS(double)
#undef GSPO_DECLARE_FOR_STATS

void load(const float* x, int64_t stride, int64_t n, float* z);
void load(const BFloat16* x, int64_t stride, int64_t n, float* z);
void load(const Half* x, int64_t stride, int64_t n, float* z);
void load(const double* x, int64_t stride, int64_t n, double* z);

#define GSPO_DECLARE_STORE(S)                         \
    void store(const S* g, int64_t n, float* out);    \
    void store(const S* g, int64_t n, BFloat16* out); \
    void store(const S* g, int64_t n, Half* out);     \
    void store(const S* g, int64_t n, double* out);
GSPO_DECLARE_STORE(float)
GSPO_DECLARE_STORE(double)
#undef GSPO_DECLARE_STORE

}  // namespace gspo_kernels
