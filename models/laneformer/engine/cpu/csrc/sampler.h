// Choosing the next token from logits. The order, for one token:
//
//   1. repetition penalty (Hugging Face's): ids of the prompt and the output; logit / penalty, or * where negative
//   2. frequency and presence penalty (OpenAI's): ids of the output; logit - frequency * count - presence
//   3. logit bias, added
//   4. stop ids are impossible before min_new_tokens
//   5. temperature, top-k, top-p, min-p, each on what the one before left; temperature 0 takes the largest logit
//
// The random number is a pure function of (seed, index of the token): Philox4x32-10, so the same seed and prompt give
// the same tokens whatever the number of threads, of requests in a batch, or of guesses verified at once.
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
  double repetition_penalty = 1.0, frequency_penalty = 0.0, presence_penalty = 0.0;
  std::vector<std::pair<int, double>> logit_bias;  // id, what is added
  int min_new_tokens = 0;
  std::vector<int> stop_ids;  // the output ends after one of these

  bool penalises() const { return repetition_penalty != 1.0 || frequency_penalty != 0.0 || presence_penalty != 0.0; }
  bool stops_at(int id) const;
};

double uniform(uint64_t seed, uint64_t index);  // in [0, 1)

// The first of the largest logits; NaN counts as none, and where there is nothing else the answer is 0.
int best_id(const float* logits, int vocab);

// The n largest logits, largest first; the lowest id first in a tie, NaN last. n <= vocab.
void best_ids(const float* logits, int vocab, int n, int* ids);

// One sequence's sampler; `choose` and `accept` allocate nothing.
class Sampler {
 public:
  Sampler(SamplingOptions options, int vocab, const std::vector<int>& prompt);
  int choose(const float* logits, uint64_t index);  // index: how many tokens the output has already
  void accept(int token);                           // the token is part of the output now
  const SamplingOptions& options() const { return options_; }

 private:
  const float* adjusted(const float* logits, uint64_t index);

  SamplingOptions options_;
  int vocab_;
  std::vector<int> seen_;     // distinct ids of the prompt and the output; only kept for penalties
  std::vector<int> times_;    // per id: in the output; -1: neither there nor in the prompt
  std::vector<float> logits_;  // a copy, adjusted
  std::vector<std::pair<float, int>> candidates_;  // (logit, id)
};

}  // namespace laneformer
