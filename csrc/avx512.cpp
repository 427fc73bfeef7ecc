#include "avx512.h"

#ifdef GSPO_AVX512

// GCC 12 warns about undefined operands of its own intrinsics (bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

namespace gspo_kernels::avx512 {

bool available() {
    static const bool has = __builtin_cpu_supports("x86-64-v4");
    return has;
}

#pragma GCC target("arch=x86-64-v4")

namespace {

constexpr int kLanes = 16;
constexpr __mmask16 kAll = 0xffff;

__m512 read(const float* x, __mmask16 lanes) {
    return _mm512_maskz_loadu_ps(lanes, x);
}

__m512 read(const BFloat16* x, __mmask16 lanes) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

__m512 read(const Half* x, __mmask16 lanes) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, x));
}

// Rounds to nearest even.
template <class O>
class Writer;

template <>
class Writer<float> {
  public:
    explicit Writer(bool stream = false) : stream_(stream) {}

    void operator()(__m512 x, float* out, __mmask16 lanes) const {
        if (stream_ && lanes == kAll) return _mm512_stream_ps(out, x);
        _mm512_mask_storeu_ps(out, lanes, x);
    }

  private:
    const bool stream_;
};

template <>
class Writer<Half> {
  public:
    explicit Writer(bool = false) {}

    void operator()(__m512 x, Half* out, __mmask16 lanes) const {
        _mm256_mask_storeu_epi16(out, lanes, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
};

template <>
class Writer<BFloat16> {
  public:
    explicit Writer(bool = false) {}

    void operator()(__m512 x, BFloat16* out, __mmask16 lanes) const {
        const bool at_once = native_ && !any_subnormal(_mm512_castps_si512(x));
        _mm256_mask_storeu_epi16(out, lanes, at_once ? rounded_at_once(x) : rounded(x));
    }

  private:
    static bool any_subnormal(__m512i bits) {
        const __mmask16 small = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
        return _mm512_mask_test_epi32_mask(small, bits, _mm512_set1_epi32(0x007fffff));
    }

    // Turns subnormal numbers into 0. Not an intrinsic, because every caller would need its target.
    static __m256i rounded_at_once(__m512 x) {
        __m256i result;
        asm("vcvtneps2bf16 %1, %0" : "=v"(result) : "v"(x));
        return result;
    }

    static __m256i rounded(__m512 x) {
        const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
        const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        return _mm512_cvtepi32_epi16(
            _mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), nan, _mm512_set1_epi32(0x7fc0)));
    }

    const bool native_ = __builtin_cpu_supports("avx512bf16");
};

// 2^(j / 16), less what j adds when it is shifted into the exponent together with the integer above it.
alignas(64) constexpr uint32_t kPowers[kLanes] = {
    0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532, 0x3f75fed7, 0x3f75583f,
    0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c, 0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d,
};

// exp_nonpositive with a relative error of 1.1e-7 for x above -10 and of 3.2e-7 at the lowest x, far less
// than that of rounding x. With x = n ln(2) / 16 + r and a table of 2^(n / 16) in a register, exp(r) needs
// three terms: six multiplications in all, instead of ten.
class Exponential {
    using C = ExpConstants<float>;

  public:
    Exponential() : round_(_mm512_set1_ps(C::round)), powers_(_mm512_load_si512(kPowers)) {}

    __m512 operator()(__m512 x) const {
        const __m512 shifted = _mm512_fmadd_ps(x, _mm512_set1_ps(kLanes * C::log2_e), round_);
        const __m512 n = _mm512_sub_ps(shifted, round_);
        const __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.62e43p-1f / kLanes), x);
        // The bits end with n; the permute reads the lowest four of them.
        const __m512i bits = _mm512_castps_si512(shifted);
        const __m512i power = _mm512_add_epi32(_mm512_permutexvar_epi32(bits, powers_),
                                               _mm512_slli_epi32(bits, C::mantissa - 4));
        const __m512 p = _mm512_fmadd_ps(r, _mm512_set1_ps(1.0f / 6), _mm512_set1_ps(0.5f));
        const __m512 expm1 = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, r);
        const __m512 scale = _mm512_castsi512_ps(power);
        return _mm512_maskz_fmadd_ps(not_zero(x), scale, expm1, scale);
    }

    // Where exp(x) is not 0.
    static __mmask16 not_zero(__m512 x) {
        return _mm512_cmp_ps_mask(x, _mm512_set1_ps(C::lowest), _CMP_NLT_UQ);
    }

  private:
    __m512 round_;
    __m512i powers_;
};

// The index of each vector's first element, and the lanes that have elements.
template <class Work>
GSPO_INLINE void for_each_vector(int64_t n, const Work& work) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) work(i, kAll);
    if (i < n) work(i, static_cast<__mmask16>((1u << (n - i)) - 1));
}

}  // namespace

template <class T>
float maximum(const T* z, int64_t n) {
    const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 highest[4] = {lowest, lowest, lowest, lowest};  // four independent chains, to hide latency
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
        for (int j = 0; j < 4; ++j) highest[j] = _mm512_max_ps(read(z + i + j * kLanes, kAll), highest[j]);
    }
    for_each_vector(n - i, [&](int64_t j, __mmask16 lanes) {
        highest[0] = _mm512_mask_max_ps(highest[0], lanes, read(z + i + j, lanes), highest[0]);
    });
    return _mm512_reduce_max_ps(
        _mm512_max_ps(_mm512_max_ps(highest[0], highest[1]), _mm512_max_ps(highest[2], highest[3])));
}

template <class T>
float sum_exp(const T* z, int64_t n, float shift) {
    const Exponential exponential;
    __m512 sum = _mm512_setzero_ps();
    for_each_vector(n, [&](int64_t i, __mmask16 lanes) {
        const __m512 x = _mm512_sub_ps(read(z + i, lanes), _mm512_set1_ps(shift));
        sum = _mm512_mask_add_ps(sum, lanes, sum, exponential(x));
    });
    return _mm512_reduce_add_ps(sum);
}

template <class T>
ExpSums<float> sum_exp_weighted(const T* z, int64_t n, float shift) {
    const Exponential exponential;
    __m512 sum = _mm512_setzero_ps(), weighted = sum;
    for_each_vector(n, [&](int64_t i, __mmask16 lanes) {
        const __m512 x = _mm512_sub_ps(read(z + i, lanes), _mm512_set1_ps(shift));
        const __m512 e = exponential(x);
        sum = _mm512_mask_add_ps(sum, lanes, sum, e);
        // exp(-inf) * -inf has the limit 0.
        weighted = _mm512_mask3_fmadd_ps(e, x, weighted, lanes & Exponential::not_zero(x));
    });
    return {_mm512_reduce_add_ps(sum), _mm512_reduce_add_ps(weighted)};
}

template <class T>
float write_exp(const T* z, int64_t n, float shift, float* out) {
    const Exponential exponential;
    const Writer<float> write;
    __m512 sum = _mm512_setzero_ps();
    for_each_vector(n, [&](int64_t i, __mmask16 lanes) {
        const __m512 e = exponential(_mm512_sub_ps(read(z + i, lanes), _mm512_set1_ps(shift)));
        write(e, out + i, lanes);
        sum = _mm512_mask_add_ps(sum, lanes, sum, e);
    });
    return _mm512_reduce_add_ps(sum);
}

template <class T, class O>
void gradient(const T* z, int64_t n, const RowGradient<float>& row, O* out, bool stream) {
    const Exponential exponential;
    const Writer<O> write(stream);
    const __m512 minus_c = _mm512_set1_ps(-row.c), entropy_c = _mm512_set1_ps(row.entropy_c);
    const bool with_entropy = row.entropy_c != 0;
    for_each_vector(n, [&](int64_t i, __mmask16 lanes) {
        const __m512 from_shift = _mm512_sub_ps(read(z + i, lanes), _mm512_set1_ps(row.shift));
        const __m512 log_p = _mm512_sub_ps(from_shift, _mm512_set1_ps(row.log_sum));
        __m512 factor = minus_c;
        if (with_entropy) {
            const __m512 surprise =
                _mm512_maskz_add_ps(Exponential::not_zero(log_p), log_p, _mm512_set1_ps(row.entropy));
            factor = _mm512_fnmadd_ps(entropy_c, surprise, minus_c);
        }
        write(_mm512_mul_ps(factor, exponential(log_p)), out + i, lanes);
    });
}

void store(const float* g, int64_t n, BFloat16* out) {
    const Writer<BFloat16> write;
    for_each_vector(n, [&](int64_t i, __mmask16 lanes) { write(read(g + i, lanes), out + i, lanes); });
}

#define GSPO_INSTANTIATE(T)                                                                \
    template float maximum(const T*, int64_t);                                             \
    template float sum_exp(const T*, int64_t, float);                                      \
    template ExpSums<float> sum_exp_weighted(const T*, int64_t, float);                    \
    template float write_exp(const T*, int64_t, float, float*);                            \
    template void gradient(const T*, int64_t, const RowGradient<float>&, float*, bool);    \
    template void gradient(const T*, int64_t, const RowGradient<float>&, BFloat16*, bool); \
    template void gradient(const T*, int64_t, const RowGradient<float>&, Half*, bool);
GSPO_INSTANTIATE(float)
GSPO_INSTANTIATE(BFloat16)
GSPO_INSTANTIATE(Half)

}  // namespace gspo_kernels::avx512

#endif
