// Choosing the next token from logits. The order, for one token:
//
//   1. repetition penalty (Hugging Face's): ids of the prompt and the output; logit / penalty, or * where negative
//   2. frequency and presence penalty (OpenAI's): ids of the output; logit - frequency * count - presence
//   3. logit bias, added
//   4. ids outside a mask (a grammar's) are impossible
//   5. stop ids are impossible before min_new_tokens
//   6. the draw (sampling.h): greedy, or from the softmax at a temperature, filtered
#pragma once
#include <math.h>

#include <cstdint>
#include <utility>
#include <vector>

#define DEVICE inline
#include "../sampling.h"
#undef DEVICE

namespace laneformer {

constexpr int kMaxStops = 16;  // stop ids of a plain request

struct SamplingOptions {
  Sampling draw;
  double repetition_penalty = 1.0, frequency_penalty = 0.0, presence_penalty = 0.0;
  std::vector<std::pair<int, double>> logit_bias;  // id, what is added
  int min_new_tokens = 0;
  std::vector<int> stop_ids;  // the output ends after one of these

  bool penalises() const { return repetition_penalty != 1.0 || frequency_penalty != 0.0 || presence_penalty != 0.0; }
  // Whether a draw depends on the logits and on `draw` alone.
  bool plain() const {
    return !penalises() && logit_bias.empty() && !min_new_tokens && stop_ids.size() <= kMaxStops;
  }
  bool stops_at(int id) const;
  void expect(int vocab) const;  // throws std::invalid_argument where an id is outside the vocabulary
};

void expect_ids(const std::vector<int>& ids, int vocab);  // throws as SamplingOptions::expect

// Returns the first of the largest logits; NaN counts as none, and where there is nothing else the answer is 0.
int best_id(const float* logits, int vocab);

// Writes the ids of the n <= vocab largest logits, largest first; the lowest id first in a tie, NaN last.
void best_ids(const float* logits, int vocab, int n, int* ids);

// One sequence's sampler; `choose` and `accept` allocate nothing, but for the first mask.
class Sampler {
 public:
  Sampler(SamplingOptions options, int vocab, const std::vector<int>& prompt);
  // Returns the token after the one at `position`; with a mask, one of the ids whose bits it holds (bit id % 32 of word
  // id / 32), or -1 where none of them is possible.
  int choose(const float* logits, int position, const std::vector<uint32_t>& mask = {});
  void accept(int token);                         // the token is part of the output now
  const SamplingOptions& options() const { return options_; }
  int vocab() const { return vocab_; }

 private:
  const float* adjusted(const float* logits, const std::vector<uint32_t>& mask);
  struct Weighed {
    float logit, weight;
  };
  float threshold(const float* logits, float top);
  float top_p_threshold(Weighed* begin, Weighed* end, float top) const;

  SamplingOptions options_;
  int vocab_;
  int made_ = 0;               // tokens in the output so far
  std::vector<int> seen_;      // distinct ids of the prompt and the output; only kept for penalties
  std::vector<int> times_;     // per id: how often it is in the output; -1: neither there nor in the prompt
  std::vector<float> logits_;  // a copy, adjusted
  std::vector<Weighed> kept_;  // for the filters
};

}  // namespace laneformer
