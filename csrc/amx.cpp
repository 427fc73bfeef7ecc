// Matmuls of bf16 by AMX: four registers hold a tile of 32 x 32 sums, an instruction takes 16 pairs along K.
//
// The functions on tiles have two implementations: the instructions, and bitwise identical plain C++ to test
// the kernel on any processor.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "panels.h"
#include "tiles.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define GSPO_AMX 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#endif

namespace gspo_kernels {
namespace {

constexpr int64_t kSide = 16;  // rows of a register, and its columns of 32 bits

// tdpbf16ps rounds each step to nearest even, and flushes subnormal inputs and results to 0.
float flushed(float x) {
    return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

struct PlainTiles {
    float sums[4][kSide][kSide];
    uint32_t operands[4][kSide][kSide];

    template <int tile>
    void zero() {
        std::memset(sums[tile], 0, sizeof(sums[tile]));
    }
    template <int tile>
    void load(const uint32_t* from, int64_t stride) {
        for (int64_t i = 0; i < kSide; ++i) {
            std::memcpy(operands[tile - 4][i], from + i * stride, sizeof(operands[0][0]));
        }
    }
    // Sums the first values of all pairs, and the second values, each in the order of K, then adds both sums.
    template <int sum, int a, int b>
    void multiply_add() {
        const auto half = [](uint32_t pair, bool second) {
            return flushed(std::bit_cast<float>(second ? pair & 0xffff0000 : pair << 16));
        };
        for (int64_t i = 0; i < kSide; ++i) {
            for (int64_t j = 0; j < kSide; ++j) {
                float halves[2] = {0, 0};
                for (int64_t k = 0; k < kSide; ++k) {
                    for (int second = 0; second < 2; ++second) {
                        halves[second] =
                            flushed(std::fma(half(operands[a - 4][i][k], second),
                                             half(operands[b - 4][k][j], second), halves[second]));
                    }
                }
                sums[sum][i][j] = flushed(flushed(sums[sum][i][j]) + flushed(halves[0] + halves[1]));
            }
        }
    }
    template <int tile>
    void store(float* out, int64_t stride) {
        for (int64_t i = 0; i < kSide; ++i) {
            std::memcpy(out + i * stride, sums[tile][i], sizeof(sums[tile][i]));
        }
    }
    static void write(const Tile& tile, const float* sums) {
        for (int64_t i = 0; i < tile.rows; ++i) {
            for (int64_t j = 0; j < tile.columns; ++j) {
                const float sum = sums[i * kTileColumns + j];
                tile.out[i * tile.out_stride + j] =
                    tile.base ? sum + tile.base[i * tile.base_stride + j] : sum;
            }
        }
    }
};

#ifdef GSPO_AMX

// Compiler barriers for memory accesses.
struct HardwareTiles {
    template <int tile>
    void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(tile));
    }
    template <int tile>
    void load(const uint32_t* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride * 4), "i"(tile) : "memory");
    }
    template <int sum, int a, int b>
    void multiply_add() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(a), "i"(b));
    }
    template <int tile>
    void store(float* out, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(out), "r"(stride * 4), "i"(tile) : "memory");
    }
    __attribute__((target("avx512f"))) static void write(const Tile& tile, const float* sums) {
        for (int64_t i = 0; i < tile.rows; ++i) {
            for (int64_t j = 0; j < tile.columns; j += 16) {
                const int64_t left = tile.columns - j;
                const __mmask16 mask = left >= 16 ? 0xffff : (1u << left) - 1;
                __m512 value = _mm512_load_ps(sums + i * kTileColumns + j);
                if (tile.base) {
                    const float* base = tile.base + i * tile.base_stride + j;
                    value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, base));
                }
                float* out = tile.out + i * tile.out_stride + j;
                if (tile.stream && left >= 16) {
                    _mm512_stream_ps(out, value);
                } else {
                    _mm512_mask_storeu_ps(out, mask, value);
                }
            }
        }
    }
};

struct alignas(64) Configuration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(Configuration) == 64);
const Configuration kConfiguration;

void configure() {
    asm volatile("ldtilecfg %0" ::"m"(kConfiguration));
}

void release() {
    asm volatile("tilerelease");
}

#endif

template <class Tiles>
void multiply(const Tile& tile) {
    Tiles tiles;
    tiles.template zero<0>();
    tiles.template zero<1>();
    tiles.template zero<2>();
    tiles.template zero<3>();
    const uint32_t *a = tile.a, *b = tile.b;
    for (int64_t k = 0; k < tile.depth; k += kAmxUnits) {
        tiles.template load<4>(a, kAmxUnits);
        tiles.template load<6>(b, kTileColumns);
        tiles.template multiply_add<0, 4, 6>();
        tiles.template load<7>(b + kSide, kTileColumns);
        tiles.template multiply_add<1, 4, 7>();
        tiles.template load<5>(a + kSide * kAmxUnits, kAmxUnits);
        tiles.template multiply_add<2, 5, 6>();
        tiles.template multiply_add<3, 5, 7>();
        a += kAmxRows * kAmxUnits;
        b += kAmxUnits * kTileColumns;
    }
    alignas(64) float sums[kAmxRows * kTileColumns];
    tiles.template store<0>(sums, kTileColumns);
    tiles.template store<1>(sums + kSide, kTileColumns);
    tiles.template store<2>(sums + kSide * kTileColumns, kTileColumns);
    tiles.template store<3>(sums + kSide * kTileColumns + kSide, kTileColumns);
    Tiles::write(tile, sums);
}

#ifdef GSPO_AMX

// Whether the instructions' sums equal those of plain C++ up to rounding.
bool sums_agree() {
    constexpr int64_t depth = 4 * kAmxUnits;
    std::mt19937 draw(1);
    alignas(64) uint32_t a[kAmxRows * depth], b[kTileColumns * depth];
    // numbers of either sign between 1/2 and 2
    const auto bf16 = [&] { return 0x3f00u + (draw() & 0x80ff); };
    for (uint32_t& pair : a) pair = bf16() | bf16() << 16;
    for (uint32_t& pair : b) pair = bf16() | bf16() << 16;
    float found[kAmxRows * kTileColumns], expected[kAmxRows * kTileColumns];
    Tile tile{a, b, depth, found, kTileColumns, nullptr, 0, kAmxRows, kTileColumns, false};
    configure();
    multiply<HardwareTiles>(tile);
    release();
    tile.out = expected;
    multiply<PlainTiles>(tile);
    for (int64_t i = 0; i < kAmxRows * kTileColumns; ++i) {
        if (!(std::abs(found[i] - expected[i]) <= 4.0f * 2 * depth * 0x1p-22f)) return false;
    }
    return true;
}

const char* why_not() {
    unsigned eax, ebx, ecx, edx;
    constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(edx & amx_bf16) || !(edx & amx_tile) ||
        !__builtin_cpu_supports("avx512f")) {
        return "this processor has none";
    }
    const char* limit = std::getenv("ONEDNN_MAX_CPU_ISA");
    if (limit && *limit && !std::strstr(limit, "AMX") && std::strcmp(limit, "DEFAULT") != 0) {
        return "ONEDNN_MAX_CPU_ISA leaves it out";
    }
    constexpr long request_permission = 0x1023, tile_data = 18;
    if (syscall(SYS_arch_prctl, request_permission, tile_data) != 0) {
        return errno == ENOSPC ? "a thread's alternate signal stack is too small for its registers"
                               : "the operating system does not permit it";
    }
    return sums_agree() ? nullptr : "its sums differ from those of plain C++ by more than roundings";
}

#endif

}  // namespace

const char* amx_unavailable() {
#ifdef GSPO_AMX
    static const char* const reason = why_not();
    return reason;
#else
    return "this build has no code for it";
#endif
}

TileProduct amx_tile(Instructions instructions) {
    if (instructions == Instructions::portable_amx) return {multiply<PlainTiles>};
#ifdef GSPO_AMX
    if (instructions == Instructions::amx && !amx_unavailable()) {
        return {multiply<HardwareTiles>, configure, release};
    }
#endif
    return {nullptr};
}

}  // namespace gspo_kernels
