#include "head_drafts.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "clock.h"

namespace laneformer {

HeadDrafts::HeadDrafts(const Head& head, double (*log_sum_exp)(const float* x, int n), int vocab)
    : ModelDrafts(head.share, log_sum_exp),
      ids_(head.ids),
      vocab_(vocab),
      block_(head.block),
      by_id_(ids_.empty() ? 0 : vocab, -INFINITY) {}

// Positions whose next id is known.
void HeadDrafts::ran(Sequence& s, int first) {
  ModelDraft& m = s.model;
  m.first = first, m.from = s.first_column;
  m.columns = m.off ? 0 : std::min(s.position, static_cast<int>(s.ids.size()) - 1) - first;
}

bool HeadDrafts::plan(const std::vector<Sequence*>& running, Pass& pass) {
  std::vector<int> order;  // by the columns that they go on from
  for (size_t i = 0; i < running.size(); ++i) {
    ModelDraft& m = running[i]->model;
    m.row = -1;
    if (chained_ && !drafts(running[i])) m.columns = 0;
    if (m.columns > 0) order.push_back(static_cast<int>(i));
  }
  pass.chained = std::exchange(chained_, !order.empty());
  if (order.empty()) return pass.chained = false;
  const auto before = [&](int a, int b) { return running[a]->model.from < running[b]->model.from; };
  std::sort(order.begin(), order.end(), before);
  pass.of = Of::head;
  pass_began_s_ = now_s();
  for (const int i : order) add_columns(*running[i], i, pass);
  ++pass.number;
  return true;
}

// The next pass goes on from the last column, where there is another draft to make then.
void HeadDrafts::add_columns(Sequence& s, int sequence, Pass& pass) {
  ModelDraft& m = s.model;
  for (; m.columns > 0; --m.columns, ++m.first) {
    pass.from[pass.columns] = static_cast<int16_t>(m.from++);
    pass.column[pass.columns++] = {id_at(s, m.first + 1), m.first, s.cache, sequence};
  }
  if (!drafts(&s)) return;
  wants_logits(s, pass);
  m.from = pass.columns - 1;
  m.columns = 1;
}

void HeadDrafts::passed(const Pass& pass, double seconds) {
  (pass.head_columns ? cost_ : block_cost_).passed(pass.columns, seconds);
}

ModelDrafts::Row HeadDrafts::row(const float* logits) {
  if (ids_.empty()) return {logits, log_sum_exp_(logits, vocab_)};
  for (size_t i = 0; i < ids_.size(); ++i) by_id_[ids_[i]] = logits[i];
  return {by_id_.data(), log_sum_exp_(logits, static_cast<int>(ids_.size()))};
}

}  // namespace laneformer
