// Divergences of a student's rows of logits from a teacher's; see
// `gspo_kernels.backends.protocol.RowBackend.divergence`.
#pragma once

#include "rows.h"

namespace gspo_kernels {

// Statistics of the rows, contiguous. The flags tell whether the first two, or all of them, are known.
struct PairTensors {
    Tensor lse, teacher_lse, divergences, centers;
    bool normalizers_known, all_known;
};

// Both logits have the same dtype. `grad`, the divergences' gradient, is contiguous and in the dtype of
// statistics; `grad` and `out` are both present or both absent.
void divergence(const Tensor& logits, const Tensor& teacher_logits, const Tensor& labels,
                const LogitOptions& options, const LogitOptions& teacher_options, double beta,
                const std::optional<Tensor>& grad, const PairTensors& pairs, std::optional<Tensor>& out);

}  // namespace gspo_kernels
