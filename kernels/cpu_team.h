// The threads that compute one call together.
//
// Work is cut in phases. In a phase each thread takes items until none is left, and then waits for the others. Waiting for a
// microsecond or two by spinning is much cheaper than sleeping, which OpenMP's own barriers do under a passive wait policy; but
// where a thread has lost its processor to another program, spinning would keep it from coming back, so it ends in yielding.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace phloem {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// What the threads of a call share: how many have arrived at the end of a phase, and how many items of it are claimed.
struct Team {
  int size = 1;
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<uint32_t> phase{0};
  alignas(64) std::atomic<int64_t> claimed{0};
};

// One thread of a team. All members call the same methods in the same order.
class Member {
 public:
  Member(Team& team, int index) : index(index), team_(team) {}
  const int index;

  // The next item of this phase, each given to one thread; counts on beyond the last.
  int64_t claim() { return team_.claimed.fetch_add(1, std::memory_order_relaxed); }

  // Ends the phase: returns when all members are here. What they wrote is visible then.
  void meet() {
    const uint32_t now = team_.phase.load(std::memory_order_relaxed);
    if (team_.arrived.fetch_add(1, std::memory_order_acq_rel) == team_.size - 1) {
      team_.arrived.store(0, std::memory_order_relaxed);
      team_.claimed.store(0, std::memory_order_relaxed);
      team_.phase.store(now + 1, std::memory_order_release);
      return;
    }
    for (int i = 0; team_.phase.load(std::memory_order_acquire) == now; i++) {
      if (i < SPINS) pause();
      else std::this_thread::yield();
    }
  }

  // A phase: run(item) for each of `count` items, whoever is free.
  template <class Run> void share(int64_t count, Run run) {
    for (int64_t item = claim(); item < count; item = claim()) run(item);
    meet();
  }

  // A phase: run(item) for each of `count` items, to each thread its run of them.
  template <class Run> void split(int64_t count, Run run) {
    const int64_t end = count * (index + 1) / team_.size;
    for (int64_t item = count * index / team_.size; item < end; item++) run(item);
    meet();
  }

 private:
  static constexpr int SPINS = 1000;
  Team& team_;
};

// Calls run(member) on each thread of a new team.
template <class Run> void in_team(int num_threads, Run run) {
  Team team;
#if defined(_OPENMP)
  if (num_threads > 1) {
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp single
      team.size = omp_get_num_threads();
      Member member(team, omp_get_thread_num());
      run(member);
    }
    return;
  }
#endif
  Member member(team, 0);
  run(member);
}

}  // namespace phloem
