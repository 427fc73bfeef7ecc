#include "tiles.h"

#include <bit>

#include "vec_math.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define GSPO_X86 1
#include <immintrin.h>
#endif

namespace gspo_kernels {
namespace {

template <bool bf16>
void portable(const Tile& tile) {
    float sums[kTileRows][kTileColumns] = {};
    const uint32_t *a = tile.a, *b = tile.b;
    for (int64_t k = 0; k < tile.depth; ++k, a += kTileRows, b += kTileColumns) {
        for (int64_t i = 0; i < kTileRows; ++i) {
            for (int64_t j = 0; j < kTileColumns; ++j) {
                if constexpr (!bf16) {
                    sums[i][j] += std::bit_cast<float>(a[i]) * std::bit_cast<float>(b[j]);
                } else {
                    constexpr uint32_t second = 0xffff0000;
                    sums[i][j] += std::bit_cast<float>(a[i] & second) * std::bit_cast<float>(b[j] & second);
                    sums[i][j] += std::bit_cast<float>(a[i] << 16) * std::bit_cast<float>(b[j] << 16);
                }
            }
        }
    }
    for (int64_t i = 0; i < tile.rows; ++i) {
        for (int64_t j = 0; j < tile.columns; ++j) {
            const float base = tile.base ? tile.base[i * tile.base_stride + j] : 0;
            tile.out[i * tile.out_stride + j] = tile.base ? sums[i][j] + base : sums[i][j];
        }
    }
}

#ifdef GSPO_X86

#define GSPO_TARGET_FP32 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define GSPO_TARGET_BF16 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")))

constexpr int kVectors = kTileColumns / 16;

#define GSPO_DEFINE_TILE(NAME, TARGET, MULTIPLY_ADD)                                                      \
    TARGET void NAME(const Tile& tile) {                                                                  \
        __m512 sums[kTileRows][kVectors];                                                                 \
        _Pragma("GCC unroll 16") for (auto& row : sums) {                                                 \
            _Pragma("GCC unroll 4") for (auto& sum : row) sum = _mm512_setzero_ps();                      \
        }                                                                                                 \
        const float* soon = tile.base && tile.base_stride ? tile.base : tile.stream ? nullptr : tile.out; \
        const int64_t soon_stride = tile.base && tile.base_stride ? tile.base_stride : tile.out_stride;   \
        for (int64_t i = 0; soon && i < tile.rows; ++i) {                                                 \
            for (int j = 0; j < kVectors; ++j) __builtin_prefetch(soon + i * soon_stride + j * 16, 1);    \
        }                                                                                                 \
        const uint32_t *a = tile.a, *b = tile.b;                                                          \
        for (int64_t k = 0; k < tile.depth; ++k, a += kTileRows, b += kTileColumns) {                     \
            __m512i columns[kVectors];                                                                    \
            _Pragma("GCC unroll 4") for (int j = 0; j < kVectors; ++j) {                                  \
                columns[j] = _mm512_load_si512(b + j * 16);                                               \
            }                                                                                             \
            _Pragma("GCC unroll 16") for (int64_t i = 0; i < kTileRows; ++i) {                            \
                const __m512i row = _mm512_set1_epi32(static_cast<int>(a[i]));                            \
                _Pragma("GCC unroll 4") for (int j = 0; j < kVectors; ++j) {                              \
                    sums[i][j] = MULTIPLY_ADD(sums[i][j], row, columns[j]);                               \
                }                                                                                         \
            }                                                                                             \
        }                                                                                                 \
        _Pragma("GCC unroll 16") for (int64_t i = 0; i < kTileRows; ++i) {                                \
            if (i == tile.rows) break;                                                                    \
            _Pragma("GCC unroll 4") for (int j = 0; j < kVectors; ++j) {                                  \
                const int64_t left = tile.columns - j * 16;                                               \
                const __mmask16 mask = left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0;             \
                __m512 value = sums[i][j];                                                                \
                if (tile.base) {                                                                          \
                    const float* base = tile.base + i * tile.base_stride + j * 16;                        \
                    value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, base));                      \
                }                                                                                         \
                float* out = tile.out + i * tile.out_stride + j * 16;                                     \
                if (tile.stream && left >= 16) {                                                          \
                    _mm512_stream_ps(out, value);                                                         \
                } else {                                                                                  \
                    _mm512_mask_storeu_ps(out, mask, value);                                              \
                }                                                                                         \
            }                                                                                             \
        }                                                                                                 \
    }

#define GSPO_MULTIPLY_ADD_FP32(sum, a, b) _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum)
#define GSPO_MULTIPLY_ADD_BF16(sum, a, b) _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))

// AVX2 has sixteen registers of eight floats, enough for the sums of 6 x 16 elements. A tile therefore takes
// four rounds over its panels, which are in L1.
constexpr int64_t kNarrowRows = 6, kNarrowColumns = 16;
static_assert(kTileRows % kNarrowRows == 0 && kTileColumns % kNarrowColumns == 0);

#define GSPO_TARGET_NARROW __attribute__((target("avx2,fma")))

// The second or the first value of each pair of bf16 values, as fp32.
template <bool second>
GSPO_TARGET_NARROW inline __m256 half_of(__m256i pairs) {
    return _mm256_castsi256_ps(second
                                   ? _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000)))
                                   : _mm256_slli_epi32(pairs, 16));
}

template <bool bf16>
GSPO_TARGET_NARROW void narrow(const Tile& tile) {
    alignas(32) float values[kNarrowRows][kNarrowColumns];
    for (int64_t row = 0; row < tile.rows; row += kNarrowRows) {
        for (int64_t column = 0; column < tile.columns; column += kNarrowColumns) {
            __m256 sums[kNarrowRows][2];
            for (auto& sum : sums) sum[0] = sum[1] = _mm256_setzero_ps();
            const uint32_t *a = tile.a + row, *b = tile.b + column;
            for (int64_t k = 0; k < tile.depth; ++k, a += kTileRows, b += kTileColumns) {
                const __m256i left = _mm256_load_si256(reinterpret_cast<const __m256i*>(b));
                const __m256i right = _mm256_load_si256(reinterpret_cast<const __m256i*>(b + 8));
                _Pragma("GCC unroll 6") for (int64_t i = 0; i < kNarrowRows; ++i) {
                    const __m256i one = _mm256_set1_epi32(static_cast<int>(a[i]));
                    if constexpr (!bf16) {
                        const __m256 value = _mm256_castsi256_ps(one);
                        sums[i][0] = _mm256_fmadd_ps(value, _mm256_castsi256_ps(left), sums[i][0]);
                        sums[i][1] = _mm256_fmadd_ps(value, _mm256_castsi256_ps(right), sums[i][1]);
                    } else {
                        sums[i][0] = _mm256_fmadd_ps(half_of<true>(one), half_of<true>(left), sums[i][0]);
                        sums[i][1] = _mm256_fmadd_ps(half_of<true>(one), half_of<true>(right), sums[i][1]);
                        sums[i][0] = _mm256_fmadd_ps(half_of<false>(one), half_of<false>(left), sums[i][0]);
                        sums[i][1] = _mm256_fmadd_ps(half_of<false>(one), half_of<false>(right), sums[i][1]);
                    }
                }
            }
            for (int64_t i = 0; i < kNarrowRows; ++i) {
                _mm256_store_ps(values[i], sums[i][0]);
                _mm256_store_ps(values[i] + 8, sums[i][1]);
            }
            const int64_t width =
                tile.columns - column < kNarrowColumns ? tile.columns - column : kNarrowColumns;
            for (int64_t i = 0; i < kNarrowRows && row + i < tile.rows; ++i) {
                float* const out = tile.out + (row + i) * tile.out_stride + column;
                const float* const base =
                    tile.base ? tile.base + (row + i) * tile.base_stride + column : nullptr;
                for (int64_t j = 0; j < width; ++j) out[j] = base ? values[i][j] + base[j] : values[i][j];
            }
        }
    }
}

GSPO_DEFINE_TILE(native_fp32, GSPO_TARGET_FP32, GSPO_MULTIPLY_ADD_FP32)
GSPO_DEFINE_TILE(native_bf16, GSPO_TARGET_BF16, GSPO_MULTIPLY_ADD_BF16)

#endif

}  // namespace

void finish_streams() {
#ifdef GSPO_X86
    _mm_sfence();
#endif
}

TileProduct vector_tile(Instructions instructions, bool bf16) {
    if (instructions == Instructions::portable) return {bf16 ? portable<true> : portable<false>};
#ifdef GSPO_X86
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (instructions == Instructions::avx512 && wide && !bf16) return {native_fp32};
    if (instructions == Instructions::avx512_bf16 && wide && bf16 && __builtin_cpu_supports("avx512bf16")) {
        return {native_bf16};
    }
    if (instructions == Instructions::avx2 && __builtin_cpu_supports("avx2") &&
        __builtin_cpu_supports("fma")) {
        return {bf16 ? narrow<true> : narrow<false>};
    }
#endif
    return {nullptr};
}

}  // namespace gspo_kernels
