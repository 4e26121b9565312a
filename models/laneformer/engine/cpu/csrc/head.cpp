#include "head.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace laneformer {

namespace {
constexpr int kShareTiles = 2;  // tiles that a thread takes at a time
}  // namespace

LmHead::LmHead(Shared& shared, const Layers& layers, Schedule& schedule)
    : shared_(shared),
      spec_(shared.model.spec()),
      layers_(layers),
      schedule_(schedule),
      scratch_(shared.model.threads()) {
  for (int t = 0; t < threads(); ++t) reserve(t);
  const auto floats = [](size_t count) { return Pages(count * kMaxColumns * sizeof(float)); };
  logits_ = floats(stride());
  if (spec_.head == Head::lane) lane_logits_ = floats(spec_.lanes * stride());
  if (spec_.head == Head::replicate) final_streams_ = floats(size_t(spec_.lanes) * spec_.padded_hidden());
}

void LmHead::reserve(int t) {
  const size_t hidden = spec_.padded_hidden(), matrices = shared_.model.plan(t).head.size();
  Scratch& w = scratch_[t];
  w.inputs = Pages(matrices * kMaxColumns * hidden * sizeof(float));
  w.total = Pages(2 * hidden * sizeof(float));
  w.x.resize(matrices);
  for (size_t i = 0; i < matrices; ++i) w.prepared.emplace_back(shared_.products.prepared_bytes(hidden));
}

// Marks the sequence of this row of the logits where a value's square overflows: a norm would give zeros, and the LM head
// then make all tokens equally likely, so the request must end with an error.
void LmHead::mark_overflow(const float* values, int count, const Pass& pass, int row) {
  constexpr int kChains = 16;  // independent sums, which the compiler keeps in vectors
  float squares[kChains] = {}, total = 0.0f;
  int i = 0;
  for (; i + kChains <= count; i += kChains)
    for (int k = 0; k < kChains; ++k) squares[k] += values[i + k] * values[i + k];
  for (; i < count; ++i) total += values[i] * values[i];
  for (const float sum : squares) total += sum;
  if (!std::isfinite(total)) shared_.orders.overflowed.fetch_or(1u << pass.column[pass.logit_column[row]].sequence);
}

void LmHead::run(int t, const Pass& pass) {
  const ThreadPlan& plan = shared_.model.plan(t);
  for (int own = 0; own < plan.last_lane - plan.first_lane; ++own)
    for (int c = 0; c < pass.logit_columns; ++c)
      mark_overflow(layers_.stream(t, own, pass.logit_column[c]), spec_.hidden, pass, c);
  if (spec_.head == Head::replicate)
    replicated_inputs(t, pass);
  else
    lane_inputs(t, pass);
  prepare(t, pass);
  share(t, pass);
  if (spec_.head == Head::lane) sum_lane_logits(t, pass);
  if (!pass.scores) return;
  shared_.exchange.meet(t);  // a row's logits come from all threads
  score_positions(t, pass);
}

// Records the log-probabilities of the ids that follow the pass's positions; the threads share the rows.
void LmHead::score_positions(int t, const Pass& pass) {
  for (int row = t; row < pass.logit_columns; row += threads())
    schedule_.score_row(pass, row, logits() + row * stride());
}

// --- rows -------------------------------------------------------------------------------------------------------

// Prepares the inputs once for all shares, as other threads may multiply some.
void LmHead::prepare(int t, const Pass& pass) {
  Scratch& w = scratch_[t];
  const int hidden = spec_.padded_hidden();
  const std::vector<Matrix>& heads = matrices(t, pass);
  for (size_t i = 0; i < heads.size(); ++i)
    w.x[i] = shared_.products.prepare(heads[i], w.inputs.floats() + i * kMaxColumns * hidden, hidden,
                                      pass.logit_columns, w.prepared[i]);
}

// Multiplies this thread's matrices, then what slower threads have left of theirs: nobody waits long at the end of a token
// for a thread that lost its core for a moment. Each row is one thread's work, so no sum changes.
void LmHead::share(int t, const Pass& pass) {
  scratch_[t].taken.value.store(0, std::memory_order_relaxed);
  scratch_[t].ready.value.store(pass.number, std::memory_order_release);
  for (int i = 0; i < threads(); ++i) {
    const int owner = (t + i) % threads();
    Scratch& w = scratch_[owner];
    const auto is_ready = [&] { return w.ready.value.load(std::memory_order_acquire) == pass.number; };
    shared_.exchange.wait_until(is_ready);
    while (multiply_share(owner, w.taken.value.fetch_add(1, std::memory_order_relaxed), pass)) {
    }
  }
}

// Multiplies a few tiles of a thread's part of the LM head. Returns false past its end.
bool LmHead::multiply_share(int owner, uint64_t share, const Pass& pass) {
  const std::vector<Matrix>& heads = matrices(owner, pass);
  for (size_t i = 0; i < heads.size(); ++i) {
    const Matrix& head = heads[i];
    const uint64_t shares = (head.tiles() + kShareTiles - 1) / kShareTiles;
    if (share >= shares) {
      share -= shares;
      continue;
    }
    const int lane = shared_.model.plan(owner).first_lane + static_cast<int>(i);
    float* out = logits_.floats() + first_logit(lane, pass);
    if (spec_.head == Head::lane) out = lane_logits_.floats() + lane * kMaxColumns * stride();
    const Matrix tiles = head.tiles_from(share * kShareTiles, kShareTiles);
    shared_.products.multiply(owner, tiles, scratch_[owner].x[i], out, static_cast<int>(stride()), pass.logit_columns);
    for (int c = 0; c < pass.logit_columns; ++c)
      mark_overflow(out + c * stride() + tiles.first_row, tiles.rows, pass, c);
    return true;
  }
  return false;
}

// Returns where the logits of a lane's rows begin.
int LmHead::first_logit(int lane, const Pass& pass) const {
  if (spec_.head != Head::vocab_parallel) return 0;
  return pass.network == Network::mtp && !spec_.draft_ids.empty() ? spec_.first_draft(lane) : lane * spec_.head_rows();
}

void LmHead::sum_lane_logits(int t, const Pass& pass) {
  shared_.exchange.meet(t);  // all lanes' logits are there
  const size_t vocab = stride(), threads = shared_.model.threads();
  const size_t share = round_up((vocab + threads - 1) / threads, 16);
  const size_t from = std::min(vocab, t * share), to = std::min(vocab, from + share);
  for (int c = 0; c < pass.logit_columns; ++c)
    if (to > from)
      shared_.kernels.sum_rows(lane_logits_.floats() + c * vocab + from, kMaxColumns * vocab, spec_.lanes,
                               logits_.floats() + c * vocab + from, static_cast<int>(to - from));
}

// --- inputs -----------------------------------------------------------------------------------------------------

void LmHead::norm(const float* stream, int lane, const Pass& pass, float* out) const {
  const int index = pass.network == Network::mtp ? spec_.draft_norm() : spec_.final_norm();
  shared_.kernels.rms_norm(stream, shared_.model.norm_scale(index, lane), spec_.norm_eps, spec_.hidden,
                           spec_.padded_hidden(), out);
}

// Writes the inputs of each lane's head: that lane's normed stream; of a `lane` head only its slice of it.
void LmHead::lane_inputs(int t, const Pass& pass) {
  const ThreadPlan& plan = shared_.model.plan(t);
  const int hidden = spec_.padded_hidden(), slice = spec_.head_inputs();
  for (int lane = plan.first_lane; lane < plan.last_lane; ++lane) {
    const int own = lane - plan.first_lane;
    for (int c = 0; c < pass.logit_columns; ++c) {
      float* x = scratch_[t].inputs.floats() + (size_t(own) * kMaxColumns + c) * hidden;
      norm(layers_.stream(t, own, pass.logit_column[c]), lane, pass, x);
      if (spec_.head == Head::lane) std::memmove(x, x + lane * slice, slice * sizeof(float));
    }
  }
}

// Writes the one input of all threads' rows: the lanes' mean of normed streams, or the norm of their sum.
void LmHead::replicated_inputs(int t, const Pass& pass) {
  Scratch& w = scratch_[t];
  const Kernels& kernels = shared_.kernels;
  const int hidden = spec_.padded_hidden(), scales = spec_.shared_scale ? 1 : spec_.lanes;
  give_streams(t, pass);
  shared_.exchange.meet(t);  // all lanes' streams are there
  for (int c = 0; c < pass.logit_columns; ++c) {
    float *x = w.inputs.floats() + size_t(c) * hidden, *total = w.total.floats(), *normed = total + hidden;
    kernels.sum_rows(final_streams_.floats() + size_t(c) * hidden, size_t{kMaxColumns} * hidden, spec_.lanes, total,
                     hidden);
    std::fill(x, x + hidden, 0.0f);
    if (!sums_first(pass)) kernels.add_scaled(x, total, 1.0f / static_cast<float>(spec_.lanes), hidden);
    for (int lane = 0; sums_first(pass) && lane < scales; ++lane) {
      norm(total, lane, pass, normed);
      kernels.add_scaled(x, normed, 1.0f / static_cast<float>(scales), hidden);
    }
  }
}

// Shares the own lanes' streams with all threads, normed where the sum is over normed streams.
void LmHead::give_streams(int t, const Pass& pass) {
  const ThreadPlan& plan = shared_.model.plan(t);
  const int hidden = spec_.padded_hidden();
  for (int lane = plan.first_lane; t == plan.leader && lane < plan.last_lane; ++lane)
    for (int c = 0; c < pass.logit_columns; ++c) {
      const float* h = layers_.stream(t, lane - plan.first_lane, pass.logit_column[c]);
      float* given = final_streams_.floats() + (size_t(lane) * kMaxColumns + c) * hidden;
      if (sums_first(pass))
        std::memcpy(given, h, hidden * sizeof(float));
      else
        norm(h, lane, pass, given);
    }
}

}  // namespace laneformer
