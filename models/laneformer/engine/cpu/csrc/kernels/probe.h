// The bandwidth probe: plain read loops.
#pragma once
#include "vector.h"

namespace laneformer {
namespace {

template <int PREFETCH>
INLINE uint64_t read_stream(const char* p, size_t size) {
  I s[4][kParts] = {};
  for (size_t at = 0; at < size; at += 256) {
    if constexpr (PREFETCH > 0)
      for (int line = 0; line < 256; line += 64) __builtin_prefetch(p + at + PREFETCH + line);
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) EACH_PART s[u][i] ^= *(const I*)(p + at + 64 * u + 4 * kWidth * i);
  }
  uint64_t total = 0;
  for (auto& quarter : s)
    for (auto& part : quarter)
      for (int i = 0; i < kWidth; ++i) total += (uint32_t)part[i];
  return total;
}

uint64_t read(const void* bytes, size_t size, int variant) {
  const char* p = (const char*)bytes;
  if (variant == 0) return read_stream<0>(p, size);
  return variant == 1 ? read_stream<1024>(p, size) : read_stream<4096>(p, size);
}

}  // namespace
}  // namespace laneformer
