// Requests from Python and their results; passes.cpp runs them.
#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

#include "decoder.h"

namespace laneformer {

// --- one request ------------------------------------------------------------------------------------------------

void Decoder::expect(const Request& r) const {
  if (cosine_.empty()) throw std::invalid_argument("the weights are not loaded yet");
  if (r.prompts.empty() || r.prompts.size() > kMaxSequences || r.max_new_tokens < 0)
    throw std::invalid_argument("between 1 and " + std::to_string(kMaxSequences) + " prompts are possible");
  for (const auto& prompt : r.prompts) {
    const size_t longest = size_t(spec_.context) + (r.scores() && !r.keep_logits);
    if (prompt.empty() || prompt.size() > longest)
      throw std::invalid_argument("prompt is empty or longer than the context");
    expect_ids(prompt, spec_.vocab);
  }
  r.sampling.expect(spec_.vocab);
  if (!r.seeds.empty() && r.seeds.size() != r.prompts.size()) throw std::invalid_argument("seeds: one for each prompt");
  if (r.top_logprobs > spec_.vocab || r.speculate < 0 || r.probe_every < 0)
    throw std::invalid_argument("logprobs, speculate or probe_every is out of range");
  const int length = static_cast<int>(r.prompts[0].size());
  if (r.score_from < 0 || (r.scores() && (r.prompts.size() > 1 || r.score_from > length || r.top_logprobs < 0)))
    throw std::invalid_argument("scoring takes one prompt, score_from inside it, and logprobs");
  if (r.masked && r.scores()) throw std::invalid_argument("scoring takes no mask");
  if (r.keep_logits && !r.scores()) throw std::invalid_argument("keep_logits needs score_from");
  int next = 0;
  for (const int position : r.keep_partials)
    if (position < std::exchange(next, position + 1) || position >= length)
      throw std::invalid_argument("keep_partials must be positions of the prompt in ascending order");
  if (!r.keep_partials.empty() && !r.keep_logits) throw std::invalid_argument("keep_partials needs keep_logits");
}

void Decoder::start(Request request) {
  expect(request);
  if (request.masked) throw std::invalid_argument("a masked request must be joined");
  if (place_.processes > 1 && !request.keep_partials.empty())
    throw std::invalid_argument("keep_partials needs one process: each has the outputs of its own lanes");
  std::unique_lock lock(team_->mutex);
  if (serving_ || (joined_ && !sequences_.empty()))
    throw std::runtime_error("the engine is busy with another request; finish or close its stream first");
  team_->changed.wait(lock, [&] { return !team_->busy(); });  // it ends
  request_ = std::make_shared<const Request>(std::move(request));
  passes_ = 0, timings_ = {};
  joined_ = false, sequences_.clear();
  try {
    for (size_t i = 0; i < request_->prompts.size(); ++i) {
      sequences_.push_back(std::make_unique<Sequence>(request_, i, spec_));
      Sequence& s = *sequences_.back();
      if (!caches_->awaits(s.ids, s.max_reusable())) begin_sequence(s);
    }
  } catch (...) {
    for (const Sequence* s : running_) caches_->end(s->cache);
    running_.clear(), sequences_.clear();
    throw;
  }
  kept_logits_.assign(request_->keep_logits ? request_->prompts[0].size() * spec_.vocab : 0, 0.0f);
  kept_partials_.assign(request_->keep_partials.size() * spec_.layers * 2 * spec_.lanes * spec_.hidden, 0.0f);
  const int most_tokens = std::max(0, sequences_[0]->end - sequences_[0]->prompt_length);
  timings_.token_s.reserve(most_tokens);
  if (request_->probe_every) timings_.probe_bytes_per_s.reserve(most_tokens / request_->probe_every + 2);
  if (request_->probe_every) probe_buffer_ = Pages(kProbeBytes, true);
  probed_ = cancelled_ = false, serving_ = true;
  team_->post([this](int t) { serve(first_ + t); });
}

std::vector<int> Decoder::poll(size_t from, double timeout_s, bool until_done, bool& finished) {
  std::unique_lock lock(team_->mutex);
  wants_tokens_ = !until_done;  // else no token wakes the caller, which would take a core from the lanes
  const auto ready = [&] {
    return !team_->busy() || (!until_done && static_cast<size_t>(sequences_[0]->new_tokens()) > from);
  };
  team_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s), ready);
  finished = !team_->busy();
  for (const auto& s : sequences_)
    if (finished && !s->error.empty()) throw std::overflow_error(std::exchange(s->error, ""));
  if (sequences_.empty()) return {};
  const Sequence& s = *sequences_[0];
  return {s.ids.begin() + s.prompt_length + std::min(static_cast<int>(from), s.new_tokens()), s.ids.end()};
}

std::vector<std::vector<int>> Decoder::outputs() {
  std::lock_guard lock(team_->mutex);
  std::vector<std::vector<int>> tokens;
  for (const auto& s : sequences_) tokens.emplace_back(s->ids.begin() + s->prompt_length, s->ids.end());
  return tokens;
}

Statistics Decoder::statistics() const {
  Statistics total;
  for (const auto& s : sequences_) {
    total.reused += s->statistics.reused;
    total.proposed += s->statistics.proposed;
    total.accepted += s->statistics.accepted;
  }
  total.passes = passes_;
  return total;
}

void Decoder::cancel() {
  if (getpid() != process_) return;  // nothing runs in a forked child, and its mutex may never be free
  std::unique_lock lock(team_->mutex);
  for (const auto& s : sequences_) s->left = true;
  cancelled_ = true;
  wake(lock);
}

// --- joined requests --------------------------------------------------------------------------------------------

int64_t Decoder::join(Request request) {
  expect(request);
  if (place_.processes > 1)
    throw std::runtime_error("an engine in several processes runs one request at a time; use one process");
  if (request.prompts.size() > 1 || request.keep_logits || request.probe_every)
    throw std::invalid_argument("a joined request has one prompt, and neither keep_logits nor probe_every");
  auto sequence = std::make_unique<Sequence>(std::make_shared<const Request>(std::move(request)), 0, spec_);
  std::unique_lock lock(team_->mutex);
  if (!joined_ && serving_)
    throw std::runtime_error("the engine is busy with another request; finish or close its stream first");
  if (joined_ && sequences_.size() >= kMaxSequences)
    throw std::runtime_error("the engine runs " + std::to_string(kMaxSequences) +
                             " requests; collect the end of one first");
  if (!joined_) {
    team_->changed.wait(lock, [&] { return !team_->busy(); });
    joined_ = true, sequences_.clear();
    request_ = std::make_shared<const Request>();
    probe_buffer_ = Pages();  // a server probes once, at its start
  }
  const int64_t ticket = sequence->ticket = ++tickets_;
  sequences_.push_back(std::move(sequence));
  wake(lock);
  return ticket;
}

// The threads go on with joined requests, where they have ceased to.
void Decoder::wake(std::unique_lock<std::mutex>& lock) {
  if (!joined_ || sequences_.empty()) return;
  team_->changed.wait(lock, [&] { return serving_ || !team_->busy(); });  // the last ones are on their way out
  if (serving_) return;
  serving_ = true;
  team_->post([this](int t) { serve(first_ + t); });
}

std::vector<News> Decoder::collect(double timeout_s) {
  std::unique_lock lock(team_->mutex);
  team_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return has_news_; });
  has_news_ = false;
  std::vector<News> found;
  if (!joined_) return found;
  for (const auto& s : sequences_)
    if (s->has_news()) found.push_back(s->take_news());
  std::erase_if(sequences_, [](const auto& s) { return s->stage == Sequence::Stage::ended; });
  return found;
}

// Of a joined request that has not ended.
Sequence* Decoder::find(int64_t ticket) {
  for (const auto& s : sequences_)
    if (joined_ && s->ticket == ticket && s->stage != Sequence::Stage::ended) return s.get();
  return nullptr;
}

void Decoder::leave(int64_t ticket) {
  std::unique_lock lock(team_->mutex);
  if (Sequence* s = find(ticket)) {
    s->left = true;
    wake(lock);
  }
}

void Decoder::allow(int64_t ticket, int index, Sequence::Mask mask) {
  if (mask.size() != (size_t(spec_.vocab) + 31) / 32 || index < 0)
    throw std::invalid_argument("a mask has " + std::to_string((spec_.vocab + 31) / 32) + " words, not " +
                                std::to_string(mask.size()) + ", and an index from 0");
  std::unique_lock lock(team_->mutex);
  Sequence* s = find(ticket);
  if (!s || index < s->new_tokens()) return;
  if (!s->request->masked) throw std::invalid_argument("this request was joined without masked");
  s->masks[index] = std::move(mask);
  wake(lock);
}

void Decoder::begin_sequence(Sequence& s) {
  const KvPool::Start start = caches_->begin(s.ids, s.max_reusable());
  s.cache = start.cache;
  s.position = s.statistics.reused = start.position;
  s.finished = s.end <= s.position;
  s.stage = Sequence::Stage::running;
  running_.push_back(&s);
}

}  // namespace laneformer
