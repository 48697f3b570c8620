// The kernels for AVX2 with FMA and F16C (x86-64-v3).
#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>

#include "kernel_table.h"

// Only what follows is compiled for the extension: headers come first, so that no inline function shared with other files is.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace paged::avx2 {
#include "simd_avx2.inl"

#include "kernels.inl"
}  // namespace paged::avx2

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace paged {
const KernelTable& avx2_kernels() {
  static constexpr KernelTable table = avx2::kernel_table("avx2");
  return table;
}
}  // namespace paged

#endif
