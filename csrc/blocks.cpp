// Each loop is compiled once per instruction set.
//
// `#pragma omp simd` (-fopenmp-simd, without an OpenMP runtime) allows these sums to be reordered over vector
// lanes. The order depends only on the instruction set; results are reproducible for any number of threads.
#include "blocks.h"

#include <algorithm>

#include "avx512.h"
#include "clones.h"

#ifdef GSPO_HAS_CLONES
#define GSPO_F16C
#include <immintrin.h>
#endif

namespace gspo_kernels {
namespace {

template <class S>
GSPO_INLINE S maximum_of(const S* z, int64_t n) {
    S result = -std::numeric_limits<S>::infinity();
#pragma omp simd reduction(max : result)
    for (int64_t i = 0; i < n; ++i) result = z[i] > result ? z[i] : result;
    return result;
}

template <class S>
GSPO_INLINE S sum_exp_of(const S* z, int64_t n, S shift) {
    S sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += exp_nonpositive(z[i] - shift);
    return sum;
}

template <class S>
GSPO_INLINE ExpSums<S> sum_exp_weighted_of(const S* z, int64_t n, S shift) {
    S sum = 0, weighted = 0;
#pragma omp simd reduction(+ : sum, weighted)
    for (int64_t i = 0; i < n; ++i) {
        const S x = z[i] - shift;
        const S e = exp_nonpositive(x);
        sum += e;
        // exp(-inf) * -inf has the limit 0.
        weighted += e * select(x < ExpConstants<S>::lowest, S(0), x);
    }
    return {sum, weighted};
}

template <class S>
GSPO_INLINE S write_exp_of(const S* z, int64_t n, S shift, S* out) {
    S sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) {
        const S e = exp_nonpositive(z[i] - shift);
        out[i] = e;
        sum += e;
    }
    return sum;
}

template <class S>
GSPO_INLINE void shrink_of(S* out, int64_t n, S factor) {
    for (int64_t i = 0; i < n; ++i) {
        const S value = out[i] * factor;
        out[i] = select(value < std::numeric_limits<S>::min(), S(0), value);
    }
}

template <class S>
GSPO_INLINE void cut_of(S* z, int64_t n, const int32_t* kept, S fill) {
    for (; n > 0; n -= 32, z += 32, ++kept) {
        const uint32_t word = *kept;
        if (n >= 32) {
            for (int i = 0; i < 32; ++i) z[i] = select((word & (1u << i)) != 0, z[i], fill);
        } else {
            for (int i = 0; i < n; ++i) z[i] = select((word & (1u << i)) != 0, z[i], fill);
        }
    }
}

template <class S>
GSPO_INLINE void transform_of(S* z, int64_t n, const Transform<S>& parameters, S* slope) {
    const auto [scale, softcap, temperature] = parameters;
    if (softcap == 0) {
#pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i) z[i] = z[i] * scale / temperature;
    } else if (slope == nullptr) {
#pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i)
            z[i] = softcap * tanh_and_slope(z[i] * scale / softcap).tanh / temperature;
    } else {
#pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i) {
            const auto [tanh, derivative] = tanh_and_slope(z[i] * scale / softcap);
            z[i] = softcap * tanh / temperature;
            slope[i] = derivative;
        }
    }
}

template <class S>
GSPO_INLINE void gradient_of(const S* z, int64_t n, const RowGradient<S>& row, S* out) {
    const auto [shift, log_sum, c, entropy_c, entropy] = row;
    if (entropy_c == 0) {
#pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i) out[i] = -c * exp_nonpositive((z[i] - shift) - log_sum);
    } else {
#pragma GCC ivdep
        for (int64_t i = 0; i < n; ++i) {
            const S log_p = (z[i] - shift) - log_sum;
            const S p = exp_nonpositive(log_p);
            const S surprise = select(log_p < ExpConstants<S>::lowest, S(0), log_p + entropy);
            out[i] = -p * (c + entropy_c * surprise);
        }
    }
}

template <class S>
struct LogProbs {
    S student, teacher;
};

template <class S>
GSPO_INLINE LogProbs<S> log_probs(S z, S t, const Normalizers<S>& rows) {
    return {(z - rows.shift) - rows.log_sum, (t - rows.teacher_shift) - rows.teacher_log_sum};
}

// A term of the sum of q log(q / p) - q + p, never below 0, in which roundings of the log-sum-exps cancel.
template <class S>
GSPO_INLINE S relative_entropy(S q, S log_q, S p, S log_p) {
    return select(q == 0, p, q * (log_q - log_p) + (p - q));
}

template <class S>
GSPO_INLINE S forward_kl_of(const S* z, const S* t, int64_t n, const Normalizers<S>& rows, S c, S* out) {
    S sum = 0;
    if (out == nullptr) {
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < n; ++i) {
            const auto [log_p, log_q] = log_probs(z[i], t[i], rows);
            sum += relative_entropy(exp_nonpositive(log_q), log_q, exp_nonpositive(log_p), log_p);
        }
    } else {
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < n; ++i) {
            const auto [log_p, log_q] = log_probs(z[i], t[i], rows);
            const S p = exp_nonpositive(log_p), q = exp_nonpositive(log_q);
            sum += relative_entropy(q, log_q, p, log_p);
            out[i] = c * (p - q);
        }
    }
    return sum;
}

template <class S>
GSPO_INLINE S reverse_kl_of(const S* z, const S* t, int64_t n, const Normalizers<S>& rows) {
    S sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) {
        const auto [log_p, log_q] = log_probs(z[i], t[i], rows);
        sum += relative_entropy(exp_nonpositive(log_p), log_p, exp_nonpositive(log_q), log_q);
    }
    return sum;
}

template <class S>
GSPO_INLINE void reverse_kl_gradient_of(const S* z, const S* t, int64_t n, const Normalizers<S>& rows, S c,
                                        S value, S* out) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
        const auto [log_p, log_q] = log_probs(z[i], t[i], rows);
        const S p = exp_nonpositive(log_p);
        out[i] = select(p == 0, S(0), p * (c * ((log_p - log_q) - value)));
    }
}

template <class S>
struct ToMixture {
    S student, teacher;  // log(p / m), log(q / m)
};

// Computed from x = log(beta q) - log((1 - beta) p), where m = (1 - beta) p + beta q, to avoid inf - inf if p
// or q is 0.
template <class S>
GSPO_INLINE ToMixture<S> to_mixture(S log_p, S log_q, const Mixture<S>& mixture) {
    const S x = (log_q - log_p) + mixture.log_odds;
    const S above = select(x > 0, x, S(0)), below = select(x > 0, S(0), x);
    const S log_sum = log1p_unit(exp_nonpositive(below - above));
    return {(-mixture.log_student - above) - log_sum, (below - mixture.log_teacher) - log_sum};
}

template <class S>
GSPO_INLINE Divergences<S> jensen_shannon_of(const S* z, const S* t, int64_t n, const Normalizers<S>& rows,
                                             const Mixture<S>& mixture) {
    S value = 0, of_student = 0;
#pragma omp simd reduction(+ : value, of_student)
    for (int64_t i = 0; i < n; ++i) {
        const auto [log_p, log_q] = log_probs(z[i], t[i], rows);
        const S p = exp_nonpositive(log_p), q = exp_nonpositive(log_q);
        const auto [student, teacher] = to_mixture(log_p, log_q, mixture);
        const S kl_p = select(p == 0, S(0), p * student), kl_q = select(q == 0, S(0), q * teacher);
        value += (1 - mixture.beta) * kl_p + mixture.beta * kl_q;
        of_student += kl_p;
    }
    return {value, of_student};
}

template <class S>
GSPO_INLINE void jensen_shannon_gradient_of(const S* z, const S* t, int64_t n, const Normalizers<S>& rows,
                                            const Mixture<S>& mixture, S c, S of_student, S* out) {
    c *= 1 - mixture.beta;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
        const auto [log_p, log_q] = log_probs(z[i], t[i], rows);
        const S p = exp_nonpositive(log_p);
        const S far = to_mixture(log_p, log_q, mixture).student - of_student;
        out[i] = select(p == 0, S(0), p * (c * far));
    }
}

template <class T, class S>
GSPO_INLINE void load_of(const T* x, int64_t stride, int64_t n, S* __restrict z) {
    if (stride == 1) {
        for (int64_t i = 0; i < n; ++i) z[i] = to_float(x[i]);
    } else {
        for (int64_t i = 0; i < n; ++i) z[i] = to_float(x[i * stride]);
    }
}

template <class S, class T>
GSPO_INLINE void store_of(const S* __restrict g, int64_t n, T* out) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) from_float(g[i], out[i]);
}

}  // namespace

#define GSPO_DEFINE_EXPONENTIALS(S)                                                       \
    GSPO_CLONES S maximum(const S* z, int64_t n) {                                        \
        return maximum_of(z, n);                                                          \
    }                                                                                     \
    GSPO_CLONES S sum_exp(const S* z, int64_t n, S shift) {                               \
        return sum_exp_of(z, n, shift);                                                   \
    }                                                                                     \
    GSPO_CLONES ExpSums<S> sum_exp_weighted(const S* z, int64_t n, S shift) {             \
        return sum_exp_weighted_of(z, n, shift);                                          \
    }                                                                                     \
    GSPO_CLONES S write_exp(const S* z, int64_t n, S shift, S* out) {                     \
        return write_exp_of(z, n, shift, out);                                            \
    }                                                                                     \
    GSPO_CLONES void gradient(const S* z, int64_t n, const RowGradient<S>& row, S* out) { \
        gradient_of(z, n, row, out);                                                      \
    }
GSPO_DEFINE_EXPONENTIALS(double)

#define GSPO_DEFINE_FOR_STATS(S)                                                                             \
    GSPO_CLONES void transform(S* z, int64_t n, const Transform<S>& parameters, S* slope) {                  \
        transform_of(z, n, parameters, slope);                                                               \
    }                                                                                                        \
    GSPO_CLONES void cut(S* z, int64_t n, const int32_t* kept, S fill) {                                     \
        cut_of(z, n, kept, fill);                                                                            \
    }                                                                                                        \
    GSPO_CLONES void scale(const S* z, int64_t n, S factor, S* out) {                                        \
        _Pragma("GCC ivdep") for (int64_t i = 0; i < n; ++i) out[i] = z[i] * factor;                         \
    }                                                                                                        \
    GSPO_CLONES void multiply(S* out, const S* factor, int64_t n) {                                          \
        for (int64_t i = 0; i < n; ++i) out[i] *= factor[i];                                                 \
    }                                                                                                        \
    GSPO_CLONES void shrink(S* out, int64_t n, S factor) {                                                   \
        shrink_of(out, n, factor);                                                                           \
    }                                                                                                        \
    GSPO_CLONES S forward_kl(const S* z, const S* t, int64_t n, const Normalizers<S>& rows, S c, S* out) {   \
        return forward_kl_of(z, t, n, rows, c, out);                                                         \
    }                                                                                                        \
    GSPO_CLONES S reverse_kl(const S* z, const S* t, int64_t n, const Normalizers<S>& rows) {                \
        return reverse_kl_of(z, t, n, rows);                                                                 \
    }                                                                                                        \
    GSPO_CLONES void reverse_kl_gradient(const S* z, const S* t, int64_t n, const Normalizers<S>& rows, S c, \
                                         S value, S* out) {                                                  \
        reverse_kl_gradient_of(z, t, n, rows, c, value, out);                                                \
    }                                                                                                        \
    GSPO_CLONES Divergences<S> jensen_shannon(const S* z, const S* t, int64_t n, const Normalizers<S>& rows, \
                                              const Mixture<S>& mixture) {                                   \
        return jensen_shannon_of(z, t, n, rows, mixture);                                                    \
    }                                                                                                        \
    GSPO_CLONES void jensen_shannon_gradient(const S* z, const S* t, int64_t n, const Normalizers<S>& rows,  \
                                             const Mixture<S>& mixture, S c, S of_student, S* out) {         \
        jensen_shannon_gradient_of(z, t, n, rows, mixture, c, of_student, out);                              \
    }
GSPO_DEFINE_FOR_STATS(float)
GSPO_DEFINE_FOR_STATS(double)

#define GSPO_DEFINE_LOAD(NAME, T, S)                                     \
    GSPO_CLONES void NAME(const T* x, int64_t stride, int64_t n, S* z) { \
        load_of(x, stride, n, z);                                        \
    }
GSPO_DEFINE_LOAD(load, float, float)
GSPO_DEFINE_LOAD(load, BFloat16, float)
GSPO_DEFINE_LOAD(load_any, Half, float)
GSPO_DEFINE_LOAD(load, double, double)

#define GSPO_DEFINE_STORE(NAME, S, T)                      \
    GSPO_CLONES void NAME(const S* g, int64_t n, T* out) { \
        store_of(g, n, out);                               \
    }
GSPO_DEFINE_STORE(store, float, float)
GSPO_DEFINE_STORE(store_any, float, Half)
GSPO_DEFINE_STORE(store, float, double)
GSPO_DEFINE_STORE(store, double, float)
GSPO_DEFINE_STORE(store, double, BFloat16)
GSPO_DEFINE_STORE(store, double, Half)
GSPO_DEFINE_STORE(store, double, double)

namespace portable {
GSPO_DEFINE_EXPONENTIALS(float)
GSPO_DEFINE_STORE(store, float, BFloat16)
}  // namespace portable

#ifdef GSPO_AVX512
#define GSPO_BEST(CALL) avx512::available() ? avx512::CALL : portable::CALL
#else
#define GSPO_BEST(CALL) portable::CALL
#endif

float maximum(const float* z, int64_t n) {
    return GSPO_BEST(maximum(z, n));
}
float sum_exp(const float* z, int64_t n, float shift) {
    return GSPO_BEST(sum_exp(z, n, shift));
}
ExpSums<float> sum_exp_weighted(const float* z, int64_t n, float shift) {
    return GSPO_BEST(sum_exp_weighted(z, n, shift));
}
float write_exp(const float* z, int64_t n, float shift, float* out) {
    return GSPO_BEST(write_exp(z, n, shift, out));
}
void gradient(const float* z, int64_t n, const RowGradient<float>& row, float* out) {
    GSPO_BEST(gradient(z, n, row, out));
}
void store(const float* g, int64_t n, BFloat16* out) {
    GSPO_BEST(store(g, n, out));
}

// Some processors convert fp16 by one instruction, others need a dozen, as long as an exponential.
#ifdef GSPO_F16C

#define GSPO_TARGET_F16C __attribute__((target("arch=x86-64-v3")))

bool has_f16c() {
    static const bool has = __builtin_cpu_supports("x86-64-v3");
    return has;
}

GSPO_TARGET_F16C void load_halves(const Half* x, int64_t n, float* z) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(z + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
    }
    for (; i < n; ++i) z[i] = to_float(x[i]);
}

GSPO_TARGET_F16C void store_halves(const float* g, int64_t n, Half* out) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(g + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), eight);
    }
    for (; i < n; ++i) from_float(g[i], out[i]);
}

void load(const Half* x, int64_t stride, int64_t n, float* z) {
    if (stride == 1 && has_f16c()) return load_halves(x, n, z);
    load_any(x, stride, n, z);
}

void store(const float* g, int64_t n, Half* out) {
    has_f16c() ? store_halves(g, n, out) : store_any(g, n, out);
}

#else

void load(const Half* x, int64_t stride, int64_t n, float* z) {
    load_any(x, stride, n, z);
}

void store(const float* g, int64_t n, Half* out) {
    store_any(g, n, out);
}

#endif

}  // namespace gspo_kernels
