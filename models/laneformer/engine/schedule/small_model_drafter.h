// Drafts by a small model with the same vocabulary, which has caches of its own.
#pragma once
#include <atomic>
#include <vector>

#include "pass_drafter.h"
#include "prefix.h"

namespace laneformer {

class SmallModelDrafter : public PassDrafter {
 public:
  SmallModelDrafter(const KvShape& shape, double share, double (*log_sum_exp)(const float* x, int n), int vocab)
      : PassDrafter(share, log_sum_exp), prefixes_(shape), context_(shape.context), vocab_(vocab) {}

  bool plan(const std::vector<Sequence*>& running, Pass& pass) override;
  void end(Sequence& s) override { prefixes_.end(s.draft_state.cache); }
  size_t kv_bytes() const override { return kv_bytes_; }
  void set_limit(size_t bytes) override {
    prefixes_.set_limit(share_ < 1.0 ? static_cast<size_t>(static_cast<double>(bytes) * share_) : bytes);
  }

 private:
  int room(const Sequence& s) const override { return context_ - s.known() - 1; }
  void finish_ops(const std::vector<Sequence*>& running, const Pass& pass, const PassResult& last) override;
  void forget(Sequence& s) override { prefixes_.forget(s.draft_state.cache); }
  Row row(const float* logits) override { return {logits, log_sum_exp_(logits, vocab_)}; }
  void start(Sequence& s);
  void add_columns(Sequence& s, int sequence, Pass& pass);

  Prefixes prefixes_;
  const int context_, vocab_;
  uint64_t passes_ = 0;
  std::atomic<size_t> kv_bytes_{0};  // any thread may read it
};

}  // namespace laneformer
