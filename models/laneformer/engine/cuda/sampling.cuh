// The choice of a token on the GPU (the rule: sampling.h). Without filters a draw needs no more than greedy decoding
// does: every block publishes its best score.
//
// With filters it also publishes the logits and scores of all its tokens, and one block draws: it takes the best token
// and asks whether the filters leave it, that is, whether the tokens above it are fewer than top_k and together below
// top_p. If they do, no other token that they leave can have a better score. If not, all tokens up to its logit are out,
// and the best of the others is asked: 1 + ln(1 / p) rounds on average where what the filters leave has probability p.
// A round needs one exponential for each token; a search for the threshold, bit by bit, would need 32.
#pragma once
#include "sampling.h"

using namespace laneformer;

constexpr uint32_t kCancelled = 1u << 30;  // set in a token's word: the host wants no more

// what every score beats but NaN; a token none the less, so that a broken model's next one has an embedding
DEVICE Candidate no_candidate() { return {-INFINITY, kLanes * kVocab - 1}; }

// the best of the block, in every thread; `per_warp` in shared memory; two barriers
DEVICE Candidate best_of_block(Candidate best, Candidate* per_warp) {
  for (int mask = kWarpThreads / 2; mask; mask /= 2) best = better(best, {shuffle_xor(best.score, mask), shuffle_xor(best.token, mask)});
  sync_block();  // those before have been read
  if (thread_index() % kWarpThreads == 0) per_warp[thread_index() / kWarpThreads] = best;
  sync_block();
  for (int w = 0; w < kWarps; ++w) best = better(best, per_warp[w]);
  return best;
}

// float32 numbers but NaN as integers that grow with them
DEVICE uint32_t key_of(float value) {
  const uint32_t bits = bits_of(value);
  return bits >> 31 ? ~bits : bits | 1u << 31;
}
DEVICE float value_of(uint32_t key) { return float_of(key >> 31 ? key & ~(1u << 31) : ~key); }

constexpr int kAll = kLanes * kVocab;
constexpr int kBatch = 8;      // loads that a thread has under way
constexpr int kMostHeld = 64;  // logits that a thread keeps in registers, as 32,000 tokens need; it reads others again
constexpr int kPerThread = (kAll + kThreads * kBatch - 1) / (kThreads * kBatch) * kBatch;
constexpr int kHeld = kPerThread < kMostHeld ? kPerThread : kMostHeld;

// values[j] = word at(j). All loads are under way together, and together once more as long as a word is missing.
template <class At>
DEVICE void take_batch(float* values, uint32_t epoch, const Watch& watch, At at) {
  Patience patience;
  bool missing;
  do {
    Word batch[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) batch[j] = load_word(at(j));
    missing = false;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) values[j] = batch[j].value, missing = missing || !is_of(batch[j], epoch);
    if (missing && patience.ends(watch, kScores, epoch)) return;
  } while (missing);
#pragma unroll
  for (int j = 0; j < kBatch; ++j) accept(at(j), epoch);
}

// The logits of this thread's tokens: thread, thread + kThreads, ...
struct Logits {
  const Word* words;  // [kAll] logits, [kAll] scores
  const Word* own;    // the thread's first logit
  uint32_t epoch;
  const Watch& watch;
  float* per_warp;
  float held[kHeld];

  DEVICE static int token_of(int i) { return i * kThreads + here(thread_index()); }
  // of logit i; a word of another thread where there is no such token
  DEVICE const Word* at(int i) const { return (i + 1) * kThreads <= kAll || token_of(i) < kAll ? own + i * kThreads : words; }

  // visit(i, the logits i to i + kBatch); -INFINITY behind the vocabulary
  template <class Visit>
  DEVICE void each(Visit visit) const {
#pragma unroll
    for (int i = 0; i < kHeld; i += kBatch) visit(i, held + i);
#pragma unroll 1
    for (int i = kHeld; i < kPerThread; i += kBatch) {
      float x[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) x[j] = load_word(at(i + j)).value;  // they are there
#pragma unroll
      for (int j = 0; j < kBatch; ++j) x[j] = token_of(i + j) < kAll ? x[j] : -INFINITY;
      visit(i, x);
    }
  }

  // waits for all; the largest of the block
  DEVICE float take(Candidate* candidates) {
    float top = -INFINITY;
    const auto take_at = [&](int i, float* x) {
      take_batch(x, epoch, watch, [&](int j) { return at(i + j); });
#pragma unroll
      for (int j = 0; j < kBatch; ++j) x[j] = token_of(i + j) < kAll ? x[j] : -INFINITY, top = fmaxf(top, x[j]);
    };
#pragma unroll
    for (int i = 0; i < kHeld; i += kBatch) take_at(i, held + i);
    float others[kBatch];
#pragma unroll 1
    for (int i = kHeld; i < kPerThread; i += kBatch) take_at(i, others);
    return best_of_block({top, 0}, candidates).score;
  }

  // the best score of the tokens whose logit is above `out`
  DEVICE Candidate best_above(float out, Candidate* candidates) const {
    Candidate best = no_candidate();
    each([&](int i, const float* x) {
      float scores[kBatch];
      take_batch(scores, epoch, watch, [&](int j) { return x[j] > out ? own + (i + j) * kThreads + kAll : words; });
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (x[j] > out && scores[j] > best.score) best = {scores[j], token_of(i + j)};
    });
    return best_of_block(best, candidates);
  }

  DEVICE float of_block(float own) const {
    const float sum = block_sum(own, per_warp);
    sync_block();  // all have read it: the caller may use per_warp
    return sum;
  }

  DEVICE float count_above(float least) const {
    float count = 0.0f;
    each([&](int, const float* x) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) count += x[j] > least ? 1.0f : 0.0f;
    });
    return of_block(count);
  }

  // The largest number that at least `count` logits exceed, or a larger one that exactly so many do; -INFINITY where
  // there are not so many. In steps that double down from the top, then halve.
  DEVICE float below(float count, float top) const {
    const uint32_t lowest = key_of(-INFINITY), highest = key_of(top);
    uint32_t key = highest, step = 1u << 20;  // an eighth of the top
    float found = 0.0f;
#pragma unroll 1
    while (found < count && key != lowest) {
      step *= 2, key = highest - lowest > step ? highest - step : lowest;
      found = count_above(value_of(key));
    }
#pragma unroll 1
    for (; step && found > count; step /= 2) {
      const float more = count_above(value_of(key + step));
      if (more >= count) key += step, found = more;
    }
    return value_of(key);
  }

  // the weights of the tokens above `least`, and their part above `logit`
  DEVICE float2 weights(const Sampling& sampling, float top, float least, float logit) const {
    float all = 0.0f, above = 0.0f;
    each([&](int, const float* x) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const float weight = x[j] > least ? sampling.weight(x[j], top) : 0.0f;
        all += weight, above += x[j] > logit ? weight : 0.0f;
      }
    });
    return {of_block(all), of_block(above)};
  }
};

// One block draws; `token` has the best score of all. `words`: the logits [kAll], the scores [kAll], of this epoch.
DEVICE_CALL int draw(Sampling sampling, int token, const Word* words, uint32_t epoch, float* per_warp,
                     Candidate* candidates, Watch watch) {
  Logits logits{words, words + thread_index(), epoch, watch, per_warp};
  const float top = logits.take(candidates);
  if (top == -INFINITY || top == INFINITY) return token;  // broken logits leave no distribution
  const bool counts = sampling.top_k > 0 && sampling.top_k < kAll, weighs = sampling.top_p < 1.0f;
  const float most = static_cast<float>(sampling.top_k);
  const float least = counts && weighs ? logits.below(most, top) : -INFINITY;  // top_p is of what top_k leaves
#pragma unroll 1
  for (Candidate best{top, token};;) {
    const float logit = load_word(words + best.token).value;
    bool stays = logit > least && sampling.keeps(logit, top);
    if (stays && weighs) {
      const float2 weights = logits.weights(sampling, top, least, logit);
      stays = weights.y < sampling.top_p * weights.x;
    } else if (stays && counts) {
      stays = logits.count_above(logit) < most;
    }
    if (stays || best.score == -INFINITY) return best.token;
    best = logits.best_above(fmaxf(logit, least), candidates);
  }
}
