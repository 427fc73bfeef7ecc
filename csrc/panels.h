// Operands of a matrix product copied into panels of 32-bit units; see tiles.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "tiles.h"
#include "vec_math.h"

namespace gspo_kernels {

// bf16 that is packed as fp32.
struct WidenedBFloat16 {
    uint16_t bits;
};

// Lines (rows of `a`, columns of `b`) of T along K; strides in elements.
template <class T>
struct Lines {
    const T* data;
    int64_t line_stride, k_stride;

    static constexpr int64_t per_unit = std::is_same_v<T, WidenedBFloat16> ? 1 : sizeof(uint32_t) / sizeof(T);
    static int64_t units(int64_t k) { return (k + per_unit - 1) / per_unit; }
    const T* at(int64_t line, int64_t k) const { return data + line * line_stride + k * k_stride; }
};

template <class T>
GSPO_INLINE uint32_t unit_of(const T* first, const T* second) {
    if constexpr (sizeof(T) == sizeof(uint32_t)) {
        return std::bit_cast<uint32_t>(*first);
    } else if constexpr (Lines<T>::per_unit == 1) {
        return static_cast<uint32_t>(first->bits) << 16;
    } else {
        return first->bits | (second ? static_cast<uint32_t>(second->bits) << 16 : 0);
    }
}

typedef uint16_t FourShorts __attribute__((vector_size(8)));
typedef uint16_t EightShorts __attribute__((vector_size(16)));
typedef uint32_t Four __attribute__((vector_size(16)));

struct EightUnits {
    Four low, high;
};

// Interleaves: the i-th unit has the i-th values of `first` and `second`.
GSPO_INLINE EightUnits interleave(EightShorts first, EightShorts second) {
    return {(Four)__builtin_shuffle(first, second, EightShorts{0, 8, 1, 9, 2, 10, 3, 11}),
            (Four)__builtin_shuffle(first, second, EightShorts{4, 12, 5, 13, 6, 14, 7, 15})};
}

// out[j][i] = in[i][j]
GSPO_INLINE void transpose_four(const Four (&in)[4], Four (&out)[4]) {
    const Four low01 = __builtin_shuffle(in[0], in[1], Four{0, 4, 1, 5});
    const Four low23 = __builtin_shuffle(in[2], in[3], Four{0, 4, 1, 5});
    const Four high01 = __builtin_shuffle(in[0], in[1], Four{2, 6, 3, 7});
    const Four high23 = __builtin_shuffle(in[2], in[3], Four{2, 6, 3, 7});
    out[0] = __builtin_shuffle(low01, low23, Four{0, 1, 4, 5});
    out[1] = __builtin_shuffle(low01, low23, Four{2, 3, 6, 7});
    out[2] = __builtin_shuffle(high01, high23, Four{0, 1, 4, 5});
    out[3] = __builtin_shuffle(high01, high23, Four{2, 3, 6, 7});
}

// Loads four contiguous units.
template <class T>
GSPO_INLINE Four load_four(const T* from) {
    if constexpr (sizeof(T) * Lines<T>::per_unit == sizeof(uint32_t)) {
        Four units;
        std::memcpy(&units, from, sizeof(units));
        return units;
    } else {
        FourShorts values;
        std::memcpy(&values, from, sizeof(values));
        return __builtin_convertvector(values, Four) << 16;
    }
}

// Packs four lines, each contiguous along K, side by side: 4 x 4 units are transposed at a time.
template <class T, int64_t width>
GSPO_INLINE void turn_four(const T* const (&lines)[4], int64_t k, uint32_t* panel) {
    constexpr int64_t per_unit = Lines<T>::per_unit;
    const int64_t full_units = k / per_unit;
    int64_t unit = 0;
    for (; unit + 4 <= full_units; unit += 4, panel += 4 * width) {
        Four in[4], out[4];
        for (int i = 0; i < 4; ++i) in[i] = load_four(lines[i] + unit * per_unit);
        transpose_four(in, out);
        for (int i = 0; i < 4; ++i) std::memcpy(panel + i * width, &out[i], sizeof(Four));
    }
    for (; unit < Lines<T>::units(k); ++unit, panel += width) {
        for (int i = 0; i < 4; ++i) {
            const T* first = lines[i] + unit * per_unit;
            panel[i] = unit_of(first, unit < full_units ? first + 1 : nullptr);
        }
    }
}

// Packs `count` lines from `line`, K from `begin` to `end`, into panels of `width` lines with interleaved
// units. The last panel, and units up to a multiple of `step`, are padded with zeros.
template <class T, int64_t width, int64_t step>
void pack(const Lines<T>& from, int64_t line, int64_t count, int64_t begin, int64_t end, uint32_t* panels) {
    constexpr int64_t per_unit = Lines<T>::per_unit;
    const int64_t k = end - begin, filled = Lines<T>::units(k), units = (filled + step - 1) / step * step;
    if (count % width != 0) std::fill_n(panels + count / width * width * units, width * units, 0);
    for (int64_t panel = 0; filled < units && panel < count / width; ++panel) {
        std::fill_n(panels + (panel * units + filled) * width, (units - filled) * width, 0);
    }
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
        // Write several units of a panel together. Single units would go to cache lines a power of two apart,
        // which conflict in L1.
        constexpr int64_t kTogether = 8;
        for (int64_t begun = 0; begun < filled; begun += kTogether) {
            const int64_t ended = std::min(filled, begun + kTogether);
            uint32_t* panel = panels + begun * width;
            for (int64_t l = 0; l < packed; l += width, panel += width * units) {
                for (int64_t unit = begun; unit < ended; ++unit) {
                    const T* first = from.at(line + l, begin + unit * per_unit);
                    const T* second = (unit + 1) * per_unit <= k ? first + from.k_stride : nullptr;
                    uint32_t* out = panel + (unit - begun) * width;
                    if (per_unit == 2 && width % 8 == 0 && second) {
                        for (int64_t i = 0; i < width; i += 8) {
                            EightShorts low, high;
                            std::memcpy(&low, first + i, sizeof(low));
                            std::memcpy(&high, second + i, sizeof(high));
                            const auto units = interleave(low, high);
                            std::memcpy(out + i, &units, sizeof(units));
                        }
                    } else if (second) {
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
        for (int64_t unit = 0; unit < filled; ++unit, panel += width) {
            const T* first = from.at(line + packed, begin + unit * per_unit);
            *panel = unit_of(first, (unit + 1) * per_unit <= k ? first + from.k_stride : nullptr);
        }
    }
}

// Packs the same lines into panels for AMX: for each kAmxUnits along K, the units of each line are
// contiguous.
inline void pack_amx_rows(const Lines<BFloat16>& from, int64_t line, int64_t count, int64_t begin,
                          int64_t end, uint32_t* panels) {
    constexpr int64_t width = kAmxRows, step = kAmxUnits, block = width * step;
    const int64_t k = end - begin, steps = (k + 2 * step - 1) / (2 * step);
    const auto place = [&](int64_t i, int64_t unit) {
        return panels + (i / width * steps + unit / step) * block + i % width * step + unit % step;
    };
    if (count % width != 0) std::fill_n(place(count / width * width, 0), steps * block, 0);
    for (int64_t i = 0; k % (2 * step) != 0 && i < count / width * width; i += width) {
        std::fill_n(place(i, (steps - 1) * step), block, 0);
    }
    int64_t packed = 0;
    if (from.k_stride == 1) {
        for (; packed < count; ++packed) {
            const BFloat16* row = from.at(line + packed, begin);
            if (packed + 2 < count) {
                const char* ahead = reinterpret_cast<const char*>(from.at(line + packed + 2, begin));
                for (int64_t byte = 0; byte < 2 * k; byte += 64) __builtin_prefetch(ahead + byte);
            }
            int64_t i = 0;
            uint32_t* out = place(packed, 0);
            for (; i + 2 * step <= k; i += 2 * step, out += block) std::memcpy(out, row + i, 4 * step);
            if (i < k) std::memcpy(out, row + i, 2 * (k - i));
        }
    } else if (from.line_stride == 1) {
        packed = count / 8 * 8;
        const auto eight = [&](int64_t i, int64_t at) {
            EightShorts values{};
            if (at < k) std::memcpy(&values, from.at(line + i, begin + at), sizeof(values));
            return values;
        };
        for (int64_t unit = 0; 2 * unit < k; unit += 4) {
            for (int64_t i = 0; i < packed; i += 8) {
                Four low[4], high[4], out[4];
                for (int64_t j = 0; j < 4; ++j) {
                    const EightShorts first = eight(i, 2 * (unit + j)), second = eight(i, 2 * (unit + j) + 1);
                    const EightUnits units = interleave(first, second);
                    low[j] = units.low, high[j] = units.high;
                }
                uint32_t* to = place(i, unit);
                transpose_four(low, out);
                for (int64_t j = 0; j < 4; ++j) std::memcpy(to + j * step, &out[j], sizeof(Four));
                transpose_four(high, out);
                for (int64_t j = 0; j < 4; ++j) std::memcpy(to + (4 + j) * step, &out[j], sizeof(Four));
            }
        }
    }
    for (; packed < count; ++packed) {
        for (int64_t i = 0; i < k; i += 2) {
            const BFloat16* first = from.at(line + packed, begin + i);
            *place(packed, i / 2) = unit_of(first, i + 1 < k ? first + from.k_stride : nullptr);
        }
    }
}

// Panels of `a` and of `b` for tiles in vector registers; a step along K is one unit.
template <class T>
struct VectorPanels {
    using Value = T;
    static constexpr int64_t rows = kTileRows, step = 1, block_rows = 86 * rows;
    static constexpr auto pack_a = pack<T, rows, step>, pack_b = pack<T, kTileColumns, step>;
};

// Panels of `a` and of `b` for AMX.
struct AmxPanels {
    using Value = BFloat16;
    static constexpr int64_t rows = kAmxRows, step = kAmxUnits, block_rows = 16 * rows;
    static constexpr auto pack_a = pack_amx_rows, pack_b = pack<BFloat16, kTileColumns, step>;
};

}  // namespace gspo_kernels
