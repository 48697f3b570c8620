// The kernels for any processor: what the compiler makes of four-float vectors for its baseline.
#include <type_traits>

#include "kernel_table.h"
#include "target.h"

namespace paged::portable {
#include "simd_portable.inl"

#include "kernels.inl"
}  // namespace paged::portable

namespace paged {
const KernelTable& portable_kernels() {
  static constexpr KernelTable table = portable::kernel_table("portable");
  return table;
}
}  // namespace paged
