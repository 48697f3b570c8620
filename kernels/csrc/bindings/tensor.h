// A tensor of the caller's framework, seen through DLPack without copying. torch is not needed at build time. The view borrows: it is
// valid while the Python object is, that is for the duration of one call.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <stdexcept>

#include "simd/element_types.h"

namespace paged {

// Throws std::invalid_argument, which Python sees as ValueError, unless `condition` holds.
inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

class TensorView {
 public:
  // Throws std::invalid_argument, naming `name`, unless the object is a CPU tensor of `ndim` dimensions.
  TensorView(nanobind::handle object, const char* name, int ndim);

  std::int64_t shape(int axis) const { return tensor_.shape[axis]; }
  std::int64_t stride(int axis) const { return strides_ != nullptr ? strides_[axis] : contiguous_stride(axis); }
  DType element_type() const;  // throws std::invalid_argument unless float32, bfloat16 or float16
  void require_contiguous_from(int axis) const;
  void require_element_type(DType dtype) const;

  template <class T>
  T* data() const {
    return reinterpret_cast<T*>(static_cast<char*>(tensor_.data) + tensor_.byte_offset);
  }
  const std::uint8_t* uint8_data() const;
  const std::int32_t* int32_data() const { return integer_data<std::int32_t>(); }
  const std::int64_t* int64_data() const { return integer_data<std::int64_t>(); }

 private:
  template <class T>
  const T* integer_data() const;
  std::int64_t contiguous_stride(int axis) const;
  [[noreturn]] void fail(const std::string& what) const;

  nanobind::dlpack::dltensor tensor_{};
  const std::int64_t* strides_ = nullptr;
  const char* name_;
  std::optional<nanobind::ndarray<nanobind::device::cpu>> owner_;  // holds an import through __dlpack__
};

}  // namespace paged
