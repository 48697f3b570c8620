#pragma once

#include <nanobind/nanobind.h>

namespace paged {

// Adds copy_rows.
void define_copy_digest(nanobind::module_& m);

}  // namespace paged
