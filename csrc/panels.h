// Operands of a matrix product copied into panels of 32-bit units; see tiles.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vec_math.h"

namespace gspo_kernels {

// Lines (rows of `a`, columns of `b`) of T along K; strides in elements.
template <class T>
struct Lines {
    const T* data;
    int64_t line_stride, k_stride;

    static constexpr int64_t per_unit = sizeof(uint32_t) / sizeof(T);
    static int64_t units(int64_t k) { return (k + per_unit - 1) / per_unit; }
    const T* at(int64_t line, int64_t k) const { return data + line * line_stride + k * k_stride; }
};

template <class T>
GSPO_INLINE uint32_t unit_of(const T* first, const T* second) {
    if constexpr (sizeof(T) == sizeof(uint32_t)) {
        return std::bit_cast<uint32_t>(*first);
    } else {
        return first->bits | (second ? static_cast<uint32_t>(second->bits) << 16 : 0);
    }
}

// Four lines, each contiguous along K, side by side: 4 x 4 units are turned at a time.
template <class T, int64_t width>
GSPO_INLINE void turn_four(const T* const (&lines)[4], int64_t k, uint32_t* panel) {
    typedef uint32_t Four __attribute__((vector_size(16)));
    constexpr int64_t per_unit = Lines<T>::per_unit;
    const int64_t whole = k / per_unit;
    int64_t unit = 0;
    for (; unit + 4 <= whole; unit += 4, panel += 4 * width) {
        Four in[4];
        for (int i = 0; i < 4; ++i) std::memcpy(&in[i], lines[i] + unit * per_unit, sizeof(Four));
        const Four low01 = __builtin_shuffle(in[0], in[1], Four{0, 4, 1, 5});
        const Four low23 = __builtin_shuffle(in[2], in[3], Four{0, 4, 1, 5});
        const Four high01 = __builtin_shuffle(in[0], in[1], Four{2, 6, 3, 7});
        const Four high23 = __builtin_shuffle(in[2], in[3], Four{2, 6, 3, 7});
        const Four out[4] = {__builtin_shuffle(low01, low23, Four{0, 1, 4, 5}),
                             __builtin_shuffle(low01, low23, Four{2, 3, 6, 7}),
                             __builtin_shuffle(high01, high23, Four{0, 1, 4, 5}),
                             __builtin_shuffle(high01, high23, Four{2, 3, 6, 7})};
        for (int i = 0; i < 4; ++i) std::memcpy(panel + i * width, &out[i], sizeof(Four));
    }
    for (; unit < Lines<T>::units(k); ++unit, panel += width) {
        for (int i = 0; i < 4; ++i) {
            const T* first = lines[i] + unit * per_unit;
            panel[i] = unit_of(first, unit < whole ? first + 1 : nullptr);
        }
    }
}

// Of `count` lines from `line`, K from `begin` to `end`: panels of `width` lines, the last filled up with
// zeros.
template <class T, int64_t width>
void pack(const Lines<T>& from, int64_t line, int64_t count, int64_t begin, int64_t end, uint32_t* panels) {
    constexpr int64_t per_unit = Lines<T>::per_unit;
    const int64_t k = end - begin, units = Lines<T>::units(k);
    if (count % width != 0) std::fill_n(panels + count / width * width * units, width * units, 0);
    int64_t packed = 0;
    if (from.k_stride == 1) {
        static_assert(width % 4 == 0);
        for (; packed + 4 <= count; packed += 4) {
            for (int64_t next = packed + 4; next < std::min(packed + 8, count); ++next) {
                const char* ahead = reinterpret_cast<const char*>(from.at(line + next, begin));
                for (int64_t byte = 0; byte < k * int64_t{sizeof(T)}; byte += 64) {
                    __builtin_prefetch(ahead + byte);
                }
            }
            const T* const lines[4] = {from.at(line + packed, begin), from.at(line + packed + 1, begin),
                                       from.at(line + packed + 2, begin), from.at(line + packed + 3, begin)};
            turn_four<T, width>(lines, k, panels + packed / width * width * units + packed % width);
        }
    } else if (from.line_stride == 1) {
        packed = count / width * width;
        // Few units at a time: a panel's are written together, where each by itself would be a line apart
        // from the last by a multiple of a power of two, and share its place in L1 with all others.
        constexpr int64_t kTogether = 8;
        for (int64_t begun = 0; begun < units; begun += kTogether) {
            const int64_t ended = std::min(units, begun + kTogether);
            uint32_t* panel = panels + begun * width;
            for (int64_t l = 0; l < packed; l += width, panel += width * units) {
                for (int64_t unit = begun; unit < ended; ++unit) {
                    const T* first = from.at(line + l, begin + unit * per_unit);
                    const T* second = (unit + 1) * per_unit <= k ? first + from.k_stride : nullptr;
                    uint32_t* out = panel + (unit - begun) * width;
                    if (second) {
                        for (int64_t i = 0; i < width; ++i) out[i] = unit_of(first + i, second + i);
                    } else {
                        for (int64_t i = 0; i < width; ++i) out[i] = unit_of<T>(first + i, nullptr);
                    }
                }
            }
        }
    }
    for (; packed < count; ++packed) {
        uint32_t* panel = panels + packed / width * width * units + packed % width;
        for (int64_t unit = 0; unit < units; ++unit, panel += width) {
            const T* first = from.at(line + packed, begin + unit * per_unit);
            *panel = unit_of(first, (unit + 1) * per_unit <= k ? first + from.k_stride : nullptr);
        }
    }
}

}  // namespace gspo_kernels
