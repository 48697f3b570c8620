// Linear layers over bfloat16 weights in the order in which oneDNN keeps them, so that one copy of the weights serves both.
//
// Thirty-two outputs (rows of the weight) make a panel, two consecutive inputs of an output are a pair: [num_panels][num_pairs][32
// outputs][2]. Inputs are padded to a multiple of 32 and outputs to whole panels with zeros. oneDNN chooses the order by shape and
// processor and promises nothing: `is_packed` says whether memory has this one.
#pragma once

#include "kernel_table.h"

namespace paged {

// Whether every weight, and zeros for padding, lie in `packed` where the kernel looks for them.
bool is_packed(const PackedCall& call, const bf16* weight, std::int64_t weight_stride, int num_threads);

// Rows of a weight on their way into panels, where they become outputs `first_output` and following.
struct FillCall {
  const bf16* weight;  // [num_rows, num_inputs]
  std::int64_t weight_stride;
  std::int64_t num_rows;
  std::int64_t first_output;
  std::int64_t num_inputs;
  bf16* packed;
};

// Writes the rows' weights and the padding of their inputs; outputs beyond the weight's last one are the caller's to clear.
void fill_panels(const FillCall& call, int num_threads);

// Whether `packed_matmul` is made for any number of rows, not only for KernelTable::packed_rows.
bool multiplies_many_packed_rows();

// Whether `packed_matmul` takes this call with `gated`.
bool can_gate(const PackedCall& call);

// Computes call.out from call.x, for any number of rows; call.last_rows is its own scratch. A row's result depends neither on the other
// rows nor on the number of threads, and on a matrix unit, from kMinPackedTileRows rows on, not on the number of rows.
void packed_matmul(PackedCall call, int num_threads);

}  // namespace paged
