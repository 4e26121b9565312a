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
    *watch.report = {0, exchange, watch.layer, watch.lane, block_index(), thread_index() / kWarpThreads, epoch};
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

// a word that need not come
DEVICE Word known_word(float value, uint32_t epoch) {
#if GRAPH
  return {value};
#else
  return {value, epoch};
#endif
}
DEVICE WordPair known_pair(float a, uint32_t epoch) { return {known_word(a, epoch), known_word(0.0f, epoch)}; }

DEVICE bool is_of(WordPair pair, uint32_t epoch) { return static_cast<int>(is_of(pair.a, epoch)) & is_of(pair.b, epoch); }
DEVICE void look_at(const Word* at, Word& word) { word = load_word(at); }
DEVICE void look_at(const Word* at, WordPair& pair) { pair = load_words(at); }
DEVICE void accept(const Word* at, const Word&, uint32_t epoch) { accept(at, epoch); }
DEVICE void accept(const Word* at, const WordPair&, uint32_t epoch) { accept(at, epoch), accept(at + 1, epoch); }

// Words, or pairs of neighbours, that were loaded before: the n-th from at(n), or known where not there(n). All that are
// not of the epoch are loaded again together, as often as it takes: one round trip more, not one for each of them. What
// a wait that was given up misses is zero.
template <int Count, class Words, class There, class At>
DEVICE void wait_all(Words (&words)[Count], There there, At at, uint32_t epoch, Exchange exchange, const Watch& watch) {
  Patience patience;
  for (bool ends = false;; ends = patience.ends(watch, exchange, epoch)) {
    bool missing = false;
#pragma unroll
    for (int n = 0; n < Count; ++n) {
      if (is_of(words[n], epoch)) continue;
      missing = true;
      if (ends)
        words[n] = {};
      else
        look_at(at(n), words[n]);
    }
    if (!missing) break;
    if (ends) return;
  }
#pragma unroll
  for (int n = 0; n < Count; ++n)
    if (there(n)) accept(at(n), words[n], epoch);
}

// The value of a word that was loaded before; loaded again until it is of the epoch.
DEVICE float wait_word(Word word, const Word* at, uint32_t epoch, Exchange exchange, const Watch& watch) {
  Word words[1] = {word};
  wait_all(words, [](int) { return true; }, [&](int) { return at; }, epoch, exchange, watch);
  return words[0].value;
}

// sink(i, value of word i, value of word i + 1, beside(i)) for all even i below Count; at(i) is where they are. The block's threads
// share the pairs. Each thread has all of its loads under way before it looks at the first, those of `beside` too: they need not
// wait for the words.
template <int Count, class At, class Beside, class Sink>
DEVICE void gather_from(At at, uint32_t epoch, Exchange exchange, const Watch& watch, Beside beside, Sink sink) {
  constexpr int kRounds = (Count + 2 * kThreads - 1) / (2 * kThreads);
  const int first = 2 * here(thread_index());
  const auto place = [&](int round) { return 2 * kThreads * round + first; };
  const auto there = [&](int round) { return 2 * kThreads * (round + 1) <= Count || place(round) < Count; };
  WordPair pairs[kRounds];
  float2 known[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    pairs[round] = known_pair(0.0f, epoch);
    if (there(round)) known[round] = beside(place(round)), look_at(at(place(round)), pairs[round]);
  }
  wait_all(pairs, there, [&](int round) { return at(place(round)); }, epoch, exchange, watch);
#pragma unroll
  for (int round = 0; round < kRounds; ++round)
    if (there(round)) sink(place(round), pairs[round].a.value, pairs[round].b.value, known[round]);
}

template <int Count, class Beside, class Sink>
DEVICE void gather(const Word* words, uint32_t epoch, Exchange exchange, const Watch& watch, Beside beside, Sink sink) {
  gather_from<Count>([&](int i) { return words + i; }, epoch, exchange, watch, beside, sink);
}

template <int Count, class Sink>
DEVICE void gather(const Word* words, uint32_t epoch, Exchange exchange, const Watch& watch, Sink sink) {
  gather<Count>(words, epoch, exchange, watch, [](int) { return float2{0.0f, 0.0f}; },
                [&](int i, float a, float b, float2) { sink(i, a, b); });
}

// ---- where the words are ----

constexpr int kQkvRows = kUnits[kQkv] * kTile;
constexpr int kPartialWords = kHeadDim + 2;  // per head and split: the weighted sum of values, the maximum, the weight
constexpr int kStreamAt = 0;                 // [attention, mlp][kHidden]
constexpr int kQkvAt = kStreamAt + 2 * kHidden;
constexpr int kPartialAt = kQkvAt + kQkvRows;  // [head][split][kPartialWords]
constexpr int kActivationAt = kPartialAt + kHeads * kSplits * kPartialWords;
constexpr int kLaneWords = kActivationAt + kIntermediate;  // even, as all of the above: pairs are 16 bytes

constexpr int kBlocks = kLanes * kBlocksPerLane;  // of all devices
constexpr int kMailWords = 2 * kMailSlots * kLanes * kHidden;
constexpr int kBestAt = kMailWords;                // [block][score, token]
constexpr int kScoresAt = kBestAt + 2 * kBlocks;   // [logit, score][vocabulary], for the sampler
constexpr int kChoiceAt = kScoresAt + 2 * kLanes * kVocab;
constexpr int kInboxWords = kChoiceAt + 2;

// the partial outputs of one lane: module 0 is attention, 1 the MLP
DEVICE int mail_at(int module, int layer, int lane) {
  return ((module * kMailSlots + layer % kMailSlots) * kLanes + lane) * kHidden;
}
