// Zeroed, 64-byte aligned memory that is touched first by whoever writes it first; huge pages for the long streams.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace laneformer {

class Pages {
 public:
  Pages() = default;
#if defined(__SANITIZE_ADDRESS__)
  // AddressSanitizer watches the heap and not mappings: the bytes after these are then a guard zone.
  explicit Pages(size_t size, bool = false) : size_(size ? size : 1) {
    if (posix_memalign(&base_, 64, size_)) throw std::bad_alloc();
    start_ = static_cast<char*>(std::memset(base_, 0, size_));
  }
  ~Pages() { std::free(base_); }
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

}  // namespace laneformer
