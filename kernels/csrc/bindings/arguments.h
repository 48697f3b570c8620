// Arguments from Python that several functions take: checks them and returns what the kernels' calls need of them. All throw
// std::invalid_argument for what does not fit. What is returned is valid as long as a TensorView is.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "bindings/tensor.h"
#include "isa/kernel_table.h"

namespace paged {

// [rows, size], contiguous from `axis` on; rows < 0 takes any number of them.
TensorView matrix(nanobind::handle object, const char* name, DType dtype, std::int64_t rows, std::int64_t size, int axis = 0);

// The address of [size] contiguous elements; `misfit` is the error for another size.
const void* vector_data(nanobind::handle object, const char* name, DType dtype, std::int64_t size, const char* misfit);

// As vector_data; null for None.
const void* bias_data(nanobind::handle object, DType dtype, std::int64_t num_outputs);

// cos and sin of a rotation: float32, a row per token with head_dim / 2 angles, or those twice.
struct Angles {
  Angles(nanobind::handle cos_object, nanobind::handle sin_object, std::int64_t num_tokens, std::int64_t head_dim);

  const float* cos;
  const float* sin;
  std::int64_t stride;
};

// Weights of `num_outputs` x `num_inputs` in packed_linear.h's order; nothing else of the call is set.
PackedCall packed_call(const TensorView& packed, std::int64_t num_outputs, std::int64_t num_inputs);

// Weights of `num_outputs` x `num_inputs` in quantized.h's order, with zeros or None; nothing else of the call is set.
QuantizedCall quantized_call(const TensorView& packed, const TensorView& scales, nanobind::handle zeros_object, std::int64_t num_outputs,
                             std::int64_t num_inputs, int bits, int group_size);

}  // namespace paged
