#pragma once

#include <nanobind/nanobind.h>

namespace paged {

// Adds the class LayerStack. After define_projection.
void define_layer_stack(nanobind::module_& m);

}  // namespace paged
