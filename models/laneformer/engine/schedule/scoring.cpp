// What scoring leaves of a pass: log-probabilities, logits and partial outputs of prompt positions.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "schedule.h"

namespace laneformer {

// --- rows of a pass with columns --------------------------------------------------------------------------------

void Schedule::score_row(const Pass& pass, int row, const float* logits) {
  const Column& column = pass.column[pass.logit_column[row]];
  Sequence& s = *running_[column.sequence];
  if (!s.request.scores()) return;
  const int next = column.position + 1;
  if (s.request.keep_logits)
    std::memcpy(s.left_behind.logits.data() + size_t(column.position) * limits_.vocab, logits,
                limits_.vocab * sizeof(float));
  if (next < static_cast<int>(s.ids.size()) && next >= s.request.score_from)
    s.scores.record(next - s.request.score_from, logits, limits_.vocab, s.ids[next],
                    limits_.log_sum_exp(logits, limits_.vocab));
}

float* Schedule::partials(const Column& column, int layer, int module, size_t floats) {
  Sequence& s = *running_[column.sequence];
  const std::vector<int>& chosen = s.request.keep_partials;
  const auto found = std::lower_bound(chosen.begin(), chosen.end(), column.position);
  if (found == chosen.end() || *found != column.position) return nullptr;
  const size_t row = size_t(found - chosen.begin()) * limits_.partials;
  return s.left_behind.partials.data() + row + (size_t(layer) * 2 + module) * floats;
}

// --- chunks of a prompt -----------------------------------------------------------------------------------------

Schedule::PromptChunk Schedule::prompt_chunk(const Pass& pass) const {
  const Sequence& s = *running_[pass.column[0].sequence];
  const Request& request = s.request;
  const auto begin = s.ids.begin() + s.position;
  const int count = std::min(pass.chunk_tokens + 1, s.prompt_length - s.position);
  const int first = !request.scores() ? s.end : request.keep_logits ? 0 : request.score_from - 1;
  return {{begin, begin + count}, std::max(first, s.position), std::max(0, request.top_logprobs), request.keep_logits};
}

void Schedule::score_chunk(const Pass& pass, int position, size_t count, const float* logprobs, const int* ids,
                           const float* tops) {
  Scores& scores = running_[pass.column[0].sequence]->scores;
  const int from = running_[pass.column[0].sequence]->request.score_from;
  if (position + 1 < from || position + 1 - from + count > scores.logprobs.size())
    throw std::invalid_argument("positions that are not scored");
  const size_t at = position + 1 - from;
  std::copy(logprobs, logprobs + count, scores.logprobs.begin() + at);
  std::copy(ids, ids + count * scores.top, scores.top_ids.begin() + at * scores.top);
  std::copy(tops, tops + count * scores.top, scores.top_logprobs.begin() + at * scores.top);
}

void Schedule::keep_logits(const Pass& pass, int position, size_t count, const float* rows) {
  std::vector<float>& logits = running_[pass.column[0].sequence]->left_behind.logits;
  if (position < 0 || (position + count) * limits_.vocab > logits.size())
    throw std::invalid_argument("positions whose logits are not kept");
  std::memcpy(logits.data() + size_t(position) * limits_.vocab, rows, count * limits_.vocab * sizeof(float));
}

}  // namespace laneformer
