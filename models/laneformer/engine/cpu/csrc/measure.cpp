// Measurements: how far ahead to prefetch, the bandwidth of memory, and what a slower link between lanes costs.
#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "executor.h"

namespace laneformer {

size_t CpuExecutor::tune(int64_t bytes) {
  constexpr size_t kLeast = size_t{64} << 20, kMost = size_t{96} << 20;  // more than caches; enough to tell apart
  constexpr int kRounds = 3, kCount = std::size(kAhead);
  size_t& prefetch_bytes = shared_.products.prefetch_bytes;
  const Model& model = shared_.model;
  if (bytes >= 0) return prefetch_bytes = static_cast<size_t>(bytes);
  if (model.bytes() < kLeast) return prefetch_bytes;
  std::array<std::array<double, kRounds>, kCount> seconds;
  on_all_threads([&](int t) {
    for (int turn = -1; turn < kRounds * kCount; ++turn) {  // the first one touches the pages
      const int i = (turn + kCount) % kCount;
      meet(t);
      const double began = now_s();
      if (t == 0) prefetch_bytes = kAhead[i];
      meet(t);
      layers_.read_tape(t, kMost / model.threads());
      meet(t);
      if (t == 0 && turn >= 0) seconds[i][turn / kCount] = now_s() - began;
    }
  });
  const auto median = [](std::array<double, kRounds> of) {
    std::nth_element(of.begin(), of.begin() + kRounds / 2, of.end());
    return of[kRounds / 2];
  };
  const auto faster = [&](const auto& a, const auto& b) { return median(a) < median(b); };
  return prefetch_bytes = kAhead[std::min_element(seconds.begin(), seconds.end(), faster) - seconds.begin()];
}

double CpuExecutor::probe() {
  Pages buffer(kProbeBytes, true);
  double bytes_per_s = 0.0;
  on_all_threads([&](int t) {
    const double found = probe(t, buffer);
    if (t == 0) bytes_per_s = found;
  });
  return bytes_per_s;
}

// Returns the bytes/s of the best of a few plain read loops over every thread's share of a large buffer.
double CpuExecutor::probe(int t, Pages& buffer) {
  const size_t threads = shared_.model.threads(), share = kProbeBytes / threads / 1024 * 1024;
  double best = 0.0;
  // untouched pages would all be the same zero page
  std::memset(buffer.bytes() + kProbeBytes / threads * t, 1, kProbeBytes / threads);
  for (const size_t ahead : kAhead) {
    meet(t);
    const double began = now_s();
    volatile uint64_t sink = shared_.kernels.read(buffer.bytes() + share / 64 * 64 * t, share, ahead);
    (void)sink;
    meet(t);
    best = std::max(best, static_cast<double>(share * threads) / (now_s() - began));
  }
  return best;
}

// Takes the best of a few turns of one layer.
double CpuExecutor::probe_products() {
  constexpr int kTurns = 6;
  std::vector<double> products(shared_.model.threads());
  double best = 0.0;
  on_all_threads([&](int t) {
    for (int turn = 0; turn < kTurns; ++turn) {
      meet(t);
      const double began = now_s();
      products[t] = layers_.multiply_cached(t);
      meet(t);
      if (t != 0) continue;
      double all = 0.0;
      for (const double of_thread : products) all += of_thread;
      best = std::max(best, all / (now_s() - began));
    }
  });
  return best;
}

bool CpuExecutor::set_latency(double link_s) {
  if (!(link_s >= 0.0 && link_s <= 1.0))
    throw std::invalid_argument("a link's latency is 0 to 1 s, not " + std::to_string(link_s));
  std::vector<int> first_of_lane;
  for (int t = 0; t < shared_.model.threads(); ++t) first_of_lane.push_back(shared_.model.plan(t).leader);
  const bool between_lanes = first_of_lane.back() != first_of_lane.front();
  on_all_threads([](int) {});  // throws while a request runs
  shared_.exchange.set_latency(link_s, std::move(first_of_lane));
  return between_lanes;
}

void CpuExecutor::set_ladder() {
  on_all_threads([](int) {});
  layers_.set_ladder();
}

}  // namespace laneformer
