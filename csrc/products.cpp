#include "multiply.h"
#include "operators.h"
#include "values.h"

namespace gspo_kernels {
namespace {

// A block of `b` stays in L3.
constexpr int64_t kBlockColumns = 20 * kTileColumns;

template <class Format>
void multiply_into(const Lines<typename Format::Value>& a, const Lines<typename Format::Value>& b,
                   const Output& out, TileProduct tile_product) {
    const int64_t threads = torch::stable::get_num_threads();
    int64_t row_blocks = divide_up(out.rows, Format::block_rows),
            column_blocks = divide_up(out.columns, kBlockColumns);
    if (row_blocks * column_blocks < 8 * threads) {
        // with few blocks, threads must get equal shares
        row_blocks = divide_up(row_blocks, threads) * threads;
        const int64_t max_blocks = divide_up(out.rows, Format::rows);
        if (max_blocks < row_blocks) column_blocks = std::max(column_blocks, divide_up(threads, max_blocks));
    }
    multiply<Format>(a, b, out, Blocks::equal(out.rows, Format::rows, row_blocks),
                     Blocks::equal(out.columns, kTileColumns, column_blocks), tile_product, nullptr);
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
    const int64_t* const cuts = values<int64_t>(ends);
    if (cuts) {
        int64_t last = 0;
        for (int64_t i = 0; i < ends->numel(); last = cuts[i++]) {
            STD_TORCH_CHECK(cuts[i] > last && cuts[i] - last <= kPieceUnits,
                            "product: ends must grow, by no more than a piece");
        }
        STD_TORCH_CHECK(last == depth, "product: the last of the ends must be the depth of a and b");
    }
    if (rows == 0 || columns == 0) return;
    const Output output{mutable_values<float>(out), out.stride(0), rows, columns, depth,
                        values<float>(bias),        accumulate,    cuts};
    with_instructions(
        static_cast<Instructions>(instructions), bf16, [&](auto format, TileProduct tile_product) {
            using Format = decltype(format);
            using T = typename Format::Value;
            multiply_into<Format>({values<T>(a), a.stride(0), a.stride(1)},
                                  {values<T>(b), b.stride(1), b.stride(0)}, output, tile_product);
        });
}

bool has_instructions(Instructions instructions, bool bf16) {
    switch (instructions) {
        case Instructions::best:
            return true;
        case Instructions::amx:
        case Instructions::portable_amx:
            return bf16 && amx_tile(instructions).multiply != nullptr;
        case Instructions::avx512:
            return vector_tile(instructions, false).multiply != nullptr;
        default:
            return vector_tile(instructions, bf16).multiply != nullptr;
    }
}

// Milliseconds for [2048, 32000, 512] in bf16 on two cores of an Intel Xeon with AMX, medians of nine:
//
//                    logits   dHidden   dWeight
//   amx                  41        46        43
//   avx512_bf16         323       325       324
//   avx512, widened     214       227       214
//   torch.mm, AMX        37        33        62
//
// Intel's vdpbf16ps runs at half the rate of its fp32 multiply-adds, AMD's at twice that rate.
Instructions best_instructions(bool bf16) {
    using enum Instructions;
    const auto first = [&](std::initializer_list<Instructions> order) {
        return *std::find_if(order.begin(), order.end(),
                             [&](Instructions i) { return has_instructions(i, bf16); });
    };
    if (!bf16) return first({avx512, avx2, portable});
    if (on_intel()) return first({amx, avx512, avx2, portable});
    return first({amx, avx512_bf16, avx512, avx2, portable});
}

bool on_intel() {
#if defined(__x86_64__) && defined(__GNUC__)
    return __builtin_cpu_is("intel");
#else
    return false;
#endif
}

int64_t product_instructions(bool bf16) {
    return static_cast<int64_t>(best_instructions(bf16));
}

std::string amx_reason() {
    const char* reason = amx_unavailable();
    return reason ? reason : "";
}

}  // namespace gspo_kernels
