// Weights by a rule instead of from a checkpoint, written where the kernel of passes reads them.
//
// A bundle for a bare machine has no room for weights (tools/bench/bundle.py). A number is a function of its matrix'
// seed and of its place in that matrix, so the host that made the reference has the same ones (tools/bench/rule.py).
// Each warp writes its own tape, tile by tile in the order of columns.cuh; what fills up the last chunk stays as it is.
#ifdef EMULATED
#include "emulator.h"
#else
#include "primitives.cuh"
#endif
#include "columns.cuh"

struct Fill {
  char* tapes;
  const uint64_t* tape_at;  // [warp + 1] bytes
  uint16_t* embedding;      // (V, D)
  float* norms;             // norm_numbers of them
  uint64_t norm_numbers;
  int first_lane;
  int exponents[kHead + 2];  // by matrix, then the embedding's: numbers are odd integers below 256 times 2^-exponent
};

constexpr uint32_t kSeeds = kHead + 3;  // of a layer: the matrices'; in the first layer, of the embedding and norms too

DEVICE uint32_t mixed(uint32_t x) {
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu;
  return x ^ x >> 16;
}
// odd, from -255 to 255: eight bits, which bf16 and fp16 hold exactly
DEVICE int odd_number(uint32_t seed, uint32_t place) {
  return 2 * static_cast<int>(mixed(place ^ mixed(seed + 1)) >> 24) - 255;
}
// six bits around 1
DEVICE float norm_number(uint32_t place) {
  return 1.0f + (static_cast<int>(mixed(place ^ mixed(kHead + 3)) >> 26) - 32) * 0.0078125f;
}
DEVICE float number(uint32_t seed, uint32_t place, int exponent) {
  return odd_number(seed, place) * float_of(static_cast<uint32_t>(127 - exponent) << 23);
}
DEVICE uint32_t pair_of(uint32_t seed, uint32_t place, int exponent) {
  return pack_halves(number(seed, place, exponent), number(seed, place + 1, exponent));
}

struct Filling {
  const Fill& p;
  uint4* to;  // of this thread, in the next segment of its warp
  int lane, group, warp, thread;

  template <int Op>
  DEVICE uint4 numbers(uint32_t seed, int row, int column) const {
    const int exponent = p.exponents[Op];
    const uint32_t upper = (static_cast<uint32_t>(lane) * kUnits[Op] * kTile + row + thread / 4) * kColumns[Op];
    const uint32_t place = upper + column + thread % 4 * 4, lower = place + kTile / 2 * kColumns[Op];
    return {pair_of(seed, place, exponent), pair_of(seed, lower, exponent), pair_of(seed, place + 2, exponent),
            pair_of(seed, lower + 2, exponent)};
  }

  template <int Op>
  DEVICE void fill(int layer) {
    const int tiles = Matrix<Op>::row_count(group) / kTile, units = tiles * kParts[Op];
    const int end = units * (warp + 1) / kWarps;
    for (int unit = units * warp / kWarps, count; unit < end; unit += count) {
      const int part = unit / tiles, tile = unit % tiles;
      count = min(kStrip, min(end - unit, tiles - tile));
      for (int step = 0; step < kPartSteps<Op>; ++step)
        for (int r = 0; r < count; ++r, to += kWarpThreads)
          *to = numbers<Op>(layer * kSeeds + Op, Matrix<Op>::first_row(group) + (tile + r) * kTile,
                            (part * kPartSteps<Op> + step) * kTile);
    }
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) fill(const __grid_constant__ Fill p) {
  static_assert(!kEightBits);
  const int local_lane = block_index() / kBlocksPerLane, warp = thread_index() / kWarpThreads;
  const int own = block_index() * kWarps + warp, thread = thread_index() % kWarpThreads;
  Filling filling = {p, reinterpret_cast<uint4*>(p.tapes + p.tape_at[own]) + thread, p.first_lane + local_lane,
                     block_index() % kBlocksPerLane, warp, thread};
  for (int layer = 0; layer < kLayers; ++layer)
    filling.fill<kQkv>(layer), filling.fill<kOutput>(layer), filling.fill<kGateUp>(layer), filling.fill<kDown>(layer);
  filling.fill<kHead>(0);

  constexpr uint32_t kStride = kDeviceLanes * kBlocksPerLane * kThreads;
  const uint32_t first = block_index() * kThreads + thread_index();
  uint32_t* embedding = reinterpret_cast<uint32_t*>(p.embedding);
  for (uint32_t i = first; i < kLanes * kVocab * (kHidden / 2); i += kStride)
    embedding[i] = pair_of(kHead + 1, 2 * i, p.exponents[kHead + 1]);
  for (uint32_t i = first; i < p.norm_numbers; i += kStride) p.norms[i] = norm_number(i);
}
