#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace laneformer {

namespace {
constexpr int kBlockQueries = 128;  // taken at a time: their scores stay in the second-level cache

// Returns the first chunk that a query at this position sees.
int first_chunk_of(int position, int window) {
  return window ? std::max(0, position - window + 1) / kChunkPositions : 0;
}
}  // namespace

Attention::Attention(Shared& shared, const KvMemory& kv)
    : shared_(shared),
      spec_(shared.model.spec()),
      kv_(kv),
      heads_per_kv_(spec_.query_heads / spec_.kv_heads),
      kv_heads_(spec_.kv_heads / spec_.lanes),
      scratch_(shared.model.threads()) {
  for (int t = 0; t < shared.model.threads(); ++t) reserve(t);
}

void Attention::reserve(int t) {
  const auto floats = [](size_t count) { return Pages(count * sizeof(float)); };
  const size_t dim = spec_.padded_head_dim(), queries = std::max(kBlockQueries, heads_per_kv_);
  const size_t chunks = spec_.context / kChunkPositions + 2;
  Scratch& w = scratch_[t];
  w.query = floats(queries * dim), w.mixed = floats(queries * dim), w.states = floats(queries * (dim + kStateExtra));
  w.scores = floats(queries * kChunkPositions), w.totals = floats(2 * queries);
  w.widened = floats(2 * kChunkPositions * (dim + 1));
  if (spec_.joint_head_norms) w.normed = floats(round_up(spec_.q_rows(), 16));
  const ThreadPlan& plan = shared_.model.plan(t);
  if (plan.leader == t && plan.members > 1)
    w.partials = floats(chunks * kMaxSequences * (spec_.query_heads / spec_.lanes) * (dim + kStateExtra));
}

void Attention::run(const Lane& lane) {
  const ThreadPlan& plan = shared_.model.plan(lane.t);
  shared_.exchange.meet_lane(lane.t, plan);  // each thread has written its rows of q, k and v, which all read
  if (spec_.head_norms && spec_.joint_head_norms) norm_jointly(lane);
  if (spec_.head_norms && !spec_.joint_head_norms) norm_heads(lane);
  cache_positions(lane);
  shared_.exchange.meet_lane(lane.t, plan);  // all queries are normed, and all keys and values cached
  attend(lane);
  shared_.exchange.meet_lane(lane.t, plan);  // `mixed` is whole, which wo reads, and q, k and v may be overwritten
}

// Whether the thread caches a column: each of the lane's threads takes a run of them.
bool Attention::caches(const Lane& lane, int column) const {
  const ThreadPlan& plan = shared_.model.plan(lane.t);
  return column * plan.members / lane.pass.columns == lane.t - plan.leader;
}

// Norms heads in place, before RoPE: the lane's threads share the queries; a key is normed by the thread that caches it.
// w.query and w.mixed are free until `attend`.
void Attention::norm_heads(const Lane& lane) {
  Scratch& w = scratch_[lane.t];
  const ThreadPlan& plan = shared_.model.plan(lane.t);
  const int d = spec_.head_dim(), queries = spec_.query_heads / spec_.lanes;
  const int member = lane.t - plan.leader, stride = qkv_stride(spec_);
  const auto norm = [&](float* head, bool of_keys) {  // kernels want padding
    std::memcpy(w.query.floats(), head, d * sizeof(float));
    shared_.kernels.rms_norm(w.query.floats(), shared_.model.head_norm(lane.layer, of_keys), spec_.norm_eps, d,
                             spec_.padded_head_dim(), w.mixed.floats());
    std::memcpy(head, w.mixed.floats(), d * sizeof(float));
  };
  for (int c = 0; c < lane.pass.columns; ++c) {
    float* y = lane.qkv + size_t(c) * stride;
    for (int head = queries * member / plan.members; head < queries * (member + 1) / plan.members; ++head)
      norm(y + head * d, false);
    for (int head = 0; caches(lane, c) && head < kv_heads_; ++head) norm(y + (queries + head) * d, true);
  }
}

// Norms all heads' queries, or keys, together: the lane's threads share the queries by column.
void Attention::norm_jointly(const Lane& lane) {
  const ThreadPlan& plan = shared_.model.plan(lane.t);
  float* x = scratch_[lane.t].normed.floats();
  const auto norm = [&](float* heads, bool of_keys) {
    const int size = spec_.head_norm_size(of_keys), padded = static_cast<int>(round_up(size, 16));
    std::memcpy(x, heads, size * sizeof(float));
    std::fill(x + size, x + padded, 0.0f);
    shared_.kernels.rms_norm(x, shared_.model.head_norm(lane.layer, of_keys), spec_.norm_eps, size, padded, x);
    std::memcpy(heads, x, size * sizeof(float));
  };
  for (int c = 0; c < lane.pass.columns; ++c) {
    float* y = lane.qkv + size_t(c) * qkv_stride(spec_);
    if (c % plan.members == lane.t - plan.leader) norm(y, false);
    if (caches(lane, c)) norm(y + spec_.q_rows(), true);
  }
}

void Attention::cache_positions(const Lane& lane) {
  for (int c = 0; c < lane.pass.columns; ++c)
    if (caches(lane, c))
      cache_position(lane, lane.qkv + size_t(c) * qkv_stride(spec_) + spec_.q_rows(), lane.pass.column[c]);
}

// Writes one position's keys, then values, (kv_rows,) each, to the cache. w.mixed and w.scores are free until `attend`.
void Attention::cache_position(const Lane& lane, const float* key, Column at) {
  Scratch& w = scratch_[lane.t];
  const int d = spec_.head_dim(), dim = spec_.padded_head_dim(), leader = shared_.model.plan(lane.t).leader;
  const int bytes = bytes_of(spec_.kv_dtype), tile = at.position / 16, place = at.position % 16;
  const size_t skipped = tile * 16 * kv_position_bytes(dim, spec_.kv_dtype), scales = size_t(16) * dim * bytes;
  const float* value = key + spec_.kv_rows();
  float* rotated = w.mixed.floats();
  char* narrowed = w.scores.bytes();
  for (int head = 0; head < kv_heads_; ++head) {
    const int index = lane.own * kv_heads_ + head;
    shared_.model.rotate(key + head * d, rotated, lane.layer, at.position);
    char* keys = kv_.keys(leader, at.cache, lane.layer, index) + skipped;
    bool fits = narrow(rotated, narrowed, reinterpret_cast<float*>(keys + scales) + place);
    for (int j = 0; j < d; ++j) std::memcpy(keys + (size_t(j) * 16 + place) * bytes, narrowed + j * bytes, bytes);
    char* values = kv_.values(leader, at.cache, lane.layer, index) + skipped;
    fits &= narrow(value + head * d, values + size_t(place) * dim * bytes,
                   reinterpret_cast<float*>(values + scales) + place);
    if (!fits && spec_.kv_dtype == DType::fp16) {
      shared_.orders.kv_overflowed.fetch_or(1u << at.sequence);
      shared_.orders.overflowed.fetch_or(1u << at.sequence);
    }
  }
}

// Writes a head's values in the cache's type, with a scale for int8. Returns false where fp16 does not hold one.
bool Attention::narrow(const float* x, char* out, float* scale) const {
  const int d = spec_.head_dim();
  if (spec_.kv_dtype == DType::fp16) return shared_.kernels.to_halves(x, d, reinterpret_cast<uint16_t*>(out));
  if (spec_.kv_dtype != DType::int8) return convert(x, DType::fp32, d, out, spec_.kv_dtype);
  float largest = 0.0f;
  for (int j = 0; j < d; ++j)
    if (!(std::abs(x[j]) <= largest)) largest = std::abs(x[j]);  // not a number stays one
  *scale = largest / 127;
  const float inverse = std::isfinite(127 / largest) && std::isfinite(largest) ? 127 / largest : 0.0f;
  for (int j = 0; j < d; ++j) out[j] = static_cast<char>(std::isfinite(x[j]) ? std::lrintf(x[j] * inverse) : 0);
  return true;
}

// Prepares the query heads of one KV head, for `count` columns of one sequence that follow each other.
AttendArgs Attention::queries_of(const Lane& lane, const Block& block) const {
  const Scratch& w = scratch_[lane.t];
  const int d = spec_.head_dim(), dim = spec_.padded_head_dim(), stride = qkv_stride(spec_);
  const int window = spec_.window[lane.layer];
  const Column first = lane.pass.column[block.column];
  for (int c = 0; c < block.count; ++c)
    for (int q = 0; q < heads_per_kv_; ++q) {
      float* query = w.query.floats() + size_t(c * heads_per_kv_ + q) * dim;
      shared_.model.rotate(lane.qkv + size_t(block.column + c) * stride + (block.head * heads_per_kv_ + q) * d, query,
                           lane.layer, first.position + c);
      const float scale = shared_.model.query_scale(first.position + c);
      for (int j = 0; scale != 1.0f && j < d; ++j) query[j] *= scale;
    }
  const int leader = shared_.model.plan(lane.t).leader, head = lane.own * kv_heads_ + block.head;
  AttendArgs a{};
  a.query = w.query.floats();
  a.keys = kv_.keys(leader, first.cache, lane.layer, head);
  a.values = kv_.values(leader, first.cache, lane.layer, head);
  a.dtype = spec_.kv_dtype;
  a.queries = block.count * heads_per_kv_;
  a.heads = heads_per_kv_;
  a.dim = dim;
  a.slots = spec_.cache_slots();
  a.position = first.position;
  a.window = window;
  a.first_chunk = first_chunk_of(first.position, window);
  a.last_chunk = (first.position + block.count - 1) / kChunkPositions;
  a.scale = spec_.score_scale();
  a.states = w.states.floats();
  a.scores = w.scores.floats();
  a.mixed = w.mixed.floats();
  a.tops = w.totals.floats();
  a.totals = a.tops + a.queries;
  a.widened = w.widened.floats();
  return a;
}

// Attends to the chunks, starting from empty states.
void Attention::attend_from_nothing(const AttendArgs& a) const {
  for (int q = 0; q < a.queries; ++q) {
    float* state = a.states + size_t(q) * (a.dim + kStateExtra);
    std::fill_n(state, a.dim + kStateExtra, 0.0f);
    state[a.dim] = kLowestScore;
  }
  shared_.kernels.attend(a);
}

// Turns the states of a block's queries into outputs of attention.
void Attention::finish(const Lane& lane, const Block& block, const float* states) const {
  const int d = spec_.head_dim(), dim = spec_.padded_head_dim(), stride = mixed_stride(spec_);
  float* out = lane.mixed + size_t(block.column) * stride + block.head * heads_per_kv_ * d;
  const int number = shared_.model.plan(lane.t).first_lane + lane.own;
  const float* sinks = nullptr;
  if (spec_.sinks) sinks = shared_.model.biases().sinks(lane.layer, number) + block.head * heads_per_kv_;
  for (int c = 0; c < block.count; ++c, out += stride)
    for (int q = 0; q < heads_per_kv_; ++q, states += dim + kStateExtra) {
      const float inverse = 1.0f / (states[dim + 1] + (sinks ? std::exp(sinks[q] - states[dim]) : 0.0f));
      for (int j = 0; j < d; ++j) out[q * d + j] = states[j] * inverse;
    }
}

// Runs one lane's query heads against their caches. Each of the lane's threads takes a share of the columns of all KV
// heads, in blocks; with few columns, a share of their chunks of positions.
void Attention::attend(const Lane& lane) {
  const Pass& pass = lane.pass;
  const ThreadPlan& plan = shared_.model.plan(lane.t);
  const int member = lane.t - plan.leader, members = plan.members;
  if (members > 1 && pass.columns <= kMaxSequences) return attend_chunks(lane);
  const int columns = pass.columns, end = kv_heads_ * columns * (member + 1) / members;
  for (int at = kv_heads_ * columns * member / members; at < end;) {
    Block block{at / columns, at % columns, 1};
    const int most = std::min({end - at, columns - block.column, std::max(1, kBlockQueries / heads_per_kv_)});
    const Column first = pass.column[block.column];
    for (; block.count < most; ++block.count) {
      const Column next = pass.column[block.column + block.count];
      if (next.cache != first.cache || next.position != first.position + block.count) break;
    }
    const AttendArgs a = queries_of(lane, block);
    attend_from_nothing(a);
    finish(lane, block, a.states);
    at += block.count;
  }
}

// Shares the chunks of all columns and KV heads, one block after the other, equally among the lane's threads. Each chunk has
// states of its own, which are merged in the order of positions, as one thread does.
void Attention::attend_chunks(const Lane& lane) {
  const Pass& pass = lane.pass;
  const ThreadPlan& plan = shared_.model.plan(lane.t);
  const int dim = spec_.padded_head_dim(), blocks = kv_heads_ * pass.columns;
  const int member = lane.t - plan.leader, members = plan.members, window = spec_.window[lane.layer];
  const size_t chunk_floats = size_t(heads_per_kv_) * (dim + kStateExtra);
  float* partials = scratch_[plan.leader].partials.floats();
  const auto block_of = [&](int block) { return Block{block % kv_heads_, block / kv_heads_, 1}; };
  const auto chunks_of = [&](int block) {
    const int position = pass.column[block / kv_heads_].position;
    return position / kChunkPositions - first_chunk_of(position, window) + 1;
  };
  int all_chunks = 0, before = 0;  // before: the chunks of earlier blocks
  for (int block = 0; block < blocks; ++block) all_chunks += chunks_of(block);
  const int begin = all_chunks * member / members, end = all_chunks * (member + 1) / members;
  for (int block = 0; block < blocks; before += chunks_of(block), ++block) {
    const int from = std::max(begin, before), to = std::min(end, before + chunks_of(block));
    if (from >= to) continue;
    AttendArgs a = queries_of(lane, block_of(block));
    const int first_chunk = a.first_chunk;
    for (int chunk = from; chunk < to; ++chunk) {
      a.first_chunk = a.last_chunk = first_chunk + chunk - before;
      a.states = partials + chunk * chunk_floats;
      attend_from_nothing(a);
    }
  }
  const bool merges = all_chunks > blocks;
  if (merges) shared_.exchange.meet_lane(lane.t, plan);  // a block's chunks may be other threads'
  before = 0;
  for (int block = 0; block < blocks; before += chunks_of(block), ++block) {
    float* states = partials + before * chunk_floats;
    const bool computed = before >= begin && before < end;
    if (merges ? block % members != member : !computed) continue;
    for (int chunk = 1; chunk < chunks_of(block); ++chunk)
      for (int q = 0; q < heads_per_kv_; ++q)
        shared_.kernels.merge_states(states + q * (dim + kStateExtra),
                                     states + chunk * chunk_floats + q * (dim + kStateExtra), dim);
    finish(lane, block_of(block), states);
  }
}

}  // namespace laneformer
