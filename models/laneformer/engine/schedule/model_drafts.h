// Drafts that are made in passes of their own, between two of the model's: what a small model and the head
// for multi-token prediction have in common.
//
// Whether a sequence takes them, or what its text repeats, or none, is decided before each pass by what both
// have been right in so far and by what passes cost. Drafts are drawn by the sequence's own rule and seed, so
// that samples agree as often as the distributions do.
#pragma once
#include <utility>
#include <vector>

#include "cost.h"
#include "sequence.h"

namespace laneformer {

class ModelDrafts {
 public:
  // share: of the model's weights that a pass of it reads: what one costs before it is measured.
  ModelDrafts(double share, double (*log_sum_exp)(const float* x, int n))
      : share_(share), log_sum_exp_(log_sum_exp) {}
  virtual ~ModelDrafts() = default;

  // All by the executor's thread. Which sequences it drafts for before the next pass, where that is worth
  // more than the drafts that they have; at most so many each.
  void begin(const std::vector<Sequence*>& running, const Cost& model, int most);
  // The next pass of its own; false where there is none, and the drafts are there.
  virtual bool plan(const std::vector<Sequence*>& running, Pass& pass) = 0;
  void finish(const std::vector<Sequence*>& running, const Pass& pass, const PassResult& last);
  void verified(Sequence& s, int right);  // of the drafts that the model has seen, the first ones
  virtual void ran(Sequence&, int) {}     // the model has run the sequence's positions from this one on
  virtual void end(Sequence&) {}
  virtual size_t kv_bytes() const { return 0; }  // of caches of its own, to any thread
  virtual void set_limit(size_t) {}              // of the model's caches
  virtual void set_share(double share) { share_ = share; }
  // For tests: what drafts were drawn from, by whoever has no request running.
  struct Drawn {
    std::vector<int> ids;  // the text, and the drafts before it
    int drafts;            // of these
    std::vector<float> logits;
  };
  void record() { records_ = true; }
  std::vector<Drawn> recorded() { return std::move(drawn_); }

 protected:
  static bool drafts(const Sequence* s) { return static_cast<int>(s->drafts.size()) < s->model.wanted; }
  // The id at an index of the text and the drafts after it.
  static int id_at(const Sequence& s, int index) {
    return index < s.known() ? s.ids[index] : s.drafts[index - s.known()];
  }
  static void wants_logits(Sequence& s, Pass& pass) {  // of the last column so far
    s.model.row = pass.head_columns;
    pass.head[pass.head_columns++] = static_cast<int16_t>(pass.columns - 1);
  }
  double step_s(const Cost& model, int columns) const { return seconds(cost_, share_, model, columns); }
  static double seconds(const Cost& own, double share, const Cost& model, int columns);

  virtual int room(const Sequence& s) const = 0;  // drafts that it could make
  virtual bool can_force() const { return false; }  // whether drafts are its own whose ids are given
  // Seconds of a pass that is made whether there are drafts or not, and which the first one takes part in.
  virtual double made_anyway_s(const Cost&, int) const { return 0.0; }
  virtual void refused(const std::vector<Sequence*>&, const Pass&, const PassResult&) {}
  virtual void forget(Sequence&) {}  // its numbers overflowed
  struct Row {                       // of logits, by id
    const float* logits;
    double log_sum_exp;
  };
  virtual Row row(const float* logits) = 0;  // of a row that its pass gave

  Cost cost_;
  double share_;
  double (*const log_sum_exp_)(const float* x, int n);
  double pass_began_s_ = 0;

 private:
  struct Choice {
    int drafts = 0;
    double tokens_per_s = 0;
  };
  struct Round {
    const Cost& model;
    int decoding;         // sequences
    double made_anyway_s;
    // Tokens a second without drafts.
    double plain() const { return decoding / (model.of(decoding) + made_anyway_s); }
  };
  template <class Odds>
  static Choice best(const Round& round, int most, double each_s, const Odds& odds);
  void choose(Sequence& s, const Round& round, int most) const;
  void take_forced(Sequence& s, int& most) const;
  virtual void passed(const Pass& pass, double seconds) { cost_.passed(pass.columns, seconds); }
  void draw(Sequence& s, const float* logits);

  bool records_ = false;
  std::vector<Drawn> drawn_;
};

}  // namespace laneformer
