// Linear layers as decoder_layer.h takes them, from Python, and views of tensors that go with them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "decoder_layer.h"
#include "tensor.h"

namespace paged {

// Keeps the tensors whose memory it reads.
struct OwnedProjection {
  Projection layer{};
  std::vector<nanobind::object> tensors;
};

// Checks that `object` is contiguous, [rows, size]; rows < 0 takes any number of them.
TensorView rows_of(nanobind::handle object, const char* name, DType dtype, std::int64_t rows, std::int64_t size);

// Checks a norm's weight, `[size]`, and returns its address.
const void* norm_data(nanobind::handle object, const char* name, DType dtype, std::int64_t size);

// Adds the class Projection and what makes one.
void define_projection(nanobind::module_& m);

}  // namespace paged
