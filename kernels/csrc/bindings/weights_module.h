#pragma once

#include <nanobind/nanobind.h>

namespace paged {

// Adds what packs weights and multiplies by them: those of 8 and 4 bits (quantized.h) and those of bfloat16 (packed_linear.h).
void define_weights(nanobind::module_& m);

}  // namespace paged
