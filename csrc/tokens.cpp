#include "tokens.h"

#include <algorithm>
#include <bit>
#include <type_traits>

#include "clones.h"
#include "vec_math.h"

namespace gspo_kernels {
namespace {

template <class S, class O>
GSPO_INLINE CountedSum counted_sum_of(const S* now, const O* old, const bool* mask, int64_t n) {
    constexpr int64_t kLanes = 16, kAtOnce = 128;
    alignas(64) double sums[kLanes] = {}, terms[kAtOnce];
    const uint8_t* counts = reinterpret_cast<const uint8_t*>(mask);
    int64_t count = 0;
    for (int64_t begin = 0; begin < n; begin += kAtOnce) {
        const int64_t size = n - begin < kAtOnce ? n - begin : kAtOnce;
        uint8_t counted_here = 0;
        for (int64_t i = 0; i < size; ++i) {
            const double a = now[begin + i], b = old[begin + i];
            terms[i] = select(counts[begin + i] == 0, 0.0, select(a == b, 0.0, a - b));
        }
        for (int64_t i = 0; i < size; ++i) counted_here += counts[begin + i];
        count += counted_here;
        for (int64_t i = size; i % kLanes != 0; ++i) terms[i] = 0;
        for (int64_t i = 0; i < size; i += kLanes) {
            for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += terms[i + lane];
        }
    }
    for (int64_t half = kLanes / 2; half > 0; half /= 2) {
        for (int64_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    }
    return {count, sums[0]};
}

// As integers, positive numbers keep their order, and negative numbers are below them.
template <class S>
GSPO_INLINE bool any_above_of(const S* values, int64_t n) {
    using Bits = std::conditional_t<sizeof(S) == 4, int32_t, int64_t>;
    constexpr int64_t kLanes = 64;
    alignas(64) Bits lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const Bits bits = std::bit_cast<Bits>(values[i + lane]);
            lanes[lane] = select(bits > lanes[lane], bits, lanes[lane]);
        }
    }
    for (; i < n; ++i) lanes[0] = std::max(lanes[0], std::bit_cast<Bits>(values[i]));
    Bits highest = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) highest = std::max(highest, lanes[lane]);
    return highest > std::bit_cast<Bits>(S(kHighestLogprob));
}

template <class S>
GSPO_INLINE void write_counted_of(const bool* mask, int64_t n, S value, S* __restrict out) {
    const uint8_t* counts = reinterpret_cast<const uint8_t*>(mask);
    for (int64_t i = 0; i < n; ++i) out[i] = select(counts[i] == 0, S(0), value);
}

template <class N>
GSPO_INLINE bool merge_of(const N* mask, const int64_t* labels, int64_t ignore_index, int64_t n,
                          bool* counted, int64_t* merged) {
    uint8_t* __restrict counts = reinterpret_cast<uint8_t*>(counted);
    uint8_t other = 0;
    for (int64_t i = 0; i < n; ++i) {
        counts[i] = select<uint8_t>(mask[i] == N(0), 0, 1);
        other |= select<uint8_t>(mask[i] == N(0), 0, select<uint8_t>(mask[i] == N(1), 0, 1));
    }
#pragma GCC ivdep
    for (int64_t i = 0; labels && i < n; ++i) counts[i] &= labels[i] != ignore_index;
#pragma GCC ivdep
    for (int64_t i = 0; merged && i < n; ++i) merged[i] = mask[i] != N(0) ? labels[i] : ignore_index;
    return other == 0;
}

}  // namespace

#define GSPO_DEFINE_COUNTED_SUM(S, O)                                                             \
    GSPO_CLONES CountedSum counted_sum(const S* now, const O* old, const bool* mask, int64_t n) { \
        return counted_sum_of(now, old, mask, n);                                                 \
    }
GSPO_DEFINE_COUNTED_SUM(float, float)
GSPO_DEFINE_COUNTED_SUM(float, double)
GSPO_DEFINE_COUNTED_SUM(double, float)
GSPO_DEFINE_COUNTED_SUM(double, double)

#define GSPO_DEFINE_ANY_ABOVE(S)                             \
    GSPO_CLONES bool any_above(const S* values, int64_t n) { \
        return any_above_of(values, n);                      \
    }
GSPO_DEFINE_ANY_ABOVE(float)
GSPO_DEFINE_ANY_ABOVE(double)

#define GSPO_DEFINE_WRITE_COUNTED(S)                                               \
    GSPO_CLONES void write_counted(const bool* mask, int64_t n, S value, S* out) { \
        write_counted_of(mask, n, value, out);                                     \
    }
GSPO_DEFINE_WRITE_COUNTED(float)
GSPO_DEFINE_WRITE_COUNTED(double)

#define GSPO_DEFINE_MERGE(N)                                                                      \
    GSPO_CLONES bool merge(const N* mask, const int64_t* labels, int64_t ignore_index, int64_t n, \
                           bool* counted, int64_t* merged) {                                      \
        return merge_of(mask, labels, ignore_index, n, counted, merged);                          \
    }
GSPO_DEFINE_MERGE(bool)
GSPO_DEFINE_MERGE(float)
GSPO_DEFINE_MERGE(double)
GSPO_DEFINE_MERGE(int32_t)
GSPO_DEFINE_MERGE(int64_t)

}  // namespace gspo_kernels
