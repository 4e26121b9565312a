// The language model's head: from the lanes' streams to logits, its rows shared out over the threads.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "decoder.h"

namespace laneformer {

// A norm of values whose squares overflow gives zeros, and the head then makes all tokens equally likely: the request
// of that row of the logits must end with an error.
void Decoder::expect_finite(const float* values, int count, const Pass& pass, int row) {
  constexpr int kChains = 16;  // independent sums, which the compiler keeps in vectors
  float squares[kChains] = {}, total = 0.0f;
  int i = 0;
  for (; i + kChains <= count; i += kChains)
    for (int k = 0; k < kChains; ++k) squares[k] += values[i + k] * values[i + k];
  for (; i < count; ++i) total += values[i] * values[i];
  for (const float sum : squares) total += sum;
  if (!std::isfinite(total)) orders_.overflowed.fetch_or(1u << pass.column[pass.head[row]].sequence);
}

void Decoder::run_head(int t, const Pass& pass) {
  for (int own = 0; own < plans_[t].last_lane - plans_[t].first_lane; ++own)
    for (int c = 0; c < pass.head_columns; ++c) expect_finite(stream(t, own, pass.head[c]), spec_.hidden, pass, c);
  if (spec_.head == Head::replicate)
    replicated_inputs(t, pass);
  else
    lane_inputs(t, pass);
  prepare_head(t, pass);
  share_head(t, pass);
  if (spec_.head == Head::lane) sum_lane_logits(t, pass);
  if (!pass.scores) return;
  meet(t);
  score_positions(t, pass);
}

// Log-probabilities of the ids that follow the pass's positions, shared out over the threads of rank 0.
void Decoder::score_positions(int t, const Pass& pass) {
  for (int row = t; place_.rank == 0 && row < pass.head_columns; row += own_)
    schedule_->score(pass, row, logits_.floats() + row * round_up(spec_.vocab, 16));
}

// Once for all shares: another thread may multiply them.
void Decoder::prepare_head(int t, const Pass& pass) {
  Worker& w = workers_[t];
  const int hidden = spec_.padded_hidden();
  for (size_t i = 0; i < plans_[t].head.size(); ++i)
    w.head_x[i] = prepare(plans_[t].head[i], w.head_inputs.floats() + i * kMaxColumns * hidden, hidden,
                          pass.head_columns, w.head_prepared[i]);
}

// This thread's matrices of the head, then what slower threads of its process have left of theirs: nobody waits long at
// the end of a token for a thread that lost its core for a moment. Each row is one thread's work, so no sum changes.
void Decoder::share_head(int t, const Pass& pass) {
  const uint64_t ready = pass.number;
  workers_[t].head_taken.value.store(0, std::memory_order_relaxed);
  workers_[t].head_ready.value.store(ready, std::memory_order_release);
  for (int i = 0; i < own_; ++i) {
    const int owner = first_ + (t - first_ + i) % own_;
    Worker& w = workers_[owner];
    const auto is_ready = [&] { return w.head_ready.value.load(std::memory_order_acquire) == ready; };
    spin_until(spin_turns_, [&] { return is_ready() || exchange_.lost(); });
    if (!is_ready()) return;
    while (multiply_head_share(owner, w.head_taken.value.fetch_add(1, std::memory_order_relaxed), pass)) {
    }
  }
}

// A few tiles of a thread's part of the head; false past its end.
bool Decoder::multiply_head_share(int owner, uint64_t share, const Pass& pass) {
  const ThreadPlan& plan = plans_[owner];
  for (size_t i = 0; i < plan.head.size(); ++i) {
    const Matrix& head = plan.head[i];
    const uint64_t shares = (head.tiles() + kHeadShareTiles - 1) / kHeadShareTiles;
    if (share >= shares) {
      share -= shares;
      continue;
    }
    const int lane = plan.first_lane + static_cast<int>(i);
    const size_t vocab = round_up(spec_.vocab, 16);
    float* out = logits_.floats();
    if (spec_.head == Head::vocab_parallel) out += size_t(lane) * spec_.head_rows();
    if (spec_.head == Head::lane) out = lane_logits_.floats() + lane * kMaxColumns * vocab;
    const Matrix tiles = head.tiles_from(share * kHeadShareTiles, kHeadShareTiles);
    multiply(owner, tiles, workers_[owner].head_x[i], out, static_cast<int>(vocab), pass.head_columns);
    for (int c = 0; c < pass.head_columns; ++c) expect_finite(out + c * vocab + tiles.first_row, tiles.rows, pass, c);
    return true;
  }
  return false;
}

// Each lane's head reads that lane's normed stream; a `lane` head only its slice of it.
void Decoder::lane_inputs(int t, const Pass& pass) {
  const ThreadPlan& plan = plans_[t];
  const int hidden = spec_.padded_hidden(), slice = spec_.head_inputs();
  for (int lane = plan.first_lane; lane < plan.last_lane; ++lane) {
    const int own = lane - plan.first_lane;
    for (int c = 0; c < pass.head_columns; ++c) {
      float* x = workers_[t].head_inputs.floats() + (size_t(own) * kMaxColumns + c) * hidden;
      kernels_->rms_norm(stream(t, own, pass.head[c]), norm_scale(2 * spec_.layers, lane), spec_.norm_eps, spec_.hidden,
                         hidden, x);
      if (spec_.head == Head::lane) std::memmove(x, x + lane * slice, slice * sizeof(float));
    }
  }
}

void Decoder::sum_lane_logits(int t, const Pass& pass) {
  meet(t);
  const size_t vocab = round_up(spec_.vocab, 16), share = round_up((vocab + threads() - 1) / threads(), 16);
  const size_t from = std::min(vocab, t * share), to = std::min(vocab, from + share);
  for (int c = 0; c < pass.head_columns; ++c)
    if (to > from)
      kernels_->sum_rows(lane_logits_.floats() + c * vocab + from, kMaxColumns * vocab, spec_.lanes,
                         logits_.floats() + c * vocab + from, static_cast<int>(to - from));
}

// The lanes' mean of normed streams, or the norm of their sum: the one input of all threads' rows.
void Decoder::replicated_inputs(int t, const Pass& pass) {
  Worker& w = workers_[t];
  const ThreadPlan& plan = plans_[t];
  const int hidden = spec_.padded_hidden(), last_norm = 2 * spec_.layers;
  const size_t lane_stride = size_t{kMaxColumns} * hidden;
  const auto norm = [&](const float* from, int lane, float* to) {
    kernels_->rms_norm(from, norm_scale(last_norm, lane), spec_.norm_eps, spec_.hidden, hidden, to);
  };
  for (int lane = plan.first_lane; t == plan.leader && lane < plan.last_lane; ++lane)
    for (int c = 0; c < pass.head_columns; ++c) {
      const float* h = stream(t, lane - plan.first_lane, pass.head[c]);
      float* shared = final_streams_.floats() + lane * lane_stride + size_t(c) * hidden;
      if (spec_.sum_before_norm)
        std::memcpy(shared, h, hidden * sizeof(float));
      else
        norm(h, lane, shared);
    }
  meet(t);
  for (int c = 0; c < pass.head_columns; ++c) {
    float* x = w.head_inputs.floats() + size_t(c) * hidden;
    float* total = w.total.floats();
    kernels_->sum_rows(final_streams_.floats() + size_t(c) * hidden, lane_stride, spec_.lanes, total, hidden);
    std::fill(x, x + hidden, 0.0f);
    const int scales = spec_.shared_scale ? 1 : spec_.lanes;
    if (!spec_.sum_before_norm) kernels_->add_scaled(x, total, 1.0f / static_cast<float>(spec_.lanes), hidden);
    for (int lane = 0; spec_.sum_before_norm && lane < scales; ++lane) {
      float* normed = w.total.floats() + hidden;
      norm(total, lane, normed);
      kernels_->add_scaled(x, normed, 1.0f / static_cast<float>(scales), hidden);
    }
  }
}

}  // namespace laneformer
