// Paged attention and the write into the pool, over the canonical layout [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim].
#pragma once

#include <cstdint>

#include "isa/kernel_table.h"

namespace paged {

struct BatchShape {
  std::int64_t num_tokens;
  std::int64_t num_seqs;
  std::int64_t num_blocks;
};

// Throws std::invalid_argument when the metadata contradict one another, std::out_of_range for a block outside the pool; nothing has been
// written then. `call.partials` is set here.
// `dtype` is that of queries and outputs; the pool has it too, or with scales is e4m3.
void paged_attention(AttentionCall call, const BatchShape& batch, DType dtype, int num_threads);

struct WriteCall {
  const char* key;  // [num_tokens, num_kv_heads, head_dim]; strides in bytes
  std::int64_t key_token_stride;
  std::int64_t key_head_stride;
  const char* value;
  std::int64_t value_token_stride;
  std::int64_t value_head_stride;
  char* pool;  // block 0 of the layer
  std::int64_t block_stride;
  std::int64_t head_stride;
  std::int64_t num_tokens;
  std::int64_t num_kv_heads;
  std::int64_t num_blocks;
  std::int64_t block_size;
  std::int64_t row_bytes;  // in the pool
  const std::int64_t* slot_mapping;
  // If there are scales, one per KV head, the pool is e4m3, and keys and values are divided by them.
  const float* key_scales;
  const float* value_scales;
  DType source;
};

// Throws std::out_of_range for a slot outside the pool; nothing has been written then.
void write_kv(const WriteCall& call, int num_threads);

}  // namespace paged
