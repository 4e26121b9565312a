// Decides which requests run and what the next pass holds, and takes the results of the last one. It is passive: an
// executor asks for the next pass and hands in the results of the last one, and runs nothing while there is none.
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
#include "mtp_drafter.h"
#include "small_model_drafter.h"
#include "pace.h"
#include "pass.h"
#include "prefix.h"
#include "sequence.h"

namespace laneformer {

class Schedule {
 public:
  // `wake` is called, without a lock, when there is something to run again after `next` has returned nullptr.
  Schedule(const Limits& limits, const KvShape& shape, std::function<void()> wake);

  // --- called by any thread, at any time ---
  // Joins requests before the same pass; returns their tickets, which are never used again. Throws std::runtime_error
  // after `fail`, and where more than Limits::sequences would not have been collected to their end;
  // std::invalid_argument where a size or an id would lead beyond a buffer. What the values mean is Python's to check.
  std::vector<int64_t> join(std::vector<Request> requests);
  // Returns the news of all requests since the last call; waits for some, but not longer than the timeout.
  std::vector<News> collect(double timeout_s);
  void leave(int64_t ticket);
  void leave_all();
  // Sets the ids that new token `index` (from 0) of a masked request may be. Where the token could be drawn before this
  // call, its logits are kept and the other sequences go on.
  void allow(int64_t ticket, int index, Sequence::Mask mask);
  int running();            // the number of requests that have not been collected to their end
  Statistics statistics();  // the sums over all requests that were collected to their end since none ran

  // --- called by the executor's thread, which never waits here ---
  // Returns the next pass, or nullptr where nothing can run; `last` holds the results of the pass before.
  const Pass* next(const PassResult* last);
  bool interrupts();  // whether somebody joins or leaves, so that extra passes are to end
  void tell_news();   // wakes `collect`; after `next`, as soon as the executor has begun with the pass
  // Ends all requests with this error, as there will be no more passes; none can join any more.
  void fail(std::string why);
  std::string failure();  // the error of `fail`, or nothing

  // --- called by any thread of the executor, while a pass runs ---
  // Takes row `row` of the logits, if its sequence scores.
  void score_row(const Pass& pass, int row, const float* logits);
  // Returns where to write a column's partial outputs of one module, [lane][hidden]; nullptr: they are not wanted.
  float* partials(const Column& column, int layer, int module, size_t floats);

  // --- called by the executor's thread, while a chunk is read ---
  struct PromptChunk {
    std::vector<int> ids;  // the chunk's ids, and the one after them, if there is one
    int first_row;         // the position from which logits are wanted; none where it is not below the chunk's end
    int top;               // how many of the likeliest ids to record
    bool keeps_logits;
  };
  PromptChunk prompt_chunk(const Pass& pass) const;
  // Takes the scores of `count` positions from `position` on: the next ids' log-probabilities, the likeliest ids, and
  // theirs; `keep_logits` takes all logits of these positions.
  void score_chunk(const Pass& pass, int position, size_t count, const float* logprobs, const int* ids,
                   const float* tops);
  void keep_logits(const Pass& pass, int position, size_t count, const float* rows);
  Prefixes& prefixes() { return prefixes_; }

  // --- called while no request runs ---
  void set_cache_limit(size_t bytes);
  // For tests: fixes the cost of each further column, and that of a draft pass, in passes of one column.
  void fix_cost(double each_column, double draft) {
    cost_.fix(each_column);
    if (pass_drafter_) pass_drafter_->set_share(draft);
  }
  PassDrafter* pass_drafter() { return pass_drafter_.get(); }  // for tests
  // Lets a small model with caches of this shape draft, whose weights have `share` times the bytes of this model's; or
  // the model's own head for multi-token prediction.
  void draft_with(const KvShape& shape, double share);
  void draft_with_mtp(const MtpDrafter::Head& head);
  size_t kv_bytes() const { return kv_bytes_; }  // any thread may ask
  size_t draft_kv_bytes() const { return pass_drafter_ ? pass_drafter_->kv_bytes() : 0; }

 private:
  void expect(const Request& request) const;
  void wake(std::unique_lock<std::mutex>& lock);
  Sequence* find(int64_t ticket);
  bool change_sequences();
  void end_sequences();
  void admit(Sequence& sequence);
  void begin_round();
  void plan(Pass& pass);
  void plan_chunk(Pass& pass, int sequence);
  void plan_columns(Pass& pass);
  void choose_drafts();
  int reserved_columns() const;
  int room_for_drafts() const { return limits_.columns - reserved_columns(); }
  void propose();
  int count_extra_passes() const;
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
  // while requests run, only the executor's thread writes these
  Prefixes prefixes_;
  Pass pass_;
  std::vector<Sequence*> running_;  // by place: Column::sequence is an index of it
  PastOutputs past_;
  Pace pace_;
  Cost cost_;
  std::unique_ptr<PassDrafter> pass_drafter_;
  size_t cache_limit_ = SIZE_MAX;
  uint64_t number_ = 0;  // passes with columns or a chunk so far
  double round_began_s_ = 0, model_pass_began_s_ = 0;  // a round begins with the draft passes
  int passes_ = 1;               // passes that the last result covers
  bool notify_pending_ = false;  // there is news of which `collect` has not been told
  bool others_wait_ = false;     // some requests have joined and could not begin

  std::mutex mutex_;  // guards all that follows
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Sequence>> sequences_;  // all that have not been collected to their end
  Statistics total_;
  std::atomic<int> total_passes_{0};  // since none ran
  std::atomic<size_t> kv_bytes_{0};   // as of the last change of sequences
  bool asleep_ = true;     // `next` has returned nullptr, and nobody has called wake_ since
  bool has_news_ = false;  // `collect` would return something
  int64_t tickets_ = 0;
  std::string failure_;
};

}  // namespace laneformer
