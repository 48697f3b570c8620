// Runs independent items on several threads: the caller's, and helpers of a team that the process keeps.
//
// Helpers are never waited for unless they have joined: whoever is awake takes the next items, and the caller computes what nobody has
// taken. A helper that is asleep, or whose core another process has, therefore costs nothing but its help, where a barrier of all
// threads would hold up the step until the machine's scheduler has come round to every one of them. There is one team: while a caller
// has it, others compute alone.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace paged {

// Calls body(context) on the caller's thread, and at the same time on up to `num_threads` - 1 helpers; returns when all of these calls
// have. Each call takes from `context` what is left to do. Body must not call this. It cannot throw: the frame that helpers use would be
// gone; without memory for scratch, the process ends.
void run_team(void (*body)(void*) noexcept, void* context, int num_threads);

// Whether the calling thread, in a region, takes another item. A caller always does, and wakes the helpers for which there are cores now. A
// helper stops once there is none for it.
bool goes_on();

// Limits how many threads regions use to what `word` says at any time: it is read before every item, and other processes may change it.
// Null: as many as a region asks for. Helpers may still read it after another one has been set.
void limit_threads(const std::uint16_t* word);

// Whether the caller begins only once all helpers have come: for tests, in whose small work they would find nothing left to do.
void start_together(bool whether);

// Calls item(i) for every i in [0, count), each once, in any order and on any of the threads.
template <class Item>
void parallel_for(int num_threads, std::int64_t count, const Item& item) {
  if (num_threads > count) num_threads = static_cast<int>(count);
  if (num_threads <= 1) {
    for (std::int64_t i = 0; i < count; ++i) item(i);
    return;
  }
  struct Shared {
    std::atomic<std::int64_t> next;
    std::int64_t count;
    const Item& item;
  } shared{{0}, count, item};
  run_team(
      [](void* context) noexcept {
        Shared& work = *static_cast<Shared*>(context);
        for (std::int64_t i; goes_on() && (i = work.next.fetch_add(1, std::memory_order_relaxed)) < work.count;) work.item(i);
      },
      &shared, num_threads);
}

// Calls body(begin, end) for spans that make up [0, count), on any of the threads. Spans are long at first, so that each thread reads
// long runs of memory, and become shorter, down to `least`, so that none waits long for another ("guided self-scheduling",
// Polychronopoulos and Kuck, 1987). The first `singles` go one at a time.
template <class Body>
void parallel_spans(int num_threads, std::int64_t count, std::int64_t least, const Body& body, std::int64_t singles = 0) {
  if (num_threads > count) num_threads = static_cast<int>(count);
  if (num_threads <= 1 || count <= least) {
    if (count > 0) body(std::int64_t{0}, count);
    return;
  }
  struct Shared {
    std::atomic<std::int64_t> next;
    std::int64_t count;
    std::int64_t least;
    std::int64_t singles;
    std::int64_t divisor;
    const Body& body;
  } shared{{0}, count, least, singles, 2 * num_threads, body};
  run_team(
      [](void* context) noexcept {
        Shared& work = *static_cast<Shared*>(context);
        std::int64_t begin = work.next.load(std::memory_order_relaxed);
        while (begin < work.count && goes_on()) {
          const std::int64_t length = begin < work.singles ? 1 : std::max(work.least, (work.count - begin) / work.divisor);
          const std::int64_t end = std::min(work.count, begin + length);
          if (!work.next.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
          work.body(begin, end);
          begin = work.next.load(std::memory_order_relaxed);
        }
      },
      &shared, num_threads);
}

}  // namespace paged
