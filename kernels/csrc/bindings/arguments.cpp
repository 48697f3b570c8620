#include "bindings/arguments.h"

namespace nb = nanobind;

namespace paged {

TensorView matrix(nb::handle object, const char* name, DType dtype, std::int64_t rows, std::int64_t size, int axis) {
  TensorView view(object, name, 2);
  view.require_element_type(dtype);
  view.require_contiguous_from(axis);
  require((rows < 0 || view.shape(0) == rows) && view.shape(1) == size, "the tensors' shapes do not fit together");
  return view;
}

const void* vector_data(nb::handle object, const char* name, DType dtype, std::int64_t size, const char* misfit) {
  const TensorView view(object, name, 1);
  view.require_element_type(dtype);
  view.require_contiguous_from(0);
  require(view.shape(0) == size, misfit);
  return view.data<const void>();
}

const void* bias_data(nb::handle object, DType dtype, std::int64_t num_outputs) {
  return object.is_none() ? nullptr : vector_data(object, "bias", dtype, num_outputs, "bias has another length than the outputs");
}

Angles::Angles(nb::handle cos_object, nb::handle sin_object, std::int64_t num_tokens, std::int64_t head_dim) {
  const TensorView cos_view(cos_object, "cos", 2);
  const TensorView sin_view(sin_object, "sin", 2);
  for (const TensorView* view : {&cos_view, &sin_view}) {
    view->require_element_type(DType::f32);
    view->require_contiguous_from(1);
    require(view->shape(0) == num_tokens, "cos and sin need one row per token");
    require(view->shape(1) == head_dim / 2 || view->shape(1) == head_dim, "cos and sin need head_dim or head_dim / 2 columns");
  }
  require(cos_view.stride(0) == sin_view.stride(0), "cos and sin differ in strides");
  cos = cos_view.data<const float>();
  sin = sin_view.data<const float>();
  stride = cos_view.stride(0);
}

PackedCall packed_call(const TensorView& packed, std::int64_t num_outputs, std::int64_t num_inputs) {
  packed.require_element_type(DType::bf16);
  packed.require_contiguous_from(0);
  require(num_outputs > 0 && num_inputs > 0, "a weight needs outputs and inputs");
  PackedCall call{};
  call.packed = packed.data<const bf16>();
  call.num_outputs = num_outputs;
  call.num_inputs = num_inputs;
  require(packed.shape(0) == (num_outputs + kPackedOutputs - 1) / kPackedOutputs, "packed needs a panel for every 32 outputs");
  require(packed.shape(1) == call.padded_inputs() * kPackedOutputs, "packed has another number of weights than the inputs need");
  return call;
}

QuantizedCall quantized_call(const TensorView& packed, const TensorView& scales, nb::handle zeros_object, std::int64_t num_outputs,
                             std::int64_t num_inputs, int bits, int group_size) {
  const bool has_zeros = !zeros_object.is_none();
  scales.require_element_type(has_zeros ? DType::f32 : DType::bf16);
  scales.require_contiguous_from(0);
  const std::int64_t num_panels = (num_outputs + kPanelOutputs - 1) / kPanelOutputs;
  require(num_outputs > 0 && num_inputs > 0, "a weight needs outputs and inputs");
  require(packed.shape(0) == num_panels && scales.shape(0) == num_panels, "packed and scales need a panel for every 16 outputs");
  require(scales.shape(2) == kPanelOutputs && scales.shape(1) > 0, "scales are not [num_panels, num_groups, 16]");
  QuantizedCall call{};
  call.weights = packed.uint8_data();
  if (has_zeros) {
    const TensorView zeros(zeros_object, "zeros", 3);
    zeros.require_element_type(DType::bf16);
    zeros.require_contiguous_from(0);
    for (int i = 0; i < 3; ++i) require(zeros.shape(i) == scales.shape(i), "zeros differ from scales in shape");
    call.wide_scales = scales.data<const float>();
    call.zeros = zeros.data<const bf16>();
  } else {
    call.scales = scales.data<const bf16>();
  }
  require(bits == 8 || bits == 4, "bits must be 8 or 4");
  require(group_size == 32 || group_size == 64 || group_size == 128, "group_size must be 32, 64 or 128");
  call.bits = bits;
  call.group_size = group_size;
  call.num_outputs = num_outputs;
  call.num_inputs = num_inputs;
  call.num_groups = scales.shape(1);
  require(call.num_groups == (num_inputs + group_size - 1) / group_size, "scales have another number of groups than the inputs");
  require(packed.shape(1) == call.panel_bytes(), "packed has another number of bytes than the inputs need");
  return call;
}

}  // namespace paged
