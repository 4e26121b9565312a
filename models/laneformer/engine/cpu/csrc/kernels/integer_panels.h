// Products of integers with many columns: a tile's weights are unpacked once for all of them, to a byte each.
//
// A panel holds kPanelGroups groups of inputs of one tile, in the first-level cache: bytes as `dot` multiplies them, scales
// and minima in fp32. Every sum has the order that it has for a single column (integer.h), so no bit differs.
#pragma once
#include "integer.h"

namespace laneformer {
namespace {

constexpr int kPanelGroups = 16;
constexpr int kUnpackedColumns = 4;       // of a block; a divisor of kMaxColumns, as the last block is whole
constexpr int kLeastUnpackedColumns = 9;  // fewer do not pay for the unpacking

struct IntegerPanel {
  alignas(64) char words[kPanelGroups][2][kGroupInputs / 4][64];  // [group of inputs][group of rows][word][row]
  alignas(64) float scales[kPanelGroups][2][kTileRows];           // of all inputs of a group, or of each half
  alignas(64) float minima[kPanelGroups][kTileRows];
};

// Unpacks the next `groups` groups of a tile.
template <DType T>
void unpack_panel(TapePlace<T>& at, int groups, bool first, size_t ahead, IntegerPanel& out) {
  for (int count = 0; count < groups; ++count, at.close()) {
    const PackedGroup<T> packed = at.open(first && !count, ahead);
#pragma GCC unroll 2
    for (int g = 0; g < 2; ++g) {
#pragma GCC unroll 8
      for (int k = 0; k < kGroupInputs / 4; ++k) EACH_PART {
        const I word = packed.word(g, i, k);
        *(I*)(out.words[count][g][k] + 4 * i * kWidth) = kSigned<T> && kOffset ? word ^ (int32_t)0x80808080 : word;
      }
      for (int half = 0; half < kScales<T> && T != DType::int8; ++half)
        store(out.scales[count][half] + 16 * g, packed.scales(g, half));
      if constexpr (kMinima<T> != 0) store(out.minima[count] + 16 * g, packed.minima(g));
    }
  }
}

struct UnpackedGroup {
  static constexpr bool kBiased = kOffset != 0;
  const IntegerPanel& panel;
  int group;

  INLINE I word(int g, int part, int k) const { return *(const I*)(panel.words[group][g][k] + 4 * part * kWidth); }
  INLINE V16 scales(int g, int half) const { return load(panel.scales[group][half] + 16 * g); }
  INLINE V16 minima(int g) const { return load(panel.minima[group] + 16 * g); }
};

// The type that stands for all whose unpacked groups are multiplied alike.
template <DType T>
constexpr DType kUnpacked = T == DType::int8    ? T
                            : kScales<T> == 2   ? DType::q6_k
                            : kMinima<T> != 0   ? DType::q4_min
                            : kSigned<T>        ? DType::q8
                                                : DType::q4;

// Where a tile's products go.
struct TileOutput {
  float* y;
  size_t stride;
  int rows, columns;        // that are left
  const float* row_scales;  // of int8
};

// Adds a panel's `groups` groups times COLUMNS columns to `totals` (COLUMNS, rows of a tile), or begins them; the last
// panel writes the outputs, a few after each block, so that the stores do not wait for each other.
template <DType T, int COLUMNS>
void multiply_panel_columns(const IntegerPanel& panel, int groups, const char* x, size_t stride, bool begins,
                            float* totals, const TileOutput* out) {
  V16 total[2][COLUMNS];
  for (int g = 0; g < 2; ++g)
    for (int c = 0; c < COLUMNS; ++c)
      total[g][c] = begins ? splat(0.0f) : load(totals + c * kTileRows + 16 * g);
  for (int k = 0; k < groups; ++k, x += sizeof(RoundedGroup))
    add_group<T, COLUMNS>(UnpackedGroup{panel, k}, kGroupInputs / 2, x, stride, total);
#pragma GCC unroll 2
  for (int g = 0; g < 2; ++g)
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c) {
      if (!out) {
        store(totals + c * kTileRows + 16 * g, total[g][c]);
      } else if (c < out->columns) {
        if constexpr (T == DType::int8) total[g][c] = total[g][c] * load(out->row_scales + 16 * g);
        store_rows(out->y + c * out->stride + 16 * g, total[g][c], out->rows - 16 * g);
      }
    }
}

template <DType T>
void multiply_unpacked_tile(const char* w, int k_pairs, Inputs in, TileOutput out) {
  constexpr auto multiply = multiply_panel_columns<kUnpacked<T>, kUnpackedColumns>;
  IntegerPanel panel;
  alignas(64) float totals[kMaxColumns * kTileRows];
  TapePlace<T> at(w, k_pairs, in.groups_before);
  const int all = (int)groups_of(k_pairs), panels = (all + kPanelGroups - 1) / kPanelGroups;
  out.row_scales = (const float*)(w + (size_t)k_pairs * 64);
  for (int i = 0, done = 0; i < panels; ++i) {
    const int groups = all * (i + 1) / panels - done;
    unpack_panel<T>(at, groups, !i, in.ahead, panel);
    TileOutput rest = out;
    const int part = groups * kTapeBytes<T> / ((out.columns + kUnpackedColumns - 1) / kUnpackedColumns);
    const char* next = at.w;  // of which each block fetches its part, so that memory is read while there is no other use of it
    for (int c = 0; c < out.columns; c += kUnpackedColumns) {
      for (const char* end = next + part; next < end; next += 64) __builtin_prefetch(next, 0, 2);
      multiply(panel, groups, in.data + c * in.stride + done * sizeof(RoundedGroup), in.stride, !i, totals + c * kTileRows,
               i + 1 == panels ? &rest : nullptr);
      rest.y += kUnpackedColumns * rest.stride, rest.columns -= kUnpackedColumns;
    }
    done += groups;
  }
}

template <DType T>
void multiply_integers(const void* tiles, int rows, int k_pairs, Inputs in, float* y, int y_stride, int columns) {
  constexpr decltype(&multiply_rounded_tile<T, 1>) kByColumns[] = {
      multiply_rounded_tile<T, 1>, multiply_rounded_tile<T, 2>, multiply_rounded_tile<T, 3>,
      multiply_rounded_tile<T, 4>};
  const char* w = (const char*)tiles;
  for (int row = 0; row < rows; row += kTileRows, w += tile_bytes(k_pairs, T, in.groups_before)) {
    if (columns >= kLeastUnpackedColumns) {
      multiply_unpacked_tile<T>(w, k_pairs, in, {y + row, (size_t)y_stride, rows - row, columns, nullptr});
      continue;
    }
    for (int c = 0, block; c < columns; c += block) {
      block = block_of(columns - c, kRoundedColumns);
      kByColumns[block - 1](w, k_pairs, in.data + c * in.stride, in.stride, c ? 0 : in.ahead,
                            in.groups_before, y + (size_t)c * y_stride + row, y_stride, rows - row);
    }
  }
}

template <DType T>
constexpr Product kIntegerProduct{rounded_group_bytes, round_groups<T>, multiply_integers<T>};

}  // namespace
}  // namespace laneformer
