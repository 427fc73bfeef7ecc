#include "inputs.h"
#include "multiply.h"
#include "operators.h"

namespace gspo_kernels {
namespace {

// Rows of a block of logits that is reduced in cache, enough for packing of the weight to be cheap.
constexpr int64_t kRowsAtOnce = 43 * kTileRows;
static_assert(kBlock % kTileColumns == 0);

// A line of `sums`.
struct RowSums {
    double* line;

    static int64_t width(int64_t vocabulary) { return 2 + 3 * divide_up(vocabulary, kBlock); }

    void set_label(double logit) const {
        line[0] = 1;
        line[1] = logit;
    }
    void set_block(int64_t block, const Others& others) const {
        double* values = line + 2 + 3 * block;
        values[0] = others.maximum;
        values[1] = others.sum;
        values[2] = others.weighted;
    }

    Statistics statistics(int64_t blocks, bool with_entropy) const {
        Others others;
        for (const double *block = line + 2, *end = block + 3 * blocks; block < end; block += 3) {
            others.add({block[0], block[1], block[2]});
        }
        const bool has_label = line[0] != 0;
        return statistics_of(others, has_label, has_label ? line[1] : -kInfinity, with_entropy);
    }
};

// Options of rows whose logits are some columns of `vocabulary`.
template <class S>
struct Columns {
    const int64_t* labels;
    const S* row_temperature;
    const int32_t* kept;
    const LogitOptions& options;
    int64_t vocabulary;
    bool entropy;
    double* sums;

    Columns(const Tensor& labels, const LogitOptions& options, int64_t vocabulary, bool entropy, Tensor& sums)
        : labels(values<int64_t>(labels)),
          row_temperature(values<S>(options.row_temperature)),
          kept(values<int32_t>(options.kept)),
          options(options),
          vocabulary(vocabulary),
          entropy(entropy),
          sums(mutable_values<double>(sums)) {}

    // Adds columns of row `index` of the call: those from `first` on are row `i` of `logits`.
    template <class T>
    void add(const Rows<const T>& logits, int64_t i, int64_t index, int64_t first) const {
        const int64_t label = labels[index];
        if (label == options.ignore_index) return;
        const S temperature = row_temperature ? row_temperature[index] : static_cast<S>(options.temperature);
        const Transform<S> transform{static_cast<S>(options.logit_scale), static_cast<S>(options.softcap),
                                     temperature};
        const int32_t* words = kept ? kept + index * divide_up(vocabulary, 32) + first / 32 : nullptr;
        const Row<T> row(logits, i, label < 0 ? -1 : label - first, transform, words);
        const RowSums row_sums{sums + index * RowSums::width(vocabulary)};
        alignas(64) S buffer[kBlock];
        for (int64_t begin = 0; begin < row.vocabulary(); begin += kBlock) {
            const int64_t n = std::min(kBlock, row.vocabulary() - begin);
            row_sums.set_block((first + begin) / kBlock, block_sums(row, begin, n, entropy, buffer));
        }
        if (row.label() >= 0) row_sums.set_label(row.label_logit());
    }
};

void check(const Tensor& sums, int64_t rows, int64_t vocabulary) {
    STD_TORCH_CHECK(sums.size(0) == rows && sums.size(1) == RowSums::width(vocabulary),
                    "sums: their shape doesn't fit rows and vocabulary");
}

}  // namespace

void add_columns(const Tensor& logits, const Tensor& labels, const LogitOptions& options, int64_t first,
                 int64_t vocabulary, bool entropy, Tensor& sums) {
    check(sums, labels.numel(), vocabulary);
    STD_TORCH_CHECK(first % kBlock == 0 && first + logits.size(2) <= vocabulary,
                    "add_columns: the columns must begin with a block, and lie in the vocabulary");
    visit_dtype(logits, [&](auto dtype) {
        using T = decltype(dtype);
        const Columns<StatsOf<T>> columns(labels, options, vocabulary, entropy, sums);
        const Rows<const T> rows(logits, const_cast<void*>(logits.const_data_ptr()));
        for_each_row(labels.numel(), rows.vocabulary, [&](int64_t i) { columns.add(rows, i, i, first); });
    });
}

void add_products(const Tensor& hidden, const Tensor& labels, const LogitOptions& options,
                  const Tensor& weight, const std::optional<Tensor>& bias, bool entropy, int64_t instructions,
                  Tensor& sums) {
    using torch::headeronly::ScalarType;
    const int64_t rows = hidden.size(0), depth = hidden.size(1), vocabulary = weight.size(0);
    check(sums, rows, vocabulary);
    STD_TORCH_CHECK(
        weight.size(1) == depth && labels.numel() == rows && (!bias || bias->numel() == vocabulary),
        "add_products: the shapes of hidden, weight, bias and labels don't fit each other");
    const bool bf16 = hidden.scalar_type() == ScalarType::BFloat16;
    STD_TORCH_CHECK(
        hidden.scalar_type() == weight.scalar_type() && (bf16 || hidden.scalar_type() == ScalarType::Float),
        "add_products: hidden and weight must both be fp32 or both bf16");
    if (rows == 0) return;
    const Columns<float> columns(labels, options, vocabulary, entropy, sums);
    const auto add_block = [&](const Computed& block) {
        const Rows<const float> logits(block.values, block.height, block.width, block.stride);
        for (int64_t i = 0; i < block.height; ++i) columns.add(logits, i, block.row + i, block.column);
    };
    const Blocks column_blocks{divide_up(vocabulary, kBlock),
                               std::min(kBlock, divide_up(vocabulary, kTileColumns) * kTileColumns)};
    const int64_t threads = torch::stable::get_num_threads();
    int64_t row_blocks = divide_up(rows, kRowsAtOnce);
    if (row_blocks * column_blocks.count < 8 * threads) row_blocks = divide_up(row_blocks, threads) * threads;
    const Output output{nullptr, 0, rows, vocabulary, depth, values<float>(bias), false, nullptr};
    with_instructions(static_cast<Instructions>(instructions), bf16,
                      [&](auto format, TileProduct tile_product) {
                          using Format = decltype(format);
                          using T = typename Format::Value;
                          multiply<Format>({values<T>(hidden), hidden.stride(0), hidden.stride(1)},
                                           {values<T>(weight), weight.stride(0), weight.stride(1)}, output,
                                           Blocks::equal(rows, Format::rows, row_blocks), column_blocks,
                                           tile_product, add_block);
                      });
}

void statistics_of_sums(const Tensor& sums, const Tensor& labels, int64_t ignore_index, Tensor& logprobs,
                        Tensor& lse, std::optional<Tensor>& entropy) {
    const int64_t rows = labels.numel(), width = sums.size(1);
    STD_TORCH_CHECK(sums.size(0) == rows, "sums: their shape doesn't fit the labels");
    const int64_t* label = values<int64_t>(labels);
    double *line = mutable_values<double>(sums), *lse_out = mutable_values<double>(lse);
    visit_dtype(logprobs, [&](auto dtype) {
        using S = StatsOf<decltype(dtype)>;
        S* logprob_out = mutable_values<S>(logprobs);
        S* entropy_out = entropy ? mutable_values<S>(*entropy) : nullptr;
        for (int64_t i = 0; i < rows; ++i, line += width) {
            Statistics statistics{};
            if (label[i] != ignore_index) {
                statistics = RowSums{line}.statistics((width - 2) / 3, entropy_out != nullptr);
            }
            logprob_out[i] = static_cast<S>(statistics.logprob);
            lse_out[i] = statistics.lse;
            if (entropy_out) entropy_out[i] = static_cast<S>(statistics.entropy);
        }
    });
}

}  // namespace gspo_kernels
