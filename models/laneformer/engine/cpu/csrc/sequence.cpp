#include "sequence.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace laneformer {

namespace {
constexpr int kLongestPhrase = 4, kShortestPhrase = 2;  // ids that must agree before the rest is drafted

SamplingOptions sampling_of(const Request& request, size_t index) {
  SamplingOptions sampling = request.sampling;
  if (!request.seeds.empty()) sampling.draw.seed = request.seeds[index];
  return sampling;
}
}  // namespace

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

Scores Scores::part(size_t from, size_t count) const {
  if (from > logprobs.size() || count > logprobs.size() - from) throw std::invalid_argument("no such scores");
  const auto part_of = [&](const auto& values, size_t each) {
    const auto begin = values.begin() + static_cast<ptrdiff_t>(from * each);
    return std::vector(begin, begin + static_cast<ptrdiff_t>(count * each));
  };
  return {top, part_of(logprobs, 1), part_of(top_ids, top), part_of(top_logprobs, top)};
}

Sequence::Sequence(std::shared_ptr<const Request> of, size_t index, const ModelSpec& spec)
    : request(std::move(of)),
      ids(request->prompts[index]),
      prompt_length(static_cast<int>(ids.size())),
      sampler(sampling_of(*request, index), spec.vocab, ids) {
  const int room = spec.context - prompt_length + 1, wanted = std::min(request->max_new_tokens, room);
  end = request->scores() ? request->positions() : prompt_length + wanted;
  if (request->scores())
    scores.resize(prompt_length - request->score_from, request->top_logprobs);
  else
    ids.reserve(end);
  if (!request->scores() && request->top_logprobs >= 0) scores.resize(wanted, request->top_logprobs);
  drafts.reserve(kMaxColumns);
}

void Sequence::draft(int most) {
  const int length = static_cast<int>(ids.size());
  for (int phrase = kLongestPhrase; phrase >= kShortestPhrase && most > 0; --phrase)
    for (int end = length - 1; end >= phrase; --end)
      if (std::equal(ids.begin() + end - phrase, ids.begin() + end, ids.end() - phrase)) {
        for (int i = 0; i < most; ++i)  // a repetition may continue into its own drafts
          drafts.push_back(end + i < length ? ids[end + i] : drafts[end + i - length]);
        return;
      }
}

News Sequence::take_news() {
  const bool over = stage == Stage::ended, scoring = request->scores();
  const int first = std::exchange(collected, new_tokens());
  News news{ticket, first, {ids.begin() + prompt_length + first, ids.end()}, {}, {}, {}};
  if (scoring ? over : request->top_logprobs >= 0)
    news.scores = scores.part(scoring ? 0 : first, scoring ? scores.logprobs.size() : news.tokens.size());
  if (over) news.statistics = statistics;
  if (over) news.error = error;
  return news;
}

}  // namespace laneformer
