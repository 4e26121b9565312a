#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace laneformer {

double uniform(uint64_t seed, uint64_t index) {
  uint32_t x[4] = {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32), 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * x[0], b = uint64_t{0xCD9E8D57} * x[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ x[1] ^ key[0], static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ x[3] ^ key[1], static_cast<uint32_t>(a)};
    std::copy(next, next + 4, x);
    key[0] += 0x9E3779B9, key[1] += 0xBB67AE85;
  }
  return static_cast<double>((uint64_t{x[0]} << 21) ^ (x[1] >> 11)) * 0x1p-53;
}

bool SamplingOptions::stops_at(int id) const {
  return std::find(stop_ids.begin(), stop_ids.end(), id) != stop_ids.end();
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
  if (options_.temperature > 0.0) candidates_.reserve(vocab);
  if (options_.penalises() || !options_.logit_bias.empty() || options_.min_new_tokens) logits_.resize(vocab);
}

void Sampler::accept(int token) {
  if (times_.empty()) return;
  if (times_[token] < 0) times_[token] = 0, seen_.push_back(token);
  ++times_[token];
}

const float* Sampler::adjusted(const float* logits, uint64_t index) {
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
  if (index < static_cast<uint64_t>(o.min_new_tokens))
    for (const int id : o.stop_ids) logits_[id] = -std::numeric_limits<float>::infinity();
  return logits_.data();
}

int Sampler::choose(const float* raw, uint64_t index) {
  const SamplingOptions& o = options_;
  const float* logits = adjusted(raw, index);
  const int best = best_id(logits, vocab_);
  if (o.temperature == 0.0 || !std::isfinite(logits[best])) return best;  // weights that overflow leave no distribution
  const double top = logits[best], scale = 1.0 / o.temperature;
  const auto weight = [&](float logit) { return std::exp((logit - top) * scale); };
  const auto likelier = [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  };

  candidates_.clear();
  for (int id = 0; id < vocab_; ++id)
    if (logits[id] > -std::numeric_limits<float>::infinity()) candidates_.emplace_back(logits[id], id);
  if (o.top_k > 0 && o.top_k < static_cast<int>(candidates_.size())) {
    std::nth_element(candidates_.begin(), candidates_.begin() + o.top_k - 1, candidates_.end(), likelier);
    candidates_.resize(o.top_k);
  }
  if (o.top_p < 1.0) {
    double total = 0.0, reached = 0.0;
    for (const auto& c : candidates_) total += weight(c.first);
    const auto less_likely = [&](const auto& a, const auto& b) { return likelier(b, a); };
    std::make_heap(candidates_.begin(), candidates_.end(), less_likely);
    auto end = candidates_.end();
    while (end != candidates_.begin() && reached < o.top_p * total) {  // the likeliest move to the back, in order
      std::pop_heap(candidates_.begin(), end, less_likely);
      reached += weight((--end)->first);
    }
    candidates_.erase(candidates_.begin(), end);
  }
  if (o.min_p > 0.0)
    std::erase_if(candidates_, [&](const auto& c) { return weight(c.first) < o.min_p; });
  if (candidates_.empty()) return best;
  if (static_cast<int>(candidates_.size()) < vocab_)
    std::sort(candidates_.begin(), candidates_.end(), [](auto& a, auto& b) { return a.second < b.second; });

  double total = 0.0;
  for (const auto& c : candidates_) total += weight(c.first);
  double left = uniform(o.seed, index) * total;
  for (const auto& c : candidates_)
    if ((left -= weight(c.first)) < 0.0) return c.second;
  return candidates_.back().second;  // rounding used up the whole interval
}

}  // namespace laneformer
