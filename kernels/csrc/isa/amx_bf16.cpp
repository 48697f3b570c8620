// The kernels for AVX-512 with bfloat16 and byte dot products and the matrix unit (AMX).
#if defined(__x86_64__) && PAGED_WITH_AMX

#include <immintrin.h>

#include <type_traits>

#include "isa/kernel_table.h"
#include "isa/target.h"

PAGED_BEGIN_TARGET(PAGED_AMX_BF16)

namespace paged::amx_bf16 {
#define PAGED_BF16_DOT 1
#define PAGED_BYTE_DOT 1
#define PAGED_AMX 1
#include "simd/avx512.inl"

#include "isa/kernels.inl"
}  // namespace paged::amx_bf16

PAGED_END_TARGET

namespace paged {
const KernelTable& amx_bf16_kernels() {
  static constexpr KernelTable table = amx_bf16::kernel_table("amx_bf16");
  return table;
}
}  // namespace paged

#endif
