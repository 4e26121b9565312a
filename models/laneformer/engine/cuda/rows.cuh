// Rows, warps and tapes: which rows of a matrix a warp computes, and how it streams them.
//
// A lane's matrix is cut into units of rows, and the units evenly over all warps of the lane. Each warp has a tape: its
// rows of all matrices of all layers, one after another in the order of execution. A tape is made of segments of 512
// bytes, 16 for each thread; a segment holds 8 columns for each of `row_threads` threads, of kWarpThreads / row_threads
// rows.
// Up to kStrip segments share their columns (a strip), so that the inputs are read once for them:
//
//     strip [step][row of segments][thread][8 numbers],  columns of thread t in a step: 4t .. 4t+3, then the same
//                                                        again `4 row_threads` further on
//
// The second half of a thread's columns lies that far so that both reads of x by a warp touch each bank once. Numbers of
// 8 bits are 16 a thread, in four such quarters; their rows' scales lie beside the tapes, and multiply the rows' sums.
// With kPrefetchChunks, the L2 is a second ring: while exchanges hold a warp up, as many chunks more than its ring has
// come nearer.
//
// geometry.py makes the tables, tape.py the tapes; the same rules stand there in numpy.
#pragma once

constexpr int kWarpThreads = 32;
constexpr int kThreads = kWarpThreads * kWarps;
constexpr int kSegmentBytes = 16 * kWarpThreads;
constexpr bool kEightBits = WEIGHTS_INT8;
constexpr int kThreadNumbers = kEightBits ? 16 : 8;  // of a segment
constexpr int kWarpsPerLane = kBlocksPerLane * kWarps;
constexpr int kOwners = kMmaColumns ? kBlocksPerLane : kWarpsPerLane;  // of rows: with columns.cuh, blocks

enum Op { kQkv, kOutput, kGateUp, kDown, kHead };

// threads of a warp that share a row (or a key), `numbers` of it at a time
DEVICE constexpr int row_threads_of(int columns, int numbers) {
  int threads = kWarpThreads;
  while (columns / numbers % threads) threads /= 2;
  return threads;
}

// of a layer's matrices before this one, in a lane
DEVICE constexpr int rows_before(int op) {
  int rows = 0;
  for (int i = 0; i < op; ++i) rows += kUnits[i] * kUnitRows[i];
  return rows;
}

template <int Op>
struct Matrix {
  static constexpr int kRowThreads = row_threads_of(kColumns[Op], kThreadNumbers);
  static constexpr int kSegmentRows = kWarpThreads / kRowThreads;
  static constexpr int kSteps = kColumns[Op] / (kThreadNumbers * kRowThreads);
  static_assert(kColumns[Op] % kThreadNumbers == 0 && (kMmaColumns || kUnitRows[Op] % kSegmentRows == 0));

  // the first unit of an owner; int is enough: units and warps are below 2^15
  DEVICE static int first_unit(int owner) { return kUnits[Op] * owner / kOwners; }
  DEVICE static int first_row(int owner) { return first_unit(owner) * kUnitRows[Op]; }
  DEVICE static int row_count(int owner) { return first_row(owner + 1) - first_row(owner); }
  // whether some warp has so many rows of segments left after its whole strips
  DEVICE static constexpr bool remains(int rows) {
    for (int units = kUnits[Op] / kWarpsPerLane; units <= (kUnits[Op] + kWarpsPerLane - 1) / kWarpsPerLane; ++units)
      if (units * kUnitRows[Op] / kSegmentRows % kStrip == rows) return true;
    return false;
  }
  // the place of an owner's first scale: [layer][op][lane of the device][row], then the head's
  DEVICE static int first_scale(int layer, int local_lane, int owner) {
    const int before = Op == kHead ? kLayers * rows_before(kHead) : layer * rows_before(kHead) + rows_before(Op);
    return before * kDeviceLanes + local_lane * kUnits[Op] * kUnitRows[Op] + first_row(owner);
  }
  DEVICE static int segments(int lane_warp) { return row_count(lane_warp) / kSegmentRows * kSteps; }
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
      if (kMmaColumns) --rounds;  // else it is a register too many on older cards: it begins again for ever, or never
      ahead = 0;
    }
    const uint32_t size = bytes - ahead < kChunkBytes ? bytes - ahead : kChunkBytes;
    copy_chunk(ring + target * kChunkBytes, source + ahead, size, full + target);
    prefetch(ahead + kPrefetchChunks * kChunkBytes);
    ahead += size;
  }

  DEVICE void prefetch(uint32_t byte) const {
    if (kPrefetchChunks == 0 || thread_index() % kWarpThreads != 0) return;
    if (rounds && byte >= bytes) byte -= bytes;
    if (byte < bytes) prefetch_l2(source + byte, bytes - byte < kChunkBytes ? bytes - byte : kChunkBytes);
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

DEVICE float dot8(uint4 w, float4 a, float4 b, float sum) {
  sum = fmaf(low_half(w.x), a.x, sum);
  sum = fmaf(high_half(w.x), a.y, sum);
  sum = fmaf(low_half(w.y), a.z, sum);
  sum = fmaf(high_half(w.y), a.w, sum);
  sum = fmaf(low_half(w.z), b.x, sum);
  sum = fmaf(high_half(w.z), b.y, sum);
  sum = fmaf(low_half(w.w), b.z, sum);
  return fmaf(high_half(w.w), b.w, sum);
}

#if WEIGHTS_INT8
// A byte as the last bits of 2^23; with that and the byte's 128 taken away, the number is exact.
DEVICE float4 unpack4(uint32_t four) {
  float x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = float_of(byte_perm(four, 0x4b000000u, 0x7540 | i)) - 8388736.0f;
  return {x[0], x[1], x[2], x[3]};
}
#endif

// Numbers of one thread, times their columns
DEVICE float dot(uint4 w, const float4 (&x)[kThreadNumbers / 4], float sum) {
#if WEIGHTS_INT8
  const uint32_t fours[] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 four = unpack4(fours[i]);
    sum = fmaf(four.w, x[i].w, fmaf(four.z, x[i].z, fmaf(four.y, x[i].y, fmaf(four.x, x[i].x, sum))));
  }
  return sum;
#else
  return dot8(w, x[0], x[1], sum);
#endif
}

// out[r] = W[r, :] x for the next Strip rows of segments; x in shared memory
template <int Op, int Strip>
DEVICE void multiply_strip(Tape& tape, const float* x, float* out) {
  using M = Matrix<Op>;
  const int thread = here(thread_index()) % kWarpThreads;
  const float4* columns = reinterpret_cast<const float4*>(x) + thread % M::kRowThreads;
  float sum[Strip] = {};
#pragma unroll 1
  for (int step = 0; step < M::kSteps; ++step, columns += kThreadNumbers / 4 * M::kRowThreads) {
    float4 in[kThreadNumbers / 4];
#pragma unroll
    for (int i = 0; i < kThreadNumbers / 4; ++i) in[i] = columns[i * M::kRowThreads];
    tape.need<Strip>();
#pragma unroll
    for (int r = 0; r < Strip; ++r) sum[r] = dot(tape.peek(r, thread), in, sum[r]);
    tape.drop(Strip);
  }
#pragma unroll
  for (int r = 0; r < Strip; ++r) {
    for (int mask = M::kRowThreads / 2; mask; mask /= 2) sum[r] += shuffle_xor(sum[r], mask);
    if (thread % M::kRowThreads == 0) out[r * M::kSegmentRows + thread / M::kRowThreads] = sum[r];
  }
}

// out[r] = W[r, :] x for all rows of this warp; a sum depends on the row alone, not on the GPU or the cut
// `scales`: with 8 bits, of its rows; they are on their way while the rows are read
template <int Op>
DEVICE void multiply(Tape& tape, int lane_warp, const float* scales, const float* x, float* out) {
  using M = Matrix<Op>;
  sync_warp();  // the results before these have been read
  float* const all = out;
  float scale = 0.0f;
  if (kEightBits && thread_index() % kWarpThreads < M::row_count(lane_warp)) scale = scales[thread_index() % kWarpThreads];
  int left = M::row_count(lane_warp) / M::kSegmentRows;
#pragma unroll 1
  for (; left >= kStrip; left -= kStrip, out += kStrip * M::kSegmentRows) multiply_strip<Op, kStrip>(tape, x, out);
  if constexpr (M::remains(3)) {
    if (left == 3) multiply_strip<Op, 3>(tape, x, out);
  }
  if constexpr (M::remains(2)) {
    if (left == 2) multiply_strip<Op, 2>(tape, x, out);
  }
  if constexpr (M::remains(1)) {
    if (left == 1) multiply_strip<Op, 1>(tape, x, out);
  }
  sync_warp();
  if constexpr (kEightBits) {
    const int first = here(thread_index()) % kWarpThreads;
    for (int r = first; r < M::row_count(lane_warp); r += kWarpThreads) all[r] *= r == first ? scale : scales[r];
    sync_warp();
  }
}
