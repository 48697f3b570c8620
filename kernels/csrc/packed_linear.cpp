#include "packed_linear.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "instruction_set.h"
#include "parallel.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace paged {
namespace {

// Bytes of weights a span should have at least: fewer are done before another thread is awake.
constexpr std::int64_t kMinSpanBytes = 1 << 16;
// Rows come in tiles of a matrix unit.
constexpr std::int64_t kRowTile = 16;

std::int64_t num_panels(const PackedCall& call) { return (call.num_outputs + kPackedOutputs - 1) / kPackedOutputs; }

template <class Body>
void for_panels(const PackedCall& call, int num_threads, const Body& body) {
  const std::int64_t panel_bytes = call.padded_inputs() * kPackedOutputs * 2;
  const std::int64_t least = (kMinSpanBytes + panel_bytes - 1) / panel_bytes;
  parallel_spans(num_threads, num_panels(call), least, [&](std::int64_t begin, std::int64_t end) { body(RowSpan{begin, end}); });
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

// Rows [begin, end) of the call, all of one panel, sixteen pairs of each at a time: they stay in the nearest cache, and pairs of all
// rows are written side by side.
void fill_panel(const FillCall& call, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t kPairs = kPackedInputs / 2;
  const std::int64_t padded = (call.num_inputs + kPackedInputs - 1) / kPackedInputs * kPackedInputs;
  const std::int64_t output = call.first_output + begin;
  bf16* packed = call.packed + output / kPackedOutputs * padded * kPackedOutputs + output % kPackedOutputs * 2;
  const std::int64_t num_rows = end - begin;
  for (std::int64_t input = 0; input < padded; input += kPackedInputs) {
    const std::int64_t count = std::min(call.num_inputs - input, kPackedInputs);
    std::uint32_t pairs[kPackedOutputs][kPairs];
    for (std::int64_t row = 0; row < num_rows; ++row) {
      bf16 inputs[kPackedInputs] = {};
      const bf16* source = call.weight + (begin + row) * call.weight_stride + input;
      if (count == kPackedInputs) {
        std::memcpy(inputs, source, sizeof inputs);
      } else {
        std::copy_n(source, count, inputs);
      }
      std::memcpy(pairs[row], inputs, sizeof inputs);
    }
    for (std::int64_t pair = 0; pair < kPairs; ++pair, packed += 2 * kPackedOutputs)
      for (std::int64_t row = 0; row < num_rows; ++row) std::memcpy(packed + 2 * row, &pairs[row][pair], sizeof(std::uint32_t));
  }
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

void fill_panels(const FillCall& call, int num_threads) {
  const std::int64_t first = call.first_output / kPackedOutputs;
  const std::int64_t last = (call.first_output + call.num_rows + kPackedOutputs - 1) / kPackedOutputs;
  parallel_for(num_threads, last - first, [&](std::int64_t item) {
    const std::int64_t begin = (first + item) * kPackedOutputs - call.first_output;
    fill_panel(call, std::max<std::int64_t>(0, begin), std::min(call.num_rows, begin + kPackedOutputs));
  });
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
