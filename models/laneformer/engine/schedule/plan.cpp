// Plans what a pass holds: columns, or a chunk of a prompt.
#include <algorithm>

#include "schedule.h"

namespace laneformer {

namespace {
constexpr int kExtraPassesWithDrafter = 3;  // after so many a drafter is asked again
}  // namespace

// Begins a round: the draft passes, if any, and the model's pass that verifies them. Learns from the model's last pass,
// and proposes the drafts that need no pass.
void Schedule::begin_round() {
  round_began_s_ = now_s();
  const double last_pass_s = (round_began_s_ - model_pass_began_s_) / passes_;
  if (pass_.decoding) pace_.learn(pass_.prompt_columns, last_pass_s);
  if (pass_.decoding && !pass_.prompt_columns) cost_.learn(pass_.columns, last_pass_s);
  for (Sequence* s : running_) {
    s->drafts.clear(), s->odds.clear();
    s->columns = s->logit_columns = 0;
  }
  propose();
  if (pass_drafter_) pass_drafter_->begin(running_, cost_, room_for_drafts());
}

void Schedule::plan(Pass& pass) {
  model_pass_began_s_ = now_s();
  if (!prefixes_.plan(pass)) return;
  // a chunk and the columns of others take turns, so that neither waits for all of the other
  const auto reads = [](const Sequence* s) { return s->reads_chunks(); };
  const auto reading = std::find_if(running_.begin(), running_.end(), reads);
  const bool others = std::any_of(running_.begin(), running_.end(),
                                  [](const Sequence* s) { return !s->reads_chunks() && !s->awaits_mask; });
  if (reading != running_.end() && !(others && pass_.chunk_tokens))
    plan_chunk(pass, static_cast<int>(reading - running_.begin()));
  else
    plan_columns(pass);
}

void Schedule::plan_chunk(Pass& pass, int sequence) {
  Sequence& s = *running_[sequence];
  pass.chunk_tokens = s.columns = std::min(s.chunks_end - s.position, limits_.max_chunk_tokens);
  pass.column[0] = {s.ids[s.position], s.position, s.cache, sequence};
  ++s.left_behind.statistics.passes;
  ++pass.number, ++total_passes_;
}

// Adds the next id of every sequence that decodes, and its draft tokens; then ids of prompts in the order of arrival: as
// many as there is room for, or, where others wait for their next token, as their pace allows.
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
    if (!running_[i]->decodes() && !running_[i]->reads_chunks()) add_columns(pass, i, most - pass.columns);
  pass.prompt_columns = pass.columns - decoding_columns;
  pass.extra_passes = count_extra_passes();
  ++pass.number, ++total_passes_;
}

// Keeps as many draft tokens of all sequences, the likeliest first, as give the most tokens per second, and none where
// the gain is within what one pass varies from the next.
void Schedule::choose_drafts() {
  int decoding = 0, proposed = 0;
  for (Sequence* s : running_)
    if (s->decodes() && !s->awaits_mask) ++decoding, proposed += static_cast<int>(s->drafts.size());
  if (!proposed) return;
  std::vector<int> chosen(running_.size(), 0), best = chosen;
  double tokens = decoding, fastest = kLeastGain * tokens / cost_.of(decoding);
  for (int columns = decoding + 1; columns <= std::min(decoding + proposed, room_for_drafts()); ++columns) {
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

// Returns the columns that drafts leave free, so that every other sequence still gets one. A pass of many columns spares
// one for each sequence that could run, and the number of drafts does not depend on who else runs; a GPU's few columns
// (no more than sequences) are kept only for the prompts that are read now.
int Schedule::reserved_columns() const {
  if (limits_.columns > kMaxSequences) return kMaxSequences;
  const auto reads_columns = [](const Sequence* s) { return !s->decodes() && !s->reads_chunks(); };
  return static_cast<int>(std::count_if(running_.begin(), running_.end(), reads_columns));
}

void Schedule::propose() {
  for (Sequence* s : running_) {
    const int most = std::min({s->request.speculate, room_for_drafts(), s->end - s->known() - 1});
    if (s->drafter && s->decodes() && !s->awaits_mask && most > 0) s->drafter->propose(most, s->drafts, s->odds);
  }
}

// Returns how many passes after this one would hold the next tokens and nothing else, whatever this one gives.
int Schedule::count_extra_passes() const {
  const bool some_wait = others_wait_ && static_cast<int>(running_.size()) < limits_.sequences;
  int most = some_wait ? 0 : limits_.extra_passes;
  for (const Sequence* s : running_) {
    // without a new token yet, the pass ends a prompt, and its cache may be set aside before the next one
    if (!s->picks || !s->odds.empty() || s->columns != 1 || !s->new_tokens()) return 0;
    if (pass_drafter_ && s->drafter && !s->draft_state.off) return 0;  // the drafter needs each pass's streams
    most = std::min({most, s->drafter ? kExtraPassesWithDrafter : most, s->end - s->known() - 1});
  }
  return most;
}

// Adds up to `most` of a sequence's ids that have not run yet, and draft tokens after the last one.
void Schedule::add_columns(Pass& pass, int sequence, int most) {
  Sequence& s = *running_[sequence];
  const Request& request = s.request;
  const int known = s.known(), run = std::min(known - s.position, most);
  if (run <= 0) return;
  const bool draws = !request.scores() && s.position + run == known;
  s.columns = run + static_cast<int>(s.drafts.size());
  s.first_column = pass.columns;
  s.first_row = s.picks ? pass.columns + run - 1 : pass.logit_columns;
  s.left_behind.statistics.proposed += s.columns - run;
  ++s.left_behind.statistics.passes;
  for (int c = 0; c < s.columns; ++c) {
    const int position = s.position + c;
    const bool scored = request.keep_logits || position + 1 >= request.score_from;
    if (request.scores() ? scored : draws && c >= run - 1) {
      if (!s.picks) pass.logit_column[pass.logit_columns++] = static_cast<int16_t>(pass.columns);
      ++s.logit_columns;
    }
    pass.column[pass.columns++] = {c < run ? s.ids[position] : s.drafts[c - run], position, s.cache, sequence};
  }
  pass.scores |= request.scores() && s.logit_columns;
  pass.keeps |= !request.keep_partials.empty();
  if (!s.picks) return;
  const std::vector<int>& stops = request.sampling.stop_ids;
  Draw& draw = pass.draw[sequence] = {request.sampling.draw, static_cast<int>(stops.size()), {}};
  std::copy(stops.begin(), stops.end(), draw.stops);
}

}  // namespace laneformer
