#include "model_drafts.h"

#include <algorithm>
#include <cmath>

#include "clock.h"

namespace laneformer {

namespace {
constexpr int kMostDrafts = 6;
constexpr double kCertain[] = {0.3, 0.5, 0.7, 0.9};  // its own odds, between two kinds of drafts

int kind_of(double odds) {
  return static_cast<int>(std::upper_bound(std::begin(kCertain), std::end(kCertain), odds) - kCertain);
}
}  // namespace

// --- choice ---------------------------------------------------------------------------------------

// Or what `model` counts in.
double ModelDrafts::seconds(const Cost& own, double share, const Cost& model, int columns) {
  return own.measured() && !model.fixed() ? own.of(columns) : share * model.of(columns);
}

// Of one sequence among those that decode: odds(i) that its first i + 1 drafts are right, each_s to make one;
// the first one has its part of the pass that is made anyway.
template <class Odds>
ModelDrafts::Choice ModelDrafts::best(const Round& round, int most, double each_s, const Odds& odds) {
  Choice best{0, round.plain()};
  const double anyway_s = round.made_anyway_s * (each_s > 0.0 ? 1.0 - 1.0 / round.decoding : 1.0);
  double tokens = round.decoding;
  for (int i = 0; i < most; ++i) {
    tokens += odds(i);
    const double rate = tokens / (round.model.of(round.decoding + i + 1) + anyway_s + (i + 1) * each_s);
    if (rate > best.tokens_per_s) best = {i + 1, rate};
  }
  return best;
}

void ModelDrafts::choose(Sequence& s, const Round& round, int most) const {
  ModelDraft& m = s.model;
  const Cost& model = round.model;
  const int decoding = round.decoding, found = static_cast<int>(s.odds.size());
  const double right = m.rate.right / m.rate.tried, each_s = step_s(model, decoding) / decoding;
  const Choice own = best(round, most, each_s, [&](int i) { return std::pow(right, i + 1); });
  const Choice other = best(round, found, 0.0, [&](int i) { return s.odds[i]; });
  if (!own.drafts || own.tokens_per_s <= std::max(kLeastGain * round.plain(), other.tokens_per_s)) return;
  m.wanted = own.drafts;
  const double column_s = (model.of(decoding + kMostDrafts) - model.of(decoding)) / kMostDrafts;
  m.least_odds = (column_s + each_s) * decoding / model.of(decoding) / right;
  s.drafts.clear(), s.odds.clear();
}

void ModelDrafts::begin(const std::vector<Sequence*>& running, const Cost& model, int most) {
  const auto decodes = [](const Sequence* s) { return s->decodes() && !s->awaits_mask; };
  const int decoding = static_cast<int>(std::count_if(running.begin(), running.end(), decodes));
  const Round round{model, decoding, decoding ? made_anyway_s(model, decoding) : 0.0};
  for (Sequence* s : running) {
    s->model.wanted = 0;
    // the first token is not kept waiting for drafts
    if (!s->drafter || !decodes(s)) continue;
    int own = std::min({s->request.speculate, most, s->end - s->known() - 1, room(*s), kMostDrafts});
    if (s->request.forces()) take_forced(*s, own);
    if (!s->model.off && s->new_tokens()) choose(*s, round, own);
  }
}

// Drafts whose acceptance is given cost nothing, unless this one's are to be measured.
void ModelDrafts::take_forced(Sequence& s, int& most) const {
  if (!can_force()) {
    most = 0;
    return;
  }
  s.model.forced = std::move(s.drafts);
  most = std::min(most, static_cast<int>(s.model.forced.size()));
  s.drafts.clear(), s.odds.clear();
}

// --- passes ---------------------------------------------------------------------------------------

void ModelDrafts::finish(const std::vector<Sequence*>& running, const Pass& pass, const PassResult& last) {
  refused(running, pass, last);
  if (pass.columns) passed(pass, now_s() - pass_began_s_);
  for (size_t i = 0; i < running.size(); ++i) {
    Sequence& s = *running[i];
    if (last.overflowed & 1u << i) {
      forget(s);
      s.model.off = true;
    }
    if (last.refused >= 0 || s.model.off) s.model.wanted = 0;
    if (!last.logits) s.model.wanted = 0;  // its pass could not be run
    if (pass.columns && s.model.row >= 0 && drafts(&s)) draw(s, last.logits + s.model.row * last.stride);
  }
}

// Ends where the next one would not be worth its cost.
void ModelDrafts::draw(Sequence& s, const float* logits) {
  ModelDraft& m = s.model;
  const Row by_id = row(logits);
  const int made = static_cast<int>(s.drafts.size());
  if (records_) {
    Drawn& drawn = drawn_.emplace_back(Drawn{s.ids, made, {}});
    drawn.ids.insert(drawn.ids.end(), s.drafts.begin(), s.drafts.end());
    drawn.logits.assign(by_id.logits, by_id.logits + s.sampler.vocab());
  }
  int token = s.sampler.choose(by_id.logits, s.known() + made - 1);
  const int kind = kind_of(std::exp(by_id.logits[token] - by_id.log_sum_exp));
  if (s.request.forces()) token = m.forced[made];
  const double odds = (s.odds.empty() ? 1.0 : s.odds.back()) * m.kinds[kind].right / m.kinds[kind].tried;
  if (s.drafts.empty()) m.drawn.clear();
  m.drawn.push_back(kind);
  s.drafts.push_back(token), s.odds.push_back(odds);
  if (odds < m.least_odds || s.sampler.options().stops_at(token)) m.wanted = made + 1;
}

void ModelDrafts::verified(Sequence& s, int right) {
  ModelDraft& m = s.model;
  if (!m.wanted) m.rate.forget(ModelDraft{}.rate);
  for (int i = 0; m.wanted && i < std::min<int>(s.drafts.size(), right + 1); ++i)
    m.rate.learn(i < right), m.kinds[m.drawn[i]].learn(i < right);
}

}  // namespace laneformer
