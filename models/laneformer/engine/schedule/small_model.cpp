#include "small_model.h"

#include <algorithm>

#include "clock.h"

namespace laneformer {

// Up to the id that the large model draws from next, as far as they agree.
void SmallModel::start(Sequence& s) {
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

bool SmallModel::plan(const std::vector<Sequence*>& running, Pass& pass) {
  if (std::none_of(running.begin(), running.end(), drafts)) return false;
  for (Sequence* s : running)
    if (drafts(s)) start(*s);
  pass.of = Of::small_model;
  pass_began_s_ = now_s();
  if (!prefixes_.plan(pass)) return true;
  for (size_t i = 0; i < running.size(); ++i)
    if (drafts(running[i])) add_columns(*running[i], static_cast<int>(i), pass);
  pass.number = ++passes_;
  return true;
}

// What has not run of ids and drafts. A text that is too long for one pass is read in several, between which
// others decode.
void SmallModel::add_columns(Sequence& s, int sequence, Pass& pass) {
  ModelDraft& m = s.model;
  const int all = s.known() + static_cast<int>(s.drafts.size());
  const int first = static_cast<int>(m.ran.size()), run = std::min(all - first, kPassColumns - pass.columns);
  for (int position = first; position < first + run; ++position) {
    const int id = id_at(s, position);
    m.ran.push_back(id);
    pass.column[pass.columns++] = {id, position, m.cache, sequence};
  }
  m.row = -1;
  if (first + run < all)
    m.wanted = static_cast<int>(s.drafts.size());
  else
    wants_logits(s, pass);
}

void SmallModel::refused(const std::vector<Sequence*>& running, const Pass& pass, const PassResult& last) {
  prefixes_.done(last.refused < 0 ? pass.ops : last.refused);
  kv_bytes_ = prefixes_.bytes();
  if (last.refused < 0 || prefixes_.refused()) return;
  for (Sequence* s : running)
    if (s->model.cache == pass.op[last.refused].cache) s->model.cache = -1, s->model.off = true;
}

}  // namespace laneformer
