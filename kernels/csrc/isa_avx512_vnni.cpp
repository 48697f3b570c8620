// The kernels for AVX-512 with byte dot products; bfloat16 as floats.
#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>

#include "kernel_table.h"

// Only what follows is compiled for the extension: headers come first, so that no inline function shared with other files is.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#endif

namespace paged::avx512_vnni {
#define PAGED_BF16_DOT 0
#define PAGED_BYTE_DOT 1
#define PAGED_AMX 0
#include "simd_avx512.inl"

#include "kernels.inl"
}  // namespace paged::avx512_vnni

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace paged {
const KernelTable& avx512_vnni_kernels() {
  static constexpr KernelTable table = avx512_vnni::kernel_table("avx512_vnni");
  return table;
}
}  // namespace paged

#endif
