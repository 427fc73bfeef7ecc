// A matrix product in blocks that stay in cache, written to a matrix or handed on a block at a time.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <type_traits>

#include "panels.h"
#include "tiles.h"

namespace gspo_kernels {

// A block of `a` (half a megabyte) stays in a core's L2, as does a panel of `b`.
constexpr int64_t kBlockRows = 86 * kTileRows;
// Units along K that are summed up in registers before they are added to the rest. Results depend on it: the
// fewer, the closer to pairwise summation.
constexpr int64_t kPieceUnits = 128;

inline int64_t divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// `count` blocks of `size` lines each, whole tiles; the last may have fewer.
struct Blocks {
    int64_t count, size;

    // Of about the same size.
    static Blocks equal(int64_t lines, int64_t tile, int64_t blocks) {
        const int64_t tiles = divide_up(lines, tile);
        const int64_t size =
            divide_up(tiles, std::clamp<int64_t>(blocks, 1, std::max<int64_t>(tiles, 1))) * tile;
        return {divide_up(lines, size), size};
    }
};

// Uninitialised, by cache lines.
template <class T>
struct Lined {
    explicit Lined(int64_t count) : data(new (std::align_val_t(64)) T[count]) {}
    ~Lined() { ::operator delete[](data, std::align_val_t(64)); }
    Lined(const Lined&) = delete;
    T* const data;
};

struct Output {
    float* data;
    int64_t stride, rows, columns, depth;
    const float* bias;
    bool accumulate;
    const int64_t* ends;  // of the pieces along K; null: as long as they may be
};

// A block of a product that is nowhere but in cache.
struct Computed {
    const float* values;
    int64_t stride, row, column, height, width;
};

// `take` is null, or gets each block, from any thread, instead of `out.data`.
template <class T, class Take>
void multiply(const Lines<T>& a, const Lines<T>& b, const Output& out, Blocks rows, Blocks columns,
              TileProduct tile_product, const Take& take) {
    constexpr bool hands_on = !std::is_null_pointer_v<Take>;
    const int64_t tasks = rows.count * columns.count, piece = kPieceUnits * Lines<T>::per_unit;
    const bool streams = !hands_on && out.rows * out.columns * sizeof(float) >= kStreamBytes &&
                         out.stride % 16 == 0 && reinterpret_cast<uintptr_t>(out.data) % 64 == 0;
    // Rows a power of two apart would share the same few lines of a cache.
    const int64_t sums_stride = columns.size + (hands_on ? 16 : 0);
    const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), tasks);
    std::atomic<int64_t> next{0};
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
        const Lined<uint32_t> a_panels(rows.size * kPieceUnits), b_panels(columns.size * kPieceUnits);
        // Sums on their way stay in cache: each value of `out` is written once, and read at most once.
        const Lined<float> sums(hands_on || out.depth > piece || out.ends ? rows.size * sums_stride : 0);
        for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
            const int64_t row = task % rows.count * rows.size, column = task / rows.count * columns.size;
            const int64_t height = std::min(rows.size, out.rows - row);
            const int64_t width = std::min(columns.size, out.columns - column);
            const int64_t* next_end = out.ends;
            // once without any K, too: there may be a bias
            for (int64_t k = 0, end = 0; k == 0 || k < out.depth; k = std::max<int64_t>(end, 1)) {
                end = next_end && out.depth ? *next_end++ : std::min(out.depth, k + piece);
                const int64_t units = Lines<T>::units(end - k);
                pack<T, kTileRows>(a, row, height, k, end, a_panels.data);
                pack<T, kTileColumns>(b, column, width, k, end, b_panels.data);
                for (int64_t j = 0; j < width; j += kTileColumns) {
                    for (int64_t i = 0; i < height; i += kTileRows) {
                        Tile tile{a_panels.data + i * units, b_panels.data + j * units, units};
                        tile.rows = std::min(kTileRows, height - i);
                        tile.columns = std::min(kTileColumns, width - j);
                        float* const values =
                            hands_on ? nullptr : out.data + (row + i) * out.stride + column + j;
                        float* const sum = sums.data + i * sums_stride + j;
                        if (k > 0) {
                            tile.base = sum;
                            tile.base_stride = sums_stride;
                        } else if (out.accumulate) {
                            tile.base = values;
                            tile.base_stride = out.stride;
                        } else if (out.bias) {
                            tile.base = out.bias + column + j;
                        }
                        const bool last = !hands_on && end == out.depth;
                        tile.out = last ? values : sum;
                        tile.out_stride = last ? out.stride : sums_stride;
                        tile.stream = last && streams;
                        tile_product(tile);
                    }
                }
            }
            if constexpr (hands_on) take(Computed{sums.data, sums_stride, row, column, height, width});
        }
        finish_streams();
    });
}

// The tile of the best instructions that are wanted: see `product`.
template <class T>
TileProduct tile_of(int64_t instructions) {
    constexpr Operands operands = sizeof(T) == sizeof(float) ? Operands::fp32 : Operands::bf16;
    TileProduct tile = nullptr;
    if (instructions == 0) tile = native_tile(operands);
    if (tile == nullptr && instructions <= 1) tile = narrow_tile(operands);
    return tile == nullptr ? portable_tile(operands) : tile;
}

}  // namespace gspo_kernels
