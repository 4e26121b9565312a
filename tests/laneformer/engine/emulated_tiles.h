// The intrinsics of Intel's matrix unit in plain C++, as the Software Developer's Manual describes the instructions.
//
// What the processor answers with an invalid-opcode or general-protection fault ends the program with a message: a tile
// that is not configured, shapes that do not fit, an unknown palette. So does a configuration on top of another one: the
// engine releases the tiles after each product, so that nothing else ever runs with them.
#pragma once
#include <stdio.h>
#include <stdlib.h>
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps

namespace laneformer {
namespace {

struct Tile {
  int lines = 0, bytes = 0;  // of a line
  uint8_t data[16][64] = {};
};

struct TileFile {
  bool configured = false;
  Tile tiles[8];
};
thread_local TileFile tile_file;

void expect(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "emulated tiles: %s\n", what);
  abort();
}

Tile& configured_tile(int t) {
  expect(tile_file.configured, "used without a configuration");
  expect(t >= 0 && t < 8 && tile_file.tiles[t].lines > 0 && tile_file.tiles[t].bytes > 0, "a tile without a shape");
  return tile_file.tiles[t];
}

void _tile_loadconfig(const void* from) {
  const uint8_t* config = (const uint8_t*)from;
  expect(!tile_file.configured, "configured twice: the last user has not released them");
  expect(config[0] == 1, "a palette other than 1");
  for (int i = 2; i < 16; ++i) expect(config[i] == 0, "a reserved byte of the configuration is set");
  tile_file = {};
  for (int t = 0; t < 16; ++t) {
    const int bytes = config[16 + 2 * t] | config[17 + 2 * t] << 8, lines = config[48 + t];
    if (t >= 8) {
      expect(!bytes && !lines, "a shape for a tile that palette 1 does not have");
      continue;
    }
    expect(bytes <= 64 && lines <= 16 && !bytes == !lines, "a shape beyond 16 lines of 64 bytes");
    tile_file.tiles[t].lines = lines, tile_file.tiles[t].bytes = bytes;
  }
  tile_file.configured = true;
}

void _tile_release() { tile_file = {}; }

void _tile_zero(int t) { __builtin_memset(configured_tile(t).data, 0, sizeof(Tile::data)); }

void _tile_loadd(int t, const void* base, long stride) {
  Tile& tile = configured_tile(t);
  __builtin_memset(tile.data, 0, sizeof(tile.data));
  for (int line = 0; line < tile.lines; ++line)
    __builtin_memcpy(tile.data[line], (const char*)base + line * stride, tile.bytes);
}

void _tile_stored(int t, void* base, long stride) {
  const Tile& tile = configured_tile(t);
  for (int line = 0; line < tile.lines; ++line)
    __builtin_memcpy((char*)base + line * stride, tile.data[line], tile.bytes);
}

float without_denormal(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }

float bf16_at(const uint8_t* line, int index) {
  uint16_t half;
  __builtin_memcpy(&half, line + 2 * index, sizeof half);
  return without_denormal(__builtin_bit_cast(float, (uint32_t)half << 16));
}

// One multiply-add: inputs' denormals are zeros, one rounding to nearest even, a denormal result is zero.
float fused(float a, float b, float c) { return without_denormal(__builtin_fmaf(a, b, c)); }

// TDPBF16PS. Even and odd inputs have sums of their own, which start at zero; then both are added up, then to C.
void _tile_dpbf16ps(int to, int first, int second) {
  Tile &c = configured_tile(to), &a = configured_tile(first), &b = configured_tile(second);
  expect(to != first && to != second && first != second, "one tile in two places");
  expect(a.lines == c.lines && b.bytes == c.bytes && a.bytes == 4 * b.lines && c.bytes % 4 == 0, "shapes do not fit");
  for (int m = 0; m < c.lines; ++m)
    for (int n = 0; n < c.bytes / 4; ++n) {
      float even = 0.0f, odd = 0.0f, sum;
      for (int k = 0; k < a.bytes / 4; ++k) {
        even = fused(bf16_at(a.data[m], 2 * k), bf16_at(b.data[k], 2 * n), even);
        odd = fused(bf16_at(a.data[m], 2 * k + 1), bf16_at(b.data[k], 2 * n + 1), odd);
      }
      __builtin_memcpy(&sum, c.data[m] + 4 * n, sizeof sum);
      sum = without_denormal(without_denormal(sum) + without_denormal(even + odd));
      __builtin_memcpy(c.data[m] + 4 * n, &sum, sizeof sum);
    }
}

}  // namespace
}  // namespace laneformer
