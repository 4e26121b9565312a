// One KV head's attention for the query heads that share it.
#pragma once
#include "vector.h"

namespace laneformer {
namespace {

// Scores of 16 positions for HEADS queries, which share every key that is loaded; the next tile is prefetched.
template <int HEADS>
INLINE void score_tile(const float* query, const float* tile, int dim, float scale, float* scores, int n) {
  V16 s[HEADS][4];
  for (auto& head : s)
    for (auto& v : head) v = splat(0.0f);
  for (int j = 0; j < dim; j += 4)
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      __builtin_prefetch(tile + (dim + j + u) * 16);
      const V16 keys = load(tile + (j + u) * 16);
#pragma GCC unroll 2
      for (int h = 0; h < HEADS; ++h) s[h][u] = fma(splat(query[h * dim + j + u]), keys, s[h][u]);
    }
  for (int h = 0; h < HEADS; ++h)
    store(scores + h * n, ((s[h][0] + s[h][1]) + (s[h][2] + s[h][3])) * splat(scale));
}

// CHUNKS * 16 dimensions of the weighted sum of values, for HEADS rows of n weights.
template <int HEADS, int CHUNKS>
INLINE void mix_values(const AttendArgs& a, int origin, int n, const float* inverse, int from, float* out) {
  V16 s[HEADS][CHUNKS];
  for (auto& head : s)
    for (auto& v : head) v = splat(0.0f);
  int slot = a.first % a.slots;
  for (int p = a.first; p <= a.last; ++p) {
    const float* value = a.values + (size_t)slot * a.dim + from;
#pragma GCC unroll 8
    for (int c = 0; c < CHUNKS; ++c) {
      __builtin_prefetch(value + 16 * c + 16 * a.dim);
      const V16 v = load(value + 16 * c);
#pragma GCC unroll 2
      for (int h = 0; h < HEADS; ++h) s[h][c] = fma(splat(a.scores[h * n + p - origin]), v, s[h][c]);
    }
    if (++slot == a.slots) slot = 0;
  }
  for (int h = 0; h < HEADS; ++h)
    for (int c = 0; c < CHUNKS; ++c) store(out + h * a.dim + from + 16 * c, s[h][c] * splat(inverse[h]));
}

template <int HEADS, int CHUNKS>
INLINE int mix_chunks(const AttendArgs& a, int origin, int n, const float* inverse, int from, float* out) {
  for (; from + 16 * CHUNKS <= a.dim; from += 16 * CHUNKS) mix_values<HEADS, CHUNKS>(a, origin, n, inverse, from, out);
  return from;
}

INLINE float exponentials(float* scores, int n) {  // in place; returns one over their sum
  V16 top = load(scores), total = splat(0.0f);
  for (int i = 16; i < n; i += 16) top = max(top, load(scores + i));
  const V16 highest = splat(maximum(top));
  for (int i = 0; i < n; i += 16) {
    const V16 e = exp(load(scores + i) - highest);
    total = total + e;
    store(scores + i, e);
  }
  return 1.0f / sum(total);
}

template <int HEADS>
INLINE void attend_heads(const AttendArgs& a, int head) {
  const int first_tile = a.first / 16, last_tile = a.last / 16, origin = first_tile * 16;
  const int n = (last_tile - first_tile + 1) * 16, tiles = a.slots / 16;
  const float* query = a.query + head * a.dim;
  for (int t = first_tile; t <= last_tile; ++t)
    score_tile<HEADS>(query, a.keys + (size_t)(t % tiles) * 16 * a.dim, a.dim, a.scale, a.scores + (t * 16 - origin), n);
  float inverse[HEADS];
  for (int h = 0; h < HEADS; ++h) {
    float* scores = a.scores + h * n;
    for (int p = origin; p < a.first; ++p) scores[p - origin] = -1e30f;
    for (int p = a.last + 1; p < origin + n; ++p) scores[p - origin] = -1e30f;
    inverse[h] = exponentials(scores, n);
  }
  float* out = a.out + head * a.dim;
  int from = kWidth == 16 ? mix_chunks<HEADS, 8>(a, origin, n, inverse, 0, out) : 0;
  from = mix_chunks<HEADS, 6>(a, origin, n, inverse, from, out);
  from = mix_chunks<HEADS, 4>(a, origin, n, inverse, from, out);
  mix_chunks<HEADS, 1>(a, origin, n, inverse, from, out);
}

// Softmax over positions first..last in the order of positions, so the result does not depend on the ring's phase.
void attend(const AttendArgs& a) {
  int head = 0;
  for (; kWidth == 16 && head + kScoreRows <= a.heads; head += kScoreRows) attend_heads<kScoreRows>(a, head);
  for (; head < a.heads; ++head) attend_heads<1>(a, head);
}

}  // namespace
}  // namespace laneformer
