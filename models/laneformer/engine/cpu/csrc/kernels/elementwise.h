// Norms, gates, joins, and what measures the bandwidth.
#pragma once
#include "vector.h"

namespace laneformer {
namespace {

void rms_norm(const float* h, const float* scale, float eps, int size, int n, float* out) {
  V16 even = splat(0.0f), odd = even;
  int done = 0;
  for (; done + 32 <= n; done += 32) {
    const V16 first = load(h + done), second = load(h + done + 16);
    even = fma(first, first, even), odd = fma(second, second, odd);
  }
  if (done < n) even = fma(load(h + done), load(h + done), even);
  const float mean = sum(even + odd) / (float)size;
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

// Of tanh: 0.5 (1 + tanh(u)) is a sigmoid of 2 u.
void gelu_gate(const float* gate_up, int tiles, float* out) {
  const V16 one = splat(1.0f), twice = splat(-1.5957691216057308f), cubic = splat(0.044715f);
  for (int t = 0; t < tiles; ++t) {
    const V16 gate = load(gate_up + 32 * t), up = load(gate_up + 32 * t + 16);
    const V16 inner = gate * fma(cubic, gate * gate, one);
    store(out + 16 * t, gate / (one + exp(twice * inner)) * up);
  }
}

// gpt-oss: gates are at most 7, ups from -7 to 7 and one more; of the gate a SiLU whose sigmoid is steeper.
void swiglu_oai_gate(const float* gate_up, int tiles, float* out) {
  const V16 one = splat(1.0f), steep = splat(-1.702f), limit = splat(7.0f), lowest = splat(-7.0f);
  for (int t = 0; t < tiles; ++t) {
    const V16 gate = min(load(gate_up + 32 * t), limit), up = max(min(load(gate_up + 32 * t + 16), limit), lowest);
    store(out + 16 * t, gate / (one + exp(steep * gate)) * (up + one));
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

bool to_halves(const float* x, int n, uint16_t* out) {
  int i = 0;
  bool fits = true;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    const __m256 v = _mm256_loadu_ps(x + i), magnitudes = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v);
    fits &= _mm256_movemask_ps(_mm256_cmp_ps(magnitudes, _mm256_set1_ps(65520.0f), _CMP_LT_OQ)) == 0xff;
    _mm_storeu_si128((__m128i*)(out + i), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  for (; i < n; ++i) fits &= ((out[i] = float_to_half(x[i])) & 0x7c00) != 0x7c00;
  return fits;
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

// The bandwidth probe: plain read loops.
uint64_t read(const void* bytes, size_t size, size_t ahead) {
  const char* p = (const char*)bytes;
  I s[4][kParts] = {};
  for (size_t at = 0; at < size; at += 256) {
    for (int line = 0; line < 256; line += 64) __builtin_prefetch(p + at + ahead + line);
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) EACH_PART s[u][i] ^= *(const I*)(p + at + 64 * u + 4 * kWidth * i);
  }
  uint64_t total = 0;
  for (auto& quarter : s)
    for (auto& part : quarter)
      for (int i = 0; i < kWidth; ++i) total += (uint32_t)part[i];
  return total;
}

}  // namespace
}  // namespace laneformer
