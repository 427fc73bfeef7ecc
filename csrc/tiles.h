// A tile of a matrix product: its sums stay in registers while K runs.
//
// Operands come in panels of 32-bit units along K: an fp32 value, or two bf16 values that follow each other.
// A panel of `a` holds kTileRows units for each step along K, one of `b` kTileColumns.
#pragma once

#include <cstdint>

namespace gspo_kernels {

constexpr int64_t kTileRows = 12, kTileColumns = 32;

struct Tile {
    const uint32_t* a;
    const uint32_t* b;
    int64_t depth;  // units
    float* out;
    int64_t out_stride;
    const float* base;      // what the product is added to: `out`, a bias, or null for nothing
    int64_t base_stride;    // between its rows
    int64_t rows, columns;  // of `out` that there are, at most the tile's
    bool stream;            // past the caches: `out` is 64-byte aligned, and so are its rows
};

// Results of this size don't stay in any cache until they are read: written past them, they don't have to be
// fetched first.
constexpr int64_t kStreamBytes = int64_t{1} << 25;

// Makes what was streamed by this thread visible to others.
void finish_streams();

using TileProduct = void (*)(const Tile& tile);

enum class Operands { fp32, bf16 };

// For this processor; null where it has no instructions for it that are worth it.
TileProduct native_tile(Operands operands);

// The same with AVX2, as fast as that allows; null where the processor lacks it. An element's sum is the same
// chain of fused multiply-adds, so bits agree with the native tile's, but for subnormal numbers of bf16 as
// below.
TileProduct narrow_tile(Operands operands);

// The same sums in the same order on any processor. bf16: a product of two is exact in fp32, so bits agree
// with the instruction's, which adds the second of a pair first, but for subnormal numbers, which it takes
// for 0.
TileProduct portable_tile(Operands operands);

}  // namespace gspo_kernels
