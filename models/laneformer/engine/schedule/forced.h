// Drafts whose acceptance is given, for measurements: what a trained head, or a draft model, would be worth here.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "drafter.h"

namespace laneformer {

// Drafts a known output: draft i is right with probability acceptance[i], if those before it are.
class ForcedDrafter : public Drafter {
 public:
  ForcedDrafter(std::vector<double> acceptance, std::vector<int> output)
      : acceptance_(std::move(acceptance)), output_(std::move(output)) {}

  void extend(int) override { ++made_; }
  void propose(int most, std::vector<int>& drafts, std::vector<double>& odds) override {
    double all = 1.0;
    bool right = true;
    for (int i = 0; i < most && i < int(acceptance_.size()) && made_ + i < output_.size(); ++i) {
      right = right && draw() < acceptance_[i];
      all *= acceptance_[i];
      const int id = output_[made_ + i];
      drafts.push_back(right ? id : id ? 0 : 1), odds.push_back(all);
    }
  }
  void verified(int, int) override {}

 private:
  double draw() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<double>(state_ >> 11) * 0x1p-53;
  }

  const std::vector<double> acceptance_;
  const std::vector<int> output_;
  size_t made_ = 0;
  uint64_t state_ = 1;
};

}  // namespace laneformer
