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
constexpr int kPairColumns = 12;  // two groups of rows times these are 24 of the 32 registers

size_t pair_bytes(int k_pairs) { return sizeof(float) * k_pairs; }

// Pairs of bf16, the columns of a block side by side: [block][k_pairs][columns of the block].
void pack_pairs(const float* x, int x_stride, int k_pairs, int columns, char* out) {
  for (int first = 0, block; first < columns; first += block) {
    block = block_of(columns - first, kPairColumns);
    uint32_t* to = (uint32_t*)out + (size_t)first * k_pairs;
    for (int c = 0; c < block; ++c)
      for (int k = 0; k < k_pairs; k += 8) {
        uint32_t pairs[8];
        const __m512 values = _mm512_loadu_ps(x + (size_t)(first + c) * x_stride + 2 * k);
        _mm256_storeu_si256((__m256i*)pairs, (__m256i)_mm512_cvtneps_pbh(values));
        for (int i = 0; i < 8 && k + i < k_pairs; ++i) to[(size_t)(k + i) * block + c] = pairs[i];
      }
  }
}

template <int COLUMNS>
void multiply_pair_tile(const char* w, int k_pairs, const float* x, Stream soon, float* y, int y_stride, int valid) {
  __m512 sums[2][COLUMNS];
#pragma GCC unroll 12
  for (int c = 0; c < COLUMNS; ++c) sums[0][c] = sums[1][c] = _mm512_setzero_ps();
  for (int k = 0; k < k_pairs; ++k, w += 128, x += COLUMNS, soon.next += soon.step) {
    __builtin_prefetch(soon.next);
    __builtin_prefetch(soon.next + 64);
    const auto first = (__m512bh)_mm512_load_si512(w), second = (__m512bh)_mm512_load_si512(w + 64);
#pragma GCC unroll 12
    for (int c = 0; c < COLUMNS; ++c) {
      const auto pair = (__m512bh)_mm512_set1_ps(x[c]);
      sums[0][c] = _mm512_dpbf16_ps(sums[0][c], first, pair);
      sums[1][c] = _mm512_dpbf16_ps(sums[1][c], second, pair);
    }
  }
#pragma GCC unroll 12
  for (int c = 0; c < COLUMNS; ++c)
    for (int g = 0; g < 2; ++g) store_rows(y + c * y_stride + 16 * g, {(F)sums[g][c]}, valid - 16 * g);
}

void multiply_pairs(const void* tiles, int rows, int k_pairs, Inputs inputs, float* y, int y_stride, int columns) {
  constexpr decltype(&multiply_pair_tile<1>) kByColumns[] = {
      multiply_pair_tile<1>, multiply_pair_tile<2>, multiply_pair_tile<3>,  multiply_pair_tile<4>,
      multiply_pair_tile<5>, multiply_pair_tile<6>, multiply_pair_tile<7>,  multiply_pair_tile<8>,
      multiply_pair_tile<9>, multiply_pair_tile<10>, multiply_pair_tile<11>, multiply_pair_tile<12>};
  each_block(tiles, rows, k_pairs, DType::bf16, columns, kPairColumns, inputs.ahead,
             [&](const char* w, int row, int c, int block, Stream soon) {
               kByColumns[block - 1](w, k_pairs, (const float*)(inputs.data + c * inputs.stride), soon,
                                     y + c * y_stride + row, y_stride, rows - row);
             });
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
