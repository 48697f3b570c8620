// Linear layers as decoder_layer.h takes them, from Python.
#include "bindings/projection_module.h"

#include "bindings/arguments.h"

namespace nb = nanobind;

namespace paged {
namespace {

OwnedProjection packed_projection(nb::object panels, nb::object bias, std::int64_t num_outputs, std::int64_t num_inputs) {
  OwnedProjection projection{{}, {panels, bias}};
  Projection& layer = projection.layer;
  layer.is_packed = true;
  layer.dtype = DType::bf16;
  layer.num_inputs = num_inputs;
  layer.num_outputs = num_outputs;
  layer.packed = packed_call(TensorView(panels, "panels", 2), num_outputs, num_inputs);
  layer.packed.bias = static_cast<const bf16*>(bias_data(bias, layer.dtype, num_outputs));
  return projection;
}

OwnedProjection quantized_projection(nb::object packed, nb::object scales, nb::object zeros, nb::object bias, std::int64_t num_outputs,
                                     std::int64_t num_inputs, int bits, int group_size) {
  OwnedProjection projection{{}, {packed, scales, zeros, bias}};
  Projection& layer = projection.layer;
  layer.dtype = DType::bf16;
  layer.num_inputs = num_inputs;
  layer.num_outputs = num_outputs;
  layer.quantized =
      quantized_call(TensorView(packed, "packed", 2), TensorView(scales, "scales", 3), zeros, num_outputs, num_inputs, bits, group_size);
  layer.quantized.bias = bias_data(bias, layer.dtype, num_outputs);
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
