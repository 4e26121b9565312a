// Who proposes the ids that may come next; they are verified in the pass of the last known one.
#pragma once
#include <vector>

namespace laneformer {

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
