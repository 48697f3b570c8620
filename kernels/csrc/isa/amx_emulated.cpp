// The kernels for the matrix unit (AMX) on an emulation of it: for tests.
#if defined(__x86_64__) && PAGED_EMULATE

#include <immintrin.h>

#include <type_traits>

#include "isa/kernel_table.h"
#include "isa/target.h"

PAGED_BEGIN_TARGET(PAGED_AVX512_BF16)

namespace paged::amx_emulated {
#define PAGED_BF16_DOT 1
#define PAGED_BYTE_DOT 1
#define PAGED_AMX 1
#include "simd/avx512.inl"
#include "simd/tile_emulation.inl"

#include "isa/kernels.inl"
}  // namespace paged::amx_emulated

PAGED_END_TARGET

namespace paged {
const KernelTable& amx_emulated_kernels() {
  static constexpr KernelTable table = amx_emulated::kernel_table("amx_emulated");
  return table;
}
}  // namespace paged

#endif
