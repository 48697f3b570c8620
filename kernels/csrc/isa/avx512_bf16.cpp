// The kernels for AVX-512 with bfloat16 and byte dot products.
#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>

#include "isa/kernel_table.h"
#include "isa/target.h"

PAGED_BEGIN_TARGET(PAGED_AVX512_BF16)

namespace paged::avx512_bf16 {
#define PAGED_BF16_DOT 1
#define PAGED_BYTE_DOT 1
#define PAGED_AMX 0
#include "simd/avx512.inl"

#include "isa/kernels.inl"
}  // namespace paged::avx512_bf16

PAGED_END_TARGET

namespace paged {
const KernelTable& avx512_bf16_kernels() {
  static constexpr KernelTable table = avx512_bf16::kernel_table(PAGED_SET_NAME("avx512_bf16"));
  return table;
}
}  // namespace paged

#endif
