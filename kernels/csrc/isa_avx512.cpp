// The kernels for AVX-512 (x86-64-v4).
#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>

#include "kernel_table.h"

// Only what follows is compiled for the extension: headers come first, so that no inline function shared with other files is.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

namespace paged::avx512 {
#define PAGED_BF16_DOT 0
#define PAGED_BYTE_DOT 0
#define PAGED_AMX 0
#include "simd_avx512.inl"

#include "kernels.inl"
}  // namespace paged::avx512

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace paged {
const KernelTable& avx512_kernels() {
  static constexpr KernelTable table = avx512::kernel_table("avx512");
  return table;
}
}  // namespace paged

#endif
