#include "linear/packed_linear.h"

#include <algorithm>
#include <cstring>

#include "isa/instruction_set.h"
#include "runtime/parallel.h"
#include "runtime/scratch.h"

namespace paged {
namespace {

// Bytes of weights a span should have at least: fewer are done before another thread is awake.
constexpr std::int64_t kMinSpanBytes = 1 << 16;
// The least number of rows for which a gate and what it gates take the kernel for many rows, which saves a pass over both results. For
// fewer rows the other kernel reads the weights faster.
constexpr std::int64_t kMinGatedRows = kRowTile + 1;
// How many of many rows are multiplied at a time, in blocks of two tiles.
constexpr std::int64_t kManyRows = 512;
constexpr std::int64_t kRowBlock = 2 * kRowTile;
// Bytes that the second level of cache has room for besides weights.
constexpr std::int64_t kRowsInCache = 1 << 20;
constexpr std::int64_t kSumsInCache = 1 << 19;

std::int64_t num_panels(const PackedCall& call) { return (call.num_outputs + kPackedOutputs - 1) / kPackedOutputs; }

template <class Body>
void for_panels(const PackedCall& call, int num_threads, const Body& body) {
  const std::int64_t panel_bytes = call.padded_inputs() * kPackedOutputs * 2;
  const std::int64_t least = (kMinSpanBytes + panel_bytes - 1) / panel_bytes;
  parallel_spans(num_threads, num_panels(call), least, [&](std::int64_t begin, std::int64_t end) { body(RowSpan{begin, end}); });
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

void take_row(const TakeCall& call, std::int64_t row) {
  const std::int64_t padded = (call.num_inputs + kPackedInputs - 1) / kPackedInputs * kPackedInputs;
  const std::int64_t output = call.outputs[row];
  const bf16* pair = call.packed + output / kPackedOutputs * padded * kPackedOutputs + output % kPackedOutputs * 2;
  bf16* out = call.out + row * call.num_inputs;
  std::int64_t input = 0;
  for (; input + 1 < call.num_inputs; input += 2, pair += 2 * kPackedOutputs) std::memcpy(out + input, pair, 2 * sizeof(bf16));
  if (input < call.num_inputs) out[input] = *pair;
}

// Rows [begin, begin + count) of x with padded_inputs(), as `target`.
void copy_padded(const PackedCall& call, std::int64_t begin, std::int64_t count, bf16* target) {
  const std::int64_t inputs = call.padded_inputs();
  for (std::int64_t row = begin; row < begin + count; ++row, target += inputs) {
    std::copy_n(call.x + row * call.x_stride, call.num_inputs, target);
    std::fill(target + call.num_inputs, target + inputs, bf16{0});
  }
}

bf16* elements(Scratch& scratch, std::int64_t count) { return reinterpret_cast<bf16*>(scratch.floats(static_cast<std::size_t>(count + 1) / 2)); }

thread_local Scratch padded_scratch;
thread_local Scratch last_rows_scratch;
thread_local Scratch wide_scratch;
thread_local Scratch sums_scratch;

// Rows of x as floats, with padded_inputs().
const float* widened_rows(const PackedCall& call, int num_threads) {
  const std::int64_t inputs = call.padded_inputs();
  float* wide = wide_scratch.floats(static_cast<std::size_t>(call.num_rows * inputs));
  const std::int64_t rows_per_item = std::max<std::int64_t>(1, kMinSpanBytes / (inputs * 4));
  parallel_for(num_threads, (call.num_rows + rows_per_item - 1) / rows_per_item, [&](std::int64_t item) {
    for (std::int64_t row = item * rows_per_item; row < std::min(call.num_rows, (item + 1) * rows_per_item); ++row) {
      const bf16* source = call.x + row * call.x_stride;
      for (std::int64_t input = 0; input < inputs; ++input) wide[row * inputs + input] = to_float(source[input]);
    }
  });
  return wide;
}

// Panels that are multiplied together: one, so that weights are read in order, or, where a matrix unit multiplies and the next level of cache
// does not hold the rows, as many as it holds the sums of.
std::int64_t panels_together(const PackedCall& call, std::int64_t num_rows) {
  if (!kernels().packed_in_tiles) return 1;
  const std::int64_t sums = num_rows * kPackedOutputs * 4 * (call.gated ? 2 : 1);
  return num_rows * call.padded_inputs() * 2 <= kRowsInCache ? 1 : std::max<std::int64_t>(1, kSumsInCache / sums);
}

bool is_many(const PackedCall& call) { return call.num_rows > kernels().packed_rows || call.gated; }

void multiply_many(const PackedCall& call, int num_threads) {
  const KernelTable& table = kernels();
  num_threads = std::max(1, num_threads);
  const std::int64_t sides = call.gated ? 2 : 1;
  const std::int64_t panels = num_panels(call) / sides;
  const std::int64_t num_blocks = (call.num_rows + kManyRows - 1) / kManyRows;
  const std::int64_t block = (call.num_rows + num_blocks * kRowBlock - 1) / (num_blocks * kRowBlock) * kRowBlock;
  const std::int64_t least = (panels + panels_together(call, block) - 1) / panels_together(call, block);
  const std::int64_t num_groups = (least + num_threads - 1) / num_threads * num_threads;  // as many for each thread
  const std::int64_t group = (panels + num_groups - 1) / num_groups;
  for (std::int64_t row = 0; row < call.num_rows; row += block) {
    const RowSpan rows{row, std::min(call.num_rows, row + block)};
    parallel_spans(num_threads, (panels + group - 1) / group, 1, [&](std::int64_t begin, std::int64_t end) {
      float* scratch = sums_scratch.floats(packed_scratch_floats(block, (group + 1) * sides));
      table.multiply_packed_many(call, rows, {begin * group, std::min(panels, end * group)}, group, scratch);
    });
  }
}

}  // namespace

void fill_panels(const FillCall& call, int num_threads) {
  const std::int64_t first = call.first_output / kPackedOutputs;
  const std::int64_t last = (call.first_output + call.num_rows + kPackedOutputs - 1) / kPackedOutputs;
  parallel_for(num_threads, last - first, [&](std::int64_t item) {
    const std::int64_t begin = (first + item) * kPackedOutputs - call.first_output;
    fill_panel(call, std::max<std::int64_t>(0, begin), std::min(call.num_rows, begin + kPackedOutputs));
  });
}

void take_rows(const TakeCall& call, int num_threads) {
  const std::int64_t read_bytes = (call.num_inputs + 1) / 2 * kPackedOutputs * 4;  // a pair brings a whole line of its panel along
  parallel_spans(num_threads, call.num_rows, kMinSpanBytes / read_bytes + 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) take_row(call, row);
  });
}

bool can_gate(std::int64_t num_rows, std::int64_t num_outputs) {
  return num_rows >= kMinGatedRows && num_outputs % (2 * kPackedOutputs) == 0;
}

void complete_rows(PackedCall& call, int num_threads) {
  const std::int64_t inputs = call.padded_inputs();
  if (call.num_inputs != inputs) {
    bf16* padded = elements(padded_scratch, call.num_rows * inputs);
    copy_padded(call, 0, call.num_rows, padded);
    call.x = padded;
    call.x_stride = inputs;
  }
  const std::int64_t last = call.num_rows % kRowTile;
  if (kernels().packed_in_tiles && last != 0 && !call.x_in_tiles) {
    bf16* rows = elements(last_rows_scratch, kRowTile * inputs);
    copy_padded(call, call.num_rows - last, last, rows);
    std::fill(rows + last * inputs, rows + kRowTile * inputs, bf16{0});
    call.last_rows = rows;
  }
  if (kernels().packed_wide && is_many(call)) call.wide = widened_rows(call, num_threads);
}

void packed_matmul(PackedCall call, int num_threads) {
  const KernelTable& table = kernels();
  call.gated_apart = num_panels(call) / 2;
  complete_rows(call, num_threads);
  if (is_many(call)) return multiply_many(call, num_threads);
  for_panels(call, num_threads, [&](RowSpan panels) { table.multiply_packed(call, panels); });
}

}  // namespace paged
