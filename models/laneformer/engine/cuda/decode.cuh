// One token through a lane's layers, as both versions of the engine compute it: norms and attention.
//
// The functions take and leave numbers in shared memory; who waits for whom is the affair of the callers
// (passes.cu, graph.cu). Sums have one fixed order that does not depend on the version, so both give the same bits.
#pragma once

struct Weights {
  const char* tapes;             // of this device's lanes
  const uint64_t* tape_at;       // [warp + 1] bytes
  const float* scales;           // with weights of 8 bits: [layer][op][lane][row], then the head's
  const uint16_t* embedding;     // (V, D)
  const float* norms;            // (2 layers + 1, D), or (2 layers + 1, L, D) where each lane has its own
  const float2* rope;            // (1 + ropes x context, d / 2): cosine, sine
  uint16_t* kv;                  // [lane][layer][KV head][split][slot][key, value][d]
  const float* biases;           // with kQkvBias: [layer][lane of the model][row of q, k, v]
  const float* head_norms;       // with kHeadNorms: [layer][query, key][d]
};

DEVICE const float* norm_scale(const Weights& weights, int index, int lane) {
  return weights.norms + (kLaneNorms ? index * kLanes + lane : index) * kHidden;
}

// the sum over the block, the same in every thread; a barrier
DEVICE float block_sum(float value, float* per_warp) {
  for (int mask = kWarpThreads / 2; mask; mask /= 2) value += shuffle_xor(value, mask);
  if (thread_index() % kWarpThreads == 0) per_warp[thread_index() / kWarpThreads] = value;
  sync_block();
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += per_warp[w];
  return sum;
}

// 1 / rms of D squares: the norm is applied to what the matrix makes of the scaled stream
DEVICE float inverse_rms(float squares, float* per_warp) {
  return rsqrtf(block_sum(squares, per_warp) / kHidden + kNormEps);
}

DEVICE float2 embedding_pair(const Weights& weights, int token, int i) {
  const uint32_t pair = reinterpret_cast<const uint32_t*>(weights.embedding + static_cast<uint64_t>(token) * kHidden)[i / 2];
  return {low_half(pair), high_half(pair)};
}

DEVICE float2 rotate(float2 pair, float2 turn) {
  return {fmaf(pair.x, turn.x, -(pair.y * turn.y)), fmaf(pair.x, turn.y, pair.y * turn.x)};
}

DEVICE float silu(float gate) { return gate / (1.0f + expf(-gate)); }

// ---- sums over threads whose index differs in the bits from Mask to below End ----

// how many of `count` sums each of the threads keeps: they halve them as often as that is even
DEVICE constexpr int spread_count(int threads, int count) {
  for (; threads > 1 && count % 2 == 0; threads /= 2) count /= 2;
  return count;
}

// Each thread ends with a share of the sums, in sum[0 ..]: the first one's number, or -1 where another has the same.
template <int Mask, int End, int Count>
DEVICE int spread_sum(float* sum, int thread) {
  if constexpr (Mask == End) {
    return 0;
  } else if constexpr (Count % 2) {
#pragma unroll
    for (int i = 0; i < Count; ++i) sum[i] += shuffle_xor(sum[i], Mask);
    const int first = spread_sum<2 * Mask, End, Count>(sum, thread);
    return thread & Mask ? -1 : first;
  } else {
    const bool upper = thread & Mask;
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      const float low = sum[i], high = sum[i + Count / 2];
      sum[i] = (upper ? high : low) + shuffle_xor(upper ? low : high, Mask);
    }
    const int first = spread_sum<2 * Mask, End, Count / 2>(sum, thread);
    return first < 0 ? first : first + (upper ? Count / 2 : 0);
  }
}

// what to measure exponents from, also where nothing has been seen yet
DEVICE float finite_top(float top) { return top == -INFINITY ? 0.0f : top; }

// ---- attention: the keys of a KV head are dealt to `kSplits` blocks, position by position ----

constexpr int kHeadsPerKv = kHeads / kKvHeads;  // query heads of a KV head
constexpr int kAttentionUnits = kKvHeads * kSplits;
constexpr int kSplitThreads = kSplits > 8 ? 16 : kSplits > 4 ? 8 : kSplits > 2 ? 4 : kSplits;  // that merge the splits

DEVICE uint16_t* kv_slots(const Weights& weights, int lane, int layer, int head, int split) {
  return weights.kv + lane * kKvLane + kKvAt[layer] + (head * kSplits + split) * kKvSlots[layer] * 2ll * kHeadDim;
}

// positions of this split up to and with `position`; the ring of a window layer holds the last kKvSlots of them
DEVICE int own_positions(int position, int split) { return position < split ? 0 : (position - split) / kSplits + 1; }

// threads of a warp that share a key, `numbers` of it at a time
DEVICE constexpr int row_threads_of(int columns, int numbers) {
  int threads = kWarpThreads;
  while (columns / numbers % threads) threads /= 2;
  return threads;
}

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

constexpr int kKeyThreads = row_threads_of(kHeadDim, 8) < 4 ? row_threads_of(kHeadDim, 8) : 4;  // that share one key
constexpr int kKeyChunks = kHeadDim / 8 / kKeyThreads;                                    // of 8 numbers for each
constexpr int kKeysAtOnce = kWarpThreads / kKeyThreads;

DEVICE void unpack8(uint4 w, float (&x)[8]) {
  x[0] = low_half(w.x), x[1] = high_half(w.x), x[2] = low_half(w.y), x[3] = high_half(w.y);
  x[4] = low_half(w.z), x[5] = high_half(w.z), x[6] = low_half(w.w), x[7] = high_half(w.w);
}

constexpr int kKeyNumbers = 8 * kKeyChunks;                                               // all of them

// query heads that share a pass over the keys: what registers have room for (half of them with two blocks at once)
DEVICE constexpr int heads_at_once() {
  int heads = kHeadsPerKv;
  while (kHeadsPerKv % heads || (heads > 1 && heads * kKeyNumbers > (GRAPH ? 32 : 64))) --heads;
  return heads;
}
constexpr int kHeadsAtOnce = heads_at_once();

// The keys and values of one split, which a block has to itself. The new one is not in its slot when the others are read.
struct Keys {
  uint16_t* slots;
  int layer, position, split, owned, held, newest, fresh;  // `fresh`: the slot of the new position, or -1

  DEVICE Keys(const Weights& weights, int lane, int layer, int head, int split, int position)
      : slots(kv_slots(weights, lane, layer, head, split)), layer(layer), position(position), split(split) {
    owned = own_positions(position, split), held = owned < kKvSlots[layer] ? owned : kKvSlots[layer];
    newest = (owned - 1) % kKvSlots[layer], fresh = position % kSplits == split ? newest : -1;
  }

  DEVICE bool sees(int slot) const {
    const int back = newest - slot + (slot > newest ? kKvSlots[layer] : 0);
    const int at = (owned - 1 - back) * kSplits + split;  // the position in this slot
    return slot < held && (kWindows[layer] == 0 || at > position - kWindows[layer]);
  }

  // this thread's share of a key, or with 1 of its value; left as it is where it is not seen
  DEVICE void load(int value, int slot, uint4 (&chunks)[kKeyChunks]) const {
    if (slot == fresh || !sees(slot)) return;
    take(reinterpret_cast<const uint4*>(slots + (2 * slot + value) * kHeadDim), chunks);
  }

  DEVICE static void take(const uint4* from, uint4 (&chunks)[kKeyChunks]) {
#pragma unroll
    for (int c = 0; c < kKeyChunks; ++c) chunks[c] = from[c * kKeyThreads + here(thread_index()) % kKeyThreads];
  }
};

struct KeyValue {
  uint4 key[kKeyChunks] = {}, value[kKeyChunks] = {};
};

struct Softmax {  // under way, of one head over some keys: values weigh exp(score - top)
  float top = -INFINITY, weight = 0.0f, sum[kKeyNumbers] = {};

  // Makes room for a key, and returns the weight of its value: 0 with the score -infinity, that of one not seen.
  DEVICE float weigh(float score, float& keep) {
    const float above = fmaxf(top, score), base = finite_top(above), add = expf(score - base);
    keep = expf(top - base), top = above, weight = fmaf(weight, keep, add);
    return add;
  }

  // over the warp's groups of threads, to out [d + 2]
  DEVICE void finish(int thread, float* out) {
    float all = top;
    for (int mask = kKeyThreads; mask < kWarpThreads; mask *= 2) all = fmaxf(all, shuffle_xor(all, mask));
    const float share = expf(top - finite_top(all));
    weight *= share;
    for (int mask = kKeyThreads; mask < kWarpThreads; mask *= 2) weight += shuffle_xor(weight, mask);
#pragma unroll
    for (int e = 0; e < kKeyNumbers; ++e) sum[e] *= share;
    const int first = spread_sum<kKeyThreads, kWarpThreads, kKeyNumbers>(sum, thread);
    if (thread == 0) out[kHeadDim] = all, out[kHeadDim + 1] = weight;
    if (first < 0) return;
#pragma unroll
    for (int i = 0; i < spread_count(kWarpThreads / kKeyThreads, kKeyNumbers); ++i) {
      const int e = first + i;
      out[(e / 8 * kKeyThreads + thread % kKeyThreads) * 8 + e % 8] = sum[i];
    }
  }
};

// What a warp holds of these keys, for the next kHeadsAtOnce query heads: out [head][d + 2]; q is scaled. `now`: the
// warp's first keys, loaded before q was there; `fresh`: the new key and value. A warp without keys leaves the maximum
// alone.
DEVICE void attend(const Keys& keys, KeyValue now, const uint4* fresh, const float* q, float* out) {
  const int warp = here(thread_index()) / kWarpThreads, thread = here(thread_index()) % kWarpThreads;
  const int part = thread % kKeyThreads;
  int first = warp * kKeysAtOnce;
  if (first >= keys.held) {
    if (thread < kHeadsAtOnce) out[thread * kPartialWords + kHeadDim] = -INFINITY;
    return;
  }
  Softmax heads[kHeadsAtOnce];
#pragma unroll 1
  for (; first < keys.held; first += kWarps * kKeysAtOnce) {
    const int slot = first + thread / kKeyThreads, next = slot + kWarps * kKeysAtOnce;
    if (slot == keys.fresh) keys.take(fresh, now.key), keys.take(fresh + kHeadDim / 8, now.value);
    float score[kHeadsAtOnce];
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
      score[h] = 0.0f;
#pragma unroll
      for (int c = 0; c < kKeyChunks; ++c) {
        const float4* x = reinterpret_cast<const float4*>(q + h * kHeadDim + (c * kKeyThreads + part) * 8);
        score[h] = dot8(now.key[c], x[0], x[1], score[h]);
      }
    }
    const bool seen = keys.sees(slot);
    float keep[kHeadsAtOnce], add[kHeadsAtOnce];
#pragma unroll
    for (int h = 0; h < kHeadsAtOnce; ++h) {
      for (int mask = kKeyThreads / 2; mask; mask /= 2) score[h] += shuffle_xor(score[h], mask);
      add[h] = heads[h].weigh(seen ? score[h] : -INFINITY, keep[h]);
    }
#pragma unroll
    for (int c = 0; c < kKeyChunks; ++c) {
      float v[8];
      unpack8(now.value[c], v);
#pragma unroll
      for (int i = 0; i < 8 * kHeadsAtOnce; ++i) {
        float& sum = heads[i % kHeadsAtOnce].sum[c * 8 + i / kHeadsAtOnce];
        sum = fmaf(add[i % kHeadsAtOnce], v[i / kHeadsAtOnce], sum * keep[i % kHeadsAtOnce]);
      }
    }
    keys.load(0, next, now.key), keys.load(1, next, now.value);
  }
#pragma unroll
  for (int h = 0; h < kHeadsAtOnce; ++h) heads[h].finish(thread, out + h * kPartialWords);
}
