// How many columns of prompts a pass may hold beside sequences that decode: so many that these wait less
// than twice as long for their next token as they do without prompts. No result depends on it.
//
// The time of a pass grows with its columns, from a fixed part on (the weights are read once). Multiplying
// the columns by (longest time allowed / time that they took) approaches the right number without passing
// it, whatever that part is.
#pragma once
#include <algorithm>

#include "pass.h"

namespace laneformer {

class Pace {
 public:
  // Returns how many prompt columns the next pass may hold; now and then none, to measure the usual time again.
  int columns() const { return usual_s_ == 0.0 || since_usual_ >= kMeasureEvery ? 0 : static_cast<int>(columns_); }

  // A pass of sequences that decode, and so many columns of prompts, took this long.
  void learn(int columns, double seconds) {
    if (columns == 0) {
      const double known = std::min(seconds, kLongest * usual_s_);  // a thread may have lost its core for a moment
      usual_s_ = usual_s_ == 0.0 ? seconds : usual_s_ + (known - usual_s_) / kRemembered;
      since_usual_ = 0;
      return;
    }
    ++since_usual_;
    const double change = std::clamp(kLongest * usual_s_ / seconds, 0.5, 1.5);
    if (columns == static_cast<int>(columns_))
      columns_ = std::clamp(columns_ * change, 1.0, double{kPassColumns});
    else if (change < 1.0)  // there was no more to read, and even that was too much
      columns_ = std::max(columns * change, 1.0);
  }

 private:
  static constexpr double kLongest = 1.7;  // times the usual time: below 2, as single passes vary
  static constexpr int kRemembered = 8, kMeasureEvery = 64;  // passes

  double usual_s_ = 0.0, columns_ = 2.0;
  int since_usual_ = 0;
};

}  // namespace laneformer
