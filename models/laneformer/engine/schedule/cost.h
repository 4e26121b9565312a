// What a pass of so many columns costs, as measured while they run: for this model, its weights' type, these
// threads, and whatever else the machine does. Draft tokens are worth their columns or not by this alone.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>

namespace laneformer {

constexpr double kLeastGain = 1.03;  // the speedup below which a pass runs without drafts

class Cost {
 public:
  Cost() { interpolate(); }

  // The cost is in seconds, or, before anything was measured, in passes of one column.
  double of(int columns) const {
    return columns <= kKnown ? table_[columns] : table_[kKnown] * columns / kKnown;
  }

  bool measured() const { return measured_; }
  bool fixed() const { return fixed_; }

  // Fixes the cost of a pass of n columns to 1 + each (n - 1), for tests, which want the same drafts again.
  void fix(double each) {
    for (int c = 1; c <= kKnown; ++c) table_[c] = 1.0 + each * (c - 1);
    fixed_ = true;
  }

  // Learns from a pass in which sequences decode and no prompt is read.
  void learn(int columns, double seconds) {
    ++passes_;
    if (columns < 1 || columns > kKnown || fixed_) return;
    double& known = seconds_[columns];
    const bool fresh = known > 0.0 && passes_ - seen_[columns] < kStale;
    if (measured_) seconds = std::min(seconds, kLongest * table_[columns]);  // a thread may have lost its core
    known = fresh ? known + (seconds - known) / kRemembered : seconds;
    seen_[columns] = passes_, measured_ = true;
    interpolate();
  }

 private:
  static constexpr int kKnown = 32;
  static constexpr int kRemembered = 8;
  static constexpr uint64_t kStale = 512;  // passes after which a measurement no longer counts
  static constexpr double kLongest = 2.0;  // a pass counts for at most so many times the known cost
  // The guess before there is a measurement: what bf16 weights cost on a CPU, which is less than others do.
  static double first(int columns) { return 1.0 + 0.06 * (columns - 1); }

  void interpolate() {
    int below = 0;  // the last count of columns with a measurement
    for (int c = 1; c <= kKnown; ++c) {
      if (!(seconds_[c] > 0.0) || passes_ - seen_[c] >= kStale) continue;
      for (int i = below + 1; i <= c; ++i)
        table_[i] = below ? seconds_[below] + (seconds_[c] - seconds_[below]) * (i - below) / (c - below)
                          : seconds_[c] * first(i) / first(c);
      below = c;
    }
    for (int i = below + 1; i <= kKnown; ++i) table_[i] = (below ? seconds_[below] / first(below) : 1.0) * first(i);
  }

  std::array<double, kKnown + 1> seconds_{}, table_{};
  std::array<uint64_t, kKnown + 1> seen_{};
  uint64_t passes_ = 0;
  bool measured_ = false, fixed_ = false;
};

}  // namespace laneformer
