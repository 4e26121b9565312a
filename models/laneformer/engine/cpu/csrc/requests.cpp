// Requests: which columns a pass holds, and what its logits lead to. All but `score_positions` runs on one thread,
// between two meetings of all of them.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "decoder.h"

namespace laneformer {

// --- sequences --------------------------------------------------------------------------------------------------

namespace {
constexpr int kLongestPhrase = 4, kShortestPhrase = 2;  // ids that must agree before the rest is drafted
}

void Scores::resize(size_t tokens, int best) {
  top = best;
  logprobs.assign(tokens, 0.0f);
  top_ids.assign(tokens * best, 0);
  top_logprobs.assign(tokens * best, 0.0f);
}

void Scores::record(size_t index, const float* logits, int vocab, int token, double log_sum_exp) {
  logprobs[index] = static_cast<float>(logits[token] - log_sum_exp);
  int* ids = top_ids.data() + index * top;
  best_ids(logits, vocab, top, ids);
  for (int i = 0; i < top; ++i)
    top_logprobs[index * top + i] = static_cast<float>(logits[ids[i]] - log_sum_exp);
}

void Sequence::draft(int most) {
  const int length = static_cast<int>(ids.size());
  for (int phrase = kLongestPhrase; phrase >= kShortestPhrase && most > 0; --phrase)
    for (int end = length - 1; end >= phrase; --end)
      if (std::equal(ids.begin() + end - phrase, ids.begin() + end, ids.end() - phrase)) {
        for (int i = 0; i < most; ++i)  // a repetition may continue into its own drafts
          drafts.push_back(end + i < length ? ids[end + i] : drafts[end + i - length]);
        return;
      }
}

// --- from Python ------------------------------------------------------------------------------------------------

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
  if (r.keep_logits && !r.scores()) throw std::invalid_argument("keep_logits needs score_from");
  int next = 0;
  for (const int position : r.keep_partials)
    if (position < std::exchange(next, position + 1) || position >= length)
      throw std::invalid_argument("keep_partials must be positions of the prompt in ascending order");
  if (!r.keep_partials.empty() && !r.keep_logits) throw std::invalid_argument("keep_partials needs keep_logits");
}

void Decoder::start(Request request) {
  expect(request);
  std::unique_lock lock(team_->mutex);
  if (team_->busy())
    throw std::runtime_error("the engine is busy with another request; finish or close its stream first");
  request_ = std::move(request);
  statistics_ = {}, timings_ = {};
  for (const Sequence& s : sequences_) caches_->end(s.cache);
  sequences_.clear(), sequences_.reserve(request_.prompts.size());
  SamplingOptions sampling = request_.sampling;
  for (size_t i = 0; i < request_.prompts.size(); ++i) {
    if (!request_.seeds.empty()) sampling.draw.seed = request_.seeds[i];
    sequences_.emplace_back(request_.prompts[i], sampling, spec_.vocab);
    begin_sequence(sequences_.back());
  }
  kept_logits_.assign(request_.keep_logits ? request_.prompts[0].size() * spec_.vocab : 0, 0.0f);
  kept_partials_.assign(request_.keep_partials.size() * spec_.layers * 2 * spec_.lanes * spec_.hidden, 0.0f);
  const int most_tokens = std::max(0, sequences_[0].end - sequences_[0].prompt_length);
  timings_.token_s.reserve(most_tokens);
  if (request_.probe_every) timings_.probe_bytes_per_s.reserve(most_tokens / request_.probe_every + 2);
  if (request_.probe_every) probe_buffer_ = Pages(kProbeBytes, true);
  cancel_ = false, overflowed_ = false, kv_overflow_ = false, probed_ = false, pass_ = {};
  team_->post([this](int t) { serve(t); });
}

void Decoder::begin_sequence(Sequence& s) {
  // Generating needs the logits of the last prompt id; scoring those of the id before the first scored one.
  const int most = request_.keep_logits ? 0 : (request_.scores() ? request_.score_from : s.prompt_length) - 1;
  const KvPool::Start start = caches_->begin(s.ids, request_.reuse_prefix ? most : 0);
  s.cache = start.cache, s.position = start.position;
  statistics_.reused += s.position;

  const int room = spec_.context - s.prompt_length + 1, wanted = std::min(request_.max_new_tokens, room);
  s.end = request_.scores() ? request_.positions() : s.prompt_length + wanted;
  s.finished = s.end <= s.position;
  if (request_.scores())
    s.scores.resize(s.prompt_length - request_.score_from, request_.top_logprobs);
  else
    s.ids.reserve(s.end);
  if (!request_.scores() && request_.top_logprobs >= 0) s.scores.resize(wanted, request_.top_logprobs);
  s.drafts.reserve(kMaxColumns);
}

std::vector<int> Decoder::poll(size_t from, double timeout_s, bool until_done, bool& finished) {
  std::unique_lock lock(team_->mutex);
  wants_tokens_ = !until_done;  // else no token wakes the caller, which would take a core from the lanes
  const auto ready = [&] {
    return !team_->busy() || (!until_done && static_cast<size_t>(sequences_[0].new_tokens()) > from);
  };
  team_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s), ready);
  finished = !team_->busy();
  if (finished && kv_overflow_.exchange(false) && overflowed_.exchange(false))
    throw std::overflow_error("a key or value of this model is beyond fp16's 65,504; use kv_dtype = 'bf16' or 'fp32'");
  if (finished && overflowed_.exchange(false))
    throw std::overflow_error("the model's activations or logits are infinite, NaN, or beyond what float32 can square: "
                              "its weights are damaged or far too large");
  if (sequences_.empty()) return {};
  const Sequence& s = sequences_[0];
  return {s.ids.begin() + s.prompt_length + std::min(static_cast<int>(from), s.new_tokens()), s.ids.end()};
}

std::vector<std::vector<int>> Decoder::outputs() {
  std::lock_guard lock(team_->mutex);
  std::vector<std::vector<int>> tokens;
  for (const Sequence& s : sequences_) tokens.emplace_back(s.ids.begin() + s.prompt_length, s.ids.end());
  return tokens;
}

// --- passes -----------------------------------------------------------------------------------------------------

bool Decoder::over() const {
  return cancel_.load(std::memory_order_relaxed) || overflowed_.load(std::memory_order_relaxed) ||
         std::all_of(sequences_.begin(), sequences_.end(), [](const Sequence& s) { return s.finished; });
}

// By the first thread, while the others wait: what the last pass yielded, and what comes next.
Decoder::Pass Decoder::next_pass() {
  if (pass_.step == Step::layers) {
    layers_run_ += spec_.layers;
    caches_->copied();
    if (overflowed_.load(std::memory_order_relaxed))
      for (const Sequence& s : sequences_) caches_->forget(s.cache);
    else
      finish_pass();
  }
  const bool done = over();
  const int new_tokens = sequences_[0].new_tokens();
  const bool due = request_.probe_every && new_tokens && !probed_ &&
                   (done || (new_tokens - 1) % request_.probe_every == 0);
  if (due && !cancel_.load(std::memory_order_relaxed)) {
    probed_ = true;
    return {.step = Step::probe};
  }
  probed_ = false;
  if (done) return {};
  pass_began_s_ = now_s();
  return plan_pass();
}

// Every sequence's ids that have not run yet, as far as there is room, and draft tokens after its last one.
Decoder::Pass Decoder::plan_pass() {
  Pass pass{.step = Step::layers, .first_layer = layers_run_};
  const int decoded = sequences_[0].new_tokens() - 1;
  if (request_.compare_barriers && request_.probe_every && decoded >= 0)
    pass.barriers = decoded / request_.probe_every % 2 == 1;
  ++statistics_.passes;
  for (Sequence& s : sequences_) {
    s.drafts.clear(), s.columns = s.head_columns = 0;
    if (s.finished) continue;
    const int known = request_.scores() ? s.end : static_cast<int>(s.ids.size());
    const int room = kMaxColumns - pass.columns, run = std::min(known - s.position, room);
    const bool decodes = !request_.scores() && s.position + run == known;
    if (decodes) s.draft(std::min({request_.speculate, room - run, s.end - known - 1}));
    s.columns = run + static_cast<int>(s.drafts.size());
    statistics_.proposed += s.columns - run;
    for (int c = 0; c < s.columns; ++c) {
      const int position = s.position + c;
      if (request_.scores() ? position + 1 >= request_.score_from || request_.keep_logits : decodes && c >= run - 1)
        pass.head[pass.head_columns++] = pass.columns, ++s.head_columns;
      pass.column[pass.columns++] = {c < run ? s.ids[position] : s.drafts[c - run], position, s.cache};
    }
  }
  return pass;
}

void Decoder::finish_pass() {
  int row = 0;
  for (Sequence& s : sequences_) {
    if (s.finished || !s.columns) continue;
    const int written = s.position + s.columns;
    s.position += s.columns - static_cast<int>(s.drafts.size());
    if (request_.scores())
      s.finished = s.position >= s.end;
    else if (s.head_columns)
      take_tokens(s, row);
    row += s.head_columns;
    caches_->ran(s.cache, s.ids, s.position, written);
  }
}

// One token, and one more for each draft token that was right: what a pass of its own would have given.
void Decoder::take_tokens(Sequence& s, int row) {
  const bool timed = &s == &sequences_[0];
  const int before = s.new_tokens();
  for (int i = 0; i < s.head_columns; ++i) {
    take_token(s, logits_.floats() + (row + i) * round_up(spec_.vocab, 16));
    const bool right = i < static_cast<int>(s.drafts.size()) && s.drafts[i] == s.ids.back();
    statistics_.accepted += right;
    if (s.finished || !right) break;
    ++s.position;  // the draft token's keys and values stand
  }
  const int taken = s.new_tokens() - before;
  if (!timed) return;
  if (before == 0) timings_.first_token_s = now_s() - request_began_s_;
  const double each_s = (now_s() - pass_began_s_) / taken;
  for (int i = before ? 0 : 1; i < taken; ++i) timings_.token_s.push_back(each_s);
}

void Decoder::take_token(Sequence& s, const float* logits) {
  const int token = s.sampler.choose(logits, static_cast<int>(s.ids.size()) - 1);
  if (request_.top_logprobs >= 0)
    s.scores.record(s.new_tokens(), logits, spec_.vocab, token, kernels_->log_sum_exp(logits, spec_.vocab));
  s.sampler.accept(token);
  {
    std::lock_guard lock(team_->mutex);
    s.ids.push_back(token);
    if (wants_tokens_) team_->changed.notify_all();
  }
  s.finished = static_cast<int>(s.ids.size()) >= s.end || s.sampler.options().stops_at(token);
}

// Log-probabilities of the ids that follow the pass's positions, shared out over the threads.
void Decoder::score_positions(int t, const Pass& pass) {
  const std::vector<int>& ids = sequences_[0].ids;
  for (int row = t; row < pass.head_columns; row += threads()) {
    const float* logits = logits_.floats() + row * round_up(spec_.vocab, 16);
    const int position = pass.column[pass.head[row]].position, next = position + 1;
    if (request_.keep_logits)
      std::memcpy(kept_logits_.data() + size_t(position) * spec_.vocab, logits, spec_.vocab * sizeof(float));
    if (next < static_cast<int>(ids.size()) && next >= request_.score_from)
      sequences_[0].scores.record(next - request_.score_from, logits, spec_.vocab, ids[next],
                                  kernels_->log_sum_exp(logits, spec_.vocab));
  }
}

}  // namespace laneformer
