// The operators as PyTorch sees them (torch.ops.gspo_kernels_cpp), through libtorch's stable ABI.
#include <Python.h>
#include <torch/csrc/stable/library.h>

#include "products.h"
#include "rows.h"
#include "sequences.h"

namespace gspo_kernels {
namespace {

using OptionalTensor = std::optional<Tensor>;

void boxed_forward(Tensor logits, Tensor labels, OptionalTensor row_temperature, double logit_scale,
                   double softcap, double temperature, int64_t ignore_index, Tensor logprobs, Tensor lse,
                   OptionalTensor entropy) {
    const LogitOptions options{row_temperature, logit_scale, softcap, temperature, ignore_index};
    logprobs_forward(logits, labels, options, logprobs, lse, entropy);
}

void boxed_backward(Tensor logits, Tensor labels, OptionalTensor row_temperature, double logit_scale,
                    double softcap, double temperature, int64_t ignore_index, Tensor logprobs, Tensor lse,
                    OptionalTensor entropy, Tensor grad_logprobs, OptionalTensor grad_entropy, Tensor out) {
    const LogitOptions options{row_temperature, logit_scale, softcap, temperature, ignore_index};
    logprobs_backward(logits, labels, options, logprobs, lse, entropy, grad_logprobs, grad_entropy, out);
}

void boxed_and_grad(Tensor logits, Tensor labels, OptionalTensor row_temperature, double logit_scale,
                    double softcap, double temperature, int64_t ignore_index, Tensor coefficients,
                    Tensor logprobs, Tensor lse, Tensor out) {
    const LogitOptions options{row_temperature, logit_scale, softcap, temperature, ignore_index};
    logprobs_and_grad(logits, labels, options, coefficients, logprobs, lse, out);
}

void boxed_and_rows(Tensor logits, Tensor labels, OptionalTensor row_temperature, double logit_scale,
                    double softcap, double temperature, int64_t ignore_index, Tensor logprobs, Tensor lse,
                    Tensor factors, Tensor out) {
    const LogitOptions options{row_temperature, logit_scale, softcap, temperature, ignore_index};
    logprobs_and_rows(logits, labels, options, logprobs, lse, factors, out);
}

void boxed_sequence_ratio_step(Tensor logprobs, Tensor mask, OptionalTensor old_logprobs,
                               OptionalTensor offsets, Tensor advantages, OptionalTensor weights,
                               OptionalTensor lengths, OptionalTensor normalizer, double log_low,
                               double log_high, double log_dual, bool count_tokens, int64_t divisor_kind,
                               double divisor_scale, Tensor loss, Tensor coefficients, Tensor divisor,
                               Tensor metrics) {
    const SequenceTokens tokens{logprobs,   mask,    old_logprobs, offsets,
                                advantages, weights, lengths,      normalizer};
    const ClippedSequenceRatio form{log_low, log_high, log_dual, count_tokens, divisor_kind, divisor_scale};
    sequence_ratio_step(tokens, form, loss, coefficients, divisor, metrics);
}

void boxed_product(Tensor a, Tensor b, OptionalTensor bias, Tensor out, bool accumulate, bool portable) {
    product(a, b, bias, out, accumulate, portable);
}

}  // namespace
}  // namespace gspo_kernels

#define GSPO_ROWS                                                                               \
    "Tensor logits, Tensor labels, Tensor? row_temperature, float logit_scale, float softcap, " \
    "float temperature, int ignore_index, "

STABLE_TORCH_LIBRARY(gspo_kernels_cpp, library) {
    library.def("logprobs_forward(" GSPO_ROWS
                "Tensor(a!) logprobs, Tensor(b!) lse, Tensor(c!)? entropy) -> ()");
    library.def("logprobs_backward(" GSPO_ROWS
                "Tensor logprobs, Tensor lse, Tensor? entropy, Tensor grad_logprobs, Tensor? grad_entropy, "
                "Tensor(a!) out) -> ()");
    library.def("logprobs_and_grad(" GSPO_ROWS
                "Tensor coefficients, Tensor(a!) logprobs, Tensor(b!) lse, Tensor(c!) out) -> ()");
    library.def("logprobs_and_rows(" GSPO_ROWS
                "Tensor(a!) logprobs, Tensor(b!) lse, Tensor(c!) factors, Tensor(d!) out) -> ()");
    library.def(
        "sequence_ratio_step(Tensor logprobs, Tensor mask, Tensor? old_logprobs, Tensor? offsets, "
        "Tensor advantages, Tensor? weights, Tensor? lengths, Tensor? normalizer, float log_low, "
        "float log_high, float log_dual, bool count_tokens, int divisor_kind, float divisor_scale, "
        "Tensor(a!) loss, Tensor(b!) coefficients, Tensor(c!) divisor, Tensor(d!) metrics) -> ()");
    library.def(
        "product(Tensor a, Tensor b, Tensor? bias, Tensor(a!) out, bool accumulate, bool portable) -> ()");
    library.def("multiplies_fp32() -> bool");
    library.def("multiplies_bf16() -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(gspo_kernels_cpp, CPU, library) {
    library.impl("logprobs_forward", TORCH_BOX(&gspo_kernels::boxed_forward));
    library.impl("logprobs_backward", TORCH_BOX(&gspo_kernels::boxed_backward));
    library.impl("logprobs_and_grad", TORCH_BOX(&gspo_kernels::boxed_and_grad));
    library.impl("logprobs_and_rows", TORCH_BOX(&gspo_kernels::boxed_and_rows));
    library.impl("sequence_ratio_step", TORCH_BOX(&gspo_kernels::boxed_sequence_ratio_step));
    library.impl("product", TORCH_BOX(&gspo_kernels::boxed_product));
}

STABLE_TORCH_LIBRARY_IMPL(gspo_kernels_cpp, CompositeExplicitAutograd, library) {
    library.impl("multiplies_fp32", TORCH_BOX(&gspo_kernels::multiplies_fp32));
    library.impl("multiplies_bf16", TORCH_BOX(&gspo_kernels::multiplies_bf16));
}

// Importing the module is what registers the operators; it has no contents of its own.
extern "C" PyMODINIT_FUNC PyInit__C() {
    static PyModuleDef module = {
        PyModuleDef_HEAD_INIT, "_C", nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};
    return PyModule_Create(&module);
}
