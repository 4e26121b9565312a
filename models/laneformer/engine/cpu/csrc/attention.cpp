// Attention of one lane: rotary embedding, the KV cache, and every query head against it.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "decoder.h"

namespace laneformer {

void Decoder::rotate(const float* from, float* to, int position) const {
  const int half = spec_.head_dim() / 2;
  const float *cosine = cosine_.data() + size_t(position) * half, *sine = sine_.data() + size_t(position) * half;
  for (int j = 0; j < half; ++j) {
    const float even = from[2 * j], odd = from[2 * j + 1];
    to[2 * j] = even * cosine[j] - odd * sine[j];
    to[2 * j + 1] = even * sine[j] + odd * cosine[j];
  }
}

// Keys and values (kv_rows,) of one position into the cache.
void Decoder::cache_position(int t, int layer, int own, const float* key, const float* value, Column at) {
  Worker& w = workers_[t];
  const int d = spec_.head_dim(), dim = spec_.padded_head_dim(), heads = spec_.kv_heads / spec_.lanes;
  const int slot = at.position, bytes = bytes_of(spec_.kv_dtype);
  float* rotated = w.mixed.floats();
  char* narrow = w.scores.bytes();
  for (int head = 0; head < heads; ++head) {
    const int index = own * heads + head;
    rotate(key + head * d, rotated, rope_position(layer, at.position));
    bool fits = convert(rotated, DType::fp32, d, narrow, spec_.kv_dtype);
    char* to = kv_->keys(t, at.cache, layer, index) + (size_t(slot / 16) * 16 * dim + slot % 16) * bytes;
    for (int j = 0; j < d; ++j) std::memcpy(to + size_t(j) * 16 * bytes, narrow + j * bytes, bytes);
    fits &= convert(value + head * d, DType::fp32, d,
                    kv_->values(t, at.cache, layer, index) + size_t(slot) * dim * bytes, spec_.kv_dtype);
    if (!fits && spec_.kv_dtype == DType::fp16) {
      orders_.kv_overflowed.fetch_or(1u << at.sequence);
      orders_.overflowed.fetch_or(1u << at.sequence);
    }
  }
}

// The query heads of one KV head, of `count` columns of one sequence that follow each other.
AttendArgs Decoder::queries_of(int t, int layer, int own, const Attended& block, const Pass& pass) const {
  const Worker &w = workers_[t], &shared = workers_[plans_[t].leader];
  const int d = spec_.head_dim(), dim = spec_.padded_head_dim(), group = spec_.query_heads / spec_.kv_heads;
  const int kv_heads = spec_.kv_heads / spec_.lanes, window = spec_.window[layer];
  const int stride = static_cast<int>(round_up(spec_.qkv_rows(), 32));
  const Column first = pass.column[block.column];
  for (int c = 0; c < block.count; ++c)
    for (int q = 0; q < group; ++q)
      rotate(shared.y.floats() + size_t(block.column + c) * stride + (block.head * group + q) * d,
             w.query.floats() + size_t(c * group + q) * dim, rope_position(layer, first.position + c));
  const int leader = plans_[t].leader, head = own * kv_heads + block.head;
  AttendArgs a{};
  a.query = w.query.floats();
  a.keys = kv_->keys(leader, first.cache, layer, head);
  a.values = kv_->values(leader, first.cache, layer, head);
  a.dtype = spec_.kv_dtype;
  a.queries = block.count * group;
  a.heads = group;
  a.dim = dim;
  a.slots = spec_.cache_slots();
  a.position = first.position;
  a.window = window;
  a.first_chunk = window ? std::max(0, first.position - window + 1) / kChunkPositions : 0;
  a.last_chunk = (first.position + block.count - 1) / kChunkPositions;
  a.scale = 1.0f / std::sqrt(static_cast<float>(d));
  a.states = w.states.floats();
  a.scores = w.scores.floats();
  a.mixed = w.mixed.floats();
  a.tops = w.totals.floats();
  a.totals = a.tops + a.queries;
  a.widened = w.widened.floats();
  return a;
}

// Attention over chunks from empty states on, or with states given, to the end.
void Decoder::attend_from_nothing(const AttendArgs& a) const {
  for (int q = 0; q < a.queries; ++q) {
    float* state = a.states + size_t(q) * (a.dim + kStateExtra);
    std::fill_n(state, a.dim + kStateExtra, 0.0f);
    state[a.dim] = kLowestScore;
  }
  kernels_->attend(a);
}

// States of a block's queries to outputs of attention, the inputs of wo.
void Decoder::finish_attention(int t, const Attended& block, const float* states) const {
  const int d = spec_.head_dim(), dim = spec_.padded_head_dim(), group = spec_.query_heads / spec_.kv_heads;
  const size_t stride = round_up(spec_.q_rows(), 32);
  float* out = workers_[plans_[t].leader].attended.floats() + block.column * stride + block.head * group * d;
  for (int c = 0; c < block.count; ++c, out += stride)
    for (int q = 0; q < group; ++q, states += dim + kStateExtra) {
      const float inverse = 1.0f / states[dim + 1];
      for (int j = 0; j < d; ++j) out[q * d + j] = states[j] * inverse;
    }
}

// One lane's query heads against their caches. A thread of a group takes its share of the columns of all KV heads, in
// blocks; with few columns at a depth, of the chunks of positions.
void Decoder::attend(int t, int layer, int own, const Pass& pass) {
  const int kv_heads = spec_.kv_heads / spec_.lanes, group = spec_.query_heads / spec_.kv_heads;
  const int member = t - plans_[t].leader, members = plans_[t].members;
  if (members > 1 && pass.columns <= kMaxSequences) return attend_chunks(t, layer, own, pass);
  const int columns = pass.columns, end = kv_heads * columns * (member + 1) / members;
  for (int at = kv_heads * columns * member / members; at < end;) {
    Attended block{at / columns, at % columns, 1};
    const int most = std::min({end - at, columns - block.column, std::max(1, kBlockQueries / group)});
    const Column first = pass.column[block.column];
    for (; block.count < most; ++block.count) {
      const Column next = pass.column[block.column + block.count];
      if (next.cache != first.cache || next.position != first.position + block.count) break;
    }
    const AttendArgs a = queries_of(t, layer, own, block, pass);
    attend_from_nothing(a);
    finish_attention(t, block, a.states);
    at += block.count;
  }
}

// The chunks of all columns and KV heads, one after the other, in equal shares; each has states of its own, which are
// merged in the order of positions, as one thread does.
void Decoder::attend_chunks(int t, int layer, int own, const Pass& pass) {
  const int kv_heads = spec_.kv_heads / spec_.lanes, group = spec_.query_heads / spec_.kv_heads;
  const int dim = spec_.padded_head_dim(), blocks = kv_heads * pass.columns;
  const int member = t - plans_[t].leader, members = plans_[t].members, window = spec_.window[layer];
  const size_t chunk_floats = size_t(group) * (dim + kStateExtra);
  float* partials = workers_[plans_[t].leader].partials.floats();
  const auto chunks_of = [&](int block) {
    const int position = pass.column[block / kv_heads].position;
    return position / kChunkPositions - (window ? std::max(0, position - window + 1) / kChunkPositions : 0) + 1;
  };
  int total = 0, before = 0;
  for (int block = 0; block < blocks; ++block) total += chunks_of(block);
  const int begin = total * member / members, end = total * (member + 1) / members;
  for (int block = 0; block < blocks; before += chunks_of(block), ++block) {
    const int from = std::max(begin, before), to = std::min(end, before + chunks_of(block));
    if (from >= to) continue;
    AttendArgs a = queries_of(t, layer, own, {block % kv_heads, block / kv_heads, 1}, pass);
    const int first_chunk = a.first_chunk - before;
    for (int unit = from; unit < to; ++unit) {
      a.first_chunk = a.last_chunk = first_chunk + unit;
      a.states = partials + unit * chunk_floats;
      attend_from_nothing(a);
    }
  }
  if (total > blocks) meet_group(t);
  before = 0;
  for (int block = 0; block < blocks; before += chunks_of(block), ++block) {
    float* states = partials + before * chunk_floats;
    // unmerged states are finished by who computed them
    const bool mine = total > blocks ? block % members == member : before >= begin && before < end;
    if (!mine) continue;
    for (int chunk = 1; chunk < chunks_of(block); ++chunk)
      for (int q = 0; q < group; ++q)
        kernels_->merge_states(states + q * (dim + kStateExtra),
                               states + chunk * chunk_floats + q * (dim + kStateExtra), dim);
    finish_attention(t, {block % kv_heads, block / kv_heads, 1}, states);
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
  attend(t, layer, own, pass);
  meet_group(t);
  multiply(t, matrices.wo, shared.attended.floats(), out_stride, partial, hidden, pass.columns);
}

}  // namespace laneformer
