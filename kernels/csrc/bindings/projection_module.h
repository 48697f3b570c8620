// Linear layers as decoder_layer.h takes them, from Python.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "layers/decoder_layer.h"

namespace paged {

// Keeps the tensors whose memory it reads.
struct OwnedProjection {
  Projection layer{};
  std::vector<nanobind::object> tensors;
};

// Adds the class Projection and what makes one.
void define_projection(nanobind::module_& m);

}  // namespace paged
