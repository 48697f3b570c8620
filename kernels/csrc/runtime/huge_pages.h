// Memory in large pages.
#pragma once

#include <cstddef>
#include <cstdint>

namespace paged {

// Asks the system for large pages, which a sequential reader is held up by less, where memory has not been written to yet. Its content
// stays; a system that has none changes nothing.
void prefer_huge_pages(void* data, std::size_t num_bytes);

// The same for memory that processes share, in pages that lie within [data, data + num_bytes) at least in part. It is given memory now. Large
// pages are taken even where the system does not give any by itself, which for such memory is the default (Linux 6.1 and later).
void take_huge_pages(void* data, std::size_t num_bytes);

// Maps `num_bytes` of a file, so that a part which begins with a large page in the file does so in memory. Without `shared`, writes go to a copy.
// `unmap_file` ends it. Throws std::bad_alloc if the system refuses.
void* map_file(int descriptor, std::int64_t offset, std::size_t num_bytes, bool shared);

void unmap_file(void* data, std::size_t num_bytes);

}  // namespace paged
