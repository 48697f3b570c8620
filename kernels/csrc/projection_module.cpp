// Linear layers as decoder_layer.h takes them, from Python.
#include "projection_module.h"

#include <utility>
#include <vector>

#include "decoder_layer.h"
#include "packed_linear.h"
#include "quantized.h"
#include "tensor.h"

namespace nb = nanobind;

namespace paged {

TensorView rows_of(nb::handle object, const char* name, DType dtype, std::int64_t rows, std::int64_t size) {
  TensorView view(object, name, 2);
  view.require_element_type(dtype);
  view.require_contiguous_from(0);
  require((rows < 0 || view.shape(0) == rows) && view.shape(1) == size, "the tensors' shapes do not fit together");
  return view;
}

const void* norm_data(nb::handle object, const char* name, DType dtype, std::int64_t size) {
  const TensorView view(object, name, 1);
  view.require_element_type(dtype);
  view.require_contiguous_from(0);
  require(view.shape(0) == size, "a norm has another length than its rows");
  return view.data<const void>();
}

namespace {

const void* bias_data(OwnedProjection& projection, nb::object bias_object) {
  if (bias_object.is_none()) return nullptr;
  const TensorView bias(bias_object, "bias", 1);
  bias.require_element_type(projection.layer.dtype);
  bias.require_contiguous_from(0);
  require(bias.shape(0) == projection.layer.num_outputs, "bias has another length than the outputs");
  projection.tensors.push_back(std::move(bias_object));
  return bias.data<const void>();
}

OwnedProjection packed_projection(nb::object panels_object, nb::object bias, std::int64_t num_outputs, std::int64_t num_inputs) {
  const TensorView panels(panels_object, "panels", 2);
  panels.require_element_type(DType::bf16);
  panels.require_contiguous_from(0);
  OwnedProjection projection;
  Projection& layer = projection.layer;
  layer.is_packed = true;
  layer.dtype = DType::bf16;
  layer.num_inputs = layer.packed.num_inputs = num_inputs;
  layer.num_outputs = layer.packed.num_outputs = num_outputs;
  layer.packed.packed = panels.data<const bf16>();
  require(num_outputs > 0 && num_inputs > 0, "a weight needs outputs and inputs");
  require(panels.shape(0) == (num_outputs + kPackedOutputs - 1) / kPackedOutputs, "packed needs a panel for every 32 outputs");
  require(panels.shape(1) == layer.packed.padded_inputs() * kPackedOutputs, "packed has another number of weights than the inputs need");
  projection.tensors.push_back(std::move(panels_object));
  layer.packed.bias = static_cast<const bf16*>(bias_data(projection, std::move(bias)));
  return projection;
}

OwnedProjection quantized_projection(nb::object packed_object, nb::object scales_object, nb::object zeros_object, nb::object bias,
                                     std::int64_t num_outputs, std::int64_t num_inputs, int bits, int group_size) {
  const bool has_zeros = !zeros_object.is_none();
  const TensorView packed(packed_object, "packed", 2);
  const TensorView scales(scales_object, "scales", 3);
  scales.require_element_type(has_zeros ? DType::f32 : DType::bf16);
  scales.require_contiguous_from(0);
  OwnedProjection projection;
  Projection& layer = projection.layer;
  QuantizedCall& call = layer.quantized;
  layer.dtype = DType::bf16;
  layer.num_inputs = call.num_inputs = num_inputs;
  layer.num_outputs = call.num_outputs = num_outputs;
  call.bits = bits;
  call.group_size = group_size;
  call.num_groups = scales.shape(1);
  call.weights = packed.uint8_data();
  const std::int64_t num_panels = (num_outputs + kPanelOutputs - 1) / kPanelOutputs;
  require((bits == 8 || bits == 4) && (group_size == 32 || group_size == 64 || group_size == 128),
          "bits must be 8 or 4, group_size 32, 64 or 128");
  require(num_outputs > 0 && call.num_groups == (num_inputs + group_size - 1) / group_size, "scales have another number of groups");
  require(scales.shape(0) == num_panels && scales.shape(2) == kPanelOutputs, "scales are not [num_panels, num_groups, 16]");
  require(packed.shape(0) == num_panels && packed.shape(1) == call.panel_bytes(), "packed has another number of bytes");
  if (has_zeros) {
    const TensorView zeros(zeros_object, "zeros", 3);
    zeros.require_element_type(DType::bf16);
    zeros.require_contiguous_from(0);
    for (int i = 0; i < 3; ++i) require(zeros.shape(i) == scales.shape(i), "zeros differ from scales in shape");
    call.wide_scales = scales.data<const float>();
    call.zeros = zeros.data<const bf16>();
    projection.tensors.push_back(std::move(zeros_object));
  } else {
    call.scales = scales.data<const bf16>();
  }
  projection.tensors.push_back(std::move(packed_object));
  projection.tensors.push_back(std::move(scales_object));
  call.bias = bias_data(projection, std::move(bias));
  return projection;
}

}  // namespace

void define_projection(nb::module_& m) {
  using namespace nb::literals;
  nb::set_leak_warnings(false);  // a model that lives until the process ends is no leak
  nb::class_<OwnedProjection>(m, "Projection");
  m.def("packed_projection", &packed_projection, "panels"_a, "bias"_a.none(), "num_outputs"_a, "num_inputs"_a);
  m.def("quantized_projection", &quantized_projection, "packed"_a, "scales"_a, "zeros"_a.none(), "bias"_a.none(), "num_outputs"_a,
        "num_inputs"_a, "bits"_a, "group_size"_a);
}

}  // namespace paged
