#pragma once

#include <nanobind/nanobind.h>

namespace paged {

// Adds sample_tokens and token_logprobs.
void define_sampling(nanobind::module_& m);

}  // namespace paged
