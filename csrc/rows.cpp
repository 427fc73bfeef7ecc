#include "inputs.h"
#include "operators.h"

namespace gspo_kernels {
namespace {

// The upstream gradient of each row: a tensor [B, T] times a scale; zeros if the tensor is absent.
template <class S>
class Upstream {
  public:
    Upstream(const std::optional<Tensor>& tensor, const std::optional<Tensor>& scale)
        : data_(values<S>(tensor)), scale_(scale ? *values<S>(*scale) : S(1)) {
        if (!tensor) return;
        length_ = tensor->size(1);
        stride_b_ = tensor->stride(0);
        stride_t_ = tensor->stride(1);
    }

    S operator[](int64_t row) const {
        if (!data_) return 0;
        return data_[(row / length_) * stride_b_ + (row % length_) * stride_t_] * scale_;
    }

  private:
    const S* data_;
    S scale_;
    int64_t length_ = 1, stride_b_ = 0, stride_t_ = 0;
};

// Whether to use non-temporal stores: the gradient is too large for the caches, and not in the logits'
// memory.
bool past_caches(const Tensor& out, const Tensor& logits) {
    return out.numel() * out.element_size() >= kStreamBytes &&
           out.const_data_ptr() != logits.const_data_ptr();
}

}  // namespace

void logprobs_forward(const Tensor& logits, const Tensor& labels, const LogitOptions& options,
                      Tensor& logprobs, Tensor& lse, std::optional<Tensor>& entropy) {
    visit_dtype(logits, [&](auto dtype) {
        using T = decltype(dtype);
        using S = StatsOf<T>;
        const Inputs<T> inputs(logits, labels, options);
        S* logprob_out = mutable_values<S>(logprobs);
        double* lse_out = mutable_values<double>(lse);
        S* entropy_out = entropy ? mutable_values<S>(*entropy) : nullptr;
        for_each_row(labels.numel(), inputs.logits.vocabulary, [&](int64_t i) {
            Statistics statistics{};
            if (!inputs.ignored(i)) statistics = row_statistics(inputs.row(i), entropy_out != nullptr);
            logprob_out[i] = static_cast<S>(statistics.logprob);
            lse_out[i] = statistics.lse;
            if (entropy_out) entropy_out[i] = static_cast<S>(statistics.entropy);
        });
    });
}

void logprobs_backward(const Tensor& logits, const Tensor& labels, const LogitOptions& options,
                       const Tensor& logprobs, const Tensor& lse, const std::optional<Tensor>& entropy,
                       const Tensor& grad_logprobs, const std::optional<Tensor>& grad_entropy,
                       const std::optional<Tensor>& grad_scale, bool sharded, Tensor& out) {
    const auto work = [&](auto dtype, auto out_dtype) {
        using T = decltype(dtype);
        using O = decltype(out_dtype);
        using S = StatsOf<T>;
        const Inputs<T> inputs(logits, labels, options);
        const Rows<O> out_rows(out, out.mutable_data_ptr());
        const S *logprob_in = values<S>(logprobs), *entropy_in = values<S>(entropy);
        const double* lse_in = values<double>(lse);
        const bool stream = past_caches(out, logits);
        const Upstream<S> c(grad_logprobs, grad_scale), entropy_c(grad_entropy, grad_scale);
        for_each_row(labels.numel(), inputs.logits.vocabulary, [&](int64_t i) {
            O* out_row = out_rows.row(i);
            const Row<T> row = inputs.row(i);
            RowGradient<S> gradient{};
            // A label out of range has a constant (NaN) log-prob.
            gradient.c = row.label() < 0 && !sharded ? S(0) : c[i];
            gradient.entropy_c = entropy_c[i];
            gradient.entropy = entropy_in ? entropy_in[i] : S(0);
            if (inputs.ignored(i) || (gradient.c == 0 && gradient.entropy_c == 0)) {
                return write_zeros(out_row, row.vocabulary());
            }
            if (!std::isfinite(lse_in[i])) return write_nan(out_row, row.vocabulary());
            if (sharded) {
                set_normalizer(lse_in[i], gradient);
            } else {
                set_normalizer(row, logprob_in[i], lse_in[i], gradient);
            }
            write_gradient(row, logprob_in[i], gradient, out_row, stream);
        });
    };
    visit_dtype(logits,
                [&](auto dtype) { visit_dtype(out, [&](auto out_dtype) { work(dtype, out_dtype); }); });
}

void logprobs_and_grad(const Tensor& logits, const Tensor& labels, const LogitOptions& options,
                       const Tensor& coefficients, Tensor& logprobs, Tensor& lse, Tensor& out) {
    const auto work = [&](auto dtype, auto out_dtype) {
        using T = decltype(dtype);
        using O = decltype(out_dtype);
        using S = StatsOf<T>;
        const Inputs<T> inputs(logits, labels, options);
        const Rows<O> out_rows(out, out.mutable_data_ptr());
        const S* c = values<S>(coefficients);
        S* logprob_out = mutable_values<S>(logprobs);
        double* lse_out = mutable_values<double>(lse);
        const bool stream = past_caches(out, logits);
        for_each_row(labels.numel(), inputs.logits.vocabulary, [&](int64_t i) {
            O* out_row = out_rows.row(i);
            if (inputs.ignored(i)) {
                logprob_out[i] = 0;
                lse_out[i] = 0;
                return write_zeros(out_row, out_rows.vocabulary);
            }
            const Row<T> row = inputs.row(i);
            // With AVX-512 recomputing an exponential is faster than storing it.
            const bool at_once = c[i] != 0 && row.label() >= 0 && row.only_scaled() && !row.for_avx512();
            thread_local std::vector<S> memory;
            thread_local std::vector<double> maxima;
            const Statistics statistics = at_once
                                              ? statistics_and_gradient(row, c[i], out_row, memory, maxima)
                                              : row_statistics(row, false);
            const S logprob = static_cast<S>(statistics.logprob);
            logprob_out[i] = logprob;
            lse_out[i] = statistics.lse;
            if (at_once) return;
            if (c[i] == 0 || row.label() < 0) return write_zeros(out_row, row.vocabulary());
            if (!std::isfinite(lse_out[i])) return write_nan(out_row, row.vocabulary());
            const RowGradient<S> gradient{static_cast<S>(statistics.maximum),
                                          static_cast<S>(statistics.log_sum), c[i], 0, 0};
            write_gradient(row, logprob, gradient, out_row, stream);
        });
    };
    visit_dtype(logits,
                [&](auto dtype) { visit_dtype(out, [&](auto out_dtype) { work(dtype, out_dtype); }); });
}

void logprobs_and_rows(const Tensor& logits, const Tensor& labels, const LogitOptions& options,
                       Tensor& logprobs, Tensor& lse, Tensor& factors, Tensor& out) {
    const auto work = [&](auto dtype, auto out_dtype) {
        using T = decltype(dtype);
        using O = decltype(out_dtype);
        using S = StatsOf<T>;
        const Inputs<T> inputs(logits, labels, options);
        const Rows<O> out_rows(out, out.mutable_data_ptr());
        S *logprob_out = mutable_values<S>(logprobs), *factor_out = mutable_values<S>(factors);
        double* lse_out = mutable_values<double>(lse);
        for_each_row(labels.numel(), inputs.logits.vocabulary, [&](int64_t i) {
            O* out_row = out_rows.row(i);
            factor_out[i] = 1;
            if (inputs.ignored(i)) {
                logprob_out[i] = 0;
                lse_out[i] = 0;
                return write_zeros(out_row, out_rows.vocabulary);
            }
            const Row<T> row = inputs.row(i);
            const Statistics statistics = write_rows(row, out_row, factor_out[i]);
            logprob_out[i] = static_cast<S>(statistics.logprob);
            lse_out[i] = statistics.lse;
            if (row.label() >= 0 && std::isfinite(statistics.lse)) return;
            factor_out[i] = 1;
            // A label out of range has a constant (NaN) log-prob.
            if (row.label() < 0) return write_zeros(out_row, row.vocabulary());
            write_nan(out_row, row.vocabulary());
        });
    };
    visit_dtype(logits, [&](auto dtype) {
        using S = StatsOf<decltype(dtype)>;
        if constexpr (std::is_same_v<S, float>) {
            if (out.scalar_type() == torch::headeronly::ScalarType::BFloat16) {
                return work(dtype, BFloat16{});
            }
        }
        work(dtype, S{});
    });
}

}  // namespace gspo_kernels
