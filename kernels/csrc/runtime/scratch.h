// Memory that a thread keeps between calls.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

#include "runtime/huge_pages.h"

namespace paged {

// Grows, never shrinks, one per thread: a fresh allocation of this size would be page-faulted in on every call.
class Scratch {
 public:
  static constexpr std::size_t kAlignment = 64;  // of the memory, in bytes

  float* floats(std::size_t count) {
    if (count > capacity_) {
      data_.reset(static_cast<float*>(::operator new(count * sizeof(float), kNewAlignment)));
      if (count * sizeof(float) >= kLarge) prefer_huge_pages(data_.get(), count * sizeof(float));
      capacity_ = count;
    }
    return data_.get();
  }

 private:
  static constexpr std::align_val_t kNewAlignment{kAlignment};
  static constexpr std::size_t kLarge = std::size_t{1} << 21;
  struct Delete {
    void operator()(float* data) const { ::operator delete(data, kNewAlignment); }
  };
  std::unique_ptr<float, Delete> data_;
  std::size_t capacity_ = 0;
};

}  // namespace paged
