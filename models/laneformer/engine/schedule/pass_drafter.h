// A drafter that needs passes of its own between two of the model's: what a small model and the head for multi-token
// prediction have in common. (A Drafter, drafter.h, needs none, and each sequence has its own.)
//
// Before each pass of the model it is decided for each sequence whose drafts to take: this drafter's, its own Drafter's,
// or none, by how often both were right so far and by what passes cost. Drafts are drawn by the sequence's own rule and
// seed, so that samples agree as often as the distributions do.
#pragma once
#include <utility>
#include <vector>

#include "cost.h"
#include "sequence.h"

namespace laneformer {

class PassDrafter {
 public:
  // share: the part of the model's bytes of weights that a draft pass reads, which is its cost before it is measured.
  PassDrafter(double share, double (*log_sum_exp)(const float* x, int n))
      : share_(share), log_sum_exp_(log_sum_exp) {}
  virtual ~PassDrafter() = default;

  // Only the executor's thread calls these. `begin` chooses the sequences to draft for before the model's next pass, where
  // that is worth more than the drafts that they have; at most `most` drafts each.
  void begin(const std::vector<Sequence*>& running, const Cost& model, int most);
  // Plans the next draft pass. Returns false where none is left to make, as all drafts are there.
  virtual bool plan(const std::vector<Sequence*>& running, Pass& pass) = 0;
  void finish(const std::vector<Sequence*>& running, const Pass& pass, const PassResult& last);
  void learn(Sequence& s, int right);  // the model has seen the sequence's drafts: the first `right` were right
  virtual void ran(Sequence&, int) {}     // the model has run the sequence's positions from this one on
  virtual void end(Sequence&) {}
  virtual size_t kv_bytes() const { return 0; }  // bytes of its own KV caches; any thread may ask
  virtual void set_limit(size_t) {}              // the limit of the model's KV caches has changed
  virtual void set_share(double share) { share_ = share; }
  // For tests, while no request runs: what drafts were drawn from.
  struct Drawn {
    std::vector<int> ids;  // the text, and the drafts before this one
    int drafts;            // how many of these ids are drafts
    std::vector<float> logits;
  };
  void record() { records_ = true; }
  std::vector<Drawn> recorded() { return std::move(drawn_); }

 protected:
  static bool wants_draft(const Sequence* s) { return static_cast<int>(s->drafts.size()) < s->draft_state.wanted; }
  static void stop_drafting(Sequence& s) { s.draft_state.wanted = static_cast<int>(s.drafts.size()); }
  // Returns the id at an index of the text and the drafts after it.
  static int id_at(const Sequence& s, int index) {
    return index < s.known() ? s.ids[index] : s.drafts[index - s.known()];
  }
  static void add_logit_row(Sequence& s, Pass& pass) {  // for the last column so far
    s.draft_state.row = pass.logit_columns;
    pass.logit_column[pass.logit_columns++] = static_cast<int16_t>(pass.columns - 1);
  }
  double step_s(const Cost& model, int columns) const { return seconds(cost_, share_, model, columns); }
  static double seconds(const Cost& own, double share, const Cost& model, int columns);

  virtual int room(const Sequence& s) const = 0;  // how many drafts it could make
  // Returns the seconds of a pass that is made whether there are drafts or not, and that gives the first draft.
  virtual double made_anyway_s(const Cost&, int) const { return 0.0; }
  virtual void finish_ops(const std::vector<Sequence*>&, const Pass&, const PassResult&) {}
  virtual void forget(Sequence&) {}  // its numbers overflowed
  struct Row {
    const float* logits;  // by id
    double log_sum_exp;
  };
  virtual Row row(const float* logits) = 0;  // from a row of a draft pass's logits

  Cost cost_;
  double share_;
  double (*const log_sum_exp_)(const float* x, int n);
  double draft_pass_began_s_ = 0;

 private:
  struct Choice {
    int drafts = 0;
    double tokens_per_s = 0;
  };
  struct Round {
    const Cost& model;
    int decoding;  // sequences that decode
    double made_anyway_s;
    double plain_tokens_per_s() const { return decoding / (model.of(decoding) + made_anyway_s); }
  };
  template <class Odds>
  static Choice find_best(const Round& round, int most, double each_s, const Odds& odds);
  void choose(Sequence& s, const Round& round, int most) const;
  virtual void learn_cost(const Pass& pass, double seconds) { cost_.learn(pass.columns, seconds); }
  void draw(Sequence& s, const float* logits);

  bool records_ = false;
  std::vector<Drawn> drawn_;
};

}  // namespace laneformer
