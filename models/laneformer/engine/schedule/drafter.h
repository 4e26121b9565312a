// Who proposes the ids that may come next; they are verified in the pass of the last known one.
#pragma once
#include <vector>

namespace laneformer {

struct Rate {  // how many drafts of one kind were right; old ones count less
  double right, tried;

  void learn(bool was_right) {
    constexpr double kMostTried = 40.0;
    const double kept = tried >= kMostTried ? 1.0 - 1.0 / kMostTried : 1.0;
    right = right * kept + was_right, tried = tried * kept + 1.0;
  }
  // Moves back towards the first rate where none was tried, so that a draft is tried again one day.
  void forget(const Rate& first) {
    constexpr double kForgotten = 0.01;
    right += (first.right - right) * kForgotten, tried += (first.tried - tried) * kForgotten;
  }
};

class Drafter {  // each sequence has one of its own
 public:
  virtual ~Drafter() = default;
  virtual void extend(int id) = 0;  // the text has grown by this id
  // Appends up to `most` ids that may follow to `drafts`; odds[i]: the odds that the first i + 1 are all right.
  virtual void propose(int most, std::vector<int>& drafts, std::vector<double>& odds) = 0;
  // Of the last proposal the first `drafts` ids were tried (0: none), and the first `right` of these were right.
  virtual void learn(int drafts, int right) = 0;
};

}  // namespace laneformer
