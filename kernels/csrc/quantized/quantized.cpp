#include "quantized/quantized.h"

#include <algorithm>

#include "isa/instruction_set.h"
#include "linear/packed_linear.h"
#include "runtime/parallel.h"
#include "runtime/scratch.h"

namespace paged {
namespace {

// Bytes of weights an item should have at least: fewer are done before another thread is awake.
constexpr std::int64_t kMinItemBytes = 1 << 16;
// Elements of x that a thread should have to prepare at least, for the same reason.
constexpr std::int64_t kMinPreparedElements = 1 << 13;

// How much is widened at a time, which the second level of cache holds, and how many rows are multiplied with it together.
constexpr std::int64_t kWidenedBytes = 1 << 20;
constexpr std::int64_t kMostWidened = 4;  // panels of bfloat16 weights
constexpr std::int64_t kWidenedRows = 512;

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
    if (extreme != extreme) break;  // it makes the whole group NaN, as it would the sums without quantisation
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

// Both aligned to lines of the cache, as rows of tiles should be.
thread_local Scratch prepared_scratch;
thread_local Scratch widened_scratch;

// Room for what `prepare_rows` makes of x.
void take_prepared(QuantizedCall& call, bool integers) {
  const std::int64_t elements = (call.num_rows + kRowTile - 1) / kRowTile * kRowTile * call.padded_inputs();
  const std::int64_t slots = call.num_rows * call.num_groups;
  if (integers) {
    float* memory = prepared_scratch.floats(static_cast<std::size_t>(elements / 2 + 2 * slots));
    call.words = reinterpret_cast<std::int16_t*>(memory);
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

// The product with widened weights. Whoever widens them sets `packed`.
PackedCall widened_call(const QuantizedCall& call, int num_threads) {
  PackedCall widened{};
  widened.num_outputs = call.num_outputs;
  widened.num_inputs = call.num_inputs;
  widened.num_rows = call.num_rows;
  widened.x = static_cast<const bf16*>(call.x);
  widened.x_stride = call.x_stride;
  widened.bias = static_cast<const bf16*>(call.bias);
  widened.out = static_cast<bf16*>(call.out);
  widened.gated = call.gated;
  complete_rows(widened, num_threads);
  return widened;
}

// Panels of bfloat16 weights are widened and multiplied a few at a time; where the call is gated, the gate's with those of what they gate.
void multiply_widened(const QuantizedCall& call, int num_threads) {
  const KernelTable& table = kernels();
  const PackedCall whole = widened_call(call, num_threads);
  const std::int64_t sides = call.gated ? 2 : 1;
  const std::int64_t num_panels = (call.num_outputs + kPackedOutputs - 1) / kPackedOutputs / sides;
  const std::int64_t panel_size = whole.padded_inputs() * kPackedOutputs;
  const std::int64_t most = std::max<std::int64_t>(1, std::min(kMostWidened, kWidenedBytes / 2 / panel_size) / sides);
  const std::int64_t threads = std::max(1, num_threads);
  const std::int64_t num_items = ((num_panels + most - 1) / most + threads - 1) / threads * threads;  // as many for each thread
  const std::size_t num_sums = packed_scratch_floats(std::min(call.num_rows, kWidenedRows), (most + 1) * sides);
  parallel_for(num_threads, num_items, [&](std::int64_t item) {
    const RowSpan panels{num_panels * item / num_items, num_panels * (item + 1) / num_items};
    const std::int64_t count = panels.end - panels.begin;
    if (count == 0) return;
    float* sums = widened_scratch.floats(num_sums + static_cast<std::size_t>(most * sides * panel_size / 2));
    bf16* weights = reinterpret_cast<bf16*>(sums + num_sums);
    for (std::int64_t side = 0; side < sides; ++side) {
      const std::int64_t first = panels.begin + side * num_panels;
      const std::int64_t end = std::min(2 * (first + count), (call.num_outputs + kPanelOutputs - 1) / kPanelOutputs);
      table.widen_panels(call, {2 * first, end}, weights + side * count * panel_size);
    }
    PackedCall product = whole;
    product.packed = weights - panels.begin * panel_size;  // as if all panels were there
    product.gated_apart = count;
    for (std::int64_t row = 0; row < call.num_rows; row += kWidenedRows)
      table.multiply_packed_many(product, {row, std::min(call.num_rows, row + kWidenedRows)}, panels, count, sums);
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

bool is_widened(const QuantizedCall& call, DType dtype) {
  return dtype == DType::bf16 && call.num_rows >= kernels().widened_from(call);
}

void quantized_matmul(QuantizedCall call, DType dtype, int num_threads) {
  const KernelTable& table = kernels();
  if (is_widened(call, dtype)) return multiply_widened(call, num_threads);
  take_prepared(call, table.integer_inputs && dtype != DType::f32);
  prepare_all_rows(call, dtype, num_threads);
  for_panels(call, table.multiply_panels[static_cast<int>(dtype)], num_threads);
}

void dequantize(const QuantizedCall& call, DType dtype, int num_threads) {
  for_panels(call, kernels().dequantize_panels[static_cast<int>(dtype)], num_threads);
}

}  // namespace paged
