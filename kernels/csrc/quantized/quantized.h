// Linear layers over weights of 8 or 4 bits ("weight-only" quantisation).
//
// Packed format: sixteen outputs (rows of the weight) make a panel; four consecutive inputs of one output are a quad, a 32-bit lane.
// With 8 bits a panel is [num_quads][16 outputs][4 bytes]. With 4 bits quads 2 i and 2 i + 1 share bytes, the first in the low nibbles:
// [num_quads / 2][16 outputs][4 bytes]. Values are unsigned, 128 or 8 more than what they mean. Each output has a bfloat16 scale per
// `group_size` inputs. Inputs are padded to whole groups and outputs to whole panels with zeros.
//
// Weights that were quantised elsewhere have float32 scales, and zeros beside them: a value means (value - zero) * scale.
#pragma once

#include "isa/kernel_table.h"

namespace paged {

struct PackCall {
  const void* weight;  // [num_rows, num_inputs], rows contiguous
  std::int64_t weight_stride;
  std::int64_t num_rows;
  std::int64_t first_output;  // of row 0
  std::int64_t num_inputs;
  std::int64_t num_groups;
  int group_size;
  int bits;
  std::uint8_t* packed;
  bf16* scales;
};

// Quantises rows to nearest. Rows of one call may be a part of a panel.
void pack_rows(const PackCall& call, DType dtype, int num_threads);

// Whether rows of the call are so many that `quantized_matmul` widens the weights. Such a call can be `gated` where `can_gate` says so.
bool is_widened(const QuantizedCall& call, DType dtype);

// Computes call.out; the prepared input is its own scratch. Rows of one call share each weight that is read.
void quantized_matmul(QuantizedCall call, DType dtype, int num_threads);

// Weights of outputs [0, num_outputs) of the call, rounded to `dtype`, to call.out.
void dequantize(const QuantizedCall& call, DType dtype, int num_threads);

}  // namespace paged
