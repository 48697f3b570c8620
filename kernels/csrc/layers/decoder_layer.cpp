#include "layers/decoder_layer.h"

#include <algorithm>
#include <array>

#include "isa/instruction_set.h"
#include "layers/elementwise.h"
#include "linear/packed_linear.h"
#include "quantized/quantized.h"
#include "runtime/parallel.h"
#include "runtime/scratch.h"

namespace paged {
namespace {

thread_local Scratch layer_scratch;

// Parts of this thread's memory, of so many elements each. They are the caller's until the next call.
template <std::size_t kParts>
std::array<void*, kParts> scratch_parts(DType dtype, const std::array<std::int64_t, kParts>& elements) {
  std::array<std::size_t, kParts> begins;
  std::size_t end = 0;
  for (std::size_t i = 0; i < kParts; ++i) {
    begins[i] = end;
    const auto bytes = static_cast<std::size_t>(elements[i] * element_size(dtype));
    end += (bytes + Scratch::kAlignment - 1) / Scratch::kAlignment * Scratch::kAlignment;
  }
  char* memory = reinterpret_cast<char*>(layer_scratch.floats(end / sizeof(float)));
  std::array<void*, kParts> parts;
  for (std::size_t i = 0; i < kParts; ++i) parts[i] = memory + begins[i];
  return parts;
}

PackedCall packed_call(const Projection& layer, const void* x, std::int64_t rows, void* out) {
  PackedCall call = layer.packed;
  call.num_rows = rows;
  call.x = static_cast<const bf16*>(x);
  call.x_stride = layer.num_inputs;
  call.out = static_cast<bf16*>(out);
  return call;
}

QuantizedCall quantized_call(const Projection& layer, const void* x, std::int64_t rows, void* out) {
  QuantizedCall call = layer.quantized;
  call.num_rows = rows;
  call.x = x;
  call.x_stride = layer.num_inputs;
  call.out = out;
  return call;
}

void project(const Projection& layer, const void* x, std::int64_t rows, void* out, int num_threads) {
  if (layer.is_packed) {
    packed_matmul(packed_call(layer, x, rows, out), num_threads);
  } else {
    quantized_matmul(quantized_call(layer, x, rows, out), layer.dtype, num_threads);
  }
}

// silu(gate(x)) * up(x) as one product, where rows are so many that there is one. `in_tiles`: only packed weights give them.
bool gated_product(const Projection& gate_up, const void* x, std::int64_t rows, void* out, bool in_tiles, int num_threads) {
  if (!can_gate(rows, gate_up.num_outputs)) return false;
  if (gate_up.is_packed) {
    PackedCall call = packed_call(gate_up, x, rows, out);
    call.gated = true;
    call.out_in_tiles = in_tiles;
    packed_matmul(call, num_threads);
    return true;
  }
  QuantizedCall call = quantized_call(gate_up, x, rows, out);
  if (!is_widened(call, gate_up.dtype)) return false;
  call.gated = true;
  quantized_matmul(call, gate_up.dtype, num_threads);
  return true;
}

// down(silu(gate(x)) * up(x)). What is between the products of many rows never goes through memory as gate and up, and lies in tiles for a
// matrix unit.
void feed_forward(const FinishCall& call, const void* x, void* activated, void* gate_up, int num_threads) {
  const std::int64_t size = call.down->num_inputs;
  const bool in_tiles = call.gate_up->is_packed && call.down->is_packed && kernels().packed_in_tiles;
  if (!gated_product(*call.gate_up, x, call.rows, activated, in_tiles, num_threads)) {
    project(*call.gate_up, x, call.rows, gate_up, num_threads);
    silu_mul({gate_up, 2 * size, activated, size}, call.rows, call.down->dtype, num_threads);
    project(*call.down, activated, call.rows, call.out, num_threads);
  } else if (in_tiles) {
    PackedCall down = packed_call(*call.down, activated, call.rows, call.out);
    down.x_in_tiles = true;
    packed_matmul(down, num_threads);
  } else {
    project(*call.down, activated, call.rows, call.out, num_threads);
  }
}

// Normalises, in place, `count` heads of a token that lie side by side.
void norm_heads(void* heads, std::int64_t count, const void* weight, const HeadsCall& call) {
  NormCall norm{};
  norm.x = heads;
  norm.x_stride = call.head_dim;
  norm.weight = weight;
  norm.out = heads;
  norm.size = call.head_dim;
  norm.epsilon = call.epsilon;
  rms_norm(norm, count, call.qkv->dtype, 1);
}

// Normalises and rotates the heads of every token. Few tokens are done before another thread is awake.
void norm_all_heads(const HeadsCall& call, int num_threads) {
  constexpr std::int64_t kTokens = 32;
  const Projection& qkv = *call.qkv;
  const std::int64_t row_bytes = qkv.num_outputs * element_size(qkv.dtype);
  const std::int64_t query_bytes = call.num_heads * call.head_dim * element_size(qkv.dtype);
  parallel_for(num_threads, (call.rows + kTokens - 1) / kTokens, [&](std::int64_t item) {
    for (std::int64_t row = item * kTokens; row < std::min(call.rows, (item + 1) * kTokens); ++row) {
      char* query = static_cast<char*>(call.out) + row * row_bytes;
      norm_heads(query, call.num_heads, call.query_norm, call);
      norm_heads(query + query_bytes, call.num_kv_heads, call.key_norm, call);
    }
  });
}

}  // namespace

void project_heads(const HeadsCall& call, int num_threads) {
  const Projection& qkv = *call.qkv;
  const auto [normed] = scratch_parts<1>(qkv.dtype, {call.rows * qkv.num_inputs});
  NormCall norm{};
  norm.x = call.x;
  norm.x_stride = norm.residual_stride = norm.size = qkv.num_inputs;
  norm.residual = call.residual;
  norm.residual_out = call.residual_out;
  norm.weight = call.norm;
  norm.out = normed;
  norm.epsilon = call.epsilon;
  rms_norm(norm, call.rows, qkv.dtype, num_threads);
  project(qkv, normed, call.rows, call.out, num_threads);
  if (call.query_norm != nullptr) norm_all_heads(call, num_threads);
  const std::int64_t num_turned = call.num_heads + call.num_kv_heads;
  const RotaryCall turn{call.out, qkv.num_outputs, call.head_dim, num_turned, call.cos, call.sin, call.angle_stride, call.head_dim / 2};
  rotary(turn, call.rows, qkv.dtype, num_threads);
}

void finish_layer(const FinishCall& call, int num_threads) {
  const DType dtype = call.output->dtype;
  const std::int64_t hidden = call.rows * call.output->num_outputs;
  const std::int64_t size = call.down->num_inputs;
  const std::int64_t tiled_rows = (call.rows + kRowTile - 1) / kRowTile * kRowTile;
  const auto [projected, normed, activated, gate_up] = scratch_parts<4>(dtype, {hidden, hidden, tiled_rows * size, 2 * call.rows * size});
  NormCall norm{};
  norm.x = projected;
  norm.x_stride = norm.residual_stride = norm.size = call.output->num_outputs;
  norm.residual = call.residual;
  norm.residual_out = call.residual_out;
  norm.weight = call.norm;
  norm.out = normed;
  norm.epsilon = call.epsilon;
  project(*call.output, call.attended, call.rows, projected, num_threads);
  rms_norm(norm, call.rows, dtype, num_threads);
  feed_forward(call, normed, activated, gate_up, num_threads);
}

}  // namespace paged
