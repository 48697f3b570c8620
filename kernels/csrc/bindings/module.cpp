// The Python module paged_kernels._native: checks shapes, then runs the kernels without the GIL. Tensors are only borrowed.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention/paged_attention.h"
#include "bindings/arguments.h"
#include "bindings/copy_digest_module.h"
#include "bindings/layer_stack_module.h"
#include "bindings/pool_view.h"
#include "bindings/projection_module.h"
#include "bindings/sampling_module.h"
#include "bindings/tensor.h"
#include "bindings/weights_module.h"
#include "isa/instruction_set.h"
#include "layers/elementwise.h"
#include "runtime/huge_pages.h"
#include "runtime/parallel.h"

namespace nb = nanobind;

namespace paged {
namespace {

// The pool with the scales of a layer.
struct Pool : PoolView {
  Pool(nb::handle object, nb::handle key_scale_object, nb::handle value_scale_object) : PoolView(object, !key_scale_object.is_none()) {
    require(key_scale_object.is_none() == value_scale_object.is_none(), "key_scale and value_scale go together");
    if (key_scale_object.is_none()) return;
    key_scales = scales(key_scale_object, "key_scale");
    value_scales = scales(value_scale_object, "value_scale");
  }

  const float* key_scales = nullptr;
  const float* value_scales = nullptr;

 private:
  const float* scales(nb::handle object, const char* name) const {
    const char* misfit = "key_scale and value_scale need one value per KV head of the pool";
    return static_cast<const float*>(vector_data(object, name, DType::f32, num_kv_heads(), misfit));
  }
};

// [num_tokens, num_heads, head_dim] with a contiguous last axis, of an element type that the pool takes.
TensorView token_tensor(nb::handle object, const char* name, const Pool& pool) {
  TensorView view(object, name, 3);
  if (pool.dtype) view.require_element_type(*pool.dtype);
  view.require_contiguous_from(2);
  require(view.shape(2) == pool.head_dim(), "queries, keys and values must have the pool's head_dim");
  return view;
}

void bind_write_kv(nb::handle key_object, nb::handle value_object, nb::handle pool_object, std::int64_t layer, nb::handle slot_mapping,
                   nb::handle key_scale, nb::handle value_scale, int num_threads) {
  const Pool pool(pool_object, key_scale, value_scale);
  const TensorView key = token_tensor(key_object, "key", pool);
  const TensorView value = token_tensor(value_object, "value", pool);
  const TensorView slots(slot_mapping, "slot_mapping", 1);
  require(key.shape(1) == pool.num_kv_heads() && value.shape(1) == pool.num_kv_heads(), "key and value must have the pool's KV heads");
  require(key.shape(0) == slots.shape(0) && value.shape(0) == slots.shape(0), "key, value and slot_mapping differ in tokens");
  const DType source = key.element_type();
  value.require_element_type(source);
  const std::int64_t bytes = element_size(source);
  WriteCall call = pool.write_call(layer, slots);
  call.key = key.data<const char>();
  call.key_token_stride = key.stride(0) * bytes;
  call.key_head_stride = key.stride(1) * bytes;
  call.value = value.data<const char>();
  call.value_token_stride = value.stride(0) * bytes;
  call.value_head_stride = value.stride(1) * bytes;
  call.key_scales = pool.key_scales;
  call.value_scales = pool.value_scales;
  call.source = source;
  const nb::gil_scoped_release release;
  write_kv(call, num_threads);
}

void bind_paged_attention(nb::handle output_object, nb::handle query_object, nb::handle pool_object, std::int64_t layer,
                          nb::handle block_tables, nb::handle query_start_loc, nb::handle seq_lens, float scale, std::int64_t window,
                          nb::handle key_scale, nb::handle value_scale, int num_threads) {
  const Pool pool(pool_object, key_scale, value_scale);
  const TensorView query = token_tensor(query_object, "query", pool);
  const TensorView output = token_tensor(output_object, "output", pool);
  output.require_element_type(query.element_type());
  const Sequences sequences(block_tables, query_start_loc, seq_lens);
  output.require_contiguous_from(0);
  require(output.shape(0) == query.shape(0) && output.shape(1) == query.shape(1), "output and query differ in shape");
  require(query.shape(1) > 0 && pool.num_kv_heads() > 0 && query.shape(1) % pool.num_kv_heads() == 0,
          "query heads are not a multiple of the pool's KV heads");
  require(scale > 0.0f, "scale must be positive");
  AttentionCall call = pool.attention_call(layer, sequences);
  call.query = query.data<const void>();
  call.query_token_stride = query.stride(0);
  call.query_head_stride = query.stride(1);
  call.output = output.data<void>();
  call.num_heads = static_cast<int>(query.shape(1));
  call.scale = scale;
  call.window = window;
  call.key_scales = pool.key_scales;
  call.value_scales = pool.value_scales;
  const BatchShape batch{query.shape(0), sequences.count(), pool.num_blocks()};
  const DType dtype = query.element_type();
  const nb::gil_scoped_release release;
  paged_attention(call, batch, dtype, num_threads);
}

NormCall norm_call(const TensorView& x, nb::handle weight, const TensorView& out, float epsilon) {
  x.require_contiguous_from(1);
  NormCall call{};
  call.x = x.data<const void>();
  call.x_stride = x.stride(0);
  call.weight = vector_data(weight, "weight", x.element_type(), x.shape(1), "weight has another length than the rows of x");
  call.out = out.data<void>();
  call.size = x.shape(1);
  call.epsilon = epsilon;
  return call;
}

void bind_rms_norm(nb::handle out_object, nb::handle x_object, nb::handle weight, float epsilon, int num_threads) {
  const TensorView x(x_object, "x", 2);
  const DType dtype = x.element_type();
  const TensorView out = matrix(out_object, "out", dtype, x.shape(0), x.shape(1));
  const NormCall call = norm_call(x, weight, out, epsilon);
  const nb::gil_scoped_release release;
  rms_norm(call, x.shape(0), dtype, num_threads);
}

void bind_add_rms_norm(nb::handle out_object, nb::handle residual_out_object, nb::handle x_object, nb::handle residual_object,
                       nb::handle weight, float epsilon, int num_threads) {
  const TensorView x(x_object, "x", 2);
  const DType dtype = x.element_type();
  const TensorView out = matrix(out_object, "out", dtype, x.shape(0), x.shape(1));
  const TensorView residual = matrix(residual_object, "residual", dtype, x.shape(0), x.shape(1), 1);
  const TensorView residual_out = matrix(residual_out_object, "residual_out", dtype, x.shape(0), x.shape(1));
  NormCall call = norm_call(x, weight, out, epsilon);
  call.residual = residual.data<const void>();
  call.residual_stride = residual.stride(0);
  call.residual_out = residual_out.data<void>();
  const nb::gil_scoped_release release;
  rms_norm(call, x.shape(0), dtype, num_threads);
}

void bind_silu_mul(nb::handle out_object, nb::handle gate_up_object, int num_threads) {
  const TensorView gate_up(gate_up_object, "gate_up", 2);
  const DType dtype = gate_up.element_type();
  gate_up.require_contiguous_from(1);
  require(gate_up.shape(1) % 2 == 0, "gate_up has an odd row length");
  const TensorView out = matrix(out_object, "out", dtype, gate_up.shape(0), gate_up.shape(1) / 2);
  const SiluMulCall call{gate_up.data<const void>(), gate_up.stride(0), out.data<void>(), out.shape(1)};
  const nb::gil_scoped_release release;
  silu_mul(call, gate_up.shape(0), dtype, num_threads);
}

void bind_rotary(nb::handle x_object, nb::handle cos, nb::handle sin, int num_threads) {
  const TensorView x(x_object, "x", 3);
  const DType dtype = x.element_type();
  x.require_contiguous_from(2);
  require(x.shape(2) % 2 == 0, "head_dim is odd");
  const Angles angles(cos, sin, x.shape(0), x.shape(2));
  const RotaryCall call{x.data<void>(), x.stride(0), x.stride(1), x.shape(1), angles.cos, angles.sin, angles.stride, x.shape(2) / 2};
  const nb::gil_scoped_release release;
  rotary(call, x.shape(0), dtype, num_threads);
}

void bind_prefer_huge_pages(nb::handle object) {
  const TensorView view(object, "tensor", 2);
  view.require_contiguous_from(0);
  const auto bytes = static_cast<std::size_t>(view.shape(0) * view.shape(1) * element_size(view.element_type()));
  void* data = view.data<void>();
  const nb::gil_scoped_release release;
  prefer_huge_pages(data, bytes);
}

void bind_take_huge_pages(nb::handle object) {
  const TensorView bytes(object, "bytes", 1);
  bytes.require_contiguous_from(0);
  auto* data = const_cast<std::uint8_t*>(bytes.uint8_data());
  const auto num_bytes = static_cast<std::size_t>(bytes.shape(0));
  const nb::gil_scoped_release release;
  take_huge_pages(data, num_bytes);
}

nb::object bind_map_file(int descriptor, std::int64_t offset, std::int64_t num_bytes, bool shared) {
  require(offset >= 0 && offset % 4096 == 0, "offset is none of a page");
  require(num_bytes > 0 && num_bytes % 4096 == 0, "num_bytes are no whole pages");
  struct Mapping {
    void* data;
    std::size_t num_bytes;
  };
  const auto size = static_cast<std::size_t>(num_bytes);
  auto mapping = std::make_unique<Mapping>(Mapping{map_file(descriptor, offset, size, shared), size});
  void* data = mapping->data;
  const nb::capsule owner(mapping.release(), [](void* pointer) noexcept {
    const std::unique_ptr<Mapping> ended(static_cast<Mapping*>(pointer));
    unmap_file(ended->data, ended->num_bytes);
  });
  return nb::cast(nb::ndarray<nb::pytorch, std::uint8_t, nb::ndim<1>, nb::device::cpu>(data, {size}, owner));
}

// A word of shared memory that limits the threads of regions between `begin` and `end`. It stays mapped for ever, because helpers may read
// it at any time.
class ThreadLimit {
 public:
  explicit ThreadLimit(nb::handle word) {
    auto view = std::make_unique<Py_buffer>();
    if (PyObject_GetBuffer(word.ptr(), view.get(), PyBUF_SIMPLE) != 0) throw nb::python_error();
    const bool is_word = view->len == sizeof(std::uint16_t);
    word_ = static_cast<const std::uint16_t*>(view.release()->buf);
    require(is_word, "a limit has two bytes");
  }
  void begin() const { limit_threads(word_); }
  void end() const { limit_threads(nullptr); }

 private:
  const std::uint16_t* word_;
};

}  // namespace
}  // namespace paged

NB_MODULE(_native, m) {
  using namespace nb::literals;
  m.def("instruction_set", [] { return std::string(paged::kernels().name); });
  m.def("available_instruction_sets", &paged::available_instruction_sets);
  m.def("set_instruction_set", [](const std::string& name) { paged::force_instruction_set(name); }, "name"_a);
  m.def("write_kv", &paged::bind_write_kv, "key"_a, "value"_a, "kv_pool"_a, "layer"_a, "slot_mapping"_a,
        "key_scale"_a.none(), "value_scale"_a.none(), "num_threads"_a);
  m.def("paged_attention", &paged::bind_paged_attention, "output"_a, "query"_a, "kv_pool"_a, "layer"_a, "block_tables"_a,
        "query_start_loc"_a, "seq_lens"_a, "scale"_a, "window"_a, "key_scale"_a.none(), "value_scale"_a.none(), "num_threads"_a);
  m.def("start_together", &paged::start_together, "whether"_a);
  nb::class_<paged::ThreadLimit>(m, "ThreadLimit")
      .def(nb::init<nb::handle>(), "word"_a)
      .def("begin", &paged::ThreadLimit::begin)
      .def("end", &paged::ThreadLimit::end);
  m.def("rms_norm", &paged::bind_rms_norm, "out"_a, "x"_a, "weight"_a, "epsilon"_a, "num_threads"_a);
  m.def("add_rms_norm", &paged::bind_add_rms_norm, "out"_a, "residual_out"_a, "x"_a, "residual"_a, "weight"_a, "epsilon"_a,
        "num_threads"_a);
  m.def("silu_mul", &paged::bind_silu_mul, "out"_a, "gate_up"_a, "num_threads"_a);
  m.def("rotary", &paged::bind_rotary, "x"_a, "cos"_a, "sin"_a, "num_threads"_a);
  paged::define_weights(m);
  paged::define_projection(m);
  paged::define_layer_stack(m);
  paged::define_sampling(m);
  paged::define_copy_digest(m);
  m.def("prefer_huge_pages", &paged::bind_prefer_huge_pages, "tensor"_a);
  m.def("take_huge_pages", &paged::bind_take_huge_pages, "bytes"_a);
  m.def("map_file", &paged::bind_map_file, "descriptor"_a, "offset"_a, "num_bytes"_a, "shared"_a);
}
