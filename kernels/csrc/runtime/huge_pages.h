// Memory in large pages.
#pragma once

#include <cstddef>

namespace paged {

// Asks the system for large pages, which a sequential reader is held up by less, where memory has not been written to yet. Its content
// stays; a system that has none changes nothing.
void prefer_huge_pages(void* data, std::size_t num_bytes);

}  // namespace paged
