// All layers of a decoder one after the other, their attention included, and the last norm, in one call: see decoder_layer.h. Every piece
// is the same as by itself, and so is every result.
#pragma once

#include <vector>

#include "attention/paged_attention.h"
#include "layers/decoder_layer.h"

namespace paged {

struct StackedLayer {
  const Projection* qkv;
  const Projection* output;
  const Projection* gate_up;
  const Projection* down;
  const void* input_norm;
  const void* norm;        // before gate and up
  const void* query_norm;  // or null
  const void* key_norm;
  std::int64_t window;  // tokens a query sees, itself included; 0 = all
};

// Attention of a batch over layer 0; query, output, scale and window are set in here.
struct BatchAttention {
  AttentionCall call;
  BatchShape batch;
};

// The rows with which the last layer goes on once it has written the KV of all.
struct LastRows {
  const std::int64_t* rows;  // [attention.batch.num_tokens] ascending
  BatchAttention attention;  // of these alone
};

struct StackCall {
  const std::vector<StackedLayer>* layers;  // all of the decoder
  const void* final_norm;
  float epsilon;
  float scale;  // of the attention's scores
  std::int64_t rows;
  std::int64_t hidden_size;
  std::int64_t num_heads;
  std::int64_t num_kv_heads;
  std::int64_t head_dim;
  DType dtype;
  void* hidden;  // [rows, hidden_size] contiguous: what a layer gets and gives
  const float* cos;  // as HeadsCall's
  const float* sin;
  std::int64_t angle_stride;
  WriteCall write;           // into layer 0; key and value are set here
  BatchAttention attention;  // of all rows
  const LastRows* last_rows;  // or null: all. They end in the first rows of `hidden`
  std::int64_t layer_bytes;  // from a layer of a block and head to the next, in the pool
};

// Throws as write_kv and paged_attention do. For a slot outside the pool nothing has been written then; for metadata that attention
// refuses, the KV of the first layer has.
void layer_stack(const StackCall& call, int num_threads);

}  // namespace paged
