// Drafts by the model's own head for multi-token prediction (MTP; model.py, MTPHead).
//
// Its block is one more layer of the model's KV caches, so prefixes are reused and rolled back with the
// others' keys. After each pass of the model it runs the positions that are certain now, the prompt's too:
// each takes the streams that the pass has left there, and the id that follows. The last of them gives the
// first draft; each further one takes the block's own output, in a pass of its own, whose keys the next
// certain ones overwrite.
#pragma once
#include <vector>

#include "pass_drafter.h"

namespace laneformer {

class MtpDrafter : public PassDrafter {
 public:
  struct Head {
    std::vector<int> ids;  // the ids that it can draft, ascending: the rows of its logits; none: the whole vocabulary
    double block = 0.0;    // the block's part of the model's bytes of weights ...
    double share = 0.0;    // ... and that of the block and the rows
  };
  MtpDrafter(const Head& head, double (*log_sum_exp)(const float* x, int n), int vocab);

  bool plan(const std::vector<Sequence*>& running, Pass& pass) override;
  void ran(Sequence& s, int first) override;
  void set_share(double share) override { share_ = share, block_ = 0.0; }

 private:
  int room(const Sequence& s) const override { return s.draft_state.columns ? kPassColumns : 0; }
  double made_anyway_s(const Cost& model, int columns) const override {
    return seconds(block_cost_, block_, model, columns);
  }
  void learn_cost(const Pass& pass, double seconds) override;
  Row row(const float* logits) override;
  void add_columns(Sequence& s, int sequence, Pass& pass);

  const std::vector<int> ids_;
  const int vocab_;
  double block_;
  Cost block_cost_;  // the cost of passes without logits
  std::vector<float> by_id_;  // a row's logits; minus infinity for ids that it cannot draft
  bool chained_ = false;  // the last pass was a draft pass
};

}  // namespace laneformer
