// The kernels for any processor: what the compiler makes of four-float vectors for its baseline.
#include <type_traits>

#include "isa/kernel_table.h"
#include "isa/target.h"

namespace paged::portable {
#include "simd/portable.inl"

#include "isa/kernels.inl"
}  // namespace paged::portable

namespace paged {
const KernelTable& portable_kernels() {
  static constexpr KernelTable table = portable::kernel_table("portable");
  return table;
}
}  // namespace paged
