// What the memory gives: the weights' own bytes read again and again, without a model.
//
// `stream` reads as the decode kernels do: every warp its own tape through its own ring of chunks in shared memory, by
// the same copies and barriers; a token without arithmetic and exchanges. `loads` reads the same bytes with plain
// 16-byte loads, to see whether the ring is what limits. Both add up what they read: the sum proves that every byte was
// there as often as the report says, and keeps the compiler from leaving the loads out.
//
// `exchanges` times what the rings have to hide: words between blocks of the first lane, while the other lanes' blocks
// rest or read their tapes. A trip is a word to another block and one back, two stores and two polls; an
// exchange is that of a stream, where each block of a lane stores its rows and gathers all.
#ifdef EMULATED
#include "emulator.h"
#else
#include "primitives.cuh"
#endif
#include "tape.cuh"
#include "exchange.cuh"

struct Probe {
  const char* tapes;
  const uint64_t* tape_at;  // [warp + 1] bytes
  uint32_t* sums;           // [block][thread]: of the 32-bit words that this thread read, modulo 2^32
  uint64_t bytes;           // of all tapes
  int rounds;               // how often to read them
};

DEVICE uint32_t sum_of(uint4 w) { return w.x + w.y + w.z + w.w; }

extern "C" __global__ void __launch_bounds__(kThreads, 1) stream(const __grid_constant__ Probe p) {
  const int warp = thread_index() / kWarpThreads, thread = thread_index() % kWarpThreads;
  const int own = block_index() * kWarps + warp;
  const uint64_t* at = p.tape_at + own;
  const char* source = p.tapes + at[0];
  const uint32_t chunks = static_cast<uint32_t>((at[1] - at[0]) / kChunkBytes), total = chunks * p.rounds;
  char* ring = dynamic_shared() + warp * kChunks * kChunkBytes;
  uint64_t* full = reinterpret_cast<uint64_t*>(dynamic_shared() + kWarps * kChunks * kChunkBytes) + warp * kChunks;
  if (thread == 0) {
    for (int i = 0; i < kChunks; ++i) init_full(full + i);
    fence_full();
  }
  sync_warp();

  uint32_t copied = 0, next = 0, sum = 0, slot = 0, parity = 0;
  const auto copy_to = [&](int target) {
    if (copied == total) return;
    copy_chunk(ring + target * kChunkBytes, source + static_cast<uint64_t>(next) * kChunkBytes, kChunkBytes, full + target);
    ++copied;
    if (++next == chunks) next = 0;
  };
  for (int i = 0; i < kChunks; ++i) copy_to(i);
  for (uint32_t read = 0; read < total; ++read) {
    wait_full(full + slot, parity);
    const uint4* words = reinterpret_cast<const uint4*>(ring + slot * kChunkBytes) + thread;
#pragma unroll
    for (int i = 0; i < kChunkBytes / kSegmentBytes; ++i) sum += sum_of(words[kWarpThreads * i]);
    sync_warp();  // all have read it
    copy_to(slot);
    if (++slot == kChunks) slot = 0, parity ^= 1;
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

struct Exchanges {
  Probe read;         // by the other lanes, until `done`; of `sums`, a warp's first is the chunks that it has read
  Word* words;        // 2 kHidden, of no epoch; of trips the first two, on lines of their own
  uint64_t* ns;       // of all rounds, as the first block saw them
  int* done;          // device memory, 0
  int* aborted;       // device memory
  Report* report;     // host memory
  uint64_t limit_ns;
  int trips;          // 1: of one word, 0: exchanges of a stream
  int saturated;
  int warm_up, rounds;
};

constexpr int kLineWords = 16;  // 128 bytes

DEVICE void read_meanwhile(const Exchanges& p) {
  const int warp = thread_index() / kWarpThreads, own = block_index() * kWarps + warp;
  const uint64_t* at = p.read.tape_at + own;
  Tape tape;
  tape.source = p.read.tapes + at[0], tape.bytes = static_cast<uint32_t>(at[1] - at[0]), tape.rounds = p.read.rounds - 1;
  tape.ring = dynamic_shared() + warp * kChunks * kChunkBytes;
  tape.full = reinterpret_cast<uint64_t*>(dynamic_shared() + kWarps * kChunks * kChunkBytes) + warp * kChunks;
  tape.start();
  const uint32_t total = tape.bytes / kChunkBytes * p.read.rounds;
  uint32_t chunks = 0, sum = 0;
  for (int over = 0; chunks < total && !over;) {
    for (uint32_t end = min(chunks + kChunks, total); chunks < end; ++chunks)
      for (int i = 0; i < kChunkBytes / kSegmentBytes; ++i) {
        tape.need<1>();
        const uint4 w = tape.peek(0);
        sum ^= sum_of(w), tape.drop(1);
      }
    over = load_flag(p.done) | load_flag(p.aborted);
    for (int mask = kWarpThreads / 2; mask; mask /= 2) over |= shuffle_xor(over, mask);
  }
  tape.drain(total - chunks);
  p.read.sums[block_index() * kThreads + thread_index()] = thread_index() % kWarpThreads ? sum : chunks;
}

DEVICE void make_trip(const Exchanges& p, int block, uint32_t epoch, const Watch& watch) {
  if (block > 1 || thread_index()) return;
  Word *there = p.words, *back = p.words + kLineWords;
  if (block == 0) store_word(there, 0.0f, epoch);
  const Word* awaited = block ? there : back;
  wait_word(load_word(awaited), awaited, epoch, kStream, watch);
  if (block == 1) store_word(back, 0.0f, epoch);
}

DEVICE void exchange_stream(const Exchanges& p, int block, uint32_t epoch, const Watch& watch) {
  Word* words = p.words + epoch % 2 * kHidden;
  const int first = Matrix<kOutput>::first_row(block);
  for (int r = thread_index(); r < Matrix<kOutput>::row_count(block); r += kThreads)
    store_word(words + first + r, 1.0f, epoch);
  float sum = 0.0f;
  gather<kHidden>(words, epoch, kStream, watch, [&](int, float a, float b) { sum += a + b; });
  sync_block();
  if (sum < 0.0f) *p.ns = 0;  // never: so that the words are asked for
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) exchanges(const __grid_constant__ Exchanges p) {
  const int lane = block_index() / kBlocksPerLane, block = block_index() % kBlocksPerLane;
  if (lane) {
    if (p.saturated) read_meanwhile(p);
    return;
  }
  const Watch watch = {p.aborted, p.report, p.limit_ns, lane, 0};
  uint64_t start = 0;
  for (int round = 0; round < p.warm_up + p.rounds; ++round) {
    if (round == p.warm_up) start = now_ns();
    if (p.trips)
      make_trip(p, block, round + 1, watch);
    else
      exchange_stream(p, block, round + 1, watch);
  }
  if (block_index() || thread_index()) return;
  *p.ns = now_ns() - start;
  publish_flag(p.done, 1);
}
