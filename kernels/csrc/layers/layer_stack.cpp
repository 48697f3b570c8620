#include "layers/layer_stack.h"

#include <cstring>

#include "layers/elementwise.h"
#include "runtime/scratch.h"

namespace paged {
namespace {

constexpr std::int64_t kAlignment = 64;

thread_local Scratch stack_scratch;  // decoder_layer.cpp has its own, in use between ours

// The tensors that the pieces of a layer hand to each other.
struct Buffers {
  Buffers(const StackCall& call, std::int64_t num_heads) {
    const std::int64_t bytes = element_size(call.dtype);
    const auto rounded = [](std::int64_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; };
    const std::int64_t hidden = rounded(call.rows * call.hidden_size * bytes);
    const std::int64_t all_heads = rounded(call.rows * num_heads * call.head_dim * bytes);
    const std::int64_t queries = rounded(call.rows * call.num_heads * call.head_dim * bytes);
    char* next = reinterpret_cast<char*>(stack_scratch.floats(static_cast<std::size_t>(2 * hidden + all_heads + queries) / sizeof(float)));
    residual = next;
    carried = next + hidden;
    heads = carried + hidden;
    attended = heads + all_heads;
  }

  char* residual;  // within a layer
  char* carried;   // from a layer to the next
  char* heads;     // queries, keys and values
  void* attended;
};

std::int64_t elements_of_token(const StackCall& call) { return (call.num_heads + 2 * call.num_kv_heads) * call.head_dim; }

void write_layer(const StackCall& call, const Buffers& buffers, std::int64_t layer, int num_threads) {
  const std::int64_t bytes = element_size(call.dtype);
  WriteCall write = call.write;
  write.key = buffers.heads + call.num_heads * call.head_dim * bytes;
  write.value = write.key + call.num_kv_heads * call.head_dim * bytes;
  write.key_token_stride = write.value_token_stride = elements_of_token(call) * bytes;
  write.key_head_stride = write.value_head_stride = call.head_dim * bytes;
  write.pool += layer * call.layer_bytes;
  if (write.key_scales != nullptr) {
    write.key_scales += layer * call.num_kv_heads;
    write.value_scales += layer * call.num_kv_heads;
  }
  write_kv(write, num_threads);
}

void attend(const StackCall& call, const Buffers& buffers, const BatchAttention& of_batch, std::int64_t layer, int num_threads) {
  AttentionCall attention = of_batch.call;
  attention.query = buffers.heads;
  attention.query_token_stride = elements_of_token(call);
  attention.query_head_stride = call.head_dim;
  attention.output = buffers.attended;
  attention.pool = static_cast<const char*>(attention.pool) + layer * call.layer_bytes;
  attention.scale = call.scale;
  attention.window = (*call.layers)[static_cast<std::size_t>(layer)].window;
  if (attention.key_scales != nullptr) {
    attention.key_scales += layer * call.num_kv_heads;
    attention.value_scales += layer * call.num_kv_heads;
  }
  paged_attention(attention, of_batch.batch, call.dtype, num_threads);
}

// Moves rows to the front, in place: they ascend, so that none is overwritten before it has been copied.
void gather_rows(void* data, std::int64_t row_bytes, const LastRows& last) {
  char* bytes = static_cast<char*>(data);
  for (std::int64_t i = 0; i < last.attention.batch.num_tokens; ++i) {
    if (last.rows[i] != i) std::memcpy(bytes + i * row_bytes, bytes + last.rows[i] * row_bytes, static_cast<std::size_t>(row_bytes));
  }
}

}  // namespace

void layer_stack(const StackCall& call, int num_threads) {
  const Buffers buffers(call, call.num_heads + 2 * call.num_kv_heads);
  std::int64_t rows = call.rows;
  const BatchAttention* attention = &call.attention;
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
  for (std::size_t layer = 0; layer < call.layers->size(); ++layer) {
    const StackedLayer& stacked = (*call.layers)[layer];
    heads.qkv = stacked.qkv;
    heads.norm = stacked.input_norm;
    heads.query_norm = stacked.query_norm;
    heads.key_norm = stacked.key_norm;
    void* residual = call.hidden;  // of the first layer: its input, to which nothing is added yet
    if (layer > 0) {
      heads.residual = buffers.carried;
      residual = heads.residual_out = buffers.residual;
    }
    project_heads(heads, num_threads);
    write_layer(call, buffers, static_cast<std::int64_t>(layer), num_threads);
    if (call.last_rows != nullptr && layer + 1 == call.layers->size()) {
      attention = &call.last_rows->attention;
      rows = attention->batch.num_tokens;
      if (rows == 0) return;
      const std::int64_t bytes = element_size(call.dtype);
      gather_rows(buffers.heads, elements_of_token(call) * bytes, *call.last_rows);
      gather_rows(residual, call.hidden_size * bytes, *call.last_rows);
    }
    attend(call, buffers, *attention, static_cast<std::int64_t>(layer), num_threads);
    finish_layer(
        {stacked.output, stacked.gate_up, stacked.down, buffers.attended, residual, rows, stacked.norm, call.epsilon, call.hidden, buffers.carried},
        num_threads);
  }
  NormCall norm{};
  norm.x = call.hidden;
  norm.x_stride = norm.residual_stride = norm.size = call.hidden_size;
  norm.residual = buffers.carried;
  norm.residual_out = buffers.residual;
  norm.weight = call.final_norm;
  norm.out = call.hidden;
  norm.epsilon = call.epsilon;
  rms_norm(norm, rows, call.dtype, num_threads);
}

}  // namespace paged
