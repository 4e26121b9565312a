// Drafts from text that is there already: what followed the latest place where the longest end of the text stood before.
//
// Places are found as LZ77 coders find them: ids are chained to the last place where the same few ids stood, and the
// chain is followed a bounded way. So a new id costs two table entries, a proposal at most some thousand comparisons,
// whatever the text's length; a suffix automaton would find the very longest place, at 40 bytes and a search per id.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "drafter.h"

namespace laneformer {

class SuffixIndex {  // indexes a text that grows at its end
 public:
  static constexpr int kBarrier = -1;  // no match reaches over it
  struct Match {
    int length = 0, next = 0;  // how many ids agree; the place of the id that followed them
  };

  void append(int id);
  // Finds the longest end of `text` that stands here, of several the latest; in the text's own index not the end itself.
  Match longest(std::span<const int> text, bool own) const;
  const std::vector<int>& ids() const { return ids_; }

 private:
  struct Chain {            // links all places after the same `ids` ids
    int ids, longest_walk;  // longest_walk: how many places are looked at
    std::vector<int> latest{}, before{};  // [hash], [place]: place + 1, or 0
  };
  void rehash(Chain& chain);
  void link(Chain& chain, int end);
  static uint64_t hash(const int* end, int ids);
  void walk(const Chain& chain, std::span<const int> text, bool own, Match& best) const;

  std::vector<int> ids_;
  std::array<Chain, 2> chains_{Chain{4, 32}, Chain{2, 8}};
};

// The last outputs of requests that have ended: a task that comes again is answered alike.
class PastOutputs {
 public:
  void add(std::span<const int> output);
  // Returns the longer match of both halves, and the ids that it lies in.
  SuffixIndex::Match longest(std::span<const int> text, const std::vector<int>** in) const;

 private:
  static constexpr size_t kHalf = 32768;  // ids
  std::array<SuffixIndex, 2> halves_;     // the newer one first
};

class SuffixDrafter : public Drafter {
 public:
  // `prediction`: what the output may look like. past: outlives the drafter; nullptr for none.
  SuffixDrafter(const std::vector<int>& prediction, const std::vector<int>& prompt, const PastOutputs* past);
  void extend(int id) override { own_.append(id); }
  void propose(int most, std::vector<int>& drafts, std::vector<double>& odds) override;
  void learn(int drafts, int right) override;

 private:
  static int bucket(int length);

  SuffixIndex own_;
  const PastOutputs* past_;
  std::vector<Rate> rates_;  // of drafts, by bucket(number of ids that agree before them)
  int length_ = 0;  // ids that agree in the last proposal's match
};

}  // namespace laneformer
