#include "sequence.h"


#include <algorithm>
#include <stdexcept>
#include <utility>

namespace laneformer {

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

Sequence::Sequence(Request of, const Limits& limits, const PastOutputs& past)
    : request(std::move(of)),
      ids(request.prompt),
      prompt_length(static_cast<int>(ids.size())),
      picks(limits.picks && request.plain()),
      sampler(request.sampling, limits.vocab, ids) {
  const int room = limits.context - prompt_length + 1, wanted = std::min(request.max_new_tokens, room);
  end = request.scores() ? request.positions() : prompt_length + wanted;
  if (request.scores())
    scores.resize(prompt_length - request.score_from, request.top_logprobs);
  else
    ids.reserve(end);
  if (!request.scores() && request.top_logprobs >= 0) scores.resize(wanted, request.top_logprobs);
  if (request.keep_logits) left_behind.logits.resize(size_t(prompt_length) * limits.vocab);
  left_behind.partials.resize(request.keep_partials.size() * limits.partials);
  if (request.timed) left_behind.timings.token_s.reserve(std::max(0, wanted));
  drafts.reserve(kPassColumns), odds.reserve(kPassColumns);
  if (!request.speculate || request.masked || request.scores() || wanted < 2) return;
  drafter = std::make_unique<SuffixDrafter>(request.prediction, ids, request.reuse_prefix ? &past : nullptr);
}

News Sequence::take_news() {
  const bool over = stage == Stage::ended, scoring = request.scores();
  const int first = std::exchange(collected, new_tokens());
  News news{ticket, first, {ids.begin() + prompt_length + first, ids.end()}, {}, {}};
  if (scoring ? over : request.top_logprobs >= 0)
    news.scores = scores.part(scoring ? 0 : first, scoring ? scores.logprobs.size() : news.tokens.size());
  if (over) news.ended = std::move(left_behind);
  return news;
}

}  // namespace laneformer
