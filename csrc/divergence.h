// Divergences of a student's rows of logits from a teacher's; `gspo_kernels.ops.backends.RowBackend.divergence` says
// what they mean.
#pragma once

#include "rows.h"

namespace gspo_kernels {

// Both logits are of one dtype. `divergences` is contiguous, of the dtype of statistics. `coefficients`, contiguous and of
// that dtype, and `out` come together or not at all.
void divergence(const Tensor& logits, const Tensor& teacher_logits, const Tensor& labels,
                const LogitOptions& options, const LogitOptions& teacher_options, double beta,
                const std::optional<Tensor>& coefficients, Tensor& divergences, std::optional<Tensor>& out);

}  // namespace gspo_kernels
