#include "parallel.h"

#include <dlfcn.h>

namespace paged {
namespace {

// The entry that GCC emits for `#pragma omp parallel`; every libgomp exports it, and LLVM's runtime on Linux does so too.
using ParallelEntry = void (*)(void (*body)(void*), void* context, unsigned num_threads, unsigned flags);

std::atomic<ParallelEntry> parallel_entry{nullptr};

}  // namespace

bool borrow_openmp_runtime(const char* path) {
  void* library = dlopen(path, RTLD_NOLOAD | RTLD_NOW);  // the reference is kept: its threads outlive us
  if (library == nullptr) return false;
  const auto entry = reinterpret_cast<ParallelEntry>(dlsym(library, "GOMP_parallel"));
  if (entry != nullptr) parallel_entry.store(entry);
  return entry != nullptr;
}

void run_team(void (*body)(void*), void* context, int num_threads) {
  const ParallelEntry entry = parallel_entry.load(std::memory_order_relaxed);
  if (entry == nullptr) {
    body(context);
  } else {
    entry(body, context, static_cast<unsigned>(num_threads), 0);
  }
}

}  // namespace paged
