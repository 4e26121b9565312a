// The choice of a token on the GPU (the rule: sampling.h). Without filters a draw needs no more than greedy decoding
// does: every block publishes its best score.
//
// The filters are thresholds for the logit. One block finds it by bisection over the bits of an
// ordered key, all logits in registers. Logits that are equal to the threshold stay, all of them.
#pragma once
#include "sampling.h"

using namespace laneformer;

constexpr uint32_t kCancelled = 1u << 30;  // set in a token's word: the host wants no more

// what every score beats but NaN; a token none the less, so that a broken model's next one has an embedding
DEVICE Candidate no_candidate() { return {-INFINITY, kLanes * kVocab - 1}; }

// the best of the block, in every thread; `per_warp` in shared memory; two barriers
DEVICE Candidate best_of_block(Candidate best, Candidate* per_warp) {
  for (int mask = 16; mask; mask /= 2) best = better(best, {shuffle_xor(best.score, mask), shuffle_xor(best.token, mask)});
  sync_block();  // those before have been read
  if (thread_index() % 32 == 0) per_warp[thread_index() / 32] = best;
  sync_block();
  for (int w = 0; w < kWarps; ++w) best = better(best, per_warp[w]);
  return best;
}

// grows with the number
DEVICE uint32_t key_of(float value) {
  const uint32_t bits = bits_of(value);
  return bits >> 31 ? ~bits : bits | 1u << 31;
}

constexpr int kScoresPerThread = (kLanes * kVocab + kThreads - 1) / kThreads;

// the largest key for which the numbers with at least this key have together this mass
template <class Mass>
DEVICE uint32_t threshold(const float (&logits)[kScoresPerThread], float target, float* per_warp, Mass mass) {
  uint32_t key = 0;
#pragma unroll 1
  for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kScoresPerThread; ++i)
      if (key_of(logits[i]) >= (key | bit)) sum += mass(logits[i]);
    sync_block();  // the sums before have been read
    if (block_sum(sum, per_warp) >= target) key |= bit;
  }
  return key;
}

// One block draws from the logits of all: words [V] of this epoch.
DEVICE_CALL int draw(Sampling sampling, const Word* words, uint32_t epoch, int position, float* per_warp,
                Candidate* candidates, Watch watch) {
  constexpr int kAll = kLanes * kVocab;
  float logits[kScoresPerThread];
  Candidate best = no_candidate();
#pragma unroll 1
  for (int token = thread_index(); token < kAll; token += kThreads)
    best = better(best, {wait_word(load_word(words + token), words + token, epoch, kScores, watch), token});
#pragma unroll
  for (int i = 0; i < kScoresPerThread; ++i) {
    const int token = i * kThreads + thread_index();
    logits[i] = token < kAll ? load_word(words + token).value : -INFINITY;  // it is there
  }
  const float top = best_of_block(best, candidates).score;
  uint32_t least = key_of(-3.402823466e38f);
  if (sampling.top_k > 0 && sampling.top_k < kAll)
    least = threshold(logits, static_cast<float>(sampling.top_k), per_warp, [](float x) { return x > -INFINITY ? 1.0f : 0.0f; });
  const auto weight = [&](float x) { return key_of(x) >= least ? sampling.weight(x, top) : 0.0f; };
  if (sampling.top_p < 1.0f) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kScoresPerThread; ++i) sum += weight(logits[i]);
    sync_block();
    const float total = block_sum(sum, per_warp);
    const uint32_t key = threshold(logits, sampling.top_p * total, per_warp, weight);
    least = key > least ? key : least;
  }
  best = no_candidate();
#pragma unroll 1
  for (int token = thread_index(); token < kAll; token += kThreads) {
    const float logit = load_word(words + token).value;
    if (key_of(logit) >= least && sampling.keeps(logit, top))
      best = better(best, {sampling.score(logit, position, token), token});
  }
  return best_of_block(best, candidates).token;
}
