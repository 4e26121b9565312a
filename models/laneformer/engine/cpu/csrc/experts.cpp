#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace laneformer {

namespace {
constexpr int kScoredColumns = 8;  // scored at a time: every instruction set reads so few as they are
}  // namespace

Experts::Experts(Shared& shared)
    : shared_(shared), spec_(shared.model.spec()), scratch_(shared.model.threads()) {
  for (int t = 0; spec_.experts && t < shared.model.threads(); ++t) reserve(t);
}

void Experts::reserve(int t) {
  const ThreadPlan& plan = shared_.model.plan(t);
  const size_t hidden = spec_.padded_hidden(), own = plan.last_lane - plan.first_lane;
  const auto floats = [](size_t count) { return Pages(count * sizeof(float)); };
  Scratch& w = scratch_[t];
  w.x = floats(kMaxColumns * hidden), w.out = floats(kMaxColumns * hidden);
  w.y = floats(kMaxColumns * size_t(spec_.gate_up_rows()));
  w.prepared = Pages(shared_.products.prepared_bytes(std::max(hidden, ff_stride())));
  w.served.resize(spec_.experts);
  if (plan.leader != t) return;
  w.scores = floats(own * kMaxColumns * score_stride());
  w.gated = floats(own * kMaxColumns * spec_.active * ff_stride());
}

void Experts::run(const Lane& lane) {
  const ThreadPlan& plan = shared_.model.plan(lane.t);
  score(lane);
  shared_.exchange.meet_lane(lane.t, plan);  // all rows of the scores are there
  Scratch& w = scratch_[lane.t];
  for (auto& columns : w.served) columns.clear();
  for (int c = 0; c < lane.columns; ++c) choose(scores(lane) + c * score_stride(), c, w);
  enter(lane);
  shared_.exchange.meet_lane(lane.t, plan);  // all gated rows are there
  leave(lane);
}

// Computes this thread's rows of the router, exact whatever the math, as a rounded score may choose another expert.
void Experts::score(const Lane& lane) {
  const Matrix& router = shared_.model.plan(lane.t).layers[lane.layer][lane.own].router;
  const auto multiply = shared_.kernels.products[int(Math::exact)][int(DType::fp32)].multiply;
  const size_t hidden = spec_.padded_hidden();
  for (int c = 0; c < lane.columns; c += kScoredColumns) {
    const auto* x = reinterpret_cast<const char*>(lane.x + c * hidden);
    multiply(shared_.model.tiles(lane.t, router), router.rows, router.k_pairs(),
             {x, hidden * sizeof(float), shared_.products.prefetch_bytes},
             scores(lane) + c * score_stride() + router.first_row, static_cast<int>(score_stride()),
             std::min(kScoredColumns, lane.columns - c));
  }
  if (spec_.expert_bias)
    shared_.add_bias(shared_.model.biases().router(lane.layer), router, scores(lane), score_stride(),
                     lane.columns);
}

// Chooses the experts of the largest scores (of equal ones the first) and their weights: a softmax of all scores, or theirs.
void Experts::choose(const float* scores, int column, Scratch& w) const {
  const auto odds = [&](int expert, int top) {
    return std::exp(double(scores[expert]) - double(scores[top]));
  };
  const auto taken = [&](int expert) {
    return !w.served[expert].empty() && w.served[expert].back().column == column;
  };
  int top = 0;
  double total = 0.0;
  for (int i = 0; i < spec_.active; ++i) {
    int best = -1;
    for (int e = 0; e < spec_.experts; ++e)
      if ((best < 0 || scores[e] > scores[best]) && !taken(e)) best = e;
    if (i == 0) top = best;
    total += odds(best, top);
    w.served[best].push_back({column, 0.0f});
  }
  if (!spec_.normed_weights) {
    total = 0.0;
    for (int e = 0; e < spec_.experts; ++e) total += odds(e, top);
  }
  for (int e = 0; e < spec_.experts; ++e)
    if (taken(e)) w.served[e].back().weight = static_cast<float>(odds(e, top) / total);
}

// Computes every expert's gated rows of its columns.
void Experts::enter(const Lane& lane) {
  Scratch& w = scratch_[lane.t];
  const size_t hidden = spec_.padded_hidden(), wide = spec_.gate_up_rows();
  const auto gate = shared_.kernels.gates[int(spec_.gate)];
  float* out = gated(lane);
  for (int e = 0; e < spec_.experts; ++e) {
    const std::vector<Served>& served = w.served[e];
    if (served.empty()) continue;
    const Matrix& rows = shared_.model.plan(lane.t).layers[lane.layer][lane.own].mlps[e].gate_up;
    const bool all = int(served.size()) == lane.columns;
    for (size_t i = 0; !all && i < served.size(); ++i)
      std::memcpy(w.x.floats() + i * hidden, lane.x + served[i].column * hidden, hidden * sizeof(float));
    multiply(lane.t, rows, all ? lane.x : w.x.floats(), hidden, w.y.floats(), wide, served.size());
    const int number = shared_.model.plan(lane.t).first_lane + lane.own;
    if (spec_.expert_bias)
      shared_.add_bias(shared_.model.biases().gate_up(lane.layer, e, number), rows, w.y.floats(), wide,
                       served.size());
    for (size_t i = 0; i < served.size(); ++i, out += ff_stride())
      gate(w.y.floats() + i * wide + rows.first_row, rows.tiles(), out + rows.first_row / 2);
  }
}

// Computes this thread's rows of the weighted sum of the experts' outputs.
void Experts::leave(const Lane& lane) {
  Scratch& w = scratch_[lane.t];
  const size_t hidden = spec_.padded_hidden();
  const std::vector<Mlp>& mlps = shared_.model.plan(lane.t).layers[lane.layer][lane.own].mlps;
  const size_t first = mlps.front().w2.first_row, rows = round_up(mlps.front().w2.rows, 16);
  for (int c = 0; c < lane.columns; ++c) std::fill_n(lane.partial + c * hidden + first, rows, 0.0f);
  const float* in = gated(lane);
  for (int e = 0; e < spec_.experts; ++e) {
    const std::vector<Served>& served = w.served[e];
    if (served.empty()) continue;
    multiply(lane.t, mlps[e].w2, in, ff_stride(), w.out.floats(), hidden, served.size());
    if (spec_.expert_bias && shared_.model.plan(lane.t).first_lane + lane.own == 0)
      shared_.add_bias(shared_.model.biases().down(lane.layer, e), mlps[e].w2, w.out.floats(), hidden,
                       served.size());
    in += served.size() * ff_stride();
    for (size_t i = 0; i < served.size(); ++i)
      shared_.kernels.add_scaled(lane.partial + served[i].column * hidden + first,
                                 w.out.floats() + i * hidden + first, served[i].weight, int(rows));
  }
}

void Experts::multiply(int t, const Matrix& matrix, const float* x, size_t x_stride, float* y, size_t y_stride,
                       size_t columns) {
  const Products& products = shared_.products;
  const Inputs in = products.prepare(matrix, x, int(x_stride), int(columns), scratch_[t].prepared);
  products.multiply(t, matrix, in, y, int(y_stride), int(columns));
}

}  // namespace laneformer
