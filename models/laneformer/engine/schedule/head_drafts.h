// Drafts by the model's own head for multi-token prediction (model.py, MTPHead).
//
// Its block is one more layer of the model's KV caches, so prefixes are reused and rolled back with the
// others' keys. After each pass of the model it runs the positions that are certain now, the prompt's too:
// each takes the streams that the pass has left there, and the id that follows. The last of them gives the
// first draft; each further one takes the block's own output, in a pass of its own, whose keys the next
// certain ones overwrite.
#pragma once
#include <vector>

#include "model_drafts.h"

namespace laneformer {

class HeadDrafts : public ModelDrafts {
 public:
  struct Head {
    std::vector<int> ids;  // that it can draft, ascending: the rows of its logits; none: the whole vocabulary
    double block = 0.0;    // of the model's bytes of weights, those of the block ...
    double share = 0.0;    // ... and with the rows
  };
  HeadDrafts(const Head& head, double (*log_sum_exp)(const float* x, int n), int vocab);

  bool plan(const std::vector<Sequence*>& running, Pass& pass) override;
  void ran(Sequence& s, int first) override;
  void set_share(double share) override { share_ = share, block_ = 0.0; }

 private:
  int room(const Sequence& s) const override { return s.model.columns ? kPassColumns : 0; }
  bool can_force() const override { return true; }
  double made_anyway_s(const Cost& model, int columns) const override {
    return seconds(block_cost_, block_, model, columns);
  }
  void passed(const Pass& pass, double seconds) override;
  Row row(const float* logits) override;
  void add_columns(Sequence& s, int sequence, Pass& pass);

  const std::vector<int> ids_;
  const int vocab_;
  double block_;
  Cost block_cost_;  // of passes without logits
  std::vector<float> by_id_;  // logits of a row; of ids that it cannot draft, minus infinity
  bool chained_ = false;  // the last pass was its own
};

}  // namespace laneformer
