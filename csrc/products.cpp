#include "products.h"

#include "multiply.h"
#include "values.h"

namespace gspo_kernels {
namespace {

// A block of `b` stays in L3.
constexpr int64_t kBlockColumns = 20 * kTileColumns;

template <class T>
void multiply_into(const Lines<T>& a, const Lines<T>& b, const Output& out, int64_t instructions) {
    const int64_t threads = torch::stable::get_num_threads();
    int64_t row_blocks = divide_up(out.rows, kBlockRows),
            column_blocks = divide_up(out.columns, kBlockColumns);
    if (row_blocks * column_blocks < 8 * threads) {
        // few blocks: shares must be equal
        row_blocks = divide_up(row_blocks, threads) * threads;
        const int64_t most = divide_up(out.rows, kTileRows);
        if (most < row_blocks) column_blocks = std::max(column_blocks, divide_up(threads, most));
    }
    multiply(a, b, out, Blocks::equal(out.rows, kTileRows, row_blocks),
             Blocks::equal(out.columns, kTileColumns, column_blocks), tile_of<T>(instructions), nullptr);
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
    if (rows == 0 || columns == 0) return;
    const Output output{mutable_values<float>(out), out.stride(0), rows, columns, depth,
                        values<float>(bias),        accumulate,    cuts};
    const auto run = [&](auto dtype) {
        using T = decltype(dtype);
        multiply_into<T>({values<T>(a), a.stride(0), a.stride(1)}, {values<T>(b), b.stride(1), b.stride(0)},
                         output, instructions);
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
