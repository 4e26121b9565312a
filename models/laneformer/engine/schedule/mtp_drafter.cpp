#include "mtp_drafter.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "clock.h"

namespace laneformer {

MtpDrafter::MtpDrafter(const Head& head, double (*log_sum_exp)(const float* x, int n), int vocab)
    : PassDrafter(head.share, log_sum_exp),
      ids_(head.ids),
      vocab_(vocab),
      block_(head.block),
      by_id_(ids_.empty() ? 0 : vocab, -INFINITY) {}

// Notes which positions the block can run next: those whose next id is known.
void MtpDrafter::ran(Sequence& s, int first) {
  DraftState& draft = s.draft_state;
  draft.first = first, draft.from = s.first_column;
  draft.columns = draft.off ? 0 : std::min(s.position, static_cast<int>(s.ids.size()) - 1) - first;
}

bool MtpDrafter::plan(const std::vector<Sequence*>& running, Pass& pass) {
  std::vector<int> order;  // places, by the columns of the pass before that they go on from
  for (size_t i = 0; i < running.size(); ++i) {
    DraftState& draft = running[i]->draft_state;
    draft.row = -1;
    if (chained_ && !wants_draft(running[i])) draft.columns = 0;
    if (draft.columns > 0) order.push_back(static_cast<int>(i));
  }
  pass.chained = std::exchange(chained_, !order.empty());
  if (order.empty()) return pass.chained = false;
  const auto before = [&](int a, int b) { return running[a]->draft_state.from < running[b]->draft_state.from; };
  std::sort(order.begin(), order.end(), before);
  pass.network = Network::mtp;
  draft_pass_began_s_ = now_s();
  for (const int i : order) add_columns(*running[i], i, pass);
  ++pass.number;
  return true;
}

// Adds the sequence's columns. Where it wants another draft, the next pass goes on from the last of them.
void MtpDrafter::add_columns(Sequence& s, int sequence, Pass& pass) {
  DraftState& draft = s.draft_state;
  for (; draft.columns > 0; --draft.columns, ++draft.first) {
    pass.from[pass.columns] = static_cast<int16_t>(draft.from++);
    pass.column[pass.columns++] = {id_at(s, draft.first + 1), draft.first, s.cache, sequence};
  }
  if (!wants_draft(&s)) return;
  add_logit_row(s, pass);
  draft.from = pass.columns - 1;
  draft.columns = 1;
}

void MtpDrafter::learn_cost(const Pass& pass, double seconds) {
  (pass.logit_columns ? cost_ : block_cost_).learn(pass.columns, seconds);
}

PassDrafter::Row MtpDrafter::row(const float* logits) {
  if (ids_.empty()) return {logits, log_sum_exp_(logits, vocab_)};
  for (size_t i = 0; i < ids_.size(); ++i) by_id_[ids_[i]] = logits[i];
  return {by_id_.data(), log_sum_exp_(logits, static_cast<int>(ids_.size()))};
}

}  // namespace laneformer
