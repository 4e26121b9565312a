// One pass of a block of positions through the layers of all lanes.
//
// A thread runs its lanes' modules without a barrier; it publishes each module's partial outputs in a mailbox and then
// counts up its own modules done (exchange.h). Only a join that needs other lanes waits: PRESENT for this module, PAST for
// the module `delay` layers ago. Where threads outnumber lanes, several threads share each lane: they own rows of its
// matrices, keep a copy each of its residual stream, and meet within a module. No column's result depends, in a single bit,
// on the columns beside it (on the matrix unit: as long as they are four or more, or fewer; kernels/amx.h).
//
//   C columns (positions of the block)   D hidden   L lanes; every row is padded to 32 floats with zeros
#pragma once
#include <vector>

#include "../../schedule/schedule.h"
#include "attention.h"
#include "experts.h"
#include "shared.h"

namespace laneformer {

static_assert(kMaxColumns == kPassColumns);

class Layers {
 public:
  Layers(Shared& shared, const KvMemory& kv, Schedule& schedule);  // the schedule takes the partials that a pass keeps

  void run(int t, const Pass& pass);
  // Returns the residual stream (D,) of the thread's lane number `own`.
  float* stream(int t, int own, int column) const {
    return scratch_[t].streams.floats() + (size_t(own) * kMaxColumns + column) * spec_.padded_hidden();
  }
  // For measurements: multiplies as decoding does, until so many bytes of the thread's tape are read.
  void read_tape(int t, size_t most);
  // For measurements: multiplies one layer's matrices for a full pass, with each one's first tiles in place of all, so that
  // the cache holds them. Returns the multiply-adds.
  double multiply_cached(int t);
  // Joins as Ladder Residual does (arXiv 2501.06589), every sum one module late; needs a model without a delay.
  void set_ladder();

 private:
  struct Scratch {
    Pages streams;          // [own lane][column][hidden]
    Pages x, y;             // [column][...]: a matrix's inputs, its outputs; the leader's y holds q, k, v of all threads
    Pages prepared;         // the inputs as the product reads them
    // Inputs of wo and w2, in the leader's scratch, for all of a lane's threads; w2's have a place per lane, as a thread goes
    // on to its next lane while others still read them.
    Pages attended, gated;  // [column][...], [own lane][column][...]
    Pages total, added;     // [hidden]
    uint64_t layers_run = 0;  // counts over all passes: the number of the layer under way
  };
  void reserve(int t);
  void embed(int t, const Pass& pass);
  void run_layer(int t, int layer, const Pass& pass);
  void enter_mtp(int t, const Pass& pass);
  void flush(int t, const Pass& pass);
  void deliver(int t, int lane, int column, float* stream);
  void attention(int t, int layer, int own, const Pass& pass, float* partial);
  void mlp(int t, int layer, int own, const Pass& pass, float* partial);
  void norm_streams(int t, int own, int index, const Pass& pass);
  void multiply(int t, const Matrix& matrix, const float* x, int x_stride, float* y, int y_stride, int columns);
  void join_lanes(int t, int layer, Module module, const Pass& pass);
  void join_late(int t, int layer, Module module, const Pass& pass);
  void add_sum(int t, uint64_t module_count, int module_of_pass, const Pass& pass);
  void keep_partials(int t, int layer, Module module, const Pass& pass);

  Shared& shared_;
  Exchange& exchange_;
  const ModelSpec& spec_;
  const int delay_;
  Schedule& schedule_;
  Attention attention_;
  Experts experts_;
  std::vector<Scratch> scratch_;  // by thread
  bool ladder_ = false;
};

}  // namespace laneformer
