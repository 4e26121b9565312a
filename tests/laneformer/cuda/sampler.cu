// The sampler alone, one block: a token for each position from the same logits, by the path that the engine takes.
#include "emulator.h"
#include "block.cuh"

struct Picks {
  Sampling sampling;
  const float* logits;  // [vocabulary]
  Word* words;          // [logit, score][vocabulary]
  int* tokens;          // [count]
  int first, count;
};

void pick(Picks p) {
  Candidate* candidates = reinterpret_cast<Candidate*>(dynamic_shared());
  float* per_warp = reinterpret_cast<float*>(candidates + kWarps);
  for (int i = 0; i < p.count; ++i) {
    const int position = p.first + i;
    Candidate best = no_candidate();
    for (int token = kAll - 1 - thread_index(); token >= 0; token -= kThreads) {
      const float score = p.sampling.score(p.logits[token], position, token);
      best = better(best, {score, token});
      store_word(p.words + token, p.logits[token], i + 1);
      store_word(p.words + kAll + token, score, i + 1);
    }
    int token = best_of_block(best, candidates).token;
    if (p.sampling.filters()) token = draw(p.sampling, token, p.words, i + 1, per_warp, candidates, {});
    if (thread_index() == 0) p.tokens[i] = token;
    sync_block();
  }
}
EMULATE(pick, Picks)
