// The operators as PyTorch sees them (torch.ops.gspo_kernels_cpp), through libtorch's stable ABI.
#include <Python.h>
#include <torch/csrc/stable/library.h>

#include <memory>

#include "operators.h"
#include "values.h"

namespace gspo_kernels {
namespace {

using OptionalTensor = std::optional<Tensor>;

// A function of rows and `LogitOptions` whose options are separate arguments.
template <auto function>
struct Flat;

template <class... Rest, void (*function)(const Tensor&, const Tensor&, const LogitOptions&, Rest...)>
struct Flat<function> {
    static void call(Tensor rows, Tensor labels, OptionalTensor row_temperature, OptionalTensor kept,
                     double logit_scale, double softcap, double temperature, int64_t ignore_index,
                     Rest... rest) {
        function(rows, labels, {row_temperature, kept, logit_scale, softcap, temperature, ignore_index},
                 rest...);
    }
};

void boxed_divergence(Tensor logits, Tensor labels, OptionalTensor row_temperature, OptionalTensor kept,
                      double logit_scale, double softcap, double temperature, int64_t ignore_index,
                      Tensor teacher_logits, OptionalTensor teacher_row_temperature,
                      double teacher_logit_scale, double teacher_softcap, double teacher_temperature,
                      double beta, bool normalizers_known, bool all_known, OptionalTensor grad, Tensor lse,
                      Tensor teacher_lse, Tensor divergences, Tensor centers, OptionalTensor out) {
    const LogitOptions options{row_temperature, kept, logit_scale, softcap, temperature, ignore_index};
    const LogitOptions teacher{teacher_row_temperature, kept,        teacher_logit_scale, teacher_softcap,
                               teacher_temperature,     ignore_index};
    const PairTensors pairs{lse, teacher_lse, divergences, centers, normalizers_known, all_known};
    divergence(logits, teacher_logits, labels, options, teacher, beta, grad, pairs, out);
}

// In order: the mask has values other than 0 and 1; values must be rechecked; neither.
enum Verdict : int64_t { kNoMask, kRecheck, kValid };

int64_t boxed_ratio_step(Tensor logprobs, Tensor mask, OptionalTensor old_logprobs, OptionalTensor offsets,
                         Tensor advantages, OptionalTensor weights, OptionalTensor lengths,
                         OptionalTensor normalizer, double log_low, double log_high, double log_dual,
                         bool count_tokens, int64_t divisor_kind, double divisor_scale, bool per_token,
                         OptionalTensor ref_logprobs, OptionalTensor kl_beta, int64_t kl_estimator,
                         Tensor loss, Tensor metrics, Tensor grad_logprobs) {
    const bool* counted = nullptr;
    std::unique_ptr<bool[]> merged;
    if (mask.scalar_type() == torch::headeronly::ScalarType::Bool) {
        counted = values<bool>(mask);
    } else {
        merged.reset(new bool[mask.numel()]);
        OptionalTensor no_labels;
        if (!merge_mask(mask, {}, 0, merged.get(), no_labels)) return kNoMask;
        counted = merged.get();
    }
    const SequenceTokens tokens{counted, old_logprobs, offsets,      advantages, weights,
                                lengths, normalizer,   ref_logprobs, kl_beta,    kl_estimator};
    const RatioClip ratio_clip{log_low,      log_high,      log_dual, count_tokens,
                               divisor_kind, divisor_scale, per_token};
    const SequenceOutputs outputs{.loss = loss, .metrics = metrics, .grad_logprobs = grad_logprobs};
    return ratio_step(logprobs, tokens, ratio_clip, outputs) ? kValid : kRecheck;
}

bool boxed_sequence_ratio_forward(Tensor logits, Tensor labels, OptionalTensor row_temperature,
                                  OptionalTensor kept, double logit_scale, double softcap, double temperature,
                                  int64_t ignore_index, OptionalTensor old_logprobs, OptionalTensor offsets,
                                  Tensor advantages, OptionalTensor weights, OptionalTensor lengths,
                                  OptionalTensor normalizer, double log_low, double log_high, double log_dual,
                                  bool count_tokens, int64_t divisor_kind, double divisor_scale,
                                  bool per_token, Tensor logprobs, Tensor lse, Tensor loss,
                                  Tensor coefficients, Tensor divisor, Tensor metrics) {
    const LogitOptions options{row_temperature, kept, logit_scale, softcap, temperature, ignore_index};
    OptionalTensor no_entropy;
    logprobs_forward(logits, labels, options, logprobs, lse, no_entropy);
    const int64_t count = labels.numel(), *label = values<int64_t>(labels);
    const std::unique_ptr<bool[]> mask(new bool[count]);
    for (int64_t i = 0; i < count; ++i) mask[i] = label[i] != ignore_index;
    const SequenceTokens tokens{mask.get(), old_logprobs, offsets, advantages, weights, lengths, normalizer};
    const RatioClip ratio_clip{log_low,      log_high,      log_dual, count_tokens,
                               divisor_kind, divisor_scale, per_token};
    return ratio_step(logprobs, tokens, ratio_clip,
                      {.loss = loss, .metrics = metrics, .coefficients = coefficients, .divisor = divisor});
}

bool boxed_merge_mask(Tensor mask, OptionalTensor labels, int64_t ignore_index, Tensor counted,
                      OptionalTensor merged) {
    return merge_mask(mask, labels, ignore_index, mutable_values<bool>(counted), merged);
}

}  // namespace
}  // namespace gspo_kernels

#define GSPO_OPTIONS                                                                                 \
    "Tensor labels, Tensor? row_temperature, Tensor? kept, float logit_scale, float softcap, float " \
    "temperature, "                                                                                  \
    "int ignore_index, "
#define GSPO_ROWS "Tensor logits, " GSPO_OPTIONS
#define GSPO_SEQUENCES                                                                             \
    "Tensor? old_logprobs, Tensor? offsets, Tensor advantages, Tensor? weights, Tensor? lengths, " \
    "Tensor? normalizer, float log_low, float log_high, float log_dual, bool count_tokens, "       \
    "int divisor_kind, float divisor_scale, bool per_token, "

STABLE_TORCH_LIBRARY(gspo_kernels_cpp, library) {
    library.def("logprobs_forward(" GSPO_ROWS
                "Tensor(a!) logprobs, Tensor(b!) lse, Tensor(c!)? entropy) -> ()");
    library.def("logprobs_backward(" GSPO_ROWS
                "Tensor logprobs, Tensor lse, Tensor? entropy, Tensor grad_logprobs, Tensor? grad_entropy, "
                "Tensor? grad_scale, bool sharded, Tensor(a!) out) -> ()");
    library.def("logprobs_and_grad(" GSPO_ROWS
                "Tensor coefficients, Tensor(a!) logprobs, Tensor(b!) lse, Tensor(c!) out) -> ()");
    library.def("logprobs_and_rows(" GSPO_ROWS
                "Tensor(a!) logprobs, Tensor(b!) lse, Tensor(c!) factors, Tensor(d!) out) -> ()");
    library.def("divergence(" GSPO_ROWS
                "Tensor teacher_logits, Tensor? teacher_row_temperature, float teacher_logit_scale, "
                "float teacher_softcap, float teacher_temperature, float beta, bool normalizers_known, "
                "bool all_known, Tensor? grad, Tensor(a!) lse, Tensor(b!) teacher_lse, "
                "Tensor(c!) divergences, Tensor(d!) centers, Tensor(e!)? out) -> ()");
    library.def("ratio_step(Tensor logprobs, Tensor mask, " GSPO_SEQUENCES
                "Tensor? ref_logprobs, Tensor? kl_beta, int kl_estimator, Tensor(a!) loss, "
                "Tensor(b!) metrics, Tensor(c!) grad_logprobs) -> int");
    library.def("sequence_ratio_forward(" GSPO_ROWS GSPO_SEQUENCES
                "Tensor(a!) logprobs, Tensor(b!) lse, Tensor(c!) loss, Tensor(d!) coefficients, "
                "Tensor(e!) divisor, Tensor(f!) metrics) -> bool");
    library.def(
        "merge_mask(Tensor mask, Tensor? labels, int ignore_index, Tensor(a!) counted, "
        "Tensor(b!)? merged) -> bool");
    library.def(
        "product(Tensor a, Tensor b, Tensor? bias, Tensor? ends, Tensor(a!) out, bool accumulate, "
        "int instructions) -> ()");
    library.def("fold_columns(" GSPO_ROWS "int first, int vocabulary, bool entropy, Tensor(a!) sums) -> ()");
    library.def("fold_products(Tensor hidden, " GSPO_OPTIONS
                "Tensor weight, Tensor? bias, bool entropy, int instructions, Tensor(a!) sums) -> ()");
    library.def(
        "folded_statistics(Tensor sums, Tensor labels, int ignore_index, Tensor(a!) logprobs, "
        "Tensor(b!) lse, Tensor(c!)? entropy) -> ()");
    library.def("product_instructions(bool bf16) -> int");
    library.def("amx_unavailable() -> str");
    library.def("on_intel() -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(gspo_kernels_cpp, CPU, library) {
    library.impl("logprobs_forward", TORCH_BOX(&gspo_kernels::Flat<gspo_kernels::logprobs_forward>::call));
    library.impl("logprobs_backward", TORCH_BOX(&gspo_kernels::Flat<gspo_kernels::logprobs_backward>::call));
    library.impl("logprobs_and_grad", TORCH_BOX(&gspo_kernels::Flat<gspo_kernels::logprobs_and_grad>::call));
    library.impl("logprobs_and_rows", TORCH_BOX(&gspo_kernels::Flat<gspo_kernels::logprobs_and_rows>::call));
    library.impl("divergence", TORCH_BOX(&gspo_kernels::boxed_divergence));
    library.impl("ratio_step", TORCH_BOX(&gspo_kernels::boxed_ratio_step));
    library.impl("sequence_ratio_forward", TORCH_BOX(&gspo_kernels::boxed_sequence_ratio_forward));
    library.impl("merge_mask", TORCH_BOX(&gspo_kernels::boxed_merge_mask));
    library.impl("product", TORCH_BOX(&gspo_kernels::product));
    library.impl("fold_columns", TORCH_BOX(&gspo_kernels::Flat<gspo_kernels::add_columns>::call));
    library.impl("fold_products", TORCH_BOX(&gspo_kernels::Flat<gspo_kernels::add_products>::call));
    library.impl("folded_statistics", TORCH_BOX(&gspo_kernels::statistics_of_sums));
}

STABLE_TORCH_LIBRARY_IMPL(gspo_kernels_cpp, CompositeExplicitAutograd, library) {
    library.impl("product_instructions", TORCH_BOX(&gspo_kernels::product_instructions));
    library.impl("amx_unavailable", TORCH_BOX(&gspo_kernels::amx_reason));
    library.impl("on_intel", TORCH_BOX(&gspo_kernels::on_intel));
}

// The module is empty; importing it registers the operators.
extern "C" PyMODINIT_FUNC PyInit__C() {
    static PyModuleDef module = {
        PyModuleDef_HEAD_INIT, "_C", nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};
    return PyModule_Create(&module);
}
