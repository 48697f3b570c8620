#include "attention/paged_attention.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa/instruction_set.h"
#include "runtime/parallel.h"
#include "runtime/scratch.h"

namespace paged {
namespace {

// Rows (queries times heads of a group) that share one packed KV tile.
constexpr int kTargetRows = 128;

// Waking a team costs a few microseconds; less work than this (query rows times KV rows times head_dim) is not worth it.
constexpr std::int64_t kMinParallelWork = 1 << 20;
constexpr std::int64_t kMinParallelBytes = 1 << 18;

struct Plan {
  std::vector<AttentionItem> items;  // those of prefills first
  std::int64_t num_prefill_items = 0;
  std::vector<MergeItem> merges;
  std::int64_t num_partials = 0;
  std::int64_t work = 0;
  int max_rows = 0;
};

void validate(const AttentionCall& call, const BatchShape& batch) {
  if (call.query_start_loc[0] != 0 || call.query_start_loc[batch.num_seqs] != batch.num_tokens)
    throw std::invalid_argument("query_start_loc does not run from 0 to the number of tokens");
  for (std::int64_t i = 0; i < batch.num_seqs; ++i) {
    const std::int64_t query_len = std::int64_t{call.query_start_loc[i + 1]} - call.query_start_loc[i];
    const std::int64_t seq_len = call.seq_lens[i];
    if (query_len < 0 || query_len > seq_len)
      throw std::invalid_argument("sequence " + std::to_string(i) + " has " + std::to_string(query_len) + " new tokens of " +
                                  std::to_string(seq_len));
    if (query_len == 0) continue;
    const std::int64_t num_blocks = (seq_len + call.block_size - 1) / call.block_size;
    if (num_blocks > call.table_stride)
      throw std::invalid_argument("sequence " + std::to_string(i) + " needs more blocks than block_tables has columns");
    const std::int32_t* table = call.block_tables + i * call.table_stride;
    for (std::int64_t b = 0; b < num_blocks; ++b) {
      if (table[b] < 0 || table[b] >= batch.num_blocks)
        throw std::out_of_range("block_tables: block " + std::to_string(table[b]) + " of sequence " + std::to_string(i) +
                                " is outside the pool");
    }
  }
}

std::int32_t window_begin(const AttentionCall& call, std::int64_t position) {
  return call.window > 0 && position + 1 > call.window ? static_cast<std::int32_t>(position + 1 - call.window) : 0;
}

void plan_decode(const AttentionCall& call, std::int32_t sequence, Plan& plan) {
  const int group = call.num_heads / call.num_kv_heads;
  const std::int32_t end = call.seq_lens[sequence];
  const std::int32_t begin = window_begin(call, end - 1);
  const std::int32_t first_chunk = begin / kChunkTokens;
  const std::int32_t num_chunks = (end - 1) / kChunkTokens + 1 - first_chunk;
  for (std::int32_t kv_head = 0; kv_head < call.num_kv_heads; ++kv_head) {
    if (num_chunks == 1) {
      plan.items.push_back({sequence, kv_head, 0, 1, begin, end, -1});
      continue;
    }
    plan.merges.push_back({call.query_start_loc[sequence], kv_head, num_chunks, plan.num_partials});
    for (std::int32_t chunk = 0; chunk < num_chunks; ++chunk) {
      const std::int32_t chunk_begin = (first_chunk + chunk) * kChunkTokens;
      plan.items.push_back({sequence, kv_head, 0, 1, std::max(begin, chunk_begin), std::min(end, chunk_begin + kChunkTokens),
                            plan.num_partials});
      plan.num_partials += group;
    }
  }
  plan.work += std::int64_t{end - begin} * call.num_heads * call.head_dim;
  plan.max_rows = std::max(plan.max_rows, group);
}

void plan_prefill(const AttentionCall& call, std::int32_t sequence, std::int32_t query_len, Plan& plan) {
  const int group = call.num_heads / call.num_kv_heads;
  const std::int32_t queries_per_item = std::max(1, kTargetRows / group);
  const std::int32_t num_prefix = call.seq_lens[sequence] - query_len;
  for (std::int32_t first = query_len - (query_len - 1) % queries_per_item - 1; first >= 0; first -= queries_per_item) {
    const std::int32_t count = std::min(queries_per_item, query_len - first);
    const std::int32_t begin = window_begin(call, num_prefix + first);
    const std::int32_t end = num_prefix + first + count;
    for (std::int32_t kv_head = 0; kv_head < call.num_kv_heads; ++kv_head)
      plan.items.push_back({sequence, kv_head, first, count, begin, end, -1});
    plan.work += std::int64_t{end - begin} * count * call.num_heads * call.head_dim;
    plan.max_rows = std::max(plan.max_rows, count * group);
  }
}

Plan plan_items(const AttentionCall& call, std::int64_t num_seqs) {
  Plan plan;
  plan.items.reserve(static_cast<std::size_t>(num_seqs) * static_cast<std::size_t>(call.num_kv_heads));
  for (std::int32_t i = 0; i < num_seqs; ++i) {
    const std::int32_t query_len = call.query_start_loc[i + 1] - call.query_start_loc[i];
    if (query_len > 1) plan_prefill(call, i, query_len, plan);
  }
  plan.num_prefill_items = static_cast<std::int64_t>(plan.items.size());
  for (std::int32_t i = 0; i < num_seqs; ++i) {
    if (call.query_start_loc[i + 1] - call.query_start_loc[i] == 1) plan_decode(call, i, plan);
  }
  return plan;
}

thread_local Scratch item_scratch;
thread_local Scratch partial_scratch;

}  // namespace

void paged_attention(AttentionCall call, const BatchShape& batch, DType dtype, int num_threads) {
  validate(call, batch);
  const Plan plan = plan_items(call, batch.num_seqs);
  if (plan.work < kMinParallelWork) num_threads = 1;
  if (plan.num_partials > 0)
    call.partials = partial_scratch.floats(static_cast<std::size_t>(plan.num_partials * partial_floats(call.head_dim)));
  const auto attend = (call.key_scales != nullptr ? kernels().attend_e4m3 : kernels().attend)[static_cast<int>(dtype)];
  const auto merge = kernels().merge[static_cast<int>(dtype)];
  const std::size_t scratch = scratch_floats(plan.max_rows, call.head_dim);
  // Threads take spans of items, so that each knows which one comes next and can prefetch its first tile. Prefills differ too much in
  // length for that.
  const auto attend_span = [&](std::int64_t begin, std::int64_t end) {
    const AttentionItem* last = plan.items.data() + end - 1;
    for (const AttentionItem* item = plan.items.data() + begin; item <= last; ++item)
      attend(call, *item, item < last ? item + 1 : nullptr, item_scratch.floats(scratch));
  };
  parallel_spans(num_threads, static_cast<std::int64_t>(plan.items.size()), 1, attend_span, plan.num_prefill_items);
  for (const MergeItem& item : plan.merges) merge(call, item);
}

namespace {

// One row of K or V, scaled to e4m3 if the pool is.
class RowWriter {
 public:
  explicit RowWriter(const WriteCall& call)
      : row_bytes_(call.row_bytes), encode_(call.key_scales != nullptr ? kernels().encode_row[static_cast<int>(call.source)] : nullptr) {}

  void write(char* target, const char* row, const float* scales, std::int64_t head) const {
    if (encode_ == nullptr) {
      std::memcpy(target, row, static_cast<std::size_t>(row_bytes_));
    } else {
      encode_(row, 1.0f / scales[head], static_cast<int>(row_bytes_), reinterpret_cast<e4m3*>(target));
    }
  }

 private:
  std::int64_t row_bytes_;
  void (*encode_)(const void*, float, int, e4m3*);
};

}  // namespace

void write_kv(const WriteCall& call, int num_threads) {
  for (std::int64_t i = 0; i < call.num_tokens; ++i) {
    if (call.slot_mapping[i] < 0 || call.slot_mapping[i] >= call.num_blocks * call.block_size)
      throw std::out_of_range("slot_mapping: slot " + std::to_string(call.slot_mapping[i]) + " is outside the pool");
  }
  if (call.num_tokens * call.num_kv_heads * call.row_bytes < kMinParallelBytes) num_threads = 1;
  const RowWriter writer(call);
  constexpr std::int64_t kTokensPerItem = 32;
  parallel_for(num_threads, (call.num_tokens + kTokensPerItem - 1) / kTokensPerItem, [&](std::int64_t item) {
    const std::int64_t end = std::min(call.num_tokens, (item + 1) * kTokensPerItem);
    for (std::int64_t token = item * kTokensPerItem; token < end; ++token) {
      const std::int64_t block = call.slot_mapping[token] / call.block_size;
      const std::int64_t offset = call.slot_mapping[token] % call.block_size;
      char* target = call.pool + block * call.block_stride + offset * call.row_bytes;
      const char* key = call.key + token * call.key_token_stride;
      const char* value = call.value + token * call.value_token_stride;
      for (std::int64_t head = 0; head < call.num_kv_heads; ++head, target += call.head_stride) {
        writer.write(target, key + head * call.key_head_stride, call.key_scales, head);
        writer.write(target + call.block_size * call.row_bytes, value + head * call.value_head_stride, call.value_scales, head);
      }
    }
  });
}

}  // namespace paged
