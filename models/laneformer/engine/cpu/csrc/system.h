// What is asked of the operating system: memory, CPUs, and waiting for another thread.
#pragma once
#if defined(__linux__)
#include <sched.h>
#endif
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

namespace laneformer {

inline size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// Zeroed, 128-byte aligned memory that is touched first by whoever writes it first; huge pages for the long streams.
class Pages {
 public:
  Pages() = default;
#if defined(__SANITIZE_ADDRESS__)
  // AddressSanitizer watches the heap and not mappings: the bytes after these are then a guard zone.
  explicit Pages(size_t size, bool = false) : size_(size ? size : 1) {
    if (posix_memalign(&base_, 128, size_)) throw std::bad_alloc();
    start_ = static_cast<char*>(std::memset(base_, 0, size_));
  }
  ~Pages() { std::free(base_); }
  static Pages sparse(size_t size) { return Pages(size); }
  void release(size_t, size_t) {}
#else
  explicit Pages(size_t size, bool huge = false) : size_(size ? size : 1) {
    constexpr size_t kHuge = size_t{2} << 20;
    const size_t slack = huge ? kHuge : 0;
    size_ += slack;
    base_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    const size_t at = reinterpret_cast<size_t>(base_);
    start_ = static_cast<char*>(base_) + (huge ? (kHuge - at % kHuge) % kHuge : 0);
#ifdef MADV_HUGEPAGE
    if (huge) madvise(start_, size, MADV_HUGEPAGE);  // a hint: without huge pages everything still works
#endif
  }
  ~Pages() {
    if (base_) munmap(base_, size_);
  }
  // Returns pages that take memory only when they are touched.
  static Pages sparse(size_t size) {
    Pages pages;
    pages.size_ = size ? size : 1;
    void* base = mmap(nullptr, pages.size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    pages.base_ = base;
    pages.start_ = static_cast<char*>(base);
#ifdef MADV_NOHUGEPAGE
    madvise(base, pages.size_, MADV_NOHUGEPAGE);
#endif
    return pages;
  }
  // Gives the memory of all whole pages of these bytes back; what they hold is lost.
  void release(size_t from, size_t size) {
    const size_t page = page_bytes(), first = (from + page - 1) / page * page, end = (from + size) / page * page;
#if defined(__linux__)
    if (first < end) madvise(start_ + first, end - first, MADV_DONTNEED);
#else
    if (first < end) madvise(start_ + first, end - first, MADV_FREE);
#endif
  }
#endif
  static Pages borrowed(const void* data) {  // somebody else's memory, to be read only
    Pages pages;
    pages.start_ = static_cast<char*>(const_cast<void*>(data));
    return pages;
  }
  Pages(Pages&& other) noexcept { swap(other); }
  Pages& operator=(Pages&& other) noexcept {
    swap(other);
    return *this;
  }
  char* bytes() const { return start_; }
  float* floats() const { return reinterpret_cast<float*>(start_); }

 private:
  void swap(Pages& other) {
    std::swap(base_, other.base_), std::swap(start_, other.start_), std::swap(size_, other.size_);
  }
  void* base_ = nullptr;
  char* start_ = nullptr;
  size_t size_ = 0;
};

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // waits some tens of cycles; `yield` does nothing on most cores
#endif
}

inline int usable_cpus() {
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
#endif
  return static_cast<int>(std::thread::hardware_concurrency());
}

// Binds the calling thread to one CPU; returns false where the system has no such call or does not allow it.
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

inline int64_t now_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Gives the core up, unless that has lately cost this thread a time slice of another program: from Linux 6.18 on, whoever
// yields stands behind all that others may still use. Returns false where it did not.
inline bool yielded(bool always) {
  constexpr int64_t kSlice_us = 300, kAvoided_us = 100'000;
  thread_local int64_t avoided_until_us = 0;
  const int64_t began_us = now_us();
  if (began_us < avoided_until_us && !always) return false;
  std::this_thread::yield();
  if (const int64_t ended_us = now_us(); ended_us - began_us > kSlice_us) avoided_until_us = ended_us + kAvoided_us;
  return true;
}

// First spin, as the answer is usually less than a microsecond away; then give the core up, as on a shared machine the
// other thread may need it. After about a millisecond of that, or where yielding costs too much, sleep, each time for about
// an eighth of the wait so far: a longer wait should not burn a core, and whoever ends it need not look for sleepers, as a
// futex would have him do at every module. With more threads than cores (max_turns 0) it is the other thread that a yield
// lets run, for as long as it takes.
constexpr int kYieldTurns = 2000;
template <class Ready>
void spin_until(int max_turns, const Ready& ready) {
  int64_t nap_us = 50;
  const bool always_yields = max_turns == 0;
  for (int turns = 0; !ready(); ++turns) {
    if (turns < max_turns) {
      pause_briefly();
    } else if (turns >= max_turns + kYieldTurns || !yielded(always_yields)) {
      std::this_thread::sleep_for(std::chrono::microseconds(nap_us));
      nap_us = std::min<int64_t>(nap_us + nap_us / 8, 1000);
    }
  }
}

}  // namespace laneformer
