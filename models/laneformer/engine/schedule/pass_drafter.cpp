#include "pass_drafter.h"

#include <algorithm>
#include <cmath>

#include "clock.h"

namespace laneformer {

namespace {
constexpr int kMostDrafts = 6;
constexpr double kCertain[] = {0.3, 0.5, 0.7, 0.9};  // the drafter's own odds that part two kinds of drafts

int kind_of(double odds) {
  return static_cast<int>(std::upper_bound(std::begin(kCertain), std::end(kCertain), odds) - kCertain);
}
}  // namespace

// --- choice ---------------------------------------------------------------------------------------

// Returns the seconds of a draft pass: measured, or else `share` of a pass of the model. While that cost is fixed for a
// test, it counts in passes of one column, and so does this.
double PassDrafter::seconds(const Cost& own, double share, const Cost& model, int columns) {
  return own.measured() && !model.fixed() ? own.of(columns) : share * model.of(columns);
}

// Returns how many drafts of one sequence give the most tokens per second: its first i + 1 are right with probability
// odds(i), and each takes each_s to make. The first one has its part of the pass that is made anyway.
template <class Odds>
PassDrafter::Choice PassDrafter::find_best(const Round& round, int most, double each_s, const Odds& odds) {
  Choice best{0, round.plain_tokens_per_s()};
  const double anyway_s = round.made_anyway_s * (each_s > 0.0 ? 1.0 - 1.0 / round.decoding : 1.0);
  double tokens = round.decoding;
  for (int i = 0; i < most; ++i) {
    tokens += odds(i);
    const double rate = tokens / (round.model.of(round.decoding + i + 1) + anyway_s + (i + 1) * each_s);
    if (rate > best.tokens_per_s) best = {i + 1, rate};
  }
  return best;
}

void PassDrafter::choose(Sequence& s, const Round& round, int most) const {
  DraftState& draft = s.draft_state;
  const Cost& model = round.model;
  const int decoding = round.decoding, proposed = static_cast<int>(s.odds.size());
  const double right = draft.rate.right / draft.rate.tried, each_s = step_s(model, decoding) / decoding;
  const Choice own = find_best(round, most, each_s, [&](int i) { return std::pow(right, i + 1); });
  const Choice text = find_best(round, proposed, 0.0, [&](int i) { return s.odds[i]; });
  if (!own.drafts || own.tokens_per_s <= std::max(kLeastGain * round.plain_tokens_per_s(), text.tokens_per_s)) return;
  draft.wanted = own.drafts;
  const double column_s = (model.of(decoding + kMostDrafts) - model.of(decoding)) / kMostDrafts;
  draft.least_odds = (column_s + each_s) * decoding / model.of(decoding) / right;
  s.drafts.clear(), s.odds.clear();
}

void PassDrafter::begin(const std::vector<Sequence*>& running, const Cost& model, int most) {
  const auto decodes = [](const Sequence* s) { return s->decodes() && !s->awaits_mask; };
  const int decoding = static_cast<int>(std::count_if(running.begin(), running.end(), decodes));
  const Round round{model, decoding, decoding ? made_anyway_s(model, decoding) : 0.0};
  for (Sequence* s : running) {
    s->draft_state.wanted = 0;
    if (!s->drafter || !decodes(s)) continue;
    const int own = std::min({s->request.speculate, most, s->end - s->known() - 1, room(*s), kMostDrafts});
    // the first new token does not wait for drafts
    if (!s->draft_state.off && s->new_tokens()) choose(*s, round, own);
  }
}

// --- passes ---------------------------------------------------------------------------------------

void PassDrafter::finish(const std::vector<Sequence*>& running, const Pass& pass, const PassResult& last) {
  finish_ops(running, pass, last);
  if (pass.columns) learn_cost(pass, now_s() - draft_pass_began_s_);
  for (size_t i = 0; i < running.size(); ++i) {
    Sequence& s = *running[i];
    if (last.overflowed & 1u << i) {
      forget(s);
      s.draft_state.off = true;
    }
    const bool ran = last.logits && last.refused < 0;
    if (!ran || s.draft_state.off) s.draft_state.wanted = 0;
    if (pass.columns && s.draft_state.row >= 0 && wants_draft(&s)) draw(s, last.logits + s.draft_state.row * last.stride);
  }
}

// Draws the next draft, and stops drafting where a further one would not be worth its cost.
void PassDrafter::draw(Sequence& s, const float* logits) {
  DraftState& draft = s.draft_state;
  const Row by_id = row(logits);
  const int made = static_cast<int>(s.drafts.size());
  if (records_) {
    Drawn& drawn = drawn_.emplace_back(Drawn{s.ids, made, {}});
    drawn.ids.insert(drawn.ids.end(), s.drafts.begin(), s.drafts.end());
    drawn.logits.assign(by_id.logits, by_id.logits + s.sampler.vocab());
  }
  const int token = s.sampler.choose(by_id.logits, s.known() + made - 1);
  const int kind = kind_of(std::exp(by_id.logits[token] - by_id.log_sum_exp));
  const double odds = (s.odds.empty() ? 1.0 : s.odds.back()) * draft.kinds[kind].right / draft.kinds[kind].tried;
  if (s.drafts.empty()) draft.drawn.clear();
  draft.drawn.push_back(kind);
  s.drafts.push_back(token), s.odds.push_back(odds);
  if (odds < draft.least_odds || s.sampler.options().stops_at(token)) stop_drafting(s);
}

void PassDrafter::learn(Sequence& s, int right) {
  DraftState& draft = s.draft_state;
  if (!s.takes_pass_drafts()) return draft.rate.forget(DraftState{}.rate);
  for (int i = 0; i < std::min<int>(s.drafts.size(), right + 1); ++i) {
    draft.rate.learn(i < right);
    draft.kinds[draft.drawn[i]].learn(i < right);
  }
}

}  // namespace laneformer
