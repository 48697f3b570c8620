#include "packed_linear.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "instruction_set.h"
#include "parallel.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace paged {
namespace {

// Bytes of weights an item should have at least: fewer are done before another thread is awake.
constexpr std::int64_t kMinItemBytes = 1 << 16;
// Each thread reads long runs, and one that is slowed down leaves some of its share to the others.
constexpr std::int64_t kItemsPerThread = 4;
// Rows come in tiles of a matrix unit.
constexpr std::int64_t kRowTile = 16;

std::int64_t num_panels(const PackedCall& call) { return (call.num_outputs + kPackedOutputs - 1) / kPackedOutputs; }

template <class Body>
void for_panels(const PackedCall& call, int num_threads, const Body& body) {
  const std::int64_t panels = num_panels(call);
  const std::int64_t panel_bytes = call.padded_inputs() * kPackedOutputs * 2;
  const std::int64_t least = (kMinItemBytes + panel_bytes - 1) / panel_bytes;
  const std::int64_t items = num_threads <= 1 ? 1 : num_threads * kItemsPerThread;
  const std::int64_t per_item = std::max(least, (panels + items - 1) / items);
  parallel_for(num_threads, (panels + per_item - 1) / per_item,
               [&](std::int64_t item) { body(RowSpan{item * per_item, std::min(panels, (item + 1) * per_item)}); });
}

// Sixteen pairs of every output at a time, so that what is looked at stays in the nearest cache.
bool panel_matches(const PackedCall& call, std::int64_t panel, const bf16* weight, std::int64_t weight_stride) {
  const std::int64_t padded = call.padded_inputs();
  const bf16* packed = call.packed + panel * padded * kPackedOutputs;
  unsigned difference = 0;
  for (std::int64_t begin = 0; begin < padded; begin += kPackedInputs, packed += kPackedInputs * kPackedOutputs) {
    for (std::int64_t lane = 0; lane < kPackedOutputs; ++lane) {
      const std::int64_t output = panel * kPackedOutputs + lane;
      const std::int64_t left = output < call.num_outputs ? call.num_inputs - begin : 0;
      const std::int64_t inputs = std::min(left, kPackedInputs);
      bf16 row[kPackedInputs] = {};
      if (inputs > 0) std::copy_n(weight + output * weight_stride + begin, inputs, row);
      for (std::int64_t i = 0; i < kPackedInputs; i += 2) {
        const bf16* pair = packed + i * kPackedOutputs + 2 * lane;
        difference |= static_cast<unsigned>((row[i].bits ^ pair[0].bits) | (row[i + 1].bits ^ pair[1].bits));
      }
    }
  }
  return difference == 0;
}

// x with a multiple of `row_tile` rows of padded_inputs(), the rest zeros.
std::unique_ptr<bf16[]> pad_rows(const PackedCall& call, std::int64_t row_tile) {
  const std::int64_t rows = (call.num_rows + row_tile - 1) / row_tile * row_tile;
  const std::int64_t inputs = call.padded_inputs();
  std::unique_ptr<bf16[]> padded(new bf16[static_cast<std::size_t>(rows * inputs)]);
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t count = row < call.num_rows ? call.num_inputs : 0;
    bf16* target = padded.get() + row * inputs;
    std::copy_n(call.x + row * call.x_stride, count, target);
    std::fill(target + count, target + inputs, bf16{0});
  }
  return padded;
}

}  // namespace

bool is_packed(const PackedCall& call, const bf16* weight, std::int64_t weight_stride, int num_threads) {
  std::atomic<bool> matches{true};
  for_panels(call, num_threads, [&](RowSpan panels) {
    for (std::int64_t panel = panels.begin; panel < panels.end && matches.load(std::memory_order_relaxed); ++panel)
      if (!panel_matches(call, panel, weight, weight_stride)) matches.store(false, std::memory_order_relaxed);
  });
  return matches.load();
}

void packed_matmul(PackedCall call, int num_threads) {
  const KernelTable& table = kernels();
  const std::int64_t row_tile = table.packed_in_tiles && call.num_rows >= kMinPackedTileRows ? kRowTile : 1;
  std::unique_ptr<bf16[]> padded;
  if (call.num_rows % row_tile != 0 || call.num_inputs != call.padded_inputs() || call.x_stride != call.num_inputs) {
    padded = pad_rows(call, row_tile);
    call.x = padded.get();
  }
  call.x_stride = call.padded_inputs();
  for_panels(call, num_threads, [&](RowSpan panels) { table.multiply_packed(call, panels); });
}

void prefer_huge_pages(void* data, std::size_t num_bytes) {
#if defined(__linux__)
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t begin = (reinterpret_cast<std::uintptr_t>(data) + page - 1) / page * page;
  const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(data) + num_bytes) / page * page;
  if (begin < end) static_cast<void>(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE));
#else
  static_cast<void>(data);
  static_cast<void>(num_bytes);
#endif
}

}  // namespace paged
