#include "divergence.h"

#include "inputs.h"

namespace gspo_kernels {
namespace {

// Divergence of a student's row from a teacher's, by `beta`: 0 is the forward KL(q || p), 1 the reverse KL(p || q), and
// between them the generalised Jensen-Shannon divergence.
template <class T>
class RowPair {
  public:
    using S = StatsOf<T>;

    RowPair(const Row<T>& student, const Row<T>& teacher, double beta)
        : student_(student),
          teacher_(teacher),
          beta_(static_cast<S>(beta)),
          mixture_{beta_, static_cast<S>(std::log(beta) - std::log1p(-beta)), static_cast<S>(std::log(beta)),
                   static_cast<S>(std::log1p(-beta))} {
        const Statistics own = row_statistics(student, false), other = row_statistics(teacher, false);
        finite_ = std::isfinite(own.lse) && std::isfinite(other.lse);
        rows_ = {static_cast<S>(own.maximum), static_cast<S>(own.log_sum), static_cast<S>(other.maximum),
                 static_cast<S>(other.log_sum)};
    }

    // c times the gradient in `out`, unless that is null, which may be the student's logits, or narrower rows inside their
    // memory: whole blocks are read before they are written, and the rest of the row lies behind.
    template <class O>
    double evaluate(S c, O* out) {
        if (out && c == 0) write_zeros(out, student_.vocabulary());
        O* const written = c == 0 ? nullptr : out;
        if (!finite_) {
            if (written) write_nan(written, student_.vocabulary());
            return kNaN;
        }
        c *= student_.template chain<S>();
        if (beta_ == 0) return forward(c, written);
        Divergences<double> sums{0, 0};
        each_block([&](const S* z, const S* t, int64_t, int64_t n) {
            if (beta_ == 1) {
                sums.value += reverse_kl(z, t, n, rows_);
            } else {
                const auto [value, of_student] = jensen_shannon(z, t, n, rows_, mixture_);
                sums.value += value;
                sums.to_mixture += of_student;
            }
        });
        // A row that has infinitely far to go has no direction.
        if (written && !std::isfinite(sums.value)) {
            write_nan(written, student_.vocabulary());
        } else if (written) {
            each_block(written, [&](const S* z, const S* t, int64_t n, S* g) {
                if (beta_ == 1) {
                    reverse_kl_gradient(z, t, n, rows_, c, static_cast<S>(sums.value), g);
                } else {
                    jensen_shannon_gradient(z, t, n, rows_, mixture_, c, static_cast<S>(sums.to_mixture), g);
                }
            });
        }
        return sums.value;
    }

  private:
    template <class O>
    double forward(S c, O* out) {
        double sum = 0;
        if (out) {
            each_block(out, [&](const S* z, const S* t, int64_t n, S* g) {
                sum += forward_kl(z, t, n, rows_, c, g);
            });
        } else {
            each_block([&](const S* z, const S* t, int64_t, int64_t n) {
                sum += forward_kl(z, t, n, rows_, c, nullptr);
            });
        }
        return sum;
    }

    template <class F>
    void each_block(const F& work) {
        for (int64_t begin = 0; begin < student_.vocabulary(); begin += kBlock) {
            const int64_t n = std::min(kBlock, student_.vocabulary() - begin);
            work(student_.block(begin, n, buffer_, slope_), teacher_.block(begin, n, teacher_buffer_), begin, n);
        }
    }

    template <class O, class F>
    void each_block(O* out, const F& work) {
        each_block([&](const S* z, const S* t, int64_t begin, int64_t n) {
            S* g = buffer_;
            if constexpr (std::is_same_v<O, S>) g = out + begin;
            work(z, t, n, g);
            if (student_.soft_capped()) multiply(g, slope_, n);
            student_.cut_block(begin, n, g, 0);
            if constexpr (!std::is_same_v<O, S>) store(g, n, out + begin);
        });
    }

    const Row<T>&student_, &teacher_;
    const S beta_;
    const Mixture<S> mixture_;
    Normalizers<S> rows_;
    bool finite_;
    alignas(64) S buffer_[kBlock], slope_[kBlock], teacher_buffer_[kBlock];
};

}  // namespace

void divergence(const Tensor& logits, const Tensor& teacher_logits, const Tensor& labels,
                const LogitOptions& options, const LogitOptions& teacher_options, double beta,
                const std::optional<Tensor>& coefficients, Tensor& divergences, std::optional<Tensor>& out) {
    const auto work = [&](auto dtype, auto out_dtype) {
        using T = decltype(dtype);
        using O = decltype(out_dtype);
        using S = StatsOf<T>;
        const Inputs<T> inputs(logits, labels, options), teacher(teacher_logits, labels, teacher_options);
        const Tensor& shape = out ? *out : logits;
        const Rows<O> out_rows(shape, out ? out->mutable_data_ptr() : nullptr);
        const S* c = values<S>(coefficients);
        S* value_out = mutable_values<S>(divergences);
        for_each_row(labels.numel(), inputs.logits.vocabulary, [&](int64_t i) {
            O* out_row = out ? out_rows.row(i) : nullptr;
            value_out[i] = 0;
            if (inputs.ignored(i)) {
                if (out) write_zeros(out_row, out_rows.vocabulary);
                return;
            }
            const Row<T> own = inputs.unlabelled(i), other = teacher.unlabelled(i);
            value_out[i] = static_cast<S>(RowPair<T>(own, other, beta).evaluate(out ? c[i] : S(0), out_row));
        });
    };
    visit_dtype(logits, [&](auto dtype) {
        if (!out) return work(dtype, dtype);
        visit_dtype(*out, [&](auto out_dtype) { work(dtype, out_dtype); });
    });
}

}  // namespace gspo_kernels
