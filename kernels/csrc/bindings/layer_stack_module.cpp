// Python's side of layer_stack.h.
#include "bindings/layer_stack_module.h"

#include <vector>

#include "bindings/arguments.h"
#include "bindings/pool_view.h"
#include "bindings/projection_module.h"
#include "layers/layer_stack.h"

namespace nb = nanobind;

namespace paged {
namespace {

// Keeps the projections and norms that its layers read.
class LayerStack {
 public:
  LayerStack(nb::object final_norm, float epsilon, float scale, std::int64_t num_heads, std::int64_t num_kv_heads, std::int64_t head_dim)
      : epsilon_(epsilon), scale_(scale), num_heads_(num_heads), num_kv_heads_(num_kv_heads), head_dim_(head_dim) {
    require(num_heads > 0 && num_kv_heads > 0 && num_heads % num_kv_heads == 0, "query heads are not a multiple of the KV heads");
    require(head_dim > 0 && head_dim % 2 == 0 && scale > 0.0f, "head_dim must be even and scale positive");
    const TensorView norm(final_norm, "final_norm", 1);
    hidden_size_ = norm.shape(0);
    dtype_ = norm.element_type();
    final_norm_ = keep_norm(final_norm, "final_norm", hidden_size_);
  }

  void add(nb::object qkv, nb::object output, nb::object gate_up, nb::object down, nb::object input_norm, nb::object norm, nb::object query_norm,
           nb::object key_norm, std::int64_t window) {
    StackedLayer layer{};
    layer.qkv = keep(qkv, hidden_size_, (num_heads_ + 2 * num_kv_heads_) * head_dim_);
    layer.output = keep(output, num_heads_ * head_dim_, hidden_size_);
    layer.down = keep(down, -1, hidden_size_);
    layer.gate_up = keep(gate_up, hidden_size_, 2 * layer.down->num_inputs);
    layer.input_norm = keep_norm(input_norm, "input_norm", hidden_size_);
    layer.norm = keep_norm(norm, "norm", hidden_size_);
    require(query_norm.is_none() == key_norm.is_none(), "query_norm and key_norm go together");
    if (!query_norm.is_none()) {
      layer.query_norm = keep_norm(query_norm, "query_norm", head_dim_);
      layer.key_norm = keep_norm(key_norm, "key_norm", head_dim_);
    }
    require(window >= 0, "window is negative");
    layer.window = window;
    layers_.push_back(layer);
  }

  void run(nb::handle hidden, nb::handle cos, nb::handle sin, nb::handle pool_object, nb::handle metadata,
           nb::handle last_tokens, nb::handle key_scales, nb::handle value_scales, int num_threads) const {
    const PoolView pool(pool_object, !key_scales.is_none());
    if (pool.dtype) pool.view.require_element_type(dtype_);
    require(pool.num_layers() == static_cast<std::int64_t>(layers_.size()), "the pool has another number of layers");
    require(pool.num_kv_heads() == num_kv_heads_ && pool.head_dim() == head_dim_, "the pool has other heads");
    StackCall call{};
    call.layers = &layers_;
    call.final_norm = final_norm_;
    call.epsilon = epsilon_;
    call.scale = scale_;
    call.hidden_size = hidden_size_;
    call.num_heads = num_heads_;
    call.num_kv_heads = num_kv_heads_;
    call.head_dim = head_dim_;
    call.dtype = dtype_;
    const TensorView input = matrix(hidden, "hidden", dtype_, -1, hidden_size_);
    call.hidden = input.data<void>();
    call.rows = input.shape(0);
    const Angles angles(cos, sin, call.rows, head_dim_);
    call.cos = angles.cos;
    call.sin = angles.sin;
    call.angle_stride = angles.stride;
    call.layer_bytes = pool.view.stride(2) * pool.element_bytes;
    call.write = write_call(pool, call.rows, metadata.attr("slot_mapping"));
    call.attention = batch_attention(pool, call.rows, metadata);
    require(key_scales.is_none() == value_scales.is_none(), "key_scales and value_scales go together");
    if (!key_scales.is_none()) {
      call.write.key_scales = call.attention.call.key_scales = scales(key_scales, "key_scales");
      call.write.value_scales = call.attention.call.value_scales = scales(value_scales, "value_scales");
    }
    LastRows last_rows{};
    if (!last_tokens.is_none()) {
      set_last_rows(last_rows, call, pool, last_tokens);
      call.last_rows = &last_rows;
    }
    const nb::gil_scoped_release release;
    layer_stack(call, num_threads);
  }

 private:
  // Any number of inputs where `num_inputs` < 0.
  const Projection* keep(const nb::object& object, std::int64_t num_inputs, std::int64_t num_outputs) {
    const Projection& layer = nb::cast<const OwnedProjection&>(object).layer;
    require(layer.dtype == dtype_, "the layers differ in their types");
    require((num_inputs < 0 || layer.num_inputs == num_inputs) && layer.num_outputs == num_outputs, "the layers do not fit together");
    kept_.push_back(object);
    return &layer;
  }

  const void* keep_norm(const nb::object& object, const char* name, std::int64_t size) {
    const void* data = vector_data(object, name, dtype_, size, "a norm has another length than its rows");
    kept_.push_back(object);
    return data;
  }

  WriteCall write_call(const PoolView& pool, std::int64_t num_tokens, nb::handle slot_mapping) const {
    const TensorView slots(slot_mapping, "slot_mapping", 1);
    require(slots.shape(0) == num_tokens, "hidden and slot_mapping differ in tokens");
    WriteCall call = pool.write_call(0, slots);
    call.source = dtype_;
    return call;
  }

  // `metadata` is an AttentionMetadata of paged_kernels.base.
  BatchAttention batch_attention(const PoolView& pool, std::int64_t num_tokens, nb::handle metadata) const {
    const Sequences sequences(metadata.attr("block_tables"), metadata.attr("query_start_loc"), metadata.attr("seq_lens"));
    AttentionCall call = pool.attention_call(0, sequences);
    call.num_heads = static_cast<int>(num_heads_);
    return {call, {num_tokens, sequences.count(), pool.num_blocks()}};
  }

  // `last_tokens` is a LastTokens of paged_kernels.base.
  void set_last_rows(LastRows& last, const StackCall& call, const PoolView& pool, nb::handle last_tokens) const {
    const TensorView rows(last_tokens.attr("rows"), "rows", 1);
    last.rows = rows.int64_data();
    for (std::int64_t i = 0; i < rows.shape(0); ++i)
      require(last.rows[i] < call.rows && last.rows[i] >= 0 && (i == 0 || last.rows[i - 1] < last.rows[i]), "the last tokens are not ascending rows");
    last.attention = batch_attention(pool, rows.shape(0), last_tokens.attr("metadata"));
    last.attention.call.key_scales = call.write.key_scales;
    last.attention.call.value_scales = call.write.value_scales;
  }

  const float* scales(nb::handle object, const char* name) const {
    const TensorView view = matrix(object, name, DType::f32, static_cast<std::int64_t>(layers_.size()), num_kv_heads_);
    return view.data<const float>();
  }

  std::vector<StackedLayer> layers_;
  std::vector<nb::object> kept_;
  const void* final_norm_;
  DType dtype_;
  float epsilon_;
  float scale_;
  std::int64_t hidden_size_;
  std::int64_t num_heads_;
  std::int64_t num_kv_heads_;
  std::int64_t head_dim_;
};

}  // namespace

void define_layer_stack(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<LayerStack>(m, "LayerStack")
      .def(nb::init<nb::object, float, float, std::int64_t, std::int64_t, std::int64_t>(), "final_norm"_a, "epsilon"_a, "scale"_a, "num_heads"_a,
           "num_kv_heads"_a, "head_dim"_a)
      .def("add", &LayerStack::add, "qkv"_a, "output"_a, "gate_up"_a, "down"_a, "input_norm"_a, "norm"_a, "query_norm"_a.none(),
           "key_norm"_a.none(), "window"_a)
      .def("run", &LayerStack::run, "hidden"_a, "cos"_a, "sin"_a, "kv_pool"_a, "metadata"_a,
           "last_tokens"_a.none(), "key_scales"_a.none(), "value_scales"_a.none(), "num_threads"_a);
}

}  // namespace paged
