// Row-wise operations on several threads; see NormCall, SiluMulCall and RotaryCall.
#pragma once

#include <cstdint>

#include "isa/kernel_table.h"

namespace paged {

void rms_norm(const NormCall& call, std::int64_t rows, DType dtype, int num_threads);
void silu_mul(const SiluMulCall& call, std::int64_t rows, DType dtype, int num_threads);
void rotary(const RotaryCall& call, std::int64_t rows, DType dtype, int num_threads);

}  // namespace paged
