#include "small_model_drafter.h"

#include <algorithm>

#include "clock.h"

namespace laneformer {

// Gives the sequence a cache, and keeps of it what agrees with the text, up to the id before the one to predict.
void SmallModelDrafter::start(Sequence& s) {
  DraftState& draft = s.draft_state;
  if (draft.cache < 0) {
    const Prefixes::Start start = prefixes_.begin(s.ids, s.request.reuse_prefix ? s.known() - 1 : 0);
    draft.cache = start.cache, draft.agreed = start.position;
    draft.ran.assign(s.ids.begin(), s.ids.begin() + start.position);
  }
  if (!s.drafts.empty()) return;
  const int written = static_cast<int>(draft.ran.size());
  while (draft.agreed < std::min(written, s.known() - 1) && draft.ran[draft.agreed] == s.ids[draft.agreed]) ++draft.agreed;
  draft.ran.resize(draft.agreed);
  prefixes_.ran(draft.cache, s.ids, draft.agreed, written);
}

bool SmallModelDrafter::plan(const std::vector<Sequence*>& running, Pass& pass) {
  if (std::none_of(running.begin(), running.end(), wants_draft)) return false;
  for (Sequence* s : running)
    if (wants_draft(s)) start(*s);
  pass.network = Network::small_model;
  draft_pass_began_s_ = now_s();
  if (!prefixes_.plan(pass)) return true;
  for (size_t i = 0; i < running.size(); ++i)
    if (wants_draft(running[i])) add_columns(*running[i], static_cast<int>(i), pass);
  pass.number = ++passes_;
  return true;
}

// Adds the ids and drafts that have not run. A text that is too long for one pass is read in several, between which the
// model decodes without this sequence's drafts.
void SmallModelDrafter::add_columns(Sequence& s, int sequence, Pass& pass) {
  DraftState& draft = s.draft_state;
  const int all = s.known() + static_cast<int>(s.drafts.size());
  const int first = static_cast<int>(draft.ran.size()), run = std::min(all - first, kPassColumns - pass.columns);
  for (int position = first; position < first + run; ++position) {
    const int id = id_at(s, position);
    draft.ran.push_back(id);
    pass.column[pass.columns++] = {id, position, draft.cache, sequence};
  }
  draft.row = -1;
  if (first + run < all)
    stop_drafting(s);
  else
    add_logit_row(s, pass);
}

// Where a KV operation had no memory, and no other cache can be given up for it, its sequence drafts no more.
void SmallModelDrafter::finish_ops(const std::vector<Sequence*>& running, const Pass& pass, const PassResult& last) {
  prefixes_.done(last.refused < 0 ? pass.ops : last.refused);
  kv_bytes_ = prefixes_.bytes();
  if (last.refused < 0 || prefixes_.retry_without_one_cache()) return;
  for (Sequence* s : running) {
    DraftState& draft = s->draft_state;
    if (draft.cache == pass.op[last.refused].cache) draft.cache = -1, draft.off = true;
  }
}

}  // namespace laneformer
