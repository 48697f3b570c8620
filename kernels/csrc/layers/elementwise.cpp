#include "layers/elementwise.h"

#include <algorithm>

#include "isa/instruction_set.h"
#include "runtime/parallel.h"

namespace paged {
namespace {

// Elements a thread should have at least: fewer are done before another thread is awake.
constexpr std::int64_t kMinElements = 1 << 15;

template <class Call>
void run_rows(void (*kernel)(const Call&, RowSpan), const Call& call, std::int64_t rows, std::int64_t row_elements, int num_threads) {
  const std::int64_t rows_per_item = std::max<std::int64_t>(1, kMinElements / std::max<std::int64_t>(1, row_elements));
  parallel_for(num_threads, (rows + rows_per_item - 1) / rows_per_item, [&](std::int64_t item) {
    kernel(call, {item * rows_per_item, std::min(rows, (item + 1) * rows_per_item)});
  });
}

}  // namespace

void rms_norm(const NormCall& call, std::int64_t rows, DType dtype, int num_threads) {
  run_rows(kernels().rms_norm[static_cast<int>(dtype)], call, rows, call.size, num_threads);
}

void silu_mul(const SiluMulCall& call, std::int64_t rows, DType dtype, int num_threads) {
  run_rows(kernels().silu_mul[static_cast<int>(dtype)], call, rows, call.size, num_threads);
}

void rotary(const RotaryCall& call, std::int64_t rows, DType dtype, int num_threads) {
  run_rows(kernels().rotary[static_cast<int>(dtype)], call, rows, 2 * call.half * call.num_heads, num_threads);
}

}  // namespace paged
