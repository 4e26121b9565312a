// Who proposes the ids that may come next; they are verified in the pass of the last known one.
#pragma once
#include <vector>

namespace laneformer {

struct Rate {  // of drafts of one kind that were right; old ones count less
  double right, tried;

  void learn(bool was_right) {
    constexpr double kMostTried = 40.0;
    const double kept = tried >= kMostTried ? 1.0 - 1.0 / kMostTried : 1.0;
    right = right * kept + was_right, tried = tried * kept + 1.0;
  }
  // Where none was tried: back to what it was at first, so that one is tried again one day.
  void forget(const Rate& first) {
    constexpr double kForgotten = 0.01;
    right += (first.right - right) * kForgotten, tried += (first.tried - tried) * kForgotten;
  }
};

class Drafter {  // one a sequence
 public:
  virtual ~Drafter() = default;
  virtual void extend(int id) = 0;  // the text has grown by this id
  // Up to `most` ids that may follow, appended to `drafts`; odds[i]: that the first i + 1 of them are all
  // right.
  virtual void propose(int most, std::vector<int>& drafts, std::vector<double>& odds) = 0;
  virtual void verified(int drafts, int right) = 0;  // of the last proposal's first `drafts`; none: it was not tried
};

}  // namespace laneformer
