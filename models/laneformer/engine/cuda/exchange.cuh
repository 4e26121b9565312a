// Exchanges: how warps hand each other numbers without a barrier, and what is watched meanwhile.
//
// Every number travels as a word {value, epoch}, as in NCCL's LL protocol ({data, flag} in one 8-byte store). The reader
// knows which epoch it waits for and polls the words themselves: no separate flag, no fence, nothing to reset. Inside a lane: the stream after each join, q/k/v,
// the partial attention of each split of the keys, the activations. Between lanes: the partial outputs (mail), written
// to every device, read by the owner of the same rows `kDelay` layers later; and the best logit of each block.
//
// Why a buffer can be used again without asking: all blocks of a lane take part in every stream exchange, and between
// two uses of a buffer there is one. Mail has kMailSlots layers, because a lane can be so far ahead of another and no
// further. The tests prove both on this source for many shapes (vector clocks in the emulator).
#pragma once

enum Exchange { kStream, kQkvWords, kPartial, kActivation, kMail, kBest, kScores, kChoice };

struct Report {  // of the first wait that gave up; what is missing, and who misses it
  int set, exchange, layer, lane, block, warp;
  uint32_t epoch;
};

// Gives up a wait that lasts longer than the time-out, or when another one was given up.
struct Watch {
  int* aborted;    // device memory, one for all blocks of the device
  Report* report;  // host memory
  uint64_t limit_ns;
  int lane, layer;
};

// everything by value: a pointer to the caller's variables would put them in memory
DEVICE_CALL bool gives_up(Watch watch, uint64_t since, Exchange exchange, uint32_t epoch) {
  if (load_flag(watch.aborted)) return true;
  if (now_ns() - since < watch.limit_ns) return false;
  if (set_first(watch.aborted)) {
    *watch.report = {0, exchange, watch.layer, watch.lane, block_index(), thread_index() / 32, epoch};
    publish_flag(&watch.report->set, 1);
  }
  return true;
}

struct Patience {
  uint32_t spins = 0;
  uint64_t since = 0;

  DEVICE bool ends(const Watch& watch, Exchange exchange, uint32_t epoch) {
    if (++spins % 1024) return false;
    if (since == 0) since = now_ns();
    return gives_up(watch, since, exchange, epoch);
  }
};

// The value of a word that was loaded before; loaded again until it is of the epoch.
DEVICE float wait_word(Word word, const Word* at, uint32_t epoch, Exchange exchange, const Watch& watch) {
  Patience patience;
  while (!is_of(word, epoch)) {
    if (patience.ends(watch, exchange, epoch)) return 0.0f;
    word = load_word(at);
  }
  accept(at, epoch);
  return word.value;
}

// The same for two neighbours.
DEVICE float2 wait_pair(WordPair pair, const Word* at, uint32_t epoch, Exchange exchange, const Watch& watch) {
  Patience patience;
  while (!is_of(pair.a, epoch) || !is_of(pair.b, epoch)) {
    if (patience.ends(watch, exchange, epoch)) return {0.0f, 0.0f};
    pair = load_words(at);
  }
  accept(at, epoch);
  accept(at + 1, epoch);
  return {pair.a.value, pair.b.value};
}

// sink(i, value of word i, value of word i + 1, beside(i)) for all even i below Count; the block's threads share the
// pairs. Each thread has all of its loads under way before it looks at the first, those of `beside` too: they need not
// wait for the words.
template <int Count, class Beside, class Sink>
DEVICE void gather(const Word* words, uint32_t epoch, Exchange exchange, const Watch& watch, Beside beside, Sink sink) {
  constexpr int kPairs = Count / 2, kRounds = (kPairs + kThreads - 1) / kThreads;
  const int thread = here(thread_index());
  WordPair pairs[kRounds];
  float2 known[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int i = round * kThreads + thread;
    if (i < kPairs) known[round] = beside(2 * i), pairs[round] = load_words(words + 2 * i);
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int i = round * kThreads + thread;
    if (i >= kPairs) continue;
    const float2 values = wait_pair(pairs[round], words + 2 * i, epoch, exchange, watch);
    sink(2 * i, values.x, values.y, known[round]);
  }
}

template <int Count, class Sink>
DEVICE void gather(const Word* words, uint32_t epoch, Exchange exchange, const Watch& watch, Sink sink) {
  gather<Count>(words, epoch, exchange, watch, [](int) { return float2{0.0f, 0.0f}; },
                [&](int i, float a, float b, float2) { sink(i, a, b); });
}

// ---- where the words are ----

constexpr int kQkvRows = kUnits[kQkv] * kUnitRows[kQkv];
constexpr int kPartialWords = kHeadDim + 2;  // per head and split: the weighted sum of values, the maximum, the weight
constexpr int kStreamAt = 0;                 // [attention, mlp][kHidden]
constexpr int kQkvAt = kStreamAt + 2 * kHidden;
constexpr int kPartialAt = kQkvAt + kQkvRows;  // [head][split][kPartialWords]
constexpr int kActivationAt = kPartialAt + kHeads * kSplits * kPartialWords;
constexpr int kLaneWords = kActivationAt + kIntermediate;  // even, as all of the above: pairs are 16 bytes

constexpr int kBlocks = kLanes * kBlocksPerLane;  // of all devices
constexpr int kMailWords = 2 * kMailSlots * kLanes * kHidden;
constexpr int kBestAt = kMailWords;                // [token % 2][block][score, token]
constexpr int kScoresAt = kBestAt + 4 * kBlocks;   // [logit, score][vocabulary], for the sampler
constexpr int kChoiceAt = kScoresAt + 2 * kLanes * kVocab;
constexpr int kInboxWords = kChoiceAt + 2;

// the partial outputs of one lane: module 0 is attention, 1 the MLP
DEVICE int mail_at(int module, int layer, int lane) {
  return ((module * kMailSlots + layer % kMailSlots) * kLanes + lane) * kHidden;
}
