// What the memory gives: the weights' own bytes read again and again, without a model.
//
// `stream` reads as the decode kernels do: every warp its own tape through its own ring of chunks in shared memory, by
// the same copies and barriers; a token without arithmetic and exchanges. `loads` reads the same bytes with plain
// 16-byte loads, to see whether the ring is what limits. Both add up what they read: the sum proves that every byte was
// there as often as the report says, and keeps the compiler from leaving the loads out.
#ifdef EMULATED
#include "emulator.h"
#else
#include "primitives.cuh"
#endif
#include "tape.cuh"

struct Probe {
  const char* tapes;
  const uint64_t* tape_at;  // [warp + 1] bytes
  uint32_t* sums;           // [block][thread]: of the 32-bit words that this thread read, modulo 2^32
  uint64_t bytes;           // of all tapes
  int rounds;               // how often to read them
};

DEVICE uint32_t sum_of(uint4 w) { return w.x + w.y + w.z + w.w; }

extern "C" __global__ void __launch_bounds__(kThreads, 1) stream(const __grid_constant__ Probe p) {
  const int warp = thread_index() / kWarpThreads;
  const uint64_t* at = p.tape_at + block_index() * kWarps + warp;
  Tape tape;
  tape.source = p.tapes + at[0], tape.bytes = static_cast<uint32_t>(at[1] - at[0]), tape.rounds = p.rounds - 1;
  tape.ring = dynamic_shared() + warp * kChunks * kChunkBytes;
  tape.full = reinterpret_cast<uint64_t*>(dynamic_shared() + kWarps * kChunks * kChunkBytes) + warp * kChunks;
  tape.start();
  constexpr int kSegments = kChunkBytes / kSegmentBytes;
  uint32_t sum = 0;
  for (int64_t left = int64_t{tape.bytes} / kChunkBytes * p.rounds; left > 0; --left) {
    tape.need<kSegments>();
#pragma unroll
    for (int i = 0; i < kSegments; ++i) sum += sum_of(tape.peek(i));
    tape.drop(kSegments);
  }
  p.sums[block_index() * kThreads + thread_index()] = sum;
}

constexpr int kLoads = 16;  // under way in each thread

extern "C" __global__ void __launch_bounds__(kThreads, 1) loads(const __grid_constant__ Probe p) {
  constexpr uint64_t kStride = kDeviceLanes * kBlocksPerLane * kThreads;
  const uint4* words = reinterpret_cast<const uint4*>(p.tapes);
  const uint64_t count = p.bytes / 16;
  uint32_t sum = 0;
  for (int round = 0; round < p.rounds; ++round) {
    uint64_t i = block_index() * kThreads + thread_index();
    for (; i + (kLoads - 1) * kStride < count; i += kLoads * kStride) {
      uint4 read[kLoads];
#pragma unroll
      for (int k = 0; k < kLoads; ++k) read[k] = words[i + k * kStride];
#pragma unroll
      for (int k = 0; k < kLoads; ++k) sum += sum_of(read[k]);
    }
    for (; i < count; i += kStride) sum += sum_of(words[i]);
  }
  p.sums[block_index() * kThreads + thread_index()] = sum;
}
