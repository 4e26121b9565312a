// A block of a lane at work: what it takes from words, computes, and publishes, step by step.
//
// passes.cu runs these steps in one kernel, where the words' epochs say when they are there; graph.cu runs each in a
// kernel of its own, where the order of kernels does. The weights are multiplied for all columns at once (columns.cuh).
// All else is done for one column after another, as for one alone: each has words and inboxes of its own, so what holds
// for the words of one token holds for each of them. A block owns rows of the stream (those that it computes of the
// output and down matrices): it adds its lane's and the other lanes' partial outputs to them.
#pragma once
#include "columns.cuh"
#include "exchange.cuh"
#include "decode.cuh"
#include "sampling.cuh"

static_assert(kHeads * kHeadDim <= kNarrow && kIntermediate <= kNarrow);

struct Column {  // a token at a position of a sequence
  int token, position, sequence;
  int left;                 // new tokens until it ends; 0: more than a launch makes
  int stop_count;
  int stops[kMostStops];
  Sampling sampling;
};

struct Order {  // what a launch is to do
  float* logits;           // (column_count, V) of the first pass, of this device's lanes; or null
  uint32_t epoch;          // tokens that these words have seen before
  int column_count;
  int extra_passes;        // passes after the first one, of columns that each draw a token
  Column columns[kMostColumns];
};

struct Graph {  // device memory: a graph's arguments do not change, so its order is here; and what the kernel of passes has
  Order order;             // in registers and shared memory
  int tokens[kMostColumns], steps[kMostColumns];  // what each column reads next, -1 after its end; passes before that
  float rows[kMmaColumns * kDeviceLanes * kHidden];  // the lanes' streams
};

struct Decode {
  Weights weights;
  Word* lane_words;        // [column][lane of this device][kLaneWords]
  Word* inbox[DEVICES];    // [column][kInboxWords] of every device
  int* aborted;            // device memory
  Report* report;          // host memory
  const int* cancel;       // host memory: stop after the pass under way
  uint64_t* picks;         // host memory: words of what each pass has chosen, [pass][kMostColumns]
  Graph* graph;            // of the graph version
  uint64_t limit_ns;
  int device, first_lane;
  int layer, module;       // of a kernel of the graph
  Order order;             // of the kernel of passes
};

constexpr uint32_t kEnds = 1u << 30;  // set in a chosen token's word: its column ends with it

struct Block {
  static constexpr int kStride = padded(kWide > kNarrow ? kWide : kNarrow);
  const Decode& p;
  int lane, local_lane, block_in_lane, warp, thread;
  float *inputs, *fresh, *sums, *streams, *scales;  // [column]: kStride, (a key and value), [part] of all columns, kMostStreamRows, 1
  int* tokens;                           // shared: what each column reads in this pass; -1: it has ended
  float *wide, *narrow;                  // inputs of a matrix, of the column under way: kWide and kNarrow numbers
  float *query, *out, *rows, *per_warp;  // `out`: its sums of this block's rows; `rows`: this block's of its stream
  float* head_scales;                    // with kHeadNorms: 1 / rms of a KV head's queries, then of its key
  Candidate* candidates;
  Word* words;
  Tape tape;
  Watch watch;
  uint32_t token_epoch;
  uint32_t live;       // a bit for each column that has not ended
  int position;
  int column = 0, sequence = 0;  // those under way

  DEVICE const Order& order() const {
#if GRAPH
    return p.graph->order;
#else
    return p.order;
#endif
  }
  DEVICE uint32_t epoch_of(int layer) const { return token_epoch * kLayers + layer + 1; }
  DEVICE Word* inbox(int device) const { return inbox_of(device, column); }
  DEVICE Word* inbox_of(int device, int c) const { return p.inbox[device] + static_cast<int64_t>(c) * kInboxWords; }
  DEVICE Word* own_inbox() const { return inbox(p.device); }
  DEVICE int kv_lane() const { return sequence * kDeviceLanes + local_lane; }
  DEVICE const Sampling& sampling() const { return order().columns[column].sampling; }
  DEVICE int step() const { return static_cast<int>(token_epoch - order().epoch); }  // passes before this one

  DEVICE explicit Block(const Decode& decode) : p(decode) {
    locate();
    watch = {p.aborted, p.report, p.limit_ns, lane, 0};
  }

  // Where this thread is, and what is its own. Each step of a layer computes it anew: kept over all of them, it takes
  // registers that the sums need.
  DEVICE void locate() {
    const int index = here(thread_index()), block = here(block_index());
    warp = index / kWarpThreads, thread = index % kWarpThreads;
    local_lane = block / kBlocksPerLane, block_in_lane = block % kBlocksPerLane;
    lane = watch.lane = p.first_lane + local_lane;
    char* at = dynamic_shared();
    tape.ring = at + warp * kChunks * kChunkBytes, at += kWarps * kChunks * kChunkBytes;
    inputs = reinterpret_cast<float*>(at), query = inputs + kMmaColumns * kStride;  // 16-aligned: float4
    fresh = query + kHeadsPerKv * kHeadDim, at = reinterpret_cast<char*>(fresh + kHeadDim);
    tape.full = reinterpret_cast<uint64_t*>(at) + warp * kChunks, at += kWarps * kChunks * 8;
    candidates = reinterpret_cast<Candidate*>(at), at += kWarps * sizeof(Candidate);
    per_warp = reinterpret_cast<float*>(at), sums = per_warp + kWarps;
    streams = sums + kMmaColumns * kMostSums, scales = streams + kMmaColumns * kMostStreamRows;
    tokens = reinterpret_cast<int*>(scales + kMmaColumns), head_scales = scales + 2 * kMmaColumns;
  }

  DEVICE void select(int c) {
#if GRAPH
    token_epoch = order().epoch + p.graph->steps[c];
#endif
    column = c, position = order().columns[c].position + step(), sequence = order().columns[c].sequence;
    words = p.lane_words + (static_cast<int64_t>(c) * kDeviceLanes + local_lane) * kLaneWords;
    wide = narrow = inputs + c * kStride, rows = streams + c * kMostStreamRows;
#if GRAPH
    rows = p.graph->rows + (c * kDeviceLanes + local_lane) * kHidden + Matrix<kOutput>::first_row(block_in_lane);
#endif
  }

  template <class Work>
  DEVICE void each(Work work) {
#pragma unroll 1
    for (int c = 0; c < (kMmaColumns == 1 && kBulkCopies ? 1 : order().column_count); ++c)
      if (live >> c & 1) select(c), work();
  }

  // also the inputs of columns that are not asked for
  DEVICE void clear_inputs() {
    for (int i = thread_index(); i < kMmaColumns * kStride; i += kThreads) inputs[i] = 0.0f;
  }

  // whether any column reads a token; all threads have seen `tokens` filled
  DEVICE bool count_live() {
    live = 0;
    for (int i = 0; i < kMmaColumns; ++i) live |= (tokens[i] >= 0 ? 1u : 0u) << i;
    return live != 0;
  }

  DEVICE const char* own_tape(uint64_t& bytes) const {
    const int own = local_lane * kWarpsPerLane + block_in_lane * kWarps + warp;
    const uint64_t* at = p.weights.tape_at + own;
    bytes = at[1] - at[0];
    return p.weights.tapes + at[0];
  }

  // of its own rows of a matrix
  template <int Op>
  DEVICE const float* scales_of(int layer) const {
    return p.weights.scales + Matrix<Op>::first_scale(layer, local_lane, block_in_lane);
  }

  // wide = stream * scale; returns 1 / rms
  DEVICE float take_stream(int module, int layer, int norm) {
    const float2* scale = reinterpret_cast<const float2*>(norm_scale(p.weights, norm, lane));
    float squares = 0.0f;
    gather<kHidden>(
        words + kStreamAt + module * kHidden, epoch_of(layer), kStream, watch, [&](int i) { return scale[i / 2]; },
        [&](int i, float a, float b, float2 s) {
          wide[i] = a * s.x, wide[i + 1] = b * s.y;
          squares = fmaf(a, a, fmaf(b, b, squares));
        });
    return inverse_rms(squares, per_warp);
  }

  DEVICE float take_embedding(int token) {
    const float2* scale = reinterpret_cast<const float2*>(norm_scale(p.weights, 0, lane));
    float squares = 0.0f;
    for (int i = 2 * thread_index(); i < kHidden; i += 2 * kThreads) {
      const float2 h = embedding_pair(p.weights, token, i), s = scale[i / 2];
      wide[i] = h.x * s.x, wide[i + 1] = h.y * s.y;
      squares = fmaf(h.x, h.x, fmaf(h.y, h.y, squares));
    }
    const int first = Matrix<kOutput>::first_row(block_in_lane);
    for (int r = thread_index(); r < Matrix<kOutput>::row_count(block_in_lane) && first + r < kHidden; r += kThreads) {
      const float2 pair = embedding_pair(p.weights, token, (first + r) / 2 * 2);
      rows[r] = (first + r) % 2 ? pair.y : pair.x;
    }
    return inverse_rms(squares, per_warp);
  }

  // of this column's inputs; the barrier is for the next one's sum of squares
  DEVICE void keep_scale(float scale) {
    if (thread_index() == 0) scales[column] = scale;
    sync_block();
  }

  template <int Op, class Publish>
  DEVICE void project(int layer, Publish publish) {
    multiply_columns<Op>(tape, block_in_lane, scales_of<Op>(layer), inputs, kStride, sums);
    each([&] {
      out = sums + column * Matrix<Op>::row_count(block_in_lane);
      publish(scales[column]);
    });
  }

  template <int Op>
  DEVICE void project_and_join(int layer) {
    project<Op>(layer, [&](float) { join<Op>(layer); });
  }

  DEVICE void publish_qkv(int layer, float scale) {
    const int first = Matrix<kQkv>::first_row(block_in_lane);
    for (int r = thread_index(); r < Matrix<kQkv>::row_count(block_in_lane); r += kThreads) {
      float value = out[r] * scale;
      if constexpr (kQkvBias) value = fmaf(out[r], scale, p.weights.biases[(layer * kLanes + lane) * kQkvRows + first + r]);
      store_word(words + kQkvAt + first + r, value, epoch_of(layer));
    }
  }

  // of this position; layers without RoPE turn by nothing, as the table's first row says
  DEVICE const float2* turns(int layer) const {
    const int first = kTurnsFrom[layer];
    return p.weights.rope + (first ? first + position : 0) * (kHeadDim / 2);
  }

  // Qwen 3: the queries of a KV head, and its key, are normed one by one before they are turned
  DEVICE void take_head_scales(int layer, int head) {
    if constexpr (kHeadNorms) {
      constexpr int kRounds = (kHeadDim / 2 + kWarpThreads - 1) / kWarpThreads;
      WordPair pairs[kRounds];
      for (int h = warp; h <= kHeadsPerKv; h += kWarps) {
        const Word* of_head = words + kQkvAt + (h < kHeadsPerKv ? head * kHeadsPerKv + h : kHeads + head) * kHeadDim;
        const auto there = [&](int n) { return 2 * (kWarpThreads * n + thread) < kHeadDim; };
        const auto at = [&](int n) { return of_head + 2 * (kWarpThreads * n + thread); };
#pragma unroll
        for (int n = 0; n < kRounds; ++n) {
          pairs[n] = known_pair(0.0f, epoch_of(layer));
          if (there(n)) look_at(at(n), pairs[n]);
        }
        wait_all(pairs, there, at, epoch_of(layer), kQkvWords, watch);
        float squares = 0.0f;
#pragma unroll
        for (int n = 0; n < kRounds; ++n)
          squares = fmaf(pairs[n].a.value, pairs[n].a.value, fmaf(pairs[n].b.value, pairs[n].b.value, squares));
        for (int mask = kWarpThreads / 2; mask; mask /= 2) squares += shuffle_xor(squares, mask);
        if (thread == 0) head_scales[h] = rsqrtf(squares / kHeadDim + kNormEps);
      }
      sync_block();
    }
  }

  // numbers e and e + 1 of head h: the queries of a KV head come first, then its key
  DEVICE float2 head_normed(int layer, int h, int e, float2 pair) const {
    if constexpr (!kHeadNorms) return pair;
    const float* norm = p.weights.head_norms + (2 * layer + (h == kHeadsPerKv)) * kHeadDim + e;
    return {pair.x * head_scales[h] * norm[0], pair.y * head_scales[h] * norm[1]};
  }

  // keys and values of this layer that this block will read: on their way to the L2 before q is known
  DEVICE void prefetch_keys(int layer) {
    for (int unit = block_in_lane; unit < kAttentionUnits; unit += kBlocksPerLane) {
      const int split = unit % kSplits, owned = own_positions(position - 1, split);  // without the new one
      const int held = owned < kKvSlots[layer] ? owned : kKvSlots[layer];
      if (thread_index() == 0)
        prefetch_l2(kv_slots(p.weights, kv_lane(), layer, unit / kSplits, split), held * 4 * kHeadDim);
    }
  }

  DEVICE void attention(int layer) {
    for (int unit = block_in_lane; kAttentionUnits == kBlocksPerLane || unit < kAttentionUnits; unit += kBlocksPerLane) {
      const int head = unit / kSplits, slot = warp * kKeysAtOnce + thread / kKeyThreads;
      const Keys keys(p.weights, kv_lane(), layer, head, unit % kSplits, position);
      KeyValue first;  // of this warp: on their way while the query is awaited
      keys.load(0, slot, first.key), keys.load(1, slot, first.value);
      take_head_scales(layer, head);
      take_new(layer, head, keys);
      sync_block();
#pragma unroll 1
      for (int g = 0; g < kHeadsPerKv; g += kHeadsAtOnce)
        attend(keys, first, reinterpret_cast<const uint4*>(narrow), query + g * kHeadDim,
               wide + (warp * kHeadsPerKv + g) * kPartialWords);
      sync_block();
      publish_partial(layer, head, unit % kSplits);
      if (kAttentionUnits <= kBlocksPerLane) break;
      sync_block();  // before the next unit's query
    }
  }

  // The queries of a KV head, and in `narrow` the new position's key and value. The block that owns the position keeps
  // them: it alone writes and later reads them.
  DEVICE void take_new(int layer, int head, const Keys& keys) {
    constexpr int kQuery = kHeadsPerKv * kHeadDim;
    static_assert(kHeadDim <= kNarrow);
    const float2* turn = turns(layer);
    const float scale = rsqrtf(static_cast<float>(kHeadDim));
    constexpr int kToValue = (kKvHeads - 1) * kHeadDim;
    const int query_at = head * kQuery, to_key = (kHeads + head) * kHeadDim - kQuery - query_at;
    uint32_t* fresh = reinterpret_cast<uint32_t*>(narrow);
    uint32_t* kept = reinterpret_cast<uint32_t*>(keys.slots + keys.newest * 2 * kHeadDim);
    gather_from<kQuery + 2 * kHeadDim>(
        [&](int i) {
          const int there = query_at + (i < kQuery ? 0 : to_key) + (i < kQuery + kHeadDim ? 0 : kToValue);
          return words + kQkvAt + there + i;
        },
        epoch_of(layer), kQkvWords, watch, [&](int i) { return turn[i % kHeadDim / 2]; },
        [&](int i, float a, float b, float2 t) {
          if (i < kQuery) {
            const float2 q = rotate(head_normed(layer, i / kHeadDim, i % kHeadDim, {a, b}), t);
            query[i] = q.x * scale, query[i + 1] = q.y * scale;
            return;
          }
          const float2 k = rotate(head_normed(layer, kHeadsPerKv, i % kHeadDim, {a, b}), t);
          const uint32_t pair = i < kQuery + kHeadDim ? pack_halves(k.x, k.y) : pack_halves(a, b);
          fresh[(i - kQuery) / 2] = pair;
          if (keys.fresh >= 0) kept[(i - kQuery) / 2] = pair;
        });
  }

  DEVICE void publish_partial(int layer, int head, int split) {
    for (int i = thread_index(); i < kHeadsPerKv * kPartialWords; i += kThreads) {
      const int g = i / kPartialWords, e = i % kPartialWords;
      const float* parts = wide + g * kPartialWords;
      float top = -INFINITY, sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) top = fmaxf(top, parts[w * kHeadsPerKv * kPartialWords + kHeadDim]);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float own = parts[w * kHeadsPerKv * kPartialWords + kHeadDim];
        const float part = own == -INFINITY ? 0.0f : parts[w * kHeadsPerKv * kPartialWords + e];
        sum = fmaf(part, expf(own - finite_top(top)), sum);
      }
      store_word(words + kPartialAt + ((head * kHeadsPerKv + g) * kSplits + split) * kPartialWords + e,
                 e == kHeadDim ? top : sum, epoch_of(layer));
    }
  }

  // narrow = softmax over all splits, (heads, d); neighbouring threads take one split each, of the same two numbers
  DEVICE void take_attention(int layer) {
    constexpr int kPairs = kHeads * kHeadDim / 2, kAtOnce = kThreads / kSplitThreads;
    constexpr int kRounds = (kPairs + kAtOnce - 1) / kAtOnce, kMost = kRounds < 6 ? kRounds : 6;  // under way together
    const int from = here(thread_index()), split = from % kSplitThreads;
#pragma unroll 1
    for (int begin = 0; begin < kRounds; begin += kMost) {
      const auto number = [&](int n) { return 2 * ((begin + n / 2) * kAtOnce + from / kSplitThreads); };
      const auto there = [&](int n) { return split < kSplits && number(n) < 2 * kPairs; };
      const auto at = [&](int n) {
        const int head = number(n) / kHeadDim, e = n % 2 ? kHeadDim : number(n) % kHeadDim;
        return words + kPartialAt + (head * kSplits + split) * kPartialWords + e;
      };
      WordPair parts[2 * kMost];  // two numbers, then the maximum and the weight
#pragma unroll
      for (int n = 0; n < 2 * kMost; ++n) {
        parts[n] = known_pair(n % 2 ? -INFINITY : 0.0f, epoch_of(layer));
        if (there(n)) look_at(at(n), parts[n]);
      }
      wait_all(parts, there, at, epoch_of(layer), kPartial, watch);
#pragma unroll
      for (int n = 0; n < 2 * kMost; n += 2) merge_splits(number(n), parts[n], parts[n + 1]);
    }
    sync_block();
  }

  DEVICE void merge_splits(int i, WordPair numbers, WordPair softmax) {
    float top = softmax.a.value;
    for (int mask = 1; mask < kSplitThreads; mask *= 2) top = fmaxf(top, shuffle_xor(top, mask));
    const float share = expf(softmax.a.value - top);
    float weight = softmax.b.value * share, sum[] = {numbers.a.value * share, numbers.b.value * share};
    for (int mask = 1; mask < kSplitThreads; mask *= 2) weight += shuffle_xor(weight, mask);
    const int first = spread_sum<1, kSplitThreads, 2>(sum, thread);
    if (first < 0 || i >= kHeads * kHeadDim) return;
#pragma unroll
    for (int e = 0; e < spread_count(kSplitThreads, 2); ++e) narrow[i + first + e] = sum[e] / weight;
  }

  DEVICE void publish_activation(int layer, float scale) {
    Word* activation = words + kActivationAt + Matrix<kGateUp>::first_row(block_in_lane) / 2;
    for (int r = thread_index(); r < Matrix<kGateUp>::row_count(block_in_lane) / 2; r += kThreads)
      store_word(activation + r, silu(out[2 * r] * scale) * (out[2 * r + 1] * scale), epoch_of(layer));
  }

  DEVICE void take_activation(int layer) {
    gather<kIntermediate>(words + kActivationAt, epoch_of(layer), kActivation, watch,
                          [&](int i, float a, float b) { narrow[i] = a, narrow[i + 1] = b; });
    sync_block();
  }

  // Whether it waits for what no layer is left for (config.py: flush): the last module does.
  DEVICE static bool flushes(int module, int layer) { return kFlushes && module && layer == kLayers - 1; }

  // The partial outputs of this block's rows join the stream, which is published.
  template <int Op>
  DEVICE void join(int layer) {
    constexpr int module = Op == kDown;
    const bool now = kJoins[module][layer] == kPresent, later = kAddsDelayed[module][layer];
    const int first = Matrix<Op>::first_row(block_in_lane), count = Matrix<Op>::row_count(block_in_lane);
    Word sent[kLanes] = {};
#pragma unroll 1
    for (int r = thread_index(); r < count; r += kThreads) {
      if (now || kBroadcasts[module][layer] || (GRAPH && flushes(module, layer)))
        for (int d = 0; d < DEVICES; ++d)
          store_word(inbox(d) + mail_at(module, layer, lane) + first + r, out[r], epoch_of(layer));
      if (GRAPH && (now || flushes(module, layer))) continue;  // a kernel of its own joins, when all have sent
      if (later) look(sent, module, layer - kDelay, first + r, 0.0f);
      join_row(module, layer, first, r, out[r], sent);
    }
  }

  // Adds to row r of this block what the config says (config.py: Join), and publishes it.
  DEVICE void join_row(int module, int layer, int first, int r, float own, Word (&sent)[kLanes]) {
    const bool now = kJoins[module][layer] == kPresent;
    const int from = now ? layer : layer - kDelay;
    if (now) look(sent, module, from, first + r, own);
    const float sum = now || kAddsDelayed[module][layer] ? received(sent, module, from, first + r) : 0.0f;
    rows[r] += now ? sum : kJoins[module][layer] == kNoReduce ? kSqrtLanes * own : own + sum;
#pragma unroll 1
    for (int i = 0; flushes(module, layer) && i < kFlushes; ++i) {
      look(sent, kFlushed[i] % 2, kFlushed[i] / 2, first + r, 0.0f);
      rows[r] += received(sent, kFlushed[i] % 2, kFlushed[i] / 2, first + r);
    }
    store_word(words + kStreamAt + module * kHidden + first + r, rows[r], epoch_of(layer));
  }

  // what the lanes sent of a row, as far as it is there; `own` stands for this lane
  DEVICE void look(Word (&sent)[kLanes], int module, int layer, int row, float own) const {
#pragma unroll
    for (int l = 0; l < kLanes; ++l)
      sent[l] = l == lane ? known_word(own, epoch_of(layer)) : load_word(own_inbox() + mail_at(module, layer, l) + row);
  }

  // the sum over lanes, in their order, of what they sent
  DEVICE float received(Word (&sent)[kLanes], int module, int layer, int row) const {
    wait_all(sent, [&](int l) { return l != lane; },
             [&](int l) { return own_inbox() + mail_at(module, layer, l) + row; }, epoch_of(layer), kMail, watch);
    float sum = 0.0f;
#pragma unroll
    for (int l = 0; l < kLanes; ++l) sum += sent[l].value;
    return sum;
  }

  // The logits of this block's rows, and what the sampler makes of them; rows that fill up the last tile are no tokens.
  DEVICE Candidate scored(float scale) {
    Candidate best = no_candidate();
    const int first = Matrix<kHead>::first_row(block_in_lane);
    const int count = min(Matrix<kHead>::row_count(block_in_lane), kVocab - first);
    for (int r = thread_index(); r < count; r += kThreads) {
      const int token = lane * kVocab + first + r;
      const float logit = out[r] * scale;
      if (order().logits) order().logits[static_cast<int64_t>(column) * kLanes * kVocab + token] = logit;
      const float score = sampling().score(logit, position, token);
      if (sampling().filters()) {  // who draws is there
        store_word(inbox(0) + kScoresAt + token, logit, token_epoch + 1);
        store_word(inbox(0) + kScoresAt + kAll + token, score, token_epoch + 1);
      }
      best = better(best, {score, token});
    }
    return best;
  }

  DEVICE static bool is_among(int token, const int* ids, int count) {
    for (int i = 0; i < count; ++i)
      if (ids[i] == token) return true;
    return false;
  }

  // The best of this block, for the one that chooses. The host's wish to be heard comes with that of the first block;
  // one thread asks for it, for all columns alike, over PCIe: the answer comes while the largest matrix is read.
  DEVICE void project_best() {
    const bool first = p.device == 0 && block_index() == 0 && thread_index() == 0;
    const uint32_t cancel = first && step() < order().extra_passes && load_flag(p.cancel) ? kCancelled : 0;
    project<kHead>(0, [&](float scale) { publish_best(scored(scale), cancel); });
  }

  DEVICE void publish_best(Candidate own, uint32_t cancel) {
    own = best_of_block(own, candidates);
    if (thread_index()) return;
    Word* at = inbox(0) + kBestAt + 2 * (p.first_lane * kBlocksPerLane + block_index());
    store_word(at, own.score, token_epoch + 1);
    store_word(at + 1, float_of(static_cast<uint32_t>(own.token) | cancel), token_epoch + 1);
  }

  // the best of all blocks, the same in every thread
  DEVICE int take_best(bool& cancelled) {
    const Word* words_of_all = own_inbox() + kBestAt;
    const Word cancel = load_word(words_of_all + 1);
    Candidate best = no_candidate();
    gather<2 * kBlocks>(words_of_all, token_epoch + 1, kBest, watch, [&](int, float score, float bits) {
      best = better(best, {score, static_cast<int>(bits_of(bits) & ~kCancelled)});
    });
    best = best_of_block(best, candidates);
    const float first = wait_word(cancel, words_of_all + 1, token_epoch + 1, kBest, watch);
    cancelled = bits_of(first) & kCancelled;
    return best.token;
  }

  // `best`: what filters may leave out
  DEVICE int draw_one(int best) {
    return draw(sampling(), best, own_inbox() + kScoresAt, token_epoch + 1, per_warp, candidates, watch);
  }

  // Each column by a block of its own, where there are so many: its token, with kEnds if it ends there.
  DEVICE bool chooses() const { return p.device == 0 && block_index() == column % (kDeviceLanes * kBlocksPerLane); }
  DEVICE float choice() {
    bool cancelled;
    int token = take_best(cancelled);
    if (sampling().filters()) token = draw_one(token);
    const Column& c = order().columns[column];
    const bool ends = cancelled || step() + 1 == c.left || is_among(token, c.stops, c.stop_count);
    return float_of(static_cast<uint32_t>(token) | (ends ? kEnds : 0));
  }
  DEVICE void tell(float chosen) const {
    if (thread_index() == 0) tell_host(p.picks + step() * kMostColumns + column, chosen, token_epoch + 1);
  }
};
