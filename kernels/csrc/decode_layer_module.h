#pragma once

#include <nanobind/nanobind.h>

namespace paged {

// Adds the class Projection and the functions that use it.
void define_decode_layer(nanobind::module_& m);

}  // namespace paged
