// Scalar math that vectorizes in loops: no calls, no tables, selects instead of branches.
//
// It does not rely on -ffast-math, and propagates NaN and infinities as in IEEE 754.
#pragma once

#include <bit>
#include <cstdint>
#include <iterator>
#include <limits>

#define GSPO_INLINE inline __attribute__((always_inline))

namespace gspo_kernels {

// Conversions of 16-bit floats by exact integer arithmetic, independent of flush-to-zero modes.
struct BFloat16 {
    uint16_t bits;
};
struct Half {
    uint16_t bits;
};

template <class S>
GSPO_INLINE S select(bool condition, S yes, S no) {
    return condition ? yes : no;
}

GSPO_INLINE float to_float(float x) {
    return x;
}
GSPO_INLINE double to_float(double x) {
    return x;
}

GSPO_INLINE float to_float(BFloat16 x) {
    return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

// Magnitudes are compared as signed integers, for vector units.
GSPO_INLINE float to_float(Half x) {
    const int32_t magnitude = x.bits & 0x7fff;
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
    // Exponents are rebased by 127 - 15, those of infinities and NaN by as much again; subnormals are
    // integers in units of 2^-24.
    const int32_t rebased = (magnitude << 13) + select(magnitude < 0x7c00, 112 << 23, 224 << 23);
    const int32_t subnormal = std::bit_cast<int32_t>(static_cast<float>(magnitude) * 0x1p-24f);
    return std::bit_cast<float>(select(magnitude < 0x0400, subnormal, rebased) | sign);
}

GSPO_INLINE void from_float(float x, float& out) {
    out = x;
}
GSPO_INLINE void from_float(double x, double& out) {
    out = x;
}
GSPO_INLINE void from_float(float x, double& out) {
    out = x;
}
GSPO_INLINE void from_float(double x, float& out) {
    out = static_cast<float>(x);
}

// Round to nearest even.
GSPO_INLINE void from_float(float x, BFloat16& out) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    out.bits = static_cast<uint16_t>(select(x != x, 0x7fc0u, rounded));
}

GSPO_INLINE void from_float(float x, Half& out) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const int32_t magnitude = bits & 0x7fffffffu;
    const int32_t normal = (magnitude - (112 << 23) + 0x0fff + ((magnitude >> 13) & 1)) >> 13;
    // In [0.5, 1) a float counts in units of 2^-24, as fp16 subnormals do: adding 0.5 rounds to them.
    const int32_t subnormal =
        std::bit_cast<int32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<int32_t>(0.5f);
    int32_t result = select(magnitude < 0x38800000, subnormal, normal);
    result = select(magnitude < 0x477ff000, result, 0x7c00);  // 65520 and above round to infinity
    result = select(magnitude > 0x7f800000, 0x7e00, result);
    out.bits = static_cast<uint16_t>(result | ((bits >> 16) & 0x8000u));
}

GSPO_INLINE void from_float(double x, BFloat16& out) {
    from_float(static_cast<float>(x), out);
}
GSPO_INLINE void from_float(double x, Half& out) {
    from_float(static_cast<float>(x), out);
}

// exp(r) = 1 + r + r^2 P(r) on |r| <= ln(2) / 2: P is the Chebyshev fit whose error, times r^2, is below a
// twentieth of the type's rounding. ln 2 is split so that n * ln2_high is exact without a fused multiply-add.
template <class S>
struct ExpConstants;

template <>
struct ExpConstants<float> {
    using Bits = uint32_t;
    static constexpr float lowest = -0x1.5d589ep+6f;  // ln of the smallest normal number
    static constexpr float log2_e = 0x1.715476p+0f, ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;
    static constexpr float round =
        0x1.8p23f;  // adding it leaves the rounded integer in the low mantissa bits
    static constexpr int mantissa = 23;
    static constexpr float p[] = {0x1.0p-1f, 0x1.5554dcp-3f, 0x1.555518p-5f, 0x1.120be2p-7f, 0x1.6d117cp-10f};
};

template <>
struct ExpConstants<double> {
    using Bits = uint64_t;
    static constexpr double lowest = -0x1.6232bdd7abcd2p+9;
    static constexpr double log2_e = 0x1.71547652b82fep+0, ln2_high = 0x1.62e42fefap-1,
                            ln2_low = 0x1.cf79abc9e3b3ap-40;
    static constexpr double round = 0x1.8p52;
    static constexpr int mantissa = 52;
    static constexpr double p[] = {0x1.0000000000001p-1,  0x1.5555555555556p-3,  0x1.5555555553d37p-5,
                                   0x1.11111111109a6p-7,  0x1.6c16c1789d1d7p-10, 0x1.a01a01a7cebcdp-13,
                                   0x1.a019b8ca26fcfp-16, 0x1.71de0d85293b8p-19, 0x1.2891d4ffbb0f9p-22,
                                   0x1.af390ba7e6f47p-26};
};

template <class S>
struct PowerOfTwoAndExpm1 {
    S power;  // 2^n
    S expm1;  // exp(r) - 1, where x = n ln 2 + r
};

template <class S>
GSPO_INLINE PowerOfTwoAndExpm1<S> reduced_exp(S x) {
    using C = ExpConstants<S>;
    using Bits = typename C::Bits;
    const S shifted = x * C::log2_e + C::round;
    const S n = shifted - C::round;
    const S r = (x - n * C::ln2_high) - n * C::ln2_low;
    constexpr int degree = static_cast<int>(std::size(C::p)) - 1;
    S polynomial = C::p[degree];
#pragma GCC unroll 16
    for (int i = degree - 1; i >= 0; --i) polynomial = polynomial * r + C::p[i];
    const Bits power = (std::bit_cast<Bits>(shifted) << C::mantissa) + std::bit_cast<Bits>(S(1));
    return {std::bit_cast<S>(power), r + (r * r) * polynomial};
}

// exp(x) for x up to a little above 0; subnormal results are 0. exp(-inf) is 0, exp(NaN) is NaN.
template <class S>
GSPO_INLINE S exp_nonpositive(S x) {
    const auto [power, expm1] = reduced_exp(x);
    return select(x < ExpConstants<S>::lowest, S(0), power + power * expm1);
}

// log(1 + x) for x in [0, 1] with full relative accuracy, as 2 artanh(x / (2 + x)).
template <class S>
GSPO_INLINE S log1p_unit(S x) {
    const S y = x / (2 + x), q = y * y;
    // q <= 1/9: the first omitted term is below a tenth of the type's rounding.
    constexpr int terms = sizeof(S) == 4 ? 7 : 16;
    S series = S(1) / (2 * terms + 1);
#pragma GCC unroll 16
    for (int k = terms - 1; k >= 0; --k) series = series * q + S(1) / (2 * k + 1);
    return 2 * y * series;
}

template <class S>
struct TanhAndSlope {
    S tanh;
    S slope;  // 1 - tanh^2, without its cancellation
};

// Through e = exp(-2|u|): tanh is 1 - 2e / (1 + e) where e is small, -expm1(-2|u|) / (1 + e) where u is.
template <class S>
GSPO_INLINE TanhAndSlope<S> tanh_and_slope(S u) {
    S x = S(-2) * select(u < 0, -u, u);
    x = select(x < ExpConstants<S>::lowest, ExpConstants<S>::lowest, x);
    const auto [power, reduced] = reduced_exp(x);
    const S e = power + power * reduced;
    const S minus_expm1 = (1 - power) - power * reduced;
    const bool e_is_small = e < S(0.25);
    const S quotient = select(e_is_small, 2 * e, minus_expm1) / (1 + e);
    const S magnitude = select(e_is_small, 1 - quotient, quotient);
    return {select(u < 0, -magnitude, magnitude), 4 * e / ((1 + e) * (1 + e))};
}

}  // namespace gspo_kernels
