// The inner loops, written once over a vector of 16 floats and compiled once per instruction set (isa.cpp).
//
// V16 is one zmm, two ymm, or four xmm / NEON registers. Contraction is off (-ffp-contract=off) and `fma` is explicit,
// so AVX2 and AVX-512 give the same bits. Nothing here may use inline functions of other headers: the linker could
// pick the copy that was compiled for the newest CPU.
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels.h"

namespace laneformer {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
constexpr int kTileGroups = 2, kTileColumns = 4;  // what the registers hold: 2 * groups * columns accumulators
#elif defined(__AVX2__)
constexpr int kWidth = 8;
constexpr int kTileGroups = 1, kTileColumns = 2;
#else
constexpr int kWidth = 4;
constexpr int kTileGroups = 1, kTileColumns = 1;
#endif
constexpr int kParts = 16 / kWidth;
#define INLINE inline __attribute__((always_inline))
#define EACH_PART _Pragma("GCC unroll 4") for (int i = 0; i < kParts; ++i)

typedef float F __attribute__((vector_size(4 * kWidth), may_alias));
typedef int32_t I __attribute__((vector_size(4 * kWidth), may_alias));
typedef float FU __attribute__((vector_size(4 * kWidth), may_alias, aligned(4)));

struct V16 {
  F part[kParts];
};

INLINE F fma_part(F a, F b, F c) {
#if defined(__AVX512F__)
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

INLINE V16 splat(float x) {
  V16 v;
  EACH_PART v.part[i] = x - F{};
  return v;
}
INLINE V16 load(const float* x) {
  V16 v;
  EACH_PART v.part[i] = (F) * (const FU*)(x + i * kWidth);
  return v;
}
INLINE void store(float* x, V16 v) { EACH_PART* (FU*)(x + i * kWidth) = (FU)v.part[i]; }
INLINE V16 fma(V16 a, V16 b, V16 c) {
  EACH_PART c.part[i] = fma_part(a.part[i], b.part[i], c.part[i]);
  return c;
}
#define OPERATOR(op)                              \
  INLINE V16 operator op(V16 a, V16 b) {          \
    EACH_PART a.part[i] = a.part[i] op b.part[i]; \
    return a;                                     \
  }
OPERATOR(+)
OPERATOR(-)
OPERATOR(*)
OPERATOR(/)
INLINE V16 max(V16 a, V16 b) {
  EACH_PART a.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
  return a;
}

INLINE float sum(V16 v) {  // pairwise, the same tree for every width
  float x[16];
  store(x, v);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
}
INLINE float maximum(V16 v) {
  float x[16];
  store(x, v);
  for (int i = 1; i < 16; ++i) x[0] = x[i] > x[0] ? x[i] : x[0];
  return x[0];
}

// e^x to about 1 ulp for x <= 88; below -87 it is zero. x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial for e^r.
INLINE V16 exp(V16 x) {
  V16 out;
  EACH_PART {
    const F v = x.part[i];
    const F magic = 12582912.0f - F{};  // 1.5 * 2^23: adding it rounds to an integer held in the low mantissa bits
    const F lowest = -87.0f - F{};
    const F clamped = v > lowest ? v : lowest;
    const F shifted = fma_part(clamped, 1.44269504f - F{}, magic);
    const F n = shifted - magic;
    F r = fma_part(n, -0.693359375f - F{}, clamped);
    r = fma_part(n, 2.12194440e-4f - F{}, r);
    F p = 1.9875691500e-4f - F{};
    p = fma_part(p, r, 1.3981999507e-3f - F{});
    p = fma_part(p, r, 8.3334519073e-3f - F{});
    p = fma_part(p, r, 4.1665795894e-2f - F{});
    p = fma_part(p, r, 1.6666665459e-1f - F{});
    p = fma_part(p, r, 5.0000001201e-1f - F{});
    p = fma_part(p, r * r, r) + 1.0f;
    const F scaled = (F)((I)p + ((I)shifted << 23));
    out.part[i] = v > lowest ? scaled : F{};
  }
  return out;
}

// --- matrices ---------------------------------------------------------------------------------------------------

template <DType T>
constexpr int kPairBytes = T == DType::fp32 ? 128 : T == DType::int8 ? 32 : 64;  // one group of 16 rows, two inputs

#if defined(__AVX512F__) || defined(__F16C__)
INLINE F half_part(const uint16_t* x) {
#if defined(__AVX512F__)
  return (F)_mm512_maskz_cvtph_ps(0xffff, _mm256_load_si256((const __m256i*)x));
#else
  return (F)_mm256_cvtph_ps(_mm_load_si128((const __m128i*)x));
#endif
}
#else
INLINE F half_part(const uint16_t* x) {  // finite fp16 only: the exponent is moved by a multiplication with 2^112
  typedef uint16_t H __attribute__((vector_size(2 * kWidth), may_alias));
  const I bits = __builtin_convertvector(*(const H*)x, I);
  const F magnitude = (F)((bits & 0x7fff) << 13) * 5.192296858534828e33f;
  return (F)((I)magnitude | ((bits & 0x8000) << 16));
}
#endif

// Two inputs' weights of one group of a tile. Those of int8 come 2^24 times too large: the byte stays on top.
template <DType T>
INLINE void load_pair(const char* tile, int group, V16& even, V16& odd) {
  const char* w = tile + (T == DType::int8 ? 0 : group * kPairBytes<T>);
  EACH_PART {
    if constexpr (T == DType::int8) {
      const I bits = *(const I*)(w + i * 4 * kWidth);
      even.part[i] = __builtin_convertvector(group ? (bits << 8) & (int32_t)0xff000000 : bits << 24, F);
      odd.part[i] = __builtin_convertvector((bits << (group ? 0 : 16)) & (int32_t)0xff000000, F);
    } else if constexpr (T == DType::bf16) {
      const I bits = *(const I*)(w + i * 4 * kWidth);
      even.part[i] = (F)(bits << 16);
      odd.part[i] = (F)(bits & (int32_t)0xffff0000);
    } else if constexpr (T == DType::fp16) {
      even.part[i] = half_part((const uint16_t*)w + i * kWidth);
      odd.part[i] = half_part((const uint16_t*)w + 16 + i * kWidth);
    } else {
      even.part[i] = *(const F*)(w + i * 4 * kWidth);
      odd.part[i] = *(const F*)(w + 64 + i * 4 * kWidth);
    }
  }
}

INLINE void store_rows(float* y, V16 v, int valid) {
  if (valid >= 16) return store(y, v);
  float x[16];
  store(x, v);
  for (int i = 0; i < valid; ++i) y[i] = x[i];
}

#ifndef LANEFORMER_PREFETCH
#define LANEFORMER_PREFETCH 4096  // bytes ahead; about one DRAM latency at full speed
#endif

// GROUPS groups of 16 rows of one tile, from `first`, times COLUMNS inputs. Even and odd inputs have accumulators of
// their own; a row's scale is applied once, to its sum.
template <DType T, int GROUPS, int COLUMNS>
INLINE void multiply_groups(const char* w, int first, int k_pairs, const float* x, int x_stride, float* y, int y_stride,
                            int valid) {
  constexpr int kBytes = kPairBytes<T>;
  V16 even[GROUPS][COLUMNS], odd[GROUPS][COLUMNS];
  for (int g = 0; g < GROUPS; ++g)
    for (int c = 0; c < COLUMNS; ++c) even[g][c] = odd[g][c] = splat(0.0f);
  for (int k = 0; k < k_pairs; ++k, w += 2 * kBytes) {
    if constexpr (COLUMNS == 1) {
      for (int line = 0; line < GROUPS * kBytes; line += 64) __builtin_prefetch(w + LANEFORMER_PREFETCH + line);
    }
    V16 w_even[GROUPS], w_odd[GROUPS];
#pragma GCC unroll 2
    for (int g = 0; g < GROUPS; ++g) load_pair<T>(w, first + g, w_even[g], w_odd[g]);
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c) {
      const V16 x_even = splat(x[c * x_stride + 2 * k]), x_odd = splat(x[c * x_stride + 2 * k + 1]);
#pragma GCC unroll 2
      for (int g = 0; g < GROUPS; ++g) {
        even[g][c] = fma(w_even[g], x_even, even[g][c]);
        odd[g][c] = fma(w_odd[g], x_odd, odd[g][c]);
      }
    }
  }
  for (int g = 0, row = 16 * first; g < GROUPS; ++g, row += 16)
    for (int c = 0; c < COLUMNS; ++c) {
      V16 total = even[g][c] + odd[g][c];
      if constexpr (T == DType::int8) total = total * splat(0x1p-24f) * load((const float*)w + row);
      store_rows(y + c * y_stride + row, total, valid - row);
    }
}

template <DType T, int GROUPS, int COLUMNS>
INLINE void multiply_tile(const char* w, int k_pairs, const float* x, int x_stride, float* y, int y_stride, int valid) {
#pragma GCC unroll 2
  for (int g = 0; g < 2; g += GROUPS)
    multiply_groups<T, GROUPS, COLUMNS>(w, g, k_pairs, x, x_stride, y, y_stride, valid);
}

template <DType T>
void matmul(const void* tiles, int rows, int k_pairs, const float* x, int x_stride, float* y, int y_stride,
            int columns) {
  const char* w = (const char*)tiles;
  for (int row = 0; row < rows; row += kTileRows, w += tile_bytes(k_pairs, T)) {
    int c = 0;
    for (; c + kTileColumns <= columns && kTileColumns > 1; c += kTileColumns)
      multiply_tile<T, kTileGroups, kTileColumns>(w, k_pairs, x + c * x_stride, x_stride, y + c * y_stride + row,
                                                  y_stride, rows - row);
    for (; c < columns; ++c)
      multiply_tile<T, 2, 1>(w, k_pairs, x + c * x_stride, x_stride, y + c * y_stride + row, y_stride, rows - row);
  }
}

#if defined(__AVX512BF16__)
// Activations are packed bf16 pairs. Four accumulators per column: the instruction's latency is longer than an FMA's.
template <int COLUMNS>
INLINE void multiply_bf16_pairs(const char* w, int k_pairs, const float* x, int x_stride, float* y, int y_stride,
                                int valid) {
  __m512 sums[2][2][COLUMNS];
  for (auto& parity : sums)
    for (auto& group : parity)
      for (auto& s : group) s = _mm512_setzero_ps();
  for (int k = 0; k < k_pairs; ++k, w += 128) {
    if constexpr (COLUMNS == 1) {
      __builtin_prefetch(w + LANEFORMER_PREFETCH);
      __builtin_prefetch(w + LANEFORMER_PREFETCH + 64);
    }
    for (int c = 0; c < COLUMNS; ++c) {
      const auto pair = (__m512bh)_mm512_set1_ps(x[c * x_stride + k]);
      for (int g = 0; g < 2; ++g) {
        const auto weights = (__m512bh)_mm512_load_si512(w + 64 * g);
        // rotate the accumulators instead of indexing by k & 1, so that they stay in registers
        const __m512 next = _mm512_dpbf16_ps(sums[0][g][c], weights, pair);
        sums[0][g][c] = sums[1][g][c];
        sums[1][g][c] = next;
      }
    }
  }
  for (int g = 0; g < 2; ++g)
    for (int c = 0; c < COLUMNS; ++c) {
      V16 total;
      total.part[0] = (F)_mm512_add_ps(sums[0][g][c], sums[1][g][c]);
      store_rows(y + c * y_stride + 16 * g, total, valid - 16 * g);
    }
}

void matmul_bf16_pairs(const void* tiles, int rows, int k_pairs, const float* x, int x_stride, float* y, int y_stride,
                       int columns) {
  const char* w = (const char*)tiles;
  for (int row = 0; row < rows; row += kTileRows, w += tile_bytes(k_pairs, DType::bf16)) {
    int c = 0;
    for (; c + 4 <= columns; c += 4)
      multiply_bf16_pairs<4>(w, k_pairs, x + c * x_stride, x_stride, y + c * y_stride + row, y_stride, rows - row);
    for (; c < columns; ++c)
      multiply_bf16_pairs<1>(w, k_pairs, x + c * x_stride, x_stride, y + c * y_stride + row, y_stride, rows - row);
  }
}
#endif

// --- norms, gates, joins ----------------------------------------------------------------------------------------

void rms_norm(const float* h, const float* scale, float eps, int size, int n, float* out) {
  V16 squares[2] = {splat(0.0f), splat(0.0f)};
  for (int i = 0; i < n; i += 16) {
    const V16 v = load(h + i);
    squares[(i / 16) & 1] = fma(v, v, squares[(i / 16) & 1]);
  }
  const float mean = sum(squares[0] + squares[1]) / (float)size;
  const V16 factor = splat(1.0f / __builtin_sqrtf(mean + eps));
  for (int i = 0; i < n; i += 16) store(out + i, load(h + i) * factor * load(scale + i));
}

void silu_gate(const float* gate_up, int tiles, float* out) {
  const V16 one = splat(1.0f), zero = splat(0.0f);
  for (int t = 0; t < tiles; ++t) {
    const V16 gate = load(gate_up + 32 * t), up = load(gate_up + 32 * t + 16);
    store(out + 16 * t, gate / (one + exp(zero - gate)) * up);
  }
}

void add(float* h, const float* p, int n) {
  for (int i = 0; i < n; i += 16) store(h + i, load(h + i) + load(p + i));
}
void add_scaled(float* h, const float* p, float factor, int n) {
  const V16 f = splat(factor);
  for (int i = 0; i < n; i += 16) store(h + i, fma(f, load(p + i), load(h + i)));
}
void add_past(float* h, const float* p, const float* total, const float* own, int n) {
  for (int i = 0; i < n; i += 16) store(h + i, load(h + i) + load(p + i) + (load(total + i) - load(own + i)));
}
void sum_rows(const float* rows, size_t stride, int count, float* out, int n) {
  for (int i = 0; i < n; i += 16) {
    V16 total = load(rows + i);
    for (int r = 1; r < count; ++r) total = total + load(rows + r * stride + i);
    store(out + i, total);
  }
}

double log_sum_exp(const float* x, int n) {
  float top = x[0];
  for (int i = 1; i < n; ++i) top = x[i] > top ? x[i] : top;
  double total = 0.0;
  for (int i = 0; i < n; i += 16) {
    float e[16];
    for (int j = 0; j < 16; ++j) e[j] = i + j < n ? x[i + j] - top : -1e30f;
    total += (double)sum(exp(load(e)));
  }
  return (double)top + __builtin_log(total);
}

// --- attention --------------------------------------------------------------------------------------------------

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

// --- bf16 activations, the probe --------------------------------------------------------------------------------

INLINE uint32_t bf16_bits(float x) {  // round to nearest even, in the high half
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  return (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
}
void round_to_bf16(const float* x, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = __builtin_bit_cast(float, bf16_bits(x[i]));
}
void to_bf16_pairs(const float* x, int n, float* out) {
  for (int i = 0; i < n / 2; ++i) {
    const uint32_t pair = (bf16_bits(x[2 * i]) >> 16) | bf16_bits(x[2 * i + 1]);
    __builtin_memcpy(out + i, &pair, 4);
  }
}

template <int PREFETCH>
INLINE uint64_t read_stream(const char* p, size_t size) {
  I s[4][kParts] = {};
  for (size_t at = 0; at < size; at += 256) {
    if constexpr (PREFETCH > 0)
      for (int line = 0; line < 256; line += 64) __builtin_prefetch(p + at + PREFETCH + line);
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) EACH_PART s[u][i] ^= *(const I*)(p + at + 64 * u + 4 * kWidth * i);
  }
  uint64_t total = 0;
  for (auto& quarter : s)
    for (auto& part : quarter)
      for (int i = 0; i < kWidth; ++i) total += (uint32_t)part[i];
  return total;
}

uint64_t read(const void* bytes, size_t size, int variant) {
  const char* p = (const char*)bytes;
  if (variant == 0) return read_stream<0>(p, size);
  return variant == 1 ? read_stream<1024>(p, size) : read_stream<4096>(p, size);
}

constexpr Kernels kernels_named(const char* isa) {
  Kernels k{};
  k.isa = isa;
  k.matmul[0] = matmul<DType::bf16>, k.matmul[1] = matmul<DType::fp16>, k.matmul[2] = matmul<DType::fp32>;
  k.matmul[3] = matmul<DType::int8>;
#if defined(__AVX512BF16__)
  k.matmul_bf16_pairs = matmul_bf16_pairs;
#endif
  k.rms_norm = rms_norm, k.silu_gate = silu_gate, k.attend = attend;
  k.add = add, k.add_scaled = add_scaled, k.add_past = add_past, k.sum_rows = sum_rows;
  k.log_sum_exp = log_sum_exp, k.round_to_bf16 = round_to_bf16, k.to_bf16_pairs = to_bf16_pairs, k.read = read;
  return k;
}

}  // namespace
}  // namespace laneformer
