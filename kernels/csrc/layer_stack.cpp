#include "layer_stack.h"

#include "elementwise.h"
#include "scratch.h"

namespace paged {
namespace {

constexpr std::int64_t kAlignment = 64;

thread_local Scratch stack_scratch;  // decoder_layer.cpp has its own, in use between ours

// What lies between the pieces of a layer.
struct Buffers {
  Buffers(const StackCall& call, std::int64_t num_heads) {
    const std::int64_t bytes = element_size(call.dtype);
    const auto rounded = [](std::int64_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; };
    const std::int64_t hidden = rounded(call.rows * call.hidden_size * bytes);
    const std::int64_t all_heads = rounded(call.rows * num_heads * call.head_dim * bytes);
    const std::int64_t queries = rounded(call.rows * call.num_heads * call.head_dim * bytes);
    char* next = reinterpret_cast<char*>(stack_scratch.floats(static_cast<std::size_t>(hidden + all_heads + queries) / sizeof(float)));
    residual = next;
    heads = next + hidden;
    attended = heads + all_heads;
  }

  void* residual;  // within a layer
  char* heads;     // queries, keys and values
  void* attended;
};

void attend(const StackCall& call, const Buffers& buffers, std::int64_t layer, std::int64_t window, int num_threads) {
  const std::int64_t bytes = element_size(call.dtype);
  const std::int64_t token = (call.num_heads + 2 * call.num_kv_heads) * call.head_dim;
  WriteCall write = call.write;
  write.key = buffers.heads + call.num_heads * call.head_dim * bytes;
  write.value = write.key + call.num_kv_heads * call.head_dim * bytes;
  write.key_token_stride = write.value_token_stride = token * bytes;
  write.key_head_stride = write.value_head_stride = call.head_dim * bytes;
  write.pool += layer * call.layer_bytes;
  AttentionCall attention = call.attention;
  attention.query = buffers.heads;
  attention.query_token_stride = token;
  attention.query_head_stride = call.head_dim;
  attention.output = buffers.attended;
  attention.pool = static_cast<const char*>(attention.pool) + layer * call.layer_bytes;
  attention.scale = call.scale;
  attention.window = window;
  if (write.key_scales != nullptr) {
    write.key_scales = attention.key_scales += layer * call.num_kv_heads;
    write.value_scales = attention.value_scales += layer * call.num_kv_heads;
  }
  write_kv(write, num_threads);
  paged_attention(attention, call.batch, call.dtype, num_threads);
}

}  // namespace

void layer_stack(const StackCall& call, int num_threads) {
  const Buffers buffers(call, call.num_heads + 2 * call.num_kv_heads);
  HeadsCall heads{};
  heads.x = call.hidden;
  heads.rows = call.rows;
  heads.epsilon = call.epsilon;
  heads.cos = call.cos;
  heads.sin = call.sin;
  heads.angle_stride = call.angle_stride;
  heads.num_heads = call.num_heads;
  heads.num_kv_heads = call.num_kv_heads;
  heads.head_dim = call.head_dim;
  heads.out = buffers.heads;
  for (std::size_t layer = call.first; layer < call.last; ++layer) {
    const StackedLayer& stacked = (*call.layers)[layer];
    heads.qkv = stacked.qkv;
    heads.norm = stacked.input_norm;
    heads.query_norm = stacked.query_norm;
    heads.key_norm = stacked.key_norm;
    const void* residual = call.hidden;  // of the first layer: its input, to which nothing is added yet
    if (layer > 0) {
      heads.residual = call.residual;
      residual = heads.residual_out = buffers.residual;
    }
    project_heads(heads, num_threads);
    attend(call, buffers, static_cast<std::int64_t>(layer), stacked.window, num_threads);
    finish_layer({stacked.output, stacked.gate_up, stacked.down, buffers.attended, residual, call.rows, stacked.norm, call.epsilon, call.hidden,
                  call.residual},
                 num_threads);
  }
  if (call.last < call.layers->size()) return;
  NormCall norm{};
  norm.x = call.hidden;
  norm.x_stride = norm.residual_stride = norm.size = call.hidden_size;
  norm.residual = call.residual;
  norm.residual_out = buffers.residual;
  norm.weight = call.final_norm;
  norm.out = call.hidden;
  norm.epsilon = call.epsilon;
  rms_norm(norm, call.rows, call.dtype, num_threads);
}

}  // namespace paged
