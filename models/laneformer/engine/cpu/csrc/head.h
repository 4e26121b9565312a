// The LM head: from the lanes' streams to logits, its rows shared out over the threads. A draft pass of the MTP head has a
// norm and rows of its own, and the rest in common.
#pragma once
#include <vector>

#include "../../schedule/schedule.h"
#include "layers.h"
#include "shared.h"

namespace laneformer {

class LmHead {
 public:
  // The schedule takes the rows of sequences that score.
  LmHead(Shared& shared, const Layers& layers, Schedule& schedule);

  void run(int t, const Pass& pass);
  const float* logits() const { return logits_.floats(); }  // [logit column][stride], until the next pass
  size_t stride() const { return round_up(spec_.vocab, 16); }

 private:
  struct Scratch {
    Pages inputs;                 // [matrix][column][hidden]
    std::vector<Pages> prepared;  // by matrix, as the product reads them
    std::vector<Inputs> x;        // by matrix: one of the two
    Pages total;                  // [2][hidden]
    Counter ready, taken;         // the number of the pass whose inputs are there; how many shares are taken in it
  };
  void reserve(int t);
  void lane_inputs(int t, const Pass& pass);
  void replicated_inputs(int t, const Pass& pass);
  void give_streams(int t, const Pass& pass);
  void prepare(int t, const Pass& pass);
  void share(int t, const Pass& pass);
  bool multiply_share(int owner, uint64_t share, const Pass& pass);
  void sum_lane_logits(int t, const Pass& pass);
  void score_positions(int t, const Pass& pass);
  const std::vector<Matrix>& matrices(int t, const Pass& pass) const {
    const ThreadPlan& plan = shared_.model.plan(t);
    return pass.network == Network::mtp ? plan.draft_head : plan.head;
  }
  int threads() const { return shared_.model.threads(); }
  int first_logit(int lane, const Pass& pass) const;
  bool sums_first(const Pass& pass) const { return spec_.sum_before_norm && pass.network != Network::mtp; }
  void norm(const float* stream, int lane, const Pass& pass, float* out) const;
  void mark_overflow(const float* values, int count, const Pass& pass, int row);

  Shared& shared_;
  const ModelSpec& spec_;
  const Layers& layers_;
  Schedule& schedule_;
  std::vector<Scratch> scratch_;  // by thread
  Pages logits_, lane_logits_, final_streams_;
};

}  // namespace laneformer
