#include "schedule.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

namespace laneformer {

namespace {
constexpr char kOverflow[] =
    "the model's activations or logits are infinite, NaN, or beyond what float32 can square: its weights are damaged "
    "or far too large";
constexpr char kKvOverflow[] =
    "a key or value of this model is beyond fp16's 65,504; use kv_dtype = 'bf16' or 'fp32'";
constexpr char kNoneAllowed[] = "the mask, with min_new_tokens, leaves no id from which a token could be drawn";
}  // namespace

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Schedule::Schedule(const Limits& limits, const KvShape& shape, std::function<void()> wake)
    : limits_(limits), wake_(std::move(wake)), prefixes_(shape) {}

// --- callers ----------------------------------------------------------------------------------------------------

void Schedule::expect(const Request& r) const {
  const size_t longest = size_t(limits_.context) + (r.scores() && !r.keep_logits);
  if (r.prompt.empty() || r.prompt.size() > longest)
    throw std::invalid_argument("prompt is empty or longer than the context");
  expect_ids(r.prompt, limits_.vocab), expect_ids(r.prediction, limits_.vocab);
  r.sampling.expect(limits_.vocab);
  if (r.max_new_tokens < 0 || r.top_logprobs > limits_.vocab || r.speculate < 0)
    throw std::invalid_argument("max_new_tokens, logprobs or speculate is out of range");
  const int length = static_cast<int>(r.prompt.size());
  if (r.score_from < 0 || (r.scores() && (r.score_from > length || r.top_logprobs < 0)))
    throw std::invalid_argument("scoring takes score_from inside the prompt, and logprobs");
  if (r.masked && r.scores()) throw std::invalid_argument("scoring takes no mask");
  if (r.keep_logits && !r.scores()) throw std::invalid_argument("keep_logits needs score_from");
  int next = 0;
  for (const int position : r.keep_partials)
    if (position < std::exchange(next, position + 1) || position >= length)
      throw std::invalid_argument("keep_partials must be positions of the prompt in ascending order");
  if (!r.keep_partials.empty() && !r.keep_logits) throw std::invalid_argument("keep_partials needs keep_logits");
}

std::vector<int64_t> Schedule::join(std::vector<Request> requests) {
  std::vector<std::unique_ptr<Sequence>> joining;
  for (Request& request : requests) {
    expect(request);
    joining.push_back(std::make_unique<Sequence>(std::move(request), limits_, past_));
  }
  std::unique_lock lock(mutex_);
  if (!failure_.empty()) throw std::runtime_error(failure_);
  if (sequences_.size() + joining.size() > size_t(limits_.sequences))
    throw std::runtime_error("the engine runs at most " + std::to_string(limits_.sequences) +
                             " requests; collect the end of one first");
  if (sequences_.empty()) total_ = {}, total_passes_ = 0;
  std::vector<int64_t> tickets;
  for (auto& sequence : joining) {
    tickets.push_back(sequence->ticket = ++tickets_);
    sequence->joined_s = now_s();
    sequences_.push_back(std::move(sequence));
  }
  wake(lock);
  return tickets;
}

// Wakes the executor where it sleeps and there are requests.
void Schedule::wake(std::unique_lock<std::mutex>& lock) {
  if (sequences_.empty() || !std::exchange(asleep_, false)) return;
  lock.unlock();
  wake_();
}

std::vector<News> Schedule::collect(double timeout_s) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return has_news_; });
  std::vector<News> found;
  if (!std::exchange(has_news_, false)) return found;
  for (const auto& s : sequences_)
    if (s->has_news()) found.push_back(s->take_news());
  for (const News& news : found)
    if (news.ended) total_ += news.ended->statistics;
  std::erase_if(sequences_, [](const auto& s) { return s->stage == Sequence::Stage::ended; });
  return found;
}

void Schedule::set_cache_limit(size_t bytes) {
  cache_limit_ = bytes;
  prefixes_.set_limit(bytes);
  if (pass_drafter_) pass_drafter_->set_limit(bytes);
}

void Schedule::draft_with(const KvShape& shape, double share) {
  pass_drafter_ = std::make_unique<SmallModelDrafter>(shape, share, limits_.log_sum_exp, limits_.vocab);
  pass_drafter_->set_limit(cache_limit_);
}

void Schedule::draft_with_mtp(const MtpDrafter::Head& head) {
  pass_drafter_ = std::make_unique<MtpDrafter>(head, limits_.log_sum_exp, limits_.vocab);
}

int Schedule::running() {
  std::lock_guard lock(mutex_);
  return static_cast<int>(sequences_.size());
}

Statistics Schedule::statistics() {
  std::lock_guard lock(mutex_);
  Statistics total = total_;
  total.passes = total_passes_;  // not the requests' sum, as they share passes
  return total;
}

bool Schedule::interrupts() {
  std::lock_guard lock(mutex_);
  const bool room = static_cast<int>(running_.size()) < limits_.sequences;
  return std::any_of(sequences_.begin(), sequences_.end(), [&](const auto& s) {
    return (s->left && s->stage != Sequence::Stage::ended) || (room && s->stage == Sequence::Stage::waiting);
  });
}

// Returns the request of this ticket if it has not ended, else nullptr.
Sequence* Schedule::find(int64_t ticket) {
  for (const auto& s : sequences_)
    if (s->ticket == ticket && s->stage != Sequence::Stage::ended) return s.get();
  return nullptr;
}

void Schedule::leave(int64_t ticket) {
  std::unique_lock lock(mutex_);
  if (Sequence* s = find(ticket)) {
    s->left = true;
    wake(lock);
  }
}

void Schedule::leave_all() {
  std::unique_lock lock(mutex_);
  for (const auto& s : sequences_) s->left = true;
  wake(lock);
}

void Schedule::allow(int64_t ticket, int index, Sequence::Mask mask) {
  if (mask.size() != (size_t(limits_.vocab) + 31) / 32 || index < 0)
    throw std::invalid_argument("a mask has " + std::to_string((limits_.vocab + 31) / 32) + " words, not " +
                                std::to_string(mask.size()) + ", and an index from 0");
  std::unique_lock lock(mutex_);
  Sequence* s = find(ticket);
  if (!s || index < s->new_tokens()) return;
  if (!s->request.masked) throw std::invalid_argument("this request was joined without masked");
  s->masks[index] = std::move(mask);
  wake(lock);
}

// --- the executor -----------------------------------------------------------------------------------------------

const Pass* Schedule::next(const PassResult* last) {
  if (last && pass_.network != Network::model) {
    pass_drafter_->finish(running_, pass_, *last);
  } else {
    if (last) finish_pass(*last);
    if (!change_sequences()) {
      pass_.decoding = 0;
      return nullptr;
    }
    begin_round();
  }
  Pass pass{.number = number_};
  if (!pass_drafter_ || !pass_drafter_->plan(running_, pass)) plan(pass);
  if (pass.network != Network::small_model) number_ = pass.number;
  pass_ = pass;
  return &pass_;
}

void Schedule::tell_news() {
  if (std::exchange(notify_pending_, false)) changed_.notify_all();
}

void Schedule::fail(std::string why) {
  std::lock_guard lock(mutex_);
  failure_ = std::move(why);
  for (const auto& s : sequences_) {
    if (s->stage != Sequence::Stage::ended) s->fail(failure_, Fault::executor);
    s->stage = Sequence::Stage::ended;
  }
  running_.clear();
  asleep_ = has_news_ = true;
  changed_.notify_all();
}

std::string Schedule::failure() {
  std::lock_guard lock(mutex_);
  return failure_;
}

// Draws the tokens whose masks have come, begins the requests that have joined, and ends those that are over. Returns
// false, and marks the executor as asleep, where nothing can run.
bool Schedule::change_sequences() {
  const auto waits = [](const Sequence* s) { return s->awaits_mask; };
  const auto is_waiting = [](const auto& s) { return s->stage == Sequence::Stage::waiting; };
  for (;;) {
    for (Sequence* s : running_)
      if (s->awaits_mask) take_token(*s, s->undrawn.data());
    std::lock_guard lock(mutex_);
    end_sequences();  // before others begin, which may take their places and caches
    for (const auto& s : sequences_)
      if (is_waiting(s)) admit(*s);
    end_sequences();  // some of those that have just begun have nothing to run
    kv_bytes_ = prefixes_.bytes();
    others_wait_ = std::any_of(sequences_.begin(), sequences_.end(), is_waiting);
    has_news_ = std::any_of(sequences_.begin(), sequences_.end(), [](auto& s) { return s->has_news(); });
    notify_pending_ |= has_news_;
    if (!std::all_of(running_.begin(), running_.end(), waits)) return true;
    // all that have just begun ended at once: those that found no place, or waited for their caches, can begin now
    if (running_.empty() && others_wait_) continue;
    // all wait for masks: one that came since the loop's first line, without the lock, is drawn in another turn; later
    // ones find asleep_ set and wake the executor
    const auto drawable = [](const Sequence* s) { return s->masks.count(s->new_tokens()) > 0; };
    if (std::any_of(running_.begin(), running_.end(), drawable)) continue;
    asleep_ = true;
    return false;
  }
}

void Schedule::end_sequences() {
  std::erase_if(running_, [this](Sequence* s) {
    if (!s->finished && !s->left) return false;
    prefixes_.end(s->cache);
    if (pass_drafter_) pass_drafter_->end(*s);
    if (s->drafter && s->request.reuse_prefix) past_.add({s->ids.begin() + s->prompt_length, s->ids.end()});
    s->stage = Sequence::Stage::ended;
    return true;
  });
}

void Schedule::admit(Sequence& s) try {
  if (s.left)
    s.stage = Sequence::Stage::ended;
  else if (static_cast<int>(running_.size()) < limits_.sequences && !prefixes_.awaits(s.ids, s.max_reusable()))
    begin_sequence(s);
} catch (const std::exception& error) {
  s.fail(error.what(), Fault::request);
  s.stage = Sequence::Stage::ended;
}

void Schedule::begin_sequence(Sequence& s) {
  const Prefixes::Start start = prefixes_.begin(s.ids, s.max_reusable());
  s.cache = start.cache;
  s.position = s.left_behind.statistics.reused = start.position;
  s.finished = s.end <= s.position;
  if (limits_.max_chunk_tokens && s.request.scores())
    s.chunks_end = s.end;
  else if (limits_.max_chunk_tokens && s.prompt_length - s.position > limits_.unread)
    s.chunks_end = s.prompt_length - 1;
  s.stage = Sequence::Stage::running;
  running_.push_back(&s);
}

// Takes the last pass back, which has run no columns, as there was no memory for a cache.
void Schedule::take_back(int cache) {
  const bool gone = !prefixes_.retry_without_one_cache();
  for (Sequence* s : running_) {
    if (gone && s->cache == cache) {
      s->fail(prefixes_.refusal(), Fault::request);
      s->cache = -1;
    }
    if (!s->columns) continue;
    --s->left_behind.statistics.passes;
    s->left_behind.statistics.proposed -= static_cast<int>(s->drafts.size());
  }
  if (pass_.columns || pass_.chunk_tokens) --number_, --total_passes_;
  pass_.decoding = 0;
}

void Schedule::finish_pass(const PassResult& last) {
  prefixes_.done(last.refused < 0 ? pass_.ops : last.refused);
  if (last.refused >= 0) return take_back(pass_.op[last.refused].cache);
  passes_ = last.passes, total_passes_ += passes_ - 1;
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence& s = *running_[i];
    if (last.overflowed & 1u << i) {
      prefixes_.forget(s.cache);
      s.fail(last.kv_overflowed & 1u << i ? kKvOverflow : kOverflow, Fault::overflow);
    }
    if (last.error && s.columns) {
      prefixes_.forget(s.cache);
      s.fail(last.error, Fault::executor);
    }
    if (s.finished || !s.columns) continue;
    const int before = s.position, written = s.position + s.columns + passes_of(s, last) - 1;
    s.position += s.columns - static_cast<int>(s.drafts.size());
    if (s.request.scores())
      s.finished = s.position >= s.end;
    else if (s.logit_columns)
      take_tokens(s, last);
    if (pass_drafter_ && s.drafter && !s.finished && !pass_.chunk_tokens) pass_drafter_->ran(s, before);
    prefixes_.ran(s.cache, s.ids, s.position, written);
    if (before < s.prompt_length && s.position >= s.prompt_length && !s.finished) prefixes_.keep(s.cache, s.end - 1);
  }
}

// Takes one token, and one more for each draft token that was right: what a pass of its own would have given.
void Schedule::take_tokens(Sequence& s, const PassResult& last) {
  const int before = s.new_tokens(), accepted = s.left_behind.statistics.accepted;
  for (int i = 0; i < s.logit_columns; ++i) {
    const int row = s.first_row + i;
    const bool taken =
        s.picks ? take_token(s, nullptr, last.picked[row]) : take_token(s, last.logits + row * last.stride);
    if (!taken) return;  // its mask has not come
    const bool right = i < static_cast<int>(s.drafts.size()) && s.drafts[i] == s.ids.back();
    s.left_behind.statistics.accepted += right;
    if (s.finished || !right) break;
    ++s.position;  // the draft token's keys and values stand
  }
  const int right = s.left_behind.statistics.accepted - accepted;
  if (pass_drafter_ && s.drafter) pass_drafter_->learn(s, right);
  if (s.drafter && s.takes_pass_drafts())
    s.drafter->learn(0, 0);  // its own proposal was not tried
  else if (s.drafter)
    s.drafter->learn(static_cast<int>(s.drafts.size()), right);
  follow(s, last);
  if (!s.request.timed) return;
  Timings& timings = s.left_behind.timings;
  const int taken = s.new_tokens() - before;
  if (before == 0) timings.first_token_s = now_s() - s.joined_s;
  const double each_s = (now_s() - round_began_s_) / taken;
  for (int i = before ? 0 : 1; i < taken; ++i) timings.token_s.push_back(each_s);
}

// Returns in how many of the last passes the sequence's column ran: the first, and extra ones until it ended.
int Schedule::passes_of(const Sequence& s, const PassResult& last) const {
  int passes = 1;
  while (passes < last.passes && last.picked[passes * pass_.columns + s.first_row] >= 0) ++passes;
  return passes;
}

// Takes the tokens of the extra passes, each of which ran the token before.
void Schedule::follow(Sequence& s, const PassResult& last) {
  for (int pass = 1; pass < passes_of(s, last) && !s.finished; ++pass) {
    ++s.position, ++s.left_behind.statistics.passes;
    take_token(s, nullptr, last.picked[pass * pass_.columns + s.first_row]);
  }
}

bool Schedule::take_mask(Sequence& s, Sequence::Mask& mask) {
  std::lock_guard lock(mutex_);
  auto found = s.masks.extract(s.new_tokens());
  if (found) mask = std::move(found.mapped());
  return !found.empty();
}

// Draws one token, or takes the `picked` one. Returns false where the token's mask has not come.
bool Schedule::take_token(Sequence& s, const float* logits, int picked) {
  Sequence::Mask mask;
  if (s.request.masked && !take_mask(s, mask)) {
    if (!s.awaits_mask) s.undrawn.assign(logits, logits + limits_.vocab);
    s.awaits_mask = true;
    return false;
  }
  s.awaits_mask = false;
  const int token = s.picks ? picked : s.sampler.choose(logits, static_cast<int>(s.ids.size()) - 1, mask);
  if (token < 0) {
    s.fail(kNoneAllowed, Fault::request);
    return true;
  }
  if (s.request.top_logprobs >= 0)
    s.scores.record(s.new_tokens(), logits, limits_.vocab, token, limits_.log_sum_exp(logits, limits_.vocab));
  s.sampler.accept(token);
  {
    std::lock_guard lock(mutex_);
    s.take(token);
  }
  s.finished = static_cast<int>(s.ids.size()) >= s.end || s.sampler.options().stops_at(token);
  return true;
}

}  // namespace laneformer
