// Tapes: which rows of a matrix a block computes, and how its warps stream their weights.
//
// A lane's matrix is cut into rows of tiles, and these evenly over the blocks of the lane (columns.cuh). Each warp has a
// tape: its tiles of all matrices of all layers, one after another in the order of execution. A tape is made of segments
// of 512 bytes, 16 for each thread. Up to kStrip segments share their columns (a strip), so that the inputs are read once
// for them. Scales of numbers of 8 bits lie beside the tapes, and multiply the rows' sums.
//
// geometry.py makes the tables, tape.py the tapes; the same rules stand there in numpy.
#pragma once

constexpr int kWarpThreads = 32;
constexpr int kThreads = kWarpThreads * kWarps;
constexpr int kSegmentBytes = 16 * kWarpThreads;
constexpr int kTile = 16;  // rows and columns
constexpr bool kEightBits = WEIGHTS_INT8;
constexpr int kThreadNumbers = kEightBits ? 16 : 8;  // of a segment
constexpr int kWarpsPerLane = kBlocksPerLane * kWarps;

enum Op { kQkv, kOutput, kGateUp, kDown, kHead };

// of a layer's matrices before this one, in a lane
DEVICE constexpr int rows_before(int op) {
  int rows = 0;
  for (int i = 0; i < op; ++i) rows += kUnits[i] * kTile;
  return rows;
}

// of a lane; a block has whole units of rows
template <int Op>
struct Matrix {
  static_assert(kColumns[Op] % kThreadNumbers == 0);

  DEVICE static int first_unit(int block) { return kUnits[Op] * block / kBlocksPerLane; }
  DEVICE static int first_row(int block) { return first_unit(block) * kTile; }
  DEVICE static int row_count(int block) { return first_row(block + 1) - first_row(block); }
  // the place of a block's first scale: [layer][op][lane of the device][row], then the head's
  DEVICE static int first_scale(int layer, int local_lane, int block) {
    const int before = Op == kHead ? kLayers * rows_before(kHead) : layer * rows_before(kHead) + rows_before(Op);
    return before * kDeviceLanes + local_lane * kUnits[Op] * kTile + first_row(block);
  }
};

// The segments of one warp, streamed through a ring of chunks in shared memory. The ring is filled ahead of use as far
// as it is deep, whatever the warp is doing: across matrices, layers and, with `rounds`, tokens.
struct Tape {
  const char* source;  // global memory
  uint32_t bytes;      // from `source` to its end
  uint32_t rounds;     // how often it begins again after that
  char* ring;      // shared, kChunks * kChunkBytes
  uint64_t* full;  // shared, a barrier for each chunk of the ring
  uint32_t ahead;  // byte of the next copy
  uint32_t slot, parity, at;  // the next segment is `at` bytes into this slot of the ring

  DEVICE void copy_to(uint32_t target) {
    if (ahead == bytes) {
      if (rounds == 0) return;
      --rounds;
      ahead = 0;
    }
    const uint32_t size = bytes - ahead < kChunkBytes ? bytes - ahead : kChunkBytes;
    copy_chunk(ring + target * kChunkBytes, source + ahead, size, full + target);
    ahead += size;
  }

  DEVICE void start() {
    slot = parity = at = ahead = 0;
    if (thread_index() % kWarpThreads == 0) {
      for (int i = 0; i < kChunks; ++i) init_full(full + i);
      fence_full();
    }
    sync_warp();
    if (bytes)
      for (int i = 0; i < kChunks; ++i) copy_to(i);
  }

  // waits until the next Count segments are there: they reach into one more chunk at most
  template <int Count>
  DEVICE void need() {
    static_assert(Count * kSegmentBytes <= kChunkBytes);
    if (at == 0) wait_full(full + slot, parity);
    if (at + Count * kSegmentBytes <= kChunkBytes) return;
    const bool last = slot + 1 == kChunks;
    wait_full(full + (last ? 0 : slot + 1), parity ^ last);
  }

  // this thread's numbers from a segment that is there
  DEVICE uint4 peek(int segment, int thread = thread_index() % kWarpThreads) const {
    uint32_t byte = slot * kChunkBytes + at + segment * kSegmentBytes;
    if (byte >= kChunks * kChunkBytes) byte -= kChunks * kChunkBytes;
    return *reinterpret_cast<const uint4*>(ring + byte + thread * 16);
  }

  // the first segments have been read; a chunk that is used up is filled with what comes next
  DEVICE void drop(int count) {
    at += count * kSegmentBytes;
    if (at < kChunkBytes) return;
    at -= kChunkBytes;
    sync_warp();  // all have read it
    copy_to(slot);
    if (++slot == kChunks) slot = 0, parity ^= 1;
  }

  // a tape that begins again is filled up to a whole chunk
  DEVICE void skip_filling() {
    if (at) drop((kChunkBytes - at) / kSegmentBytes);
  }

  // No copy may be under way when the block ends; after a round, of a tape of whole chunks, with so many unread.
  DEVICE void finish(uint32_t unread) {
    const uint32_t chunks = unread * (bytes / kChunkBytes);
    for (uint32_t i = 0; i < chunks && i < kChunks; ++i) {
      wait_full(full + slot, parity);
      if (++slot == kChunks) slot = 0, parity ^= 1;
    }
  }
};

#if WEIGHTS_INT8
// A byte as the last bits of 2^23; with that and the byte's 128 taken away, the number is exact.
DEVICE float4 unpack4(uint32_t four) {
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = float_of(byte_perm(four, 0x4b000000u, 0x7540 | i)) - 8388736.0f;
  return {x[0], x[1], x[2], x[3]};
}
#endif
