// One pass of a block of positions through the lanes; see decoder.h for who waits for whom.
//
//   C columns (positions of the block)   D hidden   L lanes; every row is padded to 32 floats with zeros
#include <algorithm>
#include <cmath>
#include <cstring>

#include "decoder.h"

namespace laneformer {

float* Decoder::mailbox(uint64_t layer, Module module, int lane) const {
  const size_t slot = (layer % ring_layers_ * 2 + module) * spec_.lanes + lane;
  return mailbox_.floats() + slot * kMaxColumns * spec_.padded_hidden();
}

float* Decoder::stream(int t, int own, int column) const {
  return workers_[t].streams.floats() + (size_t(own) * kMaxColumns + column) * spec_.padded_hidden();
}

const float* Decoder::norm_scale(int index, int lane) const {
  const size_t row = spec_.shared_scale ? index : size_t(index) * spec_.lanes + lane;
  return norms_.floats() + row * spec_.padded_hidden();
}

void Decoder::wait_for(int t, int first, int last, uint64_t modules) const {
  for (int peer = first; peer < last; ++peer)
    if (peer != t)
      spin_until(spin_turns_, [&] { return modules_done_[peer].value.load(std::memory_order_acquire) >= modules; });
}

// y[c][matrix.first_row ...] of all columns, from the tape of `owner`.
void Decoder::multiply(int t, int owner, const Matrix& matrix, const float* x, int x_stride, float* y, int y_stride,
                       int columns) {
  const void* tiles = workers_[owner].tape.bytes() + matrix.offset;
  Matmul matmul = kernels_->matmul[static_cast<int>(dtype_)];
  if (bf16_math_) {
    const bool pairs = kernels_->matmul_bf16_pairs != nullptr;
    float* rounded = workers_[t].rounded.floats();
    for (int c = 0; c < columns; ++c)
      (pairs ? kernels_->to_bf16_pairs : kernels_->round_to_bf16)(x + size_t(c) * x_stride, 2 * matrix.k_pairs(),
                                                                  rounded + size_t(c) * x_stride);
    if (pairs) matmul = kernels_->matmul_bf16_pairs;
    x = rounded;
  }
  matmul(tiles, matrix.rows, matrix.k_pairs(), x, x_stride, y + matrix.first_row, y_stride, columns);
}

void Decoder::run_layers(int t, const Pass& pass) {
  const ThreadPlan& plan = plans_[t];
  const int own_lanes = plan.last_lane - plan.first_lane;
  for (int c = 0; c < pass.columns; ++c) {
    const size_t row = size_t(pass.column[c].token) * spec_.hidden * bytes_of(embedding_dtype_);
    for (int own = 0; own < own_lanes; ++own)
      convert(embedding_.bytes() + row, embedding_dtype_, spec_.hidden, stream(t, own, c), DType::fp32);
  }
  for (int layer = 0; layer < spec_.layers; ++layer) {
    const uint64_t global = pass.first_layer + layer;
    for (const Module module : {kAttention, kMlp}) {
      // This slot's last readers joined it `delay` layers after it was written; they are past that once they have
      // finished the module that follows.
      const uint64_t last_read = global + delay_;
      if (last_read >= uint64_t(ring_layers_)) wait_for_peers(t, 2 * (last_read - ring_layers_) + module + 2);
      for (int own = 0; own < own_lanes; ++own) {
        float* partial = mailbox(global, module, plan.first_lane + own);
        module == kAttention ? attention(t, layer, own, pass, partial) : mlp(t, layer, own, pass, partial);
      }
      modules_done_[t].value.store(2 * global + module + 1, std::memory_order_release);
      if (pass.barriers) meet(t);
      join(t, layer, module, pass);
      if (!request_.keep_partials.empty()) keep_partials(t, layer, module, pass);
    }
  }
}

// --- modules ----------------------------------------------------------------------------------------------------

void Decoder::rotate(const float* from, float* to, int position, int to_stride) const {
  const int half = spec_.head_dim() / 2;
  const float *cosine = cosine_.data() + size_t(position) * half, *sine = sine_.data() + size_t(position) * half;
  for (int j = 0; j < half; ++j) {
    const float even = from[2 * j], odd = from[2 * j + 1];
    to[2 * j * to_stride] = even * cosine[j] - odd * sine[j];
    to[(2 * j + 1) * to_stride] = even * sine[j] + odd * cosine[j];
  }
}

// Keys and values (kv_rows,) of one position into the ring.
void Decoder::cache_position(int t, int layer, int own, const float* key, const float* value, Column at) {
  Worker& w = workers_[t];
  const KvCache& cache = w.caches[at.cache];
  const int d = spec_.head_dim(), dim = spec_.padded_head_dim(), slots = spec_.cache_slots(layer);
  const int heads = spec_.kv_heads / spec_.lanes, slot = at.position % slots;
  for (int head = 0; head < heads; ++head) {
    const size_t base = w.cache_offset[layer] + size_t(own * heads + head) * slots * dim;
    rotate(key + head * d, cache.keys.floats() + base + size_t(slot / 16) * 16 * dim + slot % 16, at.position, 16);
    std::memcpy(cache.values.floats() + base + size_t(slot) * dim, value + head * d, d * sizeof(float));
  }
}

// One lane's query heads against their caches: query and out (columns, stride); a thread of a group takes its share of
// the heads. All columns go through one KV head before the next, so that a block of a prompt finds it in the caches.
void Decoder::attend(int t, int layer, int own, const Pass& pass, const float* query, int query_stride, float* out,
                     int out_stride) {
  Worker &w = workers_[t], &shared = workers_[plans_[t].leader];
  const int d = spec_.head_dim(), dim = spec_.padded_head_dim(), slots = spec_.cache_slots(layer);
  const int kv_heads = spec_.kv_heads / spec_.lanes, group = spec_.query_heads / spec_.kv_heads;
  const int member = t - plans_[t].leader, members = plans_[t].members, window = spec_.window[layer];
  const int end = kv_heads * group * (member + 1) / members;
  const float scale = 1.0f / std::sqrt(static_cast<float>(d));
  for (int head = kv_heads * group * member / members, count; head < end; head += count) {
    count = std::min(end, (head / group + 1) * group) - head;  // those that share a KV head
    const size_t base = shared.cache_offset[layer] + size_t(own * kv_heads + head / group) * slots * dim;
    for (int c = 0; c < pass.columns; ++c) {
      const auto [token, position, number] = pass.column[c];
      const KvCache& cache = shared.caches[number];
      const int first = window ? std::max(0, position - window + 1) : 0;
      for (int q = 0; q < count; ++q)
        rotate(query + size_t(c) * query_stride + (head + q) * d, w.query.floats() + q * dim, position, 1);
      kernels_->attend({w.query.floats(), cache.keys.floats() + base, cache.values.floats() + base, w.scores.floats(),
                        w.mixed.floats(), count, dim, slots, first, position, scale});
      for (int q = 0; q < count; ++q)
        std::memcpy(out + size_t(c) * out_stride + (head + q) * d, w.mixed.floats() + q * dim, d * sizeof(float));
    }
  }
}

void Decoder::attention(int t, int layer, int own, const Pass& pass, float* partial) {
  Worker &w = workers_[t], &shared = workers_[plans_[t].leader];
  const LaneLayer& matrices = plans_[t].layers[layer][own];
  const int hidden = spec_.padded_hidden(), lane = plans_[t].first_lane + own;
  const int qkv_stride = static_cast<int>(round_up(spec_.qkv_rows(), 32));
  const int out_stride = static_cast<int>(round_up(spec_.q_rows(), 32));
  for (int c = 0; c < pass.columns; ++c)
    kernels_->rms_norm(stream(t, own, c), norm_scale(2 * layer, lane), spec_.norm_eps, spec_.hidden, hidden,
                       w.x.floats() + size_t(c) * hidden);
  multiply(t, t, matrices.qkv, w.x.floats(), hidden, shared.y.floats(), qkv_stride, pass.columns);
  meet_group(t);
  for (int c = 0; t == plans_[t].leader && c < pass.columns; ++c) {
    const float* key = shared.y.floats() + size_t(c) * qkv_stride + spec_.q_rows();
    cache_position(t, layer, own, key, key + spec_.kv_rows(), pass.column[c]);
  }
  meet_group(t);
  attend(t, layer, own, pass, shared.y.floats(), qkv_stride, shared.attended.floats(), out_stride);
  meet_group(t);
  multiply(t, t, matrices.wo, shared.attended.floats(), out_stride, partial, hidden, pass.columns);
}

void Decoder::mlp(int t, int layer, int own, const Pass& pass, float* partial) {
  Worker &w = workers_[t], &shared = workers_[plans_[t].leader];
  const LaneLayer& matrices = plans_[t].layers[layer][own];
  const int hidden = spec_.padded_hidden(), lane = plans_[t].first_lane + own, wide = spec_.gate_up_rows();
  const int ff_stride = static_cast<int>(round_up(spec_.ff_rows(), 32)), first = matrices.gate_up.first_row;
  for (int c = 0; c < pass.columns; ++c)
    kernels_->rms_norm(stream(t, own, c), norm_scale(2 * layer + 1, lane), spec_.norm_eps, spec_.hidden, hidden,
                       w.x.floats() + size_t(c) * hidden);
  multiply(t, t, matrices.gate_up, w.x.floats(), hidden, w.y.floats(), wide, pass.columns);
  for (int c = 0; c < pass.columns; ++c)
    kernels_->silu_gate(w.y.floats() + size_t(c) * wide + first, matrices.gate_up.tiles(),
                        shared.gated.floats() + size_t(c) * ff_stride + first / 2);
  meet_group(t);
  multiply(t, t, matrices.w2, shared.gated.floats(), ff_stride, partial, hidden, pass.columns);
}

// The update table of config.Join for the own lanes; sums over lanes are always in lane order.
void Decoder::join(int t, int layer, Module module, const Pass& pass) {
  const ThreadPlan& plan = plans_[t];
  const uint64_t global = pass.first_layer + layer;
  const Join how = spec_.join[module][layer];
  const bool delayed = how == Join::past && spec_.adds_delayed[module][layer];
  const int n = pass.columns * spec_.padded_hidden();
  const uint64_t from = how == Join::present ? global : global - (delayed ? delay_ : 0);
  float* total = workers_[t].total.floats();
  wait_for(t, plan.leader, plan.leader + plan.members, 2 * global + module + 1);  // the rest of the own lane's rows
  if (how == Join::present || delayed) {
    wait_for_peers(t, 2 * from + module + 1);
    const size_t stride = size_t{kMaxColumns} * spec_.padded_hidden();
    kernels_->sum_rows(mailbox(from, module, 0), stride, spec_.lanes, total, n);
  }
  for (int lane = plan.first_lane; lane < plan.last_lane; ++lane) {
    float* h = stream(t, lane - plan.first_lane, 0);
    const float* partial = mailbox(global, module, lane);
    if (how == Join::present)
      kernels_->add(h, total, n);
    else if (how == Join::no_reduce)
      kernels_->add_scaled(h, partial, std::sqrt(static_cast<float>(spec_.lanes)), n);
    else if (delayed)
      kernels_->add_past(h, partial, total, mailbox(from, module, lane), n);
    else
      kernels_->add(h, partial, n);
  }
}

// Its own lanes' partials of the chosen positions. After the join they are whole and still in the mailbox: whoever
// overwrites them waits until this thread has finished the next module.
void Decoder::keep_partials(int t, int layer, Module module, const Pass& pass) {
  const ThreadPlan& plan = plans_[t];
  const std::vector<int>& chosen = request_.keep_partials;
  for (int c = 0; t == plan.leader && c < pass.columns; ++c) {
    const auto found = std::lower_bound(chosen.begin(), chosen.end(), pass.column[c].position);
    if (found == chosen.end() || *found != pass.column[c].position) continue;
    const size_t row = (size_t(found - chosen.begin()) * spec_.layers + layer) * 2 + module;
    for (int lane = plan.first_lane; lane < plan.last_lane; ++lane)
      std::memcpy(kept_partials_.data() + (row * spec_.lanes + lane) * spec_.hidden,
                  mailbox(pass.first_layer + layer, module, lane) + size_t(c) * spec_.padded_hidden(),
                  spec_.hidden * sizeof(float));
  }
}

// --- head -------------------------------------------------------------------------------------------------------

void Decoder::run_head(int t, const Pass& pass) {
  if (spec_.head == Head::replicate)
    replicated_inputs(t, pass);
  else
    lane_inputs(t, pass);
  share_head(t, pass);
  if (spec_.head == Head::lane) sum_lane_logits(t, pass);
  if (!request_.scores()) return;
  meet(t);
  score_positions(t, pass);
}

// This thread's matrices of the head, then what slower threads have left of theirs: nobody waits long at the end of a
// token for a thread that lost its core for a moment. Each row is one thread's work, so no sum changes.
void Decoder::share_head(int t, const Pass& pass) {
  const uint64_t ready = pass.first_layer + 1;
  workers_[t].head_taken.value.store(0, std::memory_order_relaxed);
  workers_[t].head_ready.value.store(ready, std::memory_order_release);
  for (int i = 0; i < threads(); ++i) {
    const int owner = (t + i) % threads();
    Worker& w = workers_[owner];
    spin_until(spin_turns_, [&] { return w.head_ready.value.load(std::memory_order_acquire) == ready; });
    while (multiply_head_share(t, owner, w.head_taken.value.fetch_add(1, std::memory_order_relaxed), pass)) {
    }
  }
}

// A few tiles of a thread's part of the head; false past its end.
bool Decoder::multiply_head_share(int t, int owner, uint64_t share, const Pass& pass) {
  const ThreadPlan& plan = plans_[owner];
  for (size_t i = 0; i < plan.head.size(); ++i) {
    const Matrix& head = plan.head[i];
    const uint64_t shares = (head.tiles() + kHeadShareTiles - 1) / kHeadShareTiles;
    if (share >= shares) {
      share -= shares;
      continue;
    }
    const int lane = plan.first_lane + static_cast<int>(i), hidden = spec_.padded_hidden();
    const size_t vocab = round_up(spec_.vocab, 16);
    float* out = logits_.floats();
    if (spec_.head == Head::vocab_parallel) out += size_t(lane) * spec_.head_rows();
    if (spec_.head == Head::lane) out = lane_logits_.floats() + lane * kMaxColumns * vocab;
    multiply(t, owner, head.tiles_from(share * kHeadShareTiles, kHeadShareTiles, dtype_),
             workers_[owner].head_inputs.floats() + i * kMaxColumns * hidden, hidden, out, static_cast<int>(vocab),
             pass.head_columns);
    return true;
  }
  return false;
}

// Each lane's head reads that lane's normed stream; a `lane` head only its slice of it.
void Decoder::lane_inputs(int t, const Pass& pass) {
  const ThreadPlan& plan = plans_[t];
  const int hidden = spec_.padded_hidden(), slice = spec_.q_rows();
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
