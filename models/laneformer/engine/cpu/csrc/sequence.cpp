#include "sequence.h"

#include <algorithm>

namespace laneformer {

namespace {
constexpr int kLongestPhrase = 4, kShortestPhrase = 2;  // ids that must agree before the rest is guessed
}

void Scores::resize(size_t tokens, int best) {
  top = best;
  logprobs.assign(tokens, 0.0f);
  top_ids.assign(tokens * best, 0);
  top_logprobs.assign(tokens * best, 0.0f);
}

void Scores::record(size_t index, const float* logits, int vocab, int token, double log_sum_exp) {
  logprobs[index] = static_cast<float>(logits[token] - log_sum_exp);
  int* ids = top_ids.data() + index * top;
  best_ids(logits, vocab, top, ids);
  for (int i = 0; i < top; ++i)
    top_logprobs[index * top + i] = static_cast<float>(logits[ids[i]] - log_sum_exp);
}

int KvContents::reusable(const ModelSpec& spec, const std::vector<int>& prompt, int most) const {
  const auto common = std::mismatch(ids.begin(), ids.end(), prompt.begin(), prompt.end()).first - ids.begin();
  const int kept = std::min(static_cast<int>(common), most);
  for (int layer = 0; layer < spec.layers; ++layer) {
    const int lost = written - spec.cache_slots(layer);  // positions below this one are overwritten
    if (lost > 0 && spec.window[layer] && lost > kept - spec.window[layer] + 1) return 0;
  }
  return std::max(kept, 0);
}

void Sequence::guess(int most) {
  const int length = static_cast<int>(ids.size());
  for (int phrase = kLongestPhrase; phrase >= kShortestPhrase && most > 0; --phrase)
    for (int end = length - 1; end >= phrase; --end)
      if (std::equal(ids.begin() + end - phrase, ids.begin() + end, ids.end() - phrase)) {
        for (int i = 0; i < most; ++i)  // a repetition may go on into its own guesses
          guesses.push_back(end + i < length ? ids[end + i] : guesses[end + i - length]);
        return;
      }
}

}  // namespace laneformer
