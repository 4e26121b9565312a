// Attention of a block of queries to one KV head, in chunks of positions that are the same for every query.
//
// In each chunk a query has its highest score, the sum of its exponentials and its weighted sum of values; chunks are
// merged in order. Scores are sums in the order of dimensions, mixed values in the order of positions, so a query's bits
// depend neither on the others of its block nor on the ring's phase.
#pragma once
#include "vector.h"

namespace laneformer {
namespace {

constexpr float kMasked = 10.0f * kLowestScore;  // its exponential is exactly zero beside any score
constexpr int kScoredTiles = 4, kScoredPositions = 16 * kScoredTiles;  // of keys, at a time
constexpr int kMixedPositions = 64;              // whose values stay in the first-level cache for all queries
constexpr int kFewQueries = 16;                  // more are worth a widened copy of narrow keys and values
constexpr int kValuesAhead = 4096;               // bytes
constexpr int kQueryRows = kWidth == 16 ? 8 : kWidth == 8 ? 4 : 2;  // most queries that share a key in a register
constexpr int kAccumulators = kWidth == 16 ? 16 : 8;                // registers

template <int N>
struct Rows {
  static constexpr int count = N;
};

// body(first query, Rows<their number>) for groups of queries, as large as the registers allow.
template <class Body>
INLINE void each_group(int queries, const Body& body) {
  int q = 0;
  if constexpr (kQueryRows >= 8)
    for (; q + 8 <= queries; q += 8) body(q, Rows<8>{});
  if constexpr (kQueryRows >= 4)
    for (; q + 4 <= queries; q += 4) body(q, Rows<4>{});
  if constexpr (kQueryRows < 4)
    for (; q + 2 <= queries; q += 2) body(q, Rows<2>{});
  if (queries - q == 3) body(q, Rows<3>{});
  if (queries - q == 2) body(q, Rows<2>{});
  if (queries - q == 1) body(q, Rows<1>{});
}

template <DType T>
INLINE V16 load_cached(const char* at) {
  typedef uint16_t H __attribute__((vector_size(2 * kWidth), may_alias));
  if constexpr (T == DType::fp32) return load((const float*)at);
  if constexpr (T == DType::int8) return signed_bytes(at);
  V16 v;
  EACH_PART {
    const uint16_t* x = (const uint16_t*)at + i * kWidth;
    if constexpr (T == DType::bf16)
      v.part[i] = (F)(__builtin_convertvector(*(const H*)x, I) << 16);
    else
      v.part[i] = half_part(x);
  }
  return v;
}

template <DType T>
constexpr int kElementBytes = T == DType::fp32 ? 4 : T == DType::int8 ? 1 : 2;

// Positions in tiles of 16 * dim elements, which 16 scales may follow; 64 positions from a multiple of 64 on lie in a row.
struct Ring {
  const char* base;
  int tiles, tile_bytes;
  INLINE const char* at(int tile) const { return base + (size_t)(tile % tiles) * tile_bytes; }
};
template <DType T>
INLINE V16 scales_of(const char* tile, int dim) {
  return load((const float*)(tile + 16 * dim * kElementBytes<T>));
}

// Scores of 64 positions for ROWS queries, which share every key that is loaded; the next 64 are prefetched.
template <DType T, bool SCALED, int ROWS>
INLINE void score_tiles(const float* query, const char* const* tiles, int dim, float scale, float* scores) {
  constexpr int kRegisters = kAccumulators / kParts / ROWS, kBytes = 16 * kElementBytes<T>;
  constexpr int kTiles = kRegisters >= 4 ? 4 : kRegisters >= 2 ? 2 : 1;
#pragma GCC unroll 4
  for (int tile = 0; tile < kScoredTiles; tile += kTiles) {
    const char* ahead = tiles[tile] + (size_t)kScoredTiles * dim * kBytes;
    V16 s[ROWS][kTiles];
    for (auto& row : s)
      for (auto& v : row) v = splat(0.0f);
    for (int j = 0; j < dim; ++j, ahead += kTiles * kBytes) {
      for (int line = 0; line < kTiles * kBytes; line += 64) __builtin_prefetch(ahead + line);
      V16 keys[kTiles];
#pragma GCC unroll 4
      for (int i = 0; i < kTiles; ++i) keys[i] = load_cached<T>(tiles[tile + i] + j * kBytes);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const V16 x = splat(query[r * dim + j]);
#pragma GCC unroll 4
        for (int i = 0; i < kTiles; ++i) s[r][i] = fma(x, keys[i], s[r][i]);
      }
    }
    for (int i = 0; i < kTiles; ++i) {
      V16 by = splat(scale);
      if constexpr (SCALED) by = by * scales_of<T>(tiles[tile + i], dim);
      for (int r = 0; r < ROWS; ++r) store(scores + r * kChunkPositions + 16 * (tile + i), s[r][i] * by);
    }
  }
}

// Adds the weighted values of some positions to `out` (ROWS, dim), from dimension `from` on, 16 * VECTORS at a time.
template <DType T, int ROWS, int VECTORS>
INLINE void mix_from(const float* weights, const char* values, int positions, int dim, int from, float* out) {
  constexpr int kPassBytes = 16 * VECTORS * kElementBytes<T>;
  for (; from + 16 * VECTORS <= dim; from += 16 * VECTORS) {
    V16 s[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
      for (int i = 0; i < VECTORS; ++i) s[r][i] = load(out + r * dim + from + 16 * i);
    const char* value = values + from * kElementBytes<T>;
    for (int p = 0; p < positions; ++p, value += dim * kElementBytes<T>) {
      if (from == 0) {  // the whole row, whatever this pass takes of it: memory is read best in order
#pragma GCC unroll 8
        for (int line = 0; line < kPassBytes; line += 64) __builtin_prefetch(value + line + kValuesAhead);
        for (int line = kPassBytes; line < dim * kElementBytes<T>; line += 64)
          __builtin_prefetch(value + line + kValuesAhead);
      }
      V16 v[VECTORS];
#pragma GCC unroll 8
      for (int i = 0; i < VECTORS; ++i) v[i] = load_cached<T>(value + 16 * i * kElementBytes<T>);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const V16 weight = splat(weights[r * kChunkPositions + p]);
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; ++i) s[r][i] = fma(weight, v[i], s[r][i]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
      for (int i = 0; i < VECTORS; ++i) store(out + r * dim + from + 16 * i, s[r][i]);
  }
  if constexpr (VECTORS > 1) mix_from<T, ROWS, VECTORS / 2>(weights, values, positions, dim, from, out);
}

INLINE float exponentials(float* scores, int n, float& top) {  // in place; returns their sum
  V16 highest = splat(kLowestScore), total = splat(0.0f);
  for (int i = 0; i < n; i += 16) highest = max(highest, load(scores + i));
  top = maximum(highest);
  for (int i = 0; i < n; i += 16) {
    const V16 e = exp(load(scores + i) - splat(top));
    total = total + e;
    store(scores + i, e);
  }
  return sum(total);
}

// A state (dim mixed values, highest score, sum of exponentials) and what later positions add to it.
INLINE void merge(float* state, const float* mixed, float top, float total, int dim) {
  const float highest = state[dim] > top ? state[dim] : top;
  const V16 old = exp(splat(state[dim] - highest)), now = exp(splat(top - highest));
  for (int j = 0; j < dim; j += 16) store(state + j, fma(load(mixed + j), now, load(state + j) * old));
  state[dim] = highest;
  const V16 sums = fma(splat(total), now, splat(state[dim + 1]) * old);
  state[dim + 1] = sums.part[0][0];
}

void merge_states(float* state, const float* later, int dim) {
  merge(state, later, later[dim], later[dim + 1], dim);
}

struct Range {
  int first, last;  // positions, both included
};

// What queries from .. to - 1 see of a chunk, all together; none where first > last.
INLINE Range seen(const AttendArgs& a, int chunk, int from, int to) {
  const int start = chunk * kChunkPositions, end = start + kChunkPositions - 1;
  const int last = a.position + (to - 1) / a.heads, oldest = a.position + from / a.heads - a.window + 1;
  return {a.window && oldest > start ? oldest : start, last < end ? last : end};
}

template <DType T, bool SCALED>
INLINE void attend_chunk(const AttendArgs& a, Ring keys, Ring values, int chunk) {
  const int start = chunk * kChunkPositions, dim = a.dim;
  const Range all = seen(a, chunk, 0, a.queries);
  for (int at = all.first / kScoredPositions * kScoredPositions; at <= all.last; at += kScoredPositions) {
    const char* tiles[kScoredTiles];
    for (int i = 0; i < kScoredTiles; ++i) {
      tiles[i] = keys.at(at / 16 + i);
      if constexpr (SCALED) __builtin_prefetch(values.at(at / 16 + i) + 16 * dim * kElementBytes<T>);
    }
    each_group(a.queries, [&](int q, auto rows) {
      constexpr int kRows = decltype(rows)::count;
      const Range range = seen(a, chunk, q, q + kRows);
      if (at > range.last || at + kScoredPositions <= range.first) return;
      score_tiles<T, SCALED, kRows>(a.query + q * dim, tiles, dim, a.scale, a.scores + q * kChunkPositions + at - start);
    });
  }
  for (int q = 0; q < a.queries; ++q) {
    // the positions that were scored for its group, as another query of it may see more
    const Range range = seen(a, chunk, q, q + 1);
    float* scores = a.scores + q * kChunkPositions;
    const int from = all.first / kScoredPositions * kScoredPositions;
    const int to = (all.last / kScoredPositions + 1) * kScoredPositions;
    for (int p = from; p < to && p < range.first; ++p) scores[p - start] = kMasked;
    for (int p = range.last + 1 > from ? range.last + 1 : from; p < to; ++p) scores[p - start] = kMasked;
    a.totals[q] = exponentials(scores + from - start, to - from, a.tops[q]);
    for (int j = 0; j < dim; j += 16) store(a.mixed + q * dim + j, splat(0.0f));
    for (int tile = all.first / 16; SCALED && tile <= all.last / 16; ++tile) {
      float* weights = scores + 16 * tile - start;
      store(weights, load(weights) * scales_of<T>(values.at(tile), dim));
    }
  }
  for (int at = all.first; at <= all.last; at = (at / kMixedPositions + 1) * kMixedPositions)
    each_group(a.queries, [&](int q, auto rows) {
      constexpr int kRows = decltype(rows)::count, kMost = kAccumulators / kParts / kRows;
      const Range range = seen(a, chunk, q, q + kRows);
      const int end = (at / kMixedPositions + 1) * kMixedPositions;
      int p = at > range.first ? at : range.first;
      while (p < end && p <= range.last) {
        // as far as the values lie one after the other: scales part the tiles
        const int stop = end <= range.last ? end : range.last + 1, tile = p / 16, in_tile = 16 - p % 16;
        const int count = SCALED && stop - p > in_tile ? in_tile : stop - p;
        mix_from<T, kRows, (kMost >= 8 ? 8 : kMost >= 4 ? 4 : kMost >= 2 ? 2 : 1)>(
            a.scores + q * kChunkPositions + p - start, values.at(tile) + p % 16 * dim * kElementBytes<T>, count, dim, 0,
            a.mixed + q * dim);
        p += count;
      }
    });
  for (int q = 0; q < a.queries; ++q)
    merge(a.states + (size_t)q * (dim + kStateExtra), a.mixed + q * dim, a.tops[q], a.totals[q], dim);
}

template <DType T, bool SCALED>
INLINE void widen_tiles(const Ring& from, int first, int last, int dim, float* to) {
  for (int tile = first; tile <= last; ++tile, to += 16 * (dim + SCALED)) {
    for (int i = 0; i < 16 * dim; i += 16) store(to + i, load_cached<T>(from.at(tile) + i * kElementBytes<T>));
    if constexpr (SCALED) store(to + 16 * dim, scales_of<T>(from.at(tile), dim));
  }
}

template <DType T>
INLINE void attend_cached(const AttendArgs& a) {
  constexpr bool kScaled = T == DType::int8;
  const int tile_bytes = 16 * (int)kv_position_bytes(a.dim, T), wide = 16 * (a.dim + kScaled);
  const Ring keys{a.keys, a.slots / 16, tile_bytes}, values{a.values, a.slots / 16, tile_bytes};
  for (int chunk = a.first_chunk; chunk <= a.last_chunk; ++chunk) {
    if (T == DType::fp32 || a.queries <= kFewQueries) {
      attend_chunk<T, kScaled>(a, keys, values, chunk);
      continue;
    }
    const Range all = seen(a, chunk, 0, a.queries);
    const int first = all.first / 16, tiles = kChunkPositions / 16;
    float* wide_values = a.widened + tiles * wide;
    widen_tiles<T, kScaled>(keys, first, all.last / 16, a.dim, a.widened + (first % tiles) * wide);
    widen_tiles<T, kScaled>(values, first, all.last / 16, a.dim, wide_values + (first % tiles) * wide);
    attend_chunk<DType::fp32, kScaled>(a, {(const char*)a.widened, tiles, 4 * wide},
                                       {(const char*)wide_values, tiles, 4 * wide}, chunk);
  }
}

void attend(const AttendArgs& a) {
  if (a.dtype == DType::bf16) return attend_cached<DType::bf16>(a);
  if (a.dtype == DType::fp16) return attend_cached<DType::fp16>(a);
  if (a.dtype == DType::int8) return attend_cached<DType::int8>(a);
  attend_cached<DType::fp32>(a);
}

}  // namespace
}  // namespace laneformer
