#include "inputs.h"
#include "operators.h"

namespace gspo_kernels {
namespace {

// `PairTensors` of one row.
struct PairNumbers {
    double lse, teacher_lse, divergence, center;
};

// A student's row and a teacher's: their divergence for `beta` (0 is the forward KL(q || p), 1 the reverse
// KL(p || q), and between them the generalized Jensen-Shannon divergence), and its gradient.
template <class T>
class RowPair {
  public:
    using S = StatsOf<T>;

    RowPair(const Row<T>& student, const Row<T>& teacher, double beta)
        : student_(student),
          teacher_(teacher),
          beta_(static_cast<S>(beta)),
          chain_(student.template chain<S>()),
          mixture_{beta_, static_cast<S>(std::log(beta) - std::log1p(-beta)), static_cast<S>(std::log(beta)),
                   static_cast<S>(std::log1p(-beta))} {}

    void compute_normalizers(PairNumbers& row) {
        const Statistics student = row_statistics(student_, false);
        const Statistics teacher = row_statistics(teacher_, false);
        row.lse = student.lse;
        row.teacher_lse = teacher.lse;
        rows_ = {static_cast<S>(student.maximum), static_cast<S>(student.log_sum),
                 static_cast<S>(teacher.maximum), static_cast<S>(teacher.log_sum)};
    }

    // Called instead of `compute_normalizers` if the log-sum-exps are known.
    void take_normalizers(const PairNumbers& row) {
        RowGradient<S> student{}, teacher{};
        set_normalizer(row.lse, student);
        set_normalizer(row.teacher_lse, teacher);
        rows_ = {student.shift, student.log_sum, teacher.shift, teacher.log_sum};
    }

    void compare(PairNumbers& row) {
        Divergences<double> sums{kNaN, kNaN};
        if (comparable(row)) {
            sums = {0, 0};
            each_block([&](const S* z, const S* t, int64_t, int64_t n) {
                if (beta_ == 0) {
                    sums.value += forward_kl(z, t, n, rows_, 0, nullptr);
                } else if (beta_ == 1) {
                    sums.value += reverse_kl(z, t, n, rows_);
                } else {
                    const auto [value, of_student] = jensen_shannon(z, t, n, rows_, mixture_);
                    sums.value += value;
                    sums.to_mixture += of_student;
                }
            });
        }
        row.divergence = sums.value;
        row.center = beta_ == 0 ? 0 : beta_ == 1 ? sums.value : sums.to_mixture;
    }

    // The forward KL's gradient needs no sum over the row.
    bool compares_while_writing() const { return beta_ == 0; }

    // Writes the gradient of `c` times the divergence to `out`, which may be the student's logits or narrower
    // rows in their memory: blocks ascend, and each is read before it is written. Returns the forward KL, if
    // that is the divergence and a gradient is computed.
    template <class O>
    double write(const PairNumbers& row, S c, O* out) {
        if (c == 0) {
            write_zeros(out, student_.vocabulary());
        } else if (!directed(row)) {
            write_nan(out, student_.vocabulary());
        } else {
            return write_slopes(row, c * chain_, out);
        }
        return kNaN;
    }

  private:
    static bool comparable(const PairNumbers& row) {
        return std::isfinite(row.lse) && std::isfinite(row.teacher_lse);
    }

    // Whether the gradient is defined; that of an infinite divergence is not, except for the forward KL.
    bool directed(const PairNumbers& row) const {
        return comparable(row) && (beta_ == 0 || std::isfinite(row.divergence));
    }

    template <class O>
    double write_slopes(const PairNumbers& row, S c, O* out) {
        const S center = static_cast<S>(row.center);
        double sum = 0;
        each_block([&](const S* z, const S* t, int64_t begin, int64_t n) {
            S* g = buffer_;
            if constexpr (std::is_same_v<O, S>) g = out + begin;
            if (beta_ == 0) {
                sum += forward_kl(z, t, n, rows_, c, g);
            } else if (beta_ == 1) {
                reverse_kl_gradient(z, t, n, rows_, c, center, g);
            } else {
                jensen_shannon_gradient(z, t, n, rows_, mixture_, c, center, g);
            }
            if (student_.soft_capped()) multiply(g, slope_, n);
            student_.cut_block(begin, n, g, 0);
            if constexpr (!std::is_same_v<O, S>) store(g, n, out + begin);
        });
        return sum;
    }

    template <class F>
    void each_block(const F& work) {
        for (int64_t begin = 0; begin < student_.vocabulary(); begin += kBlock) {
            const int64_t n = std::min(kBlock, student_.vocabulary() - begin);
            work(student_.block(begin, n, buffer_, slope_), teacher_.block(begin, n, teacher_buffer_), begin,
                 n);
        }
    }

    const Row<T>&student_, &teacher_;
    const S beta_, chain_;
    const Mixture<S> mixture_;
    Normalizers<S> rows_;
    alignas(64) S buffer_[kBlock], slope_[kBlock], teacher_buffer_[kBlock];
};

}  // namespace

void divergence(const Tensor& logits, const Tensor& teacher_logits, const Tensor& labels,
                const LogitOptions& options, const LogitOptions& teacher_options, double beta,
                const std::optional<Tensor>& grad, const PairTensors& pairs, std::optional<Tensor>& out) {
    const auto work = [&](auto dtype, auto out_dtype) {
        using T = decltype(dtype);
        using O = decltype(out_dtype);
        using S = StatsOf<T>;
        const Inputs<T> inputs(logits, labels, options), teacher(teacher_logits, labels, teacher_options);
        const Tensor& shape = out ? *out : logits;
        const Rows<O> out_rows(shape, out ? out->mutable_data_ptr() : nullptr);
        const S* c = values<S>(grad);
        S *divergence = mutable_values<S>(pairs.divergences), *center = mutable_values<S>(pairs.centers);
        double *lse = mutable_values<double>(pairs.lse),
               *teacher_lse = mutable_values<double>(pairs.teacher_lse);
        for_each_row(labels.numel(), inputs.logits.vocabulary, [&](int64_t i) {
            O* out_row = out ? out_rows.row(i) : nullptr;
            PairNumbers row{};
            if (inputs.ignored(i)) {
                if (out) write_zeros(out_row, out_rows.vocabulary);
            } else {
                const Row<T> row_student = inputs.unlabeled(i), row_teacher = teacher.unlabeled(i);
                RowPair<T> pair(row_student, row_teacher, beta);
                row = {lse[i], teacher_lse[i], divergence[i], center[i]};
                pairs.normalizers_known ? pair.take_normalizers(row) : pair.compute_normalizers(row);
                const bool at_once = out && c[i] != 0 && pair.compares_while_writing();
                if (!pairs.all_known && !at_once) pair.compare(row);
                if (out) {
                    const double sum = pair.write(row, c[i], out_row);
                    if (!pairs.all_known && at_once) {
                        row.divergence = sum;
                        row.center = 0;
                    }
                }
            }
            if (!pairs.normalizers_known) {
                lse[i] = row.lse;
                teacher_lse[i] = row.teacher_lse;
            }
            if (!pairs.all_known) {
                divergence[i] = static_cast<S>(row.divergence);
                center[i] = static_cast<S>(row.center);
            }
        });
    };
    visit_dtype(logits, [&](auto dtype) {
        if (!out) return work(dtype, dtype);
        visit_dtype(*out, [&](auto out_dtype) { work(dtype, out_dtype); });
    });
}

}  // namespace gspo_kernels
