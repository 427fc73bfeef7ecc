// Loops of blocks.h, written by hand for AVX-512. They also read and write 16-bit floats, without a buffer.
#pragma once

#include <type_traits>

#include "blocks.h"

// Like the clones of blocks.cpp: with GSPO_ONE_CLONE compiled only if -march has the instructions.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && \
    (!defined(GSPO_ONE_CLONE) || defined(__AVX512F__))
#define GSPO_AVX512
#endif

namespace gspo_kernels::avx512 {

#ifdef GSPO_AVX512
bool available();  // on this processor
constexpr bool compiled = true;
#else
constexpr bool available() {
    return false;
}
constexpr bool compiled = false;
#endif

// Whether a dtype may be T or O of the functions below, which exist only if they were compiled.
template <class T>
constexpr bool handles = compiled && !std::is_same_v<T, double>;

template <class T>
float maximum(const T* z, int64_t n);
template <class T>
float sum_exp(const T* z, int64_t n, float shift);
template <class T>
ExpSums<float> sum_exp_weighted(const T* z, int64_t n, float shift);
template <class T>
float write_exp(const T* z, int64_t n, float shift, float* out);
// `stream` uses non-temporal stores: `out` must be floats aligned to a cache line, and not z.
template <class T, class O>
void gradient(const T* z, int64_t n, const RowGradient<float>& row, O* out, bool stream = false);

void store(const float* g, int64_t n, BFloat16* out);

}  // namespace gspo_kernels::avx512
