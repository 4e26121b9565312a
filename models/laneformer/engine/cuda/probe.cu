// What the memory gives: the weights' own bytes read again and again, without a model.
//
// Every warp reads its own tape as the decode kernels do, by the same ring, copies and barriers: a token without arithmetic
// and exchanges. What is read is added up: the sum proves that every byte was there as often as the report says, and keeps
// the compiler from leaving the loads out.
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
