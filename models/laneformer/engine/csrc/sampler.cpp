#include "sampler.h"

#include <algorithm>
#include <cmath>

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

int Sampler::choose(const float* logits, int vocab, const SamplingOptions& o, uint64_t index) {
  const int best = static_cast<int>(std::max_element(logits, logits + vocab) - logits);
  if (o.temperature == 0.0 || !std::isfinite(logits[best])) return best;  // weights that overflow leave no distribution
  const double top = logits[best], scale = 1.0 / o.temperature;
  const auto weight = [&](float logit) { return std::exp((logit - top) * scale); };
  const auto likelier = [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  };

  candidates_.clear();
  for (int id = 0; id < vocab; ++id)
    if (!std::isnan(logits[id])) candidates_.emplace_back(logits[id], id);
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
  if (static_cast<int>(candidates_.size()) < vocab)
    std::sort(candidates_.begin(), candidates_.end(), [](auto& a, auto& b) { return a.second < b.second; });

  double total = 0.0;
  for (const auto& c : candidates_) total += weight(c.first);
  double left = uniform(o.seed, index) * total;
  for (const auto& c : candidates_)
    if ((left -= weight(c.first)) < 0.0) return c.second;
  return candidates_.back().second;  // rounding used up the whole interval
}

}  // namespace laneformer
