// V16, a vector of 16 floats, and its operations: one zmm, two ymm, or four xmm / NEON registers.
//
// Contraction is off (-ffp-contract=off) and `fma` is explicit, so AVX2 and AVX-512 give the same bits.
#pragma once
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../kernels.h"

namespace laneformer {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kParts = 16 / kWidth;
#define INLINE inline __attribute__((always_inline))
#define EACH_PART _Pragma("GCC unroll 4") for (int i = 0; i < kParts; ++i)

typedef float F __attribute__((vector_size(4 * kWidth), may_alias));
typedef int32_t I __attribute__((vector_size(4 * kWidth), may_alias));
typedef int8_t Narrow __attribute__((vector_size(kWidth), may_alias, aligned(1)));
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
INLINE V16 min(V16 a, V16 b) {
  EACH_PART a.part[i] = a.part[i] < b.part[i] ? a.part[i] : b.part[i];
  return a;
}

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

// 16 integers of 8 bits. By instructions: compilers (GCC 12) take a conversion to 32 bits apart, byte by byte.
INLINE V16 signed_bytes(const char* w) {
  V16 v;
  EACH_PART {
    const char* from = w + i * kWidth;
#if defined(__AVX512F__)
    v.part[i] = (F)_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, *(const __m128i*)from));
#elif defined(__AVX2__)
    v.part[i] = (F)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#elif defined(__aarch64__)
    const int8x8_t bytes = vreinterpret_s8_u32(vld1_dup_u32((const uint32_t*)from));
    v.part[i] = (F)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
#else
    v.part[i] = __builtin_convertvector(__builtin_convertvector(*(const Narrow*)from, I), F);
#endif
  }
  return v;
}

// Folds a vector's upper half into its lower one until one number is left: the same tree for every width.
template <int N, class T, class Op>
INLINE T fold(const T* x, const Op& op) {
  typedef T Half __attribute__((vector_size(N / 2 * sizeof(T)), may_alias));
  const Half half = op(*(const Half*)x, *(const Half*)(x + N / 2));
  if constexpr (N == 2) return half[0];
  else return fold<N / 2>((const T*)&half, op);
}
INLINE float sum(V16 v) {
  return fold<16>((const float*)&v, [](auto a, auto b) { return a + b; });
}
INLINE float maximum(V16 v) {
  return fold<16>((const float*)&v, [](auto a, auto b) { return b > a ? b : a; });
}

// e^x to about 1 ulp; zero below -87, and above 88.7, where float ends, e^88.7: an exponent beyond would wrap into the
// sign. x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial for e^r.
INLINE V16 exp(V16 x) {
  V16 out;
  EACH_PART {
    const F v = x.part[i];
    const F magic = 12582912.0f - F{};  // 1.5 * 2^23: adding it rounds to an integer held in the low mantissa bits
    const F lowest = -87.0f - F{}, highest = 88.7f - F{};
    const F above = v > lowest ? v : lowest, clamped = above < highest ? above : highest;
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

}  // namespace
}  // namespace laneformer
