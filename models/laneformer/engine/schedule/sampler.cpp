#include "sampler.h"

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
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
  if (options_.draw.filters()) kept_.reserve(vocab);
  if (options_.penalises() || !options_.logit_bias.empty() || options_.min_new_tokens) logits_.resize(vocab);
}

void Sampler::accept(int token) {
  ++made_;
  if (times_.empty()) return;
  if (times_[token] < 0) times_[token] = 0, seen_.push_back(token);
  ++times_[token];
}

const float* Sampler::adjusted(const float* logits, const std::vector<uint32_t>& mask) {
  if (logits_.empty() && mask.empty()) return logits;
  logits_.resize(vocab_);
  const SamplingOptions& o = options_;
  std::copy(logits, logits + vocab_, logits_.begin());
  for (const int id : seen_) {
    double x = logits_[id];
    x = x < 0.0 ? x * o.repetition_penalty : x / o.repetition_penalty;
    if (times_[id]) x -= o.frequency_penalty * times_[id] + o.presence_penalty;
    logits_[id] = static_cast<float>(x);
  }
  for (const auto& [id, bias] : o.logit_bias) logits_[id] = static_cast<float>(logits_[id] + bias);
  for (int id = 0; !mask.empty() && id < vocab_; ++id)
    if (!(mask[id / 32] >> id % 32 & 1)) logits_[id] = -std::numeric_limits<float>::infinity();
  if (made_ < o.min_new_tokens)
    for (const int id : o.stop_ids) logits_[id] = -std::numeric_limits<float>::infinity();
  return logits_.data();
}

// Returns the least logit that top-k and top-p leave; `top` is the largest one.
float Sampler::threshold(const float* logits, float top) {
  const Sampling& draw = options_.draw;
  kept_.clear();
  for (int id = 0; id < vocab_; ++id)
    if (logits[id] > -INFINITY) kept_.push_back({logits[id], 0.0f});
  Weighed *begin = kept_.data(), *end = begin + kept_.size();
  float least = -FLT_MAX;
  if (draw.top_k > 0 && draw.top_k < end - begin) {
    Weighed* last = begin + draw.top_k - 1;
    std::nth_element(begin, last, end, [](const Weighed& a, const Weighed& b) { return a.logit > b.logit; });
    least = last->logit;
    end = std::partition(last + 1, end, [=](const Weighed& one) { return one.logit == least; });
  }
  return draw.top_p < 1.0f ? top_p_threshold(begin, end, top) : least;
}

// Returns the logit at which the likeliest ones have reached top_p of the whole weight. No sort of them all: a
// histogram of the weight over equal steps of the logit says in which step that is, and only what lies there
// is looked at again.
float Sampler::top_p_threshold(Weighed* begin, Weighed* end, float top) const {
  constexpr int kSteps = 512, kSorted = 64;
  double wanted = 0.0;
  for (Weighed* one = begin; one != end; ++one) wanted += one->weight = options_.draw.weight(one->logit, top);
  wanted *= options_.draw.top_p;
  const auto above = [](const Weighed& a, const Weighed& b) { return a.logit > b.logit; };
  while (end - begin > kSorted) {
    double low = begin->logit, high = low;
    for (const Weighed* one = begin; one != end; ++one)
      low = std::min<double>(low, one->logit), high = std::max<double>(high, one->logit);
    if (low == high) break;
    const auto step_of = [high, scale = kSteps / (high - low)](const Weighed& one) {
      return std::min(kSteps - 1, static_cast<int>((high - one.logit) * scale));
    };
    double weights[kSteps] = {};
    for (const Weighed* one = begin; one != end; ++one) weights[step_of(*one)] += one->weight;
    int step = 0;
    while (step < kSteps - 1 && weights[step] < wanted) wanted -= weights[step++];
    end = std::partition(begin, end, [&](const Weighed& one) { return step_of(one) == step; });
  }
  std::sort(begin, end, above);
  const Weighed* last = begin;
  for (wanted -= last->weight; wanted > 0.0 && last + 1 != end; wanted -= last->weight) ++last;
  return last->logit;
}

int Sampler::choose(const float* raw, int position, const std::vector<uint32_t>& mask) {
  const Sampling& draw = options_.draw;
  const float* logits = adjusted(raw, mask);
  const int best = best_id(logits, vocab_);
  if (!mask.empty() && logits[best] == -std::numeric_limits<float>::infinity()) return -1;
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
