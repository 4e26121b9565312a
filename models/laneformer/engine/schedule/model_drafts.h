// Drafts by a small model with the same vocabulary, in passes of its own between two of the large one's.
//
// Whether a sequence takes them, or what its text repeats, or none, is decided before each pass by what both have been
// right in so far and by what passes cost. The small model draws by the sequence's own rule and seed, so that samples
// agree as often as the distributions do.
#pragma once
#include <vector>

#include "cost.h"
#include "prefix.h"
#include "sequence.h"

namespace laneformer {

class ModelDrafts {
 public:
  // share: of the large model's weights: what a pass costs before it is measured.
  ModelDrafts(const KvShape& shape, double share, int vocab, double (*log_sum_exp)(const float* x, int n))
      : prefixes_(shape), context_(shape.context), share_(share), vocab_(vocab), log_sum_exp_(log_sum_exp) {}

  // All by the executor's thread. Which sequences it drafts for before the next pass, where that is worth more than the
  // drafts that they have; at most so many each.
  void begin(const std::vector<Sequence*>& running, const Cost& large, int most);
  // The next pass of the small model; false where there is none, and the drafts are there.
  bool plan(const std::vector<Sequence*>& running, Pass& pass);
  void finish(const std::vector<Sequence*>& running, const Pass& pass, const PassResult& last);
  void verified(Sequence& s, int right);  // of the drafts that the large model has seen, the first ones
  void end(Sequence& s) { prefixes_.end(s.model.cache); }

  const Prefixes& prefixes() const { return prefixes_; }
  void set_limit(size_t bytes) {  // the large model's
    prefixes_.set_limit(share_ < 1.0 ? static_cast<size_t>(static_cast<double>(bytes) * share_) : bytes);
  }
  void set_share(double share) { share_ = share; }

 private:
  struct Choice {
    int drafts = 0;
    double tokens_per_s = 0;
  };
  template <class Odds>
  Choice best(const Cost& large, int decoding, int most, double each_s, const Odds& odds) const;
  double step_s(const Cost& large, int columns) const;
  void choose(Sequence& s, const Cost& large, int decoding, int most) const;
  void start(Sequence& s);
  void add_columns(Sequence& s, int sequence, Pass& pass);
  void draw(Sequence& s, const float* logits);

  Prefixes prefixes_;
  Cost cost_;
  const int context_;
  double share_;
  const int vocab_;
  double (*const log_sum_exp_)(const float* x, int n);
  uint64_t passes_ = 0;
  double pass_began_s_ = 0;
};

}  // namespace laneformer
