#include <algorithm>

#include "drafter.h"

namespace laneformer {

namespace {

constexpr int kLongestPhrase = 4, kShortestPhrase = 2;  // ids that must agree before the rest is drafted

class PromptLookup : public Drafter {
 public:
  void propose(const std::vector<int>& ids, int most, std::vector<int>& drafts) override {
    const int length = static_cast<int>(ids.size());
    for (int phrase = kLongestPhrase; phrase >= kShortestPhrase && most > 0; --phrase)
      for (int end = length - 1; end >= phrase; --end)
        if (std::equal(ids.begin() + end - phrase, ids.begin() + end, ids.end() - phrase)) {
          for (int i = 0; i < most; ++i)  // a repetition may continue into its own drafts
            drafts.push_back(end + i < length ? ids[end + i] : drafts[end + i - length]);
          return;
        }
  }
};

}  // namespace

std::unique_ptr<Drafter> prompt_lookup() { return std::make_unique<PromptLookup>(); }

}  // namespace laneformer
