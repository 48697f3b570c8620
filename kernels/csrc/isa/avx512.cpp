// The kernels for AVX-512 (x86-64-v4).
#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>

#include "isa/kernel_table.h"
#include "isa/target.h"

PAGED_BEGIN_TARGET(PAGED_AVX512)

namespace paged::avx512 {
#define PAGED_BF16_DOT 0
#define PAGED_BYTE_DOT 0
#define PAGED_AMX 0
#include "simd/avx512.inl"

#include "isa/kernels.inl"
}  // namespace paged::avx512

PAGED_END_TARGET

namespace paged {
const KernelTable& avx512_kernels() {
  static constexpr KernelTable table = avx512::kernel_table(PAGED_SET_NAME("avx512"));
  return table;
}
}  // namespace paged

#endif
