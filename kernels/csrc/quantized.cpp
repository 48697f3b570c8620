#include "quantized.h"

#include <algorithm>

#include "instruction_set.h"
#include "parallel.h"
#include "scratch.h"

namespace paged {
namespace {

// Bytes of weights an item should have at least: fewer are done before another thread is awake.
constexpr std::int64_t kMinItemBytes = 1 << 16;
// Elements of x that a thread should have to prepare at least, for the same reason.
constexpr std::int64_t kMinPreparedElements = 1 << 13;
// Rows of x come in tiles of a matrix unit.
constexpr std::int64_t kRowTile = 16;

// From here on widening the weights once is cheaper than multiplying them in the width they have, where every group's sums are scaled
// by themselves: the fewer groups and the more digits, the later. Groups that do not fill a tile are not multiplied in tiles.
std::int64_t many_rows(const QuantizedCall& call) {
  if (call.group_size % 64 != 0) return 64;
  return call.bits == 8 ? 112 : call.group_size == 128 ? 80 : 64;
}

float rounded_to_whole(float x) {
  constexpr float kMagic = 0x1.8p23f;  // for |x| < 2^22, ties to even
  return (x + kMagic) - kMagic;
}

// With 8 bits the values are -127 .. 127. With 4 bits the element of the largest magnitude is -8, so that all sixteen are used.
template <class T>
bf16 group_scale(const T* weight, std::int64_t count, int bits) {
  float extreme = 0.0f;
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = to_float(weight[i]);
    if (!(__builtin_fabsf(value) <= __builtin_fabsf(extreme))) extreme = value;
  }
  bf16 scale;
  constexpr float kSmallest = 0x1p-126f;  // smaller ones have no finite inverse
  const float exact = bits == 8 ? __builtin_fabsf(extreme) / 127.0f : extreme / -8.0f;
  from_float(__builtin_fabsf(exact) < kSmallest ? 0.0f : exact, scale);
  return scale;
}

template <class T>
void pack_row(const PackCall& call, std::int64_t row) {
  const T* weight = static_cast<const T*>(call.weight) + row * call.weight_stride;
  const std::int64_t output = call.first_output + row;
  const std::int64_t panel = output / kPanelOutputs;
  const std::int64_t lane = output % kPanelOutputs;
  const float lowest = call.bits == 8 ? -127.0f : -8.0f;
  const float highest = call.bits == 8 ? 127.0f : 7.0f;
  const int offset = call.bits == 8 ? 128 : 8;
  std::uint8_t* packed = call.packed + panel * call.num_groups * call.group_size * call.bits / 8 * kPanelOutputs + 4 * lane;
  for (std::int64_t group = 0; group < call.num_groups; ++group) {
    const std::int64_t begin = group * call.group_size;
    const std::int64_t count = std::min<std::int64_t>(call.group_size, call.num_inputs - begin);
    const bf16 scale = group_scale(weight + begin, count, call.bits);
    call.scales[(panel * call.num_groups + group) * kPanelOutputs + lane] = scale;
    const float inverse = to_float(scale) == 0.0f ? 0.0f : 1.0f / to_float(scale);
    for (int i = 0; i < call.group_size; ++i) {
      const float value = i < count ? rounded_to_whole(to_float(weight[begin + i]) * inverse) : 0.0f;
      const int code = static_cast<int>(std::min(highest, std::max(lowest, value))) + offset;
      const std::int64_t quad = (begin + i) / 4;
      if (call.bits == 8) {
        packed[quad * 4 * kPanelOutputs + i % 4] = static_cast<std::uint8_t>(code);
      } else {
        std::uint8_t& pair = packed[quad / 2 * 4 * kPanelOutputs + i % 4];
        pair = static_cast<std::uint8_t>(quad % 2 == 0 ? code : (pair | code << 4));
      }
    }
  }
}

template <class T>
void pack_all(const PackCall& call, int num_threads) {
  const std::int64_t rows_per_item = std::max<std::int64_t>(1, kMinItemBytes / std::max<std::int64_t>(1, call.num_inputs));
  parallel_for(num_threads, (call.num_rows + rows_per_item - 1) / rows_per_item, [&](std::int64_t item) {
    const std::int64_t end = std::min(call.num_rows, (item + 1) * rows_per_item);
    for (std::int64_t row = item * rows_per_item; row < end; ++row) pack_row<T>(call, row);
  });
}

void for_panels(const QuantizedCall& call, void (*kernel)(const QuantizedCall&, RowSpan), int num_threads) {
  const std::int64_t num_panels = (call.num_outputs + kPanelOutputs - 1) / kPanelOutputs;
  const std::int64_t least = std::max<std::int64_t>(1, kMinItemBytes / std::max<std::int64_t>(1, call.panel_bytes()));
  parallel_spans(num_threads, num_panels, least, [&](std::int64_t begin, std::int64_t end) { kernel(call, {begin, end}); });
}

// All aligned to lines of the cache, as rows of tiles should be.
thread_local Scratch padded_scratch;
thread_local Scratch prepared_scratch;
thread_local Scratch many_rows_scratch;

// x with whole groups of inputs and whole tiles of rows, the rest zeros.
const bf16* pad_rows(const QuantizedCall& call, int num_threads) {
  const std::int64_t rows = (call.num_rows + kManyRowsTile - 1) / kManyRowsTile * kManyRowsTile;
  const std::int64_t inputs = call.padded_inputs();
  bf16* padded = reinterpret_cast<bf16*>(padded_scratch.floats(static_cast<std::size_t>(rows * inputs / 2)));
  parallel_for(num_threads, rows / kManyRowsTile, [&](std::int64_t item) {
    for (std::int64_t row = item * kManyRowsTile; row < (item + 1) * kManyRowsTile; ++row) {
      const std::int64_t count = row < call.num_rows ? call.num_inputs : 0;
      bf16* target = padded + row * inputs;
      std::copy_n(static_cast<const bf16*>(call.x) + row * call.x_stride, count, target);
      std::fill(target + count, target + inputs, bf16{0});
    }
  });
  return padded;
}

// Room for what `prepare_rows` makes of x.
void take_prepared(QuantizedCall& call, bool digits) {
  const std::int64_t elements = (call.num_rows + kRowTile - 1) / kRowTile * kRowTile * call.padded_inputs();
  const std::int64_t slots = call.num_rows * call.num_groups;
  if (digits) {
    float* memory = prepared_scratch.floats(static_cast<std::size_t>(elements / 2 + 2 * slots));
    call.high = reinterpret_cast<std::int8_t*>(memory);
    call.low = call.high + elements;
    call.input_scales = memory + elements / 2;
    call.offsets = reinterpret_cast<std::int32_t*>(call.input_scales + slots);
  } else {
    call.wide = prepared_scratch.floats(static_cast<std::size_t>(elements));
  }
}

void prepare_all_rows(const QuantizedCall& call, DType dtype, int num_threads) {
  const auto prepare = kernels().prepare_rows[static_cast<int>(dtype)];
  const std::int64_t rows_per_item = std::max<std::int64_t>(1, kMinPreparedElements / call.padded_inputs());
  parallel_for(num_threads, (call.num_rows + rows_per_item - 1) / rows_per_item, [&](std::int64_t item) {
    prepare(call, {item * rows_per_item, std::min(call.num_rows, (item + 1) * rows_per_item)});
  });
}

void multiply_many(QuantizedCall call, int num_threads) {
  call.padded_x = pad_rows(call, num_threads);
  const std::int64_t num_panels = (call.num_outputs + kPanelOutputs - 1) / kPanelOutputs;
  const std::int64_t together = 2 * widened_pairs(call);
  parallel_for(num_threads, (num_panels + together - 1) / together, [&](std::int64_t item) {
    const RowSpan span{item * together, std::min(num_panels, (item + 1) * together)};
    kernels().multiply_many_rows(call, span, many_rows_scratch.floats(many_rows_scratch_floats(call)));
  });
}

}  // namespace

void pack_rows(const PackCall& call, DType dtype, int num_threads) {
  switch (dtype) {
    case DType::f32: return pack_all<float>(call, num_threads);
    case DType::bf16: return pack_all<bf16>(call, num_threads);
    case DType::f16: return pack_all<f16>(call, num_threads);
  }
}

void quantized_matmul(QuantizedCall call, DType dtype, int num_threads) {
  const KernelTable& table = kernels();
  if (dtype == DType::bf16 && call.num_rows >= many_rows(call)) return multiply_many(call, num_threads);
  take_prepared(call, table.integer_inputs && dtype != DType::f32);
  prepare_all_rows(call, dtype, num_threads);
  for_panels(call, table.multiply_panels[static_cast<int>(dtype)], num_threads);
}

void dequantize(const QuantizedCall& call, DType dtype, int num_threads) {
  for_panels(call, kernels().dequantize_panels[static_cast<int>(dtype)], num_threads);
}

}  // namespace paged
