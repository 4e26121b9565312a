// Which requests run, what the next pass holds, and what came of the last one. It is passive: an executor
// asks for the next pass and hands in what the last one gave, and runs nothing while there is none.
//
// A pass is a block of columns; a column is one position of one sequence: a part of a prompt, one new token,
// or a draft token after it. A request gets the same results alone and beside others.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "clock.h"
#include "cost.h"
#include "head_drafts.h"
#include "small_model.h"
#include "pace.h"
#include "pass.h"
#include "prefix.h"
#include "sequence.h"

namespace laneformer {

class Schedule {
 public:
  // `wake`: called without a lock when there is something to run again after `next` has returned nullptr.
  Schedule(const Limits& limits, const KvShape& shape, std::function<void()> wake);

  // From any thread, at any time.
  //
  // Joins requests before the same pass; returns their tickets, which are never used again. Throws
  // std::runtime_error after `fail`, and where more than Limits::sequences would not have been collected to
  // their end; std::invalid_argument where a size or an id would lead beyond a buffer. What the values mean is
  // Python's to check.
  std::vector<int64_t> join(std::vector<Request> requests);
  // Of all requests since the last call; waits until there is something, but not longer than the timeout.
  std::vector<News> collect(double timeout_s);
  void leave(int64_t ticket);
  void leave_all();
  // New token `index` (from 0) of a masked request is one of these ids. Where it could be drawn before this
  // comes, its logits are kept and the others go on.
  void allow(int64_t ticket, int index, Sequence::Mask mask);
  int running();            // requests that have not been collected to their end
  Statistics statistics();  // of all that were collected to their end since none ran

  // By the executor's thread, which never waits in them.
  //
  // The next pass, or nullptr where nothing can run; `last` is what the one before gave.
  const Pass* next(const PassResult* last);
  bool interrupts();  // while passes run ahead: somebody joins or leaves, so they are to end
  void tell_news();  // after `next`, as soon as the executor has begun with the pass
  // All requests end with this error, as there will be no more passes, and none can join.
  void fail(std::string why);
  std::string failure();  // that reason

  // By any thread of the executor, while a pass runs: head row `row` of a sequence that scores; where a
  // column's partial outputs of one module are to be kept, [lane][hidden], or nullptr.
  void score(const Pass& pass, int row, const float* logits);
  float* partials(const Column& column, int layer, int module, size_t floats);

  // By the executor's thread, while a piece is read.
  struct Piece {
    std::vector<int> ids;  // and the one after them, if there is one
    int first_row;         // the position from which logits are wanted; none where it is not below the piece's end
    int top;               // likeliest ids to record
    bool keeps_logits;
  };
  Piece piece(const Pass& pass) const;
  // Of `count` positions from `position` on: the next ids' log-probabilities, best ids, and theirs, or all
  // logits.
  void score(const Pass& pass, int position, size_t count, const float* logprobs, const int* ids, const float* tops);
  void keep_logits(const Pass& pass, int position, size_t count, const float* rows);
  Prefixes& prefixes() { return prefixes_; }
  // while no request runs
  void set_cache_limit(size_t bytes);
  // For tests. draft: of a draft model's pass, in passes of one column.
  void fix_cost(double each_column, double draft) {
    cost_.fix(each_column);
    if (model_) model_->set_share(draft);
  }
  ModelDrafts* model_drafts() { return model_.get(); }  // for tests
  // Drafts come from a model with caches of this shape, or from the model's head; share: of this model's
  // bytes of weights.
  void draft_with(const KvShape& shape, double share);
  void draft_with_head(const HeadDrafts::Head& head);
  size_t kv_bytes() const { return kv_bytes_; }  // any thread may ask
  size_t draft_kv_bytes() const { return model_ ? model_->kv_bytes() : 0; }

 private:
  void expect(const Request& request) const;
  void wake(std::unique_lock<std::mutex>& lock);
  Sequence* find(int64_t ticket);
  bool change_sequences();
  void end_sequences();
  void admit(Sequence& sequence);
  void begin_round();
  void plan(Pass& pass);
  void plan_piece(Pass& pass, int sequence);
  void plan_columns(Pass& pass);
  void choose_drafts();
  int room() const;
  void propose();
  int ahead() const;
  void take_back(int cache);
  void add_columns(Pass& pass, int sequence, int most);
  void finish_pass(const PassResult& last);
  void take_tokens(Sequence& sequence, const PassResult& last);
  bool take_mask(Sequence& sequence, Sequence::Mask& mask);
  int passes_of(const Sequence& sequence, const PassResult& last) const;
  void follow(Sequence& sequence, const PassResult& last);
  bool take_token(Sequence& sequence, const float* logits, int picked = -1);
  void begin_sequence(Sequence& sequence);

  const Limits limits_;
  const std::function<void()> wake_;
  // while they run, only the executor's thread writes these
  Prefixes prefixes_;
  Pass pass_;
  std::vector<Sequence*> running_;  // places of a pass's columns
  PastOutputs past_;
  Pace pace_;
  Cost cost_;
  std::unique_ptr<ModelDrafts> model_;
  size_t cache_limit_ = SIZE_MAX;
  uint64_t number_ = 0;  // of passes with columns
  double round_began_s_ = 0, pass_began_s_ = 0;  // the draft model's passes come first
  int passes_ = 1;  // that the last result is of
  bool tells_news_ = false, others_wait_ = false;

  std::mutex mutex_;  // of all that follows
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Sequence>> sequences_;  // that have not been collected to the end
  Statistics total_;
  std::atomic<int> total_passes_{0};  // since none ran
  std::atomic<size_t> kv_bytes_{0};   // as of the last change of sequences
  bool asleep_ = true, has_news_ = false;
  int64_t tickets_ = 0;
  std::string failure_;
};

}  // namespace laneformer
