// A 128-bit fingerprint of a long buffer, at the speed of memory and on several threads.
//
// It must notice a changed, damaged or cut file, not an adversary: no cryptography, no dependency. Four chains of
// xor, rotate, multiply alternate over the 8-byte words. Each step is a bijection of its chain's state, so one changed word
// always changes the result, and the rotation carries high bits (signs, exponents) down into later products.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace laneformer {

namespace hashing {

constexpr size_t kBlock = size_t{4} << 20;  // hashed by one thread; the result does not depend on how many there are
constexpr uint64_t kOdd[2] = {0x9e3779b97f4a7c15ull, 0xd6e8feb86659fd93ull};
using Digest = std::array<uint64_t, 2>;

inline uint64_t step(uint64_t state, uint64_t word, int which) { return std::rotl(state ^ word, 29) * kOdd[which]; }
inline uint64_t finish(uint64_t x) {
  x = (x ^ (x >> 32)) * kOdd[0];
  return x ^ (x >> 29);
}

inline Digest hash_block(const char* data, size_t size) {
  uint64_t chain[4] = {size, ~size, size ^ kOdd[0], size ^ kOdd[1]};
  size_t at = 0;
  for (; at + 32 <= size; at += 32) {
    uint64_t words[4];
    std::memcpy(words, data + at, 32);
    for (int i = 0; i < 4; ++i) chain[i] = step(chain[i], words[i], i & 1);
  }
  uint64_t tail[4] = {};
  if (at < size) std::memcpy(tail, data + at, size - at);
  for (int i = 0; i < 4; ++i) chain[i] = finish(step(chain[i], tail[i], i & 1));
  Digest digest{};
  for (int i = 0; i < 4; ++i)
    for (int half = 0; half < 2; ++half) digest[half] = step(digest[half], chain[half ? 3 - i : i], half);
  return digest;
}

}  // namespace hashing

// 32 hexadecimal digits; the result does not depend on the number of threads.
inline std::string content_hash(const void* data, size_t size, int threads) {
  using namespace hashing;
  const auto* bytes = static_cast<const char*>(data);
  const size_t blocks = (size + kBlock - 1) / kBlock;
  std::vector<Digest> digests(blocks);
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t b; (b = next.fetch_add(1)) < blocks;)
      digests[b] = hash_block(bytes + b * kBlock, std::min(kBlock, size - b * kBlock));
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads && static_cast<size_t>(t) < blocks; ++t) others.emplace_back(work);
  work();
  for (auto& other : others) other.join();
  const Digest all = hash_block(reinterpret_cast<const char*>(digests.data()), digests.size() * sizeof(Digest));
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(all[0] ^ finish(size)),
                static_cast<unsigned long long>(all[1]));
  return text;
}

}  // namespace laneformer
