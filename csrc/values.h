// The elements of a tensor as a pointer to their type.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
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

// Elements of a contiguous tensor of fp32 or fp64, read as fp64; false if there is no tensor. A tensor
// without elements is true for any address.
class Reals {
  public:
    explicit Reals(const std::optional<torch::stable::Tensor>& tensor)
        : there_(tensor.has_value()),
          data_(tensor ? tensor->const_data_ptr() : nullptr),
          wide_(tensor && tensor->scalar_type() == torch::headeronly::ScalarType::Double) {}

    explicit operator bool() const { return there_; }
    double operator[](int64_t i) const {
        return wide_ ? static_cast<const double*>(data_)[i] : static_cast<const float*>(data_)[i];
    }

  private:
    bool there_;
    const void* data_;
    bool wide_;
};

}  // namespace gspo_kernels
