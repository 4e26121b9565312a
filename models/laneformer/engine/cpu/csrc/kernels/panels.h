// Products of many columns with fp32 activations where vector registers are few (AVX2).
//
// Weights are widened to fp32 once for all columns, a block of inputs at a time, so that the inner loop only loads and
// multiplies: 32 rows x 3 columns are 12 of 16 registers, and an input is read for 4 multiply-adds. Inputs are packed in
// the order of reading: columns that lie 4 KiB apart would share few sets of the first-level cache. Every sum has the
// order that it has for a single column (matmul.h), so no bit differs.
#pragma once
#include "matmul.h"

namespace laneformer {
namespace {

constexpr int kPanelColumns = 3, kPanelPairs = 128;  // widened weights are half of the first-level cache
constexpr int kLeastPanelColumns = 12;               // fewer do not pay for the widening

size_t panel_bytes(int k_pairs) { return sizeof(float) * 2 * k_pairs; }

// [block of pairs][even, odd][column][pair]
void pack_panels(const float* x, int x_stride, int k_pairs, int columns, char* out) {
  float* to = (float*)out;
  for (int k = 0; k < k_pairs; k += kPanelPairs) {
    const int pairs = least(k_pairs - k, kPanelPairs);
    for (int c = 0; c < columns; ++c) {
      const float* from = x + (size_t)c * x_stride + 2 * k;
      float *even = to + c * pairs, *odd = even + columns * pairs;
      for (int i = 0; i < pairs; ++i) even[i] = from[2 * i], odd[i] = from[2 * i + 1];
    }
    to += 2 * columns * pairs;
  }
}

// The even or odd inputs' weights of one tile, as [pair][row].
template <DType T>
INLINE void widen(const char* w, int pairs, int parity, float* out) {
  for (int k = 0; k < pairs; ++k, w += 2 * kPairBytes<T>, out += kTileRows)
    for (int g = 0; g < 2; ++g) {
      V16 weights[2];
      load_pair<T>(w, g, weights[0], weights[1]);
      store(out + 16 * g, parity ? weights[1] : weights[0]);
    }
}

// Adds products of inputs (COLUMNS, pairs) to `sums` (COLUMNS, rows of a tile), or begins them.
template <int COLUMNS>
void multiply_panel(const float* w, int pairs, const float* x, bool begins, float* sums) {
  constexpr int kRegisters = kTileRows / kWidth;
  F s[COLUMNS][kRegisters];
#pragma GCC unroll 3
  for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) s[c][i] = begins ? F{} : *(const F*)(sums + c * kTileRows + i * kWidth);
#pragma GCC unroll 2
  for (int k = 0; k < pairs; ++k, w += kTileRows) {
    F inputs[COLUMNS];
#pragma GCC unroll 3
    for (int c = 0; c < COLUMNS; ++c) inputs[c] = x[c * (long)pairs + k] - F{};
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) {
      const F weights = *(const F*)(w + i * kWidth);
#pragma GCC unroll 3
      for (int c = 0; c < COLUMNS; ++c) s[c][i] = fma_part(weights, inputs[c], s[c][i]);
    }
  }
#pragma GCC unroll 3
  for (int c = 0; c < COLUMNS; ++c)
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) *(F*)(sums + c * kTileRows + i * kWidth) = s[c][i];
}

// One tile's sums of even and of odd inputs. Each panel fetches its part of the next tile.
template <DType T>
INLINE void sum_panels(const char* w, int k_pairs, const float* x, int columns,
                       float (&sums)[2][kMaxColumns * kTileRows]) {
  constexpr decltype(&multiply_panel<1>) kByColumns[] = {multiply_panel<1>, multiply_panel<2>, multiply_panel<3>};
  constexpr int kLine = 2 * kPairBytes<T>;
  alignas(64) float wide[kPanelPairs * kTileRows];
  const int panels = 2 * ((columns + kPanelColumns - 1) / kPanelColumns);
  for (int k = 0; k < k_pairs; k += kPanelPairs) {
    const int pairs = least(k_pairs - k, kPanelPairs), lines = (pairs * kLine / 64 + panels - 1) / panels;
    const char *block = w + (size_t)k * kLine, *soon = block + tile_bytes(k_pairs, T);
    for (int parity = 0; parity < 2; ++parity) {
      parity ? widen<T>(block, pairs, 1, wide) : widen<T>(block, pairs, 0, wide);
      for (int c = 0; c < columns; c += kPanelColumns) {
        for (int i = 0; i < lines; ++i, soon += 64) __builtin_prefetch(soon, 0, 2);
        const int count = least(columns - c, kPanelColumns);
        kByColumns[count - 1](wide, pairs, x, !k, sums[parity] + c * kTileRows);
        x += count * pairs;
      }
    }
  }
}

template <DType T>
void multiply_panels(const void* tiles, int rows, int k_pairs, Inputs in, float* y, int y_stride, int columns) {
  if (columns < kLeastPanelColumns) return matmul<T>(tiles, rows, k_pairs, in, y, y_stride, columns);
  alignas(64) float sums[2][kMaxColumns * kTileRows];
  const char* w = (const char*)tiles;
  for (int row = 0; row < rows; row += kTileRows, w += tile_bytes(k_pairs, T)) {
    sum_panels<T>(w, k_pairs, (const float*)in.data, columns, sums);
    for (int c = 0; c < columns; ++c)
      for (int at = 0; at < kTileRows; at += 16) {
        const V16 total = load(sums[0] + c * kTileRows + at) + load(sums[1] + c * kTileRows + at);
        store_rows(y + (size_t)c * y_stride + row + at, scaled<T>(total, w, k_pairs, at), rows - row - at);
      }
  }
}

template <DType T>
constexpr Product kPanelProduct{panel_bytes, pack_panels, multiply_panels<T>, kLeastPanelColumns};

}  // namespace
}  // namespace laneformer
