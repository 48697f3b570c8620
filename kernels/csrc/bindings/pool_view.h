// The KV pool of a call from Python, [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim], and what the kernels' calls need of
// it.
#pragma once

#include <cstdint>
#include <optional>

#include "attention/paged_attention.h"
#include "bindings/tensor.h"
#include "isa/kernel_table.h"

namespace paged {

// The sequences of a batch: block_tables [num_seqs, width], query_start_loc [num_seqs + 1], seq_lens [num_seqs].
struct Sequences {
  Sequences(nanobind::handle block_tables, nanobind::handle query_start_loc, nanobind::handle seq_lens)
      : tables(block_tables, "block_tables", 2), starts(query_start_loc, "query_start_loc", 1), lens(seq_lens, "seq_lens", 1) {
    require(starts.shape(0) == count() + 1 && tables.shape(0) == count(), "the metadata differ in sequences");
  }
  std::int64_t count() const { return lens.shape(0); }

  TensorView tables;
  TensorView starts;
  TensorView lens;
};

// e4m3 (as uint8) exactly where there are scales, which are the caller's to set.
struct PoolView {
  PoolView(nanobind::handle object, bool has_scales) : view(object, "kv_pool", 6) {
    view.require_contiguous_from(1);
    require(view.shape(3) == 2, "kv_pool: axis 3 is not K and V");
    require(block_size() > 0 && block_size() % 8 == 0, "kv_pool: block_size is not a multiple of 8");
    require(head_dim() > 0 && head_dim() % 8 == 0 && head_dim() <= kMaxHeadDim, "kv_pool: head_dim is not a multiple of 8 up to 256");
    if (has_scales) {
      view.uint8_data();
    } else {
      dtype = view.element_type();
      element_bytes = element_size(*dtype);
    }
  }
  std::int64_t num_blocks() const { return view.shape(0); }
  std::int64_t num_kv_heads() const { return view.shape(1); }
  std::int64_t num_layers() const { return view.shape(2); }
  std::int64_t block_size() const { return view.shape(4); }
  std::int64_t head_dim() const { return view.shape(5); }
  char* layer(std::int64_t layer) const {
    require(layer >= 0 && layer < num_layers(), "layer is outside the pool");
    return view.data<char>() + layer * view.stride(2) * element_bytes;
  }

  // Keys, values, their type and scales are the caller's to set.
  WriteCall write_call(std::int64_t layer, const TensorView& slots) const {
    WriteCall call{};
    call.pool = this->layer(layer);
    call.block_stride = view.stride(0) * element_bytes;
    call.head_stride = view.stride(1) * element_bytes;
    call.num_tokens = slots.shape(0);
    call.num_kv_heads = num_kv_heads();
    call.num_blocks = num_blocks();
    call.block_size = block_size();
    call.row_bytes = head_dim() * element_bytes;
    call.slot_mapping = slots.int64_data();
    return call;
  }

  // Queries, their heads, output, scales, scale and window are the caller's to set.
  AttentionCall attention_call(std::int64_t layer, const Sequences& sequences) const {
    AttentionCall call{};
    call.pool = this->layer(layer);
    call.block_stride = view.stride(0);
    call.head_stride = view.stride(1);
    call.block_tables = sequences.tables.int32_data();
    call.table_stride = sequences.tables.shape(1);
    call.query_start_loc = sequences.starts.int32_data();
    call.seq_lens = sequences.lens.int32_data();
    call.num_kv_heads = static_cast<int>(num_kv_heads());
    call.head_dim = static_cast<int>(head_dim());
    call.block_size = static_cast<int>(block_size());
    return call;
  }

  TensorView view;
  std::optional<DType> dtype;  // what queries, keys and values must have; none for e4m3, which takes any
  std::int64_t element_bytes = 1;
};

}  // namespace paged
