#include "bindings/tensor.h"

#include <stdexcept>
#include <string>

namespace nb = nanobind;

namespace paged {
namespace {

// DLPack's C exchange API (specification 1.3): a capsule on the tensor's type with functions that skip the Python-level __dlpack__ call,
// which costs about two microseconds a tensor. Only the members up to the one used are declared.
struct ExchangeApi {
  std::uint32_t major_version;
  std::uint32_t minor_version;
  const ExchangeApi* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*borrow)(void* object, nb::dlpack::dltensor* out);  // non-owning; nonzero with a Python error set on failure
};

const ExchangeApi* exchange_api(nb::handle object) {
  const nb::object capsule = nb::getattr(object.type(), "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  return api->major_version == 1 && api->borrow != nullptr ? api : nullptr;
}

constexpr std::uint8_t kCodeInt = 0;
constexpr std::uint8_t kCodeUnsigned = 1;
constexpr std::uint8_t kCodeFloat = 2;
constexpr std::uint8_t kCodeBfloat = 4;
constexpr int kDeviceCpu = 1;

}  // namespace

TensorView::TensorView(nb::handle object, const char* name, int ndim) : name_(name) {
  if (const ExchangeApi* api = exchange_api(object)) {
    if (api->borrow(object.ptr(), &tensor_) != 0) throw nb::python_error();
    strides_ = tensor_.strides;
  } else {
    nb::ndarray<nb::device::cpu> array;
    if (!nb::try_cast(object, array)) fail("is not a CPU tensor");
    tensor_.data = array.data();
    tensor_.device = {kDeviceCpu, 0};
    tensor_.ndim = static_cast<std::int32_t>(array.ndim());
    tensor_.dtype = array.dtype();
    tensor_.shape = const_cast<std::int64_t*>(array.shape_ptr());
    strides_ = array.stride_ptr();
    owner_ = std::move(array);
  }
  if (tensor_.device.device_type != kDeviceCpu) fail("is not on the CPU");
  if (tensor_.ndim != ndim) fail("has " + std::to_string(tensor_.ndim) + " dimensions instead of " + std::to_string(ndim));
}

DType TensorView::element_type() const {
  const auto type = tensor_.dtype;
  if (type.code == kCodeFloat && type.bits == 32) return DType::f32;
  if (type.code == kCodeBfloat && type.bits == 16) return DType::bf16;
  if (type.code == kCodeFloat && type.bits == 16) return DType::f16;
  fail("is not float32, bfloat16 or float16");
}

void TensorView::require_contiguous_from(int axis) const {
  for (int i = tensor_.ndim - 1; i >= axis; --i) {
    if (shape(i) > 1 && stride(i) != contiguous_stride(i)) fail("is not contiguous from axis " + std::to_string(axis));
  }
}

void TensorView::require_element_type(DType dtype) const {
  if (element_type() != dtype) fail("has another element type than the other tensors");
}

template <class T>
const T* TensorView::integer_data() const {
  if (tensor_.dtype.code != kCodeInt || tensor_.dtype.bits != 8 * sizeof(T)) {
    fail("is not int" + std::to_string(8 * sizeof(T)));
  }
  require_contiguous_from(0);
  return data<const T>();
}
template const std::int32_t* TensorView::integer_data<std::int32_t>() const;
template const std::int64_t* TensorView::integer_data<std::int64_t>() const;

const std::uint8_t* TensorView::uint8_data() const {
  if (tensor_.dtype.code != kCodeUnsigned || tensor_.dtype.bits != 8) fail("is not uint8");
  require_contiguous_from(0);
  return data<const std::uint8_t>();
}

std::int64_t TensorView::contiguous_stride(int axis) const {
  std::int64_t stride = 1;
  for (int i = tensor_.ndim - 1; i > axis; --i) stride *= tensor_.shape[i];
  return stride;
}

void TensorView::fail(const std::string& what) const { throw std::invalid_argument(std::string(name_) + " " + what); }

}  // namespace paged
