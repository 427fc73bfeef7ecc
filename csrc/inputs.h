// Shared by row operations: the parallel loop over rows, types for dtypes, and the input tensors.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>

#include "operators.h"
#include "row.h"
#include "values.h"

namespace gspo_kernels {
namespace {

// Dynamic scheduling, because masked rows are almost free.
template <class F>
void for_each_row(int64_t rows, int64_t vocabulary, const F& work) {
    constexpr int64_t kChunkElements = 1 << 15;
    const int64_t chunk = std::max<int64_t>(1, kChunkElements / vocabulary);
    const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), (rows + chunk - 1) / chunk);
    std::atomic<int64_t> next{0};
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
        for (;;) {
            const int64_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
            if (begin >= rows) return;
            for (int64_t row = begin; row < std::min(rows, begin + chunk); ++row) work(row);
        }
    });
}

template <class F>
void visit_dtype(const Tensor& tensor, const F& work) {
    using torch::headeronly::ScalarType;
    switch (tensor.scalar_type()) {
        case ScalarType::Float:
            return work(float{});
        case ScalarType::Double:
            return work(double{});
        case ScalarType::BFloat16:
            return work(BFloat16{});
        case ScalarType::Half:
            return work(Half{});
        default:
            STD_TORCH_CHECK(false, "expected a floating-point tensor of 16, 32 or 64 bits, got ",
                            torch::headeronly::toString(tensor.scalar_type()));
    }
}

// The tensors and options that all row operations read.
template <class T>
struct Inputs {
    using S = StatsOf<T>;
    Rows<const T> logits;
    const int64_t* label;
    const S* row_temperature;
    const int32_t* kept;
    const LogitOptions& options;

    Inputs(const Tensor& logits, const Tensor& labels, const LogitOptions& options)
        : logits(logits, const_cast<void*>(logits.const_data_ptr())),
          label(values<int64_t>(labels)),
          row_temperature(values<S>(options.row_temperature)),
          kept(values<int32_t>(options.kept)),
          options(options) {}

    bool ignored(int64_t i) const { return label[i] == options.ignore_index; }

    Row<T> row(int64_t i) const { return row(i, label[i]); }
    Row<T> unlabeled(int64_t i) const { return row(i, -1); }

  private:
    Row<T> row(int64_t i, int64_t label_of_row) const {
        const S temperature = row_temperature ? row_temperature[i] : static_cast<S>(options.temperature);
        return {logits,
                i,
                label_of_row,
                {static_cast<S>(options.logit_scale), static_cast<S>(options.softcap), temperature},
                kept ? kept + i * ((logits.vocabulary + 31) / 32) : nullptr};
    }
};

}  // namespace
}  // namespace gspo_kernels
