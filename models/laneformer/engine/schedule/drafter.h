// Who proposes the ids that may come next; they are verified in the pass of the last known one.
#pragma once
#include <memory>
#include <vector>

namespace laneformer {

class Drafter {  // one a sequence
 public:
  virtual ~Drafter() = default;
  // Up to `most` ids that may follow these, appended to `drafts`.
  virtual void propose(const std::vector<int>& ids, int most, std::vector<int>& drafts) = 0;
};

// Prompt lookup: what followed the latest earlier place of the last few ids.
std::unique_ptr<Drafter> prompt_lookup();

}  // namespace laneformer
