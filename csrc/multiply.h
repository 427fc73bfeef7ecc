// A matmul in blocks that stay in cache, written to a matrix or passed to a callback block by block.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <type_traits>
#include <vector>

#include "panels.h"
#include "tiles.h"

namespace gspo_kernels {

// Units along K that are summed in registers before they are added to the total. Results depend on this
// number; fewer units are closer to pairwise summation.
constexpr int64_t kPieceUnits = 128;

inline int64_t divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// `count` blocks of `size` lines each, a multiple of a tile's lines; the last block may have fewer.
struct Blocks {
    int64_t count, size;

    // Splits `lines` into about `blocks` blocks of similar size.
    static Blocks equal(int64_t lines, int64_t tile, int64_t blocks) {
        const int64_t tiles = divide_up(lines, tile);
        const int64_t size =
            divide_up(tiles, std::clamp<int64_t>(blocks, 1, std::max<int64_t>(tiles, 1))) * tile;
        return {divide_up(lines, size), size};
    }
};

// An uninitialized array that starts at a cache line.
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
    const int64_t* ends;  // ends of the pieces along K; null for pieces of maximum length
};

// A computed block of a matmul that is not stored in a matrix.
struct Computed {
    const float* values;
    int64_t stride, row, column, height, width;
};

// A part of K that is summed in registers; previous parts have `before` units.
struct Piece {
    int64_t begin, end, before, units;
};

// The pieces of K: at least one, possibly empty, because the bias is added to the first piece.
template <class Format>
std::vector<Piece> pieces_of(const Output& out) {
    using Operand = Lines<typename Format::Value>;
    std::vector<Piece> pieces;
    int64_t before = 0;
    for (int64_t begin = 0, i = 0; begin < out.depth || pieces.empty(); ++i) {
        int64_t end = std::min(out.depth, begin + kPieceUnits * Operand::per_unit);
        if (out.ends && out.depth) end = out.ends[i];
        const int64_t units = divide_up(Operand::units(end - begin), Format::step) * Format::step;
        pieces.push_back({begin, end, before, units});
        before += units;
        begin = end;
    }
    return pieces;
}

// An operand in panels, see `pack`. A small operand that many blocks share is packed once, beforehand;
// otherwise each thread packs the blocks that it multiplies.
template <class T, auto pack>
class Panels {
  public:
    Panels(const Lines<T>& from, int64_t lines, Blocks blocks, const std::vector<Piece>& pieces, int64_t uses)
        : from_(from),
          lines_(lines),
          size_(blocks.size),
          units_(pieces.back().before + pieces.back().units),
          shared_(uses >= kUses && blocks.count * size_ * units_ <= kUnits),
          memory_(shared_ ? blocks.count * size_ * units_ : 0) {
        if (!shared_) return;
        const int64_t count = pieces.size();
        torch::stable::parallel_for(0, blocks.count * count, 1, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; ++i) {
                const Piece& piece = pieces[i % count];
                pack_block(i / count, piece, place(i / count, piece));
            }
        });
    }

    // The panels of a block and a piece, packed into `own` unless packed beforehand.
    const uint32_t* of(int64_t block, const Piece& piece, uint32_t* own) const {
        if (shared_) return place(block, piece);
        pack_block(block, piece, own);
        return own;
    }

    int64_t own_units() const { return shared_ ? 0 : size_ * kPieceUnits; }

  private:
    static constexpr int64_t kUses = 8, kUnits = int64_t{1} << 21;

    uint32_t* place(int64_t block, const Piece& piece) const {
        return memory_.data + size_ * (block * units_ + piece.before);
    }
    void pack_block(int64_t block, const Piece& piece, uint32_t* into) const {
        const int64_t line = block * size_;
        pack(from_, line, std::min(size_, lines_ - line), piece.begin, piece.end, into);
    }

    const Lines<T> from_;
    const int64_t lines_, size_, units_;
    const bool shared_;
    const Lined<uint32_t> memory_;
};

// Computes a matmul, written to `out.data`, or passed to `take` block by block.
template <class Format, class Take>
void multiply(const Lines<typename Format::Value>& a, const Lines<typename Format::Value>& b,
              const Output& out, Blocks rows, Blocks columns, TileProduct tile_product, const Take& take) {
    using T = typename Format::Value;
    constexpr bool hands_on = !std::is_null_pointer_v<Take>;
    const int64_t tasks = rows.count * columns.count;
    const std::vector<Piece> pieces = pieces_of<Format>(out);
    const Panels<T, Format::pack_a> rows_packed(a, out.rows, rows, pieces, columns.count);
    const Panels<T, Format::pack_b> columns_packed(b, out.columns, columns, pieces, rows.count);
    const bool streams = !hands_on && out.rows * out.columns * sizeof(float) >= kStreamBytes &&
                         out.stride % 16 == 0 && reinterpret_cast<uintptr_t>(out.data) % 64 == 0;
    // A power-of-two row stride would cause cache conflicts.
    const int64_t sums_stride = columns.size + (hands_on ? 16 : 0);
    const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), tasks);
    std::atomic<int64_t> next{0};
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
        const Lined<uint32_t> own_rows(rows_packed.own_units()), own_columns(columns_packed.own_units());
        // Partial sums stay in cache: each value of `out` is written once and read at most once.
        const Lined<float> sums(hands_on || pieces.size() > 1 ? rows.size * sums_stride : 0);
        if (tile_product.begin) tile_product.begin();
        for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
            const int64_t row_block = task % rows.count, column_block = task / rows.count;
            const int64_t row = row_block * rows.size, column = column_block * columns.size;
            const int64_t height = std::min(rows.size, out.rows - row);
            const int64_t width = std::min(columns.size, out.columns - column);
            for (const Piece& piece : pieces) {
                const int64_t units = piece.units;
                const uint32_t* a_panels = rows_packed.of(row_block, piece, own_rows.data);
                const uint32_t* b_panels = columns_packed.of(column_block, piece, own_columns.data);
                for (int64_t j = 0; j < width; j += kTileColumns) {
                    for (int64_t i = 0; i < height; i += Format::rows) {
                        Tile tile{a_panels + i * units, b_panels + j * units, units};
                        tile.rows = std::min(Format::rows, height - i);
                        tile.columns = std::min(kTileColumns, width - j);
                        float* const values =
                            hands_on ? nullptr : out.data + (row + i) * out.stride + column + j;
                        float* const sum = sums.data + i * sums_stride + j;
                        if (piece.begin > 0) {
                            tile.base = sum;
                            tile.base_stride = sums_stride;
                        } else if (out.accumulate) {
                            tile.base = values;
                            tile.base_stride = out.stride;
                        } else if (out.bias) {
                            tile.base = out.bias + column + j;
                        }
                        const bool last = !hands_on && piece.end == out.depth;
                        tile.out = last ? values : sum;
                        tile.out_stride = last ? out.stride : sums_stride;
                        tile.stream = last && streams;
                        tile_product.multiply(tile);
                    }
                }
            }
            if constexpr (hands_on) take(Computed{sums.data, sums_stride, row, column, height, width});
        }
        if (tile_product.end) tile_product.end();
        finish_streams();
    });
}

// The best instructions for these operands on this processor.
Instructions best_instructions(bool bf16);

// Whether this processor has these instructions, and they support these operands.
bool has_instructions(Instructions instructions, bool bf16);

// Calls `work` with the format of panels and the tile product of some instructions.
template <class Work>
void with_instructions(Instructions instructions, bool bf16, const Work& work) {
    STD_TORCH_CHECK(has_instructions(instructions, bf16),
                    "product: this processor lacks the instructions, or they don't serve these operands");
    if (instructions == Instructions::best) instructions = best_instructions(bf16);
    if (!bf16) return work(VectorPanels<float>{}, vector_tile(instructions, false));
    switch (instructions) {
        case Instructions::amx:
        case Instructions::portable_amx:
            return work(AmxPanels{}, amx_tile(instructions));
        case Instructions::avx512:
            return work(VectorPanels<WidenedBFloat16>{}, vector_tile(instructions, false));
        default:
            return work(VectorPanels<BFloat16>{}, vector_tile(instructions, true));
    }
}

}  // namespace gspo_kernels
