// What a warp's threads compute together, and numbers of 16 bits.
#pragma once
#include <math.h>

#include <array>

#include "machine.h"

inline uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
inline float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  uint32_t made = 0;
  for (int i = 0; i < 4; ++i) made |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return made;
}

// ---- 16-bit numbers, rounded to nearest even ----

inline uint32_t bf16_of(float value) {
  const uint32_t bits = bits_of(value);
  return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
// Scaling by powers of two moves the exponent, and lets the FPU round what is subnormal in 16 bits.
inline uint32_t fp16_of(float value) {
  const uint32_t sign = bits_of(value) >> 16 & 0x8000;
  const float size = fabsf(value);
  if (value != value) return 0x7fff;
  if (size >= 65520) return sign | 0x7c00;
  if (size < 0x1p-14f) return sign | (bits_of(size + 0.5f) - bits_of(0.5f));  // steps of 2^-24
  const uint32_t bits = bits_of(size) - (112u << 23);
  return sign | (bits + 0xfff + (bits >> 13 & 1)) >> 13;
}
inline float float_of_fp16(uint32_t half) {
  const uint32_t sign = (half & 0x8000) << 16, size = (half & 0x7fff) << 13;
  if (size >= 0x7c00u << 13) return float_of(sign | 0x7f800000 | size);  // infinite, or no number
  return float_of(sign | bits_of(float_of(size) * 0x1p112f));
}

namespace emulator {

// Two sets of values: a fast lane comes to the next shuffle before a slow one has taken its value of this one.
[[gnu::noinline]] inline uint32_t shuffle(uint32_t value, int mask) {
  if (mask < 0 || mask >= kLanes) fail("shuffle_xor with mask " + std::to_string(mask));
  Warp* warp = &my_warp();
  const int set = warp->time & 1, lane = me->lane;
  warp->exchanged[set][lane] = value;
  machine->arrive(kShuffle + mask);
  return warp->exchanged[set][lane ^ mask];
}

// mma.m16n8k16.row.col, float32 from 16 bits: `mine` has this lane's registers of a, then of b, as the PTX ISA lays them
// out. Each sum is made in the order of b's rows, every term rounded; a GPU adds some of them at once, and rounds
// elsewhere.
template <bool Bf16>
[[gnu::noinline]] inline void multiply(float (&sum)[4], const std::array<uint32_t, 6>& mine) {
  const auto half = [](uint32_t pair, bool high) {
    const uint32_t bits = high ? pair >> 16 : pair & 0xffff;
    return Bf16 ? float_of(bits << 16) : float_of_fp16(bits);
  };
  Warp* warp = &my_warp();
  auto& all = warp->fragments[warp->time & 1];
  const int lane = me->lane, c = lane % 4;
  memcpy(all[lane], mine.data(), sizeof mine);
  machine->arrive(kMultiply);
  for (int of = 0; of < 4; ++of)  // which of the thread's four sums
    for (int k = 0; k < 16; ++k) {
      const uint32_t row = all[lane / 4 * 4 + k % 8 / 2][k / 8 * 2 + of / 2];
      const uint32_t column = all[(2 * c + of % 2) * 4 + k % 8 / 2][4 + k / 8];
      sum[of] = fmaf(half(row, k % 2), half(column, k % 2), sum[of]);
    }
}

}  // namespace emulator
