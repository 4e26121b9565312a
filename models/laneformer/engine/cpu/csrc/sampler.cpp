#include "sampler.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>

namespace laneformer {

bool SamplingOptions::stops_at(int id) const {
  return std::find(stop_ids.begin(), stop_ids.end(), id) != stop_ids.end();
}

void expect_ids(const std::vector<int>& ids, int vocab) {
  for (const int id : ids)
    if (id < 0 || id >= vocab) throw std::invalid_argument("token id " + std::to_string(id) + " out of range");
}

void SamplingOptions::expect(int vocab) const {
  expect_ids(stop_ids, vocab);
  for (const auto& [id, bias] : logit_bias) expect_ids({id}, vocab);
}

int best_id(const float* logits, int vocab) {
  constexpr int kChains = 16;  // independent maxima, which the compiler keeps in vectors
  float best[kChains];
  std::fill(best, best + kChains, -std::numeric_limits<float>::infinity());
  int id = 0;
  for (; id + kChains <= vocab; id += kChains)
    for (int i = 0; i < kChains; ++i) best[i] = logits[id + i] > best[i] ? logits[id + i] : best[i];
  for (; id < vocab; ++id) best[0] = logits[id] > best[0] ? logits[id] : best[0];
  const float top = *std::max_element(best, best + kChains);
  const auto found = std::find(logits, logits + vocab, top);
  return found == logits + vocab ? 0 : static_cast<int>(found - logits);
}

void best_ids(const float* logits, int vocab, int n, int* ids) {
  const auto above = [&](int a, int b) {
    return logits[a] > logits[b] || (std::isnan(logits[b]) && !std::isnan(logits[a]));
  };
  for (int id = 0, kept = 0; id < vocab && n; ++id) {
    if (kept == n && !above(id, ids[n - 1])) continue;
    int at = kept < n ? kept++ : n - 1;
    for (; at > 0 && above(id, ids[at - 1]); --at) ids[at] = ids[at - 1];
    ids[at] = id;
  }
}

Sampler::Sampler(SamplingOptions options, int vocab, const std::vector<int>& prompt)
    : options_(std::move(options)), vocab_(vocab) {
  if (options_.penalises()) {
    times_.assign(vocab, -1);
    seen_.reserve(vocab);
    for (const int id : prompt)
      if (times_[id] < 0) times_[id] = 0, seen_.push_back(id);
  }
  if (options_.draw.filters()) sorted_.reserve(vocab);
  if (options_.penalises() || !options_.logit_bias.empty() || options_.min_new_tokens) logits_.resize(vocab);
}

void Sampler::accept(int token) {
  ++made_;
  if (times_.empty()) return;
  if (times_[token] < 0) times_[token] = 0, seen_.push_back(token);
  ++times_[token];
}

const float* Sampler::adjusted(const float* logits) {
  if (logits_.empty()) return logits;
  const SamplingOptions& o = options_;
  std::copy(logits, logits + vocab_, logits_.begin());
  for (const int id : seen_) {
    double x = logits_[id];
    x = x < 0.0 ? x * o.repetition_penalty : x / o.repetition_penalty;
    if (times_[id]) x -= o.frequency_penalty * times_[id] + o.presence_penalty;
    logits_[id] = static_cast<float>(x);
  }
  for (const auto& [id, bias] : o.logit_bias) logits_[id] = static_cast<float>(logits_[id] + bias);
  if (made_ < o.min_new_tokens)
    for (const int id : o.stop_ids) logits_[id] = -std::numeric_limits<float>::infinity();
  return logits_.data();
}

// The least logit that top-k and top-p leave; `top` is the largest one.
float Sampler::threshold(const float* logits, float top) {
  const Sampling& draw = options_.draw;
  sorted_.clear();
  std::copy_if(logits, logits + vocab_, std::back_inserter(sorted_), [](float logit) { return logit > -INFINITY; });
  auto end = sorted_.end();
  if (draw.top_k > 0 && draw.top_k < static_cast<int>(sorted_.size())) {
    end = sorted_.begin() + draw.top_k;
    std::nth_element(sorted_.begin(), end - 1, sorted_.end(), std::greater());
    end = std::partition(end, sorted_.end(), [kth = end[-1]](float logit) { return logit == kth; });
  }
  float least = end == sorted_.end() ? -FLT_MAX : *std::min_element(sorted_.begin(), end);
  if (draw.top_p < 1.0f) {
    double total = 0.0, reached = 0.0;
    for (auto logit = sorted_.begin(); logit != end; ++logit) total += draw.weight(*logit, top);
    std::make_heap(sorted_.begin(), end);
    while (end != sorted_.begin() && reached < draw.top_p * total) {  // the likeliest move to the back, in order
      std::pop_heap(sorted_.begin(), end);
      reached += draw.weight(least = *--end, top);
    }
  }
  return least;
}

int Sampler::choose(const float* raw, int position) {
  const Sampling& draw = options_.draw;
  const float* logits = adjusted(raw);
  const int best = best_id(logits, vocab_);
  if (draw.greedy() || !std::isfinite(logits[best])) return best;  // weights that overflow leave no distribution
  const float top = logits[best], least = draw.filters() ? threshold(logits, top) : -FLT_MAX;
  Candidate chosen{draw.score(top, position, best), best};
  for (int id = 0; id < vocab_; ++id) {
    // most tokens could not win with any noise and need no random number; most of the others not with theirs
    const float scaled = logits[id] * draw.inverse_temperature;
    if (!(logits[id] >= least) || scaled + 24 * kNoisePerOne < chosen.score) continue;
    const uint32_t bits = philox(draw.seed, position, id);
    if (scaled + (std::countl_one(bits) + 1) * kNoisePerOne < chosen.score) continue;
    if (draw.filters() && !draw.keeps(logits[id], top)) continue;
    chosen = better(chosen, {scaled + noise(bits), id});
  }
  return chosen.token;
}

}  // namespace laneformer
