// Packed weights from Python: checks shapes, then runs the kernels without the GIL. Tensors are only borrowed.
#include "bindings/weights_module.h"

#include <algorithm>
#include <cstdint>

#include "bindings/arguments.h"
#include "bindings/tensor.h"
#include "linear/packed_linear.h"
#include "quantized/quantized.h"

namespace nb = nanobind;

namespace paged {
namespace {

void bind_pack_rows(nb::handle packed_object, nb::handle scales_object, nb::handle weight_object, std::int64_t first_output,
                    std::int64_t num_outputs, int bits, int group_size, int num_threads) {
  const TensorView weight(weight_object, "weight", 2);
  weight.require_contiguous_from(1);
  const DType dtype = weight.element_type();
  const TensorView packed(packed_object, "packed", 2);
  const TensorView scales(scales_object, "scales", 3);
  const QuantizedCall target = quantized_call(packed, scales, nb::none(), num_outputs, weight.shape(1), bits, group_size);
  require(first_output >= 0 && first_output + weight.shape(0) <= num_outputs, "the rows do not fit into the packed weight");
  PackCall call{};
  call.weight = weight.data<const void>();
  call.weight_stride = weight.stride(0);
  call.num_rows = weight.shape(0);
  call.first_output = first_output;
  call.num_inputs = weight.shape(1);
  call.num_groups = target.num_groups;
  call.group_size = group_size;
  call.bits = bits;
  call.packed = packed.data<std::uint8_t>();
  call.scales = scales.data<bf16>();
  const nb::gil_scoped_release release;
  pack_rows(call, dtype, num_threads);
}

void bind_quantized_matmul(nb::handle out_object, nb::handle x_object, nb::handle packed_object, nb::handle scales_object,
                           nb::handle zeros, nb::handle bias, int bits, int group_size, int num_threads) {
  const TensorView x(x_object, "x", 2);
  const DType dtype = x.element_type();
  x.require_contiguous_from(1);
  const TensorView out(out_object, "out", 2);
  out.require_element_type(dtype);
  out.require_contiguous_from(0);
  require(out.shape(0) == x.shape(0), "out and x differ in rows");
  const TensorView packed(packed_object, "packed", 2);
  const TensorView scales(scales_object, "scales", 3);
  QuantizedCall call = quantized_call(packed, scales, zeros, out.shape(1), x.shape(1), bits, group_size);
  call.bias = bias_data(bias, dtype, out.shape(1));
  call.num_rows = x.shape(0);
  call.x = x.data<const void>();
  call.x_stride = x.stride(0);
  call.out = out.data<void>();
  const nb::gil_scoped_release release;
  quantized_matmul(call, dtype, num_threads);
}

void bind_dequantize(nb::handle out_object, nb::handle packed_object, nb::handle scales_object, nb::handle zeros, int bits,
                     int group_size, int num_threads) {
  const TensorView out(out_object, "out", 2);
  out.require_contiguous_from(0);
  const DType dtype = out.element_type();
  const TensorView packed(packed_object, "packed", 2);
  const TensorView scales(scales_object, "scales", 3);
  QuantizedCall call = quantized_call(packed, scales, zeros, out.shape(0), out.shape(1), bits, group_size);
  call.out = out.data<void>();
  const nb::gil_scoped_release release;
  dequantize(call, dtype, num_threads);
}

void bind_fill_panels(nb::handle packed_object, nb::handle weight_object, std::int64_t first_output, std::int64_t num_outputs,
                      int num_threads) {
  const TensorView packed(packed_object, "packed", 2);
  const TensorView weight(weight_object, "weight", 2);
  weight.require_element_type(DType::bf16);
  weight.require_contiguous_from(1);
  packed_call(packed, num_outputs, weight.shape(1));
  require(first_output >= 0 && first_output + weight.shape(0) <= num_outputs, "the rows do not fit into the packed weight");
  const FillCall call{weight.data<const bf16>(), weight.stride(0), weight.shape(0), first_output, weight.shape(1), packed.data<bf16>()};
  const nb::gil_scoped_release release;
  fill_panels(call, num_threads);
}

void bind_take_rows(nb::handle out_object, nb::handle packed_object, nb::handle outputs_object, std::int64_t num_outputs, int num_threads) {
  const TensorView out(out_object, "out", 2);
  const TensorView packed(packed_object, "packed", 2);
  const TensorView outputs(outputs_object, "outputs", 1);
  out.require_element_type(DType::bf16);
  out.require_contiguous_from(0);
  require(out.shape(0) == outputs.shape(0), "out needs a row for every output");
  packed_call(packed, num_outputs, out.shape(1));
  const std::int64_t* begin = outputs.int64_data();
  require(std::all_of(begin, begin + outputs.shape(0), [&](std::int64_t output) { return output >= 0 && output < num_outputs; }),
          "the weight has no such output");
  const TakeCall call{packed.data<const bf16>(), out.shape(1), begin, outputs.shape(0), out.data<bf16>()};
  const nb::gil_scoped_release release;
  take_rows(call, num_threads);
}

void bind_packed_matmul(nb::handle out_object, nb::handle x_object, nb::handle packed_object, nb::handle bias, int num_threads) {
  const TensorView x(x_object, "x", 2);
  const TensorView packed(packed_object, "packed", 2);
  const TensorView out(out_object, "out", 2);
  x.require_element_type(DType::bf16);
  x.require_contiguous_from(1);
  out.require_element_type(DType::bf16);
  out.require_contiguous_from(0);
  require(out.shape(0) == x.shape(0), "out and x differ in rows");
  PackedCall call = packed_call(packed, out.shape(1), x.shape(1));
  call.bias = static_cast<const bf16*>(bias_data(bias, DType::bf16, out.shape(1)));
  call.num_rows = x.shape(0);
  call.x = x.data<const bf16>();
  call.x_stride = x.stride(0);
  call.out = out.data<bf16>();
  const nb::gil_scoped_release release;
  packed_matmul(call, num_threads);
}

}  // namespace

void define_weights(nb::module_& m) {
  using namespace nb::literals;
  m.def("pack_rows", &bind_pack_rows, "packed"_a, "scales"_a, "weight"_a, "first_output"_a, "num_outputs"_a, "bits"_a,
        "group_size"_a, "num_threads"_a);
  m.def("quantized_matmul", &bind_quantized_matmul, "out"_a, "x"_a, "packed"_a, "scales"_a, "zeros"_a.none(), "bias"_a.none(),
        "bits"_a, "group_size"_a, "num_threads"_a);
  m.def("dequantize", &bind_dequantize, "out"_a, "packed"_a, "scales"_a, "zeros"_a.none(), "bits"_a, "group_size"_a,
        "num_threads"_a);
  m.def("fill_panels", &bind_fill_panels, "packed"_a, "weight"_a, "first_output"_a, "num_outputs"_a, "num_threads"_a);
  m.def("take_rows", &bind_take_rows, "out"_a, "packed"_a, "outputs"_a, "num_outputs"_a, "num_threads"_a);
  m.def("packed_matmul", &bind_packed_matmul, "out"_a, "x"_a, "packed"_a, "bias"_a.none(), "num_threads"_a);
}

}  // namespace paged
