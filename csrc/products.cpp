#include "products.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <new>

#include "panels.h"
#include "tiles.h"
#include "values.h"

namespace gspo_kernels {
namespace {

// A block of `a` (half a megabyte) stays in a core's L2, as does a panel of `b`; a block of `b` in L3.
constexpr int64_t kBlockRows = 86 * kTileRows, kBlockColumns = 20 * kTileColumns;
// Units along K that are summed up in registers before they are added to the rest. Results depend on it: the
// fewer, the closer to pairwise summation.
constexpr int64_t kPieceUnits = 128;

// Results of this size don't stay in any cache until they are read: written past them, they don't have to be
// fetched first.
constexpr int64_t kStreamBytes = int64_t{1} << 25;

int64_t divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

// `count` lines in blocks of about the same size, each of whole tiles.
struct Blocks {
    int64_t count, size;

    Blocks(int64_t lines, int64_t tile, int64_t blocks) {
        const int64_t tiles = divide_up(lines, tile);
        size = divide_up(tiles, std::clamp<int64_t>(blocks, 1, std::max<int64_t>(tiles, 1))) * tile;
        count = divide_up(lines, size);
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

template <class T>
void multiply(const Lines<T>& a, const Lines<T>& b, const Output& out, TileProduct tile_product) {
    const int64_t threads = torch::stable::get_num_threads();
    int64_t row_blocks = divide_up(out.rows, kBlockRows), column_blocks = divide_up(out.columns, kBlockColumns);
    if (row_blocks * column_blocks < 8 * threads) {
        // few blocks: shares must be equal
        row_blocks = divide_up(row_blocks, threads) * threads;
        const int64_t most = divide_up(out.rows, kTileRows);
        if (most < row_blocks) column_blocks = std::max(column_blocks, divide_up(threads, most));
    }
    const Blocks rows(out.rows, kTileRows, row_blocks), columns(out.columns, kTileColumns, column_blocks);
    const int64_t tasks = rows.count * columns.count, piece = kPieceUnits * Lines<T>::per_unit;
    const bool streams = out.rows * out.columns * sizeof(float) >= kStreamBytes && out.stride % 16 == 0 &&
                         reinterpret_cast<uintptr_t>(out.data) % 64 == 0;
    std::atomic<int64_t> next{0};
    torch::stable::parallel_for(0, std::min(threads, tasks), 1, [&](int64_t, int64_t) {
        const Lined<uint32_t> a_panels(rows.size * kPieceUnits), b_panels(columns.size * kPieceUnits);
        // Sums on their way stay in cache: each value of `out` is written once, and read at most once.
        const Lined<float> sums(out.depth > piece || out.ends ? rows.size * columns.size : 0);
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
                        float* const values = out.data + (row + i) * out.stride + column + j;
                        if (k > 0) {
                            tile.base = sums.data + i * columns.size + j;
                            tile.base_stride = columns.size;
                        } else if (out.accumulate) {
                            tile.base = values;
                            tile.base_stride = out.stride;
                        } else if (out.bias) {
                            tile.base = out.bias + column + j;
                        }
                        const bool last = end == out.depth;
                        tile.out = last ? values : sums.data + i * columns.size + j;
                        tile.out_stride = last ? out.stride : columns.size;
                        tile.stream = last && streams;
                        tile_product(tile);
                    }
                }
            }
        }
        finish_streams();
    });
}

}  // namespace

void product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
             const std::optional<Tensor>& ends, Tensor& out, bool accumulate, int64_t instructions) {
    using torch::headeronly::ScalarType;
    const int64_t rows = a.size(0), depth = a.size(1), columns = b.size(1);
    STD_TORCH_CHECK(b.size(0) == depth && out.size(0) == rows && out.size(1) == columns,
                    "product: the shapes of a, b and out don't fit each other");
    STD_TORCH_CHECK(out.scalar_type() == ScalarType::Float && (columns <= 1 || out.stride(1) == 1),
                    "product: out must be fp32 and contiguous along its rows");
    STD_TORCH_CHECK(a.scalar_type() == b.scalar_type(), "product: a and b must have one dtype");
    STD_TORCH_CHECK(!bias || (!accumulate && bias->numel() == columns),
                    "product: a bias has one value per column, and is not added to what is there");
    const bool bf16 = a.scalar_type() == ScalarType::BFloat16;
    STD_TORCH_CHECK(bf16 || a.scalar_type() == ScalarType::Float, "product: a and b must be fp32 or bf16");
    const int64_t piece = kPieceUnits * (bf16 ? 2 : 1), *const cuts = values<int64_t>(ends);
    if (cuts) {
        int64_t last = 0;
        for (int64_t i = 0; i < ends->numel(); last = cuts[i++]) {
            STD_TORCH_CHECK(cuts[i] > last && cuts[i] - last <= piece,
                            "product: ends must grow, by no more than a piece");
        }
        STD_TORCH_CHECK(last == depth, "product: the last of the ends must be the depth of a and b");
    }
    const Operands operands = bf16 ? Operands::bf16 : Operands::fp32;
    TileProduct tile = nullptr;
    if (instructions == 0) tile = native_tile(operands);
    if (tile == nullptr && instructions <= 1) tile = narrow_tile(operands);
    if (tile == nullptr) tile = portable_tile(operands);
    if (rows == 0 || columns == 0) return;
    const Output output{mutable_values<float>(out), out.stride(0),       rows,      columns, depth,
                        values<float>(bias),        accumulate,          cuts};
    const auto run = [&](auto dtype) {
        using T = decltype(dtype);
        multiply<T>({values<T>(a), a.stride(0), a.stride(1)}, {values<T>(b), b.stride(1), b.stride(0)}, output,
                    tile);
    };
    bf16 ? run(BFloat16{}) : run(float{});
}

bool multiplies_fp32() {
    return native_tile(Operands::fp32) != nullptr;
}

bool multiplies_bf16() {
    return native_tile(Operands::bf16) != nullptr;
}

}  // namespace gspo_kernels
