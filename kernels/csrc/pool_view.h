// The KV pool of a call from Python: [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim].
#pragma once

#include <cstdint>
#include <optional>

#include "kernel_table.h"
#include "tensor.h"

namespace paged {

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

  TensorView view;
  std::optional<DType> dtype;  // what queries, keys and values must have; none for e4m3, which takes any
  std::int64_t element_bytes = 1;
};

}  // namespace paged
