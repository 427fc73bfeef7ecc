// A tile of a matmul, with sums in registers.
//
// Operands are panels of 32-bit units along K, an fp32 value or two adjacent bf16 values; see panels.h.
#pragma once

#include <cstdint>

namespace gspo_kernels {

// Rows of a tile in vector registers, and of an AMX tile; columns of both.
constexpr int64_t kTileRows = 12, kAmxRows = 32, kTileColumns = 32;
// Units along K that one AMX instruction multiplies.
constexpr int64_t kAmxUnits = 16;

struct Tile {
    const uint32_t* a;
    const uint32_t* b;
    int64_t depth;  // units
    float* out;
    int64_t out_stride;
    const float* base;      // added to the product: `out`, a bias, or null
    int64_t base_stride;    // between its rows
    int64_t rows, columns;  // of `out` that are written, at most the tile's
    bool stream;            // non-temporal stores: rows of `out` are 64-byte aligned
};

// Minimum size of results for non-temporal stores, which do not fetch cache lines: larger results don't stay
// in cache until they are read.
constexpr int64_t kStreamBytes = int64_t{1} << 25;

// Makes the streamed writes of this thread visible to other threads.
void finish_streams();

struct TileProduct {
    void (*multiply)(const Tile& tile);
    // Called by each thread before its first tile and after its last; null: not needed.
    void (*begin)() = nullptr;
    void (*end)() = nullptr;
};

// Instruction sets of matmuls; products.cpp selects one.
enum class Instructions : int64_t {
    best,          // the fastest that this processor has
    amx,           // bf16: tdpbf16ps
    avx512_bf16,   // bf16: vdpbf16ps
    avx512,        // fp32: fused multiply-adds of 16; bf16 is widened to fp32 while it is packed
    avx2,          // fp32: fused multiply-adds of 8; bf16 with the sums of avx512_bf16
    portable,      // plain C++ with the sums of avx2, except for fused multiply-adds of fp32
    portable_amx,  // bf16: plain C++ with the bits of amx
};

// `multiply` is null if this processor lacks the instructions, or they don't support these operands.
TileProduct vector_tile(Instructions instructions, bool bf16);
TileProduct amx_tile(Instructions instructions);

// The reason why AMX is not used on this processor, or null.
const char* amx_unavailable();

}  // namespace gspo_kernels
