// Waiting for another thread: first spin, as the answer is usually less than a microsecond away; then give the core up,
// as on a shared machine the other thread may need it. With more threads than cores it always does.
#pragma once
#if defined(__linux__)
#include <sched.h>
#endif

#include <thread>

namespace laneformer {

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int usable_cpus() {
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
#endif
  return static_cast<int>(std::thread::hardware_concurrency());
}

// The calling thread stays on one CPU; false where the system has no such call or does not allow it.
inline bool pin_to(int cpu) {
#if defined(__linux__)
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(cpu, &only);
  return sched_setaffinity(0, sizeof only, &only) == 0;
#else
  return cpu < 0;
#endif
}

template <class Ready>
void spin_until(int most_turns, const Ready& ready) {
  for (int turns = 0; !ready(); ++turns) {
    if (turns < most_turns)
      pause_briefly();
    else
      std::this_thread::yield();
  }
}

}  // namespace laneformer
