// The kernels for AVX2 with FMA and F16C (x86-64-v3).
#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>

#include "isa/kernel_table.h"
#include "isa/target.h"

PAGED_BEGIN_TARGET(PAGED_AVX2)

namespace paged::avx2 {
#include "simd/avx2.inl"

#include "isa/kernels.inl"
}  // namespace paged::avx2

PAGED_END_TARGET

namespace paged {
const KernelTable& avx2_kernels() {
  static constexpr KernelTable table = avx2::kernel_table("avx2");
  return table;
}
}  // namespace paged

#endif
