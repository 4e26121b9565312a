// A mixture of experts in place of a lane's MLP: a column goes through those that a router chooses for it.
//
// All threads of a lane have all columns' scores and choose alike. Columns are grouped by expert, so
// that a pass reads an expert's weights once, and each thread has its rows of every expert. A column's outputs
// are added up in the order of experts: its bits depend on no other column, nor on the number of threads (on
// the matrix unit an expert's few and many columns round differently; kernels/amx.h).
#pragma once
#include <vector>

#include "shared.h"

namespace laneformer {

class Experts {
 public:
  explicit Experts(Shared& shared);

  // What one of a lane's threads works on.
  struct Lane {
    int t, layer, own, columns;  // own: the lane's number on the thread
    const float* x;              // [column][hidden]: normed streams
    float* partial;              // [column][hidden]
  };
  void run(const Lane& lane);

 private:
  struct Served {  // a column that an expert serves, and the weight of its output
    int column;
    float weight;
  };
  struct Scratch {
    Pages x, y, out, prepared;  // [column][...], for one expert: its inputs, gates and ups, outputs
    std::vector<std::vector<Served>> served;  // by expert, in order of columns
    // In the leader's scratch, for all of a lane's threads; a place per lane, as a thread goes on while others still read.
    Pages scores;  // [own lane][column][expert]
    Pages gated;   // [own lane][expert's column][...]: all experts' columns, one expert after the other
  };
  void reserve(int t);
  void score(const Lane& lane);
  void choose(const float* scores, int column, Scratch& w) const;
  void enter(const Lane& lane);
  void leave(const Lane& lane);
  void multiply(int t, const Matrix& matrix, const float* x, size_t x_stride, float* y, size_t y_stride,
                size_t columns);
  Scratch& leader(const Lane& lane) { return scratch_[shared_.model.plan(lane.t).leader]; }
  float* scores(const Lane& lane) {
    return leader(lane).scores.floats() + size_t(lane.own) * kMaxColumns * score_stride();
  }
  float* gated(const Lane& lane) {
    return leader(lane).gated.floats() + size_t(lane.own) * kMaxColumns * spec_.active * ff_stride();
  }
  size_t ff_stride() const { return round_up(spec_.ff_rows(), 32); }
  size_t score_stride() const { return round_up(spec_.experts, 32); }

  Shared& shared_;
  const ModelSpec& spec_;
  std::vector<Scratch> scratch_;  // by thread
};

}  // namespace laneformer
