#include "layers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace laneformer {

Layers::Layers(Shared& shared, const KvMemory& kv, Schedule& schedule)
    : shared_(shared),
      exchange_(shared.exchange),
      spec_(shared.model.spec()),
      delay_(shared.delay),
      schedule_(schedule),
      attention_(shared, kv),
      experts_(shared),
      scratch_(shared.model.threads()) {
  for (int t = 0; t < shared.model.threads(); ++t) reserve(t);
}

void Layers::reserve(int t) {
  const ThreadPlan& plan = shared_.model.plan(t);
  const size_t hidden = spec_.padded_hidden(), mixed = Attention::mixed_stride(spec_);
  const size_t gated = round_up(spec_.ff_rows(), 32), own = plan.last_lane - plan.first_lane;
  const size_t widest_in = std::max({hidden, mixed, gated});
  const size_t widest_out = std::max({hidden, size_t(Attention::qkv_stride(spec_)), size_t(spec_.gate_up_rows())});
  const auto floats = [](size_t count) { return Pages(count * sizeof(float)); };
  Scratch& w = scratch_[t];
  w.streams = floats(own * kMaxColumns * hidden);
  w.x = floats(kMaxColumns * widest_in), w.y = floats(kMaxColumns * widest_out);
  w.prepared = Pages(shared_.products.prepared_bytes(widest_in));
  w.total = floats(hidden), w.added = floats(hidden);
  if (plan.leader != t) return;  // what a lane's threads share lies with their leader
  w.attended = floats(kMaxColumns * mixed);
  if (!spec_.experts) w.gated = floats(own * kMaxColumns * gated);
}

void Layers::run(int t, const Pass& pass) {
  if (pass.network == Network::mtp) {
    enter_mtp(t, pass);
    for (int layer = spec_.layers; layer < spec_.all_layers(); ++layer) run_layer(t, layer, pass);
    return;
  }
  embed(t, pass);
  for (int layer = 0; layer < spec_.layers; ++layer) run_layer(t, layer, pass);
  if (spec_.flush) flush(t, pass);
}

void Layers::run_layer(int t, int layer, const Pass& pass) {
  const ThreadPlan& plan = shared_.model.plan(t);
  const uint64_t layer_count = scratch_[t].layers_run, ring = shared_.ring_layers();
  for (const Module module : {kAttention, kMlp}) {
    // The slot still holds the partials of the layer `ring` before, which other threads last read in the join of
    // reader_layer. They are past it once they have finished the module after it; ladder joins one module later.
    if (layer_count + delay_ >= ring) {
      const uint64_t reader_layer = layer_count + delay_ - ring, joined = 2 * reader_layer + module + 1;
      exchange_.wait_for_modules(t, ladder_ ? joined + 2 : joined + 1);
    }
    for (int own = 0; own < plan.last_lane - plan.first_lane; ++own) {
      float* partial = exchange_.slot(layer_count, module, plan.first_lane + own);
      if (module == kAttention)
        attention(t, layer, own, pass, partial);
      else
        mlp(t, layer, own, pass, partial);
    }
    exchange_.publish(Exchange::kModulesDone, t, 2 * layer_count + module + 1);
    join_lanes(t, layer, module, pass);
    if (pass.keeps) keep_partials(t, layer, module, pass);
  }
  ++scratch_[t].layers_run;
}

void Layers::embed(int t, const Pass& pass) {
  const ThreadPlan& plan = shared_.model.plan(t);
  for (int c = 0; c < pass.columns; ++c) {
    shared_.model.embed(pass.column[c].token, stream(t, 0, c));
    for (int own = 1; own < plan.last_lane - plan.first_lane; ++own)
      std::memcpy(stream(t, own, c), stream(t, 0, c), spec_.hidden * sizeof(float));
  }
}

// Makes the MTP block's inputs: the normed streams of columns of the pass before plus the normed embeddings of the columns'
// tokens. It works in place, as pass.from is ascending: a column takes the stream of one that is not before it.
void Layers::enter_mtp(int t, const Pass& pass) {
  const ThreadPlan& plan = shared_.model.plan(t);
  const Kernels& kernels = shared_.kernels;
  const int hidden = spec_.padded_hidden();
  float *embedding = scratch_[t].total.floats(), *normed = scratch_[t].added.floats();
  const auto norm = [&](const float* x, int index, int lane, float* out) {
    kernels.rms_norm(x, shared_.model.norm_scale(index, lane), spec_.norm_eps, spec_.hidden, hidden, out);
  };
  for (int lane = plan.first_lane; lane < plan.last_lane; ++lane)
    for (int c = 0; c < pass.columns; ++c) {
      float *from = stream(t, lane - plan.first_lane, pass.from[c]), *to = stream(t, lane - plan.first_lane, c);
      if (!pass.chained && !spec_.flush) deliver(t, lane, pass.from[c], from);
      norm(from, spec_.hidden_norm(), lane, normed);
      shared_.model.embed(pass.column[c].token, embedding);
      norm(embedding, spec_.embedding_norm(), lane, to);
      kernels.add(to, normed, hidden);
    }
}

// Delivers, after one wait, the partials that no layer was left for. No slot of theirs is written before the next pass.
void Layers::flush(int t, const Pass& pass) {
  const ThreadPlan& plan = shared_.model.plan(t);
  exchange_.wait_for_modules(t, 2 * scratch_[t].layers_run);
  for (int lane = plan.first_lane; lane < plan.last_lane; ++lane)
    for (int c = 0; c < pass.columns; ++c) deliver(t, lane, c, stream(t, lane - plan.first_lane, c));
}

// Adds the other lanes' partials of the last pass that no layer was left for to a lane's stream.
void Layers::deliver(int t, int lane, int column, float* stream) {
  const int n = spec_.padded_hidden();
  float* total = scratch_[t].total.floats();
  for (int layer = std::max(0, spec_.layers - delay_); layer < spec_.layers; ++layer)
    for (const Module module : {kAttention, kMlp}) {
      if (!spec_.delivers[module][layer]) continue;
      const uint64_t layer_count = scratch_[t].layers_run - (spec_.layers - layer);
      shared_.kernels.sum_rows(exchange_.slot(layer_count, module, 0) + size_t(column) * n, size_t{kMaxColumns} * n,
                               spec_.lanes, total, n);
      shared_.kernels.add(stream, total, n);
      shared_.kernels.add_scaled(stream, exchange_.slot(layer_count, module, lane) + size_t(column) * n, -1.0f, n);
    }
}

// --- modules ----------------------------------------------------------------------------------------------------

// Norms all columns to the inputs of the thread's next matrix; copies them where a model has no such norms.
void Layers::norm_streams(int t, int own, int index, const Pass& pass) {
  const int hidden = spec_.padded_hidden(), lane = shared_.model.plan(t).first_lane + own;
  for (int c = 0; c < pass.columns; ++c) {
    float* x = scratch_[t].x.floats() + size_t(c) * hidden;
    if (!spec_.pre_norms) {
      std::memcpy(x, stream(t, own, c), hidden * sizeof(float));
      continue;
    }
    shared_.kernels.rms_norm(stream(t, own, c), shared_.model.norm_scale(index, lane), spec_.norm_eps, spec_.hidden,
                             hidden, x);
  }
}

void Layers::multiply(int t, const Matrix& matrix, const float* x, int x_stride, float* y, int y_stride, int columns) {
  const Products& products = shared_.products;
  products.multiply(t, matrix, products.prepare(matrix, x, x_stride, columns, scratch_[t].prepared), y, y_stride,
                    columns);
}

void Layers::attention(int t, int layer, int own, const Pass& pass, float* partial) {
  const ThreadPlan& plan = shared_.model.plan(t);
  Scratch &w = scratch_[t], &leader = scratch_[plan.leader];
  const LaneLayer& matrices = plan.layers[layer][own];
  const int hidden = spec_.padded_hidden(), stride = Attention::qkv_stride(spec_);
  float* qkv = leader.y.floats();
  norm_streams(t, own, 2 * layer, pass);
  for (const Matrix& rows : matrices.qkv) multiply(t, rows, w.x.floats(), hidden, qkv, stride, pass.columns);
  for (const Matrix& rows : matrices.qkv) {
    if (!spec_.qkv_bias) break;
    shared_.add_bias(shared_.model.biases().qkv(layer, plan.first_lane + own), rows, qkv, stride,
                     pass.columns);
  }
  attention_.run({t, layer, own, pass, qkv, leader.attended.floats()});
  multiply(t, matrices.wo, leader.attended.floats(), Attention::mixed_stride(spec_), partial, hidden, pass.columns);
  if (spec_.output_bias && plan.first_lane + own == 0)
    shared_.add_bias(shared_.model.biases().output(layer), matrices.wo, partial, hidden, pass.columns);
}

void Layers::mlp(int t, int layer, int own, const Pass& pass, float* partial) {
  const ThreadPlan& plan = shared_.model.plan(t);
  Scratch &w = scratch_[t], &leader = scratch_[plan.leader];
  norm_streams(t, own, 2 * layer + 1, pass);
  if (spec_.experts) return experts_.run({t, layer, own, pass.columns, w.x.floats(), partial});
  const Mlp& matrices = plan.layers[layer][own].mlps.front();
  const int hidden = spec_.padded_hidden(), wide = spec_.gate_up_rows();
  const int ff_stride = static_cast<int>(round_up(spec_.ff_rows(), 32)), first = matrices.gate_up.first_row;
  float* gated = leader.gated.floats() + size_t(own) * kMaxColumns * ff_stride;
  multiply(t, matrices.gate_up, w.x.floats(), hidden, w.y.floats(), wide, pass.columns);
  const auto gate = shared_.kernels.gates[int(spec_.gate)];
  for (int c = 0; c < pass.columns; ++c)
    gate(w.y.floats() + size_t(c) * wide + first, matrices.gate_up.tiles(), gated + size_t(c) * ff_stride + first / 2);
  exchange_.meet_lane(t, plan);  // w2 reads the rows of `gated` that the others have written
  multiply(t, matrices.w2, gated, ff_stride, partial, hidden, pass.columns);
}

// --- joins ------------------------------------------------------------------------------------------------------

// Joins a module's partials to the own lanes' streams by the update table of joins.Join; sums are always in lane order.
void Layers::join_lanes(int t, int layer, Module module, const Pass& pass) {
  const ThreadPlan& plan = shared_.model.plan(t);
  const Kernels& kernels = shared_.kernels;
  const uint64_t layer_count = scratch_[t].layers_run, module_count = 2 * layer_count + module;
  const Join how = spec_.join[module][layer];
  if (ladder_) return join_late(t, layer, module, pass);
  if (how == Join::present) return add_sum(t, module_count, 2 * layer + module, pass);
  const bool delayed = how == Join::past && spec_.adds_delayed[module][layer];
  const int n = spec_.padded_hidden();
  const uint64_t from = layer_count - (delayed ? delay_ : 0);
  float* total = scratch_[t].total.floats();
  // for the rows of the own lanes that other threads of these lanes compute
  exchange_.wait_for(Exchange::kModulesDone, t, plan.leader, plan.leader + plan.members, module_count + 1);
  if (delayed) exchange_.wait_for_modules(t, 2 * from + module + 1);
  for (size_t c = 0; c < size_t(pass.columns); ++c) {  // as in add_sum
    if (delayed)
      kernels.sum_rows(exchange_.slot(from, module, 0) + c * n, size_t{kMaxColumns} * n, spec_.lanes, total, n);
    for (int lane = plan.first_lane; lane < plan.last_lane; ++lane) {
      float* h = stream(t, lane - plan.first_lane, static_cast<int>(c));
      const float* partial = exchange_.slot(layer_count, module, lane) + c * n;
      if (how == Join::no_reduce)
        kernels.add_scaled(h, partial, std::sqrt(static_cast<float>(spec_.lanes)), n);
      else if (delayed)
        kernels.add_past(h, partial, total, exchange_.slot(from, module, lane) + c * n, n);
      else
        kernels.add(h, partial, n);
    }
  }
}

// Adds the sum over lanes of a module's outputs to the own lanes' streams, normed where the model has norms of outputs.
// module_count: the module's number over all passes; module_of_pass: in this pass.
void Layers::add_sum(int t, uint64_t module_count, int module_of_pass, const Pass& pass) {
  const ThreadPlan& plan = shared_.model.plan(t);
  const int n = spec_.padded_hidden(), own_lanes = plan.last_lane - plan.first_lane;
  const float* partials = exchange_.slot(module_count / 2, Module(module_count % 2), 0);
  float* total = scratch_[t].total.floats();
  exchange_.wait_for_modules(t, module_count + 1);
  for (int c = 0; c < pass.columns; ++c) {  // one after the other, so that sums stay in the first cache
    shared_.kernels.sum_rows(partials + size_t(c) * n, size_t{kMaxColumns} * n, spec_.lanes, total, n);
    if (spec_.post_norms)
      shared_.kernels.rms_norm(total, shared_.model.norm_scale(spec_.first_post_norm() + module_of_pass, 0),
                               spec_.norm_eps, spec_.hidden, n, total);
    for (int own = 0; own < own_lanes; ++own) shared_.kernels.add(stream(t, own, c), total, n);
  }
}

// Adds every sum one module late, the last two together.
void Layers::join_late(int t, int layer, Module module, const Pass& pass) {
  const uint64_t module_count = 2 * scratch_[t].layers_run + module;
  const int module_of_pass = 2 * layer + module;
  if (module_of_pass) add_sum(t, module_count - 1, module_of_pass - 1, pass);
  if (module_of_pass == 2 * spec_.layers - 1) add_sum(t, module_count, module_of_pass, pass);
}

// Copies, in the first thread, all lanes' partials of the chosen positions. They are still in the mailbox: whoever
// overwrites them waits until this thread has finished the next module.
void Layers::keep_partials(int t, int layer, Module module, const Pass& pass) {
  if (t != 0) return;
  const uint64_t layer_count = scratch_[t].layers_run;
  const size_t floats = size_t(spec_.lanes) * spec_.hidden;
  exchange_.wait_for_modules(t, 2 * layer_count + module + 1);
  for (int c = 0; c < pass.columns; ++c) {
    float* kept = schedule_.partials(pass.column[c], layer, module, floats);
    for (int lane = 0; kept && lane < spec_.lanes; ++lane)
      std::memcpy(kept + size_t(lane) * spec_.hidden,
                  exchange_.slot(layer_count, module, lane) + size_t(c) * spec_.padded_hidden(),
                  spec_.hidden * sizeof(float));
  }
}

// --- measurements -----------------------------------------------------------------------------------------------

void Layers::read_tape(int t, size_t most) {
  Scratch& w = scratch_[t];
  for (const auto& layer : shared_.model.plan(t).layers)
    for (const LaneLayer& lane : layer)
      for (const Matrix& matrix : lane.matrices(spec_.mlps())) {
        if (matrix.offset > most) return;
        multiply(t, matrix, w.x.floats(), 0, w.y.floats() - matrix.first_row, 0, 1);
      }
}

double Layers::multiply_cached(int t) {
  constexpr size_t kCached = size_t{128} << 10;  // bytes of weights: half of a small second-level cache
  Scratch& w = scratch_[t];
  double products = 0.0;
  for (const LaneLayer& lane : shared_.model.plan(t).layers[spec_.layers / 2])
    for (const Matrix& matrix : lane.matrices(1)) {
      const int most = static_cast<int>(std::max(size_t{1}, kCached / matrix.tile_bytes()));
      const int stride = static_cast<int>(round_up(matrix.inputs, 32));
      const Inputs x = shared_.products.prepare(matrix, w.x.floats(), stride, kMaxColumns, w.prepared);
      for (int tile = 0; tile < matrix.tiles(); tile += most) {
        Matrix few = matrix.tiles_from(0, std::min(most, matrix.tiles() - tile));
        few.first_row = 0;
        shared_.products.multiply(t, few, x, w.y.floats(), few.tiles() * kTileRows, kMaxColumns);
        products += double(few.rows) * few.inputs * kMaxColumns;
      }
    }
  return products;
}

void Layers::set_ladder() {
  for (const auto& joins : spec_.join)
    if (std::find_if(joins.begin(), joins.end(), [](Join how) { return how != Join::present; }) != joins.end())
      throw std::invalid_argument("ladder: every join of the model must be PRESENT; set broadcast_delay = 0");
  if (spec_.draft_layers) throw std::invalid_argument("ladder: the model has a head that drafts");
  ladder_ = true;
}

}  // namespace laneformer
