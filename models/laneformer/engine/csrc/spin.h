// Waiting for another thread: first spin, as the answer is usually less than a microsecond away; then give the core up,
// as on a shared machine the other thread may need it.
#pragma once
#include <thread>

namespace laneformer {

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Ready>
void spin_until(const Ready& ready) {
  for (int turns = 0; !ready(); ++turns) {
    if (turns < 1000)
      pause_briefly();
    else
      std::this_thread::yield();
  }
}

}  // namespace laneformer
