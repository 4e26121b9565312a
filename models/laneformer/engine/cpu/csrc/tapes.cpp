// Plans the tapes: which lanes, and which of their rows, each thread has, and in what order it reads them.
#include <algorithm>
#include <numeric>
#include <utility>

#include "model.h"

namespace laneformer {

namespace {

// Returns a matrix's type: the spec's where it says so; with int4 the first and last layer and the LM head are int8
// (docs/decisions/small-weights.md).
DType matrix_dtype(const ModelSpec& spec, DType dtype, int layer, Part part) {
  if (!spec.held.empty()) return spec.held[layer][part];
  const bool outer = layer == 0 || layer >= spec.layers - 1;
  return dtype == DType::int4 && outer ? DType::int8 : dtype;
}

double largest_share_of_lanes(int lanes, int threads) {
  return threads <= lanes ? (lanes + threads - 1) / threads : 1.0 / (threads / lanes);
}

// Whether equal groups of threads share equal numbers of lanes. The threads of a lane meet several times in each of its
// modules, so only where whole lanes give a thread this much more than an equal share, and groups have few lanes.
bool shares_evenly(int lanes, int threads) {
  constexpr double kUneven = 1.2;
  constexpr int kMostLanes = 4;
  const int groups = std::gcd(lanes, threads);
  return lanes / groups <= kMostLanes &&
         largest_share_of_lanes(lanes, threads) * threads > kUneven * lanes;
}

// Gives a thread whole lanes while there are enough of them, as evenly as their number allows; else each lane gets several
// threads. Where that would leave one thread with much more than others, groups of threads share equal numbers of lanes.
void share_lanes(int lanes, int threads, int t, ThreadPlan& plan) {
  if (shares_evenly(lanes, threads)) {
    const int groups = std::gcd(lanes, threads), group = t * groups / threads;
    plan.members = threads / groups, plan.leader = group * plan.members;
    plan.first_lane = lanes / groups * group, plan.last_lane = plan.first_lane + lanes / groups;
    return;
  }
  plan.first_lane = lanes * t / threads;
  plan.leader = t;
  if (threads <= lanes) {
    plan.last_lane = lanes * (t + 1) / threads;
    return;
  }
  const auto first_of = [&](int lane) { return (lane * threads + lanes - 1) / lanes; };
  plan.last_lane = plan.first_lane + 1;
  plan.leader = first_of(plan.first_lane);
  plan.members = first_of(plan.last_lane) - plan.leader;
}

// Lays out one thread's tape, matrix after matrix in reading order.
class TapePlanner {
 public:
  TapePlanner(const ModelSpec& spec, DType dtype, int thread, int threads)
      : spec_(spec), dtype_(dtype), thread_(thread), threads_(threads) {
    share_lanes(spec.lanes, threads, thread, plan_);
  }

  ThreadPlan plan() {
    plan_.layers.assign(spec_.all_layers(), std::vector<LaneLayer>(plan_.last_lane - plan_.first_lane));
    for (; layer_ < spec_.layers; ++layer_) add_layer();
    add_head(plan_.head, [&](int) { return spec_.head_rows(); });
    plan_.model_bytes = plan_.tape_bytes;
    plan_.read_bytes = plan_.tape_bytes - resting_bytes_;
    if (spec_.draft_layers) add_layer();
    plan_.draft_head = plan_.head;
    if (!spec_.draft_ids.empty()) add_head(plan_.draft_head, [&](int lane) { return spec_.draft_rows(lane); });
    return std::move(plan_);
  }

 private:
  DType type(Part part) const {
    return part == kRouter ? DType::fp32 : matrix_dtype(spec_, dtype_, layer_, part);
  }

  // Adds one of `parts` parts of a matrix, whose rows begin at `base`, and in the file its inputs at `first_input`.
  void add(Matrix& matrix, Part kind, int rows, int inputs, int part, int parts, int base, int first_input = 0) {
    const int tiles = (rows + kTileRows - 1) / kTileRows;
    const int first = tiles * part / parts * kTileRows, end = tiles * (part + 1) / parts * kTileRows;
    matrix = {std::min(end, rows) - std::min(first, rows), inputs, type(kind), plan_.tape_bytes, base + first,
              groups_before(first_input)};
    plan_.tape_bytes += matrix.bytes();
  }

  void add_own(Matrix& matrix, Part kind, int rows, int inputs, int base = 0, int first_input = 0) {
    add(matrix, kind, rows, inputs, thread_ - plan_.leader, plan_.members, base, first_input);
  }

  int index_of(const LaneLayer& lane) const {
    return plan_.first_lane + static_cast<int>(&lane - plan_.layers[layer_].data());
  }

  void add_layer() {
    for (LaneLayer& lane : plan_.layers[layer_]) {
      add_qkv(lane.qkv);
      add_own(lane.wo, kWo, spec_.hidden, spec_.q_rows(), 0, index_of(lane) * spec_.q_rows());
    }
    for (LaneLayer& lane : plan_.layers[layer_]) {
      if (spec_.experts) add_own(lane.router, kRouter, spec_.experts, spec_.hidden);
      lane.mlps.resize(spec_.mlps());
      for (Mlp& mlp : lane.mlps) {
        add_own(mlp.gate_up, kW1, spec_.gate_up_rows(), spec_.hidden);
        add_own(mlp.w2, kW2, spec_.hidden, spec_.ff_rows(), 0, index_of(lane) * spec_.ff_rows());
      }
      const Mlp& any = lane.mlps.front();
      if (spec_.experts) resting_bytes_ += (spec_.experts - spec_.active) * (any.gate_up.bytes() + any.w2.bytes());
    }
  }

  void add_qkv(std::vector<Matrix>& qkv) {
    constexpr Part kinds[] = {kWq, kWk, kWv};
    const int sizes[] = {spec_.q_rows(), spec_.kv_rows(), spec_.kv_rows()};
    for (int first = 0, end, base = 0; first < 3; first = end) {
      int rows = 0;
      for (end = first; end < 3 && type(kinds[end]) == type(kinds[first]); ++end) rows += sizes[end];
      add_own(qkv.emplace_back(), kinds[first], rows, spec_.hidden, base);
      base += rows;
    }
  }

  template <class Rows>
  void add_head(std::vector<Matrix>& heads, const Rows& rows_of_lane) {
    const bool whole = spec_.head == Head::replicate;
    heads.resize(whole ? 1 : plan_.last_lane - plan_.first_lane);
    for (int lane = plan_.first_lane; Matrix& head : heads) {
      const int first_input = spec_.head == Head::lane ? lane * spec_.head_inputs() : 0;
      if (whole)
        add(head, kHead, rows_of_lane(0), spec_.hidden, thread_, threads_, 0);
      else
        add_own(head, kHead, rows_of_lane(lane++), spec_.head_inputs(), 0, first_input);
    }
  }

  const ModelSpec& spec_;
  const DType dtype_;
  const int thread_, threads_;
  int layer_ = 0;
  size_t resting_bytes_ = 0;  // bytes of the experts that a token does not take
  ThreadPlan plan_;
};

}  // namespace

std::vector<Matrix> LaneLayer::matrices(int of_mlps) const {
  std::vector<Matrix> all = qkv;
  all.push_back(wo);
  for (int i = 0; i < of_mlps; ++i) all.insert(all.end(), {mlps[i].gate_up, mlps[i].w2});
  return all;
}

int ModelSpec::first_draft(int lane) const {
  if (head != Head::vocab_parallel) return lane ? static_cast<int>(draft_ids.size()) : 0;
  const auto found = std::lower_bound(draft_ids.begin(), draft_ids.end(), lane * head_rows());
  return static_cast<int>(found - draft_ids.begin());
}

std::vector<ThreadPlan> plan_tapes(const ModelSpec& spec, int threads, DType dtype) {
  std::vector<ThreadPlan> plans;
  for (int t = 0; t < threads; ++t) plans.push_back(TapePlanner(spec, dtype, t, threads).plan());
  return plans;
}

double largest_share(int lanes, int threads) {
  return shares_evenly(lanes, threads) ? double(lanes) / threads : largest_share_of_lanes(lanes, threads);
}

}  // namespace laneformer
