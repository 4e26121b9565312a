// What is measured: how far ahead to prefetch, the bandwidth of memory, and what a slower link between lanes costs.
#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "decoder.h"

namespace laneformer {

size_t Decoder::tune(int64_t bytes) {
  constexpr size_t kLeast = size_t{64} << 20, kMost = size_t{96} << 20;  // more than caches; enough to tell apart
  constexpr int kRounds = 5, kCount = std::size(kAhead);
  if (bytes >= 0) return ahead_ = static_cast<size_t>(bytes);
  if (weight_bytes() < kLeast) return ahead_;
  std::array<std::array<double, kRounds>, kCount> seconds;
  on_all_threads([&](int t) {
    for (int turn = -1; turn < kRounds * kCount; ++turn) {  // the first one touches the pages
      const int i = (turn + kCount) % kCount;
      meet(t);
      const double began = now_s();
      if (t == first_) ahead_ = kAhead[i];
      meet(t);
      read_tape(t, kMost / plans_.size());
      meet(t);
      if (t == first_ && turn >= 0) seconds[i][turn / kCount] = now_s() - began;
    }
  });
  const auto median = [](std::array<double, kRounds> of) {
    std::nth_element(of.begin(), of.begin() + kRounds / 2, of.end());
    return of[kRounds / 2];
  };
  const auto faster = [&](const auto& a, const auto& b) { return median(a) < median(b); };
  return ahead_ = kAhead[std::min_element(seconds.begin(), seconds.end(), faster) - seconds.begin()];
}

// Multiplies as decoding does, layer by layer, until `most` bytes of this thread's tape are read.
void Decoder::read_tape(int t, size_t most) {
  Worker& w = workers_[t];
  for (const auto& layer : plans_[t].layers)
    for (const LaneLayer& lane : layer)
      for (const Matrix* matrix : {&lane.qkv, &lane.wo, &lane.gate_up, &lane.w2}) {
        if (matrix->offset > most) return;
        multiply(t, *matrix, w.x.floats(), 0, w.y.floats() - matrix->first_row, 0, 1);
      }
}

double Decoder::probe() {
  Pages buffer(kProbeBytes, true);
  double bytes_per_s = 0.0;
  on_all_threads([&](int t) {
    const double found = probe(t, buffer);
    if (t == first_) bytes_per_s = found;
  });
  return bytes_per_s;
}

// The best of a few plain read loops over every thread's share of a large buffer.
double Decoder::probe(int t, Pages& buffer) {
  const size_t share = kProbeBytes / plans_.size() / 1024 * 1024;
  double best = 0.0;
  // untouched pages would all be the same zero page
  std::memset(buffer.bytes() + kProbeBytes / plans_.size() * t, 1, kProbeBytes / plans_.size());
  for (const size_t ahead : kAhead) {
    meet(t);
    const double began = now_s();
    volatile uint64_t sink = kernels_->read(buffer.bytes() + share / 64 * 64 * t, share, ahead);
    (void)sink;
    meet(t);
    best = std::max(best, static_cast<double>(share * plans_.size()) / (now_s() - began));
  }
  return best;
}

void Decoder::set_latency(const Latency& latency) {
  const auto in_range = [](double value, double most) { return value >= 0.0 && value <= most; };
  if (!in_range(latency.link_s, 1.0) || !in_range(latency.jitter, 2.0))
    throw std::invalid_argument("latency: 0 to 1 s, its jitter 0 to 2; got " + std::to_string(latency.link_s) +
                                " and " + std::to_string(latency.jitter));
  std::vector<int> first_of_lane;
  for (const ThreadPlan& plan : plans_) first_of_lane.push_back(plan.leader);
  on_all_threads([](int) {});  // throws while a request runs
  exchange_.set_latency(latency, std::move(first_of_lane));
}

void Decoder::set_ladder() {
  for (const auto& joins : spec_.join)
    if (std::find_if(joins.begin(), joins.end(), [](Join how) { return how != Join::present; }) != joins.end())
      throw std::invalid_argument("ladder: every join of the model must be PRESENT; set broadcast_delay = 0");
  on_all_threads([](int) {});
  ladder_ = true;
}

}  // namespace laneformer
