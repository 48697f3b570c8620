// The kernels for AVX-512 with byte dot products; bfloat16 as floats.
#if defined(__x86_64__)

#include <immintrin.h>

#include <type_traits>

#include "isa/kernel_table.h"
#include "isa/target.h"

PAGED_BEGIN_TARGET(PAGED_AVX512_VNNI)

namespace paged::avx512_vnni {
#define PAGED_BF16_DOT 0
#define PAGED_BYTE_DOT 1
#define PAGED_AMX 0
#include "simd/avx512.inl"

#include "isa/kernels.inl"
}  // namespace paged::avx512_vnni

PAGED_END_TARGET

namespace paged {
const KernelTable& avx512_vnni_kernels() {
  static constexpr KernelTable table = avx512_vnni::kernel_table(PAGED_SET_NAME("avx512_vnni"));
  return table;
}
}  // namespace paged

#endif
