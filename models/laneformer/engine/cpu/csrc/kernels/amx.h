// Products of bf16 weights by Intel's matrix unit (AMX): 16 columns x 16 rows x 32 inputs an instruction.
//
// A tile of the tape is the unit's second operand as it lies: a group's 16 rows by input pairs, lines 128 bytes apart.
// The first operand is prepared: inputs in bf16, in blocks of 16 columns by 32 inputs, one KiB each. math="exact"
// splits an fp32 input into a sum of three bf16 parts, which holds its 24 bits, and adds up all three products in fp32.
// The unit rounds otherwise than a chain of multiply-adds does (about 1e-6 of a logit). So passes of few columns, which
// wait for memory anyway, keep the product and the bits of the instruction set below.
#pragma once
#include "bf16.h"
#if defined(LANEFORMER_EMULATED_TILES)
#include "emulated_tiles.h"  // the same intrinsics in plain C++, for tests
#endif

namespace laneformer {
namespace {

// By instruction counts: a tile of the tape takes 16 cycles a step of 32 inputs for each part and group on the unit,
// 3 * 2 * 16 = 96 for up to 16 columns; with multiply-adds 32 a column and 32 to widen, 160 for 4 columns.
constexpr int kUnitColumns = 4;
constexpr int kBlock = 16, kStepPairs = 16;  // columns of a block; pairs of inputs of a step
constexpr int kBlockBytes = kBlock * 64, kLineBytes = 2 * 64;  // a prepared block; one pair of a tape's tile
constexpr int kChunkSteps = 32;  // of inputs, so that the prepared blocks of a pass stay in the second-level cache

struct alignas(64) TileShapes {  // what ldtilecfg reads
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileShapes kTileShapes;

// gcc's intrinsics do not say that they read memory: what they read must have been written before this.
INLINE void written(const void* p) { asm volatile("" : : "r"(p) : "memory"); }

size_t plain_bytes(int k_pairs) { return 2 * sizeof(float) * k_pairs; }

void copy_inputs(const float* x, int x_stride, int k_pairs, int columns, char* out) {
  for (int c = 0; c < columns; ++c, out += plain_bytes(k_pairs))
    __builtin_memcpy(out, x + (size_t)c * x_stride, plain_bytes(k_pairs));
}

// What few columns take.
template <int PARTS>
constexpr Product kFewColumns = PARTS == 1 ? kBf16Product
                                           : Product{plain_bytes, copy_inputs, matmul<DType::bf16>};

INLINE int steps_of(int k_pairs) { return (k_pairs + kStepPairs - 1) / kStepPairs; }

template <int PARTS>
size_t block_line_bytes(int k_pairs) {
  const size_t few = kFewColumns<PARTS>.column_bytes(k_pairs), line = (size_t)steps_of(k_pairs) * PARTS * 64;
  return few > line ? few : line;
}

// 32 inputs as one line of each part's block; a part is what the parts before it have left, rounded to nearest even.
template <int PARTS>
INLINE void split_line(const float* x, char* out) {
  typedef uint32_t U __attribute__((vector_size(4 * kWidth)));
  typedef uint16_t H __attribute__((vector_size(2 * kWidth), may_alias, aligned(2)));
  for (int at = 0; at < 32; at += kWidth) {
    F rest = (F) * (const FU*)(x + at);
    for (int part = 0; part < PARTS; ++part) {
      const U bits = (U)rest, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
      *(H*)(out + part * kBlockBytes + 2 * at) = __builtin_convertvector(rounded, H);
      rest -= (F)(rounded << 16);
    }
  }
}

// [block of 16 columns][step of 32 inputs][part][column][32], zeros where there is no column or input.
template <int PARTS>
void split_inputs(const float* x, int x_stride, int k_pairs, int columns, char* out) {
  if (columns < kUnitColumns) return kFewColumns<PARTS>.prepare(x, x_stride, k_pairs, columns, out);
  for (int first = 0; first < columns; first += kBlock)
    for (int k = 0; k < 2 * k_pairs; k += 2 * kStepPairs, out += PARTS * kBlockBytes)
      for (int c = 0; c < kBlock; ++c) {
        float line[2 * kStepPairs] = {};
        const int left = 2 * k_pairs - k, count = left < 2 * kStepPairs ? left : 2 * kStepPairs;
        if (first + c < columns)
          for (int i = 0; i < count; ++i) line[i] = x[(size_t)(first + c) * x_stride + k + i];
        split_line<PARTS>(line, out + 64 * c);
      }
}

// `steps` steps of one tile of the tape times one or two blocks of columns, added to `y` unless they are the first. The
// last step's lines are those at `last`, if any; each step prefetches some lines of what comes later.
template <int PARTS, int BLOCKS>
void multiply_blocks(const char* w, int steps, const char* last, const char* x, size_t x_bytes, bool first,
                            const char* ahead, int ahead_bytes, float* y, int y_stride) {
  const long stride = sizeof(float) * y_stride;
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (BLOCKS == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, y, stride);
    _tile_loadd(1, y + 16, stride);
    if constexpr (BLOCKS == 2) {
      _tile_loadd(2, y + kBlock * y_stride, stride);
      _tile_loadd(3, y + kBlock * y_stride + 16, stride);
    }
  }
  for (int s = 0; s < steps; ++s, w += kStepPairs * kLineBytes, ahead += ahead_bytes) {
    if (last && s + 1 == steps) w = last;
    for (int at = 0; at < ahead_bytes; at += 64) __builtin_prefetch(ahead + at, 0, 2);
    _tile_loadd(4, w, kLineBytes);
    _tile_loadd(5, w + 64, kLineBytes);
#pragma GCC unroll 3
    for (int part = 0; part < PARTS; ++part, x += kBlockBytes) {
      _tile_loadd(6, x, 64);
      _tile_dpbf16ps(0, 6, 4);
      _tile_dpbf16ps(1, 6, 5);
      if constexpr (BLOCKS == 2) {
        _tile_loadd(7, x + x_bytes, 64);
        _tile_dpbf16ps(2, 7, 4);
        _tile_dpbf16ps(3, 7, 5);
      }
    }
  }
  _tile_stored(0, y, stride);
  _tile_stored(1, y + 16, stride);
  if constexpr (BLOCKS == 2) {
    _tile_stored(2, y + kBlock * y_stride, stride);
    _tile_stored(3, y + kBlock * y_stride + 16, stride);
  }
}

INLINE void copy_valid(const float* from, int from_stride, float* to, int to_stride, int rows, int columns) {
  for (int c = 0; c < columns; ++c)
    for (int r = 0; r < rows; ++r) to[(size_t)c * to_stride + r] = from[(size_t)c * from_stride + r];
}

template <int PARTS>
void multiply_on_unit(const void* tiles, int rows, int k_pairs, Inputs x, float* y, int y_stride, int columns) {
  const Product& few = kFewColumns<PARTS>;
  if (columns < kUnitColumns)
    return few.multiply(tiles, rows, k_pairs, {x.data, few.column_bytes(k_pairs), x.ahead}, y, y_stride, columns);
  constexpr int kWide = 2 * kBlock, kStepBytes = kStepPairs * kLineBytes;
  const int steps = steps_of(k_pairs), last_pairs = k_pairs % kStepPairs;
  const size_t x_bytes = (size_t)steps * PARTS * kBlockBytes, w_bytes = tile_bytes(k_pairs, DType::bf16);
  const int turns = (columns + kWide - 1) / kWide, ahead_bytes = (kStepBytes / 64 + turns - 1) / turns * 64;
  alignas(64) char last[kStepBytes] = {};  // what follows a tile's last pair may be no numbers
  alignas(64) float edge[kWide * kTileRows];
  _tile_loadconfig(&kTileShapes);
  for (int from = 0; from < steps; from += kChunkSteps) {
    const int count = steps - from < kChunkSteps ? steps - from : kChunkSteps;
    const bool padded = last_pairs && from + count == steps;
    const char* w = (const char*)tiles + (size_t)from * kStepBytes;
    for (int row = 0; row < rows; row += kTileRows, w += w_bytes) {
      if (padded) __builtin_memcpy(last, w + (size_t)(count - 1) * kStepBytes, (size_t)last_pairs * kLineBytes);
      written(last);
      const char* ahead = w + (turns > 1 ? w_bytes : x.ahead);  // of several turns each fetches a part of the next
      for (int c = 0; c < columns; c += kWide, ahead += count * ahead_bytes) {
        const int valid_rows = rows - row < kTileRows ? rows - row : kTileRows;
        const int valid_columns = columns - c < kWide ? columns - c : kWide;
        const bool whole = valid_rows == kTileRows && valid_columns % kBlock == 0;
        const char* blocks = x.data + c / kBlock * x_bytes + (size_t)from * PARTS * kBlockBytes;
        float *to = y + (size_t)c * y_stride + row, *out = whole ? to : edge;
        const int stride = whole ? y_stride : kTileRows;
        if (!whole && from) copy_valid(to, y_stride, edge, kTileRows, valid_rows, valid_columns);
        written(edge);
        const auto how = valid_columns > kBlock ? multiply_blocks<PARTS, 2> : multiply_blocks<PARTS, 1>;
        how(w, count, padded ? last : nullptr, blocks, x_bytes, !from, ahead, ahead_bytes, out, stride);
        if (!whole) copy_valid(edge, kTileRows, to, y_stride, valid_rows, valid_columns);
      }
    }
  }
  _tile_release();
}

template <int PARTS>
constexpr Product kUnitProduct{block_line_bytes<PARTS>, split_inputs<PARTS>, multiply_on_unit<PARTS>};

}  // namespace
}  // namespace laneformer
