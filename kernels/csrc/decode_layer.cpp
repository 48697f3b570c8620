#include "decode_layer.h"

#include "elementwise.h"
#include "packed_linear.h"
#include "quantized.h"
#include "scratch.h"

namespace paged {
namespace {

constexpr std::size_t kAlignment = 64;

thread_local Scratch layer_scratch;

// Hands out parts of one allocation.
class Arena {
 public:
  Arena(std::int64_t elements, int parts, DType dtype)
      : bytes_(element_size(dtype)),
        next_(reinterpret_cast<char*>(layer_scratch.floats(static_cast<std::size_t>(elements * bytes_ + parts * 64) / sizeof(float)))) {}

  void* take(std::int64_t elements) {
    char* part = next_;
    next_ += (static_cast<std::size_t>(elements * bytes_) + kAlignment - 1) / kAlignment * kAlignment;
    return part;
  }

 private:
  std::int64_t bytes_;
  char* next_;
};

void project(const Projection& layer, const void* x, std::int64_t rows, void* out, int num_threads) {
  if (layer.is_packed) {
    PackedCall call = layer.packed;
    call.num_rows = rows;
    call.x = static_cast<const bf16*>(x);
    call.x_stride = layer.num_inputs;
    call.out = static_cast<bf16*>(out);
    packed_matmul(call, num_threads);
  } else {
    QuantizedCall call = layer.quantized;
    call.num_rows = rows;
    call.x = x;
    call.x_stride = layer.num_inputs;
    call.out = out;
    quantized_matmul(call, layer.dtype, num_threads);
  }
}

// In place, `count` heads of a token that lie side by side.
void norm_heads(void* heads, std::int64_t count, const void* weight, const HeadsCall& call, int num_threads) {
  NormCall norm{};
  norm.x = heads;
  norm.x_stride = call.head_dim;
  norm.weight = weight;
  norm.out = heads;
  norm.size = call.head_dim;
  norm.epsilon = call.epsilon;
  rms_norm(norm, count, call.qkv->dtype, num_threads);
}

}  // namespace

void project_heads(const HeadsCall& call, int num_threads) {
  const Projection& qkv = *call.qkv;
  Arena arena(call.rows * qkv.num_inputs, 1, qkv.dtype);
  void* normed = arena.take(call.rows * qkv.num_inputs);
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
  if (call.query_norm != nullptr) {
    const std::int64_t head_bytes = call.head_dim * element_size(qkv.dtype);
    for (std::int64_t row = 0; row < call.rows; ++row) {
      char* query = static_cast<char*>(call.out) + row * qkv.num_outputs * element_size(qkv.dtype);
      norm_heads(query, call.num_heads, call.query_norm, call, num_threads);
      norm_heads(query + call.num_heads * head_bytes, call.num_kv_heads, call.key_norm, call, num_threads);
    }
  }
  const std::int64_t num_turned = call.num_heads + call.num_kv_heads;
  const RotaryCall turn{call.out, qkv.num_outputs, call.head_dim, num_turned, call.cos, call.sin, call.angle_stride, call.head_dim / 2};
  rotary(turn, call.rows, qkv.dtype, num_threads);
}

void finish_layer(const FinishCall& call, int num_threads) {
  const DType dtype = call.output->dtype;
  const std::int64_t hidden = call.rows * call.output->num_outputs;
  const std::int64_t size = call.down->num_inputs;
  Arena arena(2 * hidden + 3 * call.rows * size, 4, dtype);
  void* projected = arena.take(hidden);
  void* normed = arena.take(hidden);
  void* gate_up = arena.take(2 * call.rows * size);
  void* activated = arena.take(call.rows * size);
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
  project(*call.gate_up, normed, call.rows, gate_up, num_threads);
  silu_mul({gate_up, 2 * size, activated, size}, call.rows, dtype, num_threads);
  project(*call.down, activated, call.rows, call.out, num_threads);
}

}  // namespace paged
