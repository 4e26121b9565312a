// One sequence of a request, and what a KV cache still holds of earlier ones.
#pragma once
#include <cstdint>
#include <vector>

#include "model.h"
#include "sampler.h"

namespace laneformer {

// Log-probabilities by the model itself: of the raw logits, before penalties and temperature.
struct Scores {
  int top = 0;                     // so many best ids are kept for each scored token
  std::vector<float> logprobs;     // (tokens,): of the token that came
  std::vector<int> top_ids;        // (tokens, top): the likeliest first
  std::vector<float> top_logprobs;  // (tokens, top)

  void resize(size_t tokens, int best);
  void record(size_t index, const float* logits, int vocab, int token, double log_sum_exp);
};

// The ids whose keys and values a cache holds, positions 0 .. ids.size() - 1.
struct KvContents {
  std::vector<int> ids;
  int written = 0;         // positions ever written since position 0: a sliding-window ring holds the last ones
  uint64_t last_used = 0;  // request number

  // How many leading positions of `prompt` (at most `most`) need not be computed again: the common prefix, unless a
  // ring has already overwritten keys that the next position's window needs; then none, as a layer's keys depend on
  // every position that the layers below it see.
  int reusable(const ModelSpec& spec, const std::vector<int>& prompt, int most) const;
};

struct Sequence {
  Sequence(std::vector<int> prompt, const SamplingOptions& sampling, int vocab)
      : ids(std::move(prompt)), prompt_length(static_cast<int>(ids.size())), sampler(sampling, vocab, ids) {}

  std::vector<int> ids;  // the prompt, then the new tokens; also read by poll, under the mutex
  int prompt_length;
  int end = 0;       // ids.size() at which the sequence is over; when scoring, positions to run
  int cache = 0;     // its KV cache
  int position = 0;  // positions that have run through the layers
  bool finished = false;
  Sampler sampler;
  Scores scores;
  // its part of the running pass
  int columns = 0, head_columns = 0;
  std::vector<int> drafts;  // draft tokens: the last columns, ids that may come next

  int new_tokens() const { return static_cast<int>(ids.size()) - prompt_length; }
  // Prompt lookup: what followed the latest earlier place of the last few ids, `most` ids, into `drafts`.
  void draft(int most);
};

}  // namespace laneformer
