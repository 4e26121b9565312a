// Attention of one lane: rotary embedding, the KV cache, and every query head against it.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "decoder.h"

namespace laneformer {

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
    rotate(key + head * d, cache.keys.floats() + base + size_t(slot / 16) * 16 * dim + slot % 16, rope_position(layer, at), 16);
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
        rotate(query + size_t(c) * query_stride + (head + q) * d, w.query.floats() + q * dim, rope_position(layer, pass.column[c]), 1);
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
  multiply(t, matrices.qkv, w.x.floats(), hidden, shared.y.floats(), qkv_stride, pass.columns);
  if (spec_.qkv_bias) add_bias(matrices.qkv, layer, lane, shared.y.floats(), qkv_stride, pass.columns);
  meet_group(t);
  if (spec_.head_norms) norm_heads(t, layer, shared.y.floats(), qkv_stride, pass.columns);
  for (int c = 0; t == plans_[t].leader && c < pass.columns; ++c) {
    const float* key = shared.y.floats() + size_t(c) * qkv_stride + spec_.q_rows();
    cache_position(t, layer, own, key, key + spec_.kv_rows(), pass.column[c]);
  }
  meet_group(t);
  attend(t, layer, own, pass, shared.y.floats(), qkv_stride, shared.attended.floats(), out_stride);
  meet_group(t);
  multiply(t, matrices.wo, shared.attended.floats(), out_stride, partial, hidden, pass.columns);
}

}  // namespace laneformer
