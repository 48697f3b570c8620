#include "runtime/huge_pages.h"

#include <cstdint>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace paged {
namespace {

constexpr std::uintptr_t kHugePage = 2 << 20;
#if defined(__linux__)
constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older headers lack
#endif

}  // namespace

void prefer_huge_pages(void* data, std::size_t num_bytes) {
#if defined(__linux__)
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t begin = (reinterpret_cast<std::uintptr_t>(data) + page - 1) / page * page;
  const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(data) + num_bytes) / page * page;
  if (begin < end) static_cast<void>(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE));
#else
  static_cast<void>(data);
  static_cast<void>(num_bytes);
#endif
}

void take_huge_pages(void* data, std::size_t num_bytes) {
#if defined(__linux__)
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(data) / kHugePage * kHugePage;
  const std::uintptr_t end = (reinterpret_cast<std::uintptr_t>(data) + num_bytes + kHugePage - 1) / kHugePage * kHugePage;
  // One at a time, so that one which the system refuses does not keep it from the others.
  for (std::uintptr_t page = begin; page < end; page += kHugePage) {
    auto* byte = reinterpret_cast<volatile std::uint8_t*>(page);
    *byte = *byte;  // of one that has nothing, the system makes no large page
    static_cast<void>(madvise(reinterpret_cast<void*>(page), kHugePage, kCollapse));
  }
#else
  static_cast<void>(data);
  static_cast<void>(num_bytes);
#endif
}

void* map_file(int descriptor, std::int64_t offset, std::size_t num_bytes, bool shared) {
#if defined(__linux__)
  // The system would choose any address: one is reserved that has room for the right one.
  void* reserved = mmap(nullptr, num_bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) throw std::bad_alloc();
  const auto first = reinterpret_cast<std::uintptr_t>(reserved);
  const std::uintptr_t begin = first + (static_cast<std::uintptr_t>(offset) - first) % kHugePage;
  const std::uintptr_t end = begin + num_bytes;
  void* data = mmap(reinterpret_cast<void*>(begin), num_bytes, PROT_READ | PROT_WRITE, (shared ? MAP_SHARED : MAP_PRIVATE) | MAP_FIXED,
                    descriptor, offset);
  if (data == MAP_FAILED) {
    munmap(reserved, num_bytes + kHugePage);
    throw std::bad_alloc();
  }
  if (begin > first) munmap(reserved, begin - first);
  if (first + kHugePage > begin) munmap(reinterpret_cast<void*>(end), first + kHugePage - begin);
  return data;
#else
  throw std::bad_alloc();
#endif
}

void unmap_file(void* data, std::size_t num_bytes) {
#if defined(__linux__)
  munmap(data, num_bytes);
#endif
}

}  // namespace paged
