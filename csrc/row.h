// One row of logits: its statistics and its gradient, computed a block at a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "avx512.h"
#include "tiles.h"

namespace gspo_kernels {
namespace {

template <class T>
using StatsOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// The rows of logits [B, T, V], or of an output of that shape, by their index among B * T.
template <class T>
struct Rows {
    T* data;
    int64_t length, vocabulary, stride_b, stride_t, stride_v;

    template <class Tensor>
    Rows(const Tensor& tensor, void* pointer)
        : data(static_cast<T*>(pointer)),
          length(tensor.size(1)),
          vocabulary(tensor.size(2)),
          stride_b(tensor.stride(0)),
          stride_t(tensor.stride(1)),
          stride_v(tensor.size(2) == 1 ? 1 : tensor.stride(2)) {}

    Rows(T* data, int64_t rows, int64_t columns, int64_t stride)
        : data(data), length(rows), vocabulary(columns), stride_b(0), stride_t(stride), stride_v(1) {}

    T* row(int64_t index) const { return data + (index / length) * stride_b + (index % length) * stride_t; }
};

constexpr int64_t kPiece = 512;

// The transformed logits of one row, a block at a time.
template <class T>
class Row {
  public:
    using S = StatsOf<T>;

    // `kept` is the row's sampling mask, or null.
    Row(const Rows<const T>& rows, int64_t index, int64_t label, const Transform<S>& parameters,
        const int32_t* kept)
        : data_(rows.row(index)),
          kept_(kept),
          stride_(rows.stride_v),
          vocabulary_(rows.vocabulary),
          transform_(parameters),
          label_(label >= 0 && label < rows.vocabulary && keeps(label) ? label : -1) {}

    int64_t vocabulary() const { return vocabulary_; }
    bool soft_capped() const { return transform_.softcap != 0; }
    // Whether the row has neither a soft cap nor a sampling mask.
    bool only_scaled() const { return !soft_capped() && !kept_; }
    // dz/dx without the soft cap's part, as an R.
    template <class R>
    R chain() const {
        return static_cast<R>(transform_.logit_scale) / transform_.temperature;
    }
    int64_t label() const { return label_; }  // -1 if out of range or masked
    bool label_in(int64_t begin, int64_t n) const { return label_ >= begin && label_ < begin + n; }

    // z of a block, -inf where masked: in `buffer`, or in the tensor if no conversion is needed.
    const S* block(int64_t begin, int64_t n, S* buffer, S* slope = nullptr) const {
        const S* z = transformed(begin, n, buffer, slope);
        if (!kept_) return z;
        if (z != buffer) load(z, 1, n, buffer);
        cut_block(begin, n, buffer, -std::numeric_limits<S>::infinity());
        return buffer;
    }

    // Writes `fill` where masked. Blocks start at a word of the mask.
    void cut_block(int64_t begin, int64_t n, S* values, S fill) const {
        static_assert(kBlock % 32 == 0);
        if (kept_) cut(values, n, kept_ + begin / 32, fill);
    }

    // Whether z are the logits, and avx512 supports them.
    bool for_avx512() const {
        return avx512::handles<T> && avx512::available() && !kept_ && transform_.is_identity();
    }

    // The logits in the tensor, for avx512; null if avx512 can't be used or they aren't contiguous.
    const T* stored(int64_t begin) const { return for_avx512() && stride_ == 1 ? data_ + begin : nullptr; }

    // `block` with -inf at the label.
    const S* others(int64_t begin, int64_t n, S* buffer, S* slope = nullptr) const {
        const S* z = block(begin, n, buffer, slope);
        if (!label_in(begin, n)) return z;
        if (z != buffer) load(z, 1, n, buffer);
        buffer[label_ - begin] = -std::numeric_limits<S>::infinity();
        return buffer;
    }

    // Inlined, because GCC drops calls of a function that only prefetches.
    GSPO_INLINE void prefetch(int64_t begin, int64_t n) const {
        if (stride_ != 1) return;
        const char* data = reinterpret_cast<const char*>(data_ + begin);
        const char* end = reinterpret_cast<const char*>(data_ + std::min(begin + n, vocabulary_));
        for (; data < end; data += 64) __builtin_prefetch(data);
    }

    // z of the label; -inf if the label is out of range, which adds nothing to the sums.
    S label_logit() const {
        S buffer[1] = {-std::numeric_limits<S>::infinity()};
        return label_ < 0 ? buffer[0] : *transformed(label_, 1, buffer, nullptr);
    }

  private:
    bool keeps(int64_t column) const { return !kept_ || (kept_[column / 32] >> (column % 32) & 1); }

    const S* transformed(int64_t begin, int64_t n, S* buffer, S* slope) const {
        const bool identity = transform_.is_identity();
        if constexpr (std::is_same_v<T, S>) {
            if (identity && stride_ == 1) return data_ + begin;
        }
        load(data_ + begin * stride_, stride_, n, buffer);
        if (!identity) transform(buffer, n, transform_, slope);
        return buffer;
    }

    const T* data_;
    const int32_t* kept_;
    int64_t stride_, vocabulary_;
    Transform<S> transform_;
    int64_t label_;
};

struct Statistics {
    double logprob, lse, entropy;
    double maximum, log_sum;  // lse = maximum + log_sum, kept apart because lse in fp32 can't hold both
};

// Sums over the columns other than the label's, of exp(z - maximum) and exp(z - maximum) (z - maximum).
// `maximum` may also be a number near the maximum.
struct Others {
    double maximum = -kInfinity, sum = 0, weighted = 0;

    void move_to(double new_maximum) {
        if (maximum != -kInfinity) {
            const double shift = maximum - new_maximum, factor = std::exp(shift);
            weighted = factor == 0 ? 0 : factor * (weighted + sum * shift);
            sum *= factor;
        }
        maximum = new_maximum;
    }

    // Adds the sums of further columns.
    void add(Others more) {
        if (more.maximum > maximum) move_to(more.maximum);
        if (more.maximum < maximum) more.move_to(maximum);
        sum += more.sum;
        weighted += more.weighted;
    }

    // A maximum of -inf means only -inf and NaN so far: any finite shift gives exp 0 and NaN for them.
    template <class S>
    S shift() const {
        return maximum == -kInfinity ? S(0) : static_cast<S>(maximum);
    }
};

// The sums exclude the label's column:
//   log p(label) = -log(1 + exp(lse_others - z_label)) = -softplus(lse_others - z_label)
// is never above 0 and relatively accurate when p(label) is near 1.
Statistics statistics_of(const Others& others, bool has_label, double z_label, bool with_entropy) {
    const auto [maximum_others, sum, weighted] = others;
    const double lse_minus_label = (maximum_others - z_label) + std::log(sum);  // lse of the others
    Statistics result;
    if (lse_minus_label <= 0) {
        result.maximum = z_label;
        result.log_sum = std::log1p(std::exp(lse_minus_label));
        result.logprob = 0.0 - result.log_sum;
    } else {
        const double rest = std::log1p(std::exp(-lse_minus_label));
        result.maximum = maximum_others;
        result.log_sum = std::log(sum) + rest;
        result.logprob = -(lse_minus_label + rest);
    }
    result.lse = result.maximum + result.log_sum;
    // As in PyTorch: log_softmax of a row with +inf is NaN, its logsumexp +inf; logsumexp of a row of only
    // -inf is -inf.
    const double highest = std::max(z_label, maximum_others);
    if (highest == kInfinity) result.lse = kInfinity;
    if (highest == -kInfinity && sum == 0) result.lse = -kInfinity;
    if (z_label == kInfinity || !has_label) result.logprob = kNaN;

    // H = log S - W / S with S = sum exp(z - m), W = sum exp(z - m) (z - m) over all columns: two terms >= 0.
    result.entropy = kNaN;
    if (with_entropy && std::isfinite(result.lse)) {
        const double down = maximum_others - result.maximum, factor = sum == 0 ? 0 : std::exp(down);
        double total = factor * sum, total_weighted = factor == 0 ? 0 : factor * (weighted + sum * down);
        if (z_label != -kInfinity) {
            const double label = z_label - result.maximum, p = std::exp(label);
            total += p;
            total_weighted += p == 0 ? 0 : p * label;
        }
        result.entropy = result.log_sum - total_weighted / total;
    }
    return result;
}

// The sums of one block of columns; `exponentials`, if not null, gets exp(z - the block's maximum), and
// `slope` a soft cap's slope.
template <class T>
Others block_sums(const Row<T>& row, int64_t begin, int64_t n, bool with_entropy, StatsOf<T>* buffer,
                  StatsOf<T>* exponentials = nullptr, StatsOf<T>* slope = nullptr) {
    const auto sum = [&](const auto* z) {
        using namespace avx512;  // for 16-bit floats
        Others others;
        others.maximum = maximum(z, n);
        const auto shift = others.template shift<StatsOf<T>>();
        // Prefetch the next block, to overlap memory accesses with exponentials.
        for (int64_t i = 0; i < n; i += kPiece) {
            const int64_t piece = std::min(kPiece, n - i);
            row.prefetch(begin + kBlock + i, kPiece);
            if (with_entropy) {
                const auto [exp_sum, weighted_sum] = sum_exp_weighted(z + i, piece, shift);
                others.sum += exp_sum;
                others.weighted += weighted_sum;
            } else if (exponentials) {
                others.sum += write_exp(z + i, piece, shift, exponentials + i);
            } else {
                others.sum += sum_exp(z + i, piece, shift);
            }
        }
        return others;
    };
    if constexpr (avx512::handles<T>) {
        const T* stored = row.label_in(begin, n) ? nullptr : row.stored(begin);
        if (stored) return sum(stored);
    }
    return sum(row.others(begin, n, buffer, slope));
}

// Computes a row's statistics in one pass over it.
template <class T>
Statistics row_statistics(const Row<T>& row, bool with_entropy) {
    alignas(64) StatsOf<T> buffer[kBlock];
    Others others;
    for (int64_t begin = 0; begin < row.vocabulary(); begin += kBlock) {
        const int64_t n = std::min(kBlock, row.vocabulary() - begin);
        others.add(block_sums(row, begin, n, with_entropy, buffer));
    }
    return statistics_of(others, row.label() >= 0, row.label_logit(), with_entropy);
}

// Sets shift and log_sum of log p = (z - shift) - log_sum: their sum is lse.
template <class S>
void set_normalizer(double lse, RowGradient<S>& gradient) {
    gradient.shift = static_cast<S>(lse);
    gradient.log_sum = static_cast<S>(lse - gradient.shift);
}

// The same for a whole row, with shift and log_sum for a relatively accurate p.
template <class T>
void set_normalizer(const Row<T>& row, float logprob, double lse, RowGradient<float>& gradient) {
    set_normalizer(lse, gradient);
    // Even a sum of two floats can't represent log V + finfo.min, a mask value of some callers.
    // z_label - logprob is lse as well.
    if (std::abs(lse) > 0x1p24 * std::abs(logprob)) {
        gradient.shift = row.label_logit();
        gradient.log_sum = -logprob;
    }
}

// For fp64 rows `lse` is rounded to fp64, and log p would have its absolute error. The row is summed again,
// which also loads it into the cache.
template <class T>
void set_normalizer(const Row<T>& row, double, double, RowGradient<double>& gradient) {
    const Statistics statistics = row_statistics(row, false);
    gradient.shift = statistics.maximum;
    gradient.log_sum = statistics.log_sum;
}

template <class O>
void write_zeros(O* out, int64_t n) {
    std::fill_n(reinterpret_cast<char*>(out), n * sizeof(O), 0);
}

template <class O>
void write_nan(O* out, int64_t n) {
    O nan;
    from_float(std::numeric_limits<float>::quiet_NaN(), nan);
    std::fill_n(out, n, nan);
}

// The gradient at the label: c (1 - p), by expm1 because 1 - p cancels near p = 1, and the entropy's part.
template <class S>
S label_gradient(S logprob, const RowGradient<S>& row) {
    const S value = row.c * -std::expm1(logprob);
    if (row.entropy_c == 0 || logprob == -std::numeric_limits<S>::infinity()) return value;
    return value - row.entropy_c * std::exp(logprob) * (logprob + row.entropy);
}

// Writes a row's gradient. Blocks ascend, and each is read before it is written: `out` may be the logits, or
// narrower rows in their memory.
template <class T, class O, class S>
void write_gradient(const Row<T>& row, S logprob, RowGradient<S> gradient_row, O* out, bool stream = false) {
    alignas(64) S buffer[kBlock], slope[kBlock];
    const S chain = row.template chain<S>();
    gradient_row.c *= chain;
    gradient_row.entropy_c *= chain;
    stream = stream && std::is_same_v<O, float> && reinterpret_cast<uintptr_t>(out) % 64 == 0;
    for (int64_t begin = 0; begin < row.vocabulary(); begin += kBlock, out += kBlock) {
        const int64_t n = std::min(kBlock, row.vocabulary() - begin);
        if constexpr (avx512::handles<T> && avx512::handles<O>) {
            if (const T* stored = row.stored(begin)) {
                avx512::gradient(stored, n, gradient_row, out, stream);
                if (row.label_in(begin, n)) {
                    from_float(label_gradient(logprob, gradient_row), out[row.label() - begin]);
                }
                continue;
            }
        }
        const S* z = row.block(begin, n, buffer, slope);
        S* g = buffer;
        if constexpr (std::is_same_v<O, S>) g = out;
        gradient(z, n, gradient_row, g);
        if (row.label_in(begin, n)) g[row.label() - begin] = label_gradient(logprob, gradient_row);
        if (row.soft_capped()) multiply(g, slope, n);
        row.cut_block(begin, n, g, 0);  // for any logits and coefficients
        if constexpr (!std::is_same_v<O, S>) store(g, n, out);
    }
    if (stream) finish_streams();
}

// row_statistics and write_gradient fused, for rows that are `only_scaled`, with one exponential per element.
// Exponentials are kept in `memory`, of the row's size, or in `out`, which may be the logits.
template <class T, class O, class S>
Statistics statistics_and_gradient(const Row<T>& row, S c, O* out, std::vector<S>& memory,
                                   std::vector<double>& maxima) {
    alignas(64) S buffer[kBlock];
    S* exponentials;
    if constexpr (std::is_same_v<O, S>) {
        exponentials = out;
    } else {
        memory.resize(row.vocabulary());
        exponentials = memory.data();
    }
    maxima.clear();
    Others others;
    const double z_label = row.label_logit();  // read before `out` overwrites it
    for (int64_t begin = 0; begin < row.vocabulary(); begin += kBlock) {
        const int64_t n = std::min(kBlock, row.vocabulary() - begin);
        const Others block = block_sums(row, begin, n, false, buffer, exponentials + begin);
        maxima.push_back(block.maximum);
        others.add(block);
    }
    const Statistics statistics = statistics_of(others, true, z_label, false);
    if (!std::isfinite(statistics.lse)) {
        write_nan(out, row.vocabulary());
        return statistics;
    }
    const S scaled_c = c * row.template chain<S>();
    for (int64_t begin = 0; begin < row.vocabulary(); begin += kBlock) {
        const int64_t n = std::min(kBlock, row.vocabulary() - begin);
        const double down = (maxima[begin / kBlock] - statistics.maximum) - statistics.log_sum;
        S* g = buffer;
        if constexpr (std::is_same_v<O, S>) g = out + begin;
        scale(exponentials + begin, n, static_cast<S>(-scaled_c * std::exp(down)), g);
        if (row.label_in(begin, n)) {
            const RowGradient<S> gradient{0, 0, scaled_c, 0, 0};
            g[row.label() - begin] = label_gradient(static_cast<S>(statistics.logprob), gradient);
        }
        if constexpr (!std::is_same_v<O, S>) store(g, n, out + begin);
    }
    return statistics;
}

// Maximum of a block's maximum minus the shift, in nats, before the shift is updated: e^32 times any
// vocabulary is far from overflow, and updates are rare.
constexpr double kHeadroom = 32;

// Applies `shrink` to `n` elements of a row. Elements of another dtype than S go through a buffer, because
// block functions work on S; then `n` must be a multiple of kBlock.
template <class O, class S>
void shrink_row(O* out, int64_t n, S factor) {
    if constexpr (std::is_same_v<O, S>) {
        shrink(out, n, factor);
    } else {
        alignas(64) S buffer[kBlock];
        for (const O* end = out + n; out < end; out += kBlock) {
            load(out, 1, kBlock, buffer);
            shrink(buffer, kBlock, factor);
            store(buffer, kBlock, out);
        }
    }
}

// Computes the statistics, bitwise identical to row_statistics, and the rows of the gradient matmuls, in one
// pass with one exponential per element. `out` times the row's `factor` is d logprob / d logits: `out` is
// exp(z - shift), and at the label minus the sum of the others. Blocks ascend, as in write_gradient.
template <class T, class O, class S>
Statistics write_rows(const Row<T>& row, O* out, S& factor) {
    alignas(64) S buffer[kBlock], slope[kBlock];
    struct Stretch {
        int64_t end;
        double shift;
    };
    std::vector<Stretch> earlier;  // blocks with a previous shift
    Others others;
    double shift = -kInfinity;
    const double z_label = row.label_logit();  // read before `out`, which may be the logits, overwrites it
    S label_slope = 1;
    for (int64_t begin = 0; begin < row.vocabulary(); begin += kBlock) {
        const int64_t n = std::min(kBlock, row.vocabulary() - begin);
        S* exponentials = buffer;
        if constexpr (std::is_same_v<O, S>) exponentials = out + begin;
        const Others block = block_sums(row, begin, n, false, buffer, exponentials, slope);
        others.add(block);
        if (block.maximum > shift + kHeadroom) {
            if (shift != -kInfinity) earlier.push_back({begin, shift});
            shift = block.maximum;
        }
        if (block.maximum != shift) shrink(exponentials, n, static_cast<S>(std::exp(block.maximum - shift)));
        if (row.soft_capped()) {
            if (row.label_in(begin, n)) label_slope = slope[row.label() - begin];
            multiply(exponentials, slope, n);
            row.cut_block(begin, n, exponentials, 0);
        }
        if constexpr (!std::is_same_v<O, S>) store(exponentials, n, out + begin);
    }
    const Statistics statistics = statistics_of(others, row.label() >= 0, z_label, false);
    int64_t begin = 0;
    for (const auto [end, before] : earlier) {
        shrink_row(out + begin, end - begin, static_cast<S>(std::exp(before - shift)));
        begin = end;
    }
    others.move_to(shift);
    if (row.label() >= 0) from_float(static_cast<S>(0 - others.sum) * label_slope, out[row.label()]);
    factor =
        static_cast<S>(-row.template chain<double>() / (others.sum + std::exp(z_label - others.maximum)));
    return statistics;
}

}  // namespace
}  // namespace gspo_kernels
