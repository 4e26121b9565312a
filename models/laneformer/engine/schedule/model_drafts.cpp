#include "model_drafts.h"

#include <algorithm>
#include <cmath>

#include "clock.h"

namespace laneformer {

namespace {
constexpr int kMostDrafts = 6;
constexpr double kLeastGain = 1.03;  // over a pass without drafts
constexpr double kCertain[] = {0.3, 0.5, 0.7, 0.9};  // the small model's own odds, between two kinds of drafts

int kind_of(double odds) {
  return static_cast<int>(std::upper_bound(std::begin(kCertain), std::end(kCertain), odds) - kCertain);
}
}  // namespace

// --- choice -----------------------------------------------------------------------------------------------------

// Seconds, or what `large` counts in.
double ModelDrafts::step_s(const Cost& large, int columns) const {
  return cost_.measured() && !large.fixed() ? cost_.of(columns) : share_ * large.of(columns);
}

// Of one sequence among those that decode: odds(i) that its first i + 1 drafts are right, each_s to make one.
template <class Odds>
ModelDrafts::Choice ModelDrafts::best(const Cost& large, int decoding, int most, double each_s,
                                      const Odds& odds) const {
  Choice best{0, decoding / large.of(decoding)};
  double tokens = decoding;
  for (int i = 0; i < most; ++i) {
    tokens += odds(i);
    const double rate = tokens / (large.of(decoding + i + 1) + (i + 1) * each_s);
    if (rate > best.tokens_per_s) best = {i + 1, rate};
  }
  return best;
}

void ModelDrafts::choose(Sequence& s, const Cost& large, int decoding, int most) const {
  ModelDraft& m = s.model;
  const double right = m.rate.right / m.rate.tried, each_s = step_s(large, decoding) / decoding;
  const int found = static_cast<int>(s.odds.size());
  const Choice own = best(large, decoding, most, each_s, [&](int i) { return std::pow(right, i + 1); });
  const Choice other = best(large, decoding, found, 0.0, [&](int i) { return s.odds[i]; });
  const double least = kLeastGain * decoding / large.of(decoding);
  if (!own.drafts || own.tokens_per_s <= std::max(least, other.tokens_per_s)) return;
  m.wanted = own.drafts;
  const double column_s = (large.of(decoding + kMostDrafts) - large.of(decoding)) / kMostDrafts;
  m.least_odds = (column_s + each_s) * decoding / large.of(decoding) / right;
  s.drafts.clear(), s.odds.clear();
}

void ModelDrafts::begin(const std::vector<Sequence*>& running, const Cost& large, int most) {
  const int decoding = static_cast<int>(
      std::count_if(running.begin(), running.end(), [](const Sequence* s) { return s->decodes() && !s->awaits_mask; }));
  for (Sequence* s : running) {
    s->model.wanted = 0;
    // the first token is not kept waiting for the small model's reading of the prompt
    if (!s->drafter || s->model.off || !s->decodes() || s->awaits_mask || !s->new_tokens()) continue;
    const int room = std::min({s->request.speculate, most, s->end - s->known() - 1, context_ - s->known() - 1});
    choose(*s, large, decoding, std::min(room, kMostDrafts));
  }
}

// --- passes -----------------------------------------------------------------------------------------------------

// Up to the id that the large model draws from next, as far as they agree.
void ModelDrafts::start(Sequence& s) {
  ModelDraft& m = s.model;
  if (m.cache < 0) {
    const Prefixes::Start start = prefixes_.begin(s.ids, s.request.reuse_prefix ? s.known() - 1 : 0);
    m.cache = start.cache, m.agreed = start.position;
    m.ran.assign(s.ids.begin(), s.ids.begin() + start.position);
  }
  if (!s.drafts.empty()) return;
  const int written = static_cast<int>(m.ran.size());
  while (m.agreed < std::min(written, s.known() - 1) && m.ran[m.agreed] == s.ids[m.agreed]) ++m.agreed;
  m.ran.resize(m.agreed);
  prefixes_.ran(m.cache, s.ids, m.agreed, written);
}

bool ModelDrafts::plan(const std::vector<Sequence*>& running, Pass& pass) {
  const auto drafts = [](const Sequence* s) { return static_cast<int>(s->drafts.size()) < s->model.wanted; };
  if (std::none_of(running.begin(), running.end(), drafts)) return false;
  for (Sequence* s : running)
    if (drafts(s)) start(*s);
  pass.draft = true;
  pass_began_s_ = now_s();
  if (!prefixes_.plan(pass)) return true;
  for (size_t i = 0; i < running.size(); ++i)
    if (drafts(running[i])) add_columns(*running[i], static_cast<int>(i), pass);
  pass.number = ++passes_;
  return true;
}

// What has not run of ids and drafts. A text that is too long for one pass is read in several, between which others
// decode.
void ModelDrafts::add_columns(Sequence& s, int sequence, Pass& pass) {
  ModelDraft& m = s.model;
  const int known = s.known(), all = known + static_cast<int>(s.drafts.size());
  const int first = static_cast<int>(m.ran.size()), run = std::min(all - first, kPassColumns - pass.columns);
  for (int position = first; position < first + run; ++position) {
    const int id = position < known ? s.ids[position] : s.drafts[position - known];
    m.ran.push_back(id);
    pass.column[pass.columns++] = {id, position, m.cache, sequence};
  }
  m.row = -1;
  if (first + run < all)
    m.wanted = static_cast<int>(s.drafts.size());
  else
    m.row = pass.head_columns, pass.head[pass.head_columns++] = static_cast<int16_t>(pass.columns - 1);
}

void ModelDrafts::finish(const std::vector<Sequence*>& running, const Pass& pass, const PassResult& last) {
  prefixes_.done(last.refused < 0 ? pass.ops : last.refused);
  if (last.refused >= 0 && !prefixes_.refused()) {
    for (Sequence* s : running)
      if (s->model.cache == pass.op[last.refused].cache) s->model.cache = -1, s->model.off = true;
  }
  if (pass.columns) cost_.passed(pass.columns, now_s() - pass_began_s_);
  for (size_t i = 0; i < running.size(); ++i) {
    Sequence& s = *running[i];
    if (last.overflowed & 1u << i) {
      prefixes_.forget(s.model.cache);
      s.model.off = true;
    }
    if (last.refused >= 0 || s.model.off) s.model.wanted = 0;
    if (pass.columns && s.model.row >= 0 && static_cast<int>(s.drafts.size()) < s.model.wanted)
      draw(s, last.logits + s.model.row * last.stride);
  }
}

// Ends where the next one would not be worth its cost.
void ModelDrafts::draw(Sequence& s, const float* logits) {
  ModelDraft& m = s.model;
  const int token = s.sampler.choose(logits, s.known() + static_cast<int>(s.drafts.size()) - 1);
  const int kind = kind_of(std::exp(logits[token] - log_sum_exp_(logits, vocab_)));
  const double odds = (s.odds.empty() ? 1.0 : s.odds.back()) * m.kinds[kind].right / m.kinds[kind].tried;
  if (s.drafts.empty()) m.drawn.clear();
  m.drawn.push_back(kind);
  s.drafts.push_back(token), s.odds.push_back(odds);
  if (odds < m.least_odds || s.sampler.options().stops_at(token)) m.wanted = static_cast<int>(s.drafts.size());
}

void ModelDrafts::verified(Sequence& s, int right) {
  ModelDraft& m = s.model;
  if (!m.wanted) m.rate.forget(ModelDraft{}.rate);
  for (int i = 0; m.wanted && i < std::min<int>(s.drafts.size(), right + 1); ++i)
    m.rate.learn(i < right), m.kinds[m.drawn[i]].learn(i < right);
}

}  // namespace laneformer
