// Products of bf16 weights with activations rounded to bf16.
#pragma once
#include "matmul.h"

namespace laneformer {
namespace {

INLINE uint32_t bf16_bits(float x) {  // round to nearest even, in the high half
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  return (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
}

#if defined(__AVX512BF16__)
size_t pair_bytes(int k_pairs) { return sizeof(float) * k_pairs; }

void pack_pairs(const float* x, int x_stride, int k_pairs, int columns, char* out) {
  for (int c = 0; c < columns; ++c)
    for (int i = 0; i < k_pairs; ++i, out += sizeof(float)) {
      const float* pair_of = x + (size_t)c * x_stride + 2 * i;
      const uint32_t pair = (bf16_bits(pair_of[0]) >> 16) | bf16_bits(pair_of[1]);
      __builtin_memcpy(out, &pair, sizeof pair);
    }
}

// Activations are packed bf16 pairs. Four accumulators per column: the instruction's latency is longer than an FMA's.
template <int COLUMNS>
INLINE void multiply_bf16_pairs(const char* w, int k_pairs, const float* x, int x_stride, float* y, int y_stride,
                                int valid) {
  __m512 sums[2][2][COLUMNS];
  for (auto& parity : sums)
    for (auto& group : parity)
      for (auto& s : group) s = _mm512_setzero_ps();
  for (int k = 0; k < k_pairs; ++k, w += 128) {
    if constexpr (COLUMNS == 1) {
      __builtin_prefetch(w + LANEFORMER_PREFETCH);
      __builtin_prefetch(w + LANEFORMER_PREFETCH + 64);
    }
    for (int c = 0; c < COLUMNS; ++c) {
      const auto pair = (__m512bh)_mm512_set1_ps(x[c * x_stride + k]);
      for (int g = 0; g < 2; ++g) {
        const auto weights = (__m512bh)_mm512_load_si512(w + 64 * g);
        // rotate the accumulators instead of indexing by k & 1, so that they stay in registers
        const __m512 next = _mm512_dpbf16_ps(sums[0][g][c], weights, pair);
        sums[0][g][c] = sums[1][g][c];
        sums[1][g][c] = next;
      }
    }
  }
  for (int g = 0; g < 2; ++g)
    for (int c = 0; c < COLUMNS; ++c) {
      V16 total;
      total.part[0] = (F)_mm512_add_ps(sums[0][g][c], sums[1][g][c]);
      store_rows(y + c * y_stride + 16 * g, total, valid - 16 * g);
    }
}

void multiply_pairs(const void* tiles, int rows, int k_pairs, Inputs inputs, float* y, int y_stride, int columns) {
  const char* w = (const char*)tiles;
  const float* x = (const float*)inputs.data;
  const int x_stride = (int)(inputs.stride / sizeof(float));
  for (int row = 0; row < rows; row += kTileRows, w += tile_bytes(k_pairs, DType::bf16)) {
    int c = 0;
    for (; c + 4 <= columns; c += 4)
      multiply_bf16_pairs<4>(w, k_pairs, x + c * x_stride, x_stride, y + c * y_stride + row, y_stride, rows - row);
    for (; c < columns; ++c)
      multiply_bf16_pairs<1>(w, k_pairs, x + c * x_stride, x_stride, y + c * y_stride + row, y_stride, rows - row);
  }
}

constexpr Product kBf16Product{pair_bytes, pack_pairs, multiply_pairs};
#else
// The same meaning without the instruction: rounded inputs, fp32 products.
size_t rounded_bytes(int k_pairs) { return sizeof(float) * 2 * k_pairs; }

void round_inputs(const float* x, int x_stride, int k_pairs, int columns, char* out) {
  for (int c = 0; c < columns; ++c)
    for (int i = 0; i < 2 * k_pairs; ++i)
      ((float*)out)[(size_t)c * 2 * k_pairs + i] = __builtin_bit_cast(float, bf16_bits(x[(size_t)c * x_stride + i]));
}

constexpr Product kBf16Product{rounded_bytes, round_inputs, matmul<DType::bf16>};
#endif

}  // namespace
}  // namespace laneformer
