// Which kernels this process uses: the best the processor offers, unless a test forces another.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "isa/kernel_table.h"

namespace paged {

const KernelTable& kernels();

// Returns the sets that this processor can run, best first.
std::vector<std::string> available_instruction_sets();

// Throws std::invalid_argument for a name that is unknown or not available here.
void force_instruction_set(std::string_view name);

}  // namespace paged
