// What a pass holds; and pieces of prompts, which it may be instead.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "schedule.h"

namespace laneformer {

namespace {
constexpr int kAheadOfDrafts = 3;  // passes, after which a drafter is asked again
}  // namespace

// Learns from the last pass; drafts that need none of a model's passes.
void Schedule::begin_round() {
  round_began_s_ = now_s();
  const double seconds = (round_began_s_ - pass_began_s_) / passes_;
  if (pass_.decoding) pace_.passed(pass_.prompt_columns, seconds);
  if (pass_.decoding && !pass_.prompt_columns) cost_.passed(pass_.columns, seconds);
  for (Sequence* s : running_) s->drafts.clear(), s->odds.clear(), s->columns = s->head_columns = 0;
  propose();
  if (model_) model_->begin(running_, cost_, room());
}

void Schedule::plan(Pass& pass) {
  pass_began_s_ = now_s();
  if (!prefixes_.plan(pass)) return;
  // a piece and the columns of others take turns
  const auto reads = [](const Sequence* s) { return s->reads_pieces(); };
  const auto reading = std::find_if(running_.begin(), running_.end(), reads);
  const bool others = std::any_of(running_.begin(), running_.end(),
                                  [](const Sequence* s) { return !s->reads_pieces() && !s->awaits_mask; });
  if (reading != running_.end() && !(others && pass_.piece))
    plan_piece(pass, static_cast<int>(reading - running_.begin()));
  else
    plan_columns(pass);
}

void Schedule::plan_piece(Pass& pass, int sequence) {
  Sequence& s = *running_[sequence];
  pass.piece = s.columns = std::min(s.pieces_end - s.position, limits_.piece);
  pass.column[0] = {s.ids[s.position], s.position, s.cache, sequence};
  ++s.left_behind.statistics.passes;
  ++pass.number, ++total_passes_;
}

// The next id of every sequence that decodes, and draft tokens; then ids of prompts: as many as there is
// room for, or where others wait for their next token, as their pace allows, in the order of arrival.
void Schedule::plan_columns(Pass& pass) {
  bool awaited = false;  // somebody waits for each next token
  for (const Sequence* s : running_) {
    pass.decoding += s->decodes();
    awaited |= s->decodes() && !s->request.quiet;
  }
  choose_drafts();
  const int places = static_cast<int>(running_.size()), most_columns = limits_.columns;
  const int prompts = awaited && limits_.paced ? pace_.columns() : most_columns;
  for (int i = 0; i < places; ++i)
    if (running_[i]->decodes() && !running_[i]->awaits_mask) add_columns(pass, i, most_columns);
  // no pass is empty, as one where all that decode wait for their masks would be
  const int decoding_columns = pass.columns;
  const int most = std::clamp(decoding_columns + prompts, 1, most_columns);
  for (int i = 0; i < places; ++i)
    if (!running_[i]->decodes() && !running_[i]->reads_pieces()) add_columns(pass, i, most - pass.columns);
  pass.prompt_columns = pass.columns - decoding_columns;
  pass.ahead = ahead();
  ++pass.number, ++total_passes_;
}

// So many draft tokens of all sequences, the likeliest first, that a pass gives tokens the fastest; without
// drafts where the gain is within what one pass varies from the next.
void Schedule::choose_drafts() {
  int decoding = 0, proposed = 0;
  for (Sequence* s : running_)
    if (s->decodes() && !s->awaits_mask) ++decoding, proposed += static_cast<int>(s->drafts.size());
  if (!proposed) return;
  std::vector<int> chosen(running_.size(), 0), best = chosen;
  double tokens = decoding, fastest = kLeastGain * tokens / cost_.of(decoding);
  for (int columns = decoding + 1; columns <= std::min(decoding + proposed, room()); ++columns) {
    const auto next = [&](size_t i) {
      return size_t(chosen[i]) < running_[i]->odds.size() ? running_[i]->odds[chosen[i]] : 0.0;
    };
    size_t likeliest = 0;
    for (size_t i = 1; i < chosen.size(); ++i)
      if (next(i) > next(likeliest)) likeliest = i;
    tokens += next(likeliest);
    ++chosen[likeliest];
    if (tokens / cost_.of(columns) > fastest) fastest = tokens / cost_.of(columns), best = chosen;
  }
  for (size_t i = 0; i < best.size(); ++i) running_[i]->drafts.resize(best[i]);
}

// Columns that drafts may take: there is still one for each other sequence.
int Schedule::room() const {
  int reading = 0;
  for (const Sequence* s : running_) reading += !s->decodes() && !s->reads_pieces();
  return limits_.columns - (limits_.columns > kMaxSequences ? kMaxSequences : reading);
}

void Schedule::propose() {
  for (Sequence* s : running_) {
    const int most = std::min({s->request.speculate, room(), s->end - s->known() - 1});
    if (s->drafter && s->decodes() && !s->awaits_mask && most > 0) s->drafter->propose(most, s->drafts, s->odds);
  }
}

// So many passes would be of the next tokens and nothing else, whatever comes of this one.
int Schedule::ahead() const {
  const bool some_wait = others_wait_ && static_cast<int>(running_.size()) < limits_.sequences;
  int most = some_wait ? 0 : limits_.ahead;
  for (const Sequence* s : running_) {  // the end of a prompt comes first, which may be set aside
    if (!s->picks || !s->odds.empty() || s->columns != 1 || !s->new_tokens()) return 0;
    if (model_ && s->drafter && !s->model.off) return 0;  // it goes on from each pass's streams
    most = std::min({most, s->drafter ? kAheadOfDrafts : most, s->end - s->known() - 1});
  }
  return most;
}

// A sequence's ids that have not run yet, and draft tokens after the last one.
void Schedule::add_columns(Pass& pass, int sequence, int most) {
  Sequence& s = *running_[sequence];
  const Request& request = s.request;
  const int known = s.known(), run = std::min(known - s.position, most);
  if (run <= 0) return;
  const bool draws = !request.scores() && s.position + run == known;
  s.columns = run + static_cast<int>(s.drafts.size());
  s.first_column = pass.columns;
  s.first_row = s.picks ? pass.columns + run - 1 : pass.head_columns;
  s.left_behind.statistics.proposed += s.columns - run;
  ++s.left_behind.statistics.passes;
  for (int c = 0; c < s.columns; ++c) {
    const int position = s.position + c;
    if (request.scores() ? position + 1 >= request.score_from || request.keep_logits : draws && c >= run - 1) {
      if (!s.picks) pass.head[pass.head_columns++] = static_cast<int16_t>(pass.columns);
      ++s.head_columns;
    }
    pass.column[pass.columns++] = {c < run ? s.ids[position] : s.drafts[c - run], position, s.cache, sequence};
  }
  pass.scores |= request.scores() && s.head_columns;
  pass.keeps |= !request.keep_partials.empty();
  if (!s.picks) return;
  const std::vector<int>& stops = request.sampling.stop_ids;
  Draw& draw = pass.draw[sequence] = {request.sampling.draw, static_cast<int>(stops.size()), {}};
  std::copy(stops.begin(), stops.end(), draw.stops);
}

// --- pieces -----------------------------------------------------------------------------------------------------

Schedule::Piece Schedule::piece(const Pass& pass) const {
  const Sequence& s = *running_[pass.column[0].sequence];
  const Request& request = s.request;
  const auto begin = s.ids.begin() + s.position;
  const int count = std::min(pass.piece + 1, s.prompt_length - s.position);
  const int first = !request.scores() ? s.end : request.keep_logits ? 0 : request.score_from - 1;
  return {{begin, begin + count}, std::max(first, s.position), std::max(0, request.top_logprobs), request.keep_logits};
}

void Schedule::score(const Pass& pass, int position, size_t count, const float* logprobs, const int* ids,
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
