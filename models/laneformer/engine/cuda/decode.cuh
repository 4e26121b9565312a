// One token through a lane's layers, as both versions of the engine compute it: norms, attention, joins.
//
// The functions take and leave numbers in shared memory; who waits for whom is the affair of the callers
// (persistent.cu, graph.cu). Sums have one fixed order that does not depend on the version, so both give the same bits.
#pragma once

struct Weights {
  const char* tapes;             // of this device's lanes
  const uint64_t* tape_at;       // [warp + 1] bytes
  const uint16_t* embedding;     // (V, D)
  const float* norms;            // (2 layers + 1, D), or (2 layers + 1, L, D) where each lane has its own
  const float2* rope;            // (context, d / 2): cosine, sine
  uint16_t* kv;                  // [lane][layer][KV head][split][slot][key, value][d]
  const float* biases;           // with kQkvBias: [layer][lane of the model][row of q, k, v]
  const float* head_norms;       // with kHeadNorms: [layer][query, key][d]
};

DEVICE const float* norm_scale(const Weights& weights, int index, int lane) {
  return weights.norms + (kLaneNorms ? index * kLanes + lane : index) * kHidden;
}

// the sum over the block, the same in every thread; a barrier
DEVICE float block_sum(float value, float* per_warp) {
  for (int mask = 16; mask; mask /= 2) value += shuffle_xor(value, mask);
  if (thread_index() % 32 == 0) per_warp[thread_index() / 32] = value;
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
  return {pair.x * turn.x - pair.y * turn.y, pair.x * turn.y + pair.y * turn.x};
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

// ---- attention: the keys of a KV head are dealt to `kSplits` blocks, position by position ----

constexpr int kGroup = kHeads / kKvHeads;  // query heads of a KV head
constexpr int kAttentionUnits = kKvHeads * kSplits;
constexpr int kSplitThreads = kSplits > 8 ? 16 : kSplits > 4 ? 8 : kSplits > 2 ? 4 : kSplits;  // that merge the splits

DEVICE uint16_t* kv_slots(const Weights& weights, int lane, int layer, int head, int split) {
  return weights.kv + lane * kKvLane + kKvAt[layer] + (head * kSplits + split) * kKvSlots[layer] * 2ll * kHeadDim;
}

// positions of this split up to and with `position`; the ring of a window layer holds the last kKvSlots of them
DEVICE int own_positions(int position, int split) { return position < split ? 0 : (position - split) / kSplits + 1; }

constexpr int kKeyThreads = row_threads_of(kHeadDim) < 4 ? row_threads_of(kHeadDim) : 4;  // that share one key
constexpr int kKeyChunks = kHeadDim / 8 / kKeyThreads;                                    // of 8 numbers for each
constexpr int kKeysAtOnce = 32 / kKeyThreads;

DEVICE void unpack8(uint4 w, float (&x)[8]) {
  x[0] = low_half(w.x), x[1] = high_half(w.x), x[2] = low_half(w.y), x[3] = high_half(w.y);
  x[4] = low_half(w.z), x[5] = high_half(w.z), x[6] = low_half(w.w), x[7] = high_half(w.w);
}

// Adds one key and value of weight exp(score) to a softmax under way.
DEVICE void absorb(float score, const uint4* value, float& top, float& weight, float (&sum)[kKeyChunks * 8]) {
  const float above = fmaxf(top, score);
  const float keep = top == above ? 1.0f : expf(top - above), add = score == above ? 1.0f : expf(score - above);
  top = above, weight = weight * keep + add;
#pragma unroll
  for (int c = 0; c < kKeyChunks; ++c) {
    float v[8];
    unpack8(value[c], v);
#pragma unroll
    for (int e = 0; e < 8; ++e) sum[c * 8 + e] = sum[c * 8 + e] * keep + add * v[e];
  }
}

// The keys of one split that a warp holds, for one query head: out [d + 2] in shared memory. q is scaled already.
DEVICE void attend(const uint16_t* slots, int layer, int position, int split, const float* q, float* out) {
  const int warp = thread_index() / 32, thread = here(thread_index()) % 32, part = thread % kKeyThreads;
  const int owned = own_positions(position, split), held = owned < kKvSlots[layer] ? owned : kKvSlots[layer];
  float top = -INFINITY, weight = 0.0f, sum[kKeyChunks * 8] = {};
  for (int first = warp * kKeysAtOnce; first < held; first += kWarps * kKeysAtOnce) {
    const int slot = first + thread / kKeyThreads;
    const int last = owned - 1, back = (last % kKvSlots[layer] - slot + kKvSlots[layer]) % kKvSlots[layer];
    const int at = (last - back) * kSplits + split;  // the position in this slot
    const bool seen = slot < held && (kWindows[layer] == 0 || at > position - kWindows[layer]);
    const uint4* key = reinterpret_cast<const uint4*>(slots + (seen ? slot : 0) * 2 * kHeadDim) + part;
    uint4 value[kKeyChunks];
    float score = 0.0f;
#pragma unroll
    for (int c = 0; c < kKeyChunks; ++c) value[c] = key[kHeadDim / 8 + c * kKeyThreads];
#pragma unroll
    for (int c = 0; c < kKeyChunks; ++c) {
      const float4* x = reinterpret_cast<const float4*>(q + (c * kKeyThreads + part) * 8);
      score = dot8(key[c * kKeyThreads], x[0], x[1], score);
    }
    for (int mask = kKeyThreads / 2; mask; mask /= 2) score += shuffle_xor(score, mask);
    if (seen) absorb(score, value, top, weight, sum);
  }
  // over the warp's groups of threads, in a fixed tree
#pragma unroll 1
  for (int mask = kKeyThreads; mask < 32; mask *= 2) {
    const float other_top = shuffle_xor(top, mask), above = fmaxf(top, other_top);
    const float keep = top == above ? 1.0f : expf(top - above), add = other_top == above ? 1.0f : expf(other_top - above);
    weight = weight * keep + shuffle_xor(weight, mask) * add;
    top = above;
#pragma unroll
    for (int e = 0; e < kKeyChunks * 8; ++e) sum[e] = sum[e] * keep + shuffle_xor(sum[e], mask) * add;
  }
  if (thread < kKeyThreads) {
    for (int c = 0; c < kKeyChunks; ++c)
      for (int e = 0; e < 8; ++e) out[(c * kKeyThreads + part) * 8 + e] = sum[c * 8 + e];
    if (thread == 0) out[kHeadDim] = top, out[kHeadDim + 1] = weight;
  }
}

// Element e of the softmax over `count` partial ones, as far as it goes (not yet divided); [d] is the maximum, and
// [d + 1] the weight. part(i, e) reads element e of the i-th.
template <int Count, class Read>
DEVICE float merged(int e, Read part) {
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < Count; ++i) top = fmaxf(top, part(i, kHeadDim));
  if (e == kHeadDim) return top;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    const float own = part(i, kHeadDim);
    if (own != -INFINITY) sum += part(i, e) * (own == top ? 1.0f : expf(own - top));
  }
  return sum;
}
