// Linear layers over bfloat16 weights in the order in which the kernels read them.
//
// Thirty-two outputs (rows of the weight) make a panel, two consecutive inputs of an output are a pair: [num_panels][num_pairs][32
// outputs][2]. Inputs are padded to a multiple of 32 and outputs to whole panels with zeros.
#pragma once

#include "isa/kernel_table.h"

namespace paged {

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

// Rows of a weight on their way out of panels.
struct TakeCall {
  const bf16* packed;
  std::int64_t num_inputs;
  const std::int64_t* outputs;  // [num_rows], which of them
  std::int64_t num_rows;
  bf16* out;  // [num_rows, num_inputs]
};

// The rows that fill_panels was given for these outputs.
void take_rows(const TakeCall& call, int num_threads);

// Whether a product of so many rows and outputs can be `gated`, and should be.
bool can_gate(std::int64_t num_rows, std::int64_t num_outputs);

// Makes x what kernels read: rows of padded_inputs(), for a matrix unit whole tiles, and floats where `wide` is read. Copies are this
// thread's until its next call.
void complete_rows(PackedCall& call, int num_threads);

// Computes call.out from call.x, for any number of rows; call.last_rows is its own scratch. A row's result depends neither on the other
// rows nor on the number of threads, nor, with one exception, on the number of rows: a matrix unit computes kMinPackedTileRows and more.
void packed_matmul(PackedCall call, int num_threads);

}  // namespace paged
