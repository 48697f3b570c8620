// A decoder layer in two calls around its attention, as layer_stack.h makes them: what lies between two products of few rows is so short
// that calling each piece by itself would take longer than computing it, and of many rows it need not go through fresh memory. Every
// result is that of the pieces.
#pragma once

#include "isa/kernel_table.h"

namespace paged {

// A linear layer. Its weights are either bfloat16 in packed_linear.h's order or quantised; sizes, weights and bias of one call are set.
struct Projection {
  bool is_packed;
  PackedCall packed;
  QuantizedCall quantized;
  DType dtype;  // the type of x, bias and result
  std::int64_t num_inputs;
  std::int64_t num_outputs;
};

// Computes queries, keys and values from a layer's input. Queries and keys are normed head by head, where there are norms, and rotated.
struct HeadsCall {
  const Projection* qkv;
  const void* x;         // [rows, hidden_size] contiguous
  const void* residual;  // [rows, hidden_size] contiguous, or null before the first layer
  void* residual_out;    // [rows, hidden_size] contiguous; unused without `residual`
  const void* norm;
  std::int64_t rows;
  const void* query_norm;  // [head_dim], or null
  const void* key_norm;
  float epsilon;
  const float* cos;  // [rows, head_dim / 2 and more]
  const float* sin;
  std::int64_t angle_stride;
  std::int64_t num_heads;
  std::int64_t num_kv_heads;
  std::int64_t head_dim;
  void* out;  // [rows, num_heads + 2 * num_kv_heads, head_dim] contiguous
};

void project_heads(const HeadsCall& call, int num_threads);

// Computes the next layer's input and residual from the attended heads.
struct FinishCall {
  const Projection* output;
  const Projection* gate_up;
  const Projection* down;
  const void* attended;  // [rows, inputs of `output`] contiguous
  const void* residual;  // [rows, hidden_size] contiguous
  std::int64_t rows;
  const void* norm;  // before gate and up
  float epsilon;
  void* out;           // [rows, hidden_size] contiguous
  void* residual_out;  // [rows, hidden_size] contiguous
};

void finish_layer(const FinishCall& call, int num_threads);

}  // namespace paged
