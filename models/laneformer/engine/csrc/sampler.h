// Choosing the next token from logits: greedy, or temperature, top-k, top-p, min-p in Hugging Face's order.
//
// The random number is a pure function of (seed, index of the token): Philox4x32-10, so the same seed and prompt give
// the same tokens whatever the number of threads.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

namespace laneformer {

struct SamplingOptions {
  double temperature = 0.0;  // 0: greedy; the lowest id wins a tie
  int top_k = 0;             // 0: off
  double top_p = 1.0;        // the fewest likely tokens whose probability reaches top_p
  double min_p = 0.0;        // tokens at least min_p times as likely as the likeliest
  uint64_t seed = 0;
};

double uniform(uint64_t seed, uint64_t index);  // in [0, 1)

class Sampler {
 public:
  void reserve(int vocab) { candidates_.reserve(vocab); }  // so that `choose` allocates nothing
  int choose(const float* logits, int vocab, const SamplingOptions& options, uint64_t index);

 private:
  std::vector<std::pair<float, int>> candidates_;  // (logit, id)
};

}  // namespace laneformer
