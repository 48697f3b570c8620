#pragma once

#include <nanobind/nanobind.h>

namespace paged {

// Adds the class DecodeStack. After define_projection.
void define_decode_stack(nanobind::module_& m);

}  // namespace paged
