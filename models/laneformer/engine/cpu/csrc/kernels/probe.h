// The bandwidth probe: plain read loops.
#pragma once
#include "vector.h"

namespace laneformer {
namespace {

uint64_t read(const void* bytes, size_t size, size_t ahead) {
  const char* p = (const char*)bytes;
  I s[4][kParts] = {};
  for (size_t at = 0; at < size; at += 256) {
    for (int line = 0; line < 256; line += 64) __builtin_prefetch(p + at + ahead + line);
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) EACH_PART s[u][i] ^= *(const I*)(p + at + 64 * u + 4 * kWidth * i);
  }
  uint64_t total = 0;
  for (auto& quarter : s)
    for (auto& part : quarter)
      for (int i = 0; i < kWidth; ++i) total += (uint32_t)part[i];
  return total;
}

}  // namespace
}  // namespace laneformer
