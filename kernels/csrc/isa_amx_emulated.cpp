// The kernels for the matrix unit (AMX) on a processor that has only AVX-512 with bfloat16 and byte dot products: for tests.
#if defined(__x86_64__) && PAGED_EMULATE_AMX

#include <immintrin.h>

#include <type_traits>

#include "kernel_table.h"

// Only what follows is compiled for the extension: headers come first, so that no inline function shared with other files is.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c")
#endif

namespace paged::amx_emulated {
#define PAGED_BF16_DOT 1
#define PAGED_BYTE_DOT 1
#define PAGED_AMX 1
#include "tile_emulation.inl"
#include "simd_avx512.inl"

#include "kernels.inl"
}  // namespace paged::amx_emulated

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace paged {
const KernelTable& amx_emulated_kernels() {
  static constexpr KernelTable table = amx_emulated::kernel_table("amx_emulated");
  return table;
}
}  // namespace paged

#endif
