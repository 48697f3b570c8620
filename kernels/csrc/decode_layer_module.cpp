// Python's side of decode_layer.h.
#include "decode_layer_module.h"

#include <stdexcept>
#include <utility>
#include <vector>

#include "decode_layer.h"
#include "packed_linear.h"
#include "quantized.h"
#include "tensor.h"

namespace nb = nanobind;

namespace paged {
namespace {

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// Keeps the tensors whose memory it reads.
struct OwnedProjection {
  Projection layer{};
  std::vector<nb::object> tensors;
};

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

OwnedProjection quantized_projection(nb::object packed_object, nb::object scales_object, nb::object bias, std::int64_t num_outputs,
                                     std::int64_t num_inputs, int bits, int group_size) {
  const TensorView packed(packed_object, "packed", 2);
  const TensorView scales(scales_object, "scales", 3);
  scales.require_element_type(DType::bf16);
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
  call.scales = scales.data<const bf16>();
  const std::int64_t num_panels = (num_outputs + kPanelOutputs - 1) / kPanelOutputs;
  require((bits == 8 || bits == 4) && (group_size == 64 || group_size == 128), "bits must be 8 or 4, group_size 64 or 128");
  require(num_outputs > 0 && call.num_groups == (num_inputs + group_size - 1) / group_size, "scales have another number of groups");
  require(scales.shape(0) == num_panels && scales.shape(2) == kPanelOutputs, "scales are not [num_panels, num_groups, 16]");
  require(packed.shape(0) == num_panels && packed.shape(1) == call.panel_bytes(), "packed has another number of bytes");
  projection.tensors.push_back(std::move(packed_object));
  projection.tensors.push_back(std::move(scales_object));
  call.bias = bias_data(projection, std::move(bias));
  return projection;
}

// [rows, size] contiguous; rows < 0: as many as there are.
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

void bind_project_heads(nb::handle out_object, nb::handle residual_out, nb::handle x_object, nb::handle residual, nb::handle norm,
                        const OwnedProjection& qkv, nb::handle query_norm, nb::handle key_norm, float epsilon, nb::handle cos_object,
                        nb::handle sin_object, std::int64_t num_kv_heads, int num_threads) {
  const DType dtype = qkv.layer.dtype;
  const TensorView x = rows_of(x_object, "x", dtype, -1, qkv.layer.num_inputs);
  const TensorView out(out_object, "out", 3);
  out.require_element_type(dtype);
  out.require_contiguous_from(0);
  HeadsCall call{};
  call.qkv = &qkv.layer;
  call.x = x.data<const void>();
  call.rows = x.shape(0);
  if (!residual.is_none()) {
    call.residual = rows_of(residual, "residual", dtype, call.rows, qkv.layer.num_inputs).data<const void>();
    call.residual_out = rows_of(residual_out, "residual_out", dtype, call.rows, qkv.layer.num_inputs).data<void>();
  }
  call.norm = norm_data(norm, "norm", dtype, qkv.layer.num_inputs);
  call.epsilon = epsilon;
  call.num_heads = out.shape(1) - 2 * num_kv_heads;
  call.num_kv_heads = num_kv_heads;
  call.head_dim = out.shape(2);
  call.out = out.data<void>();
  require(out.shape(0) == call.rows && out.shape(1) * out.shape(2) == qkv.layer.num_outputs, "out has another size than the heads");
  require(num_kv_heads > 0 && call.num_heads > 0 && call.head_dim % 2 == 0, "heads of an even length are needed of all kinds");
  if (!query_norm.is_none()) {
    call.query_norm = norm_data(query_norm, "query_norm", dtype, call.head_dim);
    call.key_norm = norm_data(key_norm, "key_norm", dtype, call.head_dim);
  }
  const TensorView cos(cos_object, "cos", 2);
  const TensorView sin(sin_object, "sin", 2);
  for (const TensorView* angles : {&cos, &sin}) {
    angles->require_element_type(DType::f32);
    angles->require_contiguous_from(1);
    require(angles->shape(0) == call.rows && angles->shape(1) >= call.head_dim / 2, "cos and sin need a row of angles per token");
  }
  require(cos.stride(0) == sin.stride(0), "cos and sin differ in strides");
  call.cos = cos.data<const float>();
  call.sin = sin.data<const float>();
  call.angle_stride = cos.stride(0);
  const nb::gil_scoped_release release;
  project_heads(call, num_threads);
}

void bind_finish_layer(nb::handle out, nb::handle residual_out, nb::handle attended_object, nb::handle residual,
                       const OwnedProjection& output, nb::handle norm, const OwnedProjection& gate_up, const OwnedProjection& down,
                       float epsilon, int num_threads) {
  const DType dtype = output.layer.dtype;
  const std::int64_t hidden = output.layer.num_outputs;
  require(gate_up.layer.num_inputs == hidden && down.layer.num_outputs == hidden, "the layers do not fit together");
  require(gate_up.layer.num_outputs == 2 * down.layer.num_inputs, "gate_up has another size than down needs");
  require(gate_up.layer.dtype == dtype && down.layer.dtype == dtype, "the layers differ in their types");
  const TensorView attended = rows_of(attended_object, "attended", dtype, -1, output.layer.num_inputs);
  const std::int64_t rows = attended.shape(0);
  const FinishCall call{&output.layer,
                        &gate_up.layer,
                        &down.layer,
                        attended.data<const void>(),
                        rows_of(residual, "residual", dtype, rows, hidden).data<const void>(),
                        rows,
                        norm_data(norm, "norm", dtype, hidden),
                        epsilon,
                        rows_of(out, "out", dtype, rows, hidden).data<void>(),
                        rows_of(residual_out, "residual_out", dtype, rows, hidden).data<void>()};
  const nb::gil_scoped_release release;
  finish_layer(call, num_threads);
}

}  // namespace

void define_decode_layer(nb::module_& m) {
  using namespace nb::literals;
  nb::set_leak_warnings(false);  // a model that lives until the process ends is no leak
  nb::class_<OwnedProjection>(m, "Projection").def_prop_ro("is_packed", [](const OwnedProjection& projection) {
    return projection.layer.is_packed;
  });
  m.def("packed_projection", &packed_projection, "panels"_a, "bias"_a.none(), "num_outputs"_a, "num_inputs"_a);
  m.def("quantized_projection", &quantized_projection, "packed"_a, "scales"_a, "bias"_a.none(), "num_outputs"_a, "num_inputs"_a,
        "bits"_a, "group_size"_a);
  m.def("project_heads", &bind_project_heads, "out"_a, "residual_out"_a.none(), "x"_a, "residual"_a.none(), "norm"_a, "qkv"_a,
        "query_norm"_a.none(), "key_norm"_a.none(), "epsilon"_a, "cos"_a, "sin"_a, "num_kv_heads"_a, "num_threads"_a);
  m.def("finish_layer", &bind_finish_layer, "out"_a, "residual_out"_a, "attended"_a, "residual"_a, "output"_a, "norm"_a, "gate_up"_a,
        "down"_a, "epsilon"_a, "num_threads"_a);
}

}  // namespace paged
