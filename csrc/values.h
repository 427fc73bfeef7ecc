// The elements of a tensor as a pointer to their type.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace gspo_kernels {

template <class S>
const S* values(const torch::stable::Tensor& tensor) {
    return static_cast<const S*>(tensor.const_data_ptr());
}

template <class S>
const S* values(const std::optional<torch::stable::Tensor>& tensor) {
    return tensor ? values<S>(*tensor) : nullptr;
}

template <class S>
S* mutable_values(const torch::stable::Tensor& tensor) {
    return static_cast<S*>(tensor.mutable_data_ptr());
}

}  // namespace gspo_kernels
