// One pass of a block of positions through the lanes; see decoder.h for who waits for whom. attention.cpp and head.cpp
// have the modules that this file only calls.
//
//   C columns (positions of the block)   D hidden   L lanes; every row is padded to 32 floats with zeros
#include <algorithm>
#include <cmath>
#include <cstring>

#include "decoder.h"

namespace laneformer {

float* Decoder::stream(int t, int own, int column) const {
  return workers_[t].streams.floats() + (size_t(own) * kMaxColumns + column) * spec_.padded_hidden();
}

const float* Decoder::norm_scale(int index, int lane) const {
  const size_t row = spec_.shared_scale ? index : size_t(index) * spec_.lanes + lane;
  return norms_.floats() + row * spec_.padded_hidden();
}

// The columns' inputs of a matrix as its product reads them, in `buffer` unless they are read as they are.
Inputs Decoder::prepare(const Matrix& matrix, const float* x, int x_stride, int columns, Pages& buffer) const {
  const Product& how = product(matrix.dtype);
  if (!prepares(how, columns)) return {reinterpret_cast<const char*>(x), x_stride * sizeof(float), ahead_};
  how.prepare(x, x_stride, matrix.k_pairs(), columns, buffer.bytes());
  return {buffer.bytes(), how.column_bytes(matrix.k_pairs()), ahead_};
}

// y[c][matrix.first_row ...] of all columns, from the tape of `owner`.
void Decoder::multiply(int owner, const Matrix& matrix, Inputs x, float* y, int y_stride, int columns) {
  const char* tiles = workers_[owner].tape.bytes() + matrix.offset;
  product(matrix.dtype).multiply(tiles, matrix.rows, matrix.k_pairs(), x, y + matrix.first_row, y_stride, columns);
}

void Decoder::multiply(int t, const Matrix& matrix, const float* x, int x_stride, float* y, int y_stride, int columns) {
  multiply(t, matrix, prepare(matrix, x, x_stride, columns, workers_[t].prepared), y, y_stride, columns);
}

void Decoder::run_layers(int t, const Pass& pass) {
  const ThreadPlan& plan = plans_[t];
  const int own_lanes = plan.last_lane - plan.first_lane;
  for (int c = 0; c < pass.columns; ++c) {
    embed(pass.column[c].token, stream(t, 0, c));
    for (int own = 1; own < own_lanes; ++own)
      std::memcpy(stream(t, own, c), stream(t, 0, c), spec_.hidden * sizeof(float));
  }
  for (int layer = 0; layer < spec_.layers && !exchange_.lost(); ++layer) {
    const uint64_t global = first_layer(pass) + layer;
    for (const Module module : {kAttention, kMlp}) {
      // This slot's last readers joined it `delay` layers after it was written; they are past that once they have
      // finished the module that follows.
      const uint64_t last_read = global + delay_;
      if (last_read >= uint64_t(ring_layers_)) wait_for_peers(t, 2 * (last_read - ring_layers_) + module + 2 + ladder_);
      for (int own = 0; own < own_lanes; ++own) {
        float* partial = exchange_.slot(global, module, plan.first_lane + own);
        module == kAttention ? attention(t, layer, own, pass, partial) : mlp(t, layer, own, pass, partial);
      }
      exchange_.publish(Exchange::kModulesDone, t, 2 * global + module + 1);
      join_lanes(t, layer, module, pass);
      if (pass.keeps) keep_partials(t, layer, module, pass);
    }
  }
}

// --- modules ----------------------------------------------------------------------------------------------------

void Decoder::mlp(int t, int layer, int own, const Pass& pass, float* partial) {
  Worker &w = workers_[t], &shared = workers_[plans_[t].leader];
  const LaneLayer& matrices = plans_[t].layers[layer][own];
  const int hidden = spec_.padded_hidden(), lane = plans_[t].first_lane + own, wide = spec_.gate_up_rows();
  const int ff_stride = static_cast<int>(round_up(spec_.ff_rows(), 32)), first = matrices.gate_up.first_row;
  for (int c = 0; c < pass.columns; ++c)
    kernels_->rms_norm(stream(t, own, c), norm_scale(2 * layer + 1, lane), spec_.norm_eps, spec_.hidden, hidden,
                       w.x.floats() + size_t(c) * hidden);
  multiply(t, matrices.gate_up, w.x.floats(), hidden, w.y.floats(), wide, pass.columns);
  for (int c = 0; c < pass.columns; ++c)
    kernels_->silu_gate(w.y.floats() + size_t(c) * wide + first, matrices.gate_up.tiles(),
                        shared.gated.floats() + size_t(c) * ff_stride + first / 2);
  meet_group(t);
  multiply(t, matrices.w2, shared.gated.floats(), ff_stride, partial, hidden, pass.columns);
}

// The sum over lanes of a module's outputs, by its number over all passes, joins the own lanes' streams.
void Decoder::add_sum(int t, uint64_t number, const Pass& pass) {
  const int n = spec_.padded_hidden(), own_lanes = plans_[t].last_lane - plans_[t].first_lane;
  const float* partials = exchange_.slot(number / 2, Module(number % 2), 0);
  float* total = workers_[t].total.floats();
  wait_for_peers(t, number + 1);
  for (int c = 0; c < pass.columns; ++c) {  // one after the other, so that sums stay in the first cache
    kernels_->sum_rows(partials + size_t(c) * n, size_t{kMaxColumns} * n, spec_.lanes, total, n);
    for (int own = 0; own < own_lanes; ++own) kernels_->add(stream(t, own, c), total, n);
  }
}

// Ladder Residual (arXiv 2501.06589), for measurements: every sum joins one module late, the last two together.
void Decoder::join_late(int t, int layer, Module module, const Pass& pass) {
  const uint64_t number = 2 * (first_layer(pass) + layer) + module;
  if (layer || module) add_sum(t, number - 1, pass);
  if (layer == spec_.layers - 1 && module) add_sum(t, number, pass);
}

// The update table of config.Join for the own lanes; sums over lanes are always in lane order.
void Decoder::join_lanes(int t, int layer, Module module, const Pass& pass) {
  const ThreadPlan& plan = plans_[t];
  const uint64_t global = first_layer(pass) + layer;
  const Join how = spec_.join[module][layer];
  if (ladder_) return join_late(t, layer, module, pass);
  if (how == Join::present) return add_sum(t, 2 * global + module, pass);
  const bool delayed = how == Join::past && spec_.adds_delayed[module][layer];
  const int n = spec_.padded_hidden();
  const uint64_t from = global - (delayed ? delay_ : 0);
  float* total = workers_[t].total.floats();
  // the rest of the own lane's rows
  exchange_.wait_for(Exchange::kModulesDone, t, plan.leader, plan.leader + plan.members, 2 * global + module + 1);
  if (delayed) wait_for_peers(t, 2 * from + module + 1);
  for (size_t c = 0; c < size_t(pass.columns); ++c) {  // as in add_sum
    if (delayed)
      kernels_->sum_rows(exchange_.slot(from, module, 0) + c * n, size_t{kMaxColumns} * n, spec_.lanes, total, n);
    for (int lane = plan.first_lane; lane < plan.last_lane; ++lane) {
      float* h = stream(t, lane - plan.first_lane, static_cast<int>(c));
      const float* partial = exchange_.slot(global, module, lane) + c * n;
      if (how == Join::no_reduce)
        kernels_->add_scaled(h, partial, std::sqrt(static_cast<float>(spec_.lanes)), n);
      else if (delayed)
        kernels_->add_past(h, partial, total, exchange_.slot(from, module, lane) + c * n, n);
      else
        kernels_->add(h, partial, n);
    }
  }
}

// All lanes' partials of the chosen positions, by rank 0's first thread. They are still in the mailbox: whoever
// overwrites them waits until this thread has finished the next module.
void Decoder::keep_partials(int t, int layer, Module module, const Pass& pass) {
  if (t != 0) return;
  const uint64_t global = first_layer(pass) + layer;
  const size_t floats = size_t(spec_.lanes) * spec_.hidden;
  wait_for_peers(t, 2 * global + module + 1);
  for (int c = 0; c < pass.columns; ++c) {
    float* kept = schedule_->partials(pass.column[c], layer, module, floats);
    for (int lane = 0; kept && lane < spec_.lanes; ++lane)
      std::memcpy(kept + size_t(lane) * spec_.hidden,
                  exchange_.slot(global, module, lane) + size_t(c) * spec_.padded_hidden(),
                  spec_.hidden * sizeof(float));
  }
}

}  // namespace laneformer
