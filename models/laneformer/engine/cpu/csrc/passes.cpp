// Which columns a pass holds, and what its logits lead to. All but `score_positions` runs on one thread, between two
// meetings of all of them.
#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "decoder.h"

namespace laneformer {

namespace {
constexpr char kOverflow[] =
    "the model's activations or logits are infinite, NaN, or beyond what float32 can square: its weights are damaged "
    "or far too large";
constexpr char kKvOverflow[] =
    "a key or value of this model is beyond fp16's 65,504; use kv_dtype = 'bf16' or 'fp32'";
constexpr char kNoneAllowed[] = "the mask, with min_new_tokens, leaves no id from which a token could be drawn";
}  // namespace

// By the first thread, while the others wait: what the last pass yielded, and what comes next.
Decoder::Pass Decoder::next_pass() {
  const Said said = heard();
  leaves_ = said.left;
  if (exchange_.lost()) return {};
  if (pass_.step == Step::layers) {
    layers_run_ += spec_.layers;
    caches_->copied();
    finish_pass(said);
  }
  const bool goes_on = change_sequences();
  probed_ = !probed_ && probe_is_due(!goes_on);
  if (probed_) return {.step = Step::probe};
  if (!goes_on) return {};
  Pass pass = plan_pass();
  plan_hash_ = 0;
  for (int c = 0; c < pass.columns; ++c)
    for (const int value : {pass.column[c].token, pass.column[c].position, pass.column[c].cache})
      plan_hash_ = (plan_hash_ ^ static_cast<uint32_t>(value)) * 0x100000001b3ull;  // FNV-1a's prime
  return pass;
}

// Draws the tokens whose masks have come, begins what has joined, ends what is over. False where nothing is left that
// can run.
bool Decoder::change_sequences() {
  const auto waits = [](const Sequence* s) { return s->awaits_mask; };
  const auto is_waiting = [](const auto& s) { return s->stage == Sequence::Stage::waiting; };
  for (;;) {
    for (Sequence* s : running_)
      if (s->awaits_mask) take_token(*s, s->kept_logits.data());
    std::lock_guard lock(team_->mutex);
    end_sequences();  // first, as others may take their caches
    for (const auto& s : sequences_)
      if (is_waiting(s)) admit(*s);
    end_sequences();  // of those that have begun now, too, some have nothing to run
    has_news_ = joined_ && std::any_of(sequences_.begin(), sequences_.end(), [](auto& s) { return s->has_news(); });
    tells_news_ |= has_news_;
    if (!std::all_of(running_.begin(), running_.end(), waits)) return true;
    if (running_.empty() && std::any_of(sequences_.begin(), sequences_.end(), is_waiting)) continue;
    const auto drawable = [](const Sequence* s) { return s->masks.count(s->new_tokens()) > 0; };
    if (std::none_of(running_.begin(), running_.end(), drawable)) return serving_ = false;
  }
}

void Decoder::end_sequences() {
  std::erase_if(running_, [this](Sequence* s) {
    if (!s->finished && !leaves(*s)) return false;
    caches_->end(s->cache);
    s->stage = Sequence::Stage::ended;
    return true;
  });
}

void Decoder::admit(Sequence& s) try {
  if (leaves(s))
    s.stage = Sequence::Stage::ended;
  else if (!caches_->awaits(s.ids, s.max_reusable()))
    begin_sequence(s);
} catch (const std::exception& error) {
  s.error = error.what();
  s.stage = Sequence::Stage::ended;
}

bool Decoder::probe_is_due(bool over) const {
  if (!request_->probe_every || leaves(*sequences_[0])) return false;
  const int new_tokens = sequences_[0]->new_tokens();
  return new_tokens && (over || (new_tokens - 1) % request_->probe_every == 0);
}

// The next id of every sequence that decodes, and draft tokens; then ids of prompts: as many as there is room for, or
// where others wait for their next token, as their pace allows, in the order of arrival.
Decoder::Pass Decoder::plan_pass() {
  Pass pass{.step = Step::layers, .first_layer = layers_run_};
  if (request_->compare_barriers && request_->probe_every && sequences_[0]->new_tokens())
    pass.barriers = (sequences_[0]->new_tokens() - 1) / request_->probe_every % 2 == 1;
  const double began_s = pass_began_s_;
  pass_began_s_ = now_s();
  if (pass_.step == Step::layers && pass_.decoding) pace_.passed(pass_.prompt_columns, pass_began_s_ - began_s);
  for (Sequence* s : running_) {
    s->drafts.clear(), s->columns = s->head_columns = 0;
    pass.decoding += s->decodes();
  }
  // with drafts of others, there is still room for one column of each sequence
  const int share = (kMaxColumns - kMaxSequences) / std::max(1, pass.decoding);
  const int prompts = joined_ && pass.decoding ? pace_.columns() : kMaxColumns;
  const int places = static_cast<int>(running_.size());
  for (int i = 0; i < places; ++i)
    if (running_[i]->decodes() && !running_[i]->awaits_mask) add_columns(pass, i, share);
  // no pass is empty, as one where all that decode wait for their masks would be
  const int decoding_columns = pass.columns;
  const int most = std::clamp(decoding_columns + prompts, 1, kMaxColumns);
  for (int i = 0; i < places; ++i)
    if (!running_[i]->decodes()) add_columns(pass, i, most - pass.columns);
  pass.prompt_columns = pass.columns - decoding_columns;
  ++passes_;
  return pass;
}

// A sequence's ids that have not run yet, and draft tokens after the last one.
void Decoder::add_columns(Pass& pass, int sequence, int most) {
  Sequence& s = *running_[sequence];
  const Request& request = *s.request;
  const int known = s.known(), run = std::min(known - s.position, most);
  if (run <= 0) return;
  const bool draws = !request.scores() && s.position + run == known;
  if (draws && !request.masked) s.draft(std::min({request.speculate, most - run, s.end - known - 1}));
  s.columns = run + static_cast<int>(s.drafts.size());
  s.first_row = pass.head_columns;
  s.statistics.proposed += s.columns - run;
  ++s.statistics.passes;
  for (int c = 0; c < s.columns; ++c) {
    const int position = s.position + c;
    if (request.scores() ? position + 1 >= request.score_from || request.keep_logits : draws && c >= run - 1)
      pass.head[pass.head_columns++] = pass.columns, ++s.head_columns;
    pass.column[pass.columns++] = {c < run ? s.ids[position] : s.drafts[c - run], position, s.cache, sequence};
  }
  pass.scores |= request.scores() && s.head_columns;
}

void Decoder::finish_pass(const Said& said) {
  const uint32_t every = joined_ ? 0 : ~0u;  // of a batch's sequences all end
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence& s = *running_[i];
    if (said.overflowed & (every | 1u << i)) {
      caches_->forget(s.cache);
      s.error = said.kv_overflowed & (every | 1u << i) ? kKvOverflow : kOverflow;
      s.finished = true;
    }
    if (s.finished || !s.columns) continue;
    const int written = s.position + s.columns;
    s.position += s.columns - static_cast<int>(s.drafts.size());
    if (s.request->scores())
      s.finished = s.position >= s.end;
    else if (s.head_columns)
      take_tokens(s);
    caches_->ran(s.cache, s.ids, s.position, written);
  }
}

// One token, and one more for each draft token that was right: what a pass of its own would have given.
void Decoder::take_tokens(Sequence& s) {
  const int before = s.new_tokens();
  for (int i = 0; i < s.head_columns; ++i) {
    if (!take_token(s, logits(pass_) + (s.first_row + i) * round_up(spec_.vocab, 16))) return;
    const bool right = i < static_cast<int>(s.drafts.size()) && s.drafts[i] == s.ids.back();
    s.statistics.accepted += right;
    if (s.finished || !right) break;
    ++s.position;  // the draft token's keys and values stand
  }
  const int taken = s.new_tokens() - before;
  if (joined_ || &s != sequences_[0].get()) return;
  if (before == 0) timings_.first_token_s = now_s() - request_began_s_;
  const double each_s = (now_s() - pass_began_s_) / taken;
  for (int i = before ? 0 : 1; i < taken; ++i) timings_.token_s.push_back(each_s);
}

bool Decoder::take_mask(Sequence& s, Sequence::Mask& mask) {
  std::lock_guard lock(team_->mutex);
  auto found = s.masks.extract(s.new_tokens());
  if (found) mask = std::move(found.mapped());
  return !found.empty();
}

// False where the token's mask has not come.
bool Decoder::take_token(Sequence& s, const float* logits) {
  Sequence::Mask mask;
  if (s.request->masked && !take_mask(s, mask)) {
    if (!s.awaits_mask) s.kept_logits.assign(logits, logits + spec_.vocab);
    s.awaits_mask = true;
    return false;
  }
  s.awaits_mask = false;
  const int token = s.sampler.choose(logits, static_cast<int>(s.ids.size()) - 1, mask);
  if (token < 0) {
    s.error = kNoneAllowed;
    s.finished = true;
    return true;
  }
  if (s.request->top_logprobs >= 0)
    s.scores.record(s.new_tokens(), logits, spec_.vocab, token, kernels_->log_sum_exp(logits, spec_.vocab));
  s.sampler.accept(token);
  {
    std::lock_guard lock(team_->mutex);
    s.ids.push_back(token);
    if (wants_tokens_ && !joined_) team_->changed.notify_all();
  }
  s.finished = static_cast<int>(s.ids.size()) >= s.end || s.sampler.options().stops_at(token);
  return true;
}

// Log-probabilities of the ids that follow the pass's positions, shared out over the threads of rank 0.
void Decoder::score_positions(int t, const Pass& pass) {
  for (int row = t; place_.rank == 0 && row < pass.head_columns; row += own_) {
    const Column& column = pass.column[pass.head[row]];
    Sequence& s = *running_[column.sequence];
    if (!s.request->scores()) continue;
    const float* row_logits = logits(pass) + row * round_up(spec_.vocab, 16);
    const int next = column.position + 1;
    if (s.request->keep_logits)
      std::memcpy(kept_logits_.data() + size_t(column.position) * spec_.vocab, row_logits, spec_.vocab * sizeof(float));
    if (next < static_cast<int>(s.ids.size()) && next >= s.request->score_from)
      s.scores.record(next - s.request->score_from, row_logits, spec_.vocab, s.ids[next],
                      kernels_->log_sum_exp(row_logits, spec_.vocab));
  }
}

}  // namespace laneformer
