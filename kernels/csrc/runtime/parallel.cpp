#include "runtime/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <array>
#include <chrono>
#include <mutex>
#include <system_error>
#include <thread>

namespace paged {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMostHelpers = 255;
// How long a helper looks for more before it sleeps: longer than the caller takes from one region of a step to the next, and shorter
// than another process notices.
constexpr auto kHelperSpins = std::chrono::microseconds(200);
// How long the caller does so before it leaves its core to a helper that has not finished: perhaps that one has none.
constexpr auto kCallerSpins = std::chrono::microseconds(100);

// How many threads a region may use, in memory that other processes write to; null: as many as it asks for.
std::atomic<const std::uint16_t*> limit_word{nullptr};

int limit() {
  const std::uint16_t* word = limit_word.load(std::memory_order_relaxed);
  return word == nullptr ? kMostHelpers + 1 : __atomic_load_n(word, __ATOMIC_RELAXED);
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Until `is_over` says so, or the time has passed. Returns what it said last.
template <class IsOver>
bool spin(Clock::duration limit, const IsOver& is_over) {
  if (is_over()) return true;
  const auto end = Clock::now() + limit;
  do {
    for (int i = 0; i < 32; ++i) {
      relax();
      if (is_over()) return true;
    }
    sched_yield();  // to threads of this process that have no other core, among them those of torch, and the one waited for
  } while (Clock::now() < end);
  return false;
}

// The state of one region, in one word that threads change as a whole.
struct State {
  std::uint32_t region;   // its number
  std::uint16_t places;   // for helpers that have not come yet; 0 once the region is closed
  std::uint16_t helpers;  // that have come and not finished
};

class Team;

// What `goes_on` has to know of its thread.
thread_local Team* led_by_this_thread = nullptr;
thread_local int helper_number = -1;

bool has_core(int helper) { return helper + 1 < limit(); }

// One region at a time. A helper reads `body_` and `context_` only after it has been counted, and the caller leaves the region only when
// nobody is counted any more, so that neither outlives its use.
class Team {
 public:
  // False when another thread has the team.
  bool run(void (*body)(void*), void* context, int num_threads) {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    const int places = start_helpers(num_threads - 1);
    body_ = body;
    context_ = context;
    state_.store({++region_, static_cast<std::uint16_t>(places), 0});
    num_places_ = places;
    num_woken_ = 0;
    wake_helpers();
    while (starts_together_.load(std::memory_order_relaxed) && places - state_.load().places < std::min(places, limit() - 1)) {
      sched_yield();
      wake_helpers();
    }
    led_by_this_thread = this;
    body(context);
    led_by_this_thread = nullptr;
    close();
    wait_for_helpers();
    return true;
  }

  // Those for which there are cores, which may become more while a region runs.
  void wake_helpers() {
    for (const int allowed = std::min(num_places_, limit() - 1); num_woken_ < allowed; ++num_woken_) helpers_[num_woken_].wake();
  }

  void start_together(bool whether) { starts_together_.store(whether); }

 private:
  struct alignas(64) Helper {
    std::atomic<std::uint32_t> is_asleep{0};

    void wake() {
      if (is_asleep.load() != 0 && is_asleep.exchange(0) != 0) is_asleep.notify_one();
    }
  };

  // How many there are, at most `wanted`: fewer where the system has refused a thread, which it is asked for once.
  int start_helpers(int wanted) {
    while (num_helpers_ < std::min(wanted, most_helpers_)) {
      try {
        std::thread helper([this, number = num_helpers_] { help(number); });
#if defined(__linux__)
        pthread_setname_np(helper.native_handle(), "kernel-helper");
#endif
        helper.detach();
      } catch (const std::system_error&) {
        most_helpers_ = num_helpers_;
        break;
      }
      ++num_helpers_;
    }
    return std::min(num_helpers_, wanted);
  }

  [[noreturn]] void help(int number) {
    Helper& helper = helpers_[number];
    helper_number = number;
    std::uint32_t done = 0;  // the last region that this helper was in, or came too late for
    for (;;) {
      State state{};
      const auto is_wanted = [&] { return (state = state_.load()).region != done && has_core(number); };
      if (!spin(kHelperSpins, is_wanted)) {
        helper.is_asleep.store(1);
        if (!is_wanted()) helper.is_asleep.wait(1);
        helper.is_asleep.store(0, std::memory_order_relaxed);
        continue;
      }
      done = state.region;
      while (state.places > 0) {
        const State next{state.region, static_cast<std::uint16_t>(state.places - 1), static_cast<std::uint16_t>(state.helpers + 1)};
        if (!state_.compare_exchange_weak(state, next)) continue;
        done = state.region;
        body_(context_);
        leave();
        break;
      }
    }
  }

  // A caller that has gone to sleep is woken by the last helper.
  void leave() {
    State state = state_.load(std::memory_order_relaxed);
    State next;
    do {
      next = {state.region, state.places, static_cast<std::uint16_t>(state.helpers - 1)};
    } while (!state_.compare_exchange_weak(state, next));
    if (next.helpers == 0 && caller_waits_.load() != 0) {
      caller_waits_.store(0);
      caller_waits_.notify_one();
    }
  }

  // Everything is taken: helpers that come now would find nothing.
  void close() {
    State state = state_.load(std::memory_order_relaxed);
    while (!state_.compare_exchange_weak(state, {state.region, 0, state.helpers})) {
    }
  }

  void wait_for_helpers() {
    const auto all_left = [this] { return state_.load().helpers == 0; };
    while (!spin(kCallerSpins, all_left)) {
      caller_waits_.store(1);
      if (!all_left()) caller_waits_.wait(1);
      caller_waits_.store(0, std::memory_order_relaxed);
    }
  }

  alignas(64) std::atomic<State> state_{State{0, 0, 0}};
  alignas(64) std::atomic<std::uint32_t> caller_waits_{0};
  std::atomic<bool> starts_together_{false};
  void (*body_)(void*) = nullptr;
  void* context_ = nullptr;
  std::uint32_t region_ = 0;
  int num_places_ = 0;
  int num_woken_ = 0;
  std::mutex mutex_;  // of the caller
  int num_helpers_ = 0;
  int most_helpers_ = kMostHelpers;
  std::array<Helper, kMostHelpers> helpers_;
};

// Never destroyed, because helpers outlive every destructor. A forked process has none of them and starts a team of its own.
std::atomic<Team*> team{nullptr};

Team& current_team() {
  static std::once_flag once;
  std::call_once(once, [] {
    team.store(new Team);
    pthread_atfork(nullptr, nullptr, [] { team.store(new Team); });
  });
  return *team.load(std::memory_order_acquire);
}

}  // namespace

bool goes_on() {
  if (led_by_this_thread != nullptr) led_by_this_thread->wake_helpers();
  return helper_number < 0 || has_core(helper_number);
}

void limit_threads(const std::uint16_t* word) { limit_word.store(word); }

void start_together(bool whether) { current_team().start_together(whether); }

void run_team(void (*body)(void*) noexcept, void* context, int num_threads) {
  if (num_threads <= 1 || !current_team().run(body, context, num_threads)) body(context);
}

}  // namespace paged
