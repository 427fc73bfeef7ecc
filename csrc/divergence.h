// Divergences of a student's rows of logits from a teacher's;
// `gspo_kernels.backends.dispatch.RowBackend.divergence` says what they mean.
#pragma once

#include "rows.h"

namespace gspo_kernels {

// Statistics of the rows, contiguous. The flags say whether the first two, or all of them, are known.
struct PairTensors {
    Tensor lse, teacher_lse, divergences, centres;
    bool normalizers_known, all_known;
};

// Both logits have one dtype. `grad` is the divergences' gradient, contiguous, in the dtype of statistics. It
// comes together with `out` or not at all.
void divergence(const Tensor& logits, const Tensor& teacher_logits, const Tensor& labels,
                const LogitOptions& options, const LogitOptions& teacher_options, double beta,
                const std::optional<Tensor>& grad, const PairTensors& pairs, std::optional<Tensor>& out);

}  // namespace gspo_kernels
